"""openelm export: what came from somebody's format goes back into it tensor by tensor, and nothing half done stays."""

import json
import shutil
import warnings
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from artefacts import PADDED_ROWS, TINY, TOKENIZER, write_corenet, write_hub
from reference import random_checkpoint, small_config
from safetensors.numpy import save_file
from torch_writer import write_torch_file

from openelm_mlx import atomic
from openelm_mlx.cli import main
from openelm_mlx.config import OpenELMConfig
from openelm_mlx.convert import blocks, convert, streaming
from openelm_mlx.convert.export import export
from openelm_mlx.convert.export_torch import corenet_name, corenet_yaml
from openelm_mlx.convert.sources import open_source
from openelm_mlx.convert.streaming import planned
from openelm_mlx.convert.torch_file import read_torch_file, tensors_of
from openelm_mlx.safetensors_file import read_folder, read_metadata, weight_files
from openelm_mlx.safetensors_writer import shards
from openelm_mlx.tensors import StoredTensor

RAW = small_config(vocab_size=4096, num_transformer_layers=2)
WEIGHTS = random_checkpoint(RAW, seed=3)
# What only some formats can hold.
VARIANTS = {
    "untied": {"share_input_output_layers": False},
    "no gate": {"ffn_with_glu": False},
    "no qk-norm": {"normalize_qk_projections": False},
    "custom widths": {"num_query_heads": [6, 2], "num_kv_heads": [3, 1]},
}


@pytest.fixture(scope="module")
def small(tmp_path_factory) -> Path:
    """A Hub folder, float32."""
    return write_hub(tmp_path_factory.mktemp("models") / "a model", WEIGHTS, RAW)


@pytest.fixture
def out(tmp_path) -> Path:
    return tmp_path / "out dir" / "exported model"


def variant(folder: Path, changes: dict) -> tuple[Path, dict]:
    config = small_config(vocab_size=4096, num_transformer_layers=2) | changes
    return write_hub(folder, random_checkpoint(config, seed=4), config), config


def assert_same(one, other):
    assert set(one) == set(other)
    for name, tensor in one.items():
        assert (tensor.dtype, tensor.shape) == (other[name].dtype, other[name].shape), name
        np.testing.assert_array_equal(tensor.read(), other[name].read(), err_msg=name)


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def state(file: Path) -> dict:
    return tensors_of(read_torch_file(file), str(file))


class TestRoundTrips:
    @pytest.mark.parametrize("to", ["hf", "pt"])
    @pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float16"])
    def test_hub_to_mlx_and_back(self, tmp_path, out, small, dtype, to):
        # fault G12
        source = small if dtype == "float32" else tmp_path / "source"
        if dtype == "bfloat16":
            source = TINY
        elif dtype == "float16":
            write_hub(source, {name: value.astype(np.float16) for name, value in WEIGHTS.items()}, RAW)
        convert(source, tmp_path / "mlx", dtype=dtype)
        summary = export(tmp_path / "mlx", to, out)

        assert summary.kind == dtype
        assert_same(read_folder(source), open_source(out).tensors)
        assert json.loads((out / "config.json").read_text())["torch_dtype"] == dtype

    @pytest.mark.parametrize("keep", [True, False], ids=["padding kept", "padding made anew"])
    def test_corenet_to_mlx_and_back(self, tmp_path, out, keep):
        file = write_corenet(tmp_path / "c.pt", WEIGHTS)
        if keep:  # the padding rows of a training are no zeros
            padded = {name: tensor.read() for name, tensor in state(file).items()}
            padded["token_embeddings.weight"][-100:] = 0.5
            write_torch_file(file, padded)
        options = {"dtype": "float32", "tokenizer": str(TOKENIZER), "keep_vocab_padding": keep}
        convert(file, tmp_path / "mlx", **options)
        export(tmp_path / "mlx", "corenet", out)

        assert_same(state(file), state(out / "openelm.pt"))
        assert f"vocab_size: {PADDED_ROWS}\n" in (out / "openelm.yaml").read_text()
        assert "padding_index: 4096\n" in (out / "openelm.yaml").read_text()

    @pytest.mark.parametrize("name", VARIANTS)
    def test_every_kind_of_openelm_through_hf_pt_and_corenet(self, tmp_path, name):
        source, config = variant(tmp_path / "source", VARIANTS[name])
        convert(source, tmp_path / "mlx", dtype="float32")
        expected = read_folder(source)
        for to in ("hf", "pt", "corenet"):
            export(tmp_path / "mlx", to, tmp_path / to, pad_vocab=0)
        back = tmp_path / "corenet"
        for found in (
            open_source(tmp_path / "hf"),
            open_source(tmp_path / "pt"),
            open_source(back / "openelm.pt", back / "config.json"),
        ):
            assert_same(expected, found.tensors)
            assert found.config == OpenELMConfig.from_dict(config)


