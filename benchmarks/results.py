"""What was measured of one model at one shape: the trials in their order, and the summaries over them."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from .trial_statistics import drift, interval

SUMMARISED = ("prompt_tps", "generation_tps", "ttft_s", "total_s")


@dataclass(frozen=True)
class Trial:
    """One run. A rate is None where there was nothing to time: decode with G = 1, or a clock that stood still."""

    ttft_s: float  # from the prompts' ids to the first token's id, of every text of the batch
    decode_s: float  # from the first token's id to the last's
    total_s: float  # both
    prompt_tps: float | None
    generation_tps: float | None
    prefill_peak_memory_bytes: int  # of MLX's allocator, reset before each phase
    decode_peak_memory_bytes: int

    @classmethod
    def of(
        cls, ttft_s: float, decode_s: float, prompt_tokens: int, decoded_tokens: int, peaks: Sequence[int] = (0, 0)
    ) -> "Trial":
        """From what was timed: `prompt_tokens` in `ttft_s`, then `decoded_tokens`, without the first, in `decode_s`."""
        return cls(
            ttft_s=ttft_s,
            decode_s=decode_s,
            total_s=ttft_s + decode_s,
            prompt_tps=rate(prompt_tokens, ttft_s),
            generation_tps=rate(decoded_tokens, decode_s),
            prefill_peak_memory_bytes=peaks[0],
            decode_peak_memory_bytes=peaks[1],
        )


@dataclass(frozen=True)
class BenchResult:
    """The trials of one model at one shape, in the order in which they ran; the summaries are medians.

    Rates are of all texts of the batch together.
    """

    model: str
    precision: str  # of the weights as they were held, which on a CPU may not be the folder's
    weight_bytes: int
    prompt_tokens: int
    generation_tokens: int
    trials: tuple[Trial, ...]
    batch_size: int = 1
    decoder: str = "eager"
    variant: str = ""  # whose or which of several sides this is: `mlx-lm`, `naive RMSNorm`; usually none
    parameters: int = 0
    kv_cache_bytes: int = 0  # allocated when the last token was out
    process_footprint_bytes: int | None = None  # then, too; more than the allocator's
    warm_ups: int = 1
    warm_up_stable: bool = True

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
    def total_s(self) -> float:
        return median(trial.total_s for trial in self.trials)

    @property
    def end_to_end_tps(self) -> float | None:
        """Generated tokens over all the time they took, the prompt's included: what a person waits for."""
        return rate(self.batch_size * self.generation_tokens, self.total_s)

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

    def values(self, name: str) -> list[float]:
        """A trial's figure of this name, in order, without those that could not be timed."""
        return [value for trial in self.trials if (value := getattr(trial, name)) is not None]

    def interval(self, name: str) -> tuple[float, float] | None:
        """Around the median of this figure."""
        return interval(self.values(name))

    def drift(self) -> dict[str, float]:
        """The rates that kept falling or rising over the trials, and by which share."""
        found = {name: drift(self.values(name)) for name in ("prompt_tps", "generation_tps")}
        return {name: change for name, change in found.items() if change is not None}

    def to_dict(self) -> dict[str, Any]:
        """As `openelm bench --json` prints it; docs/benchmarks.md explains every key."""
        summary: dict[str, Any] = {}
        for name in SUMMARISED:
            summary |= {name: getattr(self, name), f"{name}_interval": self.interval(name)}
        return {
            "model": self.model,
            "precision": self.precision,
            "parameters": self.parameters,
            "prompt_tokens": self.prompt_tokens,
            "generation_tokens": self.generation_tokens,
            "batch_size": self.batch_size,
            "decoder": self.decoder,
            "variant": self.variant,
            **summary,
            "end_to_end_tps": self.end_to_end_tps,
            "drift": self.drift(),
            "weight_bytes": self.weight_bytes,
            "kv_cache_bytes": self.kv_cache_bytes,
            "peak_memory_bytes": self.peak_memory_bytes,
            "prefill_peak_memory_bytes": self.prefill_peak_memory_bytes,
            "decode_peak_memory_bytes": self.decode_peak_memory_bytes,
            "process_footprint_bytes": self.process_footprint_bytes,
            "warm_ups": self.warm_ups,
            "warm_up_stable": self.warm_up_stable,
            "trials": [asdict(trial) for trial in self.trials],
        }

    def _median(self, name: str) -> float | None:
        values = self.values(name)
        return median(values) if values else None


def rate(count: float, seconds: float) -> float | None:
    """Per second, or None where there was nothing to count or the clock did not move."""
    return count / seconds if count > 0 and seconds > 0 else None
