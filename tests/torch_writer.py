"""What torch.save writes, written without torch: checkpoints for tests, honest ones and hostile ones.

The product's own PickleEncoder, and what it must never write.

    write_torch_file(path, {"weight": np.zeros((2, 3), np.float32), "bias": BFloat16(bits)})

Dictionaries, OrderedDicts, lists, tuples and plain values may be nested; arrays become tensors. `View` and `Opcodes`
put into a file what no honest one holds; `pickle_of` and `write_records` give the parts.
"""

import struct
import zipfile
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from openelm_mlx.convert.torch_writer import STORAGE_NAMES, PickleEncoder, named
from openelm_mlx.tensors import CODES

LEGACY_START = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."  # the format's magic number, pickled
LITTLE_ENDIAN = {"protocol_version": 1001, "little_endian": True}


@dataclass(frozen=True)
class BFloat16:
    """A bfloat16 tensor, as the uint16 array of its bits."""

    bits: np.ndarray


@dataclass(frozen=True)
class View:
    """A tensor that says of itself what it likes: any offset, shape and strides, over the numbers of `storage`."""

    storage: "np.ndarray | BFloat16"
    offset: Any
    shape: Any
    strides: Any
    count: int | None = None  # the storage's length, where it is not to be true


@dataclass(frozen=True)
class Opcodes:
    """Raw pickle instructions, put in as they are."""

    code: bytes


def write_torch_file(path: Path, obj: Any) -> Path:
    """Write `obj` in the zip format of torch.save; torch.load(path, weights_only=True) reads it. Returns `path`."""
    program, storages = pickle_of(obj)
    records = {"data.pkl": program, "byteorder": b"little"}
    records |= {f"data/{key}": data for key, data in enumerate(storages)}
    write_records(path, {f"{path.stem}/{name}": data for name, data in (records | {"version": b"3\n"}).items()})
    return path


def write_legacy_file(path: Path, obj: Any, machine: Any = LITTLE_ENDIAN, keys: Any = None) -> Path:
    """Write `obj`, whose arrays are of four-byte numbers, in the format of torch.save before 1.6. Returns `path`."""
    program, storages = pickle_of(obj)
    keys = [str(key) for key in range(len(storages))] if keys is None else keys
    version, machine_info, storage_keys = (pickle_of(part)[0] for part in (1001, machine, keys))
    data = [struct.pack("<q", len(storage) // 4) + storage for storage in storages]
    path.write_bytes(b"".join([LEGACY_START, version, machine_info, program, storage_keys, *data]))
    return path


def write_records(path: Path, records: Mapping[str, bytes], compression: int = zipfile.ZIP_STORED) -> None:
    """Write a zip archive of the given records."""
    with zipfile.ZipFile(path, "w", compression) as archive:
        for name, data in records.items():
            archive.writestr(zipfile.ZipInfo(name), data, compression)


def pickle_of(obj: Any) -> tuple[bytes, list[bytes]]:
    """The pickle (protocol 2) of `obj`, and the bytes of the storages that it refers to by their place in the list."""
    encoder = _Encoder()
    return encoder.program(obj), encoder.data


class _Encoder(PickleEncoder):
    """Also arrays, and what no honest file holds. `data` are the bytes of the storages."""

    def __init__(self) -> None:
        super().__init__()
        self.data: list[bytes] = []
        self.keys: dict[int, str] = {}  # id of an array -> its storage: arrays used twice are stored once
        self.alive: list[Any] = []

    def code(self, value: Any) -> bytes:
        match value:
            case Opcodes():
                return value.code
            case np.ndarray():
                strides = tuple(s // value.itemsize for s in np.ascontiguousarray(value).strides) if value.ndim else ()
                return self.view(View(value, 0, value.shape, strides))
            case BFloat16():
                strides = tuple(s // 2 for s in np.ascontiguousarray(value.bits).strides)
                return self.view(View(value, 0, value.bits.shape, strides))
            case View():
                return self.view(value)
        return super().code(value)

    def view(self, view: View) -> bytes:
        bits = view.storage.bits if isinstance(view.storage, BFloat16) else view.storage
        dtype = "bfloat16" if isinstance(view.storage, BFloat16) else bits.dtype.name
        type_name = STORAGE_NAMES.get(CODES["bool_" if dtype == "bool" else dtype])
        count = (bits.size if type_name else bits.nbytes) if view.count is None else view.count
        storage = self.storage(self.key(bits), type_name or "torch.storage.UntypedStorage", count)
        arguments = (view.offset, view.shape, view.strides, False, OrderedDict())
        if type_name:
            return self.rebuild("_rebuild_tensor_v2", storage, *arguments)
        return self.rebuild("_rebuild_tensor_v3", storage, *arguments, Opcodes(named("torch", dtype)))

    def key(self, values: np.ndarray) -> str:
        if id(values) not in self.keys:
            self.keys[id(values)] = str(len(self.data))
            self.alive.append(values)
            self.data.append(np.ascontiguousarray(values).tobytes())
        return self.keys[id(values)]
