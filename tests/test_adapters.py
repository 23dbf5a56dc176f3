"""Adapters: formulas in numpy, fresh == base, folders exchanged with mlx-lm, and what can be wrong with a folder."""

import json
import shutil
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from adapters import IDS, TINY, difference, small, tiny, tiny_weights, train
from mlx.utils import tree_flatten
from reference import random_checkpoint, reference_logits, small_config

from openelm_mlx.adapter_config import AdapterSpec, read_adapter_config
from openelm_mlx.adapter_folder import save_adapters
from openelm_mlx.adapter_layers import DoRALinear, InputLoRAEmbedding, LoRAEmbedding, LoRALinear
from openelm_mlx.adapters import add_adapters, load_adapters
from openelm_mlx.errors import CheckpointError, ConfigError, OpenELMError

EMBEDDING = "transformer.token_embeddings"
LINEARS = ["attn.out_proj", "attn.qkv_proj", "ffn.proj_1", "ffn.proj_2"]


def adapter_arrays(model: nn.Module) -> dict[str, mx.array]:
    own = ("lora_a", "lora_b", "m", "input_lora_a", "input_lora_b")
    return {name: value for name, value in tree_flatten(model.parameters()) if name.rpartition(".")[2] in own}


def write_folder(folder: Path, model: nn.Module, *, kind: str = "lora", num_layers: int = -1, **parameters) -> Path:
    """An adapter folder with the keys that mlx-lm writes."""
    folder.mkdir(parents=True, exist_ok=True)
    lora_parameters = {"rank": 4, "scale": 2.0, "dropout": 0.0} | parameters
    config = {
        "fine_tune_type": kind,
        "num_layers": num_layers,
        "lora_parameters": lora_parameters,
        "model": "some/base",
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))
    mx.save_safetensors(str(folder / "adapters.safetensors"), adapter_arrays(model))
    return folder


# --- what an adapter computes ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["lora", "dora"])
@pytest.mark.parametrize("tied", [True, False])
def test_adapted_model_equals_the_reference_with_merged_weights(kind, tied):
    raw = small_config(share_input_output_layers=tied)
    model = small(share_input_output_layers=tied)
    keys = (*LINEARS, "lm_head") if not tied else None
    add_adapters(model, AdapterSpec(num_layers=2, fine_tune_type=kind, rank=4, scale=2.0, keys=keys))
    trained = train(model)
    weights = {name: value.astype(np.float64) for name, value in random_checkpoint(raw, seed=1).items()}
    for path in {name.rpartition(".")[0] for name in trained}:
        merged = weights[f"{path}.weight"] + 2.0 * (trained[f"{path}.lora_a"] @ trained[f"{path}.lora_b"]).T
        if kind == "dora":
            merged *= (trained[f"{path}.m"] / np.linalg.norm(merged, axis=1))[:, None]
        weights[f"{path}.weight"] = merged
    ids = [1, 5, 3, 3, 7]
    np.testing.assert_allclose(np.array(model(mx.array([ids]))[0]), reference_logits(weights, raw, ids), atol=2e-4)


@pytest.mark.parametrize("tied", [True, False])
def test_the_two_embedding_adapters_differ_in_the_tied_head(tied):
    """mlx-lm's changes input and head, Apple's only the input: the exact merge of Apple's is an untied model."""
    ids = [1, 5, 3, 3, 7]
    raw = small_config(share_input_output_layers=tied)
    base = {name: value.astype(np.float64) for name, value in random_checkpoint(raw, seed=1).items()}
    for spec, names in (
        (AdapterSpec(num_layers=-1, rank=4, scale=2.0, keys=(EMBEDDING,)), ("lora_a", "lora_b")),
        (
            AdapterSpec(num_layers=-1, rank=4, scale=2.0, keys=(), input_embedding=True),
            ("input_lora_a", "input_lora_b"),
        ),
    ):
        model = small(share_input_output_layers=tied)
        assert list(add_adapters(model, spec)) == [EMBEDDING]
        trained = train(model)
        delta = 2.0 * trained[f"{EMBEDDING}.{names[0]}"] @ trained[f"{EMBEDDING}.{names[1]}"]
        old = base[f"{EMBEDDING}.weight"]
        head = base.get("lm_head.weight", old if spec.input_embedding else old + delta)
        untied = base | {f"{EMBEDDING}.weight": old + delta, "lm_head.weight": head}
        expected = reference_logits(untied, raw | {"share_input_output_layers": False}, ids)
        np.testing.assert_allclose(np.array(model(mx.array([ids]))[0]), expected, atol=2e-4)


