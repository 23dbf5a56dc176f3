"""Safetensors files read without trusting them: every length in the header is checked against the file.

A file is an 8-byte length, a JSON header, and the tensors' bytes one after the other
(github.com/huggingface/safetensors, "Format"). Downloads break in a few known ways (cut short, a Git LFS pointer or
a web page instead of the weights, a shard that never came): each is named, with what to do. Values stay in the file
until `StoredTensor.read_rows` asks. `safetensors_writer` writes such files.
"""

import json
import math
import mmap
import os
import re
import struct
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from .config import read_json_object
from .config_keys import counted
from .errors import CheckpointError
from .tensors import StoredTensor, itemsize, known_dtype, numpy_dtype

if TYPE_CHECKING:
    import numpy as np

INDEX_NAME = "model.safetensors.index.json"
MAX_HEADER_BYTES = 8 * 2**20  # a thousand layers take half of it; the library's 100 MB could fill the memory
_LENGTH = struct.Struct("<Q")
_MAX_RANK = 32  # numpy's older bound, far beyond any weight
_MAX_NUMBER = 2**63
_SHARD_NAME = re.compile(r"(.*)-(\d{5})-of-(\d{5})(\.\w+)")
_WEB_PAGE = (b"<!doctype", b"<html", b"<?xml", b"<head")
_DOWNLOAD_AGAIN = "incomplete download? fetch it again"


def read_header(path: Path) -> dict[str, StoredTensor]:
    """Every tensor of one file, by name. Raises CheckpointError naming what is wrong with the file."""
    header, data_start, data_bytes = _parse(path)
    mapped = _map(path)
    tensors = {
        name: _stored_tensor(path, mapped, name, entry, data_start)
        for name, entry in header.items()
        if name != "__metadata__"
    }
    spans = sorted((*header[name]["data_offsets"], name) for name in tensors)
    _check_spans(path, spans, data_bytes)
    return tensors


def read_metadata(path: Path) -> dict[str, str]:
    """The header's `__metadata__`; MLX writes {"format": "mlx"}. Raises CheckpointError."""
    metadata = _parse(path)[0].get("__metadata__", {})
    return (
        {key: value for key, value in metadata.items() if isinstance(value, str)} if isinstance(metadata, dict) else {}
    )


def read_folder(folder: Path) -> dict[str, StoredTensor]:
    """Every tensor of a model folder: the shards its index lists, else its model*.safetensors.

    Raises CheckpointError for missing shards, for names that the index promises and no shard holds, and for a
    name in two files.
    """
    weight_map = read_weight_map(folder / INDEX_NAME)
    tensors: dict[str, StoredTensor] = {}
    for file in _files(folder, weight_map):
        for name, tensor in read_header(file).items():
            if name in tensors:
                raise CheckpointError(f"{folder}: two files hold {name:.100}; remove the files of the other model")
            tensors[name] = tensor
    check_promised(folder / INDEX_NAME, weight_map, tensors)
    return tensors


def weight_files(folder: Path) -> list[Path]:
    """The files that `read_folder` reads."""
    return _files(folder, read_weight_map(folder / INDEX_NAME))


def read_weight_map(index: Path) -> dict[str, str]:
    """Tensor name -> file name from an index, {} where there is none; every file is there.

    Raises CheckpointError for an index that is malformed, leaves its folder, or lists files that are absent.
    """
    if not index.exists():
        return {}
    weight_map = read_json_object(index).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
        raise CheckpointError(f'{index} has no "weight_map" from tensor names to file names; download it again')
    files = sorted(set(weight_map.values()))
    outside = [file for file in files if Path(file).name != file or file in ("", ".", "..")]
    if outside:
        raise CheckpointError(f"{index} names {outside[0]!r:.100}, which is no file of its own folder; refused")
    missing = [file for file in files if not (index.parent / file).is_file()]
    if missing:
        raise CheckpointError(
            f"{index.parent} lacks {len(missing)} of {len(files)} weight files ({_some(missing)}): {_DOWNLOAD_AGAIN}"
        )
    return weight_map


def check_promised(index: Path, weight_map: Mapping[str, str], tensors: Mapping[str, Any]) -> None:
    """Raise CheckpointError when a name of the index is in no file."""
    absent = [name for name in weight_map if name not in tensors]
    if absent:
        raise CheckpointError(
            f"{index} lists {counted(len(absent), 'tensor')} that no file holds ({_some(absent)}): {_DOWNLOAD_AGAIN}"
        )


def check_shards_complete(folder: Path, files: list[str]) -> None:
    """Raise CheckpointError when files named `x-00001-of-00003.y` lack one of their set; for folders without index."""
    for file in files:
        match = _SHARD_NAME.fullmatch(file)
        if match is None:
            continue
        stem, _, total, suffix = match.groups()
        wanted = (f"{stem}-{i:05d}-of-{total}{suffix}" for i in range(1, int(total) + 1))
        missing = next((name for name in wanted if name not in files), None)
        if missing:
            raise CheckpointError(f"{folder} lacks the weight file {missing}: {_DOWNLOAD_AGAIN}")


def refuse_damage(path: Path, head: bytes) -> None:
    """Raise CheckpointError when a file's first bytes show that a download went wrong; any weight file may be asked."""
    if not head:
        raise CheckpointError(f"{path} is empty: {_DOWNLOAD_AGAIN}")
    if head.startswith(b"version https://git-lfs"):
        raise CheckpointError(f"{path} is a Git LFS pointer, not the weights; fetch them with `git lfs pull`")
    if head.lstrip().lower().startswith(_WEB_PAGE):  # a lone "<" may be the length of a short header
        raise CheckpointError(f"{path} is a web page, not weights; download it again, logged in where that is needed")


