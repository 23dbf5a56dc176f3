"""OpenELM in MLX: a decoder-only transformer whose layers grow wider with depth.

Pre-normalisation with RMSNorm, rotary positions, grouped-query attention with normalised queries and keys, a gated
(SwiGLU) feed-forward network, no biases, and one matrix for the embedding and the output head. What is special:
every layer has its own number of heads and its own feed-forward width (paper, section 2.1). Source of the
maths: apple/corenet `general_gpt.py`; parameter names are those of the Hub's checkpoints.

Axes: B batch, L tokens, E model_dim, D head_dim, Hq query heads, Hk key/value heads, F feed-forward width,
V vocabulary.
"""

from functools import partial
from typing import cast

import mlx.core as mx
import mlx.nn as nn

from . import cpu_kernels
from .cache import KVCache, causal_mask
from .config import OpenELMConfig


class Attention(nn.Module):
    """Causal attention of one layer, with that layer's own head counts."""

    def __init__(self, config: OpenELMConfig, layer: int):
        super().__init__()
        self.head_dim = config.head_dim
        self.num_query_heads = config.num_query_heads[layer]
        self.num_kv_heads = config.num_kv_heads[layer]
        self.rope_base = config.rope_freq_constant
        self.eps = config.rms_norm_eps
        total_heads = self.num_query_heads + 2 * self.num_kv_heads
        self.qkv_proj = nn.Linear(config.model_dim, total_heads * self.head_dim, bias=False)
        self.out_proj = nn.Linear(self.num_query_heads * self.head_dim, config.model_dim, bias=False)
        self.normalize_qk = config.normalize_qk_projections
        if self.normalize_qk:
            self.q_norm = nn.RMSNorm(self.head_dim, eps=config.rms_norm_eps)
            self.k_norm = nn.RMSNorm(self.head_dim, eps=config.rms_norm_eps)

    def __call__(
        self, x: mx.array, residual: mx.array, cache: KVCache | None, last_only: bool, mask: mx.array | None = None
    ) -> mx.array:
        """residual + attention(x). x: (B, L, E); the result has one position with `last_only`, else L."""
        offset = cache.offset if cache is not None else 0
        rotated_heads = self.num_query_heads + self.num_kv_heads
        heads = _split_heads(self.qkv_proj(x), self.head_dim)  # (B, L, (Hq+2Hk)*D) -> (B, Hq+2Hk, L, D)
        queries_keys, values = mx.split(heads, [rotated_heads], axis=1)
        if self.normalize_qk:
            # One normalisation and one rotation serve queries and keys alike: fewer kernels for each token.
            queries_keys = mx.fast.rms_norm(queries_keys, None, self.eps) * self._qk_norm_weight()
        queries_keys = mx.fast.rope(
            queries_keys, self.head_dim, traditional=False, base=self.rope_base, scale=1.0, offset=offset
        )
        queries, keys = mx.split(queries_keys, [self.num_query_heads], axis=1)
        if cache is not None:
            keys, values = cache.update_and_fetch(keys, values)
        if last_only:
            queries, residual = queries[:, :, -1:], residual[:, -1:]
        seen: mx.array | str | None = mask
        if seen is None:
            seen = causal_mask(queries.shape[2]) if cache is None else cache.mask(queries.shape[2])
        scale = self.head_dim**-0.5
        if isinstance(seen, str) and cpu_kernels.apply_to(queries):
            mixed = cpu_kernels.causal_attention(queries, keys, values, scale)
        else:
            mixed = mx.fast.scaled_dot_product_attention(queries, keys, values, scale=scale, mask=seen)
        return add_linear(residual, self.out_proj, _join_heads(mixed))

    def _qk_norm_weight(self) -> mx.array:
        """The two norms' weights laid out head by head, (Hq+Hk, 1, D); kept while the weights are the same arrays."""
        weights = (self.q_norm.weight, self.k_norm.weight)
        kept = self.__dict__.get("_kept_norm")
        if kept is not None and kept[0] is weights[0] and kept[1] is weights[1]:
            return kept[2]
        spread = [
            mx.broadcast_to(weight, (count, 1, self.head_dim))
            for weight, count in zip(weights, (self.num_query_heads, self.num_kv_heads), strict=True)
        ]
        joined = mx.concatenate(spread)
        if not self.training:
            self.__dict__["_kept_norm"] = (*weights, joined)
        return joined


class FeedForward(nn.Module):
    """SwiGLU with this layer's own width; `proj_1` holds the gate's rows first, then the up-projection's."""

    def __init__(self, config: OpenELMConfig, layer: int):
        super().__init__()
        width = config.ffn_dims[layer]
        self.gated = config.ffn_with_glu
        self.proj_1 = nn.Linear(config.model_dim, (2 if self.gated else 1) * width, bias=False)
        self.proj_2 = nn.Linear(width, config.model_dim, bias=False)

    def __call__(self, x: mx.array, residual: mx.array) -> mx.array:
        """residual + feed_forward(x), both (B, L, E)."""
        hidden = self.proj_1(x)  # (B, L, E) -> (B, L, 2F), or F without the gate
        if self.gated:
            gate, up = mx.split(hidden, 2, axis=-1)
            # In training, 2F numbers a token are kept instead of 5F: the gradient computes the product again.
            hidden = mx.checkpoint(_swiglu)(gate, up) if self.training else swiglu(gate, up)
        else:
            hidden = nn.silu(hidden)
        return add_linear(residual, self.proj_2, hidden)


