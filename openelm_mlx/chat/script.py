"""A chat without a terminal: one turn a line of stdin, the transcript on stdout.

With `--json` each turn is one object on a line of its own; a line that failed is one with `prompt` and `error`.
"""

import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass

from ..generation import GenerationResponse
from .conversation import Prompt
from .session import Chat
from .text import printable


@dataclass
class ScriptView:
    """Plain text: what was said on stdout, everything beside it on stderr."""

    failed: bool = False
    line: str = ""  # of stdin, being worked on

    def show(self, text: str) -> None:
        print(printable(text), flush=True)

    def notice(self, text: str) -> None:
        print(f"openelm: {printable(text)}", file=sys.stderr, flush=True)

    def error(self, text: str) -> None:
        self.failed = True
        print(f"openelm: error: {printable(text)}", file=sys.stderr, flush=True)

    def answer(self, prompt: Prompt, responses: Iterator[GenerationResponse]) -> None:
        print(f"> {printable(prompt.user)}", flush=True)
        for response in responses:
            print(printable(response.text), end="", flush=True)
        print("\n", flush=True)

    def edit(self, text: str) -> None:
        return None


class JsonView(ScriptView):
    """One object a turn, and nothing else on stdout."""

    def show(self, text: str) -> None:
        self.notice(text)

    def error(self, text: str) -> None:
        self.failed = True
        print(json.dumps({"prompt": self.line, "error": text}), flush=True)

    def answer(self, prompt: Prompt, responses: Iterator[GenerationResponse]) -> None:
        made = list(responses)
        last = made[-1]
        record = {
            "prompt": prompt.user,
            "text": "".join(response.text for response in made),
            "tokens": [response.token for response in made],
            "finish_reason": last.finish_reason,
            "prompt_tokens": len(prompt.ids),
            "cached_tokens": prompt.held,
            "dropped_turns": prompt.dropped,
            "generation_tokens": last.generation_tokens,
            "prompt_tps": last.prompt_tps,
            "generation_tps": last.generation_tps,
            "ttft_s": last.ttft_s,
        }
        print(json.dumps(record), flush=True)


def run_script(chat: Chat, view: ScriptView) -> int:
    """Take every line of stdin as a turn or a command; empty ones are skipped. Status 2 when one of them failed."""
    for line in sys.stdin.buffer:
        try:
            view.line = line.decode("utf-8").removesuffix("\n").removesuffix("\r")
        except UnicodeDecodeError:
            view.line = line.decode("utf-8", errors="replace").rstrip()
            view.error("this line is not UTF-8 text")
            continue
        if view.line.strip() and not chat.handle(view.line):
            break
    return 2 if view.failed else 0
