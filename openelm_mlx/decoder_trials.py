"""How fast each kind of decode step was in real work on this device: what `decoder` decides by, kept between processes.

One small file, `openelm/decoders.json` in the user's cache folder. What it says counts for the MLX version it was
written under. It may vanish, be damaged or be unwritable: then nothing is known yet.
"""

import hashlib
import json
import math
import os
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple, cast

import mlx.core as mx
from mlx.utils import tree_flatten

from .device import is_metal
from .model import Model

ENOUGH_TRIALS = 3  # kept for each model and capacity


class Trial(NamedTuple):
    """Seconds a token with the eager and with the compiled step, and what the first compiled step took on top."""

    eager_s: float
    compiled_s: float
    compile_s: float


class TrialRecord:
    """The trials of one model on this device, by the capacity of the cache: the compiled step attends to all of it."""

    def __init__(self, model: Model) -> None:
        self._prefix = f"{mx.device_info().get('device_name')}, {'metal' if is_metal() else 'cpu'}, {_shapes(model)}"

    def trials(self, capacity: int) -> list[Trial]:
        """Those known, oldest first."""
        return _read().get(self._key(capacity), [])

    def add(self, capacity: int, trial: Trial) -> list[Trial]:
        """Keep one more, if the file can be written; the newest ones that are known now."""
        known = _read()  # again: another process may have written
        trials = [*known.get(self._key(capacity), []), trial][-ENOUGH_TRIALS:]
        _write(known | {self._key(capacity): trials})
        return trials

    def _key(self, capacity: int) -> str:
        return f"{self._prefix}, {capacity} tokens"


def typical(trials: list[Trial]) -> Trial:
    """Medians: a trial that something else on the machine disturbed, or that compiled kernels for good, is outvoted."""
    return Trial(*(median(figures) for figures in zip(*trials, strict=True)))


def record_file() -> Path:
    """Where the trials are kept: below $XDG_CACHE_HOME, or ~/.cache."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(base) if os.path.isabs(base) else Path.home() / ".cache") / "openelm" / "decoders.json"


def _read() -> dict[str, list[Trial]]:
    try:
        stored = json.loads(record_file().read_text(encoding="utf-8"))
        if stored["mlx"] != version("mlx"):
            return {}
        return {str(key): [_trial(figures) for figures in trials] for key, trials in stored["trials"].items()}
    except (OSError, RuntimeError, ValueError, TypeError, LookupError, AttributeError):  # RuntimeError: no home
        return {}


def _trial(figures: Any) -> Trial:
    trial = Trial(*(float(figure) for figure in figures))
    if not all(math.isfinite(figure) and figure >= 0 for figure in trial):
        raise ValueError(figures)
    return trial


def _write(trials: dict[str, list[Trial]]) -> None:
    """Under another name first: whoever reads finds a whole file, old or new."""
    with suppress(OSError, RuntimeError):
        file = record_file()
        file.parent.mkdir(parents=True, exist_ok=True)
        partial = file.with_name(f".{file.name}.{os.getpid()}")
        partial.write_text(json.dumps({"mlx": version("mlx"), "trials": trials}, indent=1), encoding="utf-8")
        partial.replace(file)


def _shapes(model: Model) -> str:
    """A hash of every parameter's name, shape and dtype: dimensions, precision, quantisation and adapters decide."""
    parameters = cast(list[tuple[str, mx.array]], tree_flatten(model.parameters()))
    listing = "\n".join(f"{name} {value.shape} {value.dtype}" for name, value in parameters)
    return hashlib.sha256(listing.encode()).hexdigest()[:16]
