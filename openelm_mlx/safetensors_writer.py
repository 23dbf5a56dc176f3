"""Writes safetensors shards whose contents are planned but not yet computed: nothing larger than a block is ever held.

The plan (names, dtypes, shapes) fixes every header and every offset beforehand; the values then come in row blocks,
in any order across tensors, which is what quantisation needs: one pass over a matrix fills three tensors.
Files are named as the Hub and mlx-lm name them.
"""

import json
import math
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

import numpy as np

from .safetensors_file import INDEX_NAME
from .tensors import StoredTensor, itemsize, numpy_dtype

MAX_SHARD_BYTES = 5 * 10**9


class PlannedTensor(NamedTuple):
    """A tensor that will be written. `dtype` is safetensors' code."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * itemsize(self.dtype)


class SafetensorsWriter:
    """Context manager that leaves complete files in `folder`, synced to the disk; leaving it early is our own error.

    with SafetensorsWriter(folder, plan) as writer:
        writer.append("a.weight", rows)      # the next rows of that tensor
    """

    def __init__(
        self,
        folder: Path,
        plan: Sequence[PlannedTensor],
        *,
        max_shard_bytes: int = MAX_SHARD_BYTES,
        format: str = "mlx",
    ):
        self._folder, self._format = folder, format
        self._shards = shards(plan, max_shard_bytes)
        self._files: list[int] = []
        self._places: dict[str, _Place] = {}
        self._syncing: list[Future[None]] = []

    def __enter__(self) -> "SafetensorsWriter":
        try:
            for name, shard in self._shards.items():
                self._open(name, shard)
            if len(self._shards) > 1:
                index = json.dumps(index_of(self._shards), indent=2) + "\n"
                (self._folder / INDEX_NAME).write_text(index, encoding="utf-8")
        except BaseException:
            self._close()
            raise
        return self

    def _open(self, name: str, shard: Sequence[PlannedTensor]) -> None:
        file = os.open(self._folder / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
        self._files.append(file)
        header, offsets = header_of(shard, self._format)
        _write_all(file, memoryview(header), 0)
        for tensor in shard:
            self._places[tensor.name] = _Place(file, len(header) + offsets[tensor.name], tensor)

    def _close(self) -> None:
        for file in self._files:
            os.close(file)

    def append(self, name: str, rows: np.ndarray) -> None:
        """Write the next rows of a tensor. Raises OSError when the disk is full."""
        place = self._places[name]
        assert rows.dtype == numpy_dtype(place.tensor.dtype), (name, rows.dtype)
        assert place.written + rows.nbytes <= place.tensor.nbytes, f"{name} has more rows than planned"
        data = np.ascontiguousarray(rows).reshape(-1).view(np.uint8).data
        _write_all(place.file, data, place.position + place.written)
        place.written += rows.nbytes

    def start_sync(self) -> None:
        """All is written: begin to sync in the background. Leaving the context waits for it."""
        unfinished = [name for name, place in self._places.items() if place.written != place.tensor.nbytes]
        assert not unfinished, f"never written: {unfinished}"
        threads = ThreadPoolExecutor(1, thread_name_prefix="openelm-sync")
        self._syncing = [threads.submit(os.fsync, file) for file in self._files]
        threads.shutdown(wait=False)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            if error is None and not self._syncing:
                self.start_sync()
            for done in wait(self._syncing).done:
                if error is None:
                    done.result()
        finally:
            self._close()


class _Place:
    """Where a tensor's bytes go, and how many have gone there."""

    def __init__(self, file: int, position: int, tensor: PlannedTensor):
        self.file, self.position, self.tensor = file, position, tensor
        self.written = 0


def shards(plan: Sequence[PlannedTensor], max_shard_bytes: int) -> dict[str, list[PlannedTensor]]:
    """File name -> its tensors. A tensor is never split, so one larger than the limit has a file of its own."""
    groups: list[list[PlannedTensor]] = [[]]
    size = 0
    for tensor in plan:
        if groups[-1] and size + tensor.nbytes > max_shard_bytes:
            groups.append([])
            size = 0
        groups[-1].append(tensor)
        size += tensor.nbytes
    if len(groups) == 1:
        return {"model.safetensors": groups[0]}
    return {f"model-{i:05d}-of-{len(groups):05d}.safetensors": group for i, group in enumerate(groups, start=1)}


def write_file(path: Path, tensors: Mapping[str, StoredTensor], *, format: str = "mlx") -> None:
    """One file under any name, for the few tensors of an adapter: one of them at a time is in memory.

    format: the word in its metadata by which readers tell whose file it is. Raises OSError when the disk is full.
    """
    plan = [PlannedTensor(name, tensor.dtype, tensor.shape) for name, tensor in tensors.items()]
    header, offsets = header_of(plan, format)
    with path.open("xb") as file:
        file.write(header)
        for name in sorted(tensors, key=offsets.__getitem__):
            file.write(tensors[name].read().tobytes())


def index_of(shards: Mapping[str, Sequence[PlannedTensor]]) -> dict[str, object]:
    """The index file of these shards, as the Hub has it."""
    weight_map = {tensor.name: file for file, shard in shards.items() for tensor in shard}
    total_bytes = sum(tensor.nbytes for shard in shards.values() for tensor in shard)
    return {"metadata": {"total_size": total_bytes}, "weight_map": dict(sorted(weight_map.items()))}


def header_of(tensors: Sequence[PlannedTensor], format: str = "mlx") -> tuple[bytes, dict[str, int]]:
    """A file's first bytes (length and JSON, padded to 8), and each tensor's offset behind them.

    Wide dtypes come first, so that every tensor lies at a multiple of its item size whatever the shapes.
    """
    entries: dict[str, object] = {"__metadata__": {"format": format}}  # mlx-lm's and transformers' readers look for it
    offsets, position = {}, 0
    for tensor in sorted(tensors, key=lambda tensor: -itemsize(tensor.dtype)):
        offsets[tensor.name] = position
        end = position + tensor.nbytes
        entries[tensor.name] = {"dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": [position, end]}
        position = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text, offsets


def _write_all(file: int, data: memoryview, position: int) -> None:
    """Every byte at its position: one call may write less than it was given."""
    while data:
        written = os.pwrite(file, data, position)
        data, position = data[written:], position + written
