"""`openelm bench --compare mlx-lm`: the same folder, by this project and by mlx-lm, taking turns in one process.

Both get the same prompt ids, ignore EOS, and are timed by the same code around their own `generate_step`. Each loads
the folder its own way, which is part of what is compared: on a CPU this project holds float32 copies of 16-bit and
quantised weights where memory allows, and the table says so.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten

from ..model import Model
from .matrix import Source
from .measure import prompt_batch, session
from .results import BenchResult
from .session import Method, Session, Shape

THEIRS = "mlx-lm"
RATES = ("prompt_tps", "generation_tps")


def compared_sessions(model: Model, source: Source, method: Method) -> Callable[[Shape], list[Session]]:
    """Shape -> both sides, mlx-lm's model being loaded once."""
    assert source.folder is not None, "both read a folder"
    theirs = load_theirs(source.folder)

    def sessions(shape: Shape) -> list[Session]:
        ours = session(model, source.name, shape, method, foreign_bytes=_nbytes(theirs))
        (prompt,) = prompt_batch(shape, model.config.vocab_size)
        return [
            ours,
            Session(
                theirs,
                source.name,
                shape,
                method,
                begin=lambda: TheirRun(theirs, prompt),
                parameters=ours.parameters,
                variant=THEIRS,
                around=drained,
                foreign_bytes=ours.weight_bytes,
            ),
        ]

    return sessions


def load_theirs(folder: Path) -> Any:
    """mlx-lm's model of a folder; no tokenizer is needed for ids."""
    from mlx_lm.utils import load_model

    return load_model(folder)[0]


@contextmanager
def drained() -> Iterator[None]:
    """At the end, wait for the surplus step that mlx-lm always queues, so that nobody else pays for it."""
    from mlx_lm.generate import generation_stream

    yield
    mx.synchronize(generation_stream)


class TheirRun:
    """One run of mlx-lm, through its own `generate_step`."""

    def __init__(self, model: Any, prompt: list[int]) -> None:
        from mlx_lm.models.cache import make_prompt_cache

        self._model, self._prompt = model, mx.array(prompt)
        self._cache: list[Any] = make_prompt_cache(model)
        self._steps: Iterator[tuple[Any, Any]] | None = None

    def prefill(self) -> None:
        from mlx_lm.generate import generate_step

        self._steps = generate_step(self._prompt, self._model, max_tokens=-1, prompt_cache=self._cache)
        next(self._steps)

    def decode(self, count: int) -> None:
        assert self._steps is not None, "decode follows prefill"
        for _ in range(count):
            next(self._steps)

    @property
    def kv_cache_bytes(self) -> int:
        return sum(layer.nbytes for layer in self._cache)


def comparisons(results: Sequence[BenchResult]) -> list[dict[str, Any]]:
    """The `comparison` entries of a record: ours over theirs (above 1 = this project is faster), shape by shape."""
    pairs = zip(results[::2], results[1::2], strict=False)
    return [_comparison(ours, theirs) for ours, theirs in pairs if theirs.variant == THEIRS]


def _comparison(ours: BenchResult, theirs: BenchResult) -> dict[str, Any]:
    entry: dict[str, Any] = {
        "model": ours.model,
        "prompt_tokens": ours.prompt_tokens,
        "generation_tokens": ours.generation_tokens,
        "ours": ours.precision,
        "theirs": theirs.precision,
    }
    for name in RATES:
        ratios = _ratios(ours.values(name), theirs.values(name))
        entry[f"{name}_ratio"] = ratio_of_medians(ours.values(name), theirs.values(name))
        entry[f"{name}_ratio_range"] = [min(ratios), max(ratios)] if ratios else None
    return entry


def _nbytes(model: Any) -> int:
    parameters: Any = tree_flatten(model.parameters())
    return sum(array.nbytes for _, array in parameters)


def ratio_of_medians(ours: Sequence[float], theirs: Sequence[float]) -> float | None:
    """None where either could not be timed."""
    return median(ours) / median(theirs) if ours and theirs else None


def _ratios(ours: Sequence[float], theirs: Sequence[float]) -> list[float]:
    return [one / other for one, other in zip(ours, theirs, strict=False)]
