"""Keys and values of the tokens seen so far: one cache for each layer, since each has its own number of heads.

`KVCache` holds all of them. `rotating_cache` holds a bounded number, `quantized_cache` holds them in fewer bits;
`caches.make_cache` chooses. Attention asks three things of each: `offset`, `update_and_fetch` and `mask`.
"""

import mlx.core as mx


class KVCache:
    """Grows in blocks, so that a token costs one slice write and a copy only at each block's end.

    Axes: B batch, H key/value heads of this layer, L tokens, D head dimension. `offset` counts the tokens seen: it is
    the next token's position.
    """

    block = 256

    def __init__(self) -> None:
        self.keys: mx.array | None = None  # (B, H, capacity, D)
        self.values: mx.array | None = None
        self.offset = 0

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Append keys and values (B, H, L, D) of the newest L tokens; return all that is held, (B, H, offset, D)."""
        start, self.offset = self.offset, self.offset + keys.shape[2]
        capacity = self._capacity(self.offset)
        self.keys = append(self.keys, keys, start, capacity)
        self.values = append(self.values, values, start, capacity)
        return self.keys[:, :, : self.offset], self.values[:, :, : self.offset]

    def mask(self, num_queries: int) -> mx.array | str | None:
        """Which of the keys just fetched the newest `num_queries` tokens may see, as the attention kernel wants it."""
        return causal_mask(num_queries)

    def is_trimmable(self) -> bool:
        """Whether the newest tokens can be forgotten."""
        return True

    def trim(self, count: int) -> None:
        """Forget the newest `count` tokens."""
        self.offset -= min(count, self.offset)

    @property
    def state(self) -> list[mx.array]:
        """The arrays to evaluate after a prefill chunk."""
        return [] if self.keys is None or self.values is None else [self.keys, self.values]

    @property
    def nbytes(self) -> int:
        """Bytes allocated, the unused rest of the last block included."""
        return sum(array.nbytes for array in self.state)

    def _capacity(self, tokens: int) -> int:
        """How many tokens to make room for when `tokens` no longer fit."""
        return -(-tokens // self.block) * self.block


def causal_mask(num_queries: int) -> str | None:
    """The mask of the newest tokens of a text held whole: none sees a later one, so a single one sees all."""
    return "causal" if num_queries > 1 else None


def append(held: mx.array | None, new: mx.array, start: int, capacity: int) -> mx.array:
    """Write `new` at token `start` of `held`, enlarging it to `capacity` with zeros where it does not reach."""
    end = start + new.shape[2]
    if held is None or end > held.shape[2]:
        batch, heads, _, dim = new.shape
        used = mx.zeros((batch, heads, 0, dim), new.dtype) if held is None else held[:, :, :start]
        held = mx.concatenate([used, mx.zeros((batch, heads, capacity - start, dim), new.dtype)], axis=2)
    held[:, :, start:end] = new
    return held