class TestHubLayout:
    def test_a_folder_is_what_the_hub_has(self, out):
        export("tiny", "hf", out, instruct=True)
        hub, ours = (json.loads((folder / "config.json").read_text()) for folder in (TINY, out))

        assert ours == hub
        assert (out / "generation_config.json").read_text() == (TINY / "generation_config.json").read_text()
        assert (out / "tokenizer.model").read_bytes() == TOKENIZER.read_bytes()
        assert "chat_template" in json.loads((out / "tokenizer_config.json").read_text())
        assert read_metadata(out / "model.safetensors") == {"format": "pt"}

    @pytest.mark.parametrize(
        ("dtype", "sizes"), [("float32", [4.98, 4.90, 2.26]), ("bfloat16", [4.94, 1.13])], ids=["3B", "3B-Instruct"]
    )
    def test_large_models_are_cut_where_the_hub_cuts_them(self, dtype, sizes):
        shapes = OpenELMConfig.from_name("3B").parameter_shapes()
        plan = [tensor for group in planned(shapes, dtype, None).values() for tensor in group]
        files = shards(plan, 5 * 10**9)

        assert [round(sum(tensor.nbytes for tensor in group) / 1e9, 2) for group in files.values()] == sizes
        assert next(iter(files)) == f"model-00001-of-{len(sizes):05d}.safetensors"

    @pytest.mark.parametrize(("to", "index"), [("hf", "model.safetensors"), ("pt", "pytorch_model.bin")])
    def test_shards_and_their_index(self, small, out, to, index):
        assert main(["export", str(small), "--to", to, "-o", str(out), "--max-shard-size", "0.5MB"]) == 0

        content = json.loads((out / f"{index}.index.json").read_text())
        names = sorted(set(content["weight_map"].values()))
        assert len(names) > 2
        assert names[0] == index.replace(".", f"-00001-of-{len(names):05d}.", 1)
        assert set(content["weight_map"]) == set(WEIGHTS)
        assert content["metadata"]["total_size"] == sum(value.nbytes for value in WEIGHTS.values())
        assert_same(read_folder(small), open_source(out).tensors)

    def test_another_dtype_is_written_and_named(self, small, out):
        export(small, "hf", out, dtype="bfloat16")
        found = read_folder(out)
        assert {tensor.dtype for tensor in found.values()} == {"BF16"}
        name = "transformer.norm.weight"
        expected = np.array(mx.array(WEIGHTS[name]).astype(mx.bfloat16).view(mx.uint16))
        np.testing.assert_array_equal(found[name].read(), expected)

    @pytest.mark.needs_mlx_lm
    def test_mlx_lm_loads_it_with_apples_logits(self, out, golden):
        export("tiny", "hf", out, dtype="float32")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # transformers' own
            from mlx_lm import load as mlx_lm_load
        model, tokenizer = mlx_lm_load(str(out))
        logits = model(mx.array(golden["ids_0"])[None])[0]
        np.testing.assert_allclose(np.array(logits), golden["logits_0"], atol=1e-4)
        assert tokenizer.encode("Once upon a time there was a king who") == golden["ids_0"].tolist()