QUANTIZED = [
    *((bits, 32, "affine") for bits in (2, 3, 4, 5, 6, 8)),
    (4, 32, "mxfp4"),
    (8, 32, "mxfp8"),
    (4, 16, "nvfp4"),
]


@pytest.mark.parametrize("kind", [LoRALinear, DoRALinear])
@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
def test_a_fresh_adapter_is_its_base_exactly(kind, dtype):
    """fault G10"""
    base = nn.Linear(64, 96, bias=False)
    base.weight = base.weight.astype(dtype)
    base.weight[3] = 0  # DoRA divides by the row's length
    x = mx.random.normal((2, 5, 64)).astype(dtype)
    adapted = kind(base, rank=4, scale=20.0)
    assert adapted(x).dtype == dtype
    assert mx.array_equal(adapted(x), base(x))


@pytest.mark.parametrize("kind", [LoRALinear, DoRALinear])
@pytest.mark.parametrize(("bits", "group_size", "mode"), QUANTIZED)
def test_a_fresh_adapter_on_a_quantised_base_is_its_base_exactly(kind, bits, group_size, mode):
    """fault G10; the widths of 3, 5 and 6 bits do not divide 32."""
    base = nn.QuantizedLinear(64, 96, bias=False, group_size=group_size, bits=bits, mode=mode)
    x = mx.random.normal((2, 64))
    adapted = kind(base, rank=4, scale=20.0)
    assert adapted.lora_a.shape == (64, 4)
    assert adapted.lora_b.shape == (4, 96)
    assert mx.array_equal(adapted(x), base(x))


@pytest.mark.parametrize("kind", ["lora", "dora"])
@pytest.mark.parametrize("bits", [None, 3, 4])
def test_a_model_with_fresh_adapters_is_the_base(kind, bits):
    base, adapted = tiny(), tiny()
    if bits:
        nn.quantize(base, 64, bits)
        nn.quantize(adapted, 64, bits)
    add_adapters(adapted, AdapterSpec(num_layers=-1, fine_tune_type=kind, input_embedding=True))
    # A plain linear layer adds its residual inside the product, an adapted one after it: rounding in the last digit.
    assert difference(base, adapted) <= (0 if bits else 1e-4)


@pytest.mark.parametrize("kind", [LoRAEmbedding, InputLoRAEmbedding])
@pytest.mark.parametrize("bits", [None, 3, 8])
def test_a_fresh_embedding_adapter_is_its_base_both_ways(kind, bits):
    base = nn.Embedding(50, 64)
    base.weight = base.weight.astype(mx.bfloat16)
    if bits:
        base = base.to_quantized(group_size=32, bits=bits)
    adapted = kind(base, 4, 20.0)
    tokens, hidden = mx.array([[1, 2, 49]]), mx.random.normal((1, 3, 64)).astype(mx.bfloat16)
    for ours, theirs in ((adapted(tokens), base(tokens)), (adapted.as_linear(hidden), base.as_linear(hidden))):
        assert ours.dtype == theirs.dtype == mx.bfloat16
        assert mx.array_equal(ours, theirs)


def test_dora_follows_its_parameters_although_the_row_scale_is_kept():
    """The kept factor must not outlive the arrays it came from, nor stand in the way of a gradient."""
    layer = DoRALinear(nn.Linear(64, 32, bias=False), 4, 2.0).eval()
    x = mx.random.normal((3, 64))
    fresh = layer(x)
    for name in ("m", "lora_a", "lora_b"):
        before = layer(x)
        layer[name] = layer[name] + 0.5
        moved = layer(x)
        assert mx.array_equal(moved, layer(x))
        assert name == "lora_a" or not mx.allclose(moved, before)  # lora_a alone is multiplied by zeros
    assert not mx.allclose(fresh, layer(x))
    grads = nn.value_and_grad(layer, lambda: layer(x).sum())()[1]
    assert all(mx.abs(grads[name]).max().item() > 0 for name in ("m", "lora_a", "lora_b"))


