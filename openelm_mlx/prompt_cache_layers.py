"""One layer's cache as mlx-lm's prompt-cache files name it (mlx-lm 0.32, `mlx_lm/models/cache.py`), both ways.

Arrays and numbers are named by their place in a layer's state, behind the layer's number and a dot:

    KVCache           0 keys         1 values         2 offset
    RotatingKVCache   0 keys         1 values         2 offset   3 keep         4 max_size   5 next slot
    QuantizedKVCache  0.0-0.2 keys   1.0-1.2 values   2 offset   3 group size   4 bits

mlx-lm saves keys and values with the unused rest of their last block. Nothing read is trusted.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NoReturn

import mlx.core as mx

from .cache import KVCache
from .errors import CheckpointError
from .quantized_cache import CACHE_BITS, GROUP_SIZES, QuantizedKVCache
from .rotating_cache import RotatingKVCache
from .tensors import StoredTensor, mlx_name, to_mlx

_MAX_POSITION = 2**30  # far beyond any context, and within MLX's 32-bit positions


def layer_state(cache: KVCache) -> dict[str, mx.array | int]:
    """What a layer holds, by mlx-lm's names, without unused room."""
    assert cache.keys is not None, "an empty cache has nothing to save"
    assert cache.values is not None
    held = min(cache.offset, cache.keys.shape[2])
    keys, values = cache.keys[:, :, :held], cache.values[:, :, :held]
    if isinstance(cache, QuantizedKVCache):
        arrays: dict[str, mx.array | int] = {f"0.{i}": array for i, array in enumerate(cache.unpack(keys))}
        arrays |= {f"1.{i}": array for i, array in enumerate(cache.unpack(values))}
        return arrays | {"2": cache.offset, "3": cache.group_size, "4": cache.bits}
    state: dict[str, mx.array | int] = {"0": keys, "1": values, "2": cache.offset}
    if isinstance(cache, RotatingKVCache):
        state |= {"3": cache.keep, "4": cache.max_size, "5": cache.slot(cache.offset - 1) + 1}
    return state


class StoredLayer:
    """One layer's part of a file, read with checks against the keys (1, H, any, D) that the model makes for it."""

    def __init__(self, path: Path, layer: int, tensors: Mapping[str, StoredTensor], model_keys: mx.array) -> None:
        self._path, self._layer, self._tensors = path, layer, tensors
        _, self._heads, _, self.head_dim = model_keys.shape
        self.dtype = model_keys.dtype
        self.names_read: set[str] = set()

    def read(self, kind: str) -> KVCache:
        """The layer's cache, of a class that mlx-lm names. Raises CheckpointError for whatever does not fit."""
        reader = _READERS.get(kind)
        if reader is None:
            self.refuse(f"is a {kind!r:.60}; expected {', '.join(_READERS)}")
        return reader(self)

    def rows(self, place: str, width: int, dtype: mx.Dtype) -> mx.array:
        """The array at `place`, (1, H, tokens, width)."""
        tensor = self._tensor(place)
        shape = tensor.shape
        if len(shape) != 4 or shape[:2] != (1, self._heads) or shape[3] != width:
            wanted = f"(1, {self._heads}, tokens, {width})"
            self.refuse(f"has shape {shape!s:.60} at {place}, this model needs {wanted}: it is another model's")
        if getattr(mx, mlx_name(tensor.dtype)) != dtype:
            name = str(dtype).rpartition(".")[2]
            self.refuse(f"is {mlx_name(tensor.dtype)}, this model as it is loaded needs {name}: another --dtype?")
        return to_mlx(tensor.read(), tensor.dtype)

    def number(self, place: str, low: int, high: int) -> int:
        """The whole number at `place`, between two bounds."""
        tensor = self._tensor(place)
        if tensor.shape or not mlx_name(tensor.dtype).startswith("int"):
            self.refuse(f"has {mlx_name(tensor.dtype)} of shape {tensor.shape!s:.60} where number {place} belongs")
        value = int(tensor.read())
        if not low <= value <= high:
            self.refuse(f"has {value} as number {place}, which must lie between {low} and {high}")
        return value

    def refuse(self, what: str) -> NoReturn:
        raise CheckpointError(f"{self._path}: layer {self._layer} {what}; make it again with `openelm cache-prompt`")

    def _tensor(self, place: str) -> StoredTensor:
        name = f"{self._layer}.{place}"
        if name not in self._tensors:
            self.refuse(f"lacks {name!r}")
        self.names_read.add(name)
        return self._tensors[name]


