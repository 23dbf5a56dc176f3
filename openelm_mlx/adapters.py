"""Adapters on a model, and the adapter folders that mlx-lm also reads and writes.

A folder holds `adapters.safetensors` and `adapter_config.json`. It loads only where names and shapes agree exactly:
an adapter that is half there, or of another base model, would run and compute something else.
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from .adapter_config import AdapterSpec, read_adapter_config
from .adapter_layers import DoRALinear, InputLoRAEmbedding, LoRAEmbedding, LoRALinear
from .config_keys import listing, short
from .errors import CheckpointError, ConfigError
from .model import Model
from .safetensors_file import read_header
from .tensors import StoredTensor

_LINEARS = (nn.Linear, nn.QuantizedLinear)
_EMBEDDINGS = (nn.Embedding, nn.QuantizedEmbedding)
_EMBEDDING_PATH = "transformer.token_embeddings"
_ADAPTER_DTYPES = ("F32", "F16", "BF16")


def add_adapters(model: Model, spec: AdapterSpec) -> dict[str, nn.Module]:
    """Put fresh adapters around the layers that `spec` (lora or dora) names; returns them by their path in the model.

    The model computes what it did before. Freezing the base is the caller's: `model.freeze()` first.
    Raises ConfigError for keys that name nothing (the candidates are listed) and for more layers than there are.
    """
    adapters = _fresh_adapters(model, spec)
    _place(model, adapters)
    return adapters


def load_adapters(model: Model, folder: Path) -> None:
    """Add the adapters of a folder that this project or mlx-lm wrote; leaves the model in evaluation mode.

    Raises ConfigError or CheckpointError, and leaves the model as it was, unless names and shapes agree exactly.
    """
    if not folder.is_dir():
        raise CheckpointError(
            f"no adapter folder {folder}; expected one with adapter_config.json and adapters.safetensors"
        )
    spec = read_adapter_config(folder / "adapter_config.json")
    if spec.fine_tune_type == "full":
        _load_full(model, spec, folder / "adapters.safetensors")
    else:
        _load_low_rank(model, spec, folder / "adapters.safetensors")
    model.eval()


def _load_low_rank(model: Model, spec: AdapterSpec, file: Path) -> None:
    """LoRA or DoRA, in the file's own dtype."""
    stored = read_header(file)
    adapters = _fresh_adapters(model, _with_stored_keys(spec, model, stored))
    expected = {f"{path}.{name}": array for path, layer in adapters.items() for name, array in _own_arrays(layer)}
    _check_tensors(stored, expected, list(expected), file, spec)
    weights: Any = mx.load(str(file))
    _place(model, adapters)
    model.load_weights(list(weights.items()), strict=False)  # the file does not hold the base's weights


def _load_full(model: Model, spec: AdapterSpec, file: Path) -> None:
    """Whole weights: all of the layers that were trained, in the dtype that the model was loaded in."""
    expected = dict(tree_flatten(model.parameters()))
    layers = tuple(f"{path}." for path in _layer_paths(model, spec))
    required = [name for name in expected if name.startswith(layers)]
    _check_tensors(read_header(file), expected, required, file, spec)
    weights: Any = mx.load(str(file))
    model.load_weights([(name, array.astype(expected[name].dtype)) for name, array in weights.items()], strict=False)


def _fresh_adapters(model: Model, spec: AdapterSpec) -> dict[str, nn.Module]:
    """Adapters for the layers that `spec` names, by path, not yet in the model."""
    layers = _layer_paths(model, spec)
    modules = dict(model.named_modules())
    keys = _linear_keys(model) if spec.keys is None else spec.keys
    unmatched = [key for key in keys if key not in modules and f"{layers[-1]}.{key}" not in modules]
    if unmatched or not (keys or spec.input_embedding):
        candidates = ", ".join(
            [*_linear_keys(model), *(path for path in (_EMBEDDING_PATH, "lm_head") if path in modules)]
        )
        raise ConfigError(f"adapter keys {short(unmatched)} name no layer of this model; it has {candidates}")
    paths = [f"{layer}.{key}" for layer in layers for key in keys] + list(keys)
    adapters = {path: _adapter_for(modules[path], path, spec) for path in paths if path in modules}
    if spec.input_embedding:
        if _EMBEDDING_PATH in adapters:
            raise ConfigError(f"input_embedding and the key {_EMBEDDING_PATH} exclude each other; keep one of them")
        adapters[_EMBEDDING_PATH] = InputLoRAEmbedding(modules[_EMBEDDING_PATH], spec.rank, spec.scale)
    return adapters


