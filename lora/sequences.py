"""An example as token ids, with a mark on every id whose loss counts.

One BOS at position 0. A text, or a prompt with its completion, is encoded as one text and ends in one EOS. A chat is
encoded exactly as `openelm chat` sends it, one EOS a turn, and ends with the last turn's. The first id is never a
target: nothing stands before it. With `mask_prompt` only what is to be answered counts: what follows the ids that a
prompt and its completed text have in common; in a chat each answer and the EOS that ends it.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from ..chat.format import ChatFormat, Turn
from ..common_prefix import common_prefix
from ..errors import DataError, OpenELMError
from ..prompt import encode_chat
from ..tokenizer import Tokenizer
from .formats import Chat, Completion, Example, Text


@dataclass(frozen=True)
class Sequence:
    """One training sequence of L tokens."""

    tokens: np.ndarray  # int32 (L,)
    counted: np.ndarray  # bool (L,): whether token i is a target whose loss counts; counted[0] is always False
    row: str  # "train.jsonl:17", for messages

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def targets(self) -> int:
        """How many tokens' losses count."""
        return int(np.count_nonzero(self.counted))


class Encoder:
    """Examples to sequences, all in one way."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        mask_prompt: bool = False,
        text_eos: bool = True,
        chat_format: ChatFormat | None = None,
    ) -> None:
        """text_eos: end {"text"} rows with EOS; off for pieces of a longer text.
        chat_format: a model folder's own template, as `openelm chat` uses it; the Instruct form without.
        """
        self._tokenizer, self._mask_prompt, self._text_eos = tokenizer, mask_prompt, text_eos
        self._format = None if chat_format is None or chat_format.name == "instruct" else chat_format
        self._newline = len(tokenizer.encode_segment("\n"))
        self._answer_header = tokenizer.encode_segment("\n<|assistant|>\n")

    def encode(self, example: Example, row: str) -> Sequence:
        """Raises DataError, naming the row, for what cannot be encoded."""
        try:
            ids, answers = self._ids(example)
        except OpenELMError as error:
            raise DataError(f"{row}: {error}") from None
        counted = np.zeros(len(ids), dtype=bool)
        for start, end in answers if self._mask_prompt else [(1, len(ids))]:
            counted[start:end] = True
        counted[0] = False
        return Sequence(np.array(ids, dtype=np.int32), counted, row)

    def _ids(self, example: Example) -> tuple[list[int], list[tuple[int, int]]]:
        """The ids, and from where to where (exclusive) the answers go, each with its EOS."""
        eos = self._tokenizer.eos_token_id
        match example:
            case Text(text):
                ids = self._tokenizer.encode(text) + [eos] * self._text_eos
                return ids, [(1, len(ids))]
            case Completion(prompt, completion):
                ids = [*self._tokenizer.encode(prompt + completion), eos]
                # where the whole sequence counts, nobody asks where the prompt ends: half the work saved
                start = common_prefix(self._tokenizer.encode(prompt), ids) if self._mask_prompt else 1
                return ids, [(start, len(ids))]
            case Chat(messages):
                turns = [(message["role"], message["content"]) for message in messages]
                return self._in_template(turns, self._format) if self._format else self._in_instruct_form(turns)

    def _in_instruct_form(self, turns: list[tuple[str, str]]) -> tuple[list[int], list[tuple[int, int]]]:
        """The chat's own encoding, without the newline that only another turn would need."""
        eos = self._tokenizer.eos_token_id
        messages = [{"role": role, "content": content} for role, content in turns]
        ids = encode_chat(self._tokenizer, messages, add_generation_prompt=False)
        ends = [i + 1 for i, token in enumerate(ids) if token == eos]
        roles = [role for role, _ in turns]
        roles = roles if roles[0] == "system" else ["system", *roles]
        spans = zip(roles, [0, *ends], ends, strict=False)
        answers = [
            (start + common_prefix(self._answer_header, ids[start:end]), end)
            for role, start, end in spans
            if role == "assistant"
        ]
        return ids[: ends[-1]], answers

    def _in_template(
        self, turns: list[tuple[str, str]], chat_format: ChatFormat
    ) -> tuple[list[int], list[tuple[int, int]]]:
        """Prompt after prompt as the chat asks it, each of which must continue what came before."""
        system, pairs = _pairs(turns)
        ids: list[int] = []
        answers: list[tuple[int, int]] = []
        asked: list[Turn] = []
        eos = self._tokenizer.eos_token_id
        for user, answer in pairs:
            prompt = chat_format.encode(system, asked, user)
            before = len(ids) - 1
            if ids and prompt[:before] != ids[:before]:
                raise DataError("the model's chat template changes earlier turns when another one follows")
            if ids and prompt[before : before + 1] != [eos]:  # a template whose turns end otherwise than in EOS
                answers[-1] = (answers[-1][0], before)
            said = self._tokenizer.encode_segment("\n" + answer)[self._newline :]
            ids = [*prompt, *said, eos]
            answers.append((len(prompt), len(ids)))
            asked.append(Turn(user, answer, tuple(said), "stop"))
        return ids, answers


def _pairs(turns: list[tuple[str, str]]) -> tuple[str, Iterator[tuple[str, str]]]:
    """The system prompt, and question with answer: what a template of another's making is sure to have a place for."""
    system, rest = (turns[0][1], turns[1:]) if turns[0][0] == "system" else ("", turns)
    roles = [role for role, _ in rest]
    if roles != ["user", "assistant"] * (len(roles) // 2) or not roles:
        raise DataError("with the model's own chat template, user and assistant must take turns, the assistant last")
    texts = [text for _, text in rest]
    return system, zip(texts[::2], texts[1::2], strict=True)
