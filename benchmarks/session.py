"""The runs of one model at one shape: how each is timed, when it has warmed up, and what becomes of the trials."""

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from ..errors import GenerationError
from ..footprint import process_footprint_bytes
from .results import BenchResult, Trial
from .runs import Run

DEFAULT_TRIALS = 5
MAX_WARM_UPS = 5
_LEAST_WARM_UP_S = 0.5
_STILL_FASTER = 0.9  # a warm-up that takes less than this share of the one before it calls for another

Clock = Callable[[], float]
Progress = Callable[[str], None]


@dataclass(frozen=True)
class Shape:
    """How much work a trial is: prompt tokens and generated tokens of each text, and how many texts at once."""

    prompt_tokens: int
    generation_tokens: int
    batch_size: int = 1

    def check(self, context: int) -> None:
        """Raise GenerationError unless all are positive and prompt and text fit into the context together."""
        check_positive("the number of prompt tokens (-p)", self.prompt_tokens)
        check_positive("the number of generated tokens (-g)", self.generation_tokens)
        check_positive("the batch size (-b)", self.batch_size)
        if self.prompt_tokens + self.generation_tokens > context:
            raise GenerationError(
                f"{self.prompt_tokens} prompt tokens and {self.generation_tokens} generated exceed the model's context "
                f"of {context}: ask for less with -p and -g"
            )


@dataclass(frozen=True)
class Method:
    """How to measure: what is the same for every shape of a run."""

    trials: int = DEFAULT_TRIALS
    delay_s: float = 0.0  # before each trial, for the machine to cool
    decoder: str = "eager"
    max_warm_ups: int = MAX_WARM_UPS
    clock: Clock = time.perf_counter
    sleep: Callable[[float], None] = time.sleep


@dataclass
class Session:
    """One side of a measurement. `begin` makes a run, `around` surrounds it; `foreign_bytes` are not the model's."""

    model: nn.Module
    name: str
    shape: Shape
    method: Method
    begin: Callable[[], Run]
    parameters: int
    variant: str = ""
    around: Callable[[], AbstractContextManager[Any]] = nullcontext
    foreign_bytes: int = 0
    trials: list[Trial] = field(default_factory=list)
    warm_ups: int = 0
    is_stable: bool = False
    _kv_cache_bytes: int = 0
    _footprint: int | None = None

    def warm_up(self, progress: Progress) -> None:
        """Runs of the same shape until one is not much faster than the one before it, or there were enough.

        Short ones go on for a moment longer: clocks take time to rise.
        """
        taken: list[float] = []
        while self.warm_ups < self.method.max_warm_ups and not (self.is_stable and sum(taken) >= _LEAST_WARM_UP_S):
            self.warm_ups += 1
            progress(f"{self.label} warm-up {self.warm_ups}")
            taken.append(self._run().total_s)
            self.is_stable = len(taken) > 1 and taken[-1] >= _STILL_FASTER * taken[-2]

    def trial(self, progress: Progress) -> None:
        """One run that counts."""
        progress(f"{self.label} trial {len(self.trials) + 1} of {self.method.trials}")
        if self.method.delay_s > 0:
            self.method.sleep(self.method.delay_s)
        self.trials.append(self._run())

    def result(self) -> BenchResult:
        """The trials so far; at least one."""
        return BenchResult(
            model=self.name,
            precision=precision(self.model),
            weight_bytes=self.weight_bytes,
            prompt_tokens=self.shape.prompt_tokens,
            generation_tokens=self.shape.generation_tokens,
            trials=tuple(self.trials),
            batch_size=self.shape.batch_size,
            decoder=self.method.decoder if self.shape.batch_size == 1 else "eager",
            variant=self.variant,
            parameters=self.parameters,
            kv_cache_bytes=self._kv_cache_bytes,
            process_footprint_bytes=self._footprint,
            warm_ups=self.warm_ups,
            warm_up_stable=self.is_stable,
        )

    @property
    def weight_bytes(self) -> int:
        """As the weights are held."""
        return sum(array.nbytes for array in _arrays(self.model))

    @property
    def label(self) -> str:
        """What a progress line calls it."""
        shape = f"{self.shape.prompt_tokens}+{self.shape.generation_tokens}"
        batch = f"x{self.shape.batch_size}" if self.shape.batch_size > 1 else ""
        return " ".join(filter(None, (self.name, self.variant, f"{shape}{batch}:")))

    def _run(self) -> Trial:
        with self.around():
            return self._timed_run()

    def _timed_run(self) -> Trial:
        """One prefill and one decode, each finished and its peak read before the next begins."""
        run, clock = self.begin(), self.method.clock
        mx.synchronize()
        mx.reset_peak_memory()
        start = clock()
        run.prefill()  # returns when the ids are there, not when the work is queued
        prefilled = clock()
        prefill_peak = mx.get_peak_memory()
        mx.reset_peak_memory()
        resumed = clock()
        if self.shape.generation_tokens > 1:
            run.decode(self.shape.generation_tokens - 1)
        end = clock()
        peaks = [max(0, peak - self.foreign_bytes) for peak in (prefill_peak, mx.get_peak_memory())]
        self._kv_cache_bytes, self._footprint = run.kv_cache_bytes, process_footprint_bytes()
        batch = self.shape.batch_size
        prompt_tokens, decoded = batch * self.shape.prompt_tokens, batch * (self.shape.generation_tokens - 1)
        return Trial.of(prefilled - start, end - resumed, prompt_tokens, decoded, peaks)


def precision(model: nn.Module) -> str:
    """How most of the weights are held: `4-bit`, or their dtype. A packed embedding keeps more bits and is left out."""
    held: dict[str, int] = {}
    modules = [module for module in model.modules() if hasattr(module, "bits")]
    packed = [module for module in modules if not isinstance(module, nn.QuantizedEmbedding)] or modules
    for module in packed:
        name = f"{module.bits}-bit"
        held[name] = held.get(name, 0) + module.weight.size * 32 // module.bits  # packed into 32-bit words
    if not packed:
        for array in _arrays(model):
            dtype = str(array.dtype).rpartition(".")[-1]
            held[dtype] = held.get(dtype, 0) + array.nbytes
    return max(held, key=held.__getitem__, default="none")


def check_positive(what: str, value: int) -> None:
    """Raise GenerationError for a count below one."""
    if value < 1:
        raise GenerationError(f"{what} must be 1 or more, got {value}")


def _arrays(model: nn.Module) -> list[mx.array]:
    parameters: Any = tree_flatten(model.parameters())
    return [array for _, array in parameters]
