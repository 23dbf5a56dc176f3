"""Where settings come from: a recipe, a YAML file with mlx-lm's keys, and the command's flags, laid over each other."""

import argparse
import re
from collections.abc import Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from ..config_keys import short
from ..errors import ConfigError
from .settings import Settings, known_keys

RECIPES = Path(__file__).parent / "recipes"
_IGNORED = ("config", "trust_remote_code")  # mlx-lm's: nothing in a model folder is ever executed here
# flag -> (key that holds a mapping, its entry)
_INSIDE = {
    "rank": ("lora_parameters", "rank"),
    "scale": ("lora_parameters", "scale"),
    "alpha": ("lora_parameters", "alpha"),
    "dropout": ("lora_parameters", "dropout"),
    "rslora": ("lora_parameters", "rslora"),
    "keys": ("lora_parameters", "keys"),
    "schedule": ("lr_schedule", "name"),
    "warmup": ("lr_schedule", "warmup"),
    "warmup_init": ("lr_schedule", "warmup_init"),
}
# YAML 1.1 takes 1e-5 for a text; YAML 1.2, and whoever writes it, for a number.
_FLOAT = re.compile(r"[-+]?(?:[0-9][0-9_]*(?:\.[0-9_]*)?|\.[0-9_]+)[eE][-+]?[0-9]+\Z")


def recipe_names() -> list[str]:
    """The recipes that are shipped, by the name that --recipe takes."""
    return sorted(path.stem for path in RECIPES.glob("*.yaml"))


def read_settings(args: argparse.Namespace, stored: Mapping[str, Any] | None = None) -> Settings:
    """The settings of a run; `stored` are those of the run to resume, below all that is given now."""
    values: dict[str, Any] = dict(stored or {})
    if args.recipe is not None:
        _lay_over(values, _recipe(args.recipe))
    if args.config is not None:
        _lay_over(values, read_yaml(Path(args.config)))
    _lay_over(values, flag_values(args))
    return Settings.from_values(values)


def flag_values(args: argparse.Namespace) -> dict[str, Any]:
    """What was given on the command line, in the shape of a YAML file."""
    known = known_keys()
    values: dict[str, Any] = {}
    for flag, value in vars(args).items():
        if value is None:
            continue
        if flag in _INSIDE:
            key, entry = _INSIDE[flag]
            values.setdefault(key, {})[entry] = value
        elif flag in known:
            values[flag] = value
    return values


def read_yaml(path: Path) -> dict[str, Any]:
    """A YAML file of settings. Raises ConfigError for what cannot be read, and for unknown keys."""
    import yaml

    class Loader(yaml.SafeLoader):
        pass

    Loader.add_implicit_resolver("tag:yaml.org,2002:float", _FLOAT, list("-+.0123456789"))
    try:
        raw = yaml.load(path.read_text(encoding="utf-8"), Loader)
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"{path} is no YAML: {' '.join(str(error).split())[:200]}") from None
    if not isinstance(raw, dict):
        raise ConfigError(f"{path} must hold keys and values, got {short(raw)}")
    _check_names(raw, (*known_keys(), *_IGNORED), str(path))
    return {key: value for key, value in raw.items() if key not in _IGNORED}


def _check_names(raw: Mapping[Any, Any], known: tuple[str, ...], where: str) -> None:
    for key in raw:
        if key not in known and key in _INSIDE:
            section, entry = _INSIDE[key]
            raise ConfigError(f"{where}: {key} is an entry of {section}, under the name {entry}")
        if key not in known:
            near = get_close_matches(str(key), known, n=3, cutoff=0.5)
            raise ConfigError(
                f"{where}: unknown key {short(key)}; did you mean {', '.join(near)}?"
                if near
                else f"{where}: unknown key {short(key)}; known are {', '.join(sorted(known))}"
            )


def _recipe(name: str) -> dict[str, Any]:
    path = RECIPES / f"{name}.yaml"
    if name not in recipe_names():
        raise ConfigError(f"no recipe {short(name)}; there are {', '.join(recipe_names())}")
    return read_yaml(path)


def _lay_over(values: dict[str, Any], above: Mapping[str, Any]) -> None:
    """Put `above` over `values`; of `lora_parameters` and `lr_schedule` entry by entry, so that a flag changes one."""
    if above.get("iters") is not None and above.get("epochs") is not None:
        raise ConfigError(
            f"iters {short(above['iters'])} and epochs {short(above['epochs'])} exclude each other: drop one"
        )
    for key, value in above.items():
        if value is None:
            continue
        if (
            key in ("lora_parameters", "lr_schedule")
            and isinstance(values.get(key), Mapping)
            and isinstance(value, Mapping)
        ):
            merged = {**values[key], **value}
            if "alpha" in value and "scale" not in value:  # one takes the other's place
                merged.pop("scale", None)
            elif "scale" in value and "alpha" not in value:
                merged.pop("alpha", None)
            values[key] = merged
        else:
            values[key] = value
    if "epochs" in above and above["epochs"] is not None and "iters" not in above:
        values.pop("iters", None)
    elif "iters" in above and above["iters"] is not None and "epochs" not in above:
        values.pop("epochs", None)
    _take_over_peak(values, above)


def _take_over_peak(values: dict[str, Any], above: Mapping[str, Any]) -> None:
    """A learning rate given later than the schedule is the schedule's peak: its first argument."""
    schedule = values.get("lr_schedule")
    given = above.get("learning_rate")
    if given is None or "arguments" in (above.get("lr_schedule") or {}) or not isinstance(schedule, Mapping):
        return
    arguments = schedule.get("arguments")
    if isinstance(arguments, list) and arguments:
        values["lr_schedule"] = {**schedule, "arguments": [given, *arguments[1:]]}
