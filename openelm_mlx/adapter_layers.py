"""Adapter layers: small trained matrices beside frozen weights, with mlx-lm's parameter names and maths.

One is ours: `InputLoRAEmbedding`, the embedding adapter that Apple trained. mlx-lm has no such layer; its tensors bear
names of their own, so mlx-lm refuses them instead of computing something else.

Axes: I input width, O output width, R rank, V vocabulary, E model_dim.
"""

import math

import mlx.core as mx
import mlx.nn as nn

SHORTEST_ROW = 1e-30  # a row of zeros (coarse quantisation makes some) must stay zeros, not become 0/0


class LoRALinear(nn.Module):
    """linear(x) + scale * x @ lora_a @ lora_b, around a plain or quantised linear layer. Fresh, it changes nothing."""

    def __init__(self, linear: nn.Module, rank: int, scale: float, dropout: float = 0.0):
        super().__init__()
        self.linear = linear
        self.scale = scale
        self.dropout = nn.Dropout(dropout)
        output_dims, input_dims = _matrix_shape(linear)
        self.lora_a, self.lora_b = _fresh_pair(input_dims, rank, output_dims)  # (I, R), (R, O)

    def __call__(self, x: mx.array) -> mx.array:
        """x: (..., I) -> (..., O), in the dtype of x whatever the adapter's."""
        return self.linear(x) + self._low_rank(x).astype(x.dtype)

    def _low_rank(self, x: mx.array) -> mx.array:
        """The adapter's part, scaled where it is narrow: (..., R) instead of (..., O)."""
        return (self.scale * (self.dropout(x) @ self.lora_a)) @ self.lora_b


class DoRALinear(LoRALinear):
    """LoRA whose sum with the weight is rescaled row by row to the learned length `m` (O,): m * W' / |W'|."""

    def __init__(self, linear: nn.Module, rank: int, scale: float, dropout: float = 0.0):
        super().__init__(linear, rank, scale, dropout)
        self.m = mx.linalg.norm(_dense_weight(linear), axis=1)

    def __call__(self, x: mx.array) -> mx.array:
        """x: (..., I) -> (..., O). Rescaled in float32: 16 bits would round a factor of 1.003 to one."""
        return (self._row_scale() * (self.linear(x) + self._low_rank(x))).astype(x.dtype)

    def _row_scale(self) -> mx.array:
        """m / |W + scale * (lora_a @ lora_b)'|, (O,); kept while not training and while the arrays are the same."""
        sources = (self.linear.weight, self.lora_a, self.lora_b, self.m)
        kept = self.__dict__.get("_kept_row_scale")
        if kept is not None and all(old is new for old, new in zip(kept[0], sources, strict=True)):
            return kept[1]
        adapted = _dense_weight(self.linear) + (self.scale * self.lora_b.T) @ self.lora_a.T  # (O, I)
        lengths = mx.maximum(mx.linalg.norm(adapted, axis=1), SHORTEST_ROW)
        row_scale = self.m / mx.stop_gradient(lengths)
        if not self.training:
            self.__dict__["_kept_row_scale"] = (sources, row_scale)
        return row_scale


class LoRAEmbedding(nn.Module):
    """mlx-lm's embedding adapter: where input and output are tied, the output head changes too."""

    def __init__(self, embedding: nn.Module, rank: int, scale: float, dropout: float = 0.0):
        super().__init__()
        self.embedding = embedding
        self.scale = scale
        self.dropout = nn.Dropout(dropout)
        vocab_size, dims = _matrix_shape(embedding)
        self.lora_a, self.lora_b = _fresh_pair(vocab_size, rank, dims)  # (V, R), (R, E)

    def __call__(self, tokens: mx.array) -> mx.array:
        """tokens: int (B, L) -> (B, L, E)."""
        embedded = self.embedding(tokens)
        return embedded + (self.scale * self.dropout(self.lora_a[tokens] @ self.lora_b)).astype(embedded.dtype)

    def as_linear(self, hidden: mx.array) -> mx.array:
        """Hidden states (B, L, E) -> logits (B, L, V)."""
        change = (self.dropout(hidden) @ self.lora_b.T) @ self.lora_a.T
        return self.embedding.as_linear(hidden) + (self.scale * change).astype(hidden.dtype)


class InputLoRAEmbedding(nn.Module):
    """Apple's embedding adapter: only the input changes, a tied output head keeps the base matrix.

    Source: apple/corenet `lora.py`, which applies no dropout here either.
    """

    def __init__(self, embedding: nn.Module, rank: int, scale: float):
        super().__init__()
        self.embedding = embedding
        self.scale = scale
        vocab_size, dims = _matrix_shape(embedding)
        self.input_lora_a, self.input_lora_b = _fresh_pair(vocab_size, rank, dims)  # (V, R), (R, E)

    def __call__(self, tokens: mx.array) -> mx.array:
        """tokens: int (B, L) -> (B, L, E)."""
        embedded = self.embedding(tokens)
        return embedded + (self.scale * (self.input_lora_a[tokens] @ self.input_lora_b)).astype(embedded.dtype)

    def as_linear(self, hidden: mx.array) -> mx.array:
        """Hidden states (B, L, E) -> logits (B, L, V), by the base embedding."""
        return self.embedding.as_linear(hidden)


ADAPTERS = (LoRALinear, LoRAEmbedding, InputLoRAEmbedding)  # DoRALinear is a LoRALinear


def _matrix_shape(base: nn.Module) -> tuple[int, int]:
    """(rows, columns) of a layer's matrix; a quantised one packs its columns into 32-bit words, at any bit width."""
    rows, columns = base.weight.shape
    return (rows, columns * 32 // base.bits) if "scales" in base else (rows, columns)


def _dense_weight(linear: nn.Module) -> mx.array:
    """The matrix (O, I) in float32, dequantised if need be: row lengths are not to be rounded to 16 bits."""
    weight = linear.weight
    if "scales" in linear:
        weight = mx.dequantize(
            weight, linear.scales, linear.get("biases"), linear.group_size, linear.bits, mode=linear.mode
        )
    return weight.astype(mx.float32)


def _fresh_pair(rows: int, rank: int, columns: int) -> tuple[mx.array, mx.array]:
    """(rows, R) random, as mlx-lm draws it, and (R, columns) zero: the product changes nothing yet."""
    bound = 1 / math.sqrt(rows)
    return mx.random.uniform(-bound, bound, (rows, rank)), mx.zeros((rank, columns))
