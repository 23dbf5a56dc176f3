"""Tensors that are computed from stored ones as their rows are read: nothing larger than a block is ever held.

A mean of checkpoints, a merged adapter, an unpacked matrix: each is a `StoredTensor` like any other, so everything
that streams tensors (casting, packing, writing, checking) works on them unchanged.
"""

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from ..quantize import QuantizationSettings
from ..tensors import StoredTensor, from_mlx, to_mlx

Array = np.ndarray


def floats(values: Array, code: str) -> Array:
    """The bits of a floating-point dtype (safetensors' code) as float64."""
    if code == "BF16":  # the upper half of a float32
        values = (values.astype(np.uint32) << 16).view(np.float32)
    return values.astype(np.float64)


def rounded(values: Array, code: str) -> Array:
    """float64 values as the bits of a dtype, to nearest even; bfloat16 by way of float32, as torch rounds."""
    if code == "F64":
        return values
    if code == "F16":
        return values.astype(np.float16)
    single = values.astype(np.float32)
    if code != "BF16":
        return single
    bits = single.view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def mean(tensors: Sequence[StoredTensor]) -> StoredTensor:
    """The mean of tensors of one shape and dtype, taken in float64 and rounded back to that dtype."""
    first = tensors[0]

    def rows(start: int, stop: int) -> Array:
        total = floats(first.read_rows(start, stop), first.dtype)
        for tensor in tensors[1:]:
            total += floats(tensor.read_rows(start, stop), tensor.dtype)
        return rounded(total / len(tensors), first.dtype)

    return StoredTensor(first.name, first.dtype, first.shape, rows)


def mapped(tensor: StoredTensor, change: Callable[[Array, int, int], Array]) -> StoredTensor:
    """float32 rows `change(rows in float64, start, stop)` of a matrix."""

    def rows(start: int, stop: int) -> Array:
        values = change(floats(tensor.read_rows(start, stop), tensor.dtype), start, stop)
        return np.ascontiguousarray(values, dtype=np.float32)

    return StoredTensor(tensor.name, "F32", tensor.shape, rows)


def unpacked(name: str, parts: Sequence[StoredTensor], settings: QuantizationSettings, width: int) -> StoredTensor:
    """A packed matrix (weight, scales[, biases]) in float32, shape (rows, width)."""
    return StoredTensor(name, "F32", (parts[0].shape[0], width), partial(_unpacked_rows, parts, settings))


def _unpacked_rows(parts: Sequence[StoredTensor], settings: QuantizationSettings, start: int, stop: int) -> Array:
    import mlx.core as mx  # the other computations need numpy alone

    weight, scales, *rest = (to_mlx(part.read_rows(start, stop), part.dtype) for part in parts)
    biases = rest[0].astype(mx.float32) if rest else None
    if rest:  # floats: unpack in float32, not in the scales' sixteen bits
        scales = scales.astype(mx.float32)
    return from_mlx(mx.dequantize(weight, scales, biases, **settings.to_dict(), dtype=mx.float32))
