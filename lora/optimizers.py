"""MLX's optimizers by name, their options checked, and gradients brought to a mean and a bounded length."""

import inspect
from collections.abc import Mapping
from typing import Any

import mlx.core as mx
import mlx.optimizers as optim
from mlx.utils import tree_flatten, tree_map

from ..config_keys import short
from ..errors import ConfigError

_CLASSES: dict[str, Any] = {
    "adam": optim.Adam,
    "adamw": optim.AdamW,
    "sgd": optim.SGD,
    "adafactor": optim.Adafactor,
    "muon": optim.Muon,
}
_NORM_EPS = 1e-6  # as PyTorch's clip_grad_norm_, so that a clipped step is the same there


def make_optimizer(name: str, config: Mapping[str, Any], learning_rate: float) -> Any:
    """An optimizer; `config` is mlx-lm's `optimizer_config`: options by optimizer. Raises ConfigError for bad ones."""
    unknown = [key for key in config if key not in _CLASSES]
    if unknown:
        raise ConfigError(f"optimizer_config has {short(unknown[0])}, expected one of {', '.join(_CLASSES)}")
    options = config.get(name) or {}
    if not isinstance(options, Mapping):
        raise ConfigError(f"optimizer_config {name} must be a mapping, got {short(options)}")
    known = [key for key in inspect.signature(_CLASSES[name]).parameters if key != "learning_rate"]
    for key, value in options.items():
        if key not in known:
            raise ConfigError(f"optimizer_config: {name} has no option {short(key)}; it has {', '.join(known)}")
        if not _is_option(value):
            raise ConfigError(f"optimizer_config: {key} of {name} must be a number or a list of them: {short(value)}")
    if name == "adafactor":  # its own default would ignore the learning rate and its schedule
        options = {"relative_step": False, **options}
    return _CLASSES[name](learning_rate=learning_rate, **options)


def mean_gradients(gradients: Any, count: mx.array, max_norm: float | None) -> tuple[Any, mx.array]:
    """(gradients of the mean over `count` targets, their length before it is bounded by `max_norm`).

    The length is a float32 sum over all of them, whatever dtype they have.
    """
    leaves: Any = tree_flatten(gradients)
    squares = [mx.square(leaf.astype(mx.float32)).sum() for _, leaf in leaves]
    count = mx.maximum(count, 1.0)
    norm = mx.sqrt(mx.sum(mx.stack(squares))) / count
    factor = 1 / count
    if max_norm is not None:
        factor = factor * mx.minimum(1.0, max_norm / (norm + _NORM_EPS))
    return tree_map(lambda leaf: (leaf * factor).astype(leaf.dtype), gradients), norm


def _is_option(value: Any) -> bool:
    if isinstance(value, list):
        return all(type(item) in (int, float) for item in value)
    return value is None or type(value) in (int, float, bool)