class TestTorchFiles:
    @pytest.mark.needs_torch
    def test_torch_loads_them_as_weights_only(self, small, tmp_path):
        torch = pytest.importorskip("torch")
        export(small, "pt", tmp_path / "pt")
        export("tiny", "corenet", tmp_path / "corenet")
        found = torch.load(tmp_path / "pt" / "pytorch_model.bin", weights_only=True)
        assert list(found) == list(OpenELMConfig.from_dict(RAW).parameter_shapes())
        for name, tensor in found.items():
            np.testing.assert_array_equal(tensor.numpy(), WEIGHTS[name])
        found = torch.load(tmp_path / "corenet" / "openelm.pt", weights_only=True)
        assert found["token_embeddings.weight"].shape == (PADDED_ROWS, 256)
        assert found["norm.weight"].dtype == torch.bfloat16

    @pytest.mark.parametrize(("multiple", "rows"), [(128, 4224), (1000, 5000), (0, 4096)])
    def test_the_vocabulary_is_padded_with_zeros(self, small, out, multiple, rows):
        assert main(["export", str(small), "--to", "corenet", "-o", str(out), "--pad-vocab", str(multiple)]) == 0
        embedding = state(out / "openelm.pt")["token_embeddings.weight"].read()
        assert embedding.shape == (rows, 128)
        np.testing.assert_array_equal(embedding[:4096], WEIGHTS["transformer.token_embeddings.weight"])
        assert not embedding[4096:].any()
        assert ("padding_index" in (out / "openelm.yaml").read_text()) == (rows > 4096)

    def test_the_yaml_names_published_sizes_and_describes_others(self, tmp_path):
        for size, name in {"270M": "OpenELM-270M", "1_1B": "OpenELM-1_1B", "3B": "OpenELM-3B"}.items():
            config = OpenELMConfig.from_name(size, vocab_size=32128)
            assert corenet_name(config) == name
            (tmp_path / f"{size}.yaml").write_text(corenet_yaml(config, 32000))
            assert OpenELMConfig.from_yaml(tmp_path / f"{size}.yaml") == config
        text = corenet_yaml(OpenELMConfig.from_dict(RAW), 4096)
        assert "none of them" in text
        assert "query heads of the layers: [2, 4]" in text


class TestQuantizedModels:
    def test_are_unpacked_with_a_warning(self, small, tmp_path, out, caplog):
        convert(small, tmp_path / "mlx", quantize=True, q_bits=4, dtype="float32")
        export(tmp_path / "mlx", "hf", out)
        packed, plain = read_folder(tmp_path / "mlx"), read_folder(out)
        path = "transformer.layers.1.ffn.proj_1"
        parts = [mx.array(packed[f"{path}.{part}"].read()) for part in ("weight", "scales", "biases")]

        assert "is quantized (affine, 4 bits, groups of 64)" in caplog.text
        assert {name: tensor.shape for name, tensor in plain.items()} == {n: v.shape for n, v in WEIGHTS.items()}
        np.testing.assert_array_equal(plain[f"{path}.weight"].read(), np.array(mx.dequantize(*parts, 64, 4)))

    def test_keep_the_dtype_of_their_scales(self, small, tmp_path, out):
        convert(small, tmp_path / "mlx", quantize=True, q_mode="mxfp4", dtype="bfloat16")
        assert export(tmp_path / "mlx", "pt", out).kind == "bfloat16"
        assert {tensor.dtype for tensor in open_source(out).tensors.values()} == {"BF16"}


