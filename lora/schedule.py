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
NAMES = ("constant", "cosine_decay", "linear_schedule", "exponential_decay", "step_decay")
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
    if name not in NAMES:
        raise ConfigError(f"lr_schedule name must be one of {', '.join(NAMES)}, got {short(name)}")
    warmup = _number(settings, "warmup", 0.0)
    warmup_updates = round(warmup * updates) if warmup < 1 else int(warmup)
    start = _number(settings, "warmup_init", 0.0)
    arguments = _arguments(settings.get("arguments"), learning_rate)
    decay = _decay(name, arguments, max(1, updates - warmup_updates))
    peak = arguments[0]

    def schedule(update: int) -> float:
        if update < warmup_updates:
            return start + (peak - start) * update / warmup_updates
        return decay(update - warmup_updates)

    return schedule


def _decay(name: str, arguments: list[float | None], rest: int) -> Schedule:
    """What follows the warm-up, by updates since its end."""
    peak = arguments[0]
    assert peak is not None
    if name == "constant":
        _at_most(name, arguments, 1)
        return lambda update: peak
    if name == "cosine_decay":
        steps, end = _two(name, arguments, rest, 0.0)
        return lambda update: end + (peak - end) * (1 + math.cos(math.pi * min(update, steps) / steps)) / 2
    if name == "linear_schedule":
        _at_most(name, arguments, 3)
        end, steps = [*arguments[1:], *[None] * (3 - len(arguments))]
        end, steps = 0.0 if end is None else end, rest if steps is None else steps
        _check_steps(name, steps)
        return lambda update: peak + (end - peak) * min(update, steps) / steps
    if name == "exponential_decay":
        _at_most(name, arguments, 2)
        rate = _required(name, arguments, 1)
        return lambda update: peak * rate**update
    _at_most(name, arguments, 3)
    rate, size = _required(name, arguments, 1), _required(name, arguments, 2)
    _check_steps(name, size)
    return lambda update: peak * rate ** (update // size)


def _arguments(given: Any, learning_rate: float) -> list[float | None]:
    if given is None or given == []:
        return [learning_rate]
    if not isinstance(given, list) or not all(value is None or _is_number(value) for value in given):
        raise ConfigError(f"lr_schedule arguments must be a list of numbers, got {short(given)}")
    return [learning_rate if given[0] is None else given[0], *given[1:]]


def _two(name: str, arguments: list[float | None], rest: int, default_end: float) -> tuple[float, float]:
    _at_most(name, arguments, 3)
    steps, end = [*arguments[1:], *[None] * (3 - len(arguments))]
    steps, end = rest if steps is None else steps, default_end if end is None else end
    _check_steps(name, steps)
    return steps, end


def _check_steps(name: str, steps: float) -> None:
    if steps < 1:
        raise ConfigError(f"lr_schedule {name}: the number of updates must be 1 or more, got {steps}")


def _required(name: str, arguments: list[float | None], place: int) -> float:
    value = arguments[place] if place < len(arguments) else None
    if value is None:
        raise ConfigError(f"lr_schedule {name} needs argument {place + 1} of its arguments, got {short(arguments)}")
    return value


def _at_most(name: str, arguments: list[float | None], count: int) -> None:
    if len(arguments) > count:
        raise ConfigError(f"lr_schedule {name} takes {count} arguments at most, got {short(arguments)}")


def _number(settings: Mapping[str, Any], key: str, default: float) -> float:
    value = settings.get(key, default)
    value = default if value is None else value
    if not _is_number(value) or value < 0:
        raise ConfigError(f"lr_schedule {key} must be a number of at least 0, got {short(value)}")
    return float(value)


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value)
