"""Sequences to batches. A batch is a pure function of its number: nothing to save, nothing to restore on resume.

Rows of about the same length go together, the lengths of batches are multiples of `pad_multiple`, so that a device
meets few shapes. An epoch is a new order of the same rows, each exactly once, drawn from (seed, epoch).
B rows, L tokens.
"""

from collections.abc import Sequence as Several
from dataclasses import dataclass
from functools import lru_cache

import mlx.core as mx
import numpy as np

from .packing import pack as pack_rows
from .sequences import Sequence

POOL_BATCHES = 64  # so many batches' rows are sorted by length together: little padding, and still a random order


@dataclass(frozen=True)
class Batch:
    """Rows of equal length, padded on the right. Padding is known by its place; the id that fills it means nothing."""

    tokens: mx.array  # int32 (B, L)
    counted: mx.array  # bool (B, L): targets whose loss counts; never padding, never the first of a sequence
    segments: mx.array | None  # int32 (B, L) when packed: which sequence of its row a token is of, -1 padding
    rows: tuple[str, ...]  # where each came from, in messages; packed ones joined by " + "
    lengths: tuple[int, ...] = ()  # tokens of each row that are no padding


class Batches:
    """The batches of all epochs, by number."""

    def __init__(
        self,
        sequences: Several[Sequence],
        *,
        batch_size: int,
        seed: int,
        max_seq_length: int,
        pack: bool = False,
        pad_multiple: int = 32,
        longest_first: bool = True,
    ) -> None:
        """longest_first: begin the first epoch with the largest batch, so that too little memory shows at once."""
        if batch_size < 1 or pad_multiple < 1:
            raise ValueError(f"batch_size and pad_multiple must be 1 or more, got {batch_size} and {pad_multiple}")
        self._sequences, self._packed = sequences, pack
        self._batch_size, self._seed, self._limit = batch_size, seed, max_seq_length
        self._pad_multiple, self._longest_first = pad_multiple, longest_first
        lengths = [len(sequence) for sequence in sequences]
        if lengths and max(lengths) > max_seq_length:
            raise ValueError(f"a sequence has {max(lengths)} tokens, more than max_seq_length {max_seq_length}")
        self._rows = pack_rows(lengths, max_seq_length) if pack else [[i] for i in range(len(lengths))]
        self._lengths = np.array([sum(lengths[i] for i in row) for row in self._rows], dtype=np.int64)
        self.epoch_tokens = sum(sequence.targets for sequence in sequences)  # counted targets
        self._order = lru_cache(maxsize=2)(self._ordered)

    @property
    def rows(self) -> int:
        """Rows of a batch: as many as asked for, where there are so many."""
        return min(self._batch_size, len(self._rows))

    def __len__(self) -> int:
        """Batches in an epoch."""
        return -(-len(self._rows) // self._batch_size)

    def batch(self, index: int) -> Batch:
        """Batch `index` of all epochs, from 0; the last of an epoch may have fewer rows. IndexError without rows."""
        if index < 0 or not self._rows:
            raise IndexError(f"no batch {index}: there are {len(self)} an epoch, numbered from 0")
        epoch, number = divmod(index, len(self))
        return self._assembled([self._rows[i] for i in self._order(epoch)[number]])

    def _ordered(self, epoch: int) -> list[np.ndarray]:
        """The rows of each batch of an epoch."""
        size, count = self._batch_size, len(self._rows)
        # Raw bits, as numpy promises their sequence for ever and that of its shuffle not.
        draws = np.random.PCG64(np.random.SeedSequence([self._seed, epoch]))
        order = np.argsort(draws.random_raw(count), kind="stable")
        batches: list[np.ndarray] = []
        for start in range(0, count, POOL_BATCHES * size):
            pool = order[start : start + POOL_BATCHES * size]
            pool = pool[np.argsort(-self._lengths[pool], kind="stable")]  # so a smaller batch has the shortest rows
            batches += [pool[i : i + size] for i in range(0, len(pool), size)]
        whole = [batch for batch in batches if len(batch) == size]
        mixed = [whole[i] for i in np.argsort(draws.random_raw(len(whole)), kind="stable")]
        if epoch == 0 and self._longest_first and mixed:
            longest = max(range(len(mixed)), key=lambda i: self._lengths[mixed[i]].max())
            mixed.insert(0, mixed.pop(longest))
        return [*mixed, *(batch for batch in batches if len(batch) < size)]

    def _assembled(self, rows: list[list[int]]) -> Batch:
        longest = max(sum(len(self._sequences[i]) for i in row) for row in rows)
        padded = min(-(-longest // self._pad_multiple) * self._pad_multiple, self._limit)
        tokens = np.zeros((len(rows), padded), dtype=np.int32)
        counted = np.zeros((len(rows), padded), dtype=bool)
        segments = np.full((len(rows), padded), -1, dtype=np.int32)
        for b, row in enumerate(rows):
            start = 0
            for number, sequence in enumerate(self._sequences[i] for i in row):
                place = slice(start, start + len(sequence))
                tokens[b, place], counted[b, place], segments[b, place] = sequence.tokens, sequence.counted, number
                start += len(sequence)
        names = tuple(" + ".join(self._sequences[i].row for i in row) for row in rows)
        lengths = tuple(int((row >= 0).sum()) for row in segments)
        packed = mx.array(segments) if self._packed else None
        return Batch(mx.array(tokens), mx.array(counted), packed, names, lengths)
