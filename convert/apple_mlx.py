"""Apple's own MLX folders: `weights.safetensors` under CoreNet's names, and a `config.json` of three keys.

    {"model_name": "OpenELM-270M", "vocab_size": 32128, "max_context_length": 2048[, "quantization": {...}]}

Widths follow from the name, or from the tensors where the name is none of the published ones. The 4-bit files were
written by MLX 0.10: linear layers packed, the embedding not. Packing is as today (element j of a word at bit 4 j,
w = q * scale + bias); what changed in 0.11 is that readers expect the embedding to be packed too. Which matrices are
packed, the tensors say. Source: apple/corenet `mlx_examples/open_elm`, ml-explore/mlx.
"""

from collections.abc import Mapping
from typing import Any

from ..config import PUBLISHED_SIZES, OpenELMConfig, published_size
from ..config_keys import short
from ..errors import ConfigError
from ..tensors import StoredTensor

FORMAT = "apple-mlx"
WEIGHTS_NAME = "weights.safetensors"


def is_apple_config(raw: Mapping[str, Any]) -> bool:
    """Whether a `config.json` is of this kind: a name in place of dimensions."""
    return "model_name" in raw and "model_dim" not in raw


def apple_config(raw: Mapping[str, Any], tensors: Mapping[str, StoredTensor], where: str) -> OpenELMConfig:
    """The configuration that such a `config.json` means, of tensors with Hub names. Raises ConfigError."""
    name = raw["model_name"]
    limits = {key: raw[key] for key in ("vocab_size", "max_context_length") if raw.get(key) is not None}
    size = published_size(name) if isinstance(name, str) else None
    if size is not None:
        return OpenELMConfig.from_name(size, **limits)
    context = limits.get("max_context_length")
    if type(context) is int:
        limits["rope_max_length"] = 2 * context  # as in every released configuration
    try:
        return OpenELMConfig.from_shapes(_unpacked_shapes(tensors, raw), **limits)
    except ConfigError as error:
        raise ConfigError(
            f"{where}: model_name {short(name)} is not a published OpenELM ({', '.join(PUBLISHED_SIZES)}), and {error}"
        ) from None


def _unpacked_shapes(tensors: Mapping[str, StoredTensor], raw: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Shapes as they were before packing: a row has as many values as its scales have groups."""
    entry = raw.get("quantization")
    group = entry.get("group_size") if isinstance(entry, Mapping) else None
    shapes: dict[str, tuple[int, ...]] = {}
    for name, tensor in tensors.items():
        module, _, suffix = name.rpartition(".")
        scales = tensors.get(f"{module}.scales")
        if suffix == "weight" and scales is not None and len(scales.shape) == 2 and type(group) is int:
            shapes[name] = (tensor.shape[0] if tensor.shape else 0, scales.shape[1] * group)
        elif suffix not in ("scales", "biases"):
            shapes[name] = tensor.shape
    return shapes
