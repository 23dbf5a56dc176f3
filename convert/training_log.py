"""`training_logs.txt` as CoreNet's logger writes it, read line by line: loss, learning rate, validation, time.

    2024-03-01 00:46:44 - LOGS    - Epoch:   0 [     500/  350000], loss: {'total_loss': 4.2, ...}, LR: [0.0015], \
Avg. batch load time: 0.000, Elapsed time: 71.00
    2024-03-01 09:00:00 - LOGS    - *** Validation summary for epoch 0
    \t loss={'total_loss': 3.1} || perplexity=22.2

Colour codes may stand around the level. Whatever else was printed is skipped. Source: apple/corenet `logger.py`,
`metrics/stats.py`.
"""

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from ..errors import CheckpointError

FORMAT = "corenet-log"
_SNIFFED_BYTES = 2**16
_MAX_LINE = 2**16  # longer lines are no log lines of CoreNet's
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_LINE = re.compile(r"(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d) - (LOGS|INFO|WARNING|DEBUG|ERROR) *- (.*)")
_NUMBER = r"([-+]?(?:\d[\d.]*(?:[eE][-+]?\d+)?|nan|inf))"
_ITERATION = re.compile(r"Epoch: *(\d+) \[ *(\d+)/ *(\d+)\], (.*)")
_LOSS = re.compile(rf"loss: (?:\{{[^}}]*'total_loss': )?{_NUMBER}")
_RATE = re.compile(rf"LR: \[?{_NUMBER}")
_ELAPSED = re.compile(rf"Elapsed time: *{_NUMBER}")
_SUMMARY = re.compile(r"\*\*\* (\w[^*]*) summary for epoch (\d+)")
_SUMMARY_LOSS = re.compile(rf"loss=(?:\{{[^}}]*'total_loss'[:=] *)?{_NUMBER}")


@dataclass(frozen=True)
class Point:
    """One logged iteration. `loss` is the mean since the epoch began, as CoreNet logs it, in nats a token."""

    iteration: int
    epoch: int
    loss: float
    learning_rate: float
    elapsed_s: float  # since the epoch, or the run that continued it, began


@dataclass
class TrainingLog:
    """What a log says; lists are in the order of the file."""

    points: list[Point] = field(default_factory=list)
    planned_iterations: int = 0
    validation: list[tuple[int, float]] = field(default_factory=list)  # (epoch, loss) of each validation
    started: str = ""
    ended: str = ""

    def describe(self) -> dict[str, Any]:
        """The summary, ready for JSON: a loss that is not a number becomes null."""
        finite = [point for point in self.points if math.isfinite(point.loss)]
        best = min(finite, key=lambda point: point.loss, default=None)
        first, last = self.points[0], self.points[-1]
        return {
            "format": FORMAT,
            "iterations": last.iteration,
            "planned_iterations": self.planned_iterations,
            "epochs": len({point.epoch for point in self.points}),
            "points": len(self.points),
            "restarts": sum(b.iteration < a.iteration for a, b in pairwise(self.points)),
            "first_loss": _or_null(first.loss),
            "last_loss": _or_null(last.loss),
            "best_loss": None if best is None else best.loss,
            "best_iteration": None if best is None else best.iteration,
            "not_finite": len(self.points) - len(finite),
            "max_learning_rate": max(point.learning_rate for point in self.points),
            "last_learning_rate": last.learning_rate,
            "validation": [{"epoch": epoch, "loss": _or_null(loss)} for epoch, loss in self.validation],
            "seconds": self._seconds(),
            "started": self.started,
            "ended": self.ended,
        }

    def _seconds(self) -> float:
        """Time spent training: the clock of each stretch before it starts again from zero."""
        clocks = [point.elapsed_s for point in self.points]
        return sum(a for a, b in pairwise(clocks) if b < a) + clocks[-1]


def is_log(path: Path) -> bool:
    """Whether a file begins as such a log does: with text, and a line of CoreNet's logger in it."""
    try:
        with path.open("rb") as file:
            head = file.read(_SNIFFED_BYTES)
    except OSError:
        return False
    if b"\0" in head:
        return False
    return any(_LINE.match(_plain(line)) for line in head.decode("utf-8", errors="replace").splitlines())


def read_log(path: Path) -> TrainingLog:
    """Everything the log says. Raises CheckpointError when no iteration is in it."""
    log = TrainingLog()
    validated: int | None = None  # an epoch whose summary is on the next line
    for line in _lines(path):
        if validated is not None and (found := _SUMMARY_LOSS.search(line)):
            log.validation.append((validated, float(found[1])))
        validated = None
        match = _LINE.match(line)
        if match is None:
            continue
        summary = _SUMMARY.match(match[3])
        if summary and summary[1].lower().startswith("validation"):
            validated = int(summary[2])
        point = _point(match[3])
        if point is None:
            continue
        log.points.append(point[0])
        log.planned_iterations = point[1]
        log.started, log.ended = log.started or match[1], match[1]
    if not log.points:
        raise CheckpointError(f"{path} is a log of CoreNet's without a line of training (Epoch: ... loss: ... LR: ...)")
    return log


def _lines(path: Path) -> Iterator[str]:
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            while line := file.readline(_MAX_LINE):
                yield _plain(line)
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror or error}") from None


def _point(message: str) -> tuple[Point, int] | None:
    match = _ITERATION.match(message)
    if match is None:
        return None
    loss, rate, elapsed = (pattern.search(match[4]) for pattern in (_LOSS, _RATE, _ELAPSED))
    if loss is None or rate is None:
        return None
    try:
        numbers = [float(found[1]) if found else 0.0 for found in (loss, rate, elapsed)]
        return Point(int(match[2]), int(match[1]), *numbers), int(match[3])
    except ValueError:  # "1.2.3", or more digits than Python turns into a number
        return None


def _plain(line: str) -> str:
    return _COLOUR.sub("", line)


def _or_null(value: float) -> float | None:
    return value if math.isfinite(value) else None
