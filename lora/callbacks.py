"""What a training loop tells while it runs: mlx-lm's two reports, with its names, and each update."""

import time
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from .state import Progress


@dataclass(frozen=True)
class Step:
    """One update: the sum of the losses, the number of targets, the gradient's length before it was clipped."""

    loss: float
    targets: int
    grad_norm: float
    learning_rate: float
    seconds: float


class TrainingCallback:
    """Does nothing; override what is of interest. The reports have mlx-lm's keys, and some more."""

    def on_update(self, progress: Progress) -> None:
        """After every update."""

    def on_train_loss_report(self, train_info: dict[str, Any]) -> None:
        """Every `steps_per_report` iterations: iteration, train_loss, learning_rate, tokens_per_second and so on."""

    def on_val_loss_report(self, val_info: dict[str, Any]) -> None:
        """After every validation: iteration, val_loss, val_time (s), best_iteration."""


class Meter:
    """Sums up the updates between two reports."""

    def __init__(self, iterations: int, progress: Progress):
        self._iterations, self._progress = iterations, progress
        self._first = progress.iteration
        self._elapsed_s = 0.0
        self._clear()

    def add(self, step: Step) -> None:
        self._last = step
        self._loss += step.loss
        self._targets += step.targets
        self._seconds += step.seconds
        self._elapsed_s += step.seconds
        self._progress.seconds += step.seconds

    def report(self) -> dict[str, Any]:
        """The figures since the last report; times in seconds, `peak_memory` in GB as mlx-lm counts it."""
        progress = self._progress
        done, here = progress.iteration - self._reported_at, progress.iteration - self._first
        report = {
            "iteration": progress.iteration,
            "update": progress.update,
            "train_loss": self._loss / self._targets,
            "learning_rate": self._last.learning_rate,
            "grad_norm": self._last.grad_norm,
            "iterations_per_second": done / self._seconds,
            "tokens_per_second": self._targets / self._seconds,
            "trained_tokens": progress.trained_tokens,
            "peak_memory": mx.get_peak_memory() / 1e9,
            "eta_s": self._elapsed_s / here * (self._iterations - progress.iteration),
            "time": time.time(),
        }
        self._clear()
        return report

    def _clear(self) -> None:
        self._loss, self._targets, self._seconds = 0.0, 0, 0.0
        self._reported_at = self._progress.iteration
