"""Adapters on a model: which layers get one, what of the model is trained, and how an adapter folder is loaded.

A folder holds `adapters.safetensors` and `adapter_config.json`; mlx-lm also reads and writes it. It loads only where
names and shapes agree exactly: an adapter that is half there, or of another base model, would run and compute
something else. `adapter_folder` writes one.
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from .adapter_config import EMBEDDING_PATH, AdapterSpec, check_base, read_adapter_config
from .adapter_layers import ADAPTERS, DoRALinear, InputLoRAEmbedding, LoRAEmbedding, LoRALinear
from .config_keys import listing, short
from .errors import CheckpointError, ConfigError
from .model import Model
from .safetensors_file import read_header
from .tensors import StoredTensor

CONFIG_NAME, WEIGHTS_NAME = "adapter_config.json", "adapters.safetensors"
_LINEARS = (nn.Linear, nn.QuantizedLinear)
_EMBEDDINGS = (nn.Embedding, nn.QuantizedEmbedding)
_QUANTIZED = (nn.QuantizedLinear, nn.QuantizedEmbedding)
_ADAPTER_DTYPES = ("F32", "F16", "BF16")


def add_adapters(model: Model, spec: AdapterSpec) -> dict[str, nn.Module]:
    """Make `model` ready to be trained as `spec` says; returns what is trained, by its path in the model.

    LoRA and DoRA put fresh adapters around layers, and the model computes what it did before; with "full" the layers
    themselves are trained. All else is frozen. Raises ConfigError, before anything is changed, for keys that name
    nothing (the candidates are listed), for more layers than there are, and for whole weights of a quantised model.
    """
    if spec.fine_tune_type == "full":
        trained = _whole_modules(model, spec)
        model.freeze()
        for module in trained.values():
            module.unfreeze()
        return trained
    adapters = _fresh_adapters(model, spec)
    model.freeze()
    _place(model, adapters)
    return adapters


def adapter_weights(model: Model) -> dict[str, mx.array]:
    """What belongs into `adapters.safetensors`: the adapters' arrays; of a model without any, all that is trained."""
    own = {
        f"{path}.{name}": array
        for path, module in model.named_modules()
        if isinstance(module, ADAPTERS)
        for name, array in _own_arrays(module)
    }
    return own or dict(tree_flatten(model.trainable_parameters()))


def load_adapters(model: Model, folder: Path) -> AdapterSpec:
    """Add the adapters of a folder that this project or mlx-lm wrote; returns what its config says.

    The model is left in evaluation mode, and as after `add_adapters` only what the folder holds is trainable.
    Raises ConfigError or CheckpointError, and leaves the model as it was, unless names and shapes agree exactly.
    """
    if not (folder / CONFIG_NAME).is_file():
        raise CheckpointError(f"no adapter folder {folder}; expected one with {CONFIG_NAME} and {WEIGHTS_NAME}")
    spec = read_adapter_config(folder / CONFIG_NAME)
    check_base(spec, model.config, str(folder))
    if spec.fine_tune_type == "full":
        _load_full(model, spec, folder / WEIGHTS_NAME)
    else:
        spec = _load_low_rank(model, spec, folder / WEIGHTS_NAME)
    model.eval()
    return spec


def _load_low_rank(model: Model, spec: AdapterSpec, file: Path) -> AdapterSpec:
    """LoRA or DoRA, in the file's own dtype. Returns `spec` with its keys."""
    stored = read_header(file)
    spec = _with_stored_keys(spec, model, stored)
    adapters = _fresh_adapters(model, spec)
    expected = {f"{path}.{name}": array for path, layer in adapters.items() for name, array in _own_arrays(layer)}
    _check_tensors(stored, expected, list(expected), file, spec)
    weights: Any = mx.load(str(file))
    model.freeze()
    _place(model, adapters)
    model.load_weights(list(weights.items()), strict=False)  # the file does not hold the base's weights
    return spec


def _load_full(model: Model, spec: AdapterSpec, file: Path) -> None:
    """Whole weights: all of the layers that were trained, in the dtype that the model was loaded in."""
    stored = read_header(file)
    trained = _whole_modules(model, spec)
    expected = dict(tree_flatten(model.parameters()))
    required = [name for name in expected if name.startswith(tuple(f"{path}." for path in trained))]
    _check_tensors(stored, expected, required, file, spec)
    weights: Any = mx.load(str(file))
    model.freeze()
    for module in trained.values():
        module.unfreeze()
    model.load_weights([(name, array.astype(expected[name].dtype)) for name, array in weights.items()], strict=False)


def _whole_modules(model: Model, spec: AdapterSpec) -> dict[str, nn.Module]:
    """The layers, and what `keys` name beside them, that "full" trains, by path."""
    modules = dict(model.named_modules())
    paths = [*_layer_paths(model, spec), *(spec.keys or ())]
    unmatched = [path for path in paths if path not in modules]
    if unmatched:
        others = [path for path in (EMBEDDING_PATH, "transformer.norm", "lm_head") if path in modules]
        raise ConfigError(
            f"modules {short(unmatched)} are not in this model; beside its layers, {', '.join(others)} are"
        )
    trained = {path: modules[path] for path in paths}
    packed = [
        path for path, module in trained.items() if any(isinstance(part, _QUANTIZED) for part in module.modules())
    ]
    if packed:
        raise ConfigError(
            f"{packed[0]} is quantized, and whole weights need plain ones: take the unquantized model, "
            "or fine_tune_type lora"
        )
    return trained


def _fresh_adapters(model: Model, spec: AdapterSpec) -> dict[str, nn.Module]:
    """Adapters for the layers that `spec` names, by path, not yet in the model."""
    layers = _layer_paths(model, spec)
    modules = dict(model.named_modules())
    keys = _linear_keys(model) if spec.keys is None else spec.keys
    unmatched = [key for key in keys if key not in modules and f"{layers[-1]}.{key}" not in modules]
    if unmatched or not (keys or spec.input_embedding):
        candidates = ", ".join(
            [*_linear_keys(model), *(path for path in (EMBEDDING_PATH, "lm_head") if path in modules)]
        )
        raise ConfigError(f"adapter keys {short(unmatched)} name no layer of this model; it has {candidates}")
    paths = [f"{layer}.{key}" for layer in layers for key in keys] + list(keys)
    adapters = {path: _adapter_for(modules[path], path, spec) for path in paths if path in modules}
    if spec.input_embedding:
        if EMBEDDING_PATH in adapters:
            raise ConfigError(f"input_embedding and the key {EMBEDDING_PATH} exclude each other; keep one of them")
        adapters[EMBEDDING_PATH] = InputLoRAEmbedding(modules[EMBEDDING_PATH], spec.rank, spec.scale)
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
