"""What TorchWriter leaves is what torch.save would: our reader, zipfile, and torch itself where it is installed."""

import errno
import gc
import zipfile
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from openelm_mlx.convert import torch_writer
from openelm_mlx.convert.torch_file import read_torch_file
from openelm_mlx.convert.torch_writer import STORAGE_NAMES, TorchWriter
from openelm_mlx.safetensors_writer import PlannedTensor
from openelm_mlx.tensors import numpy_dtype

MATRIX = PlannedTensor("matrix", "F32", (3, 4))
EMPTY = PlannedTensor("empty", "F32", (0, 3))
SCALAR = PlannedTensor("scalar", "I64", ())
TREE = {
    "iterations": 2**40,
    "model": OrderedDict(matrix=MATRIX, empty=EMPTY, scalar=SCALAR),
    "again": [MATRIX, -1.5, None, (1, True, "ä")],
}
VALUES = np.arange(12, dtype=np.float32).reshape(3, 4)


def write(path: Path, tree: Any = TREE) -> Path:
    with TorchWriter(path, tree) as writer:
        writer.append("matrix", VALUES[:1])
        writer.append("matrix", VALUES[1:])
        writer.append("scalar", np.array(7))
    return path


def test_what_is_written_is_read_back(tmp_path):
    found = read_torch_file(write(tmp_path / "a b.pt"))

    assert found["iterations"] == 2**40
    assert type(found["model"]) is OrderedDict
    np.testing.assert_array_equal(found["model"]["matrix"].read(), VALUES)
    assert found["model"]["empty"].shape == (0, 3)
    assert found["model"]["scalar"].read() == 7
    np.testing.assert_array_equal(found["again"][0].read(), VALUES)
    assert found["again"][1:] == [-1.5, None, (1, True, "ä")]


@pytest.mark.parametrize("wide", [False, True], ids=["small", "zip64"])
def test_records_are_stored_plainly_and_aligned(tmp_path, monkeypatch, wide):
    if wide:  # as records beyond 1 GB are
        monkeypatch.setattr(torch_writer, "_ZIP64_BYTES", 0)
    path = write(tmp_path / "m.pt")
    data = path.read_bytes()
    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() is None
        for info in archive.infolist():
            lengths = np.frombuffer(data, "<u2", 2, info.header_offset + 26)
            assert info.compress_type == zipfile.ZIP_STORED
            assert (info.header_offset + 30 + int(lengths.sum())) % 64 == 0
    np.testing.assert_array_equal(read_torch_file(path)["model"]["matrix"].read(), VALUES)


@pytest.mark.needs_torch
def test_torch_loads_every_dtype_as_weights_only(tmp_path):
    torch = pytest.importorskip("torch")
    tensors = OrderedDict((code, PlannedTensor(code, code, (2, 3))) for code in STORAGE_NAMES)
    with TorchWriter(tmp_path / "m.pt", {"model": tensors, "step": 3}) as writer:
        for code in tensors:
            ones = np.full((2, 3), 0x3F80) if code == "BF16" else np.ones((2, 3))
            writer.append(code, ones.astype(numpy_dtype(code)))
    for mmap in (None, True):
        found = torch.load(tmp_path / "m.pt", weights_only=True, mmap=mmap)
        assert found["step"] == 3
        assert type(found["model"]) is OrderedDict
        for code, tensor in found["model"].items():
            assert tensor.shape == (2, 3), code
            assert bool((tensor == 1).all()), code


def test_an_unfinished_file_is_empty(tmp_path):
    path = tmp_path / "m.pt"
    interrupted = KeyboardInterrupt()
    writer = TorchWriter(path, TREE).__enter__()
    writer.append("matrix", VALUES[:1])
    writer.__exit__(KeyboardInterrupt, interrupted, None)
    assert path.stat().st_size == 0
    with pytest.raises(AssertionError, match="matrix is not complete"), TorchWriter(path, TREE) as writer:
        writer.append("matrix", VALUES[:1])
    gc.collect()  # nothing that was left open complains later
    assert path.stat().st_size == 0


def test_a_full_disk_is_an_os_error_and_leaves_nothing(tmp_path):
    # fault C2
    path = tmp_path / "m.pt"
    writer = TorchWriter(path, TREE).__enter__()
    writer._zip.fp = _Full(writer._zip.fp)
    with pytest.raises(OSError, match="No space") as caught:
        writer.append("matrix", VALUES)
    writer.__exit__(OSError, caught.value, None)
    gc.collect()
    assert path.stat().st_size == 0


class _Full:
    """A stream on a disk without room."""

    def __init__(self, stream: Any):
        self.seek, self.tell, self.close = stream.seek, stream.tell, stream.close

    def write(self, data: bytes) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    def flush(self) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")


def test_tensors_come_in_their_order_with_their_dtype(tmp_path):
    path = tmp_path / "m.pt"
    for name, rows, complaint in (
        ("scalar", np.array(7), "matrix comes first"),
        ("matrix", VALUES.astype(np.float64), "float64"),
        ("matrix", np.concatenate([VALUES, VALUES]), "more rows than planned"),
        ("nobody", VALUES, "comes first"),
    ):
        with pytest.raises(AssertionError, match=complaint), TorchWriter(path, TREE) as writer:
            writer.append(name, rows)
    with pytest.raises(TypeError, match="no way to write a set"):
        TorchWriter(path, {1, 2})