class TransformerBlock(nn.Module):
    """x + attention(norm(x)), then x + feed_forward(norm(x))."""

    def __init__(self, config: OpenELMConfig, layer: int):
        super().__init__()
        self.attn_norm = nn.RMSNorm(config.model_dim, eps=config.rms_norm_eps)
        self.attn = Attention(config, layer)
        self.ffn_norm = nn.RMSNorm(config.model_dim, eps=config.rms_norm_eps)
        self.ffn = FeedForward(config, layer)

    def __call__(
        self, x: mx.array, cache: KVCache | None = None, last_only: bool = False, mask: mx.array | None = None
    ) -> mx.array:
        """x: (B, L, E) -> (B, L, E), or (B, 1, E) with `last_only`.

        mask: bool (B, 1, L, L) of what each position may see, for texts that share a row in training; None is causal.
        """
        x = self.attn(self.attn_norm(x), x, cache, last_only, mask)
        return self.ffn(self.ffn_norm(x), x)


class OpenELMModel(nn.Module):
    """Embedding, layers and final norm: everything below the output head."""

    def __init__(self, config: OpenELMConfig):
        super().__init__()
        self.token_embeddings = nn.Embedding(config.vocab_size, config.model_dim)
        self.layers = [TransformerBlock(config, layer) for layer in range(config.num_transformer_layers)]
        self.norm = nn.RMSNorm(config.model_dim, eps=config.rms_norm_eps)

    def __call__(self, tokens: mx.array, cache: list[KVCache] | None = None, last_only: bool = False) -> mx.array:
        """tokens: int (B, L) -> hidden states (B, L, E)."""
        x = self.token_embeddings(tokens)
        last = len(self.layers) - 1
        for i, layer in enumerate(self.layers):
            # Every layer needs all positions of the one below; only the last layer's other positions are unused.
            x = layer(x, cache[i] if cache is not None else None, last_only and i == last)
        return self.norm(x)


class Model(nn.Module):
    """An OpenELM with its output head. `config` has the dimensions."""

    def __init__(self, config: OpenELMConfig):
        super().__init__()
        self.config = config
        self.model_type = "openelm"
        self.transformer = OpenELMModel(config)
        if not config.share_input_output_layers:
            self.lm_head = nn.Linear(config.model_dim, config.vocab_size, bias=False)

    def __call__(self, tokens: mx.array, cache: list[KVCache] | None = None, *, last_only: bool = False) -> mx.array:
        """Logits for the next token.

        tokens: int (B, L), ids already checked against the vocabulary (MLX reads foreign memory for others).
        cache: one `KVCache` a layer, updated in place; None means that the text begins here.
        Returns logits (B, L, V); with `last_only` those of the last position, (B, 1, V), at less cost.
        """
        return self.head(self.transformer(tokens, cache, last_only))

    def head(self, hidden: mx.array) -> mx.array:
        """Hidden states (B, L, E) -> logits (B, L, V), through the embedding where input and output are tied."""
        if self.config.share_input_output_layers:
            return self.transformer.token_embeddings.as_linear(hidden)
        return self.lm_head(hidden)

    @property
    def layers(self) -> list[TransformerBlock]:
        """The transformer blocks, under the name that mlx-lm's tools look for."""
        return self.transformer.layers

    def make_cache(self) -> list[KVCache]:
        """A fresh cache: one for each layer, since head counts differ."""
        return [KVCache() for _ in self.layers]


def add_linear(residual: mx.array, linear: nn.Module, x: mx.array) -> mx.array:
    """residual + linear(x), as one kernel where the layer is a plain matrix (not quantised, no adapter)."""
    if type(linear) is nn.Linear:
        return mx.addmm(residual, x, linear.weight.T)
    return residual + linear(x)


def swiglu(gate: mx.array, up: mx.array) -> mx.array:
    """gate * sigmoid(gate) * up."""
    return cast(mx.array, cpu_kernels.swiglu(gate, up)) if cpu_kernels.apply_to(gate) else _swiglu(gate, up)


@partial(mx.compile, shapeless=True)
def _swiglu(gate: mx.array, up: mx.array) -> mx.array:
    """Element-wise, so it is compiled into one kernel for every shape."""
    return gate * mx.sigmoid(gate) * up


def _split_heads(x: mx.array, head_dim: int) -> mx.array:
    """(B, L, H*D) -> (B, H, L, D). For one token the transpose is only another view of the shape."""
    batch, length, width = x.shape
    if length == 1:
        return x.reshape(batch, width // head_dim, 1, head_dim)
    return x.reshape(batch, length, width // head_dim, head_dim).transpose(0, 2, 1, 3)


def _join_heads(x: mx.array) -> mx.array:
    """(B, H, L, D) -> (B, L, H*D), the inverse of `_split_heads`."""
    batch, heads, length, dim = x.shape
    if length == 1:
        return x.reshape(batch, 1, heads * dim)
    return x.transpose(0, 2, 1, 3).reshape(batch, length, heads * dim)