def _adapter_for(base: nn.Module, path: str, spec: AdapterSpec) -> nn.Module:
    dora = spec.fine_tune_type == "dora"
    if isinstance(base, _LINEARS):
        return (DoRALinear if dora else LoRALinear)(base, spec.rank, spec.scale, spec.dropout)
    if isinstance(base, _EMBEDDINGS) and not dora:
        return LoRAEmbedding(base, spec.rank, spec.scale, spec.dropout)
    if isinstance(base, _EMBEDDINGS):
        raise ConfigError(f"DoRA does not adapt {path}; use fine_tune_type lora, or input_embedding")
    raise ConfigError(f"{path} is a {type(base).__name__}; adapters go around linear layers and embeddings, once")


def _layer_paths(model: Model, spec: AdapterSpec) -> list[str]:
    """Paths of the transformer layers that `spec.num_layers` means."""
    total = len(model.layers)
    if spec.num_layers > total:
        raise ConfigError(
            f"num_layers is {short(spec.num_layers)}, but the model has {total} layers; use at most that, or -1 for all"
        )
    first = total - spec.num_layers if spec.num_layers > 0 else 0
    return [f"transformer.layers.{i}" for i in range(first, total)]


def _linear_keys(model: Model) -> tuple[str, ...]:
    """The linear layers of a transformer layer, adapted or not: `attn.qkv_proj` and so on; every layer has the same."""
    modules = model.layers[0].named_modules()
    return tuple(sorted(name.removesuffix(".linear") for name, module in modules if isinstance(module, _LINEARS)))


def _with_stored_keys(spec: AdapterSpec, model: Model, stored: Mapping[str, StoredTensor]) -> AdapterSpec:
    """`spec` with its keys; where the folder names none, those of mlx-lm at the time it was written.

    Today that is every linear layer; older versions took qkv_proj alone. The tensors tell which.
    """
    if spec.keys is not None:
        return spec
    found = tuple(key for key in _linear_keys(model) if any(f".{key}." in name for name in stored))
    return replace(spec, keys=found or None)


def _place(model: Model, adapters: Mapping[str, nn.Module]) -> None:
    modules = dict(model.named_modules())
    for path, layer in adapters.items():
        parent, _, name = path.rpartition(".")
        setattr(modules[parent], name, layer.train(model.training))


def _own_arrays(layer: nn.Module) -> list[tuple[str, mx.array]]:
    """The adapter's parameters without those of the layer it wraps."""
    return [(name, value) for name, value in layer.items() if isinstance(value, mx.array)]


def _check_tensors(
    stored: Mapping[str, StoredTensor],
    expected: Mapping[str, mx.array],
    required: list[str],
    file: Path,
    spec: AdapterSpec,
) -> None:
    """Raise one CheckpointError listing all that is missing, extra, misshapen or of a dtype that is no adapter's."""
    faults = []
    for name, tensor in stored.items():
        if name not in expected:
            faults.append(f"unexpected {name}")
        elif tensor.shape != expected[name].shape:
            faults.append(f"{name} has shape {tensor.shape}, this model needs {expected[name].shape}")
        elif tensor.dtype not in _ADAPTER_DTYPES:
            faults.append(f"{name} has dtype {tensor.dtype}, expected one of {', '.join(_ADAPTER_DTYPES)}")
    faults += [f"missing {name}" for name in required if name not in stored]
    if faults:
        trained_on = f" (trained on {short(spec.base_model)})" if spec.base_model else ""
        raise CheckpointError(f"{file}{trained_on} does not fit this model: {listing(faults)}")
