"""The forward pass of training: hidden states of whole texts, with packed rows kept apart and, if asked, less memory.

Dropout is drawn anew for each layer from a seed that the caller gives, never from what was drawn before. So a step
gives the same numbers when it is resumed, and when gradient checkpointing computes a layer a second time.

Axes: B rows, L tokens, E model_dim.
"""

from typing import Any

import mlx.core as mx

from ..model import Model, TransformerBlock


def hidden_states(
    model: Model,
    tokens: mx.array,
    segments: mx.array | None = None,
    *,
    checkpoint: bool = False,
    seed: int | None = None,
) -> mx.array:
    """What the output head reads, (B, L, E).

    tokens: int (B, L), padded on the right. segments: int (B, L), which text of a packed row a token belongs to.
    checkpoint: keep each layer's input alone and compute the layer again for its gradient.
    seed: of this step's dropout; None leaves MLX's generator as it is.
    """
    mask = None if segments is None else packed_mask(segments)
    if seed is not None:
        mx.random.seed(seed)
    x = model.transformer.token_embeddings(tokens)
    for number, layer in enumerate(model.layers, start=1):
        layer_seed = None if seed is None else seed + number
        # The last layer's gradient comes first: nothing would be saved by computing it a second time.
        run = _checkpointed if checkpoint and number < len(model.layers) else _plain
        x = run(layer, x, mask, layer_seed)
    if seed is not None:
        mx.random.seed(seed + len(model.layers) + 1)  # for an adapter of the output head
    return model.transformer.norm(x)


def packed_mask(segments: mx.array) -> mx.array:
    """bool (B, 1, L, L): a token sees itself and what comes before it in its own text.

    Rotary positions need no new start: attention depends on their differences alone.
    """
    length = segments.shape[1]
    positions = mx.arange(length)
    causal = positions[:, None] >= positions  # (L, L)
    same = segments[:, :, None] == segments[:, None, :]  # (B, L, L)
    return (same & causal)[:, None]


def _plain(layer: TransformerBlock, x: mx.array, mask: mx.array | None, seed: int | None) -> mx.array:
    if seed is not None:
        mx.random.seed(seed)
    return layer(x, mask=mask)


def _checkpointed(layer: TransformerBlock, x: mx.array, mask: mx.array | None, seed: int | None) -> mx.array:
    """The trained parameters are arguments, not captured: MLX would take captured ones for constants."""

    def run(parameters: Any, x: mx.array) -> mx.array:
        layer.update(parameters)
        return _plain(layer, x, mask, seed)

    parameters = layer.trainable_parameters()
    result = mx.checkpoint(run)(parameters, x)
    layer.update(parameters)
    return result
