"""PyTorch files (`.pt`, `.bin`) without PyTorch: plain containers whose tensors stay in the file until they are read.

    obj = read_torch_file(path)                  what torch.save was given, with StoredTensors for tensors
    tensors = tensors_of(obj, str(path))         of a flat state dict: {name: StoredTensor}

Both formats of torch.save are read: the zip archive (since 1.6) and the stream of pickles before it. Nothing in a file
is executed (torch_pickle.py); sizes and positions are checked before anything is read (torch_zip.py, torch_tensor.py).
Whatever is wrong is one CheckpointError that names the file.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import CheckpointError
from ..tensors import StoredTensor
from .torch_pickle import MAX_PICKLE_BYTES, unpickle
from .torch_tensor import SourceFile, Storage
from .torch_zip import Record, read_directory

_ZIP_START = b"PK\x03\x04"
_LEGACY_START = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."  # torch.serialization.MAGIC_NUMBER, pickled
_LEGACY_PROTOCOL = 1001
# What people have in a .pt or .bin file when it is none: its first bytes -> what to say.
_MISTAKEN = {
    b"version https://git-lfs": "is a Git LFS pointer, not the weights: run `git lfs pull`, or download the file",
    b"<!doctype html": "is a web page, not the weights: the download was refused; log in and download it again",
    b"<?xml": "is an error message of a web server, not the weights: download it again",
    b"<html": "is a web page, not the weights: the download was refused; log in and download it again",
    b"gguf": "is a GGUF file, which is not read: convert the original checkpoint",
    b"\x80": "is a plain Python pickle, which is not read: save the state_dict() with torch.save",
}


def read_torch_file(path: Path) -> Any:
    """What torch.save was given: dict, OrderedDict, list, tuple and plain values, with a StoredTensor for each tensor.

    The tensors have no names yet, and read from `path` when asked. torch.Size becomes a tuple, torch.bfloat16 the
    string "torch.bfloat16". Raises CheckpointError for a file that is missing, damaged, or asks for anything more.
    """
    file = SourceFile.at(path)
    head = _read_bytes(file, 0, min(file.size, 512))
    if head.startswith(_ZIP_START):
        return _read_zip(file)
    if head.startswith(_LEGACY_START):
        return _read_legacy(file)
    raise file.error(_kind(file, head))


def tensors_of(obj: Any, where: str) -> dict[str, StoredTensor]:
    """The tensors of a flat state dict, named. Raises CheckpointError for any other object, saying what it is."""
    if not isinstance(obj, Mapping):
        raise CheckpointError(f"{where} holds a {type(obj).__name__}; expected a state dict, {{name: tensor}}")
    others = [str(key) for key, value in obj.items() if not (isinstance(key, str) and isinstance(value, StoredTensor))]
    if others or not obj:
        found = f"entries that are no tensors ({', '.join(map(_short, others[:4]))})" if others else "nothing"
        raise CheckpointError(f"{where} holds {found}; expected a flat state dict, {{name: tensor}}")
    return {name: tensor.renamed(name) for name, tensor in obj.items()}


def _read_zip(file: SourceFile) -> Any:
    records = read_directory(file)
    root = _root(records, file)
    order = records.get(f"{root}/byteorder")
    if order and _read_bytes(file, order.position, min(order.size, 16)) != b"little":
        raise file.error("was saved on a big-endian machine, which is not read: save it again on a little-endian one")

    def find_storage(key: str, dtype: str | None, count: int) -> Storage:
        record = records.get(f"{root}/data/{key}")
        if record is None:
            raise file.error(f"is damaged: it has no record {_short(key)} of tensor data; download it again")
        storage = Storage(file, dtype, count, record.position)
        if storage.nbytes != record.size:
            raise file.error(
                f"is damaged: record {_short(key)} of tensor data has {record.size} bytes, not {storage.nbytes}"
            )
        return storage

    program = records[f"{root}/data.pkl"]
    if program.size > MAX_PICKLE_BYTES:
        raise file.error(f"is refused: its pickle has {program.size} bytes; a checkpoint's has less than 1 MB")
    value, _ = unpickle(_read_bytes(file, program.position, program.size), 0, file, find_storage)
    return value


def _root(records: Mapping[str, Record], file: SourceFile) -> str:
    """The folder in the archive that holds everything: torch.save names it after the file."""
    roots = [name.removesuffix("/data.pkl") for name in records if name.endswith("/data.pkl") and name.count("/") == 1]
    if len(roots) != 1:
        raise file.error("is a zip archive, but not one that torch.save wrote: a single data.pkl is expected in it")
    return roots[0]


def _read_legacy(file: SourceFile) -> Any:
    """Pickles one after the other (version, machine, object, storage keys), then each storage: count and numbers."""
    data = _read_bytes(file, 0, min(file.size, MAX_PICKLE_BYTES))
    storages: dict[str, Storage] = {}

    def find_storage(key: str, dtype: str | None, count: int) -> Storage:
        storage = storages.setdefault(key, Storage(file, dtype, count))
        if (storage.dtype, storage.count) != (dtype, count):
            raise file.error(f"is damaged: storage {_short(key)} is described twice, and differently")
        return storage

    version, position = unpickle(data, len(_LEGACY_START), file, find_storage)
    machine, position = unpickle(data, position, file, find_storage)
    if version != _LEGACY_PROTOCOL or not isinstance(machine, dict) or machine.get("little_endian") is not True:
        raise file.error("was written by an unknown version of torch.save, or on a big-endian machine; save it again")
    value, position = unpickle(data, position, file, find_storage)
    keys, position = unpickle(data, position, file, find_storage)
    if type(keys) is not list or any(type(key) is not str for key in keys) or sorted(keys) != sorted(storages):
        raise file.error("is damaged: the storages it lists are not those that its tensors use")
    _place_storages([(key, storages[key]) for key in keys], position, file)
    return value


def _place_storages(storages: list[tuple[str, Storage]], position: int, file: SourceFile) -> None:
    """Sets where each storage is: they follow each other from `position` on, each behind its count."""
    for key, storage in storages:
        storage.position = position + 8
        position = storage.position + storage.nbytes
        if position > file.size:
            raise file.error(f"is cut short ({file.size} bytes): download it again")
        if int.from_bytes(_read_bytes(file, storage.position - 8, 8), "little") != storage.count:
            raise file.error(f"is damaged: storage {_short(key)} has not the length that its tensors need")


def _read_bytes(file: SourceFile, position: int, count: int) -> bytes:
    return file.read(position, count, np.uint8).tobytes()


def _kind(file: SourceFile, head: bytes) -> str:
    """What a file is that is not PyTorch's, and what to do."""
    if not head:
        return "is empty (0 bytes): download it again"
    text = head.lstrip().lower()
    for start, message in _MISTAKEN.items():
        if text.startswith(start):
            return message
    if head[8:9] == b"{" and int.from_bytes(head[:8], "little") < file.size:
        return "is a safetensors file: rename it to end in .safetensors"
    if head[257:262] == b"ustar":
        return "is a tar archive, as PyTorch 0.1 wrote them, which is not read: save it again with torch.save"
    return f"is no checkpoint: it starts with {head[:8]!r}; name a .safetensors, .pt or .bin file, or a model folder"


def _short(text: str) -> str:
    return repr(text if len(text) <= 60 else text[:57] + "...")
