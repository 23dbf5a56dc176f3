"""Reading safetensors files of doubtful origin, and writing files that every other reader takes."""

import json
import struct

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors import SafetensorError
from safetensors.numpy import load, load_file, save_file

from openelm_mlx.errors import CheckpointError, OpenELMError
from openelm_mlx.safetensors_file import MAX_HEADER_BYTES, read_folder, read_header, read_metadata, weight_files
from openelm_mlx.safetensors_writer import PlannedTensor, SafetensorsWriter

TENSORS = {
    "a.weight": np.arange(12, dtype=np.float32).reshape(4, 3),
    "a.scales": np.arange(5, dtype=np.uint8),
    "b": np.float16([[1, 2], [3, 4]]),
    "scalar": np.array(7, dtype=np.int64),
    "empty": np.zeros((0, 3), np.float32),
}


def file_bytes(header: object, data: bytes = b"", length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def entry(shape=(2,), offsets=(0, 8), dtype="F32") -> dict:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


def write(folder, plan: dict[str, np.ndarray], **options) -> None:
    codes = {"float32": "F32", "float16": "F16", "uint8": "U8", "int64": "I64", "uint16": "BF16"}
    planned = [PlannedTensor(name, codes[str(value.dtype)], value.shape) for name, value in plan.items()]
    with SafetensorsWriter(folder, planned, **options) as writer:
        for name, value in reversed(plan.items()):  # the order across tensors is free
            rows = value.reshape(value.shape or 1)
            writer.append(name, rows[:1])
            writer.append(name, rows[1:])


class TestReading:
    def test_gives_what_the_library_gives(self, tmp_path):
        save_file(TENSORS, tmp_path / "x.safetensors", metadata={"format": "pt"})
        found = read_header(tmp_path / "x.safetensors")
        assert {name: tensor.read().tolist() for name, tensor in found.items()} == {
            name: value.tolist() for name, value in TENSORS.items()
        }
        assert found["a.weight"].read_rows(1, 3).tolist() == TENSORS["a.weight"][1:3].tolist()
        assert read_metadata(tmp_path / "x.safetensors") == {"format": "pt"}

    @pytest.mark.parametrize(
        ("content", "message"),
        [
            (b"", "is empty: incomplete download"),
            (b"\x08\0\0", "cut short"),
            (b"version https://git-lfs.github.com/spec/v1\noid sha256:1\n", "Git LFS pointer"),
            (b"\n<!DOCTYPE html><html>", "web page"),
            (b"\xff" * 40, "its header would be"),
            (file_bytes({}, length=MAX_HEADER_BYTES + 1), "its header would be"),
            (file_bytes({}, length=5000), "cut short: its header takes 5000"),
            (file_bytes(b"{'a': 1}"), "not JSON"),
            (file_bytes(b'{"\xff": 1}'), "not JSON"),
            (file_bytes(b"[" * 100_000), "not JSON"),
            (file_bytes([1]), "no JSON object"),
            (file_bytes(b'{"a": 1, "a": 1}'), "stands twice"),
            (file_bytes({"a": 3}), "describes 'a' by 3"),
            (file_bytes({"a": {}}), "dtype None"),
            (file_bytes({"a": entry(dtype="F4")}, bytes(8)), "dtype 'F4', which is not supported"),
            (file_bytes({"a": entry(dtype=["F32"])}, bytes(8)), "not supported"),
            (file_bytes({"a": entry(shape=[-2])}, bytes(8)), "shape"),
            (file_bytes({"a": entry(shape=[2.0])}, bytes(8)), "shape"),
            (file_bytes({"a": entry(shape=[True, 2])}, bytes(8)), "shape"),
            (file_bytes({"a": entry(shape=[2] + [1] * 40)}, bytes(8)), "shape"),
            (file_bytes({"a": entry(shape=[10**30])}, bytes(8)), "shape"),
            (file_bytes({"a": entry(shape=[2**62] * 30)}, bytes(8)), "shape"),
            (file_bytes({"a": entry(offsets=[8, 0])}, bytes(8)), "its offsets give -8"),
            (file_bytes({"a": entry(offsets=[0])}, bytes(8)), "data_offsets"),
            (file_bytes({"a": entry(shape=[3])}, bytes(8)), "needs 12 bytes, its offsets give 8"),
            (file_bytes({"a": entry(offsets=[8, 16])}, bytes(16)), "begins at byte 8, expected 0"),
            (file_bytes({"a": entry(), "b": entry()}, bytes(16)), "'b' begins at byte 0, expected 8"),
            (file_bytes({"a": entry()}, bytes(7)), "8 bytes of tensors promised, 7 present: incomplete download"),
            (file_bytes({"a": entry()}, bytes(9)), "1 bytes follow its last tensor"),
        ],
    )
    def test_names_what_is_wrong(self, tmp_path, content, message):  # fault C4, and hostile headers
        path = tmp_path / "model.safetensors"
        path.write_bytes(content)
        with pytest.raises(CheckpointError, match=message) as caught:
            read_header(path)
        assert str(path) in str(caught.value)
        assert len(str(caught.value)) < 400 + len(str(path))

    def test_a_name_of_a_megabyte_is_not_repeated(self, tmp_path):
        (tmp_path / "x").write_bytes(file_bytes({"a" * 10**6: entry(shape=[-1])}, bytes(8)))
        with pytest.raises(CheckpointError) as caught:
            read_header(tmp_path / "x")
        assert len(str(caught.value)) < 400

    @pytest.mark.parametrize("path", ["missing", "."])
    def test_what_is_no_file(self, tmp_path, path):
        with pytest.raises(CheckpointError, match="cannot read"):
            read_header(tmp_path / path)

    def test_a_file_that_shrinks_meanwhile(self, tmp_path):
        path = tmp_path / "x.safetensors"
        save_file({"a": np.zeros(1000, np.float32)}, path)
        tensor = read_header(path)["a"]
        path.write_bytes(path.read_bytes()[:2000])
        with pytest.raises(CheckpointError, match="became shorter"):
            tensor.read()

    @given(st.data())
    def test_never_reads_what_the_library_refuses(self, tmp_path_factory, data):
        """Mutated files: an error of ours, or the very tensors of the library. Never anything else."""
        content = bytearray(file_bytes({"a": entry(), "b": entry(offsets=[8, 16])}, bytes(range(16))))
        for _ in range(data.draw(st.integers(1, 3))):
            content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
        content = bytes(content[: data.draw(st.integers(0, len(content)))] if data.draw(st.booleans()) else content)
        path = tmp_path_factory.getbasetemp() / "mutated.safetensors"
        path.write_bytes(content)
        try:
            ours = {name: tensor.read() for name, tensor in read_header(path).items()}
        except OpenELMError:
            return
        try:
            theirs = load(content)
        except (SafetensorError, TypeError, KeyError):  # unknown dtypes of numpy's reader among them
            return
        assert set(ours) == set(theirs)
        assert all(ours[name].tobytes() == theirs[name].tobytes() for name in ours)


class TestFolder:
    def folder(self, tmp_path):
        write(tmp_path, {"a": np.zeros(4, np.float32), "b": np.ones(4, np.float32)}, max_shard_bytes=16)
        return tmp_path

    def index(self, folder) -> dict:
        return json.loads((folder / "model.safetensors.index.json").read_text())

    def edit_index(self, folder, change) -> None:
        index = self.index(folder)
        change(index)
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))

    def test_shards_are_one_model(self, tmp_path):
        folder = self.folder(tmp_path)
        assert sorted(read_folder(folder)) == ["a", "b"]
        assert self.index(folder) == {
            "metadata": {"total_size": 32},
            "weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"},
        }
        assert [file.name for file in weight_files(folder)] == sorted(self.index(folder)["weight_map"].values())

    @pytest.mark.parametrize("index_too", [True, False])
    def test_a_missing_shard_is_named(self, tmp_path, index_too):  # fault C4
        folder = self.folder(tmp_path)
        (folder / "model-00002-of-00002.safetensors").unlink()
        if index_too:
            (folder / "model.safetensors.index.json").unlink()
        with pytest.raises(CheckpointError, match=r"model-00002-of-00002.safetensors.*incomplete download"):
            read_folder(folder)

    def test_a_promised_tensor_that_is_absent(self, tmp_path):
        folder = self.folder(tmp_path)
        self.edit_index(folder, lambda index: index["weight_map"].update(c="model-00001-of-00002.safetensors"))
        with pytest.raises(CheckpointError, match=r"lists 1 tensor that no file holds \(c\)"):
            read_folder(folder)

    @pytest.mark.parametrize("file", ["../a", "/etc/passwd", "", "."])
    def test_an_index_stays_in_its_folder(self, tmp_path, file):
        folder = self.folder(tmp_path)
        self.edit_index(folder, lambda index: index["weight_map"].update(a=file))
        with pytest.raises(CheckpointError, match="no file of its own folder"):
            read_folder(folder)

    @pytest.mark.parametrize("weight_map", [None, [], {"a": 1}])
    def test_a_malformed_index(self, tmp_path, weight_map):
        folder = self.folder(tmp_path)
        self.edit_index(folder, lambda index: index.update(weight_map=weight_map))
        with pytest.raises(CheckpointError, match="weight_map"):
            read_folder(folder)

    def test_two_models_in_one_folder(self, tmp_path):
        save_file({"a": np.zeros(4, np.float32)}, tmp_path / "model.safetensors")
        save_file({"a": np.zeros(4, np.float32)}, tmp_path / "model-2.safetensors")
        with pytest.raises(CheckpointError, match="two files hold a"):
            read_folder(tmp_path)

    def test_an_empty_folder(self, tmp_path):
        with pytest.raises(CheckpointError, match=r"no model\*.safetensors"):
            read_folder(tmp_path)


