"""Adapter folders as they are written: what they say, that they load with equal logits, that no moment is unsafe."""

import json
from dataclasses import replace

import mlx.core as mx
import mlx.nn as nn
import pytest
from adapters import SPECS, difference, read_config, small, tiny, train, trained_folder
from mlx.utils import tree_flatten

from openelm_mlx.adapter_config import EMBEDDING_PATH, LINEAR_KEYS, AdapterSpec, read_adapter_config, resolved_scale
from openelm_mlx.adapter_folder import save_adapter_weights, save_adapters
from openelm_mlx.adapters import adapter_weights, add_adapters, load_adapters
from openelm_mlx.errors import ConfigError, OpenELMError, OutputError


def trainable(model: nn.Module) -> set[str]:
    return {name for name, _ in tree_flatten(model.trainable_parameters())}


@pytest.mark.parametrize("name", SPECS)
def test_what_was_trained_is_what_is_saved_and_loaded(tmp_path, name):
    """fault G3: equal logits without a flag; and training goes on with the same parameters."""
    trained, loaded = trained_folder(tmp_path / "deep" / "adapters", SPECS[name], tiny()), tiny()
    assert set(adapter_weights(trained)) == trainable(trained)
    spec = load_adapters(loaded, tmp_path / "deep" / "adapters")
    assert difference(loaded, trained) == 0
    assert difference(loaded, tiny()) > 0.01
    assert trainable(loaded) == trainable(trained)
    keys = SPECS[name].keys or (() if name == "full" else LINEAR_KEYS)
    assert spec == replace(SPECS[name], keys=keys, base=spec.base)


def test_the_config_says_what_the_adapter_was_trained_on(tmp_path):
    trained_folder(tmp_path, replace(SPECS["lora"], rslora=True), small())
    config = read_config(tmp_path)
    assert (config["format_version"], config["fine_tune_type"], config["num_layers"]) == (1, "lora", 3)
    assert config["model"] == "tiny"
    assert config["lora_parameters"] == {
        "rank": 4, "scale": 2.0, "dropout": 0.1, "keys": list(LINEAR_KEYS), "rslora": True, "input_embedding": False,
    }  # fmt: skip
    assert {"model_dim", "num_transformer_layers", "vocab_size", "ffn_dims"} <= set(config["base"])


@pytest.mark.parametrize(
    ("changes", "key"),
    [({"vocab_size": 250}, "vocab_size"), ({"num_transformer_layers": 6}, "num_transformer_layers")],
)
def test_another_base_model_is_named_although_every_tensor_fits(tmp_path, changes, key):
    """fault G1: two of four layers' adapters would fit a deeper model, and compute something else."""
    spec = AdapterSpec(1, rank=2, keys=("attn.qkv_proj",), base_model="some/base")
    trained_folder(tmp_path, spec, small())
    other = small(**changes)
    with pytest.raises(ConfigError, match=f"was trained on 'some/base' with {key} .*; this model has ") as caught:
        load_adapters(other, tmp_path)
    assert "\n" not in str(caught.value)
    assert adapter_weights(other) == dict(tree_flatten(other.parameters()))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"format_version": 2}, "format_version 2; this openelm-mlx reads up to 1: update it"),
        ({"format_version": "1"}, "format_version '1'"),
        ({"peft_type": "LORA"}, "is PEFT's"),
        ({"base": []}, "base must be an object"),
    ],
)
def test_formats_that_are_not_read(tmp_path, changes, message):
    trained_folder(tmp_path, SPECS["lora"], tiny())
    (tmp_path / "adapter_config.json").write_text(json.dumps(read_config(tmp_path) | changes))
    with pytest.raises(ConfigError, match=message):
        load_adapters(tiny(), tmp_path)


@pytest.mark.parametrize(
    ("parameters", "scale"),
    [
        ({"scale": 3}, 3.0),
        ({"alpha": 32}, 2.0),
        ({"alpha": 32, "rslora": True}, 8.0),
        ({"scale": 8, "rslora": True}, 8.0),  # as we write it: already resolved
    ],
)
def test_scale_or_alpha(tmp_path, parameters, scale):
    config = {"num_layers": 1, "lora_parameters": {"rank": 16} | parameters}
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    assert read_adapter_config(tmp_path / "adapter_config.json").scale == scale


