"""How much memory a training run takes, from the model and the settings alone: nothing is computed.

    weights + trained weights' gradients and optimizer + what is kept for the backward pass + one layer's and one
    chunk's work

The pieces are counted from the shapes that the forward pass keeps; the factors below were fitted to measured peaks of
MLX's CPU backend. On Metal nothing was measured.
"""

from dataclasses import dataclass
from typing import Any

from mlx.utils import tree_flatten

from ..adapter_config import AdapterSpec
from ..config import OpenELMConfig
from ..device import chip_name, is_metal
from ..model import Model
from .loss import CHUNK
from .settings import Settings

# Arrays as large as the trained weights that an optimizer keeps.
_MOMENTS = {"adam": 2.0, "adamw": 2.0, "sgd": 1.0, "muon": 1.0, "adafactor": 0.1}
_FLOAT32 = 4
# Fitted to 18 peaks, tiny and 270M in float32 with 64 to 1,024 tokens, all within 13 % (without the weights); the
# casts to tiny in bfloat16, 512 tokens.
_SCORES = 0.5  # arrays (B, Hq, L, L) that attention keeps of a layer: not all layers' live at once
_CASTS = 2.0  # float32 copies of each adapted layer's input, where the activations have 16 bits
_DROPOUT = 1.5  # arrays as wide as each linear layer's input that dropout keeps beside it
_BACKWARD = 2.25  # work of one layer's backward pass, in units of what its forward pass keeps
_CHUNK_ARRAYS = 4  # (chunk, V) arrays alive at once


@dataclass(frozen=True)
class Memory:
    """Bytes by purpose. `device` says for which device they hold."""

    weights: int
    training: int  # gradients and optimizer of what is trained
    activations: int
    loss: int
    device: str

    @property
    def total(self) -> int:
        return self.weights + self.training + self.activations + self.loss


def estimate(model: Model, spec: AdapterSpec, settings: Settings, rows: int, length: int) -> Memory:
    """The peak of a run whose largest batch has `rows` of `length` tokens."""
    config = model.config
    itemsize = model.transformer.norm.weight.dtype.size
    parameters: Any = tree_flatten(model.parameters())
    trained: Any = tree_flatten(model.trainable_parameters())
    trained_bytes = sum(array.nbytes for _, array in trained)
    return Memory(
        weights=sum(array.nbytes for _, array in parameters),
        training=round(trained_bytes * (2 + _MOMENTS[settings.optimizer])),
        activations=round(_activations(config, spec, settings, rows, length, _FLOAT32 / itemsize) * itemsize),
        loss=_CHUNK_ARRAYS * min(CHUNK, rows * length) * config.vocab_size * _FLOAT32,
        device=device_name(),
    )


def device_name() -> str:
    """For which device the estimate is, and whether it was fitted there."""
    if is_metal():
        return f"Metal on {chip_name()}: fitted on a CPU, not measured here"
    return "CPU backend, where it was fitted"


def _activations(
    config: OpenELMConfig, spec: AdapterSpec, settings: Settings, rows: int, length: int, width: float
) -> float:
    """Numbers kept for the backward pass, and the work of the layer at hand.

    width: of a float32 number in those of the model. Adapters are float32, and so is what meets them.
    """
    total = config.num_transformer_layers
    first = total - spec.num_layers if spec.num_layers > 0 else 0
    dora = width if spec.fine_tune_type == "dora" else 0.0
    inputs = _DROPOUT if spec.fine_tune_type != "full" and spec.dropout > 0 else 0.0
    if spec.fine_tune_type != "full" and width > 1:
        inputs += _CASTS * width
    layers = range(first, total)
    kept = [_layer(config, layer, rows, length, dora, inputs) for layer in layers]
    tokens = rows * length
    work = _BACKWARD * _layer(config, layers[-1], rows, length, dora=0.0, inputs=0.0)
    if settings.grad_checkpoint:
        return tokens * config.model_dim * len(kept) + kept[-1] + work
    return sum(kept) + work


def _layer(config: OpenELMConfig, layer: int, rows: int, length: int, dora: float, inputs: float) -> float:
    """Numbers that one layer keeps: inputs, normed inputs, heads, scores, the feed-forward's widths.

    dora: copies of what each linear layer gives, kept before its rows are rescaled. inputs: copies of what it reads.
    """
    query, kv, dim = config.num_query_heads[layer], config.num_kv_heads[layer], config.head_dim
    a_token = (
        4 * config.model_dim
        + (2 * (query + kv) + kv + query) * dim
        + 3 * config.ffn_dims[layer]
        + _SCORES * query * length
    )
    a_token += dora * ((query + 2 * kv) * dim + 2 * config.model_dim + 2 * config.ffn_dims[layer])
    a_token += inputs * (2 * config.model_dim + query * dim + config.ffn_dims[layer])
    return rows * length * a_token
