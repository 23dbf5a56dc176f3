"""A conversation as token ids, without a terminal: what was said, what the model has seen, and what it still holds.

The key/value cache is kept from one answer to the next. Before each answer it is trimmed to what its ids and those
of the new prompt have in common, so undoing, editing, loading or interrupting can leave nothing stale behind, and only
new tokens are computed.

    conversation = Conversation(model, tokenizer, InstructFormat(tokenizer))
    for response in conversation.answer(conversation.prepare("Hello!", max_tokens=256), max_tokens=256):
        print(response.text, end="")
"""

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any, cast

from ..cache import KVCache
from ..cache_arguments import kept_tokens
from ..common_prefix import common_prefix
from ..errors import GenerationError
from ..generation import GenerationResponse, stream_generate
from ..model import Model
from ..sampling import with_history
from ..tokenizer import Tokenizer
from .format import ChatFormat, Turn


@dataclass(frozen=True)
class Prompt:
    """A checked request: `ids` is all that the model is to see, the first `held` of which it holds already."""

    user: str
    ids: list[int]
    held: int
    turns: tuple[Turn, ...]  # what came before, forgotten turns included
    dropped: int  # how many of these are forgotten, oldest first


class Conversation:
    """Turns of user and model, and a cache that follows them."""

    def __init__(
        self,
        model: Model,
        tokenizer: Tokenizer,
        chat_format: ChatFormat,
        *,
        system: str = "",
        max_context: int | None = None,
        make_cache: Callable[[int], list[KVCache]] | None = None,
    ) -> None:
        """max_context: use less than the model's context. make_cache: other caches than the model's own kind,
        given how many first tokens (BOS and the system prompt) must stay.

        Raises GenerationError for a limit that the model does not have, or a system prompt that has no place.
        """
        self.model, self.tokenizer, self.format = model, tokenizer, chat_format
        self.limit = _checked_limit(max_context, model.config.max_context_length)
        self.turns: tuple[Turn, ...] = ()
        self._cache: list[KVCache] = []
        self._cached_ids: list[int] = []  # what the cache holds keys and values of
        self.dropped = 0  # the oldest turns that the model no longer sees
        self.system = ""
        self._make_cache = make_cache or (lambda keep: model.make_cache())
        self.set_system(system)

    @property
    def ids(self) -> list[int]:
        """All that the next prompt continues: the history as the model sees it."""
        return self.history(self.system, self.turns[self.dropped :])

    def history(self, system: str, turns: Sequence[Turn]) -> list[int]:
        """The ids of a conversation up to its last answer, without the EOS that will follow it."""
        if not turns:
            return []
        *before, last = turns
        return [*self.format.encode(system, before, last.user), *last.ids]

    @property
    def cache_bytes(self) -> int:
        """Memory allocated for keys and values."""
        return sum(layer.nbytes for layer in self._cache)

    def prepare(self, user: str, *, max_tokens: int, replace: bool = False) -> Prompt:
        """The prompt that asks for an answer to `user`, after the last turn or (with `replace`) instead of it.

        Where less than `max_tokens` (or a quarter of the context, if that is less) would stay free, the oldest turns
        are left out: whole ones, as many as it takes to free half of the context, so that this does not come again
        with every turn. Raises GenerationError, with numbers, when the message alone does not fit. Changes nothing.
        """
        turns = self.turns[:-1] if replace else self.turns
        first = min(self.dropped, len(turns))
        least, dropped = min(max_tokens, self.limit // 4), first
        if self._room(turns, first, user) < least:
            fitting = (self._fitting(turns, first, user, free) for free in (self.limit // 2, least))
            dropped = next((count for count in fitting if count is not None), len(turns))
        ids = self.format.encode(self.system, turns[dropped:], user)
        if len(ids) >= self.limit:
            raise GenerationError(
                f"the message makes a prompt of {len(ids)} tokens on its own, and the context is {self.limit}: "
                f"shorten it by {len(ids) - self.limit + 1} tokens or more"
            )
        return Prompt(user, ids, self._held(ids), turns, dropped)

    def answer(self, prompt: Prompt, *, max_tokens: int, **settings: Any) -> Generator[GenerationResponse, None, None]:
        """Generate the answer to a prompt just prepared; `settings` are those of `stream_generate`.

        The turn becomes part of the conversation with its first token. Closing the iterator early interrupts the
        answer and keeps what was said. A prompt that never got a token leaves the conversation as it was.
        """
        self._trim(len(self._cached_ids) - prompt.held)
        self._cached_ids = history = prompt.ids[: prompt.held]
        processors = [with_history(history, process) for process in settings.pop("logits_processors", ())]
        responses = stream_generate(
            self.model,
            self.tokenizer,
            prompt.ids[prompt.held :],
            min(max_tokens, self.limit - len(prompt.ids)),
            cache=self._cache,
            logits_processors=processors,
            **settings,
        )
        return self._answer(prompt, responses)

    def _answer(
        self, prompt: Prompt, responses: Iterator[GenerationResponse]
    ) -> Generator[GenerationResponse, None, None]:
        tokens: list[int] = []
        texts: list[str] = []
        reason = "interrupted"
        try:
            with closing(cast(Generator[GenerationResponse, None, None], responses)):
                for response in responses:
                    tokens.append(response.token)
                    texts.append(response.text)
                    reason = response.finish_reason or reason
                    yield response
        except GeneratorExit:
            raise
        except BaseException:  # a step was left half done, in some layers and not in others
            self.forget_cache()
            raise
        finally:
            self._remember(prompt, tokens)
            if tokens:
                ended = tokens[-1] in self.tokenizer.eos_token_ids
                turn = Turn(prompt.user, "".join(texts), tuple(tokens[:-1] if ended else tokens), reason)
                self.turns, self.dropped = (*prompt.turns, turn), prompt.dropped

    def undo(self) -> Turn:
        """Take the last turn back and return it. Raises GenerationError when there is none."""
        if not self.turns:
            raise GenerationError("the conversation is empty: there is no turn to go back to")
        last = self.turns[-1]
        self.turns = self.turns[:-1]
        self.dropped = min(self.dropped, len(self.turns))
        return last

    def reset(self) -> None:
        """Forget every turn; the system prompt stays."""
        self.turns, self.dropped = (), 0

    def set_system(self, system: str) -> None:
        """Change the system prompt, for the whole conversation so far as well. Raises GenerationError."""
        if len(self.format.encode(system, (), "")) >= self.limit:
            raise GenerationError(
                f"the system prompt and what frames it fill the context of {self.limit} tokens: shorten it"
            )
        self.system = system
        self.forget_cache()  # hardly anything of it would serve, and a bounded one has to keep other tokens

    def restore(self, system: str, turns: Sequence[Turn], dropped: int) -> None:
        """Become another conversation, a saved one."""
        self.set_system(system)
        self.turns, self.dropped = tuple(turns), dropped

    def forget_cache(self) -> None:
        """Begin with an empty cache: the next answer computes its whole prompt."""
        keep = kept_tokens(self.format.encode(self.system, (), ""), self.tokenizer.eos_token_id)
        self._cache = self._make_cache(keep)
        self._cached_ids = []

    def _room(self, turns: Sequence[Turn], dropped: int, user: str) -> int:
        """How many tokens of the context are free for an answer once `dropped` turns are left out."""
        return self.limit - len(self.format.encode(self.system, turns[dropped:], user))

    def _fitting(self, turns: Sequence[Turn], first: int, user: str, free: int) -> int | None:
        """The fewest turns to leave out, from `first` on, so that `free` tokens are free; None where that is not so."""
        counts = range(first, len(turns) + 1)
        return next((count for count in counts if self._room(turns, count, user) >= free), None)

    def _held(self, ids: Sequence[int]) -> int:
        """How many of a prompt's first ids need not be computed again; one at least must be."""
        common = min(common_prefix(self._cached_ids, ids), len(ids) - 1)
        return common if common == len(self._cached_ids) or self._is_trimmable() else 0

    def _is_trimmable(self) -> bool:
        return all(layer.is_trimmable() for layer in self._cache)

    def _trim(self, count: int) -> None:
        """Let the cache forget its newest `count` tokens, or all where its kind cannot do that."""
        if count and not self._is_trimmable():
            self.forget_cache()
        elif count:
            for layer in self._cache:
                layer.trim(count)

    def _remember(self, prompt: Prompt, tokens: list[int]) -> None:
        """Note which ids the cache now holds: not always the last one, and perhaps more than were handed out."""
        known = [*prompt.ids, *tokens]
        self._trim(max(0, self._cache[0].offset - len(known)))
        self._cached_ids = known[: self._cache[0].offset]


def _checked_limit(asked: int | None, context: int) -> int:
    if asked is not None and not 1 <= asked <= context:
        raise GenerationError(f"the context limit must be between 1 and the model's own {context}, got {asked}")
    return asked or context
