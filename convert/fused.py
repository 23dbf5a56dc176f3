"""A model and its adapter as one source: every adapted matrix is summed in float32 while its rows are read.

    linear layer         W + s (A B)'             DoRA scales each row of that to the length it has learned
    embedding, both      E + s A B                a tied output head follows
    embedding, input     E + s A B                the output head keeps E: a tied model becomes an untied one
    whole weights        in the place of the base's

A and B as the adapter's file holds them: (I, R) and (R, O), of an embedding (V, R) and (R, E).
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from ..adapter_config import EMBEDDING_PATH, AdapterSpec
from ..adapter_layers import ADAPTERS, SHORTEST_ROW, DoRALinear, InputLoRAEmbedding, LoRALinear
from ..adapters import WEIGHTS_NAME, load_adapters
from ..model import Model
from ..quantize import Quantization
from ..safetensors_file import read_header
from ..tensors import StoredTensor
from .computed import unpacked
from .sources import EMBEDDING, HEAD, Source

Change = Callable[[np.ndarray, int, int], np.ndarray]


def fused(base: Source, folder: Path) -> tuple[Source, AdapterSpec]:
    """`base`, unpacked if need be, with the adapter in `folder`; its `quantization` is that of the base, if any.

    Nothing is read yet but the adapter. Raises ConfigError or CheckpointError when it is not an adapter of this model.
    """
    model = Model(base.config)  # never computed: it is there to be checked against
    spec = load_adapters(model, folder)
    plain = _unpacked(base)
    if spec.fine_tune_type == "full":
        return replace(base, tensors=plain | read_header(folder / WEIGHTS_NAME)), spec
    adapters = {path: layer for path, layer in model.named_modules() if isinstance(layer, ADAPTERS)}
    tensors = plain | {f"{path}.weight": _changed(plain[f"{path}.weight"], layer) for path, layer in adapters.items()}
    if not spec.input_embedding or not base.config.share_input_output_layers:
        return replace(base, tensors=tensors), spec
    untied = replace(base.config, share_input_output_layers=False)
    quantization = base.quantization and _with_head(base.quantization)
    head = plain[EMBEDDING].renamed(HEAD)
    return replace(base, tensors=tensors | {HEAD: head}, config=untied, quantization=quantization), spec


def _unpacked(base: Source) -> dict[str, StoredTensor]:
    """The parameters under their plain names and in plain numbers."""
    modules = base.quantization.modules if base.quantization else {}
    plain = {}
    for name, shape in base.config.parameter_shapes().items():
        path = name.removesuffix(".weight")
        if path in modules:
            parts = [base.tensors[f"{path}.{suffix}"] for suffix in modules[path].packed(shape, "F32")]
            plain[name] = unpacked(name, parts, modules[path], shape[1])
        else:
            plain[name] = base.tensors[name]
    return plain


def _with_head(quantization: Quantization) -> Quantization:
    """The head of an untied model is packed as the embedding is."""
    head = HEAD.removesuffix(".weight")
    if EMBEDDING_PATH not in quantization.modules:
        return replace(quantization, skipped=(*quantization.skipped, head))
    return replace(quantization, modules={**quantization.modules, head: quantization.modules[EMBEDDING_PATH]})


def _changed(matrix: StoredTensor, layer: nn.Module) -> StoredTensor:
    """The matrix with a layer's adapter added, in float32."""
    change = _change(layer)

    def rows(start: int, stop: int) -> np.ndarray:
        return change(_singles(matrix.read_rows(start, stop), matrix.dtype), start, stop)

    return StoredTensor(matrix.name, "F32", matrix.shape, rows)


def _change(layer: nn.Module) -> Change:
    """What a layer's adapter does to rows of its matrix."""
    if isinstance(layer, LoRALinear):
        b = np.float32(layer.scale) * _array(layer.lora_b).T  # (O, R)
        add = partial(_add, np.ascontiguousarray(b), np.ascontiguousarray(_array(layer.lora_a).T))
        return partial(_stretch, add, _array(layer.m)) if isinstance(layer, DoRALinear) else add
    names = ("input_lora_a", "input_lora_b") if isinstance(layer, InputLoRAEmbedding) else ("lora_a", "lora_b")
    a, b = (_array(layer[name]) for name in names)
    return partial(_add, np.float32(layer.scale) * a, b)


def _add(left: np.ndarray, right: np.ndarray, rows: np.ndarray, start: int, stop: int) -> np.ndarray:
    """rows + left @ right, for rows [start, stop)."""
    return rows + left[start:stop] @ right


def _stretch(add: Change, lengths: np.ndarray, rows: np.ndarray, start: int, stop: int) -> np.ndarray:
    """DoRA: each row of the sum has the length that was learned for it."""
    summed = add(rows, start, stop)
    own = np.maximum(np.linalg.norm(summed, axis=1), np.float32(SHORTEST_ROW))
    return summed * (lengths[start:stop] / own)[:, None]


def _singles(values: np.ndarray, code: str) -> np.ndarray:
    """The bits of a floating-point dtype (safetensors' code) as float32."""
    if code == "BF16":  # the upper half of a float32
        return (values.astype(np.uint32) << 16).view(np.float32)
    return values.astype(np.float32)


def _array(values: mx.array) -> np.ndarray:
    return np.array(values.astype(mx.float32))
