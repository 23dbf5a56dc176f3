"""What a row means: text, prompt and completion, chat, or the paper's instruction form. One format for each file.

    {"text": "..."}                                        a text
    {"prompt": "...", "completion": "..."}                 one text of two parts
    {"messages": [{"role": "user", "content": "..."}]}     a conversation in OpenELM-Instruct's form
    {"instruction": "...", "input": "", "output": "..."}   LLM-Adapters' commonsense data, in its own prompt

The first row of a file decides, in the order completion, chat, text, instruction (mlx-lm's); later rows must agree.
Columns may have other names (`Columns`), further columns are ignored.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from ..errors import DataError
from ..instruction_prompt import instruction_prompt
from ..prompt import ROLES
from .rows import Row

FormatName = Literal["completion", "chat", "text", "instruction"]


@dataclass(frozen=True)
class Columns:
    """The names of the columns that hold what is learned, by mlx-lm's names for these settings."""

    prompt_feature: str = "prompt"
    completion_feature: str = "completion"
    chat_feature: str = "messages"
    text_feature: str = "text"

    def needed(self, name: FormatName) -> tuple[str, ...]:
        """The columns that a row of this format must have."""
        return {
            "completion": (self.prompt_feature, self.completion_feature),
            "chat": (self.chat_feature,),
            "text": (self.text_feature,),
            "instruction": ("instruction", "output"),
        }[name]


FORMATS: tuple[FormatName, ...] = ("completion", "chat", "text", "instruction")


@dataclass(frozen=True)
class Text:
    """A text without a prompt."""

    text: str


@dataclass(frozen=True)
class Completion:
    """A text of which the first part is the prompt."""

    prompt: str
    completion: str


@dataclass(frozen=True)
class Chat:
    """A conversation; roles are those of the Instruct prompt."""

    messages: tuple[Mapping[str, str], ...]


Example = Text | Completion | Chat


def detect(row: Row, columns: Columns) -> FormatName:
    """The format of a file whose first row this is. Raises DataError for a row of none."""
    for name in FORMATS:
        if all(column in row.value for column in columns.needed(name)):
            return name
    known = ", ".join("+".join(columns.needed(name)) for name in FORMATS)
    raise DataError(f"{row.where}: no known format: expected columns {known}; got {row.excerpt}")


def interpret(row: Row, name: FormatName, columns: Columns) -> Example:
    """The row as an example of the file's format. Raises DataError, naming the row, where it is not one."""
    needed = columns.needed(name)
    missing = [column for column in needed if column not in row.value]
    if missing:
        raise DataError(
            f"{row.where}: expected {'+'.join(needed)} as in the file's first row, but {missing[0]!r} is missing "
            f"(one format a file): {row.excerpt}"
        )
    if name == "chat":
        return Chat(_messages(row, needed[0]))
    texts = [_text(row, column) for column in needed]
    if name == "text":
        return Text(texts[0])
    if name == "instruction":
        context = _text(row, "input") if row.value.get("input") is not None else ""
        return Completion(instruction_prompt(texts[0], context), texts[1])
    return Completion(*texts)


def nothing_to_learn(example: Example) -> str | None:
    """Why an example teaches nothing ("an empty completion"), or None: it would teach to stop at once."""
    match example:
        case Text(text) if not text.strip():
            return "an empty text"
        case Completion(_, completion) if not completion.strip():
            return "an empty completion"
        case Chat(messages):
            if any(not m["content"].strip() for m in messages if m["role"] != "system"):
                return "an empty message"
            if all(m["role"] != "assistant" for m in messages):
                return "no answer of the assistant"
    return None


def _text(row: Row, column: str) -> str:
    value = row.value[column]
    if not isinstance(value, str):
        raise DataError(f"{row.where}: {column!r} must be a string, got {type(value).__name__}: {row.excerpt}")
    return value


def _messages(row: Row, column: str) -> tuple[Mapping[str, str], ...]:
    messages: Any = row.value[column]
    if row.value.get("tools"):
        raise DataError(f"{row.where}: OpenELM knows no tools: drop the row or its tools: {row.excerpt}")
    if not isinstance(messages, list) or not messages:
        raise DataError(f"{row.where}: {column!r} must be a list of messages: {row.excerpt}")
    for i, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("content"), str):
            raise DataError(f"{row.where}: message {i + 1} must have a role and a text as content: {row.excerpt}")
        if message.get("role") not in ROLES:
            role = message.get("role")
            raise DataError(
                f"{row.where}: message {i + 1} has role {role!r}, OpenELM knows {', '.join(ROLES)}: {row.excerpt}"
            )
        if message["role"] == "system" and i > 0:
            raise DataError(f"{row.where}: message {i + 1} is a system message, only the first may be: {row.excerpt}")
    return tuple({"role": m["role"], "content": m["content"]} for m in messages)
