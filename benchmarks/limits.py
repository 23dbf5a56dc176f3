"""What a token and a prompt cost at least: bytes that must be moved and operations that must be computed, exactly.

A decode step reads every weight once, and the keys and values of all tokens so far; nothing else is large. Its limit is
the memory's bandwidth. A prefill reads the weights once for all its tokens; its limit is matrix throughput, but for
short prompts. Counted is what cannot be left out: causal attention looks at half of all pairs, the head and all of the
last layer behind its keys and values serve the last position only. Norms, rotations, softmax and activations are not
counted: the limits are a little too generous, so that the shares reached are a little too low rather than too high.
"""

from dataclasses import dataclass
from typing import Any

from mlx.utils import tree_flatten

from ..model import Model

_MULTIPLY_ADD = 2  # operations


@dataclass(frozen=True)
class Work:
    """Bytes to move and operations to compute; `intensity` is what a roofline's horizontal axis shows."""

    nbytes: float
    flops: float

    @property
    def intensity(self) -> float:
        return self.flops / self.nbytes


@dataclass(frozen=True)
class LayerCost:
    """What one layer makes a step read; `layer` is None for what stands outside (embedding, last norm, head)."""

    layer: int | None
    weight_bytes: int  # for every step
    kv_bytes_per_token: int = 0  # for every step, token that is held, and text

    def bytes_per_step(self, held_tokens: float, batch_size: int = 1) -> float:
        """With so many tokens in the cache of each text, the new one included."""
        return self.weight_bytes + self.kv_bytes_per_token * held_tokens * batch_size


def layer_costs(model: Model) -> list[LayerCost]:
    """Every layer's, as its weights are held now; the last entry is what stands outside."""
    config = model.config
    item_size = model.transformer.norm.weight.dtype.size  # of an activation, and so of a key or a value
    costs = [
        LayerCost(i, _nbytes(layer), 2 * config.num_kv_heads[i] * config.head_dim * item_size)
        for i, layer in enumerate(model.layers)
    ]
    outside = _nbytes(model) - sum(cost.weight_bytes for cost in costs)
    if not config.share_input_output_layers:  # of an embedding that is no head, a step reads one row
        outside -= _nbytes(model.transformer.token_embeddings)
    return [*costs, LayerCost(None, outside)]


def decode_work(model: Model, prompt_tokens: int, generation_tokens: int, batch_size: int = 1) -> Work:
    """One decode step, on average over the G-1 after a prompt: step k of them attends to P + k tokens."""
    held = prompt_tokens + generation_tokens / 2
    config = model.config
    operations = float(config.vocab_size * config.model_dim)
    for i in range(config.num_transformer_layers):
        qkv, behind = _layer_products(model, i)
        operations += qkv + behind + _attention(model, i, held)
    nbytes = sum(cost.bytes_per_step(held, batch_size) for cost in layer_costs(model))
    return Work(nbytes, _MULTIPLY_ADD * operations * batch_size)


def prefill_work(model: Model, prompt_tokens: int, batch_size: int = 1) -> Work:
    """One prefill of P tokens of each text of a batch, one text after the other."""
    config, length = model.config, prompt_tokens
    last = config.num_transformer_layers - 1
    operations = config.vocab_size * config.model_dim
    for i in range(last + 1):
        qkv, behind = _layer_products(model, i)
        if i == last:  # keys and values of all positions, the output of one; queries come with keys, in one product
            operations += length * qkv + behind + _attention(model, i, length)
        else:
            operations += length * (qkv + behind) + _attention(model, i, length * (length + 1) // 2)
    nbytes = sum(cost.bytes_per_step(length) for cost in layer_costs(model))  # keys and values are written
    return Work(nbytes * batch_size, _MULTIPLY_ADD * operations * batch_size)


def _layer_products(model: Model, layer: int) -> tuple[int, int]:
    """Multiply-adds a token of a layer's matrices: qkv_proj, and what stands behind attention."""
    config = model.config
    query, kv = (heads[layer] * config.head_dim for heads in (config.num_query_heads, config.num_kv_heads))
    ffn = (3 if config.ffn_with_glu else 2) * config.ffn_dims[layer]
    return (query + 2 * kv) * config.model_dim, (query + ffn) * config.model_dim


def _attention(model: Model, layer: int, pairs: float) -> Any:
    """Multiply-adds of scores, and of their mix of the values, for so many pairs of a query and a key."""
    return 2 * model.config.num_query_heads[layer] * model.config.head_dim * pairs


def _nbytes(module: Any) -> int:
    parameters: Any = tree_flatten(module.parameters())
    return sum(array.nbytes for _, array in parameters)
