"""What torch.save writes, written without torch: checkpoints for tests, honest ones and hostile ones.

    write_torch_file(path, {"weight": np.zeros((2, 3), np.float32), "bias": BFloat16(bits)})

Dictionaries, OrderedDicts, lists, tuples and plain values may be nested; arrays become tensors. `View` and `Opcodes`
put into a file what no honest one holds; `pickle_of` and `write_records` give the parts.
"""

import pickle
import struct
import zipfile
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

STORAGE_NAMES = {
    "float64": "DoubleStorage",
    "float32": "FloatStorage",
    "float16": "HalfStorage",
    "bfloat16": "BFloat16Storage",
    "int64": "LongStorage",
    "int32": "IntStorage",
    "int16": "ShortStorage",
    "int8": "CharStorage",
    "uint8": "ByteStorage",
    "bool": "BoolStorage",
}

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
    writer = _Writer()
    return pickle.PROTO + b"\x02" + writer.code(obj) + pickle.STOP, writer.storages


class _Writer:
    def __init__(self) -> None:
        self.storages: list[bytes] = []
        self.keys: dict[int, str] = {}  # id of an array -> its storage: arrays used twice are stored once
        self.alive: list[Any] = []

    def code(self, obj: Any) -> bytes:
        match obj:
            case None:
                return pickle.NONE
            case bool():
                return pickle.NEWTRUE if obj else pickle.NEWFALSE
            case int() if -(2**31) <= obj < 2**31:
                return pickle.BININT + struct.pack("<i", obj)
            case int():
                size = obj.bit_length() // 8 + 1
                return pickle.LONG1 + bytes([size]) + obj.to_bytes(size, "little", signed=True)
            case float():
                return pickle.BINFLOAT + struct.pack(">d", obj)
            case str():
                return pickle.BINUNICODE + struct.pack("<I", len(obj.encode())) + obj.encode()
            case Opcodes():
                return obj.code
            case tuple():
                return pickle.MARK + b"".join(map(self.code, obj)) + pickle.TUPLE
            case list():
                return pickle.EMPTY_LIST + pickle.MARK + b"".join(map(self.code, obj)) + pickle.APPENDS
            case dict():
                items = b"".join(self.code(key) + self.code(value) for key, value in obj.items())
                new = _EMPTY_ORDERED if isinstance(obj, OrderedDict) else pickle.EMPTY_DICT
                return new + pickle.MARK + items + pickle.SETITEMS
            case np.ndarray():
                strides = tuple(s // obj.itemsize for s in np.ascontiguousarray(obj).strides) if obj.ndim else ()
                return self.code(View(obj, 0, obj.shape, strides))
            case BFloat16():
                strides = tuple(s // 2 for s in np.ascontiguousarray(obj.bits).strides)
                return self.code(View(obj, 0, obj.bits.shape, strides))
            case View():
                return self._tensor(obj)
        raise TypeError(f"no way to write a {type(obj).__name__}")

    def _tensor(self, view: View) -> bytes:
        bits = view.storage.bits if isinstance(view.storage, BFloat16) else view.storage
        dtype = "bfloat16" if isinstance(view.storage, BFloat16) else bits.dtype.name
        typed = dtype in STORAGE_NAMES
        name = f"torch\n{STORAGE_NAMES[dtype]}" if typed else "torch.storage\nUntypedStorage"
        count = bits.size if typed else bits.nbytes
        arguments = self._storage(bits, name, count if view.count is None else view.count)
        arguments += b"".join(map(self.code, (view.offset, view.shape, view.strides, False))) + _EMPTY_ORDERED
        arguments += b"" if typed else f"ctorch\n{dtype}\n".encode()
        version = 2 if typed else 3
        call = f"ctorch._utils\n_rebuild_tensor_v{version}\n".encode()
        return call + pickle.MARK + arguments + pickle.TUPLE + pickle.REDUCE

    def _storage(self, values: np.ndarray, name: str, count: int) -> bytes:
        if id(values) not in self.keys:
            self.keys[id(values)] = str(len(self.storages))
            self.alive.append(values)
            self.storages.append(np.ascontiguousarray(values).tobytes())
        reference = ("storage", Opcodes(f"c{name}\n".encode()), self.keys[id(values)], "cpu", count)
        return self.code(reference) + pickle.BINPERSID


_EMPTY_ORDERED = b"ccollections\nOrderedDict\n" + pickle.EMPTY_TUPLE + pickle.REDUCE
