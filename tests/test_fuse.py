"""Fusing: the folder predicts what the base with its adapter predicts, says what it is, and others load it."""

import json
from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest
from adapters import IDS, SPECS, TINY, difference, tiny, tiny_weights, train, trained_folder
from measures import kl
from test_cli import openelm, refused

from openelm_mlx import load
from openelm_mlx.adapter_config import EMBEDDING_PATH, AdapterSpec
from openelm_mlx.adapter_folder import save_adapters
from openelm_mlx.adapters import add_adapters
from openelm_mlx.config import read_json_object
from openelm_mlx.convert import convert
from openelm_mlx.convert.fusion import fuse

HEAD = "lm_head.weight"


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Adapter folder by name, all of the bundled model."""
    made = {name: tmp_path_factory.mktemp("adapters") / name for name in SPECS}
    for name, folder in made.items():
        trained_folder(folder, SPECS[name], tiny())
    return made


@pytest.fixture(scope="module")
def packed(tmp_path_factory):
    """The bundled model in four bits, embedding in eight."""
    target = tmp_path_factory.mktemp("packed") / "q4"
    convert("tiny", target, quantize=True)
    return target


@pytest.fixture(scope="module")
def bfloat16(folders, tmp_path_factory):
    """Fused folder by name, in the default dtype."""
    made = {name: tmp_path_factory.mktemp("fused") / name for name in SPECS}
    for name, target in made.items():
        fuse("tiny", folders[name], target)
    return made


@pytest.fixture(scope="module")
def float32(folders, tmp_path_factory):
    """Fused folder by name, in float32, and what `fuse` said of it."""
    made = {name: tmp_path_factory.mktemp("fused") / name for name in SPECS}
    return {name: (target, fuse("tiny", folders[name], target, dtype="float32")) for name, target in made.items()}


def logits(folder, **options):
    return load(folder, **options)[0](IDS)[0].astype(mx.float32)


def weights_of(folder):
    return mx.load(str(folder / "model.safetensors"))


# --- fused == unfused -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SPECS)
def test_in_float32_nothing_is_lost(folders, float32, name):
    folder, made = float32[name]
    model, _ = load(folder)
    adapted, _ = load("tiny", adapter_path=folders[name], dtype="float32")
    assert difference(model, adapted) < 2e-4
    assert difference(model, tiny()) > 0.01
    assert (made.distance.kl, made.untied) == (0, "input" in name)


@pytest.mark.parametrize("name", SPECS)
def test_in_16_bits_every_weight_is_the_rounded_sum(bfloat16, folders, name):
    """Against the formulas in float64."""
    base = {key: np.array(value, dtype=np.float64) for key, value in tiny_weights()}
    adapter = {
        key: np.array(value, dtype=np.float64)
        for key, value in mx.load(str(folders[name] / "adapters.safetensors")).items()
    }
    expected = dict(base)
    for path in {key.rpartition(".")[0] for key in adapter}:
        weight, own = (
            f"{path}.weight",
            {k.rpartition(".")[2]: v for k, v in adapter.items() if k.startswith(f"{path}.")},
        )
        if "weight" in own:
            expected[weight] = own["weight"]
        elif path == EMBEDDING_PATH:
            a, b = (own.get(key, own.get(f"input_{key}")) for key in ("lora_a", "lora_b"))
            expected[weight] = base[weight] + 2.0 * a @ b
        else:
            total = base[weight] + 2.0 * (own["lora_a"] @ own["lora_b"]).T
            lengths = np.linalg.norm(total, axis=1)
            expected[weight] = total * (own.get("m", lengths) / lengths)[:, None]
    if "input" in name:
        expected[HEAD] = base[f"{EMBEDDING_PATH}.weight"]
    found = weights_of(bfloat16[name])
    assert set(found) == set(expected)
    assert {value.dtype for value in found.values()} == {mx.bfloat16}
    for key, value in expected.items():
        np.testing.assert_allclose(np.array(found[key].astype(mx.float32)), value, rtol=2**-8, atol=1e-6)


@pytest.mark.parametrize("name", ["dora+input", "both"])
def test_a_quantized_base_is_unpacked(tmp_path, packed, folders, name, capsys):
    """faults G9, G11: the config says what the tensors are, and the folder loads."""
    status, out, err = openelm(
        capsys, "fuse", "--model", str(packed), "--adapter-path", str(folders[name]),
        "--save-path", str(tmp_path / "fused"), "--dequantize", "--dtype", "float32", "--json",
    )  # fmt: skip
    assert status == 0
    assert "the base is quantized, the fused model is not" in err
    facts = json.loads(out)
    assert (facts["quantization"], facts["dtype"], facts["tied"]) == (None, "float32", "input" not in name)
    config = read_json_object(tmp_path / "fused" / "config.json")
    assert not {"quantization", "quantization_config"} & set(config)
    assert config["share_input_output_layers"] == facts["tied"]
    expected = logits(packed, adapter_path=folders[name], dtype="float32", keep_quantized=True)
    assert mx.abs(logits(tmp_path / "fused") - expected).max() < 0.01


def test_packed_again_a_small_change_is_lost_and_that_is_shown(tmp_path, packed, capsys):
    """fault G9"""
    spec = AdapterSpec(-1, rank=4, scale=1.0, input_embedding=True)
    trained_folder(tmp_path / "small", spec, tiny(), size=0.02)
    arguments = ["fuse", "--model", str(packed), "--adapter-path", str(tmp_path / "small"), "--json", "--save-path"]
    plain = json.loads(openelm(capsys, *arguments, str(tmp_path / "plain"))[1])
    status, out, err = openelm(capsys, *arguments, str(tmp_path / "again"), "--requantize")
    again = json.loads(out)
    assert status == 0
    assert "packed again (affine, 4 bits, groups of 64), which is not what was trained: KL" in err
    assert f"logits differ by at most {again['largest_logit_difference']:.2g}" in err
    assert again["kl_to_adapter"] > 10 * plain["kl_to_adapter"]
    expected = np.array(logits(packed, adapter_path=tmp_path / "small", dtype="float32", keep_quantized=True))
    measured = [kl(expected, np.array(logits(tmp_path / folder))) for folder in ("plain", "again")]
    assert measured[1] > 10 * measured[0]
    config = read_json_object(tmp_path / "again" / "config.json")
    assert config["quantization"] == read_json_object(packed / "config.json")["quantization"] | {
        "lm_head": {"bits": 8, "group_size": 64, "mode": "affine"}
    }


# --- what else is in the folder -------------------------------------------------------------------------------------


def test_an_input_adapter_unties_the_head_and_says_who_loads_that(tmp_path, folders, capsys):
    target = tmp_path / "fused"
    status, out, err = openelm(
        capsys, "fuse", "--model", "tiny", "--adapter-path", str(folders["input"]), "--save-path", str(target)
    )
    assert status == 0
    assert out.startswith(f"{target}: 5,656,192 parameters, bfloat16, ")
    assert "mlx-lm and transformers load that, mlx-swift and llama.cpp (GGUF) do not" in err
    assert read_json_object(target / "config.json")["share_input_output_layers"] is False
    embedding = dict(tiny_weights(mx.bfloat16))[f"{EMBEDDING_PATH}.weight"]
    assert mx.array_equal(weights_of(target)[HEAD], embedding)


def test_the_tokenizer_goes_along(bfloat16):
    for name in ("tokenizer.model", "generation_config.json"):
        assert (bfloat16["lora"] / name).is_file()
    assert (bfloat16["lora"] / "tokenizer.model").read_bytes() == (TINY / "tokenizer.model").read_bytes()


@pytest.mark.needs_mlx_lm
@pytest.mark.parametrize("name", SPECS)
def test_mlx_lm_loads_it_with_equal_logits(bfloat16, name):
    """fault G12"""
    from mlx_lm.utils import load_model

    theirs, _ = load_model(bfloat16[name])
    ours, _ = load(bfloat16[name], dtype="bfloat16")
    theirs, ours = (np.array(model(IDS)[0].astype(mx.float32)) for model in (theirs, ours))
    assert kl(ours, theirs) < 1e-3


@pytest.mark.parametrize("name", SPECS)
def test_generate_with_the_adapter_writes_what_the_fused_model_writes(folders, float32, name, capsys):
    common = ("generate", "-p", "Once upon a time", "-m", "12", "--json")
    fused = json.loads(openelm(capsys, *common, "--model", str(float32[name][0]))[1])
    adapted = json.loads(openelm(capsys, *common, "--model", "tiny", "--adapter-path", str(folders[name]))[1])
    assert fused["tokens"] == adapted["tokens"]


# --- refusals -------------------------------------------------------------------------------------------------------


def test_what_cannot_be_fused_leaves_nothing(tmp_path, folders, packed, capsys):
    target = tmp_path / "fused"
    common = ("fuse", "--model", "tiny", "--save-path", str(target), "--adapter-path")
    lora = str(folders["lora"])
    for words, arguments in (
        ("openelm export --to gguf", (lora, "--export-gguf")),
        ("nothing in a checkpoint is ever executed", (lora, "--trust-remote-code")),
        ("exclude each other", (lora, "--dequantize", "--requantize")),
        ("is not quantized, so there is nothing", (lora, "--requantize")),
        ("needs --upload-repo", (lora, "--upload-dry-run")),
        ("no adapter folder", (str(tmp_path / "nowhere"),)),
        ("is (or holds) the adapter", (lora, "--save-path", lora, "--force")),
        ("is (or holds) the base model", (lora, "--model", str(packed), "--save-path", str(packed), "--force")),
        ("already exists", (lora, "--save-path", str(packed))),
    ):
        assert words in refused(capsys, *common, *arguments)
    assert not target.exists()


def test_an_adapter_of_another_model_is_refused(tmp_path, capsys):
    from adapters import small

    model, spec = small(), AdapterSpec(1, rank=2, base_model="some/base")
    add_adapters(model, spec)
    train(model)
    save_adapters(tmp_path / "other", model, spec)
    line = refused(
        capsys, "fuse", "--model", "tiny", "--adapter-path", str(tmp_path / "other"), "--save-path", str(tmp_path / "f")
    )
    assert "was trained on 'some/base' with " in line
    assert not (tmp_path / "f").exists()


def test_without_a_model_the_base_is_the_one_that_the_adapter_names(tmp_path, folders, capsys):
    trained_folder(tmp_path / "unnamed", replace(SPECS["lora"], base_model=None), tiny())
    flags = ("--save-path", str(tmp_path / "f"), "--adapter-path")
    status, _, err = openelm(capsys, "fuse", *flags, str(folders["lora"]))
    assert (status, "the base model was tiny, as " in err) == (0, True)
    assert "name it with --model" in refused(capsys, "fuse", *flags, str(tmp_path / "unnamed"))


def test_an_upload_shows_what_would_be_sent(tmp_path, folders, capsys):
    status, out, _ = openelm(
        capsys, "fuse", "--model", "tiny", "--adapter-path", str(folders["lora"]), "--save-path", str(tmp_path / "f"),
        "--upload-repo", "me/fused", "--upload-dry-run",
    )  # fmt: skip
    assert status == 0
    assert "would upload" in out
    assert "# me/fused" in out
