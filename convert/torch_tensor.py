"""Tensors inside a PyTorch file: where their numbers lie, and how to read rows of them without loading the file.

A torch tensor is a view of a storage (a run of numbers): an offset, a shape and a stride per axis, all counted in
elements and all written by whoever made the file. Nothing of that is trusted: a view that leaves its storage is
refused, and no read is larger than the storage it comes from.
"""

import math
import os
import stat
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import CheckpointError
from ..tensors import StoredTensor, numpy_dtype

_MAX_AXES = 32  # numpy 1's limit
# A tensor repeats the numbers of its storage (torch's expand) up to this many elements, so that a few bytes of file
# cannot ask for terabytes. State dicts hold no such tensors; a small broadcast buffer is the most one meets.
_MAX_REPEATED = 2**24


@dataclass(frozen=True)
class SourceFile:
    """A file to read spans of, as it was when it was first looked at."""

    path: Path
    identity: tuple[int, int, int]  # size, modification time, inode

    @classmethod
    def at(cls, path: Path) -> "SourceFile":
        """Raises CheckpointError when there is no regular file at `path`."""
        return cls(path, _identity(path))

    @property
    def size(self) -> int:
        return self.identity[0]

    def error(self, fault: str) -> CheckpointError:
        """The error to raise about this file."""
        return CheckpointError(f"{self.path} {fault}")

    def read(self, position: int, count: int, dtype: Any = np.uint8) -> np.ndarray:
        """`count` numbers from byte `position` on. Raises CheckpointError when the file has changed or ends early."""
        try:
            values = np.fromfile(self.path, dtype, count, offset=position)
        except OSError as error:
            raise CheckpointError(f"cannot read {self.path}: {error.strerror or error}") from None
        if len(values) != count or _identity(self.path) != self.identity:
            raise self.error("changed while it was being read: start again once it is complete")
        return values


@dataclass
class Storage:
    """A run of numbers in a file. `dtype` None: only the tensors say what the bytes mean, and `count` counts bytes.

    `position` (in bytes) is set once it is known: old files list their storages after the tensors that use them.
    """

    file: SourceFile
    dtype: str | None
    count: int
    position: int = -1

    @property
    def nbytes(self) -> int:
        return self.count * (numpy_dtype(self.dtype).itemsize if self.dtype else 1)


def stored_tensor(
    storage: Storage, dtype: str, offset: int, shape: Sequence[int], strides: Sequence[int]
) -> StoredTensor:
    """A nameless tensor that views `storage`. Raises CheckpointError when the view does not lie inside it."""
    numbers = (offset, *shape, *strides)
    if any(type(n) is not int or n < 0 for n in numbers) or len(shape) != len(strides) or len(shape) > _MAX_AXES:
        raise storage.file.error("is damaged: a tensor's offset, shape and strides do not go together")
    capacity = storage.nbytes // numpy_dtype(dtype).itemsize
    if math.prod(max(n, 1) for n in shape) > max(capacity, _MAX_REPEATED):
        raise storage.file.error(f"is damaged: a tensor of shape {_short(shape)} has only {capacity} numbers behind it")
    # The stride of an axis of length 1 is never used, and torch writes anything there.
    view = _View(
        storage, dtype, offset, tuple(shape), tuple(s if n > 1 else 0 for n, s in zip(shape, strides, strict=True))
    )
    if 0 not in shape and offset + view.span(shape) > capacity:
        raise storage.file.error(
            f"is damaged: a tensor of shape {_short(shape)} reaches beyond the {capacity} numbers it is stored in"
        )
    return StoredTensor("", dtype, view.shape, view.rows)


@dataclass(frozen=True)
class _View:
    """A checked view of a storage, all counted in elements."""

    storage: Storage
    dtype: str
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    def span(self, shape: Sequence[int]) -> int:
        """How many consecutive numbers a block of this shape is spread over."""
        return 1 + sum((n - 1) * s for n, s in zip(shape, self.strides, strict=True))

    def rows(self, start: int, stop: int) -> np.ndarray:
        """Rows [start, stop) as a C-contiguous array; of a scalar there is one row."""
        if not self.shape:
            return self._read(0, ())[np.newaxis]
        assert 0 <= start <= stop <= self.shape[0]
        return self._read(start, (stop - start, *self.shape[1:]))

    def _read(self, start: int, block: tuple[int, ...]) -> np.ndarray:
        dtype = numpy_dtype(self.dtype)
        if 0 in block:
            return np.empty(block, dtype)
        first = self.offset + (start * self.strides[0] if block else 0)
        values = self.storage.file.read(self.storage.position + first * dtype.itemsize, self.span(block), dtype)
        strides = tuple(s * dtype.itemsize for s in self.strides)
        # A view of rows one after the other, the usual case, is not copied here.
        return np.require(np.lib.stride_tricks.as_strided(values, block, strides), requirements="C")


def _identity(path: Path) -> tuple[int, int, int]:
    try:
        status = os.stat(path)
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror or error}") from None
    if not stat.S_ISREG(status.st_mode):
        raise CheckpointError(f"cannot read {path}: it is not a file")
    return status.st_size, status.st_mtime_ns, status.st_ino


def _short(shape: Sequence[int]) -> str:
    text = str(tuple(shape))
    return text if len(text) <= 60 else text[:57] + "..."