def test_never_both_scale_and_alpha():
    with pytest.raises(ConfigError, match="exclude each other"):
        resolved_scale(8, scale=1.0, alpha=8.0)


def test_the_kinds_of_embedding_adapters():
    plain = AdapterSpec(-1, keys=("attn.qkv_proj", EMBEDDING_PATH))
    assert plain.with_embedding("none").keys == ("attn.qkv_proj",)
    assert plain.with_embedding("both").keys == plain.keys
    assert plain.with_embedding("input") == AdapterSpec(-1, keys=("attn.qkv_proj",), input_embedding=True)
    assert AdapterSpec(-1).with_embedding("both").keys == (*LINEAR_KEYS, EMBEDDING_PATH)
    with pytest.raises(ConfigError, match="none, input, both; got 'output'"):
        plain.with_embedding("output")


def test_full_trains_the_layers_and_what_is_named_beside_them():
    model = small()
    trained = add_adapters(model, AdapterSpec(1, "full", keys=("transformer.norm",)))
    assert list(trained) == ["transformer.layers.3", "transformer.norm"]
    assert {name.rpartition(".layers.3.")[0] for name in trainable(model)} == {"transformer", ""}
    assert trainable(model) == set(adapter_weights(model))
    with pytest.raises(ConfigError, match="modules .*'lm_head'.* are not in this model"):
        add_adapters(model, AdapterSpec(1, "full", keys=("lm_head",)))


def test_whole_weights_need_a_plain_base(tmp_path):
    trained_folder(tmp_path, AdapterSpec(1, "full"), tiny())
    packed = tiny()
    nn.quantize(packed, 64, 4)
    for attempt in (lambda: add_adapters(packed, AdapterSpec(1, "full")), lambda: load_adapters(packed, tmp_path)):
        with pytest.raises(ConfigError, match="is quantized, and whole weights need plain ones"):
            attempt()


# --- no moment is unsafe --------------------------------------------------------------------------------------------


def test_other_files_stay_and_the_config_may_say_more(tmp_path):
    (tmp_path / "training_log.jsonl").write_text("{}\n")
    spec, model = SPECS["lora"], small()
    add_adapters(model, spec)
    save_adapters(tmp_path, model, spec, extra_config={"training": {"seed": 1}})
    assert read_config(tmp_path)["training"] == {"seed": 1}
    save_adapter_weights(tmp_path / "0000100_adapters.safetensors", model)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "0000100_adapters.safetensors", "adapter_config.json", "adapters.safetensors", "training_log.jsonl",
    ]  # fmt: skip
    with pytest.raises(ConfigError, match=r"extra_config may not set \['model'\]"):
        save_adapters(tmp_path, model, spec, extra_config={"model": "other"})


class Killed(BaseException):
    """Nothing catches it, as nothing catches SIGKILL."""


def interrupt_writing(monkeypatch, error: BaseException) -> None:
    def save(path, *_):
        with open(path, "wb") as file:
            file.write(b"half")
        raise error

    monkeypatch.setattr(mx, "save_safetensors", save)


@pytest.mark.parametrize("error", [RuntimeError("short write"), Killed()])
def test_what_was_saved_last_survives_a_failed_save(tmp_path, monkeypatch, error):
    model = trained_folder(tmp_path, SPECS["lora"], small())
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    train(model, seed=9)
    with monkeypatch.context() as patch:
        interrupt_writing(patch, error)
        with pytest.raises((OutputError, Killed)) as caught:
            save_adapters(tmp_path, model, SPECS["lora"])
    assert isinstance(caught.value, Killed) or "disk full" in str(caught.value)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_a_new_config_never_stands_beside_old_weights(tmp_path, monkeypatch):
    """Same shapes, another scale: killed between the two files, the old weights would load and be wrong."""
    trained_folder(tmp_path, SPECS["lora"], small())
    other, model = replace(SPECS["lora"], scale=4.0), small()
    add_adapters(model, other)
    interrupt_writing(monkeypatch, Killed())
    with pytest.raises(Killed):
        save_adapters(tmp_path, model, other)
    with pytest.raises(OpenELMError, match=r"adapters\.safetensors"):
        load_adapters(small(), tmp_path)


def test_a_place_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    model = small()
    add_adapters(model, SPECS["lora"])
    with pytest.raises(OutputError, match="cannot make"):
        save_adapters(tmp_path / "file" / "adapters", model, SPECS["lora"])