def test_dora_keeps_magnitudes_that_16_bits_would_round_to_one():
    base = nn.Linear(64, 32, bias=False)
    base.weight = base.weight.astype(mx.bfloat16)
    layer = DoRALinear(base, 4, 2.0).eval()
    x = mx.random.normal((512, 64)).astype(mx.bfloat16)
    before = layer(x).astype(mx.float32)
    layer.m = layer.m * 1.003  # the bfloat16 after 1 is 1.0078
    ratio = (layer(x).astype(mx.float32) * before).sum() / (before * before).sum()
    assert 1.002 < ratio.item() < 1.005


# --- where adapters go ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("num_layers", "first"), [(1, 5), (4, 2), (6, 0), (-1, 0), (0, 0)])
def test_num_layers_counts_from_the_last(num_layers, first):
    """fault F9; 0 and below mean all, as in mlx-lm."""
    placed = add_adapters(tiny(), AdapterSpec(num_layers=num_layers))
    assert sorted(placed) == sorted(f"transformer.layers.{i}.{key}" for i in range(first, 6) for key in LINEARS)


def test_keys_may_name_a_place_in_a_layer_or_in_the_model():
    placed = add_adapters(
        tiny(), AdapterSpec(num_layers=2, keys=("attn.qkv_proj", EMBEDDING, "transformer.layers.0.ffn.proj_2"))
    )
    assert sorted(placed) == [
        "transformer.layers.0.ffn.proj_2",
        "transformer.layers.4.attn.qkv_proj",
        "transformer.layers.5.attn.qkv_proj",
        EMBEDDING,
    ]


def test_only_the_adapters_train_on_a_frozen_base():
    model = tiny()
    model.freeze()
    add_adapters(model, AdapterSpec(num_layers=2, fine_tune_type="dora", input_embedding=True))
    trainable = {name for name, _ in tree_flatten(model.trainable_parameters())}
    assert trainable == set(adapter_arrays(model))


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (AdapterSpec(num_layers=9), "num_layers is 9, but the model has 6 layers"),
        (
            AdapterSpec(num_layers=-1, keys=("q_proj",)),
            "'q_proj'.*it has attn.out_proj, attn.qkv_proj, ffn.proj_1, ffn.proj_2",
        ),
        (AdapterSpec(num_layers=-1, keys=("attn.qkv_proj", "attn.o_proj")), "'attn.o_proj'"),
        (AdapterSpec(num_layers=-1, keys=()), "it has attn.out_proj"),
        (AdapterSpec(num_layers=-1, keys=("attn_norm",)), "transformer.layers.0.attn_norm is a RMSNorm"),
        (
            AdapterSpec(num_layers=-1, fine_tune_type="dora", keys=(EMBEDDING,)),
            "DoRA does not adapt transformer.token_emb",
        ),
        (AdapterSpec(num_layers=-1, keys=(EMBEDDING,), input_embedding=True), "exclude each other"),
    ],
)
def test_places_that_cannot_be_adapted(spec, message):
    """faults F9, F10"""
    model = tiny()
    with pytest.raises(ConfigError, match=message):
        add_adapters(model, spec)
    assert not adapter_arrays(model)


def test_a_layer_is_adapted_once():
    model = tiny()
    add_adapters(model, AdapterSpec(num_layers=-1))
    with pytest.raises(ConfigError, match="is a LoRALinear; adapters go around"):
        add_adapters(model, AdapterSpec(num_layers=-1))


# --- folders --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["lora", "dora"])
@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
def test_a_folder_loads_with_equal_logits_and_no_dropout(tmp_path, kind, dtype):
    """fault G3: rank and scale come from the folder."""
    trained = tiny(dtype)
    spec = AdapterSpec(num_layers=3, fine_tune_type=kind, rank=4, scale=2.0, input_embedding=True)
    add_adapters(trained, spec)
    train(trained)
    write_folder(tmp_path, trained, kind=kind, num_layers=3, keys=LINEARS, input_embedding=True, dropout=0.5)
    loaded = tiny(dtype)
    loaded.train()
    load_adapters(loaded, tmp_path)
    assert loaded(IDS).dtype == dtype
    assert difference(trained, loaded) == 0
    assert difference(tiny(dtype), loaded) > 0.01


