"""Reading rows of training data: a line each in a .jsonl file, or one JSON array. No row is given a meaning here.

Lines are read one by one, so a limit also limits what is read. What is wrong is told with file, line and the first
60 characters.
"""

import json
from collections.abc import Generator, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..chat.text import printable
from ..errors import DataError

SHOWN = 60


@dataclass(frozen=True)
class Row:
    """One example as stored. `where` names it in messages: "train.jsonl:17", or "train.json, row 17" in an array."""

    value: dict[str, Any]
    where: str

    @property
    def excerpt(self) -> str:
        return excerpt(json.dumps(self.value, ensure_ascii=False, default=str))


def excerpt(text: str) -> str:
    """The first 60 characters, safe to print on one line."""
    return " ".join(printable(text[:SHOWN]).split())


def read_rows(file: Path) -> Generator[Row, None, None]:
    """The rows of a file, blank lines left out; close it to leave early. Raises DataError."""
    try:
        with file.open("rb") as stream:
            start = stream.read(4096).removeprefix(b"\xef\xbb\xbf").lstrip()
            stream.seek(0)
            yield from _array(file, stream.read()) if start.startswith(b"[") else _lines(file, stream)
    except OSError as error:
        raise DataError(f"cannot read {file}: {error.strerror or error}") from None


def _lines(file: Path, stream: Iterable[bytes]) -> Iterator[Row]:
    """Lines end at a newline alone: other separators of Unicode may stand inside a JSON string."""
    for number, line in enumerate(stream, 1):
        text = _decoded(line, file.name, number)
        if text.strip():
            yield _row(_parsed(text, file.name, number), f"{file.name}:{number}")


def _array(file: Path, data: bytes) -> Iterator[Row]:
    for number, value in enumerate(_parsed(_decoded(data, file.name, 1), file.name, 1), 1):
        yield _row(value, f"{file.name}, row {number}")


def _decoded(data: bytes, name: str, first_line: int) -> str:
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = first_line + data.count(b"\n", 0, error.start)
        start = data.rfind(b"\n", 0, error.start) + 1
        shown = excerpt(data[start : start + 4 * SHOWN].decode("utf-8", "replace"))
        raise DataError(f"{name}:{line} is not UTF-8 text, save the file as UTF-8: {shown}") from None


def _parsed(text: str, name: str, first_line: int) -> Any:
    expected = "expected a JSON object on each line, or one JSON array of objects"
    text = text.rstrip()
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        line = text.split("\n")[error.lineno - 1].strip()
        where = f"{name}:{first_line + error.lineno - 1}, column {error.colno}"
        raise DataError(f"{where}: {expected}, but {error.msg}: {excerpt(line)}") from None
    except (ValueError, RecursionError):  # a number of thousands of digits, brackets nested without end
        raise DataError(f"{name}:{first_line}: {expected}, got JSON that cannot be read: {excerpt(text)}") from None


def _row(value: Any, where: str) -> Row:
    if not isinstance(value, dict):
        shown = excerpt(json.dumps(value, ensure_ascii=False))
        raise DataError(f'{where}: expected a JSON object such as {{"text": "..."}}, got {shown}')
    return Row(value, where)
