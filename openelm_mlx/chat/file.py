"""Conversations on disk: JSON that keeps every id, and Markdown to read.

A saved file has the messages as anyone's chat format has them, the ids of every answer, and `ids`, the whole history
as the model saw it. Loading trusts nothing: the history must come out of the messages again, id by id.
"""

import json
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

from ..atomic_file import new_file
from ..errors import GenerationError, OutputError
from .conversation import Conversation
from .format import FINISH_REASONS, Turn

FORMAT = "openelm-chat/1"
_MAX_BYTES = 64 * 2**20  # a thousand times the longest conversation that a context holds
_CUT = {"length": "cut at the token limit", "interrupted": "interrupted"}


def save(conversation: Conversation, path: Path, model: str) -> None:
    """Write a conversation that `load` reads back exactly. Raises OutputError."""
    messages: list[dict[str, Any]] = []
    if conversation.system:
        messages.append({"role": "system", "content": conversation.system})
    for turn in conversation.turns:
        messages.append({"role": "user", "content": turn.user})
        answer = {"content": turn.answer, "finish_reason": turn.finish_reason, "ids": turn.ids}
        messages.append({"role": "assistant", **answer})
    record = {
        "format": FORMAT,
        "model": model,
        "mode": conversation.format.name,
        "dropped_turns": conversation.dropped,
        "messages": messages,
        "ids": conversation.ids,
    }
    write_text(path, json.dumps(record) + "\n")


def load(conversation: Conversation, path: Path) -> None:
    """Let `conversation` become the saved one; nothing changes when the file is refused.

    Raises GenerationError, in one line, for a file that is no such conversation, or not one of this model.
    """
    record = _read(path)

    def refuse(why: str) -> NoReturn:
        raise GenerationError(f"{path}: {why}; nothing was loaded")

    if record.get("format") != FORMAT:
        refuse(f"not a conversation that /save wrote (format {_short(record.get('format'))}, expected {FORMAT!r})")
    if record.get("mode") != conversation.format.name:
        refuse(f"saved in {_short(record.get('mode'))} mode, and this chat is in {conversation.format.name} mode")
    messages = record.get("messages")
    if not isinstance(messages, list):
        refuse(f"messages must be a list, got {type(messages).__name__}")
    system, turns = "", list[Turn]()
    try:
        if messages and isinstance(messages[0], dict) and messages[0].get("role") == "system":
            system = _content(messages.pop(0), "system", 0)
        turns = list(_turns(conversation, messages))
        dropped = record.get("dropped_turns")
        if type(dropped) is not int or not 0 <= dropped <= len(turns):
            raise ValueError(f"dropped_turns must be between 0 and the {len(turns)} turns, got {_short(dropped)}")
    except ValueError as error:
        refuse(str(error))
    if conversation.history(system, turns[dropped:]) != record.get("ids"):
        refuse("its ids are not those of its messages: it was changed, or saved with another tokenizer or template")
    conversation.restore(system, turns, dropped)


def export_markdown(conversation: Conversation, path: Path, model: str) -> None:
    """Write a conversation as a document to read. Raises OutputError."""
    parts = [f"# Chat with {model}"]
    if conversation.system:
        parts += ["## System", conversation.system]
    for turn in conversation.turns:
        parts += ["## User", turn.user, "## OpenELM", turn.answer.strip()]
        if turn.finish_reason in _CUT:
            parts.append(f"*({_CUT[turn.finish_reason]})*")
    write_text(path, "\n\n".join(parts) + "\n")


def write_text(path: Path, text: str) -> None:
    """Write a text file whole or not at all, over an older one if there is one. Raises OutputError."""
    target = resolved(path)
    if target.is_dir():
        raise OutputError(f"{path} is a folder; name a file")
    with new_file(target) as partial:
        partial.write_text(text, encoding="utf-8")


def resolved(path: Path) -> Path:
    """Where a name leads, links followed: what is written replaces the file, never a link to it."""
    try:
        return Path(os.path.realpath(path.expanduser()))
    except (ValueError, RuntimeError):  # a NUL, or the home of a user that nobody knows
        raise OutputError(f"{str(path)!r} is no file name") from None


def _read(path: Path) -> dict[str, Any]:
    path = resolved(path)
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            raise GenerationError(f"{path} is no regular file; name one that /save wrote")
        if status.st_size > _MAX_BYTES:
            raise GenerationError(f"{path} has {status.st_size} bytes, far more than a conversation; nothing was read")
        record = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise GenerationError(f"cannot read {path}: {error.strerror or error}") from None
    except (ValueError, RecursionError):
        raise GenerationError(f"{path} is not valid JSON: cut short, or not a file that /save wrote") from None
    if not isinstance(record, dict):
        raise GenerationError(f"{path} must hold a JSON object, got {type(record).__name__}")
    return record


def _turns(conversation: Conversation, messages: list[Any]) -> Iterator[Turn]:
    """The turns of saved messages. Raises ValueError saying what is wrong with which."""
    if len(messages) % 2:
        raise ValueError("the last message has no answer: users and assistants must take turns")
    for i in range(0, len(messages), 2):
        user = _content(messages[i], "user", i)
        answer = _content(messages[i + 1], "assistant", i + 1)
        ids, reason = messages[i + 1].get("ids"), messages[i + 1].get("finish_reason")
        if reason not in FINISH_REASONS:
            raise ValueError(
                f"answer {i + 1} has finish_reason {_short(reason)}, not one of {', '.join(FINISH_REASONS)}"
            )
        yield Turn(user, answer, _ids(conversation, ids, answer, i + 1), reason)


def _content(message: Any, role: str, index: int) -> str:
    if not isinstance(message, dict) or message.get("role") != role:
        got = message.get("role") if isinstance(message, dict) else message
        raise ValueError(f"message {index} must be the {role}'s, got {_short(got)}")
    content = message.get("content")
    if not isinstance(content, str):
        raise ValueError(f"message {index} has no text: its content is {_short(content)}")
    content.encode()  # half a surrogate pair is no text: UnicodeEncodeError is a ValueError
    return content


def _ids(conversation: Conversation, ids: Any, text: str, index: int) -> tuple[int, ...]:
    """Checked ids of an answer: what MLX would read foreign memory for never gets through."""
    tokenizer = conversation.tokenizer
    if not isinstance(ids, list) or not all(type(token) is int for token in ids):
        raise ValueError(f"message {index} has no ids: a list of integers is needed")
    if any(not 0 <= token < conversation.model.config.vocab_size for token in ids):
        raise ValueError(f"message {index} has ids outside the vocabulary of {conversation.model.config.vocab_size}")
    if tokenizer.eos_token_ids & set(ids):
        raise ValueError(f"message {index} has the id that ends an answer in its middle")
    if not tokenizer.decode(ids, continuation=True).startswith(text):
        raise ValueError(f"the ids of message {index} are not its text: it was changed, or is another model's")
    return tuple(ids)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else text[:37] + "..."