class TestRefusals:
    """One line, exit 2, and nothing written."""

    def refused(self, capsys, target: Path, *arguments: str) -> str:
        before = files(target.parent) if target.parent.exists() else None
        assert main(["export", *arguments, "-o", str(target)]) == 2
        error = capsys.readouterr().err
        assert len(error.splitlines()) == 1, error
        assert (files(target.parent) if target.parent.exists() else None) == before
        return error

    def test_what_is_no_model(self, capsys, tmp_path, out):
        (tmp_path / "empty").mkdir()
        (tmp_path / "notes.txt").write_text("nothing")
        adapter = tmp_path / "adapter"
        adapter.mkdir()
        (adapter / "adapter_config.json").write_text("{}")
        for model, message in {
            "empty": "has no weights that are read here",
            "notes.txt": "notes.txt",
            "absent": "is neither a file or folder here nor a Hub id",
            "adapter": "is an adapter, not a model",
        }.items():
            assert message in self.refused(capsys, out, str(tmp_path / model), "--to", "hf")

    def test_a_missing_tokenizer(self, capsys, tmp_path, out):
        folder = write_hub(tmp_path / "m", WEIGHTS, RAW)
        (folder / "tokenizer.model").unlink()
        assert "pass --tokenizer" in self.refused(capsys, out, str(folder), "--to", "pt")
        assert main(["export", str(folder), "--to", "pt", "-o", str(out), "--tokenizer", str(TOKENIZER)]) == 0

    def test_an_apple_adapter_file(self, capsys, tmp_path, out):
        weights = {name.removeprefix("transformer."): value for name, value in WEIGHTS.items()}
        path = "layers.0.attn.out_proj"
        weights[f"{path}.base_layer.weight"] = weights.pop(f"{path}.weight")
        rows, columns = weights[f"{path}.base_layer.weight"].shape
        weights[f"{path}.lora_A.lora.weight"] = np.ones((2, columns), np.float32)
        weights[f"{path}.lora_B.lora.weight"] = np.ones((rows, 2), np.float32)
        file = write_torch_file(tmp_path / "lora.pt", weights)
        assert "convert it first" in self.refused(capsys, out, str(file), "--to", "hf", "--tokenizer", str(TOKENIZER))

    def test_the_target(self, capsys, tmp_path, small, out):
        export(small, "hf", out)
        assert "--force" in self.refused(capsys, out, str(small), "--to", "pt")
        assert "the source itself" in self.refused(capsys, out, str(out), "--to", "pt", "--force")
        assert main(["export", str(small), "--to", "pt", "-o", str(out), "--force"]) == 0
        assert "pytorch_model.bin" in files(out)
        assert weight_files(small)
        export(small, "corenet", out, force=True)
        export(small, "corenet", out, force=True)
        assert "openelm.pt" in files(out)

    def test_too_little_space(self, capsys, monkeypatch, out):
        # fault C3
        monkeypatch.setattr(atomic.shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(0, 0, 10_000_000))
        for to in ("hf", "pt", "corenet"):
            assert "has 0.01 GB free" in self.refused(capsys, out, "tiny", "--to", to)

    @pytest.mark.parametrize(
        ("flags", "message"),
        [
            (["--to", "hf", "--gguf-type", "F16"], "--gguf-type is for --to gguf"),
            (["--to", "gguf", "--dtype", "float16"], "--dtype is for --to hf, pt, corenet"),
            (["--to", "pt", "--pad-vocab", "128"], "--pad-vocab is for --to corenet"),
            (["--to", "corenet", "--pad-vocab", "-1"], "must be 0 (no padding) or more, got -1"),
            (["--to", "corenet", "--max-shard-size", "5GB"], "--max-shard-size is for --to hf, pt"),
            (["--to", "hf", "--max-shard-size", "huge"], "is no size"),
            (["--to", "pt", "--upload-repo", "me/x"], "--upload-repo is for --to hf"),
            (["--to", "hf", "--upload-dry-run"], "needs --upload-repo"),
            (["--to", "peft", "--tokenizer", "x"], "--tokenizer is for --to hf, pt, corenet, gguf"),
            (["--to", "peft"], "adapter_config.json"),
        ],
    )
    def test_flags_that_mean_nothing(self, capsys, out, flags, message):
        assert message in self.refused(capsys, out, str(TINY), *flags)

    def test_values_beyond_float16(self, capsys, tmp_path, out):
        wide = WEIGHTS | {"transformer.norm.weight": np.full(128, 70000, np.float32)}
        folder = write_hub(tmp_path / "m", wide, RAW)
        assert "beyond the range of float16" in self.refused(
            capsys, out, str(folder), "--to", "pt", "--dtype", "float16"
        )

    @pytest.mark.parametrize("to", ["hf", "pt", "corenet"])
    def test_an_interrupt_leaves_nothing(self, capsys, monkeypatch, out, small, to):
        # fault C2
        def interrupted(*arguments, **options):
            raise KeyboardInterrupt

        monkeypatch.setattr("openelm_mlx.convert.export_hf.write_tokenizer", interrupted)
        monkeypatch.setattr("openelm_mlx.convert.export_torch.write_tokenizer", interrupted)
        assert main(["export", str(small), "--to", to, "-o", str(out)]) == 130
        assert not out.parent.exists()


