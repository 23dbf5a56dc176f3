"""The cache of several texts at once: rows of different lengths, side by side, each ending at its newest token.

      columns 0 ........ width        what stands before a row's first token is padding, which nothing attends to
      row 0   . . . a b c d e         A token's position counts from its own row's beginning, so a row's values are
      row 1   a b c d e f g h         those it would have alone.
      row 2   . . . . . a b c

Rows come and go while the others go on (`join`, `keep`). Prefill is done alone, in a `KVCache` a layer.
"""

from collections.abc import Sequence

import mlx.core as mx

from .cache import KVCache, append


class BatchRows:
    """How the rows lie: the same for every layer, so it is worked out once a step."""

    def __init__(self, lengths: Sequence[int]) -> None:
        self.set(list(lengths))

    def set(self, lengths: list[int]) -> None:
        """Tokens held by each row, before the next step."""
        self.lengths = lengths
        self.width = max(lengths)
        self.offset = mx.array(lengths)  # (B,): the next token's position in each row
        padding = self.width - self.offset
        columns = mx.arange(self.width + 1)
        ragged = min(lengths) < self.width
        self.mask = (columns >= padding[:, None])[:, None, None, :] if ragged else None  # (B, 1, 1, width + 1)

    def advance(self) -> None:
        """Every row has one token more."""
        self.set([length + 1 for length in self.lengths])


class BatchKVCache:
    """One layer's keys and values (B, H, capacity, D) for all rows; fed one token a row at a time."""

    def __init__(self, rows: BatchRows, keys: mx.array, values: mx.array) -> None:
        self.rows, self.keys, self.values = rows, keys, values

    @property
    def offset(self) -> mx.array:
        """The next token's position in each row, (B,)."""
        return self.rows.offset

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Append one token a row; keys and values (B, H, 1, D) -> all that is held, (B, H, width + 1, D)."""
        start = self.rows.width
        capacity = -(-(start + 1) // KVCache.block) * KVCache.block
        self.keys = append(self.keys, keys, start, capacity)
        self.values = append(self.values, values, start, capacity)
        return self.keys[:, :, : start + 1], self.values[:, :, : start + 1]

    def mask(self, num_queries: int) -> mx.array | None:
        """Which columns each row may see: all but its padding."""
        assert num_queries == 1, "a batch is fed one token a row"
        return self.rows.mask


class BatchCache:
    """All layers' caches for the rows at work. `layers` is what the model takes."""

    def __init__(self, cache: Sequence[KVCache]) -> None:
        """Begin with one text, whose prompt is in `cache`."""
        self.rows = BatchRows([cache[0].offset])
        self.layers = [BatchKVCache(self.rows, *_held(layer)) for layer in cache]

    def advance(self) -> None:
        """To be called after every step of the model."""
        self.rows.advance()

    def join(self, cache: Sequence[KVCache]) -> None:
        """Add a row: another text, whose prompt is in `cache`."""
        lengths = [*self.rows.lengths, cache[0].offset]
        width = max(lengths)
        for layer, new in zip(self.layers, cache, strict=True):
            old = layer.keys[:, :, : self.rows.width], layer.values[:, :, : self.rows.width]
            layer.keys, layer.values = (
                mx.concatenate([_widen(a, width), _widen(b, width)]) for a, b in zip(old, _held(new), strict=True)
            )
        self.rows.set(lengths)

    def keep(self, kept: Sequence[int]) -> None:
        """Forget all rows but these, and the columns that were padding in all of them."""
        lengths = [self.rows.lengths[row] for row in kept]
        first, chosen = self.rows.width - max(lengths), mx.array(list(kept))
        for layer in self.layers:
            layer.keys, layer.values = (
                array[chosen, :, first : self.rows.width] for array in (layer.keys, layer.values)
            )
        self.rows.set(lengths)


def _held(layer: KVCache) -> tuple[mx.array, mx.array]:
    assert layer.keys is not None, "the prompt has not been prefilled"
    assert layer.values is not None
    return layer.keys[:, :, : layer.offset], layer.values[:, :, : layer.offset]


def _widen(array: mx.array, width: int) -> mx.array:
    """(B, H, S, D) with padding in front, so that it is `width` columns wide."""
    missing = width - array.shape[2]
    return mx.pad(array, [(0, 0), (0, 0), (missing, 0), (0, 0)]) if missing else array
