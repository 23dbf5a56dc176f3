"""Loading: strict both ways, lazy, in the dtype that suits the device; and what is said when a folder is not right."""

import json
import shutil
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from measures import kl
from mlx.utils import tree_flatten

from openelm_mlx import device
from openelm_mlx.checkpoint import is_instruct, load, load_model
from openelm_mlx.errors import CheckpointError, ConfigError, GenerationError, OpenELMError, TokenizerError

TINY = Path(__file__).parent.parent / "openelm_mlx" / "data" / "tiny"


@pytest.fixture
def folder(tmp_path) -> Path:
    """A copy of the bundled model that a test may spoil."""
    return Path(shutil.copytree(TINY, tmp_path / "model"))


def rewrite(folder: Path, change) -> None:
    weights = dict(mx.load(str(folder / "model.safetensors")))
    mx.eval(weights)
    change(weights)
    mx.save_safetensors(str(folder / "model.safetensors"), weights)


def edit_config(folder: Path, **changes) -> None:
    config = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps(config))


@pytest.fixture(scope="module")
def quantized_source(tmp_path_factory) -> Path:
    """The bundled model as mlx-lm quantises it: everything 4-bit, the embedding too."""
    folder = Path(shutil.copytree(TINY, tmp_path_factory.mktemp("q") / "model"))
    model = load_model(TINY, dtype="bfloat16")
    nn.quantize(model, group_size=64, bits=4)
    mx.save_safetensors(str(folder / "model.safetensors"), dict(tree_flatten(model.parameters())))
    edit_config(folder, quantization={"group_size": 64, "bits": 4})
    return folder


@pytest.fixture
def quantized(quantized_source, tmp_path) -> Path:
    return Path(shutil.copytree(quantized_source, tmp_path / "quantized"))


def dtypes(model) -> set:
    return {value.dtype for _, value in tree_flatten(model.parameters())}


def logits(model, golden) -> np.ndarray:
    return np.array(model(mx.array(golden["ids_0"])[None])[0].astype(mx.float32))


def test_auto_is_float32_on_a_cpu(golden, monkeypatch):
    monkeypatch.setattr(device, "is_metal", lambda: False)
    model = load_model(TINY)
    assert dtypes(model) == {mx.float32}
    assert np.abs(logits(model, golden) - golden["logits_0"]).max() < 1e-4


def test_auto_is_the_folders_own_on_metal(monkeypatch):
    monkeypatch.setattr(device, "is_metal", lambda: True)
    assert dtypes(load_model(TINY)) == {mx.bfloat16}


def test_auto_keeps_the_folders_own_where_memory_is_short(monkeypatch, caplog):
    monkeypatch.setattr(device, "is_metal", lambda: False)
    monkeypatch.setattr(device, "available_memory_bytes", lambda: 12_000_000)  # bfloat16 takes 9.2 MB, float32 18.4
    assert dtypes(load_model(TINY)) == {mx.bfloat16}
    assert "keeping the folder's own" in caplog.text  # never a silent fallback


@pytest.mark.parametrize("name", ["bfloat16", "float16", "float32"])
def test_an_explicit_dtype_is_obeyed(name):
    assert dtypes(load_model(TINY, dtype=name)) == {getattr(mx, name)}


def test_an_unknown_dtype_is_refused():
    with pytest.raises(GenerationError, match="auto, bfloat16, float16, float32; got 'int3'"):
        load_model(TINY, dtype="int3")


def test_weights_stay_unread_until_used():
    before = mx.get_active_memory()
    model = load_model(TINY, dtype="bfloat16")
    assert mx.get_active_memory() - before < 1_000_000
    mx.eval(model.parameters())
    assert mx.get_active_memory() - before > 9_000_000


def test_a_quantised_folder_is_unpacked_on_a_cpu(quantized, golden, monkeypatch):  # fault A12
    monkeypatch.setattr(device, "is_metal", lambda: False)
    packed = load_model(quantized, keep_quantized=True)
    plain = load_model(quantized)
    assert dtypes(plain) == {mx.float32}
    assert mx.uint32 in dtypes(packed)
    assert kl(logits(plain, golden), logits(packed, golden)) < 1e-2  # 4.3e-3 measured: the CPU sums in bfloat16


def test_a_quantised_folder_keeps_its_bits_under_an_explicit_dtype(quantized, golden, monkeypatch):  # fault C13
    model = load_model(quantized, dtype="float32")
    assert dtypes(model) == {mx.uint32, mx.float32}
    monkeypatch.setattr(device, "is_metal", lambda: False)
    assert np.abs(logits(model, golden) - logits(load_model(quantized), golden)).max() < 1e-3


