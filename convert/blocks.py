"""Stored tensors a few megabytes at a time, read and looked at in threads while the caller does something else."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache, partial
from typing import TypeVar

import numpy as np

from ..tensors import StoredTensor

BLOCK_BYTES = 2 * 2**20  # small enough for the processor's caches, large enough to hide a system call
_THREADS = 2
_EXPONENT_BITS = {"F16": 0x7C00, "BF16": 0x7F80}  # all set: infinite or not a number

T = TypeVar("T")


def row_ranges(tensor: StoredTensor, row_bytes: int = 0, block_bytes: int = 0) -> Iterator[tuple[int, int]]:
    """(start, stop) of blocks of about `block_bytes` (or `BLOCK_BYTES`), at least a row each.

    row_bytes: where it is not the tensor's.
    """
    rows = tensor.num_rows
    step = max(1, (block_bytes or BLOCK_BYTES) // max(1, row_bytes or tensor.nbytes // max(1, rows)))
    for start in range(0, rows, step):
        yield start, min(start + step, rows)


def in_threads(jobs: Iterable[Callable[[], T]]) -> Iterator[T]:
    """What each job returns, in order; the next few jobs run meanwhile. A job's error is raised in its turn."""
    begun: deque[Future[T]] = deque()
    for job in jobs:
        begun.append(_threads().submit(job))
        if len(begun) > _THREADS:
            yield begun.popleft().result()
    while begun:
        yield begun.popleft().result()


def is_finite(values: np.ndarray, code: str) -> bool:
    """Whether no value is infinite or not a number; `values` holds the bits of safetensors dtype `code`."""
    if not values.size:
        return True
    if code in _EXPONENT_BITS:
        magnitudes = values.view(np.uint16) & np.uint16(0x7FFF)
        return int(magnitudes.max()) < _EXPONENT_BITS[code]
    flat = values.reshape(-1)
    with np.errstate(over="ignore", invalid="ignore"):
        if np.isfinite(np.dot(flat, flat)):  # one pass; no square can make up for an infinite one
            return True
    return bool(np.isfinite(flat.min()) and np.isfinite(flat.max()))  # both hand on what is not a number


def same_bytes(one: StoredTensor, other: StoredTensor) -> bool:
    """Whether two tensors have the same dtype, shape and bits."""
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    return all(in_threads(partial(_same_rows, one, other, start, stop) for start, stop in row_ranges(one)))


def _same_rows(one: StoredTensor, other: StoredTensor, start: int, stop: int) -> bool:
    return np.array_equal(_words(one.read_rows(start, stop)), _words(other.read_rows(start, stop)))


def _words(values: np.ndarray) -> np.ndarray:
    """The same bytes in the largest units that divide them, which is fastest to compare."""
    return values.reshape(-1).view(np.uint8 if values.nbytes % 8 else np.uint64)


@cache
def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(_THREADS, thread_name_prefix="openelm-read")
