"""Damaged and hostile PyTorch files: tensors outside their storage, archives that lie, files cut short or mistaken.

Fault C4 for PyTorch's formats. Each is one CheckpointError that names the file. Pickles are in test_torch_attacks.py.
"""

import os
import pickle
import tracemalloc
import zipfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch_checks import read_everything, read_or_refused, refusal
from torch_writer import View, write_legacy_file, write_records, write_torch_file

from openelm_mlx.convert.torch_file import read_torch_file

FIXTURES = Path(__file__).parent / "torch_fixtures"
FOUR = np.arange(4, dtype=np.float32)
GOOD = {"offset": 0, "shape": (2, 2), "strides": (2, 1)}


@pytest.mark.parametrize(
    "change",
    [
        {"offset": -1},
        {"offset": 1},
        {"offset": 2**63},
        {"offset": 0.0},
        {"offset": True},
        {"offset": None},
        {"shape": (2, 3)},
        {"shape": (-2, -2)},
        {"shape": (-1, 2)},
        {"shape": (2,)},
        {"shape": [2, 2]},
        {"shape": (2.0, 2)},
        {"shape": (2, (2,))},
        {"shape": 4},
        {"shape": (2**31, 2**31), "strides": (0, 0)},
        {"shape": (2**62, 2**62, 2**62), "strides": (0, 0, 0)},
        {"shape": (0, 2**62), "strides": (1, 1)},
        {"shape": (2**24 + 1,), "strides": (0,)},
        {"shape": (1,) * 40, "strides": (1,) * 40},
        {"strides": (3, 1)},
        {"strides": (2, -1)},
        {"strides": (2**62, 1)},
        {"strides": (2,)},
        {"strides": (2, None)},
        {"count": 3},
        {"count": 5},
        {"count": 2**62},
        {"count": -4},
    ],
    ids=str,
)
def test_a_tensor_that_does_not_lie_in_its_storage_is_refused(tmp_path: Path, change: dict):
    view = View(FOUR, **(GOOD | change))
    refusal(write_torch_file(tmp_path / "model.pt", {"weight": view}))
    refusal(write_legacy_file(tmp_path / "old.pt", {"weight": view}))


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({}, [[0, 1], [2, 3]]),
        ({"strides": (1, 1), "offset": 1}, [[1, 2], [2, 3]]),
        ({"shape": (1, 4), "strides": (2**70, 1)}, [[0, 1, 2, 3]]),
        ({"shape": (3, 0), "offset": 99}, [[], [], []]),
        ({"shape": (), "strides": (), "offset": 3}, 3),
        ({"shape": (3, 2), "strides": (0, 3)}, [[0, 3]] * 3),
    ],
    ids=str,
)
def test_an_unusual_tensor_that_lies_in_its_storage_is_read(tmp_path: Path, change: dict, expected: list):
    view = View(FOUR, **(GOOD | change))
    for path in (
        write_torch_file(tmp_path / "model.pt", {"w": view}),
        write_legacy_file(tmp_path / "old.pt", {"w": view}),
    ):
        np.testing.assert_array_equal(read_torch_file(path)["w"].read(), np.array(expected, np.float32), strict=True)


@pytest.mark.parametrize("change", [b"x", b"\x00", -1], ids=["longer", "zero byte", "shorter"])
def test_a_legacy_file_of_another_length_is_refused_or_read_whole(tmp_path: Path, change: bytes | int):
    path = write_legacy_file(tmp_path / "old.pt", {"w": FOUR})
    data = path.read_bytes()
    path.write_bytes(data[:change] if isinstance(change, int) else data + change)
    if isinstance(change, int):
        assert "cut short" in refusal(path)
    else:
        assert read_everything(path) == 1


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"machine": {"little_endian": False}}, "big-endian"),
        ({"machine": {}}, "unknown version"),
        ({"machine": []}, "unknown version"),
        ({"keys": []}, "the storages it lists"),
        ({"keys": ["0", "0"]}, "the storages it lists"),
        ({"keys": ["0", "1"]}, "the storages it lists"),
        ({"keys": [0]}, "damaged"),
        ({"keys": "0"}, "the storages it lists"),
    ],
    ids=str,
)
def test_a_legacy_file_that_contradicts_itself_is_refused(tmp_path: Path, changes: dict, fault: str):
    assert fault in refusal(write_legacy_file(tmp_path / "old.pt", {"w": FOUR}, **changes))


