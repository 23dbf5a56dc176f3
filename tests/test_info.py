"""openelm info: the same facts for people and for machines, from headers alone."""

import json
import math

import pytest
from adapters import SPECS, small, trained_folder
from artefacts import TINY, tiny_config, tiny_weights, write_corenet, write_corenet_yaml, write_hub, write_hub_torch

from openelm_mlx.adapters import adapter_weights
from openelm_mlx.cli import main
from openelm_mlx.config import OpenELMConfig
from openelm_mlx.convert import convert
from openelm_mlx.tensors import StoredTensor

KEYS = [
    "format", "parameters", "dtype", "quantization", "bits_per_weight", "bytes", "vocab_size", "num_transformer_layers",
    "model_dim", "head_dim", "num_query_heads", "num_kv_heads", "ffn_dims", "tied", "tokenizer", "chat_template",
    "training", "adapter", "consumers",
]  # fmt: skip


def info(capsys, *arguments) -> dict:
    assert main(["info", "--json", *map(str, arguments)]) == 0
    return json.loads(capsys.readouterr().out)


def test_the_bundled_checkpoint(capsys):
    config, facts = tiny_config(), info(capsys, "tiny")
    assert facts.pop("consumers").keys() == {"mlx-lm", "mlx-swift", "llama.cpp", "transformers"}
    assert facts == {
        "format": "hub-safetensors",
        "parameters": 4_607_616,
        "dtype": "bfloat16",
        "quantization": None,
        "bits_per_weight": 16.0,
        "bytes": 9_215_232,
        "ffn_dims": [128, 320, 512, 640, 832, 1024],
        "tied": True,
        "tokenizer": "tokenizer.model",
        "chat_template": False,
        "training": None,
        "adapter": None,
        **{key: config[key] for key in KEYS if key in config},
    }


def test_keys_are_exactly_those_promised(capsys):
    assert list(info(capsys, "tiny")) == KEYS


def test_every_source_that_convert_reads(capsys, tmp_path):
    weights = tiny_weights()
    hub = write_hub(tmp_path / "hub", weights, tiny_config(), shards=2)
    torch = write_hub_torch(tmp_path / "torch", weights, tiny_config())
    corenet = write_corenet(tmp_path / "c.pt", weights)
    convert("tiny", tmp_path / "Tiny-Instruct", instruct=True)
    formats = {
        "hub-safetensors": info(capsys, hub),
        "hub-pytorch": info(capsys, torch),
        "corenet": info(capsys, corenet, "--config", write_corenet_yaml(tmp_path / "c.yaml")),
        "mlx": info(capsys, tmp_path / "Tiny-Instruct"),
    }
    for name, facts in formats.items():
        assert facts["format"] == name
        assert facts["dtype"] == ("bfloat16" if name == "mlx" else "float32")
        assert facts["ffn_dims"] == [128, 320, 512, 640, 832, 1024]
        assert facts["chat_template"] is (name == "mlx")
        assert facts["bytes"] * 8 == facts["bits_per_weight"] * facts["parameters"]
    assert formats["corenet"]["vocab_size"] == 4224
    assert formats["corenet"]["tokenizer"] is None


def test_a_quantized_folder(capsys, tmp_path):
    summary = convert("tiny", tmp_path / "q", quantize=True, q_bits=4)
    facts = info(capsys, tmp_path / "q")
    assert facts["parameters"] == 4_607_616  # of the model, not of the packed integers
    assert facts["dtype"] == "bfloat16"
    assert facts["quantization"]["bits"] == 4
    assert facts["bytes"] == summary.nbytes
    assert facts["bits_per_weight"] == pytest.approx(summary.bits_per_weight, abs=0.001)


def test_the_table_shows_the_scaling_in_80_columns(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["info", "tiny"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    assert "4,607,616 parameters, bfloat16" in lines
    config = OpenELMConfig.from_file(TINY / "config.json")
    rows = [line.split() for line in lines[-config.num_transformer_layers :]]
    widths = zip(config.num_query_heads, config.num_kv_heads, config.ffn_dims, strict=True)
    assert [tuple(map(int, row[:4])) for row in rows] == [(i, *width) for i, width in enumerate(widths)]
    counts = [int(row[4].replace(",", "")) for row in rows]
    others = config.vocab_size * config.model_dim + config.model_dim  # the embedding and the last norm
    assert sum(counts) + others == config.num_parameters()
    bars = [len(row[5]) for row in rows]
    assert bars == sorted(bars)
    assert bars[0] < bars[-1]


def test_reads_no_values(capsys, monkeypatch):
    def read(self):
        raise AssertionError("info read a tensor")

    monkeypatch.setattr(StoredTensor, "read", read)
    assert info(capsys, "tiny")["bytes"] == 2 * sum(
        math.prod(shape) for shape in OpenELMConfig.from_file(TINY / "config.json").parameter_shapes().values()
    )


@pytest.mark.parametrize("spoil", ["config", "weights"])
def test_a_broken_folder_is_one_line(capsys, tmp_path, spoil):
    folder = write_hub(tmp_path / "hub", tiny_weights(), tiny_config())
    if spoil == "config":
        (folder / "config.json").write_text("{")
    else:
        file = folder / "model.safetensors"
        file.write_bytes(file.read_bytes()[:-9000])  # fault C4
    assert main(["info", str(folder)]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.count("\n") == 1
    assert ("not valid JSON" if spoil == "config" else "incomplete download") in printed.err


@pytest.mark.parametrize("kind", ["lora", "dora", "input", "both", "full"])
def test_an_adapter_folder(capsys, tmp_path, kind):
    spec = SPECS[kind]
    model = trained_folder(tmp_path, spec, small())
    facts = info(capsys, tmp_path)
    assert (facts["format"], facts["fine_tune_type"]) == ("mlx-lm", spec.fine_tune_type)
    assert facts["parameters"] == sum(value.size for value in adapter_weights(model).values())
    assert facts["rank"] == (None if kind == "full" else 4)
    assert facts["input_embedding"] == (kind == "input")
    if spec.keys is None:
        assert sorted(facts["keys"]) == ["attn.out_proj", "attn.qkv_proj", "ffn.proj_1", "ffn.proj_2"]
    assert main(["info", str(tmp_path)]) == 0
    assert "loads in openelm" in capsys.readouterr().out
