"""Tensors on their way to new folders, a few megabytes at a time: copied, cast, or packed, and checked for infinities.

A model is never in memory: tensors are read in row blocks, and MLX works on some while others are read and written.
Several quantisations of one source share a read.
"""

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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
Rows = tuple[np.ndarray, ...]  # (weight,) or (weight, scales[, biases])
Block = tuple[mx.array, ...] | Rows
_BLOCKS_AHEAD = 4
_COMPUTED_BLOCK_BYTES = 4 * 2**20  # enough work for MLX that handing blocks over does not count


def outputs(
    tensors: Mapping[str, StoredTensor], dtype: str, quantization: Quantization | None
) -> dict[str, list[PlannedTensor]]:
    """For each tensor what will be written for it; `dtype` is MLX's name.

    Raises CheckpointError for a tensor that is not floating-point.
    """
    for name, tensor in tensors.items():
        if tensor.dtype not in FLOATING:
            raise CheckpointError(f"{name} holds {mlx_name(tensor.dtype)}, expected floating-point weights")
    return planned({name: tensor.shape for name, tensor in tensors.items()}, dtype, quantization)


def planned(
    shapes: Mapping[str, tuple[int, ...]], dtype: str, quantization: Quantization | None
) -> dict[str, list[PlannedTensor]]:
    """The same from shapes alone, which are known before the weights are there."""
    result, code = {}, CODES[dtype]
    for name, shape in shapes.items():
        settings, module = _settings(quantization, name), name.removesuffix(".weight")
        parts = settings.packed(shape, code) if settings else {"weight": (code, shape)}
        result[name] = [PlannedTensor(f"{module}.{suffix}", *part) for suffix, part in parts.items()]
    return result


def transformed(
    tensors: Mapping[str, StoredTensor], dtype: str, quantizations: Sequence[Quantization | None]
) -> Iterator[tuple[str, list[Rows]]]:
    """Tensor by tensor, row block by row block: its name, and what each of `quantizations` writes for these rows.

    Raises CheckpointError for a value that is infinite or not a number, or becomes so in the new dtype.
    """
    copies = not any(quantizations) and {tensor.dtype for tensor in tensors.values()} == {CODES[dtype]}
    block_bytes = 0 if copies else _COMPUTED_BLOCK_BYTES  # 0: the usual
    reads = (
        partial(_read, name, tensor, start, stop)
        for name, tensor in tensors.items()
        for start, stop in row_ranges(tensor, block_bytes=block_bytes)
    )
    begun: deque[tuple[str, dict[QuantizationSettings | None, Block]]] = deque()
    for i, (name, rows) in enumerate(in_threads(reads)):
        code = tensors[name].dtype
        blocks: dict[QuantizationSettings | None, Block] = {}
        for settings in {_settings(quantization, name) for quantization in quantizations}:
            if code == CODES[dtype] and settings is None:
                blocks[settings] = (rows,)
            else:
                blocks[settings] = _begin(i, partial(_computed, rows, code, dtype, settings))
        begun.append((name, blocks))
        if len(begun) > _BLOCKS_AHEAD:
            yield _finished(*begun.popleft(), dtype, quantizations)
    while begun:
        yield _finished(*begun.popleft(), dtype, quantizations)


def copied(tensors: Mapping[str, StoredTensor]) -> Iterator[tuple[str, Rows]]:
    """Tensor by tensor, row block by row block: every value as it is stored, packed words among them."""
    reads = (
        partial(_read, name, tensor, start, stop)
        for name, tensor in tensors.items()
        for start, stop in row_ranges(tensor)
    )
    for name, rows in in_threads(reads):
        yield name, (rows,)


def in_turn(jobs: Iterable[Job]) -> Iterator[tuple[mx.array, ...]]:
    """The arrays of each job, in order; the next few jobs are computed meanwhile."""
    begun: deque[tuple[mx.array, ...]] = deque()
    for i, job in enumerate(jobs):
        begun.append(_begin(i, job))
        if len(begun) > _BLOCKS_AHEAD:
            yield begun.popleft()
    yield from begun


def _settings(quantization: Quantization | None, name: str) -> QuantizationSettings | None:
    return quantization.modules.get(name.removesuffix(".weight")) if quantization else None


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
    if settings is None:
        return (values,)
    # The same codes and scales come out of float32 copies of the rounded values, on a CPU a quarter faster.
    codes, *scales = mx.quantize(values.astype(mx.float32), **settings.to_dict())
    return (codes, *(part.astype(values.dtype) if mx.issubdtype(part.dtype, mx.floating) else part for part in scales))


def _finished(
    name: str,
    blocks: Mapping[QuantizationSettings | None, Block],
    dtype: str,
    quantizations: Sequence[Quantization | None],
) -> tuple[str, list[Rows]]:
    rows = {settings: _to_numpy(name, block, dtype) for settings, block in blocks.items()}
    return name, [rows[_settings(quantization, name)] for quantization in quantizations]


def _to_numpy(name: str, block: Block, dtype: str) -> Rows:
    """The block as numpy arrays. Those that MLX computed are checked: the new dtype may be too narrow."""
    copied = tuple(part for part in block if isinstance(part, np.ndarray))
    if copied:
        return copied
    computed = [part for part in block if isinstance(part, mx.array)]
    mx.eval(*computed)  # waits without holding Python's lock, so that reading goes on
    arrays = tuple(map(from_mlx, computed))
    for part, values in zip(computed, arrays, strict=True):
        if mx.issubdtype(part.dtype, mx.floating) and not is_finite(values, CODES[dtype]):
            raise CheckpointError(f"{name} has values beyond the range of {dtype}; choose a wider dtype")
    return arrays