@pytest.mark.parametrize("stored", [LINEARS, ["attn.qkv_proj"]])
def test_without_keys_the_tensors_say_which_linear_layers(tmp_path, stored):
    """mlx-lm adapts every linear layer unless told otherwise; older versions took qkv_proj alone (fault G4)."""
    trained, loaded = tiny(), tiny()
    add_adapters(trained, AdapterSpec(num_layers=-1, rank=4, scale=2.0, keys=tuple(stored)))
    train(trained)
    load_adapters(loaded, write_folder(tmp_path, trained))
    assert difference(trained, loaded) == 0


def test_old_spellings_of_the_config_are_read(tmp_path):
    """fault G4"""
    path = tmp_path / "adapter_config.json"
    path.write_text('{"lora_layers": 4, "use_dora": true, "lora_parameters": {"rank": 8, "alpha": 16, "dropout": 0.0}}')
    assert read_adapter_config(path) == AdapterSpec(4, "dora", rank=8, scale=2.0)


def test_whole_weights_load_in_the_dtype_of_the_model(tmp_path):
    trained, loaded = tiny(mx.bfloat16), tiny()
    for layer in trained.layers[-2:]:
        layer.ffn.proj_1.weight = layer.ffn.proj_1.weight * 1.5
    write_folder(tmp_path, trained, kind="full", num_layers=2)
    weights = {
        f"transformer.layers.{i}.{n}": v for i in (4, 5) for n, v in tree_flatten(trained.layers[i].parameters())
    }
    mx.save_safetensors(str(tmp_path / "adapters.safetensors"), weights)
    load_adapters(loaded, tmp_path)
    assert {value.dtype for _, value in tree_flatten(loaded.parameters())} == {mx.float32}
    assert mx.array_equal(loaded.layers[5].ffn.proj_1.weight, trained.layers[5].ffn.proj_1.weight.astype(mx.float32))
    del weights["transformer.layers.4.attn_norm.weight"]
    mx.save_safetensors(str(tmp_path / "adapters.safetensors"), weights)
    with pytest.raises(CheckpointError, match=r"missing transformer\.layers\.4\.attn_norm\.weight"):
        load_adapters(tiny(), tmp_path)


# --- mlx-lm -------------------------------------------------------------------------------------------------------


def their_tiny() -> nn.Module:
    from mlx_lm.models.openelm import Model as TheirModel
    from mlx_lm.models.openelm import ModelArgs

    model = TheirModel(ModelArgs.from_dict(json.loads((TINY / "config.json").read_text())))
    model.load_weights(tiny_weights(), strict=True)
    return model.eval()


def quantized(model: nn.Module, bits: int | None) -> nn.Module:
    if bits:
        nn.quantize(model, 64, bits)
    return model.eval()


def train_theirs(model: nn.Module) -> None:
    """`train` for adapter layers of mlx-lm's classes."""
    noise = np.random.default_rng(3)
    moved = [
        (name, value + mx.array(0.05 * noise.standard_normal(value.shape), value.dtype))
        for name, value in adapter_arrays(model).items()
    ]
    model.load_weights(moved, strict=False)


