"""Learning-rate schedules, counted in updates, under mlx-lm's names and with its arguments.

    lr_schedule: {name: cosine_decay, warmup: 100, warmup_init: 1e-7, arguments: [1e-4, 900, 1e-5]}

Update 0 is the first. With a warm-up of w updates, update w has the peak exactly and the decay begins there. A length
that is left out is the rest of the run; it is resolved once, and stored with the run.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

from ..config_keys import short
from ..errors import ConfigError

Schedule = Callable[[int], float]
# name -> what its arguments are, after the peak; None stands for the default
ARGUMENTS = {
    "constant": (),
    "cosine_decay": ("updates", "end"),
    "linear_schedule": ("end", "updates"),
    "exponential_decay": ("rate",),
    "step_decay": ("rate", "size"),
}
NAMES = tuple(ARGUMENTS)
_KEYS = ("name", "warmup", "warmup_init", "arguments")


def make_schedule(settings: Mapping[str, Any] | None, learning_rate: float, updates: int) -> Schedule:
    """The learning rate of each update.

    settings: the `lr_schedule` of a YAML file, or None for a constant one. learning_rate: the peak where `arguments`
    names none. updates: of the whole run. `warmup` below 1 is a share of them. Raises ConfigError.
    """
    settings = settings or {}
    unknown = [key for key in settings if key not in _KEYS]
    if unknown:
        raise ConfigError(f"lr_schedule has the unknown key {short(unknown[0])}; expected {', '.join(_KEYS)}")
    name = settings.get("name", "constant")
    if name not in ARGUMENTS:
        raise ConfigError(f"lr_schedule name must be one of {', '.join(NAMES)}, got {short(name)}")
    length = warmup_updates(settings, updates)
    start = _number(settings, "warmup_init")
    given = _arguments(name, settings.get("arguments"))
    peak = given.get("peak", learning_rate)
    decay = _decay(name, peak, {"updates": max(1, updates - length), "end": 0.0, **given})

    def schedule(update: int) -> float:
        if update < length:
            return start + (peak - start) * update / length
        return decay(update - length)

    return schedule


def warmup_updates(settings: Mapping[str, Any] | None, updates: int) -> int:
    """Length of the warm-up in a run of so many updates."""
    warmup = _number(settings or {}, "warmup")
    return round(warmup * updates) if warmup < 1 else int(warmup)


def _decay(name: str, peak: float, arguments: Mapping[str, float]) -> Schedule:
    """What follows the warm-up, by updates since its end."""
    length, end = arguments["updates"], arguments["end"]
    if name == "cosine_decay":
        return lambda update: end + (peak - end) * (1 + math.cos(math.pi * min(update, length) / length)) / 2
    if name == "linear_schedule":
        return lambda update: peak + (end - peak) * min(update, length) / length
    if name == "exponential_decay":
        return lambda update: peak * arguments["rate"] ** update
    if name == "step_decay":
        return lambda update: peak * arguments["rate"] ** (update // arguments["size"])
    return lambda update: peak


def _arguments(name: str, given: Any) -> dict[str, float]:
    """The arguments that were given, by name. Raises ConfigError for wrong ones."""
    names = ("peak", *ARGUMENTS[name])
    expected = f"lr_schedule {name} takes the arguments [{', '.join(names)}]"
    if given is None:
        given = []
    if not isinstance(given, list) or not all(value is None or _is_number(value) for value in given):
        raise ConfigError(f"{expected}, as numbers, got {short(given)}")
    if len(given) > len(names):
        raise ConfigError(f"{expected}, got {len(given)}: {short(given)}")
    found = {key: value for key, value in zip(names, given, strict=False) if value is not None}
    missing = [key for key in names if key in ("rate", "size") and key not in found]
    if missing:
        raise ConfigError(f"{expected}; {missing[0]} is missing")
    for key in ("updates", "size"):
        if found.get(key, 1) < 1:
            raise ConfigError(f"{expected}; {key} must be 1 or more, got {found[key]}")
    return found


def _number(settings: Mapping[str, Any], key: str) -> float:
    value = settings.get(key)
    value = 0.0 if value is None else value
    if not _is_number(value) or value < 0:
        raise ConfigError(f"lr_schedule {key} must be a number of at least 0, got {short(value)}")
    return float(value)


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value)
