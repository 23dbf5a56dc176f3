"""One job done by two programs in one run: medians, their ratio, and whether the ratio reaches what we promise.

The two take turns, so that heat and other work on the machine meet both alike.
"""

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from statistics import median
from typing import Any, Protocol

PERFORMANCE_PAGE = Path(__file__).resolve().parent.parent / "docs" / "performance.md"


@dataclass(frozen=True)
class Comparison:
    """The figures of one job, in the order in which they were taken; less is better in every unit used."""

    job: str
    unit: str  # "ms" or "nodes"
    ours: tuple[float, ...]
    theirs: tuple[float, ...]
    target: float
    is_share: bool = False  # promise "at most this share of theirs" instead of "at least so many times as fast"

    @property
    def ratio(self) -> float:
        """Theirs over ours (above 1 = we are faster), or ours over theirs for a share."""
        ours, theirs = median(self.ours), median(self.theirs)
        return ours / theirs if self.is_share else theirs / ours

    @property
    def ratio_range(self) -> tuple[float, float]:
        """The least and the greatest ratio of any one turn."""
        pairs = zip(self.ours, self.theirs, strict=True)
        ratios = [ours / theirs if self.is_share else theirs / ours for ours, theirs in pairs]
        return min(ratios), max(ratios)

    @property
    def passed(self) -> bool:
        return self.ratio <= self.target if self.is_share else self.ratio >= self.target

    @property
    def cells(self) -> tuple[str, ...]:
        """The row of a table under `HEADINGS`."""
        low, high = self.ratio_range
        spread = f" ({low:.2f}-{high:.2f})" if low != high else ""
        return (
            self.job,
            f"{median(self.ours):,.0f} {self.unit}",
            f"{median(self.theirs):,.0f} {self.unit}",
            f"{self.ratio:.2f}x{spread}",
            f"{'<=' if self.is_share else '>='} {self.target:.2f}x",
            "yes" if self.passed else "no",
        )

    def to_dict(self) -> dict[str, Any]:
        return {**vars(self), "ratio": self.ratio, "passed": self.passed}


class Row(Protocol):
    """A row of a table, and whether it holds what it promises."""

    @property
    def cells(self) -> tuple[str, ...]: ...

    def to_dict(self) -> dict[str, Any]: ...


HEADINGS = ("job", "openelm-mlx", "mlx-lm", "ratio (range)", "target", "reached")


def take_turns(
    ours: Callable[[], float], theirs: Callable[[], float], trials: int
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Run both `trials` times in alternation, after one warm-up each; who goes first alternates too."""
    ours(), theirs()
    figures: tuple[list[float], list[float]] = ([], [])
    for trial in range(trials):
        order = (0, 1) if trial % 2 == 0 else (1, 0)
        for side in order:
            figures[side].append((ours, theirs)[side]())
    return tuple(figures[0]), tuple(figures[1])


def print_comparisons(comparisons: Sequence[Row], machine: str) -> None:
    """The table for a terminal."""
    from rich.console import Console
    from rich.table import Table

    table = Table(*HEADINGS, box=None, pad_edge=False)
    for comparison in comparisons:
        table.add_row(*comparison.cells)
    console = Console(highlight=False, markup=False)
    console.print(machine)
    console.print(table)


def write_json(file: Path, comparisons: Sequence[Row], machine: dict[str, Any]) -> None:
    """Everything measured, with the machine it was measured on."""
    record = {"machine": machine, "comparisons": [comparison.to_dict() for comparison in comparisons]}
    file.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def write_block(page: Path, name: str, comparisons: Sequence[Row], machine: str) -> None:
    """Replace the table between `<!-- NAME -->` and `<!-- /NAME -->` in a Markdown page."""
    rows = [HEADINGS, ("---",) * len(HEADINGS), *(comparison.cells for comparison in comparisons)]
    table = "\n".join(f"| {' | '.join(row)} |" for row in rows)
    write_text(page, name, table, machine)


def write_text(page: Path, name: str, text: str, machine: str) -> None:
    """Like `write_block`, for what is no list of comparisons."""
    replace_block(page, name, f"{machine}, {date.today().isoformat()}\n\n{text}")


def replace_block(page: Path, name: str, content: str) -> None:
    """Put `content` between `<!-- NAME -->` and `<!-- /NAME -->` in a Markdown page."""
    block = f"<!-- {name} -->\n{content}\n<!-- /{name} -->"
    text = page.read_text(encoding="utf-8")
    changed, count = re.subn(f"<!-- {name} -->.*?<!-- /{name} -->", lambda _: block, text, flags=re.DOTALL)
    assert count == 1, f"{page} has {count} blocks named {name}"
    page.write_text(changed, encoding="utf-8")
