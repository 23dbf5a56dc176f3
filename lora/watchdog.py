"""A run that makes no step says so: which rank, since which iteration, with how much memory.

Alone, a process only tells: a step may be long. Of several ranks, one that waits for another which is gone would wait
for ever and look alive; it ends itself, and `mlx.launch` then ends the others.
"""

import os
import sys
import threading
import time
from typing import Any

import mlx.core as mx

from .callbacks import TrainingCallback
from .parallel import rank
from .state import Progress

PATIENCE_S = 600.0


class Watchdog(TrainingCallback):
    """A thread that watches for reports while the `with` block runs."""

    def __init__(self, progress: Progress, patience_s: float = PATIENCE_S):
        self._progress, self._patience_s = progress, patience_s
        self._rank, self._ranks = rank(), mx.distributed.init().size()
        self._last = time.monotonic()
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> "Watchdog":
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._done.set()
        self._thread.join()

    def beat(self) -> None:
        """Something was done."""
        self._last = time.monotonic()

    def on_update(self, progress: Progress) -> None:
        self.beat()

    def on_val_loss_report(self, val_info: dict[str, Any]) -> None:
        self.beat()

    def _watch(self) -> None:
        while not self._done.wait(min(1.0, self._patience_s / 4)):
            waited = time.monotonic() - self._last
            if waited >= self._patience_s:
                print(
                    f"openelm: rank {self._rank} of {self._ranks}: no step for {waited:.0f} s, since iteration "
                    f"{self._progress.iteration}; {mx.get_active_memory() / 1e9:.2f} GB in use",
                    file=sys.stderr,
                    flush=True,
                )
                self.beat()
                if self._ranks > 1:
                    os._exit(1)
