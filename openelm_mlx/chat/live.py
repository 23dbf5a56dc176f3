"""Lines at the bottom of a terminal that can still change, without flicker.

Only lines that changed are written again, over themselves and never after erasing: mostly that is the last one.
"""

from rich.console import Console

_ERASE_REST_OF_LINE, _ERASE_BELOW = "\x1b[K", "\x1b[J"


class LiveLines:
    """What `show` was last given stands above the cursor, which rests at the end of its last line."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._lines: list[str] = []
        self._width = console.width

    def show(self, lines: list[str]) -> None:
        """Let these lines, none wider than the terminal, take the place of those shown before."""
        if self._console.width != self._width:  # the terminal has broken the old lines anew: where they are is unknown
            self.settle(len(self._lines))
            self._width = self._console.width
        shown = self._lines
        if lines == shown:
            return
        pairs = enumerate(zip(shown, lines, strict=False))
        changed = next((i for i, (old, new) in pairs if old != new), min(len(shown), len(lines)))
        out_of_reach = len(shown) - (self._console.height - 1)  # scrolled away
        start = max(min(changed, len(lines) - 1), out_of_reach, 0)
        self._write(
            _move(max(len(shown) - 1, 0), start)
            + "\n".join(f"\r{line}{_ERASE_REST_OF_LINE}" for line in lines[start:])
            + ("" if lines else "\r")
            + (_ERASE_BELOW if len(shown) > len(lines) else "")
        )
        self._lines = lines

    def settle(self, count: int) -> None:
        """The first `count` lines are final: what follows is shown below them."""
        if count and count == len(self._lines):
            self._write("\n")
        self._lines = self._lines[count:]

    def finish(self) -> None:
        """All lines are final."""
        self.settle(len(self._lines))

    def _write(self, text: str) -> None:
        self._console.file.write(text)
        self._console.file.flush()


def _move(row: int, to: int) -> str:
    """From one row to another above, or to the next below."""
    return "\n" if to > row else f"\x1b[{row - to}A" if to < row else ""