@pytest.mark.parametrize("to", ["hf", "pt", "corenet", "gguf"])
def test_no_tensor_is_ever_read_whole(monkeypatch, small, out, to):
    # fault C12: memory does not grow with the model
    sizes = []

    def read_whole(tensor):
        raise AssertionError(f"{tensor.name} was read whole")

    def rows(rows_of, tensor, start, stop):
        sizes.append((stop - start) * tensor.nbytes // tensor.num_rows)
        return rows_of(tensor, start, stop)

    if to == "gguf":
        pytest.importorskip("gguf")
    monkeypatch.setattr(blocks, "BLOCK_BYTES", 64 * 1024)
    monkeypatch.setattr(streaming, "_COMPUTED_BLOCK_BYTES", 64 * 1024)
    monkeypatch.setattr(StoredTensor, "read", read_whole)
    read = streaming._read
    monkeypatch.setattr(
        streaming, "_read", lambda name, tensor, *span: rows(lambda t, *s: read(name, t, *s), tensor, *span)
    )
    out.parent.mkdir()
    export(small, to, out)
    assert len(sizes) > 40
    assert max(sizes) <= 64 * 1024


class TestCommand:
    def test_says_what_was_made_and_what_is_next(self, capsys, small, out):
        assert main(["export", str(small), "--to", "hf", "-o", str(out), "--json"]) == 0
        shown = capsys.readouterr()
        count = sum(value.size for value in WEIGHTS.values())
        assert f"{out}: hf, {count:,} parameters, float32, {4 * count:,} bytes" in shown.out
        assert json.loads(shown.out.splitlines()[-1])["parameters"] == count
        assert shown.err.startswith("next: mlx_lm.generate --model '")

    def test_an_upload_is_shown_before_it_is_made(self, capsys, small, out):
        flags = ["--upload-repo", "me/OpenELM-small", "--upload-dry-run"]
        assert main(["export", str(small), "--to", "hf", "-o", str(out), *flags]) == 0
        shown = capsys.readouterr().out
        assert "would upload" in shown
        assert "in Hugging Face format" in shown
        assert "library_name: transformers" in shown

    def test_an_adapter_goes_to_peft(self, capsys, tmp_path, out):
        adapter, path = tmp_path / "adapter", "transformer.layers.1.attn.qkv_proj"
        rows, columns = WEIGHTS[f"{path}.weight"].shape
        adapter.mkdir()
        parameters = {"rank": 2, "scale": 1.0, "dropout": 0.0, "keys": ["attn.qkv_proj"]}
        settings = {"fine_tune_type": "lora", "num_layers": 1, "lora_parameters": parameters}
        (adapter / "adapter_config.json").write_text(json.dumps(settings))
        tensors = {
            f"{path}.lora_a": np.ones((columns, 2), np.float32),
            f"{path}.lora_b": np.ones((2, rows), np.float32),
        }
        save_file(tensors, adapter / "adapters.safetensors")
        assert main(["export", str(adapter), "--to", "peft", "-o", str(out)]) == 0
        shown = capsys.readouterr()
        assert f"PEFT adapter, {2 * (rows + columns):,} parameters" in shown.out
        assert files(out) == ["adapter_config.json", "adapter_model.safetensors"]