@pytest.mark.needs_mlx_lm
@pytest.mark.parametrize(
    ("kind", "num_layers", "keys", "bits"),
    [
        ("lora", 4, None, None),
        ("lora", -1, ["attn.qkv_proj", EMBEDDING], None),
        ("lora", 2, ["attn.qkv_proj", EMBEDDING], 4),
        ("dora", -1, ["attn.qkv_proj", "ffn.proj_2"], None),
        ("dora", 2, None, None),
        ("dora", 2, None, 4),
    ],
)
def test_an_adapter_of_mlx_lm_loads_here_and_the_reverse(tmp_path, kind, num_layers, keys, bits):
    """fault G12; on a quantised base too (mlx-lm's own DoRA takes 2, 4 and 8 bits)."""
    from mlx_lm.tuner.utils import linear_to_lora_layers
    from mlx_lm.tuner.utils import load_adapters as their_load_adapters

    parameters = {"rank": 4, "scale": 2.0, "dropout": 0.0} | ({"keys": keys} if keys else {})
    theirs = quantized(their_tiny(), bits)
    theirs.freeze()
    linear_to_lora_layers(theirs, num_layers, parameters, use_dora=kind == "dora")
    train_theirs(theirs)
    folder = write_folder(tmp_path / "theirs", theirs.eval(), kind=kind, num_layers=num_layers, **parameters)
    ours = quantized(tiny(), bits)
    load_adapters(ours, folder)
    assert difference(ours, theirs) < 1e-3
    assert difference(ours, quantized(tiny(), bits)) > 0.1

    mine = quantized(tiny(), bits)
    spec = AdapterSpec(num_layers, kind, rank=4, scale=2.0, keys=tuple(keys) if keys else None)
    add_adapters(mine, spec)
    train(mine, seed=4)
    save_adapters(tmp_path / "ours", mine, spec, extra_config={"training": {"seed": 1}})
    loaded = their_load_adapters(quantized(their_tiny(), bits), str(tmp_path / "ours")).eval()
    assert difference(mine, loaded) < 1e-3


@pytest.mark.needs_mlx_lm
def test_whole_weights_trained_by_mlx_lm_load_here(tmp_path):
    theirs = their_tiny()
    theirs.freeze()
    for layer in theirs.layers[-2:]:
        layer.unfreeze()
    theirs.update({"transformer": {"layers": [{}] * 5 + [{"ffn_norm": {"weight": mx.full((256,), 2.0)}}]}})
    (tmp_path / "adapter_config.json").write_text(
        '{"fine_tune_type": "full", "num_layers": 2, "lora_parameters": null}'
    )
    mx.save_safetensors(str(tmp_path / "adapters.safetensors"), dict(tree_flatten(theirs.trainable_parameters())))
    ours = tiny()
    load_adapters(ours, tmp_path)
    assert difference(ours, theirs) < 1e-3
    assert difference(ours, tiny()) > 0.1


@pytest.mark.needs_mlx_lm
def test_mlx_lm_refuses_the_input_embedding_it_cannot_express(tmp_path):
    from mlx_lm.tuner.utils import load_adapters as their_load_adapters

    model = tiny()
    add_adapters(model, AdapterSpec(-1, rank=4, scale=2.0, input_embedding=True))
    folder = write_folder(tmp_path, model, keys=LINEARS, input_embedding=True)
    with pytest.raises(ValueError, match="input_lora_a: not an adapter parameter"):
        their_load_adapters(their_tiny(), str(folder))


# --- what can be wrong with a folder --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def good_folder(tmp_path_factory) -> Path:
    model = tiny()
    add_adapters(model, AdapterSpec(num_layers=2, rank=4, scale=2.0))
    return write_folder(tmp_path_factory.mktemp("adapters"), model, num_layers=2, keys=LINEARS)


@pytest.fixture
def folder(good_folder, tmp_path) -> Path:
    """A copy to damage."""
    return Path(shutil.copytree(good_folder, tmp_path / "copy"))


def refusal(folder: Path, kind: type[OpenELMError]) -> str:
    """The message of the refusal; the model must be as it was before."""
    model = tiny()
    with pytest.raises(kind) as caught:
        load_adapters(model, folder)
    assert "\n" not in str(caught.value)
    assert not adapter_arrays(model)
    return str(caught.value)


def change_config(folder: Path, **changes) -> Path:
    """Set keys of adapter_config.json, those of lora_parameters included; None removes a key."""
    path = folder / "adapter_config.json"
    config = json.loads(path.read_text())
    for key, value in changes.items():
        inner = (
            config["lora_parameters"]
            if key in config["lora_parameters"] or key in ("alpha", "input_embedding")
            else config
        )
        inner.pop(key, None)
        if value is not None:
            inner[key] = value
    path.write_text(json.dumps(config))
    return folder