def _files(folder: Path, weight_map: Mapping[str, str]) -> list[Path]:
    return [folder / file for file in sorted(set(weight_map.values())) or _unlisted_files(folder)]


def _unlisted_files(folder: Path) -> list[str]:
    files = sorted(file.name for file in folder.glob("model*.safetensors"))
    if not files:
        raise CheckpointError(f"{folder} has no model*.safetensors; PyTorch weights are read by `openelm convert`")
    check_shards_complete(folder, files)
    return files


def _parse(path: Path) -> tuple[dict[str, Any], int, int]:
    """The JSON header, where the tensors begin, and how many bytes they have."""
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            head = file.read(64)
            refuse_damage(path, head)
            if len(head) < _LENGTH.size:
                raise CheckpointError(f"{path} is cut short ({size} bytes): {_DOWNLOAD_AGAIN}")
            (header_bytes,) = _LENGTH.unpack_from(head)
            if header_bytes > MAX_HEADER_BYTES:
                raise CheckpointError(f"{path} is not a safetensors file: its header would be {header_bytes} bytes")
            if header_bytes > size - _LENGTH.size:
                raise CheckpointError(
                    f"{path} is cut short: its header takes {header_bytes} bytes, the file {size}: {_DOWNLOAD_AGAIN}"
                )
            file.seek(_LENGTH.size)
            text = file.read(header_bytes)
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror or error}") from None
    start = _LENGTH.size + header_bytes
    return _json_header(path, text), start, size - start


def _json_header(path: Path, text: bytes) -> dict[str, Any]:
    def no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        result = dict(pairs)
        if len(result) != len(pairs):
            raise ValueError("a name stands twice in the header")
        return result

    try:
        header = json.loads(text.decode("utf-8"), object_pairs_hook=no_duplicates)
    except (ValueError, RecursionError) as error:
        _refuse(path, str(error) if "twice" in str(error) else "its header is not JSON")
    if not isinstance(header, dict):
        _refuse(path, "its header is no JSON object")
    return header


def _stored_tensor(path: Path, mapped: mmap.mmap, name: str, entry: Any, data_start: int) -> StoredTensor:
    """One checked entry of the header."""
    label = f"{name!r:.80}"
    if not isinstance(entry, dict):
        _refuse(path, f"its header describes {label} by {entry!r:.60}")
    code: Any = entry.get("dtype")
    shape: Any = entry.get("shape")
    offsets: Any = entry.get("data_offsets")
    if not isinstance(code, str) or not known_dtype(code):
        raise CheckpointError(f"{path}: {label} has dtype {code!r:.60}, which is not supported; expected a plain float")
    if not _whole_numbers(shape) or len(shape) > _MAX_RANK:
        _refuse(path, f"{label} has shape {shape!r:.60}")
    if not _whole_numbers(offsets) or len(offsets) != 2:
        _refuse(path, f"{label} has data_offsets {offsets!r:.60}")
    begin, end = offsets
    expected = math.prod(shape) * itemsize(code)
    if end - begin != expected:
        _refuse(path, f"{label} ({code}, shape {shape}) needs {expected} bytes, its offsets give {end - begin}")
    rows = partial(_rows, path, mapped, code, tuple(shape), data_start + begin)
    return StoredTensor(name, code, tuple(shape), rows)


def _check_spans(path: Path, spans: list[tuple[int, int, str]], data_bytes: int) -> None:
    """The tensors fill the file: no gap, no overlap, nothing behind the last."""
    position = 0
    for begin, end, name in spans:
        if begin != position:
            _refuse(path, f"{name!r:.80} begins at byte {begin}, expected {position}")
        position = end
    if position > data_bytes:
        raise CheckpointError(
            f"{path} is cut short: {position} bytes of tensors promised, {data_bytes} present: {_DOWNLOAD_AGAIN}"
        )
    if position < data_bytes:
        _refuse(path, f"{data_bytes - position} bytes follow its last tensor")


def _map(path: Path) -> mmap.mmap:
    """The file as memory. Nothing is copied and nothing counts as used memory, and reading is twice as fast."""
    try:
        with path.open("rb") as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"cannot read {path}: {error}") from None


def _rows(
    path: Path, mapped: mmap.mmap, code: str, shape: tuple[int, ...], position: int, start: int, stop: int
) -> "np.ndarray":
    """Rows [start, stop), read-only, of the tensor that begins at byte `position` of the file."""
    import numpy as np

    rows, row_shape = (shape[0], shape[1:]) if shape else (1, ())
    assert 0 <= start <= stop <= rows, (start, stop, rows)
    row_bytes = math.prod(row_shape) * itemsize(code)
    begin, end = position + start * row_bytes, position + stop * row_bytes
    if mapped.size() < end:  # asked of the file itself: touching memory beyond its end would end the process
        raise CheckpointError(f"{path} became shorter while it was read: {_DOWNLOAD_AGAIN}")
    values = np.frombuffer(mapped, np.uint8, end - begin, begin).view(numpy_dtype(code))
    return np.require(values.reshape(stop - start, *row_shape), requirements=["C", "A"])


def _whole_numbers(value: Any) -> bool:
    return isinstance(value, list) and all(type(number) is int and 0 <= number < _MAX_NUMBER for number in value)


def _some(names: list[str]) -> str:
    return ", ".join(f"{name:.100}" for name in names[:3]) + (", ..." if len(names) > 3 else "")


def _refuse(path: Path, what: str) -> NoReturn:
    raise CheckpointError(f"{path} is not a valid safetensors file: {what:.300}; download it again")