@pytest.mark.parametrize("dtype", [mx.float16, mx.float32])
def test_activations_have_one_dtype_whatever_the_scales_had(quantized, golden, dtype):  # fault C13
    rewrite(quantized, lambda w: w.update({k: v.astype(dtype) for k, v in w.items() if k.endswith("scales")}))
    model = load_model(quantized, dtype="bfloat16")
    assert model(mx.array(golden["ids_0"])[None]).dtype == mx.bfloat16
    assert dtypes(model) == {mx.uint32, mx.bfloat16}


def spoil_missing(w):
    del w["transformer.layers.3.ffn.proj_2.weight"]


def spoil_extra(w):
    w["transformer.layers.3.ffn.bias"] = mx.zeros(3)


def spoil_shape(w):
    w["transformer.layers.3.ffn.proj_2.weight"] = mx.zeros((256, 640 + 64), mx.bfloat16)


def spoil_name(w):
    w["transformer.layers.3.ffn.proj_two.weight"] = w.pop("transformer.layers.3.ffn.proj_2.weight")


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (spoil_missing, ["missing transformer.layers.3.ffn.proj_2.weight"]),
        (spoil_extra, ["unexpected transformer.layers.3.ffn.bias"]),
        (spoil_shape, ["transformer.layers.3.ffn.proj_2.weight has shape (256, 704)", "(256, 640)"]),
        (
            spoil_name,
            ["missing transformer.layers.3.ffn.proj_2.weight", "unexpected transformer.layers.3.ffn.proj_two"],
        ),
    ],
)
def test_nothing_stays_at_its_initial_value(folder, spoil, words):  # fault A10
    rewrite(folder, spoil)
    with pytest.raises(ConfigError) as error:
        load_model(folder)
    assert all(word in str(error.value) for word in words)


def test_packed_weights_without_a_word_in_the_config(quantized):  # fault A14
    config = json.loads((quantized / "config.json").read_text())
    del config["quantization"]
    (quantized / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=r"weights are quantized, config\.json does not say so"):
        load_model(quantized)


@pytest.mark.parametrize("metal", [True, False])
def test_more_than_the_memory_is_refused_first(monkeypatch, metal):  # faults A17, D18
    monkeypatch.setattr(device, "is_metal", lambda: metal)
    monkeypatch.setattr(device, "available_memory_bytes", lambda: 1_000_000)
    with pytest.raises(CheckpointError, match=r"needs 0.01 GB of memory and 0.00 GB are free.*convert -q"):
        load_model(TINY)


def test_an_unknown_architecture_is_named(folder):  # fault A16
    edit_config(folder, model_type="openelm2")
    with pytest.raises(ConfigError, match="'openelm2' is not supported"):
        load(folder)


def test_no_tokenizer_says_which_one_and_how(folder):  # fault B1
    (folder / "tokenizer.model").unlink()
    with pytest.raises(TokenizerError, match="--tokenizer"):
        load(folder)


def test_a_tokenizer_from_elsewhere(folder, tmp_path):
    (folder / "tokenizer.model").rename(tmp_path / "elsewhere.model")
    _, tokenizer = load(folder, tokenizer=str(tmp_path / "elsewhere.model"))
    assert tokenizer.vocab_size == 4096


def test_a_damaged_folder_is_one_line(folder):
    (folder / "config.json").write_text('{"model_type": "ope')
    with pytest.raises(OpenELMError, match=r"config\.json") as error:
        load(folder)
    assert "\n" not in str(error.value)


def test_a_file_is_no_folder(folder):
    with pytest.raises(CheckpointError, match="convert it first"):
        load(folder / "model.safetensors")


@pytest.mark.parametrize(
    ("name", "expected"),
    [("apple/OpenELM-270M-Instruct", True), ("apple/OpenELM-3B", False), ("x/instructive/m", False)],
)
def test_instruct_is_told_from_the_name(tmp_path, name, expected):
    assert is_instruct(name, tmp_path) == expected


@pytest.mark.parametrize(
    ("file", "text"), [("chat_template.jinja", "x"), ("tokenizer_config.json", '{"chat_template": "x"}')]
)
def test_instruct_is_told_from_the_folder(tmp_path, file, text):
    (tmp_path / file).write_text(text)
    assert is_instruct("my-model", tmp_path)
