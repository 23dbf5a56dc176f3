"""A chat on a terminal: answers appear as they are written, Ctrl-C stops one, Ctrl-D leaves."""

import signal
import sys
import termios
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Protocol

from rich.console import Console
from rich.text import Text

from ..generation import GenerationResponse
from .block import is_open, message
from .conversation import Prompt
from .markdown import AnswerStream
from .session import Chat
from .text import printable

INTERRUPTED = 130


class Editor(Protocol):
    """Reads messages. `read` raises EOFError for Ctrl-D and KeyboardInterrupt for Ctrl-C."""

    def read(self, default: str = "") -> str: ...


class PlainEditor:
    """For a terminal that only prints, which edits its lines by itself or not at all."""

    def read(self, default: str = "") -> str:
        text = input("> ")
        while is_open(text):
            text += "\n" + input("  ")
        return message(text)


class TerminalView:
    """Answers on stdout; what is said beside them, dim, on stderr."""

    def __init__(self, editor: Editor, *, markdown: bool) -> None:
        self._editor, self._markdown = editor, markdown
        self._out = Console(highlight=False)
        self._err = Console(stderr=True, highlight=False)

    def read(self) -> str:
        """What the user types next."""
        self._out.print()
        return self._editor.read()

    def show(self, text: str) -> None:
        self._out.print(Text(printable(text)))

    def notice(self, text: str) -> None:
        self._err.print(Text(printable(text), style="dim"))

    def error(self, text: str) -> None:
        self._err.print(Text.assemble(("error: ", "bold red"), printable(text)))

    def answer(self, prompt: Prompt, responses: Iterator[GenerationResponse]) -> None:
        dumb = self._out.is_dumb_terminal
        stream = _PlainStream() if dumb else AnswerStream(self._out, markdown=self._markdown)
        with _keys_unseen(), _interrupts() as interrupted:
            try:
                for response in responses:
                    stream.feed(response.text)
                    if interrupted.asked:
                        break
            finally:
                stream.finish()

    def edit(self, text: str) -> str | None:
        if self._out.is_dumb_terminal:  # which cannot show a text to change
            return None
        try:
            return self._editor.read(text)
        except (EOFError, KeyboardInterrupt):
            return None


def run_terminal(chat: Chat, view: TerminalView) -> int:
    """Read and answer until the user leaves: 0 by Ctrl-D or /quit, 130 by Ctrl-C twice."""
    warned = False
    while True:
        try:
            line = view.read()
        except EOFError:
            return 0
        except KeyboardInterrupt:
            if warned:
                return INTERRUPTED
            warned = True
            view.notice("Ctrl-C once more leaves, as does Ctrl-D; /help lists what can be typed")
            continue
        warned = False
        try:
            if line.strip() and not chat.handle(line):
                return 0
        except KeyboardInterrupt:
            view.notice("interrupted")


class _PlainStream:
    """An answer for a terminal that only prints."""

    _begun = False

    def feed(self, text: str) -> None:
        text = printable(text) if self._begun else printable(text).lstrip()
        self._begun = self._begun or bool(text)
        print(text, end="", flush=True)

    def finish(self) -> None:
        print(flush=True)


@dataclass
class _Interrupt:
    asked: bool = False


@contextmanager
def _interrupts() -> Iterator[_Interrupt]:
    """Ctrl-C asks to stop after the next token, so that the model is never left within a step; twice, it raises."""
    interrupt = _Interrupt()

    def stop(number: int, frame: FrameType | None) -> None:
        if interrupt.asked:
            raise KeyboardInterrupt
        interrupt.asked = True

    before = signal.signal(signal.SIGINT, stop)
    try:
        yield interrupt
    finally:
        signal.signal(signal.SIGINT, before)


@contextmanager
def _keys_unseen() -> Iterator[None]:
    """What is typed during an answer is not echoed into it, and waits for the next prompt."""
    try:
        terminal = sys.stdin.fileno()
        before = termios.tcgetattr(terminal)
    except (OSError, ValueError, termios.error):  # no terminal, as in a test
        yield
        return
    quiet = termios.tcgetattr(terminal)
    quiet[3] &= ~(termios.ECHO | termios.ICANON)
    termios.tcsetattr(terminal, termios.TCSADRAIN, quiet)
    try:
        yield
    finally:
        termios.tcsetattr(terminal, termios.TCSADRAIN, before)
