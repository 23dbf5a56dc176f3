"""A chat between its input and its output: a line comes in, a turn or a command comes of it, a view shows it.

Knows no terminal: `terminal` and `script` each bring a view. Whatever a line does wrong is one line of error
and never ends the chat.
"""

from collections.abc import Generator, Iterator
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from ..drafts import Drafter
from ..errors import OpenELMError
from ..generation import GenerationResponse
from . import commands
from .conversation import Conversation, Prompt
from .format import spell
from .settings import ChatSettings


class View(Protocol):
    """How a chat is seen."""

    def show(self, text: str) -> None:
        """What a command was asked to tell."""

    def notice(self, text: str) -> None:
        """A remark beside the conversation."""

    def error(self, text: str) -> None:
        """Why something was not done."""

    def answer(self, prompt: Prompt, responses: Iterator[GenerationResponse]) -> None:
        """Show an answer as it comes. Leaving early interrupts it."""

    def edit(self, text: str) -> str | None:
        """Let the user change a text; None where that cannot be done or was given up."""


@dataclass
class Chat:
    """One conversation, its settings, and what its commands need."""

    conversation: Conversation
    settings: ChatSettings
    view: View
    model_name: str
    show_prompt: bool = False
    show_statistics: bool = True
    drafter: Drafter | None = None  # the same for every answer: it follows the tokens that the cache holds
    last_prompt: Prompt | None = None
    last: GenerationResponse | None = None  # of the last answer: its statistics
    own_files: set[Path] = field(default_factory=set)  # read or written by this chat, which may replace them

    def handle(self, line: str) -> bool:
        """Do what a line asks for; False when it asks to leave."""
        name, argument = commands.parse(line)
        try:
            if name is None:
                self.ask(line)
            elif name in commands.COMMANDS:
                return commands.COMMANDS[name].run(self, argument) != commands.LEAVE
            else:
                self.view.error(f"there is no command /{name}: /help lists them, and a space in front sends it as text")
        except OpenELMError as error:
            self.view.error(" ".join(str(error).split()))
        except (MemoryError, RuntimeError) as error:  # MLX: the device ran out of memory
            self.view.error(f"the answer failed: {' '.join(str(error).split()) or 'out of memory'}")
        return True

    def ask(self, text: str, *, replace: bool = False) -> None:
        """Get an answer to a message, after the last turn or (with `replace`) instead of it."""
        conversation, settings = self.conversation, self.settings
        prompt = conversation.prepare(text, max_tokens=settings.max_tokens, replace=replace)
        self._tell_dropped(prompt)
        if self.show_prompt:
            self.view.notice(self.spelled(prompt.ids))
        answer = conversation.answer(
            prompt, max_tokens=settings.max_tokens, drafter=self.drafter, **settings.for_generation
        )
        self.last_prompt, self.last = prompt, None
        with closing(self._noting(answer)) as responses:
            self.view.answer(prompt, responses)
        self._tell_end()

    def spelled(self, ids: list[int]) -> str:
        """A prompt as it is sent: its text, and its ids."""
        return f"{spell(self.conversation.tokenizer, ids)}\n{ids}"

    def _noting(self, answer: Generator[GenerationResponse, None, None]) -> Generator[GenerationResponse, None, None]:
        with closing(answer):
            for response in answer:
                self.last = response
                yield response

    def _tell_dropped(self, prompt: Prompt) -> None:
        count = prompt.dropped - self.conversation.dropped
        if count > 0:
            turns = "the oldest turn is" if count == 1 else f"the oldest {count} turns are"
            self.view.notice(
                f"the context of {self.conversation.limit} tokens is nearly full: {turns} no longer seen by the model "
                f"(the system prompt is); {len(prompt.ids) - prompt.held} tokens are computed again"
            )

    def _tell_end(self) -> None:
        last = self.last
        if last is None:
            self.view.notice("stopped before the first token; the message was not kept")
            return
        count, reason = last.generation_tokens, self.conversation.turns[-1].finish_reason
        tokens = "1 token" if count == 1 else f"{count} tokens"
        parts = [tokens]
        if reason == "interrupted":
            parts = [f"stopped after {tokens}"]
        elif reason == "length":
            how = f"/set max_tokens {2 * count}" if count >= self.settings.max_tokens else "the context is full"
            parts = [f"stopped at {tokens} ({how})"]
        if self.show_statistics:
            context = f"{len(self.conversation.ids)}/{self.conversation.limit}"
            parts += [f"{last.generation_tps:.1f}/s", f"first {last.ttft_s:.2f} s", f"context {context}"]
        if self.show_statistics or reason != "stop":
            self.view.notice(", ".join(parts))
