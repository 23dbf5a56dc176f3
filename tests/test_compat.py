"""What we write, mlx-lm loads without a question, with our logits and our ids; what mlx-lm writes, we load."""

import json
import warnings
from types import ModuleType

import mlx.core as mx
import numpy as np
import pytest
from artefacts import TINY

from openelm_mlx.checkpoint import load, load_model
from openelm_mlx.convert import convert
from openelm_mlx.prompt import encode_chat

pytestmark = pytest.mark.needs_mlx_lm

TEXTS = ["Once upon a time", "  two  spaces\n\tand a tab", "naïve 🙂 世界 <|user|>", "the years 1908 and 2024"]
MESSAGES = [{"role": "user", "content": "Hello!"}]
OUTPUTS = {
    "bfloat16": {"dtype": "bfloat16"},
    "float16": {"dtype": "float16"},
    "float32": {"dtype": "float32"},
    "4-bit, bfloat16": {"quantize": True, "dtype": "bfloat16"},
    "8-bit": {"quantize": True, "q_bits": 8, "dtype": "float32"},
    "3-bit, embedding alone": {"quantize": True, "q_bits": 3, "embedding_bits": 16, "dtype": "float32"},
    "groups of 32": {"quantize": True, "q_group_size": 32, "dtype": "float32"},
    "mxfp4": {"quantize": True, "q_mode": "mxfp4", "dtype": "float32"},
    "mxfp8": {"quantize": True, "q_mode": "mxfp8", "dtype": "float32"},
    "nvfp4": {"quantize": True, "q_mode": "nvfp4", "dtype": "float32"},
}


@pytest.fixture(scope="module")
def mlx_lm() -> ModuleType:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # transformers' own
        import mlx_lm
        import mlx_lm.utils
    return mlx_lm


@pytest.fixture(autouse=True)
def _never_asks(monkeypatch):
    def ask(prompt=""):
        raise AssertionError(f"a loader asked: {prompt}")

    monkeypatch.setattr("builtins.input", ask)


def logits(model, ids) -> mx.array:
    return model(mx.array(ids)[None])[0].astype(mx.float32)


@pytest.mark.parametrize("options", OUTPUTS.values(), ids=OUTPUTS)
def test_mlx_lm_loads_what_we_write(mlx_lm, tmp_path, golden, options):
    convert("tiny", tmp_path / "out", instruct=True, **options)
    theirs, their_tokenizer = mlx_lm.load(str(tmp_path / "out"))
    ours, our_tokenizer = load(tmp_path / "out", dtype=options["dtype"], keep_quantized=True)
    expected = logits(theirs, golden["ids_0"])
    # In 16 bits the order of roundings differs: a few units in the last place of the largest logit.
    tolerance = 1e-4 if options["dtype"] == "float32" else float(mx.abs(expected).max()) * 2**-6
    assert float(mx.abs(logits(ours, golden["ids_0"]) - expected).max()) < tolerance
    for text in TEXTS:
        assert their_tokenizer.encode(text) == our_tokenizer.encode(text)
    chat = their_tokenizer.apply_chat_template(MESSAGES, add_generation_prompt=True)
    assert chat == encode_chat(our_tokenizer, MESSAGES)


@pytest.mark.parametrize("options", [{"dtype": "float32"}, {"quantize": True, "dtype": "float32"}], ids=str)
def test_we_load_what_mlx_lm_writes(mlx_lm, tmp_path, golden, options):
    from mlx_lm.convert import convert as mlx_lm_convert

    convert("tiny", tmp_path / "source", dtype="float32")  # mlx-lm wants a tokenizer.json
    mlx_lm_convert(str(tmp_path / "source"), str(tmp_path / "out"), **options)
    assert not (tmp_path / "out" / "tokenizer.model").exists()
    theirs, their_tokenizer = mlx_lm.load(str(tmp_path / "out"))
    ours, our_tokenizer = load(tmp_path / "out", dtype="float32", keep_quantized=True)
    assert float(mx.abs(logits(ours, golden["ids_1"]) - logits(theirs, golden["ids_1"])).max()) < 1e-4
    for text in TEXTS:
        assert our_tokenizer.encode(text) == their_tokenizer.encode(text)
    if "quantize" not in options:
        convert(tmp_path / "out", tmp_path / "again", dtype="float32")
        assert (
            np.abs(np.array(logits(load_model(tmp_path / "again"), golden["ids_0"])) - golden["logits_0"]).max() < 1e-4
        )


def test_an_older_folder_without_modes_or_overrides(mlx_lm, tmp_path, golden):
    """As mlx-community's: everything 4-bit, config.json with bits and group size only."""
    import mlx.nn as nn
    from mlx.utils import tree_flatten

    model = load_model(TINY, dtype="bfloat16")
    nn.quantize(model, group_size=64, bits=4)
    convert("tiny", tmp_path / "out")
    mx.save_safetensors(str(tmp_path / "out" / "model.safetensors"), dict(tree_flatten(model.parameters())))
    raw = json.loads((tmp_path / "out" / "config.json").read_text()) | {"quantization": {"group_size": 64, "bits": 4}}
    (tmp_path / "out" / "config.json").write_text(json.dumps(raw))
    theirs = mlx_lm.utils.load_model(tmp_path / "out")[0]
    expected = logits(theirs, golden["ids_0"])
    found = logits(load_model(tmp_path / "out", dtype="bfloat16", keep_quantized=True), golden["ids_0"])
    assert float(mx.abs(found - expected).max()) < float(mx.abs(expected).max()) * 2**-6