def test_tensors_that_do_not_fit_are_listed_with_the_base_model(folder):
    """fault G1: an unknown name, a missing one, a wrong shape, a wrong dtype."""
    path = folder / "adapters.safetensors"
    weights = mx.load(str(path))
    mx.eval(weights)  # before their file is written over
    prefix = "transformer.layers.5.attn.qkv_proj"
    del weights[f"{prefix}.lora_b"]
    weights[f"{prefix}.lora_c"] = mx.zeros((4, 4))
    weights[f"{prefix}.lora_a"] = mx.zeros((4, 256))
    weights["transformer.layers.4.ffn.proj_1.lora_b"] = weights["transformer.layers.4.ffn.proj_1.lora_b"].astype(
        mx.int32
    )
    mx.save_safetensors(str(path), weights)
    message = refusal(folder, CheckpointError)
    assert f"missing {prefix}.lora_b" in message
    assert f"unexpected {prefix}.lora_c" in message
    assert f"{prefix}.lora_a has shape (4, 256), this model needs (256, 4)" in message
    assert "transformer.layers.4.ffn.proj_1.lora_b has dtype I32" in message
    assert "trained on 'some/base'" in message


def test_an_adapter_of_another_base_model_is_refused(tmp_path):
    other = small(num_transformer_layers=4)
    add_adapters(other, AdapterSpec(num_layers=2, rank=4))
    folder = write_folder(tmp_path, other, num_layers=2, keys=LINEARS)
    assert "(trained on 'some/base') does not fit this model" in refusal(folder, CheckpointError)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_layers": 7}, "num_layers is 7, but the model has 6 layers"),
        ({"num_layers": None}, "num_layers must be a whole number, got None"),
        ({"num_layers": True}, "num_layers must be a whole number"),
        ({"keys": ["q_proj"]}, "'q_proj'.*it has attn.out_proj, attn.qkv_proj"),
        ({"keys": "attn.qkv_proj"}, "keys must be a list of names"),
        ({"fine_tune_type": "qlora"}, "fine_tune_type must be lora, dora or full, got 'qlora'"),
        ({"lora_parameters": None}, "lora_parameters must be an object"),
        ({"rank": None}, "rank must be a whole number"),
        ({"rank": 10**12}, "rank must be a whole number"),
        ({"scale": None}, "scale must be a number, got None"),
        ({"scale": float("nan")}, "scale must be a number, got nan"),
        ({"scale": 10**400}, "scale must be a number"),
        ({"alpha": 16}, "scale and alpha exclude each other"),
        ({"dropout": 1}, "dropout must be at least 0 and below 1"),
        ({"input_embedding": "yes"}, "input_embedding must be true or false"),
    ],
)
def test_configs_that_say_something_impossible(folder, changes, message):
    """fault F10 for the keys, F9 for the layers"""
    change_config(folder, **changes)
    model = tiny()
    with pytest.raises(ConfigError, match=message) as caught:
        load_adapters(model, folder)
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize(
    "changes",
    [
        {"rank": 8},
        {"num_layers": 3},
        {"num_layers": 1},
        {"fine_tune_type": "dora"},
        {"keys": ["attn.qkv_proj"]},
        {"input_embedding": True},
    ],
)
def test_a_config_that_disagrees_with_the_tensors(folder, changes):
    assert "does not fit this model" in refusal(change_config(folder, **changes), CheckpointError)


def test_all_complaints_about_a_config_come_at_once(folder):
    message = refusal(change_config(folder, rank=0, dropout=-1, fine_tune_type=[]), ConfigError)
    assert all(key in message for key in ("adapter_config.json", "rank", "dropout", "fine_tune_type"))


def test_files_that_are_not_there_or_broken(folder, tmp_path):
    assert "no adapter folder" in refusal(tmp_path / "nowhere", CheckpointError)
    assert "no adapter folder" in refusal(folder / "adapters.safetensors", CheckpointError)
    tensors = folder / "adapters.safetensors"
    tensors.write_bytes(tensors.read_bytes()[:-100])
    assert "cut short" in refusal(folder, CheckpointError)
    tensors.unlink()
    assert "adapters.safetensors" in refusal(folder, CheckpointError)
    (folder / "adapter_config.json").write_text('{"num_layers": ')
    assert "not valid JSON" in refusal(folder, ConfigError)
    (folder / "adapter_config.json").unlink()
    assert "no adapter folder" in refusal(folder, CheckpointError)