class TestWriting:
    def test_other_readers_take_it(self, tmp_path):
        write(tmp_path, TENSORS)
        assert [file.name for file in tmp_path.iterdir()] == ["model.safetensors"]
        theirs = load_file(tmp_path / "model.safetensors")
        assert {name: (value.tolist(), value.dtype) for name, value in theirs.items()} == {
            name: (value.tolist(), value.dtype) for name, value in TENSORS.items()
        }
        assert mx.load(str(tmp_path / "model.safetensors"))["b"].tolist() == TENSORS["b"].tolist()

    def test_bfloat16_keeps_its_bits(self, tmp_path):
        values = mx.array([1.5, -2.0, 3e38]).astype(mx.bfloat16)
        write(tmp_path, {"x": np.array(values.view(mx.uint16))})
        assert mx.array_equal(mx.load(str(tmp_path / "model.safetensors"))["x"], values)

    def test_every_tensor_is_aligned(self, tmp_path):
        write(tmp_path, TENSORS)
        content = (tmp_path / "model.safetensors").read_bytes()
        (length,) = struct.unpack_from("<Q", content)
        header = json.loads(content[8 : 8 + length])
        assert header["__metadata__"] == {"format": "mlx"}
        assert length % 8 == 0
        for name, value in TENSORS.items():
            assert header[name]["data_offsets"][0] % value.dtype.itemsize == 0

    def test_shards_are_filled_and_never_split_a_tensor(self, tmp_path):
        plan = {f"t{i}": np.full(size, i, np.uint8) for i, size in enumerate([40, 60, 1, 150, 100])}
        write(tmp_path, plan, max_shard_bytes=100)
        held = {file.name: list(read_header(file)) for file in weight_files(tmp_path)}
        assert held == {
            "model-00001-of-00004.safetensors": ["t0", "t1"],
            "model-00002-of-00004.safetensors": ["t2"],
            "model-00003-of-00004.safetensors": ["t3"],
            "model-00004-of-00004.safetensors": ["t4"],
        }
        assert {name: tensor.read().tolist() for name, tensor in read_folder(tmp_path).items()} == {
            name: value.tolist() for name, value in plan.items()
        }

    def test_an_unfinished_tensor_is_noticed(self, tmp_path):
        with (
            pytest.raises(AssertionError, match="never written"),
            SafetensorsWriter(tmp_path, [PlannedTensor("a", "F32", (2,))]) as writer,
        ):
            writer.append("a", np.zeros(1, np.float32))
