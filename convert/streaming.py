"""Tensors on their way to a new folder, a few megabytes at a time: copied, cast, or packed, and checked for infinities.

A model is never in memory: tensors are read in row blocks, and MLX works on some while others are read and written.
"""

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial

import mlx.core as mx
import numpy as np

from ..errors import CheckpointError
from ..quantize import Quantization, QuantizationSettings
from ..safetensors_writer import PlannedTensor
from ..tensors import CODES, FLOATING, StoredTensor, from_mlx, mlx_name, to_mlx
from .blocks import in_threads, is_finite, row_ranges

Tick = Callable[[int], None]  # told how many bytes were done
Job = Callable[[], tuple[mx.array, ...]]
Block = tuple[mx.array, ...] | tuple[np.ndarray, ...]
_BLOCKS_AHEAD = 2


def outputs(
    tensors: Mapping[str, StoredTensor], dtype: str, quantization: Quantization | None
) -> dict[str, list[PlannedTensor]]:
    """For each tensor what will be written for it; `dtype` is MLX's name.

    Raises CheckpointError for a tensor that is not floating-point.
    """
    planned = {}
    for name, tensor in tensors.items():
        if tensor.dtype not in FLOATING:
            raise CheckpointError(f"{name} holds {mlx_name(tensor.dtype)}, expected floating-point weights")
        module, code = name.removesuffix(".weight"), CODES[dtype]
        settings = quantization.modules.get(module) if quantization else None
        parts = settings.packed(tensor.shape, code) if settings else {"weight": (code, tensor.shape)}
        planned[name] = [PlannedTensor(f"{module}.{suffix}", *part) for suffix, part in parts.items()]
    return planned


def transformed(
    tensors: Mapping[str, StoredTensor], dtype: str, quantization: Quantization | None
) -> Iterator[tuple[str, tuple[np.ndarray, ...]]]:
    """Tensor by tensor, row block by row block: its name, and what is written: (weight,) or (weight, scales[, biases]).

    Raises CheckpointError for a value that is infinite or not a number, or becomes so in the new dtype.
    """
    modules = quantization.modules if quantization else {}
    reads = (
        partial(_read, name, tensor, start, stop)
        for name, tensor in tensors.items()
        for start, stop in row_ranges(tensor)
    )
    begun: deque[tuple[str, Block]] = deque()
    for i, (name, rows) in enumerate(in_threads(reads)):
        settings = modules.get(name.removesuffix(".weight"))
        if tensors[name].dtype == CODES[dtype] and settings is None:
            block: Block = (rows,)
        else:
            block = _begin(i, partial(_computed, rows, tensors[name].dtype, dtype, settings))
        begun.append((name, block))
        if len(begun) > _BLOCKS_AHEAD:
            yield _finished(*begun.popleft(), dtype)
    while begun:
        yield _finished(*begun.popleft(), dtype)


def in_turn(jobs: Iterable[Job]) -> Iterator[tuple[mx.array, ...]]:
    """The arrays of each job, in order; the next few jobs are computed meanwhile."""
    begun: deque[tuple[mx.array, ...]] = deque()
    for i, job in enumerate(jobs):
        begun.append(_begin(i, job))
        if len(begun) > _BLOCKS_AHEAD:
            yield begun.popleft()
    yield from begun


def _begin(i: int, job: Job) -> tuple[mx.array, ...]:
    """Start a job's computation on the next stream."""
    streams = _streams()
    with mx.stream(streams[i % len(streams)]):
        arrays = job()
    mx.async_eval(*arrays)
    return arrays


def _streams() -> list[mx.Stream]:
    """On a CPU a stream is a thread of MLX; a GPU needs no second one. Streams belong to the thread that made them."""
    if not hasattr(_local, "streams"):
        cpu = mx.default_device() == mx.Device(mx.cpu)
        _local.streams = [mx.new_stream(mx.cpu), mx.new_stream(mx.cpu)] if cpu else [mx.default_stream(mx.gpu)]
    return _local.streams


_local = threading.local()


def _read(name: str, tensor: StoredTensor, start: int, stop: int) -> tuple[str, np.ndarray]:
    rows = tensor.read_rows(start, stop)
    if not is_finite(rows, tensor.dtype):
        raise CheckpointError(
            f"{name} holds values that are infinite or not a number: the source is damaged; download it again"
        )
    return name, rows


def _computed(rows: np.ndarray, code: str, dtype: str, settings: QuantizationSettings | None) -> tuple[mx.array, ...]:
    # No Metal GPU has float64.
    values = to_mlx(rows.astype(np.float32), "F32") if code == "F64" else to_mlx(rows, code)
    values = values.astype(getattr(mx, dtype))
    return tuple(mx.quantize(values, **settings.to_dict())) if settings else (values,)


def _finished(name: str, block: Block, dtype: str) -> tuple[str, tuple[np.ndarray, ...]]:
    """The block as numpy arrays. Those that MLX computed are checked: the new dtype may be too narrow."""
    copied = tuple(part for part in block if isinstance(part, np.ndarray))
    if copied:
        return name, copied
    computed = [part for part in block if isinstance(part, mx.array)]
    mx.eval(*computed)  # waits without holding Python's lock, so that reading goes on
    arrays = tuple(map(from_mlx, computed))
    for part, values in zip(computed, arrays, strict=True):
        if mx.issubdtype(part.dtype, mx.floating) and not is_finite(values, CODES[dtype]):
            raise CheckpointError(f"{name} has values beyond the range of {dtype}; choose another --dtype")
    return name, arrays
