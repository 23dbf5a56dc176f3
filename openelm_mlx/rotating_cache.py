"""A cache of bounded size for texts of any length: the first tokens stay, of the others the oldest is overwritten.

It bounds memory and the time of a step. It does not lift the model's context limit: a token's position keeps counting.
Whatever the chunks in which a text comes, the token at position p sees the first `keep` tokens and the newest
`max_size - keep` up to itself.
"""

import mlx.core as mx

from .cache import KVCache
from .errors import GenerationError


class RotatingKVCache(KVCache):
    """Holds the first `keep` tokens and, in a ring behind them, the newest `max_size - keep` others.

    Token p has slot p while slots are left, then slot keep + (p - keep) mod (max_size - keep): a token's slot follows
    from its position alone, and a slot's token from the offset. Axes as in KVCache; S tokens fetched.
    """

    def __init__(self, max_size: int, keep: int = 0) -> None:
        assert 0 <= keep < max_size, (keep, max_size)
        super().__init__()
        self.max_size, self.keep = max_size, keep
        self._fetched: mx.array | None = None  # (S,) positions of the keys fetched last, where not every query sees all

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Store the newest L tokens; return keys and values (B, H, S, D) of all that at least one of them sees."""
        self._fetched = None
        start, end = self.offset, self.offset + keys.shape[2]
        if end <= self.max_size:
            return super().update_and_fetch(keys, values)
        self.offset = end
        if keys.shape[2] == 1:
            assert self.keys is not None, "one token turned an empty cache"
            assert self.values is not None
            slot = self.slot(start)
            self.keys[:, :, slot : slot + 1] = keys
            self.values[:, :, slot : slot + 1] = values
            return self.keys, self.values
        # The chunk's first tokens still see what its last ones overwrite: fetch both, and let `mask` tell them apart.
        before, after = self.positions(start), self.positions(end)
        held = before.size
        self._fetched = mx.concatenate([before, mx.arange(start, end)])
        if self.keys is not None and self.values is not None:
            keys = mx.concatenate([self.keys[:, :, :held], keys], axis=2)
            values = mx.concatenate([self.values[:, :, :held], values], axis=2)
        survivors = mx.where(after < start, mx.arange(after.size), held + after - start)  # an older token has its slot
        self.keys, self.values = keys[:, :, survivors], values[:, :, survivors]
        return keys, values

    def mask(self, num_queries: int) -> mx.array | str | None:
        """A boolean (num_queries, S) where a chunk overwrites tokens that it still sees itself; else as in KVCache."""
        if self._fetched is None:
            return super().mask(num_queries)
        keys, queries = self._fetched, mx.arange(self.offset - num_queries, self.offset)[:, None]
        in_window = keys > queries - (self.max_size - self.keep)
        return (keys <= queries) & ((keys < self.keep) | in_window)

    def is_trimmable(self) -> bool:
        """Until a token has been overwritten: afterwards what preceded the trimmed ones is gone."""
        return self.offset <= self.max_size

    def trim(self, count: int) -> None:
        """Forget the newest `count` tokens. Raises GenerationError once that is impossible (see `is_trimmable`)."""
        if count and not self.is_trimmable():
            raise GenerationError(
                f"a rotating cache of {self.max_size} tokens that has seen {self.offset} cannot go back: "
                "begin with a fresh cache"
            )
        super().trim(count)

    def slot(self, position: int) -> int:
        """Where the token at `position` is held, or was until it was overwritten."""
        return position if position < self.keep else self.keep + (position - self.keep) % (self.max_size - self.keep)

    def positions(self, offset: int) -> mx.array:
        """The position of the token in each slot in use, after `offset` tokens: the inverse of `slot`."""
        slots = mx.arange(min(offset, self.max_size))
        newest = offset - 1 - (offset - 1 - slots) % (self.max_size - self.keep)
        return slots if offset <= self.max_size else mx.where(slots < self.keep, slots, newest)

    def _capacity(self, tokens: int) -> int:
        return min(super()._capacity(tokens), self.max_size)
