"""PyTorch files read without PyTorch: what torch itself wrote, what our own writer writes, and views of all kinds.

The files in torch_fixtures were written by torch; where torch is installed, fresh ones are held to the same. What
hostile and damaged files may not do is in test_torch_attacks.py.
"""

import tracemalloc
from collections import OrderedDict
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch_fixtures import make
from torch_writer import BFloat16, View, pickle_of, write_records, write_torch_file

from openelm_mlx.convert.torch_file import read_torch_file, tensors_of
from openelm_mlx.convert.torch_pickle import unpickle
from openelm_mlx.convert.torch_tensor import SourceFile, Storage, stored_tensor
from openelm_mlx.errors import CheckpointError
from openelm_mlx.tensors import CODES, StoredTensor, numpy_dtype

FIXTURES = Path(__file__).parent / "torch_fixtures"


@pytest.fixture(scope="module", params=["committed", pytest.param("fresh", marks=pytest.mark.needs_torch)])
def written_by_torch(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of files that torch.save wrote: once, and again by the torch that is installed here."""
    if request.param == "committed":
        return FIXTURES
    pytest.importorskip("torch")
    folder = tmp_path_factory.mktemp("torch")
    make.write_all(folder)
    return folder


def bfloat16(values: np.ndarray) -> np.ndarray:
    """The bits of numbers that bfloat16 holds exactly."""
    return (np.asarray(values, np.float32).view(np.uint32) >> 16).astype(np.uint16)


def test_every_dtype_of_torch_is_read(written_by_torch: Path):
    tensors = tensors_of(read_torch_file(written_by_torch / "dtypes.pt"), "dtypes.pt")

    assert list(tensors) == list(make.DTYPES)
    assert {tensor.dtype for tensor in tensors.values()} == set(CODES.values())
    for name, tensor in tensors.items():
        values = np.arange(6).reshape(2, 3)
        expected = bfloat16(values) if name == "bfloat16" else values.astype(name)
        assert tensor.name == name
        assert tensor.dtype == CODES["bool_" if name == "bool" else name]
        assert tensor.shape == (2, 3)
        assert tensor.read().dtype == numpy_dtype(tensor.dtype)
        np.testing.assert_array_equal(tensor.read(), expected)


def test_views_of_one_shared_storage_are_gathered(written_by_torch: Path):
    tensors = tensors_of(read_torch_file(written_by_torch / "views.pt"), "views.pt")
    base = np.arange(24, dtype=np.float32)
    table = base.reshape(4, 6)
    expected = {
        "base": base,
        "table": table,
        "transposed": table.T,
        "rows": table[1:3],
        "columns": table[:, 1::2],
        "permuted": base.reshape(2, 3, 4).transpose(2, 0, 1),
        "expanded": np.full((3, 2), 5, np.float32),
        "diagonal": table.diagonal(),
        "scalar": base[7],
        "empty": np.empty((0, 3), np.float32),
        "no columns": table[:, :0],
        "parameter": table[2],
    }

    assert set(tensors) == set(expected)
    for name, tensor in tensors.items():
        np.testing.assert_array_equal(tensor.read(), expected[name], err_msg=name, strict=True)
        for row in range(tensor.num_rows):
            part = tensor.read_rows(row, row + 1)
            assert part.flags.c_contiguous
            np.testing.assert_array_equal(part, np.atleast_1d(expected[name])[row : row + 1], err_msg=name)


def test_a_training_checkpoint_keeps_its_plain_values_and_its_nesting(written_by_torch: Path):
    checkpoint = read_torch_file(written_by_torch / "training.pt")
    model = checkpoint.pop("model_state_dict")
    state, groups = checkpoint["optim_state_dict"]["state"], checkpoint["optim_state_dict"]["param_groups"]
    del checkpoint["optim_state_dict"]

    assert checkpoint == {
        "iterations": 2**40,
        "best_metric": -1.5,
        "done": True,
        "nothing": None,
        "shape": (2, 3),
        "dtype": "torch.bfloat16",
    }
    assert type(model) is OrderedDict
    assert {name: tensor.shape for name, tensor in model.items()} == {
        "0.weight": (2, 3),
        "0.bias": (2,),
        "1.weight": (2,),
        "1.bias": (2,),
    }
    assert groups[0]["lr"] == 0.25
    assert groups[0]["params"] == [0, 1, 2, 3]
    assert groups[0]["betas"] == (0.9, 0.999)
    assert state[0]["step"].read() == 1.0
    assert state[0]["exp_avg"].shape == (2, 3)


def test_the_stream_of_pickles_before_1_6_is_read(written_by_torch: Path):
    tensors = tensors_of(read_torch_file(written_by_torch / "legacy.pt"), "legacy.pt")

    base = bfloat16(np.arange(12))
    np.testing.assert_array_equal(tensors["base"].read(), base)
    np.testing.assert_array_equal(tensors["transposed"].read(), base.reshape(3, 4).T)
    np.testing.assert_array_equal(tensors["other"].read(), np.arange(3))
    np.testing.assert_array_equal(tensors["unsigned"].read(), np.arange(4, dtype=np.uint16), strict=True)
    assert tensors["base"].dtype == "BF16"


@pytest.mark.parametrize(
    ("name", "fault"),
    [
        ("float8.pt", "holds numbers of type torch.float8_e4m3fn, which are not read"),
        ("negated.pt", "holds a tensor that is stored negated"),
        ("module.pt", "asks for 'torch.nn.modules.linear.Linear'"),
        ("script.pt", "is a TorchScript program"),
    ],
)
def test_what_is_no_state_dict_of_ordinary_numbers_is_refused_by_name(written_by_torch: Path, name: str, fault: str):
    with pytest.raises(CheckpointError, match=fault) as caught:
        read_torch_file(written_by_torch / name)
    assert str(written_by_torch / name) in str(caught.value)
    assert "\n" not in str(caught.value)


EVERYTHING = {
    "weight": np.arange(6, dtype=np.float32).reshape(2, 3),
    "bits": BFloat16(np.arange(4, dtype=np.uint16)),
    "scalar": np.array(3, np.int64),
    "empty": np.empty((0, 2), np.float16),
    "unsigned": np.arange(3, dtype=np.uint32),
    "nested": OrderedDict(numbers=[1, -(2**31), 2**62, 0.1], rest=(None, True, "wört", ())),
}


def test_the_writer_of_the_tests_writes_what_we_read(tmp_path: Path):
    write_torch_file(tmp_path / "model.pt", EVERYTHING)
    obj = read_torch_file(tmp_path / "model.pt")

    assert list(obj) == list(EVERYTHING)
    assert obj["nested"] == EVERYTHING["nested"]
    assert type(obj["nested"]) is OrderedDict
    for name in ("weight", "scalar", "empty", "unsigned"):
        np.testing.assert_array_equal(obj[name].read(), EVERYTHING[name], strict=True)
    np.testing.assert_array_equal(obj["bits"].read(), EVERYTHING["bits"].bits, strict=True)


@pytest.mark.needs_torch
def test_torch_reads_what_the_writer_of_the_tests_writes(tmp_path: Path):
    torch = pytest.importorskip("torch")
    write_torch_file(tmp_path / "model.pt", EVERYTHING)
    obj = torch.load(tmp_path / "model.pt", weights_only=True)

    assert obj["nested"] == EVERYTHING["nested"]
    assert obj["bits"].dtype == torch.bfloat16
    np.testing.assert_array_equal(obj["bits"].view(torch.uint16).numpy(), EVERYTHING["bits"].bits)
    for name in ("weight", "scalar", "empty", "unsigned"):
        np.testing.assert_array_equal(obj[name].numpy(), EVERYTHING[name])


@st.composite
def views(draw: st.DrawFn) -> tuple[int, tuple[int, ...], tuple[int, ...]]:
    """Any offset, shape and strides at all, most of them within 100 numbers."""
    shape = draw(st.lists(st.integers(0, 4), max_size=4))
    strides = draw(st.lists(st.integers(0, 30), min_size=len(shape), max_size=len(shape)))
    return draw(st.integers(0, 60)), tuple(shape), tuple(strides)


@pytest.fixture(scope="module")
def hundred_numbers(tmp_path_factory: pytest.TempPathFactory) -> Storage:
    path = tmp_path_factory.mktemp("numbers") / "numbers"
    path.write_bytes(b"head" + np.arange(100, dtype=np.int32).tobytes() + b"tail")
    return Storage(SourceFile.at(path), "I32", 100, 4)


@given(view=views())
def test_a_view_is_read_exactly_or_refused(hundred_numbers: Storage, view: tuple):
    offset, shape, strides = view
    numbers = np.full(shape, offset) + sum(
        stride * np.arange(length).reshape(-1, *[1] * (len(shape) - axis - 1))
        for axis, (length, stride) in enumerate(zip(shape, strides, strict=True))
    )
    if numbers.size and numbers.max() > 99:
        with pytest.raises(CheckpointError, match="reaches beyond"):
            stored_tensor(hundred_numbers, "I32", offset, shape, strides)
        return
    tensor = stored_tensor(hundred_numbers, "I32", offset, shape, strides)
    np.testing.assert_array_equal(tensor.read(), numbers)
    if tensor.num_rows > 1:
        rows = np.concatenate([tensor.read_rows(0, 1), tensor.read_rows(1, tensor.num_rows)])
        np.testing.assert_array_equal(rows, numbers)


def test_no_more_than_the_rows_asked_for_are_in_memory(tmp_path: Path):
    megabyte = 2**20
    write_torch_file(tmp_path / "big.pt", {str(i): np.full((1024, 1024), i, np.uint8) for i in range(6)})
    tracemalloc.start()
    try:
        tensors = tensors_of(read_torch_file(tmp_path / "big.pt"), "big.pt")
        assert all(tensor.read_rows(1000, 1001)[0, 0] == int(name) for name, tensor in tensors.items())
        rows_peak = tracemalloc.get_traced_memory()[1]
        assert all(tensor.read()[-1, -1] == int(name) for name, tensor in tensors.items())
        assert rows_peak < 0.2 * megabyte
        assert tracemalloc.get_traced_memory()[1] < 1.2 * megabyte
    finally:
        tracemalloc.stop()


def test_a_file_that_changes_after_it_was_opened_is_noticed(tmp_path: Path):
    path = tmp_path / "model.pt"
    write_torch_file(path, {"weight": np.zeros(3, np.float32)})
    weight = read_torch_file(path)["weight"]
    path.write_bytes(path.read_bytes() + b"more")

    with pytest.raises(CheckpointError, match="changed while it was being read"):
        weight.read()
    path.unlink()
    with pytest.raises(CheckpointError, match="cannot read"):
        weight.read()


@pytest.mark.parametrize(
    ("obj", "found"),
    [
        ([1], "holds a list"),
        ({}, "holds nothing"),
        ({"epoch": 3, "model": {}}, r"holds entries that are no tensors \('epoch', 'model'\)"),
        ({0: StoredTensor("", "F32", (), lambda start, stop: np.zeros(1))}, "holds entries that are no tensors"),
    ],
)
def test_only_a_flat_state_dict_has_tensors(obj: object, found: str):
    with pytest.raises(CheckpointError, match=f"model.pt {found}"):
        tensors_of(obj, "model.pt")


def test_shared_objects_and_an_archive_folder_of_any_name_are_read(tmp_path: Path):
    array = np.arange(3, dtype=np.float32)
    program, storages = pickle_of({"a": array, "again": array, "b": View(array, 1, (2,), (1,))})
    write_records(tmp_path / "x.pt", {"any name/data.pkl": program, "any name/data/0": storages[0]})
    tensors = read_torch_file(tmp_path / "x.pt")

    assert len(storages) == 1
    np.testing.assert_array_equal(tensors["again"].read(), array)
    np.testing.assert_array_equal(tensors["b"].read(), array[1:])


def test_pickles_follow_each_other(tmp_path: Path):
    (tmp_path / "x").write_bytes(b"x")
    first, _ = pickle_of([1, 2])
    value, position = unpickle(first + first, 0, SourceFile.at(tmp_path / "x"), pytest.fail)
    assert (value, position) == ([1, 2], len(first))
