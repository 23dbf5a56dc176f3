"""Writes adapter folders, file by file: others (a trainer's state, its log) share the folder.

Each file appears whole or not at all. Where a folder's config is to say something else than it did, the old weights
go before it: at no moment does a config stand beside weights that it does not describe.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx

from .adapter_config import AdapterSpec, adapter_config
from .adapters import CONFIG_NAME, WEIGHTS_NAME, adapter_weights
from .atomic_file import new_file
from .config_keys import short
from .errors import ConfigError, OutputError
from .model import Model


def save_adapters(
    folder: Path, model: Model, spec: AdapterSpec, *, extra_config: Mapping[str, Any] | None = None
) -> None:
    """Write the trained weights of `model` and the config of `spec` into `folder`, made if need be.

    spec: the one given to `add_adapters`, or returned by `load_adapters`. extra_config: further keys of the config.
    Readable by `load_adapters` and by mlx-lm. Other files of the folder stay. Raises OutputError.
    """
    raw = adapter_config(spec, model.config)
    taken = sorted(raw.keys() & (extra_config or {}).keys())
    if taken:
        raise ConfigError(f"extra_config may not set {short(taken)}: the adapter's own keys")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OutputError(f"cannot make {folder}: {error.strerror or error}") from None
    _write_config(folder, raw, extra_config or {})
    save_adapter_weights(folder / WEIGHTS_NAME, model)


def save_adapter_weights(file: Path, model: Model) -> None:
    """Write the trained weights alone, under any name that ends in .safetensors. Raises OutputError."""
    weights = adapter_weights(model)
    mx.eval(weights)
    with new_file(file) as partial:
        try:
            mx.save_safetensors(str(partial), weights, {"format": "mlx"})
        except RuntimeError:
            raise OutputError(f"cannot write {file}: is the disk full? nothing was changed") from None


def _write_config(folder: Path, own: Mapping[str, Any], extra: Mapping[str, Any]) -> None:
    path = folder / CONFIG_NAME
    text = json.dumps({**own, **extra}, ensure_ascii=False, indent=2, sort_keys=True) + "\n"
    old = path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""
    if old == text:
        return
    if not _says(old, own):
        (folder / WEIGHTS_NAME).unlink(missing_ok=True)
    with new_file(path) as partial:
        partial.write_text(text, encoding="utf-8")


def _says(text: str, own: Mapping[str, Any]) -> bool:
    """Whether a config, if it is one, describes the same adapter."""
    try:
        old = json.loads(text)
    except (ValueError, RecursionError):
        return False
    return isinstance(old, dict) and all(old.get(key) == value for key, value in own.items())
