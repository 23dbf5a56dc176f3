"""`openelm bench --baseline FILE`: is this run slower than an earlier one of the same machine, or is it noise?

A rate counts as worse when its median fell by more than 3 % *and* a permutation test of the trials' ranks gives that at
most 5 % by chance. With fewer than three trials on either side nothing can be told, and that is said.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from ..errors import RecordError
from .trial_statistics import chance_of_lower

LEAST_CHANGE = 0.03
LEVEL = 0.05
_MACHINE = ("chip", "backend", "cpu_cores", "gpu_cores", "memory_bytes")  # another one of these: another machine
_CONDITIONS = ("power_source", "low_power_mode", "blas_preloaded")  # another one: the same machine, at another speed
_SAME_WORK = ("model", "precision", "prompt_tokens", "generation_tokens", "batch_size", "decoder", "variant")
_DEFAULTS = {"batch_size": 1, "decoder": "eager", "variant": ""}  # of version 1
_RATES = {"prompt_tps": "prefill", "generation_tps": "decode"}


@dataclass(frozen=True)
class Verdict:
    """One rate of one shape, now and then. `chance` is the probability of so low a rate if nothing changed."""

    what: str
    now: float
    before: float
    chance: float | None  # None: too few trials to tell

    @property
    def change(self) -> float:
        """-0.2: a fifth slower."""
        return self.now / self.before - 1

    @property
    def is_regression(self) -> bool:
        return self.chance is not None and self.chance <= LEVEL and self.change < -LEAST_CHANGE

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "change": self.change, "is_regression": self.is_regression}

    def __str__(self) -> str:
        if self.chance is None:
            told = "too few trials to tell (-n 3 or more, both times)"
        else:
            word = "SLOWER" if self.is_regression else "no regression"
            told = f"{word}, p = {self.chance:.3f}"
        return f"{self.what}: {self.before:,.1f} -> {self.now:,.1f} tokens/s ({100 * self.change:+.1f} %), {told}"


def check_conditions(old: Mapping[str, Any], machine: Mapping[str, Any], where: str) -> None:
    """Raise RecordError for another machine's file, and for one of this machine under other conditions.

    A run on battery or in low-power mode is no regression of anything.
    """
    then = old["machine"]
    for key in (*_MACHINE, *_CONDITIONS):
        if key in then and then[key] != machine.get(key):
            raise RecordError(
                f"{where} was measured with {key} {then[key]!r}, this run has {machine.get(key)!r}: measure a baseline "
                "here, under the same conditions"
            )


def check_works(old: Mapping[str, Any], works: Collection[Mapping[str, Any]], where: str) -> None:
    """Raise RecordError, before anything is measured, for a file that can have none of the results to come.

    works: what is known of each beforehand, some of the keys that tell works apart.
    """
    if old["results"] and not any("precision" in result for result in old["results"]):
        raise RecordError(f"{where} is of version 1, which does not tell the precision: measure a baseline again")
    if not any(all(_part(result, key) == work[key] for key in work) for result in old["results"] for work in works):
        raise _nothing_in_common(where)


def compare_records(new: Mapping[str, Any], old: Mapping[str, Any], where: str) -> list[Verdict]:
    """A verdict for each rate that both have. Raises RecordError for another machine's file, or one without any."""
    check_conditions(old, new["machine"], where)
    known = {_work(result): result for result in old["results"]}
    verdicts = []
    for result in new["results"]:
        before = known.get(_work(result))
        if before is not None:
            verdicts += [_verdict(name, result, before) for name in _RATES if result[name] and before[name]]
    if not verdicts:
        raise _nothing_in_common(where)
    return verdicts


def _verdict(name: str, result: Mapping[str, Any], before: Mapping[str, Any]) -> Verdict:
    now, then = _values(name, result), _values(name, before)
    enough = min(len(now), len(then)) >= 3
    label = " ".join(filter(None, (result["model"], result.get("precision"), result.get("variant"))))
    batch = f" x {result['batch_size']}" if result["batch_size"] > 1 else ""
    shape = f"{result['prompt_tokens']}+{result['generation_tokens']}{batch}"
    what = f"{label}, {shape} tokens, {_RATES[name]}"
    return Verdict(what, median(now), median(then), chance_of_lower(now, then) if enough else None)


def _values(name: str, result: Mapping[str, Any]) -> Sequence[float]:
    return [trial[name] for trial in result["trials"] if trial[name] is not None]


def _work(result: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple(_part(result, key) for key in _SAME_WORK)


def _part(result: Mapping[str, Any], key: str) -> Any:
    return result.get(key, _DEFAULTS.get(key))


def _nothing_in_common(where: str) -> RecordError:
    return RecordError(
        f"{where} has nothing that this run measures too: use the same model, precision, -p, -g, -b and --decoder"
    )
