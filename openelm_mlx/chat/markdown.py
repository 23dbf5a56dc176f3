"""An answer on the terminal while it is being written: Markdown laid out as it grows, or plain text wrapped at words.

Blocks that are complete are laid out for the last time, so a token costs the same however long the answer has become.
"""

import re
import time
from collections.abc import Callable

from markdown_it import MarkdownIt
from rich.console import Console, RenderableType
from rich.markdown import Heading, Markdown
from rich.text import Text

from .live import LiveLines
from .text import printable

_SECONDS_BETWEEN_SHOWS = 1 / 20
_STYLE = re.compile(r"\x1b\[[0-9;]*m")
_parser = MarkdownIt("commonmark", {"html": False}).enable("strikethrough").enable("table")


class _LeftHeading(Heading):
    """Titles at the left, like everything else."""

    LEVEL_ALIGN = dict.fromkeys(Heading.LEVEL_ALIGN, "left")


class ChatMarkdown(Markdown):
    """Markdown as a chat needs it: line ends kept, tags such as `<s>` shown, addresses spelled out."""

    elements = Markdown.elements | {"heading_open": _LeftHeading}

    def __init__(self, text: str) -> None:
        super().__init__("", code_theme="ansi_dark", hyperlinks=False)
        self.parsed = _parser.parse(text)
        for token in self.parsed:
            for child in token.children or ():
                if child.type == "softbreak":
                    child.type = "hardbreak"


class AnswerStream:
    """Feed text as it comes, and `finish` at the end."""

    def __init__(self, console: Console, *, markdown: bool) -> None:
        self._console = console
        self._split: Callable[[str], tuple[list[str], str]] = _split_blocks if markdown else _split_lines
        self._markdown = markdown
        self._live = LiveLines(console)
        self._live.show(["..."])
        self._growing = ""  # the text that is not settled yet
        self._begun = False
        self._shown_at = 0.0

    def feed(self, text: str) -> None:
        self._growing += printable(text)
        if not self._begun:
            self._growing = self._growing.lstrip()
            self._begun = bool(self._growing)
        if self._begun and time.monotonic() - self._shown_at >= _SECONDS_BETWEEN_SHOWS:
            self._show()
            self._shown_at = time.monotonic()

    def finish(self) -> None:
        self._show()
        self._live.finish()

    def _show(self) -> None:
        text = self._growing.rstrip()  # blank lines wait for what comes after them
        complete, rest = self._split(text)
        settled: list[str] = []
        for block in complete:
            lines = self._layout(block)
            settled += [*lines, ""] if lines and self._markdown else lines
        self._live.show([*settled, *self._layout(rest)])
        self._live.settle(len(settled))
        self._growing = rest + self._growing[len(text) :]

    def _layout(self, text: str) -> list[str]:
        """The lines of the terminal that a text takes, styles included; none for no text."""
        if not text:
            return []
        renderable: RenderableType = ChatMarkdown(text) if self._markdown else Text(text)
        with self._console.capture() as capture:  # one column less: terminals differ on when a full line wraps
            self._console.print(renderable, width=max(self._console.width - 1, 1))
        lines = [line.rstrip() for line in capture.get().removesuffix("\n").split("\n")]
        if self._markdown:  # some blocks bring blank lines of their own
            while lines and _is_blank(lines[0]):
                del lines[0]
            while lines and _is_blank(lines[-1]):
                del lines[-1]
        return lines


def _is_blank(line: str) -> bool:
    return not _STYLE.sub("", line).strip()


def _split_blocks(text: str) -> tuple[list[str], str]:
    """The blocks of Markdown before the last, and the last, which may still grow."""
    tokens = [token for token in _parser.parse(text) if token.level == 0 and token.map and token.nesting >= 0]
    starts = [0, *(token.map[0] for token in tokens[1:] if token.map)]
    lines = text.split("\n")
    *complete, rest = ("\n".join(lines[start:end]) for start, end in zip(starts, [*starts[1:], None], strict=True))
    return complete, rest


def _split_lines(text: str) -> tuple[list[str], str]:
    """The lines before the last, and the last."""
    complete, newline, rest = text.rpartition("\n")
    return [complete] if newline else [], rest
