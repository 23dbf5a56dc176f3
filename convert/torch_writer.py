"""Writes what torch.save writes, without PyTorch: a zip of one pickle and a record for each tensor's numbers.

    tree = OrderedDict((tensor.name, tensor) for tensor in plan)    # PlannedTensors, in containers of all kinds
    with TorchWriter(path, tree) as writer:
        writer.append("norm.weight", rows)                          # the next rows, in the tree's order

torch.load(path, weights_only=True) reads it: the pickle names OrderedDict, torch._utils._rebuild_tensor_v2 and storage
types, nothing else. Records are stored as they are, each at a multiple of 64 bytes, as torch places them for mapping.
"""

import os
import pickle
import struct
import zipfile
from collections import OrderedDict
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import IO, Any

import numpy as np

from ..safetensors_writer import PlannedTensor
from ..tensors import numpy_dtype
from .torch_names import STORAGE_DTYPES

STORAGE_NAMES = {code: name for name, code in STORAGE_DTYPES.items() if code is not None}  # "BF16" -> "torch. ..."
_ARCHIVE = "archive"  # the folder inside the zip; readers take any name
_ALIGNMENT = 64
_ZIP64_BYTES = 2**30  # records from here on get the header for sizes beyond 4 GB, which does no harm to others
_LOCAL_HEADER_BYTES, _ZIP64_FIELD_BYTES, _FIELD_HEAD = 30, 20, struct.Struct("<2sH")


class TorchWriter:
    """Context manager that leaves a complete file; leaving it early, or with tensors missing, is our own error.

    `tree` is what torch.load will return, with a PlannedTensor for each tensor; their names must differ. The same
    PlannedTensor twice is one storage. Raises OSError when the disk is full.
    """

    def __init__(self, path: Path, tree: Any):
        self._path = path
        encoder = PickleEncoder()
        self._program = encoder.program(tree)
        self._waiting = list(encoder.storages)
        assert len({tensor.name for tensor in self._waiting}) == len(self._waiting), "two tensors have one name"
        self._key = -1
        self._current: PlannedTensor | None = None
        self._record: IO[bytes] | None = None
        self._left = 0  # bytes of the current tensor that are still to come

    def __enter__(self) -> "TorchWriter":
        self._stream = self._path.open("w+b")
        self._zip = zipfile.ZipFile(self._stream, "w", zipfile.ZIP_STORED)
        try:
            self._write("data.pkl", self._program)
            self._write("byteorder", b"little")
        except BaseException:
            self._abandon()
            raise
        return self

    def append(self, name: str, rows: np.ndarray) -> None:
        """Write the next rows of a tensor; the one before must be complete."""
        if self._current is None or self._current.name != name:
            self._begin(name)
        assert self._current is not None
        assert self._record is not None
        assert rows.dtype == numpy_dtype(self._current.dtype), (name, rows.dtype)
        assert rows.nbytes <= self._left, f"{name} has more rows than planned"
        self._record.write(np.ascontiguousarray(rows).reshape(-1).view(np.uint8).data)
        self._left -= rows.nbytes

    def _begin(self, name: str) -> None:
        self._end()
        while self._waiting and self._waiting[0].nbytes == 0 and self._waiting[0].name != name:
            self._open(self._waiting.pop(0))
            self._end()
        assert self._waiting, f"{name} was not planned"
        assert self._waiting[0].name == name, f"{self._waiting[0].name} comes first"
        self._open(self._waiting.pop(0))

    def _open(self, tensor: PlannedTensor) -> None:
        self._key += 1
        self._current, self._left = tensor, tensor.nbytes
        self._record = self._new_record(f"data/{self._key}", tensor.nbytes)

    def _end(self) -> None:
        assert self._left == 0, f"{self._current and self._current.name} is not complete"
        if self._record is not None:
            self._record.close()
        self._record = self._current = None

    def _write(self, name: str, data: bytes) -> None:
        with self._new_record(name, len(data)) as record:
            record.write(data)

    def _new_record(self, name: str, size: int) -> IO[bytes]:
        """A record whose first byte will lie at a multiple of 64: its header is stretched, as torch does it."""
        info = zipfile.ZipInfo(f"{_ARCHIVE}/{name}")
        wide = size >= _ZIP64_BYTES
        header = _LOCAL_HEADER_BYTES + len(info.filename) + _FIELD_HEAD.size + (_ZIP64_FIELD_BYTES if wide else 0)
        padding = -(self._zip.start_dir + header) % _ALIGNMENT
        info.extra = _FIELD_HEAD.pack(b"FB", padding) + b"Z" * padding
        return self._zip.open(info, "w", force_zip64=wide)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            if error is None:
                self._finish()
                self._stream.close()
                return
        except BaseException:
            self._abandon()
            raise
        self._abandon()

    def _finish(self) -> None:
        self._end()
        while self._waiting:
            assert self._waiting[0].nbytes == 0, f"{self._waiting[0].name} was never written"
            self._open(self._waiting.pop(0))
            self._end()
        self._write("version", b"3\n")
        self._zip.close()

    def _abandon(self) -> None:
        """Nobody may take an unfinished file for a whole one. A full disk is full here too, and was told already."""
        for close in (self._record and self._record.close, self._zip.close):
            with suppress(OSError, ValueError):
                if close:
                    close()
        with suppress(OSError, ValueError):
            os.ftruncate(self._stream.fileno(), 0)
        with suppress(OSError):
            self._stream.close()