def records_of(path: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(path) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


@pytest.fixture
def good(tmp_path: Path) -> Path:
    """A file that is read, to be changed: records model/data.pkl, model/byteorder, model/data/0, model/version."""
    return write_torch_file(tmp_path / "model.pt", {"weight": FOUR})


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"model/byteorder": b"big"}, "big-endian"),
        ({"model/byteorder": b"little" + b"\0" * 100}, "big-endian"),
        ({"model/data/0": None}, "no record '0'"),
        ({"model/data/0": b"\0" * 12}, "has 12 bytes, not 16"),
        ({"model/data/0": b"\0" * 20}, "has 20 bytes, not 16"),
        ({"model/data.pkl": None}, "not one that torch.save wrote"),
        ({"other/data.pkl": b""}, "not one that torch.save wrote"),
        ({"model/constants.pkl": b""}, "TorchScript"),
        ({"model/../../x": b""}, "a record is named"),
        ({"/etc/x": b""}, "a record is named"),
        ({"model\\x": b""}, "a record is named"),
    ],
    ids=str,
)
def test_an_archive_of_other_records_is_refused(good: Path, changes: dict, fault: str):
    records = records_of(good) | changes
    write_records(good, {name: data for name, data in records.items() if data is not None})
    assert fault in refusal(good)


def test_an_archive_with_more_records_is_read(good: Path):
    write_records(
        good, records_of(good) | {"model/": b"", "model/.data/serialization_id": b"1", "model/more": b"x" * 99}
    )
    assert read_everything(good) == 1


def test_a_compressed_record_is_refused_and_never_unpacked(good: Path):
    bomb = {"model/data.pkl": b"]" * 5_000_000}
    write_records(good, records_of(good) | bomb, zipfile.ZIP_DEFLATED)
    tracemalloc.start()
    try:
        assert "is compressed" in refusal(good)
        assert tracemalloc.get_traced_memory()[1] < 2**20
    finally:
        tracemalloc.stop()


def test_two_records_of_one_name_are_refused(good: Path):
    with zipfile.ZipFile(good, "a") as archive, pytest.warns(UserWarning, match="Duplicate name"):
        archive.writestr("model/data/0", FOUR.tobytes())
    assert "same name" in refusal(good)


DIRECTORY_ENTRY = b"PK\x01\x02"
# Fields of a record in the directory: where they begin in its entry, and how many bytes they have.
FLAGS, METHOD, PACKED, SIZE, NAME_LENGTH, HEADER = (8, 2), (10, 2), (20, 4), (24, 4), (28, 2), (42, 4)


@pytest.mark.parametrize(
    ("fields", "value", "fault"),
    [
        ([FLAGS], 1, "encrypted"),
        ([METHOD], 8, "compressed"),
        ([METHOD], 99, "compressed"),
        ([PACKED], 15, "described twice"),
        ([SIZE], 2**31, "described twice"),
        ([PACKED, SIZE], 15, "described twice"),
        ([PACKED, SIZE], 2**31, "described twice"),
        ([HEADER], 0, "described twice"),
        ([HEADER], 1, "damaged"),
        ([HEADER], 2**31, "damaged"),
        ([NAME_LENGTH], 2**15, "damaged"),
    ],
    ids=str,
)
def test_a_directory_that_lies_about_a_record_is_refused(good: Path, fields: list, value: int, fault: str):
    data = bytearray(good.read_bytes())
    entry = data.index(b"model/data/0", data.index(DIRECTORY_ENTRY)) - 46
    for start, length in fields:
        data[entry + start : entry + start + length] = value.to_bytes(length, "little")
    good.write_bytes(data)
    assert fault in refusal(good)


