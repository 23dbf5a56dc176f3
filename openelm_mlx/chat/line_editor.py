"""The prompt of a terminal chat: line editing, history over sessions, and messages of several lines."""

import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from prompt_toolkit import PromptSession
from prompt_toolkit.completion import CompleteEvent, Completer, Completion
from prompt_toolkit.document import Document
from prompt_toolkit.formatted_text import ANSI
from prompt_toolkit.history import FileHistory, History, InMemoryHistory
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
from prompt_toolkit.shortcuts import CompleteStyle

from ..errors import OutputError
from .block import is_open, message

_PROMPT, _CONTINUED = "> ", "  "


class LineEditor:
    """Reads messages. `read` raises EOFError for Ctrl-D and KeyboardInterrupt for Ctrl-C."""

    def __init__(self, history: History, commands: Iterable[str]) -> None:
        os.environ.setdefault("PROMPT_TOOLKIT_NO_CPR", "1")  # else it asks where the cursor is, and prints a warning
        self._session: PromptSession[str] = PromptSession(
            ANSI(f"\x1b[1m{_PROMPT}\x1b[0m"),
            multiline=True,
            prompt_continuation=_CONTINUED,
            history=history,
            completer=_CommandCompleter(commands),
            complete_while_typing=False,
            complete_style=CompleteStyle.READLINE_LIKE,
            key_bindings=_bindings(),
        )

    def read(self, default: str = "") -> str:
        """A message, without the marks of a block."""
        return message(self._session.prompt(default=default))


def history_of(name: str | None) -> History:
    """Earlier messages from the file that --history-file names, by default one in the user's cache folder.

    `off` keeps them for this session only, as does a default file that cannot be written. Raises OutputError for
    another that cannot.
    """
    if name == "off":
        return InMemoryHistory()
    cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache")
    path = Path(name or cache / "openelm" / "chat_history").expanduser()
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        file = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)  # only its owner can read it
        os.close(file)
        path.chmod(0o600)
    except OSError as error:
        if name is None:
            return InMemoryHistory()
        raise OutputError(
            f"--history-file {name} cannot be written: {error.strerror}; name another, or 'off'"
        ) from None
    return FileHistory(str(path))


def _bindings() -> KeyBindings:
    bindings = KeyBindings()

    @bindings.add("enter")
    def _(event: KeyPressEvent) -> None:
        buffer = event.current_buffer
        if is_open(buffer.text):
            buffer.insert_text("\n")
        else:
            buffer.validate_and_handle()

    @bindings.add("escape", "enter")  # which is also what Alt-Enter sends
    def _(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    return bindings


class _CommandCompleter(Completer):
    """Tab completes the name of a command."""

    def __init__(self, commands: Iterable[str]) -> None:
        self._commands = [f"/{name}" for name in commands]

    def get_completions(self, document: Document, complete_event: CompleteEvent) -> Iterator[Completion]:
        typed = document.text
        return (Completion(name, -len(typed)) for name in self._commands if typed and name.startswith(typed))
