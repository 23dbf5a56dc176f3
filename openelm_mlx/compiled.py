"""One decode step as a compiled graph: the host replays it for every token instead of building it anew.

The layers are the model's own; only their caches differ. Compiled, a cache has a fixed size and its offset is an array,
so that one graph serves all the tokens of a block. MLX compiles again, once, when the caches have grown by a block.
"""

from collections.abc import Sequence
from functools import partial
from typing import cast

import mlx.core as mx

from .cache import KVCache
from .model import Model


class CompiledDecoder:
    """`model(token, cache)` for one token at a time, with fewer operations, and the same caches before and after.

    Axes: B batch (1 in practice), V vocabulary. The weights are constants of the graph: not copied, and when the model
    gets others the graph is dropped. Make one for each generation; it keeps its model's weights alive.
    """

    def __init__(self, model: Model, cache: list[KVCache]) -> None:
        assert can_compile(model, cache)
        self._model, self._cache = model, cache
        self._compile()

    def step(self, token: mx.array) -> mx.array:
        """Logits (B, V) of what follows `token`, int (B,), unevaluated; the cache holds it afterwards."""
        offset, first_keys = self._cache[0].offset, self._cache[0].keys
        if first_keys is None or offset >= first_keys.shape[2]:  # the cache knows how to grow, uncompiled
            return self._model(token[:, None], self._cache, last_only=True)[:, -1]
        if any(module.get(name) is not value for module, name, value in self._held):
            self._compile()
        state = [layer.state for layer in self._cache]
        logits, state = self._step(token, mx.array(offset), state)
        # The old arrays are let go before anything is evaluated: MLX may then write the token into their buffers.
        for layer, (keys, values) in zip(self._cache, state, strict=True):
            layer.keys, layer.values, layer.offset = keys, values, offset + 1
        return logits

    def _compile(self) -> None:
        # Unevaluated weights (unread, or still to be dequantised) would be computed again at every token.
        mx.eval(self._model.parameters())
        self._held = [(module, name, value) for module in self._model.modules() for name, value in module.items()]
        self._step = mx.compile(partial(_step, self._model))


def can_compile(model: Model, cache: Sequence[KVCache]) -> bool:
    """Our own model with plain caches, and not in training: dropout draws at every step, a compiled graph draws once.

    What stands in for a model may do anything, and a compiled graph does only what it did when it was made.
    """
    return isinstance(model, Model) and not model.training and all(type(layer) is KVCache for layer in cache)


def _step(
    model: Model, token: mx.array, offset: mx.array, state: list[list[mx.array]]
) -> tuple[mx.array, list[list[mx.array]]]:
    """What is compiled. token (B,), offset (), keys and values (B, H, capacity, D) -> logits (B, V), new state."""
    capacity = state[0][0].shape[2]
    mask = mx.arange(capacity)[None] <= offset  # (1, capacity): what lies beyond is left over, or not there yet
    blocks = [_Block(keys, values, offset, mask) for keys, values in state]
    logits = model(token[:, None], cast(list[KVCache], blocks), last_only=True)[:, -1]
    return logits, [[block.keys, block.values] for block in blocks]


class _Block:
    """One layer's cache inside the compiled step: what `Attention` asks of a KVCache, for one token."""

    def __init__(self, keys: mx.array, values: mx.array, offset: mx.array, mask: mx.array) -> None:
        self.keys, self.values, self.offset, self._mask = keys, values, offset, mask

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Write keys and values (B, H, 1, D) at the offset; return the whole block, (B, H, capacity, D)."""
        start = self.offset.reshape(1)
        self.keys = mx.slice_update(self.keys, keys, start, axes=[2])
        self.values = mx.slice_update(self.values, values, start, axes=[2])
        return self.keys, self.values

    def mask(self, num_queries: int) -> mx.array:
        assert num_queries == 1, num_queries
        return self._mask
