"""A cache in 4 or 8 bits instead of 16 or 32.

Keys and values are quantised as they come and dequantised as they are fetched, one layer at a time. That keeps the
attention kernel as it is, and costs each step a pass over the layer's cache and a full-precision copy of that layer.
"""

import mlx.core as mx

from .cache import KVCache

CACHE_BITS = (4, 8)
GROUP_SIZES = (32, 64, 128)  # what MLX's quantisation kernels know


class QuantizedKVCache(KVCache):
    """A KVCache of packed rows: a token's codes, then the scales of its groups, then their biases.

    Axes as in KVCache, G = D / group_size groups; `keys` and `values` are 32-bit words, (B, H, capacity, words).
    """

    def __init__(self, bits: int, group_size: int, head_dim: int) -> None:
        assert bits in CACHE_BITS, bits
        assert group_size in GROUP_SIZES, group_size
        assert head_dim % group_size == 0, (head_dim, group_size)
        super().__init__()
        self.bits, self.group_size, self.head_dim = bits, group_size, head_dim
        self.dtype = mx.float32  # of the scales and biases: that of the newest keys

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Append keys and values (B, H, L, D) of the newest L tokens; return all that is held, (B, H, offset, D)."""
        self.dtype = keys.dtype
        packed_keys, packed_values = super().update_and_fetch(self._quantize(keys), self._quantize(values))
        return self._dequantize(packed_keys), self._dequantize(packed_values)

    def pack(self, codes: mx.array, scales: mx.array, biases: mx.array) -> mx.array:
        """Codes (B, H, L, D*bits/32) uint32, scales and biases (B, H, L, G) -> rows (B, H, L, words)."""
        affine = mx.concatenate([scales, biases], axis=-1)  # 2G numbers fill whole words, in 16 bits too
        return mx.concatenate([codes, affine.view(mx.uint32)], axis=-1)

    def unpack(self, rows: mx.array) -> tuple[mx.array, mx.array, mx.array]:
        """The inverse of `pack`."""
        codes, affine = mx.split(rows, [self.head_dim * self.bits // 32], axis=-1)
        scales, biases = mx.split(affine.view(self.dtype), 2, axis=-1)
        return codes, scales, biases

    def _quantize(self, x: mx.array) -> mx.array:
        codes, scales, biases = mx.quantize(x, group_size=self.group_size, bits=self.bits)
        return self.pack(codes, scales, biases)

    def _dequantize(self, rows: mx.array) -> mx.array:
        codes, scales, biases = self.unpack(rows)
        return mx.dequantize(codes, scales, biases, group_size=self.group_size, bits=self.bits)
