"""How a conversation becomes the ids of a prompt: OpenELM-Instruct's form, or plain text for a base model.

A format is a function of the messages: it encodes what was typed, and takes over what the model generated id by id.
So an answer is never encoded again, and text never becomes a control id. `template` has the third format, for a
folder that brings a template of its own.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

from ..errors import GenerationError
from ..prompt import encode_chat
from ..tokenizer import BOS, EOS, Tokenizer

FINISH_REASONS = ("stop", "length", "interrupted")


@dataclass(frozen=True)
class Turn:
    """What was asked and what was answered. `ids` are the answer's as generated, without the EOS that ended it."""

    user: str
    answer: str
    ids: tuple[int, ...]
    finish_reason: str


class ChatFormat(Protocol):
    """A way to write down a conversation. `name` is what a saved one is marked with."""

    @property
    def name(self) -> str: ...

    def encode(self, system: str, turns: Sequence[Turn], user: str) -> list[int]:
        """The ids of the whole prompt that asks for an answer to `user`. Raises GenerationError for what has no place.

        What the model said last is followed by EOS where the format has one, also where the answer was cut short.
        """


class InstructFormat:
    """The form that OpenELM-Instruct was trained on: `prompt.encode_chat`, turn by turn."""

    name = "instruct"

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._later_turn = lru_cache(maxsize=1024)(self._encode_later_turn)

    def encode(self, system: str, turns: Sequence[Turn], user: str) -> list[int]:
        first, *later = [*(turn.user for turn in turns), user]
        ids = encode_chat(self._tokenizer, [{"role": "system", "content": system}, {"role": "user", "content": first}])
        for turn, text in zip(turns, later, strict=True):
            ids += [*turn.ids, *self._later_turn(text)]
        return ids

    def _encode_later_turn(self, user: str) -> list[int]:
        """From the EOS that ends the turn before: the same ids follow an empty system turn in a chat of one turn."""
        ids = encode_chat(self._tokenizer, [{"role": "user", "content": user}])
        return ids[ids.index(self._tokenizer.eos_token_id) :]


class CompletionFormat:
    """One growing text, for models that only continue: what is typed is appended, and the model goes on from there."""

    name = "completion"

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def encode(self, system: str, turns: Sequence[Turn], user: str) -> list[int]:
        if system:
            raise GenerationError(
                "a base model only continues text and was never trained on a system prompt: put it into your text, "
                "or use an Instruct model (--instruct forces its form)"
            )
        ids = [self._tokenizer.bos_token_id]
        for turn in turns:
            ids += [*self._tokenizer.encode_segment(turn.user), *turn.ids]
        return ids + self._tokenizer.encode_segment(user)


def spell(tokenizer: Tokenizer, ids: Sequence[int]) -> str:
    """The text of a prompt's ids, control ids spelled `<s>` and `</s>`: to look at, never to encode."""
    names = {tokenizer.bos_token_id: BOS, tokenizer.eos_token_id: EOS}
    text, segment = "", list[int]()
    for token in ids:
        if token in names:
            text += tokenizer.decode(segment) + names[token]
            segment = []
        else:
            segment.append(token)
    return text + tokenizer.decode(segment)
