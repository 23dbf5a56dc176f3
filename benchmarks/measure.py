"""Tokens/s of one model at one shape: what `openelm bench` reports.

Prefill and decode are timed apart: prefill is P prompt tokens up to the first generated token, decode the other G-1
tokens. The prompt is a fixed list of ids, decoding is greedy, and EOS is ignored, so that every trial does the same
work. One trial of the same shape goes first and is thrown away: it pays for reading lazy weights, compiling kernels
and MLX's first allocations.
"""

import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten

from ..cache import KVCache
from ..device import wired_limit
from ..errors import GenerationError
from ..generation import generate_step, weight_bytes
from ..model import Model

DEFAULT_PROMPT_TOKENS = 512
DEFAULT_GENERATION_TOKENS = 128
DEFAULT_TRIALS = 5
_PROMPT_SEED = 0

Clock = Callable[[], float]


@dataclass(frozen=True)
class Trial:
    """One run. A rate is None where there was nothing to time: decode with G = 1, or a clock that stood still."""

    ttft_s: float  # from the prompt's ids to the first token's id
    decode_s: float  # from the first token's id to the last's
    prompt_tps: float | None
    generation_tps: float | None
    prefill_peak_memory_bytes: int  # of MLX's allocator, reset before each phase
    decode_peak_memory_bytes: int


@dataclass(frozen=True)
class BenchResult:
    """The trials of one model at one shape, in the order in which they ran; the summaries are medians."""

    model: str
    precision: str  # of the weights as they were held, which on a CPU may not be the folder's
    weight_bytes: int
    prompt_tokens: int
    generation_tokens: int
    trials: tuple[Trial, ...]

    @property
    def prompt_tps(self) -> float | None:
        return self._median("prompt_tps")

    @property
    def generation_tps(self) -> float | None:
        return self._median("generation_tps")

    @property
    def ttft_s(self) -> float:
        return median(trial.ttft_s for trial in self.trials)

    @property
    def decode_s(self) -> float:
        return median(trial.decode_s for trial in self.trials)

    @property
    def prefill_peak_memory_bytes(self) -> int:
        return max(trial.prefill_peak_memory_bytes for trial in self.trials)

    @property
    def decode_peak_memory_bytes(self) -> int:
        return max(trial.decode_peak_memory_bytes for trial in self.trials)

    @property
    def peak_memory_bytes(self) -> int:
        """The higher of the two phases'."""
        return max(self.prefill_peak_memory_bytes, self.decode_peak_memory_bytes)

    def spread(self, name: str) -> tuple[float, float] | None:
        """The least and the greatest of a trial's figure of this name; None where nothing was timed."""
        values = self._values(name)
        return (min(values), max(values)) if values else None

    def to_dict(self) -> dict[str, Any]:
        """As `openelm bench --json` prints it."""
        return {
            "model": self.model,
            "precision": self.precision,
            "weight_bytes": self.weight_bytes,
            "prompt_tokens": self.prompt_tokens,
            "generation_tokens": self.generation_tokens,
            "prompt_tps": self.prompt_tps,
            "prompt_tps_range": self.spread("prompt_tps"),
            "generation_tps": self.generation_tps,
            "generation_tps_range": self.spread("generation_tps"),
            "ttft_s": self.ttft_s,
            "peak_memory_bytes": self.peak_memory_bytes,
            "prefill_peak_memory_bytes": self.prefill_peak_memory_bytes,
            "decode_peak_memory_bytes": self.decode_peak_memory_bytes,
            "trials": [vars(trial) for trial in self.trials],
        }

    def _values(self, name: str) -> list[float]:
        return [value for trial in self.trials if (value := getattr(trial, name)) is not None]

    def _median(self, name: str) -> float | None:
        values = self._values(name)
        return median(values) if values else None


def measure(
    model: Model,
    name: str,
    prompt_tokens: int = DEFAULT_PROMPT_TOKENS,
    generation_tokens: int = DEFAULT_GENERATION_TOKENS,
    trials: int = DEFAULT_TRIALS,
    *,
    clock: Clock = time.perf_counter,
    progress: Callable[[str], None] = lambda step: None,
) -> BenchResult:
    """Run `trials` trials after a warm-up of the same shape. `progress` is told what runs, before each run.

    Raises GenerationError for a shape that the model's context cannot hold, or fewer than one trial.
    """
    _check_positive("the number of trials (-n)", trials)
    check_lengths(prompt_tokens, generation_tokens, model.config.max_context_length)
    prompt = prompt_ids(prompt_tokens, model.config.vocab_size)
    held_bytes = weight_bytes(model)
    with wired_limit(held_bytes):
        progress("warm-up")
        _trial(model, prompt, generation_tokens, clock)
        measured = []
        for number in range(1, trials + 1):
            progress(f"trial {number} of {trials}")
            measured.append(_trial(model, prompt, generation_tokens, clock))
    return BenchResult(name, precision(model), held_bytes, prompt_tokens, generation_tokens, tuple(measured))