class PickleEncoder:
    """Protocol 2 of pickle for plain values, containers and PlannedTensors, instruction by instruction.

    Python's own pickler would have to import torch to name its functions. `storages` are the tensors met, in order.
    """

    def __init__(self) -> None:
        self.storages: list[PlannedTensor] = []
        self._keys: dict[PlannedTensor, str] = {}

    def program(self, tree: Any) -> bytes:
        """The whole pickle."""
        return pickle.PROTO + b"\x02" + self.code(tree) + pickle.STOP

    def code(self, value: Any) -> bytes:
        """The instructions that leave `value` on the stack."""
        match value:
            case PlannedTensor():
                return self._planned(value)
            case None:
                return pickle.NONE
            case bool():
                return pickle.NEWTRUE if value else pickle.NEWFALSE
            case int():
                return _integer(value)
            case float():
                return pickle.BINFLOAT + struct.pack(">d", value)
            case str():
                return pickle.BINUNICODE + struct.pack("<I", len(value.encode())) + value.encode()
            case tuple():
                return pickle.MARK + b"".join(map(self.code, value)) + pickle.TUPLE
            case list():
                return pickle.EMPTY_LIST + pickle.MARK + b"".join(map(self.code, value)) + pickle.APPENDS
            case dict():
                items = b"".join(self.code(key) + self.code(item) for key, item in value.items())
                new = EMPTY_ORDERED if isinstance(value, OrderedDict) else pickle.EMPTY_DICT
                return new + pickle.MARK + items + pickle.SETITEMS
        raise TypeError(f"no way to write a {type(value).__name__}")

    def rebuild(self, function: str, storage: bytes, *arguments: Any) -> bytes:
        """A call that makes a tensor of a storage: torch._utils.`function`(storage, *arguments)."""
        rest = b"".join(map(self.code, arguments))
        return named("torch._utils", function) + pickle.MARK + storage + rest + pickle.TUPLE + pickle.REDUCE

    def storage(self, key: str, type_name: str, count: Any) -> bytes:
        """A reference to record `data/{key}`, which holds `count` numbers of the type `torch.FloatStorage` or such."""
        module, _, name = type_name.rpartition(".")
        parts = (self.code("storage"), named(module, name), *map(self.code, (key, "cpu", count)))
        return pickle.MARK + b"".join(parts) + pickle.TUPLE + pickle.BINPERSID

    def _planned(self, tensor: PlannedTensor) -> bytes:
        if tensor not in self._keys:
            self._keys[tensor] = str(len(self.storages))
            self.storages.append(tensor)
        strides = [1] * len(tensor.shape)
        for axis in range(len(strides) - 1, 0, -1):
            strides[axis - 1] = strides[axis] * max(1, tensor.shape[axis])
        count = int(np.prod(tensor.shape, dtype=np.int64))
        storage = self.storage(self._keys[tensor], STORAGE_NAMES[tensor.dtype], count)
        hooks: OrderedDict[str, Any] = OrderedDict()
        return self.rebuild("_rebuild_tensor_v2", storage, 0, tensor.shape, tuple(strides), False, hooks)


def named(module: str, name: str) -> bytes:
    """The instruction that puts `module.name` on the stack."""
    return f"c{module}\n{name}\n".encode()


EMPTY_ORDERED = named("collections", "OrderedDict") + pickle.EMPTY_TUPLE + pickle.REDUCE


def _integer(value: int) -> bytes:
    if -(2**31) <= value < 2**31:
        return pickle.BININT + struct.pack("<i", value)
    size = value.bit_length() // 8 + 1
    return pickle.LONG1 + bytes([size]) + value.to_bytes(size, "little", signed=True)