def _read_plain(layer: StoredLayer) -> KVCache:
    cache = KVCache()
    _fill(cache, layer, layer.rows("0", layer.head_dim, layer.dtype), layer.rows("1", layer.head_dim, layer.dtype))
    return cache


def _read_quantized(layer: StoredLayer) -> KVCache:
    bits, group_size = layer.number("4", min(CACHE_BITS), max(CACHE_BITS)), layer.number("3", 1, layer.head_dim)
    if bits not in CACHE_BITS or group_size not in GROUP_SIZES or layer.head_dim % group_size:
        layer.refuse(f"is quantised to {bits} bits in groups of {group_size}, which this model's heads cannot have")
    cache = QuantizedKVCache(bits, group_size, layer.head_dim)
    cache.dtype = layer.dtype
    packed = []
    for place in "01":
        codes = layer.rows(f"{place}.0", layer.head_dim * bits // 32, mx.uint32)
        scales, biases = (layer.rows(f"{place}.{i}", layer.head_dim // group_size, layer.dtype) for i in (1, 2))
        if not codes.shape[2] == scales.shape[2] == biases.shape[2]:
            layer.refuse("has codes and scales of different lengths")
        packed.append(cache.pack(codes, scales, biases))
    _fill(cache, layer, *packed)
    return cache


def _fill(cache: KVCache, layer: StoredLayer, keys: mx.array, values: mx.array) -> None:
    if keys.shape[2] != values.shape[2]:
        layer.refuse("has keys and values of different lengths")
    cache.offset = layer.number("2", 1, keys.shape[2])
    cache.keys, cache.values = keys[:, :, : cache.offset], values[:, :, : cache.offset]


def _read_rotating(layer: StoredLayer) -> KVCache:
    """mlx-lm's ring begins wherever its last prefill left it, and may hold more than max_size: lay it out as ours."""
    keys, values = (layer.rows(place, layer.head_dim, layer.dtype) for place in "01")
    capacity = keys.shape[2]
    if capacity != values.shape[2]:
        layer.refuse("has keys and values of different lengths")
    offset, max_size = layer.number("2", 1, _MAX_POSITION), layer.number("4", 1, _MAX_POSITION)
    keep, following = layer.number("3", 0, max_size - 1), layer.number("5", 1, capacity)
    cache = RotatingKVCache(max_size, keep)
    cache.offset = offset
    if following == capacity or following >= offset:  # in the order of the text
        held, order = following, mx.arange(following)
    else:
        first, second = mx.arange(following, capacity), mx.arange(keep, following)
        held, order = capacity, mx.concatenate([mx.arange(keep), first, second])
    if held > offset or held < min(offset, max_size) or following < min(keep, held):
        layer.refuse(f"holds {held} of {offset} tokens in a ring of {max_size}")
    positions = cache.positions(offset)  # of ours; the first `keep` and the newest others are in the file, in order
    slots = order[mx.where(positions < keep, positions, held - (offset - positions))]
    cache.keys, cache.values = keys[:, :, slots], values[:, :, slots]
    return cache


_READERS: dict[str, Callable[[StoredLayer], KVCache]] = {
    "KVCache": _read_plain,
    "RotatingKVCache": _read_rotating,
    "QuantizedKVCache": _read_quantized,
}
