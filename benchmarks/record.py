"""The JSON object that `openelm bench` writes: versioned, checked on the way in, the machine named and its owner not.

docs/benchmarks.md explains every key. The keys of version 1 (`machine`, and in `results` model, prompt_tokens,
generation_tokens, prompt_tps, generation_tps, ttft_s, peak_memory_bytes, trials) are in every version.
"""

import json
import math
import subprocess
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from .. import __version__
from ..errors import RecordError

SCHEMA_VERSION = 2
PACKAGES = ("mlx", "numpy", "safetensors", "sentencepiece")
_ROOT = Path(__file__).resolve().parents[1]

NUMBER, TEXT, COUNT = (int, float), (str,), (int,)
_MAYBE = (type(None),)
_MACHINE = {"chip": TEXT, "cpu_cores": COUNT, "memory_bytes": COUNT, "os": TEXT, "backend": TEXT, "mlx": TEXT}
_MACHINE_MAY = {"gpu_cores": (int, type(None)), "power_source": (str, type(None)),
                "low_power_mode": (bool, type(None))}  # fmt: skip
_RECORD_MAY = {"date": TEXT, "interrupted": (bool,)}
_RESULT = {
    "model": TEXT,
    "prompt_tokens": COUNT,
    "generation_tokens": COUNT,
    "prompt_tps": NUMBER + _MAYBE,
    "generation_tps": NUMBER + _MAYBE,
    "ttft_s": NUMBER,
    "peak_memory_bytes": COUNT,
}
_TRIAL = {"ttft_s": NUMBER, "decode_s": NUMBER, "prompt_tps": NUMBER + _MAYBE, "generation_tps": NUMBER + _MAYBE}
_SINCE_2 = {
    "precision": TEXT,
    "batch_size": COUNT,
    "decoder": TEXT,
    "parameters": COUNT,
    "weight_bytes": COUNT,
    "kv_cache_bytes": COUNT,
    "total_s": NUMBER,
    "drift": (dict,),
    "warm_ups": COUNT,
}
_RATE = (int, float, type(None))
_LIMIT = {"bytes": NUMBER, "flops": NUMBER, "bound": TEXT, "seconds": _RATE, "share": _RATE}
_OPTIONAL = {"decoder": TEXT, "variant": TEXT, "drift": (dict,), "limits": (dict,), "paper": (dict,),
             "end_to_end_tps": _RATE}  # fmt: skip
_POSITIVE = ("prompt_tokens", "generation_tokens", "batch_size")


def new_record(results: list[dict[str, Any]], settings: Mapping[str, Any], **more: Any) -> dict[str, Any]:
    """A record of now and here. `more` are further parts: `interrupted`, `profile`, `comparison`, `training`."""
    return {
        "schema_version": SCHEMA_VERSION,
        "date": datetime.now(UTC).date().isoformat(),
        "machine": machine(),
        "settings": dict(settings),
        "results": results,
        **more,
    }


def machine() -> dict[str, Any]:
    """This machine, and the versions of what computes on it."""
    from ..device import machine_record

    versions = {"openelm-mlx": __version__, **{package: metadata.version(package) for package in PACKAGES}}
    return {**machine_record(), "packages": versions, "commit": commit()}


def commit(root: Path = _ROOT) -> str | None:
    """The checkout's commit, `-dirty` when files differ from it; None for an installed package."""
    if not (root / ".git").exists():
        return None
    try:
        asked = subprocess.run(
            ["git", "-C", str(root), "describe", "--always", "--dirty", "--exclude=*"],
            capture_output=True, text=True, check=False, timeout=10,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired):
        return None
    return asked.stdout.strip() or None


def read_record(path: Path) -> dict[str, Any]:
    """A checked record from a file, of any version so far. Raises RecordError, in one line, for anything else."""
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise RecordError(f"cannot read {path}: {error.strerror or error}") from None
    except (ValueError, RecursionError):
        raise RecordError(f"{path} is not valid JSON; expected what `openelm bench --json` prints") from None
    check_record(record, str(path))
    return record


def check_record(record: Any, where: str = "the record") -> None:
    """Raise one RecordError that lists all that is wrong with a record."""
    faults = list(_faults(record))
    if faults:
        shown = "; ".join(faults[:5]) + (f"; and {len(faults) - 5} more" if len(faults) > 5 else "")
        raise RecordError(f"{where} is no benchmark record: {shown}; expected what `openelm bench --json` prints")