def choose_lengths(prompt_tokens: int | None, generation_tokens: int | None, context: int) -> tuple[int, int]:
    """The lengths to measure: those asked for, and defaults that shrink to what the context has room for.

    Raises GenerationError, with the numbers, where lengths that were asked for do not fit.
    """
    default_prompt, default_generation = DEFAULT_PROMPT_TOKENS, DEFAULT_GENERATION_TOKENS
    if default_prompt + default_generation > context:  # the same proportion, over all of the context
        default_prompt = max(1, context * default_prompt // (default_prompt + default_generation))
        default_generation = context - default_prompt
    if prompt_tokens is None:
        prompt_tokens = max(1, min(default_prompt, context - (generation_tokens or default_generation)))
    if generation_tokens is None:
        generation_tokens = max(1, min(default_generation, context - prompt_tokens))
    check_lengths(prompt_tokens, generation_tokens, context)
    return prompt_tokens, generation_tokens


def check_lengths(prompt_tokens: int, generation_tokens: int, context: int) -> None:
    """Raise GenerationError unless both are positive and fit into the context together."""
    _check_positive("the number of prompt tokens (-p)", prompt_tokens)
    _check_positive("the number of generated tokens (-g)", generation_tokens)
    if prompt_tokens + generation_tokens > context:
        raise GenerationError(
            f"{prompt_tokens} prompt tokens and {generation_tokens} generated exceed the model's context of {context}: "
            "ask for less with -p and -g"
        )


def prompt_ids(count: int, vocab_size: int) -> list[int]:
    """The same ids on every machine and in every run, spread over the vocabulary."""
    draw = random.Random(_PROMPT_SEED)
    return [draw.randrange(vocab_size) for _ in range(count)]


def precision(model: Model) -> str:
    """How the weights are held: `4-bit`, or the dtype with the most bytes."""
    bits = sorted({module.bits for module in model.modules() if hasattr(module, "bits")})
    if bits:
        return f"{'/'.join(map(str, bits))}-bit"
    held: dict[str, int] = {}
    parameters: Any = tree_flatten(model.parameters())
    for _, array in parameters:
        dtype = str(array.dtype).rpartition(".")[-1]
        held[dtype] = held.get(dtype, 0) + array.nbytes
    return max(held, key=held.__getitem__, default="none")


def _trial(model: Model, prompt: list[int], generation_tokens: int, clock: Clock) -> Trial:
    """One prefill and one decode. `generate_step` hands out evaluated ids, so a timestamp follows finished work."""
    cache = model.make_cache()
    mx.synchronize()
    mx.reset_peak_memory()
    start = clock()
    first = _last_token(prompt, model, 1, cache)
    prefilled = clock()
    prefill_peak = mx.get_peak_memory()
    mx.reset_peak_memory()
    resumed = clock()
    if generation_tokens > 1:
        _last_token([first], model, generation_tokens - 1, cache)
    end = clock()
    ttft_s, decode_s = prefilled - start, end - resumed
    return Trial(
        ttft_s=ttft_s,
        decode_s=decode_s,
        prompt_tps=_rate(len(prompt), ttft_s),
        generation_tps=_rate(generation_tokens - 1, decode_s),
        prefill_peak_memory_bytes=prefill_peak,
        decode_peak_memory_bytes=mx.get_peak_memory(),
    )


def _last_token(prompt: list[int], model: Model, count: int, cache: list[KVCache]) -> int:
    """Generate `count` tokens, all of them; return the last."""
    # The step every user gets first; `auto` would put its own trials between those that are timed here.
    *_, last = generate_step(prompt, model, max_tokens=count, cache=cache, decoder="eager")
    return last


def _rate(count: int, seconds: float) -> float | None:
    return count / seconds if count > 0 and seconds > 0 else None


def _check_positive(what: str, value: int) -> None:
    if value < 1:
        raise GenerationError(f"{what} must be 1 or more, got {value}")
