"""A model with the adapter of a folder beside it, or with whole trained weights in place, as one source to convert.

`merged` sums what is beside. Of the two embedding adapters, the input's leaves a tied output head as it was, mlx-lm's
changes it too.
"""

from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from ..adapter_config import EMBEDDING_PATH, AdapterSpec
from ..adapter_layers import ADAPTERS, InputLoRAEmbedding, LoRALinear
from ..adapters import WEIGHTS_NAME, load_adapters
from ..model import Model
from ..quantize import Quantization
from ..safetensors_file import read_header
from ..tensors import StoredTensor
from .adapter_checkpoint import AdapterPart, CheckpointAdapter
from .merged import merged
from .sources import HEAD, Source


def fused(base: Source, folder: Path) -> tuple[Source, AdapterSpec]:
    """`base`, unpacked if need be, with the adapter in `folder` summed in as it is read.

    Only the adapter is read yet. Raises ConfigError or CheckpointError when it is not an adapter of this model.
    """
    model = Model(base.config)  # never computed: it is there for the adapter to be checked against
    spec = load_adapters(model, folder)
    plain = base.unpacked()
    if spec.fine_tune_type == "full":
        trained = read_header(folder / WEIGHTS_NAME)
        return replace(plain, tensors={**plain.tensors, **trained}, is_computed=True), spec
    layers = {path: layer for path, layer in model.named_modules() if isinstance(layer, ADAPTERS)}
    parts = {path: _part(path, layer) for path, layer in layers.items()}
    head_follows = not isinstance(layers.get(EMBEDDING_PATH), InputLoRAEmbedding)
    adapter = CheckpointAdapter(parts, spec.rank, spec.scale, head_follows=head_follows)
    return merged(replace(plain, adapter=adapter)), spec


def fused_quantization(base: Source, config_is_untied: bool) -> Quantization | None:
    """How the base was packed; the head of a model that is untied now is packed as its embedding is."""
    quantization, head = base.quantization, HEAD.removesuffix(".weight")
    if quantization is None or not config_is_untied:
        return quantization
    if EMBEDDING_PATH not in quantization.modules:
        return replace(quantization, skipped=(*quantization.skipped, head))
    return replace(quantization, modules={**quantization.modules, head: quantization.modules[EMBEDDING_PATH]})


def _part(path: str, layer: nn.Module) -> AdapterPart:
    """A layer's arrays, turned as CoreNet has them."""
    names = ("input_lora_a", "input_lora_b") if isinstance(layer, InputLoRAEmbedding) else ("lora_a", "lora_b")
    a, b = (_held(f"{path}.{name}", layer[name].T) for name in names)
    has_magnitude = isinstance(layer, LoRALinear) and "m" in layer
    return AdapterPart(a, b, _held(f"{path}.m", layer["m"]) if has_magnitude else None)


def _held(name: str, values: mx.array) -> StoredTensor:
    """An array in memory as a stored tensor, in float32."""
    array = np.ascontiguousarray(np.array(values.astype(mx.float32)))
    return StoredTensor(name, "F32", array.shape, lambda start, stop: array[start:stop])