def test_records_that_share_bytes_are_refused(good: Path):
    """The data of one record holds a whole second record, header and all, that the directory lists too."""
    with zipfile.ZipFile(good, "a") as archive:
        archive.writestr(zipfile.ZipInfo("model/x"), b"y" * 100)
        inner = archive.getinfo("model/x").header_offset
        outer = archive.getinfo("model/version")
        outer.file_size = outer.compress_size = 60 + 100
        archive.writestr(zipfile.ZipInfo("model/z"), b"")
    data = bytearray(good.read_bytes())
    header = outer.header_offset
    assert data[header + 30 : header + 43] == b"model/version"
    data[header + 18 : header + 26] = (160).to_bytes(4, "little") * 2
    good.write_bytes(data)
    assert inner < header + 43 + 160
    assert "overlap" in refusal(good)


def test_a_zip_directory_of_many_megabytes_is_not_read(good: Path):
    with zipfile.ZipFile(good, "a") as archive:
        for i in range(150):
            archive.writestr(zipfile.ZipInfo(f"model/{i}/" + "x" * 60_000), b"")
    assert "directory is larger than 8 MB" in refusal(good)


@pytest.mark.parametrize(
    ("data", "fault"),
    [
        (b"", "is empty"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n", "git lfs pull"),
        (b"\n <!DOCTYPE html><html>", "web page"),
        (b"<html><body>Access denied", "web page"),
        (b'<?xml version="1.0"?><Error>', "error message of a web server"),
        (b"\x10\0\0\0\0\0\0\0" + b'{"__metadata__":{}}', "safetensors"),
        (b"GGUF\x03\0\0\0", "GGUF"),
        (pickle.dumps({"weight": [1.0]}), "plain Python pickle"),
        (b"\0" * 257 + b"ustar\0" + b"\0" * 249, "tar archive"),
        (b"PK\x05\x06" + b"\0" * 18, "no checkpoint"),
        (b"PK\x03\x04", "cut short"),
        (b"\x93NUMPY", "no checkpoint"),
        (b"\0" * 1000, "no checkpoint"),
    ],
    ids=range(13),
)
def test_what_is_no_pytorch_file_is_named(tmp_path: Path, data: bytes, fault: str):
    (tmp_path / "model.pt").write_bytes(data)
    assert fault in refusal(tmp_path / "model.pt")


def test_what_is_no_file_is_named(tmp_path: Path):
    assert "No such file" in refusal(tmp_path / "missing.pt")
    assert "is not a file" in refusal(tmp_path)
    os.mkfifo(tmp_path / "pipe.pt")  # to open it would wait for ever
    assert "is not a file" in refusal(tmp_path / "pipe.pt")


SMALL_FILES = {name: (FIXTURES / name).read_bytes() for name in ("legacy.pt", "views.pt")}


def test_a_file_cut_short_anywhere_is_refused(good: Path):
    for whole, path in ((good.read_bytes(), good), (SMALL_FILES["legacy.pt"], good.with_name("old.pt"))):
        for length in range(len(whole)):
            path.write_bytes(whole[:length])
            refusal(path)


@settings(max_examples=200)
@given(data=st.data(), name=st.sampled_from(sorted(SMALL_FILES)))
def test_a_file_with_changed_bytes_is_read_or_refused(tmp_path_factory, data: st.DataObject, name: str):
    changed = bytearray(SMALL_FILES[name])
    for position in data.draw(st.lists(st.integers(0, len(changed) - 1), min_size=1, max_size=4)):
        changed[position] = data.draw(st.integers(0, 255))
    path = tmp_path_factory.mktemp("changed") / name
    path.write_bytes(changed)
    assert read_or_refused(path) <= 12
