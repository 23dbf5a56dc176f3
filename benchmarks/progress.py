"""What runs now and how long it will still take, on stderr, where that is a terminal."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from .session import Shape

_DECODE_WEIGHT = 30  # a decoded token takes about as long as so many of a prompt
_EXPECTED_WARM_UPS = 2


@dataclass
class Progress:
    """Counts runs, each weighted by its tokens; `show(step, share done)` paints them."""

    show: Callable[[str, float], None]
    total: float
    done: float = 0.0
    _pending: float = 0.0
    _limit: float = 0.0
    _cost: float = 0.0

    def shape(self, shape: Shape, trials: int, sides: int = 1) -> Callable[[str], None]:
        """A function to be told before each run of a shape what it is; warm-ups beyond the usual count for nothing."""
        self._finish()
        self._cost = cost(shape)
        self._limit = self.done + self._cost * (trials + _EXPECTED_WARM_UPS) * sides
        self._pending = 0.0
        return self._step

    def _step(self, text: str) -> None:
        self.done = min(self.done + self._pending, self._limit)
        self._pending = self._cost
        self.show(text, self.done / self.total if self.total else 1.0)

    def _finish(self) -> None:
        self.done = max(self.done, self._limit)


def cost(shape: Shape) -> float:
    """How long a run of this shape takes, in prompt tokens."""
    return shape.batch_size * shape.prompt_tokens + _DECODE_WEIGHT * shape.generation_tokens


def total_cost(shapes: list[Shape], trials: int, sides: int = 1) -> float:
    """Of all runs of all shapes."""
    return sum(cost(shape) for shape in shapes) * (trials + _EXPECTED_WARM_UPS) * sides


@contextmanager
def progress(total: float) -> Iterator[Progress]:
    """A bar with the time left; silent when stderr is no terminal."""
    if not sys.stderr.isatty():
        yield Progress(lambda step, share: None, total)
        return
    from rich.console import Console
    from rich.progress import BarColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
    from rich.progress import Progress as Bars

    columns = (TextColumn("{task.description}"), BarColumn(bar_width=20), TimeElapsedColumn(), TimeRemainingColumn())
    with Bars(*columns, console=Console(stderr=True), transient=True) as bars:
        task = bars.add_task("loading", total=1.0)
        yield Progress(lambda step, share: bars.update(task, description=step, completed=share), total)