def check_publishable(record: Mapping[str, Any], where: str) -> None:
    """Raise RecordError where a record is valid, and still not fit for `benchmarks/results/`."""
    faults = [f"it names a path, {result['model']!r}" for result in record["results"] if "\\" in result["model"]
              or result["model"].startswith(("/", "~", "."))]  # fmt: skip
    if record.get("schema_version", 1) < 2:
        faults.append("it is of version 1: measure again")
    if record.get("interrupted"):
        faults.append("the run was interrupted")
    if not record["results"]:
        faults.append("it has no results")
    if faults:
        raise RecordError(f"{where} cannot be published: {'; '.join(faults)}")


def _faults(record: Any) -> Iterator[str]:
    if not isinstance(record, dict):
        yield f"it holds {type(record).__name__}, expected an object"
        return
    version = record.get("schema_version", 1)
    if version not in range(1, SCHEMA_VERSION + 1):
        yield f"schema_version {version!r} is unknown (this is openelm-mlx {__version__}, which knows {SCHEMA_VERSION})"
        return
    yield from _check("machine", record.get("machine"), _MACHINE)
    for name, holder, keys in (("machine", record.get("machine"), _MACHINE_MAY), ("the record", record, _RECORD_MAY)):
        if isinstance(holder, dict):
            yield from _check(name, holder, {key: types for key, types in keys.items() if key in holder})
    results = record.get("results")
    if not isinstance(results, list):
        yield "results is missing" if results is None else "results is no list"
        return
    for i, result in enumerate(results):
        yield from _check_result(f"results[{i}]", result, _RESULT | (_SINCE_2 if version > 1 else {}))


def _check_result(where: str, result: Any, keys: Mapping[str, tuple[type, ...]]) -> Iterator[str]:
    wrong = list(_check(where, result, keys))
    yield from wrong
    if wrong:
        return
    yield from _check_extras(where, result)
    yield from (f"{where}.{key} is {result[key]}" for key in _POSITIVE if key in result and result[key] < 1)
    trials = result.get("trials")
    if not isinstance(trials, list) or not trials:
        yield f"{where}.trials is missing or empty"
        return
    faults = [fault for i, trial in enumerate(trials) for fault in _check(f"{where}.trials[{i}]", trial, _TRIAL)]
    yield from faults
    if not faults:
        yield from _unlike_trials(where, result, trials)


def _check_extras(where: str, result: Mapping[str, Any]) -> Iterator[str]:
    """What a result may leave out, and what is read of it where it is there."""
    wrong = list(_check(where, result, {key: types for key, types in _OPTIONAL.items() if key in result}))
    yield from wrong
    if wrong:
        return
    drift, limits = result.get("drift", {}), result.get("limits", {})
    yield from (f"{where}.drift.{name} is {drift[name]!r}" for name in drift if not _is_number(drift[name]))
    for name in ("device", "prefill", "decode") if limits else ():
        keys = {"bandwidth_bytes_s": NUMBER, "matmul_flops_s": NUMBER} if name == "device" else _LIMIT
        part = limits.get(name)
        yield from _check(f"{where}.limits.{name}", part, keys)
        if isinstance(part, dict) and part.get("bytes") == 0:
            yield f"{where}.limits.{name}.bytes is 0"
    for name in [name for name in result if name.endswith("_interval") and result[name] is not None]:
        bounds = result[name]
        if not isinstance(bounds, list) or len(bounds) != 2 or not all(map(_is_number, bounds)):
            yield f"{where}.{name} is {bounds!r}"


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _unlike_trials(where: str, result: Mapping[str, Any], trials: list[Any]) -> Iterator[str]:
    """Summaries that are not the medians of their trials: a file that somebody edited."""
    from statistics import median

    for key in ("prompt_tps", "generation_tps", "ttft_s"):
        values = [trial[key] for trial in trials if trial[key] is not None]
        expected = median(values) if values else None
        if (expected is None) != (result[key] is None) or (
            expected is not None and not math.isclose(expected, result[key], rel_tol=1e-6)
        ):
            yield f"{where}.{key} is {result[key]}, the median of its trials {expected}"


def _check(where: str, value: Any, keys: Mapping[str, tuple[type, ...]]) -> Iterator[str]:
    """Keys that are missing, or of another type; numbers must be finite and not negative."""
    if not isinstance(value, dict):
        yield f"{where} is missing" if value is None else f"{where} is no object"
        return
    for key, types in keys.items():
        found = value.get(key)
        if key not in value:
            yield f"{where}.{key} is missing"
        elif not isinstance(found, types) or (isinstance(found, bool) and bool not in types):
            yield f"{where}.{key} is {found!r}"
        elif isinstance(found, int | float) and not (math.isfinite(found) and found >= 0):
            yield f"{where}.{key} is {found}"
