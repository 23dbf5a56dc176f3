"""openelm export --to gguf: what llama.cpp will read, read back with the gguf package; whole or not at all.

benchmarks/llama_cpp_agreement.py asks llama.cpp itself; its result is in docs/export.md.
"""

import json
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from artefacts import TINY, TOKENIZER, tiny_config, write_hub
from measures import kl
from reference import random_checkpoint, reference_logits, small_config
from sentencepiece import SentencePieceProcessor

from openelm_mlx import atomic
from openelm_mlx.benchmarks import llama_cpp_agreement
from openelm_mlx.cli import main
from openelm_mlx.convert import convert
from openelm_mlx.convert.export import export
from openelm_mlx.prompt import CHAT_TEMPLATE

gguf = pytest.importorskip("gguf")

RAW = small_config(vocab_size=4096, num_transformer_layers=2)
WEIGHTS = random_checkpoint(RAW, seed=3)
HUB_NAMES = {
    "token_embd": "transformer.token_embeddings",
    "output_norm": "transformer.norm",
    "attn_norm": "attn_norm",
    "attn_qkv": "attn.qkv_proj",
    "attn_q_norm": "attn.q_norm",
    "attn_k_norm": "attn.k_norm",
    "attn_output": "attn.out_proj",
    "ffn_norm": "ffn_norm",
    "ffn_down": "ffn.proj_2",
}


@pytest.fixture
def out(tmp_path) -> Path:
    folder = tmp_path / "out dir"
    folder.mkdir()
    return folder / "a model.gguf"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> Any:
    """The bundled model as F32, as the gguf package reads it."""
    file = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    export("tiny", "gguf", file, gguf_type="F32", instruct=True)
    return gguf.GGUFReader(file)


def value(reader: Any, key: str) -> Any:
    return reader.fields[key].contents()


def weights_in(reader: Any) -> dict[str, np.ndarray]:
    """Every tensor in float32 under its Hub name, the two halves of the feed-forward network joined."""
    found = {}
    for tensor in reader.tensors:
        name = tensor.name.removesuffix(".weight")
        found[name] = gguf.quants.dequantize(tensor.data, tensor.tensor_type).reshape(tensor.shape[::-1])
    weights = {}
    for name, values in found.items():
        match = re.fullmatch(r"blk\.(\d+)\.(\w+)", name)
        if match is None:
            weights[f"{HUB_NAMES[name]}.weight"] = values
            continue
        layer = f"transformer.layers.{match[1]}"
        if match[2] == "ffn_gate":
            both = [values, found[f"blk.{match[1]}.ffn_up"]]
            weights[f"{layer}.ffn.proj_1.weight"] = np.concatenate(both)
        elif match[2] != "ffn_up":
            weights[f"{layer}.{HUB_NAMES[match[2]]}.weight"] = values
    return weights


def test_the_file_gives_apples_logits(tiny, golden):
    logits = reference_logits(weights_in(tiny), tiny_config(), golden["ids_0"])
    np.testing.assert_allclose(logits, golden["logits_0"], atol=1e-4)


def test_the_metadata_is_what_llama_cpp_asks_for(tiny):
    config = tiny_config()
    expected = {
        "general.architecture": "openelm",
        "general.file_type": 0,
        "openelm.block_count": 6,
        "openelm.context_length": 256,
        "openelm.embedding_length": 256,
        "openelm.feed_forward_length": [128, 320, 512, 640, 832, 1024],
        "openelm.attention.head_count": config["num_query_heads"],
        "openelm.attention.head_count_kv": config["num_kv_heads"],
        "openelm.attention.key_length": 32,
        "openelm.attention.value_length": 32,
        "openelm.rope.dimension_count": 32,
        "openelm.rope.freq_base": 10000.0,
        "openelm.attention.layer_norm_rms_epsilon": pytest.approx(1e-6),
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.add_bos_token": True,
        "tokenizer.ggml.add_eos_token": False,
        "tokenizer.ggml.add_space_prefix": True,
        "tokenizer.chat_template": CHAT_TEMPLATE,
    }
    assert {key: value(tiny, key) for key in expected} == expected


def test_the_tokenizer_is_sentencepieces(tiny):
    processor = SentencePieceProcessor(model_file=str(TOKENIZER))
    ids = range(processor.vocab_size())
    assert value(tiny, "tokenizer.ggml.tokens") == [processor.id_to_piece(i) for i in ids]
    assert value(tiny, "tokenizer.ggml.scores") == [processor.get_score(i) for i in ids]
    types = value(tiny, "tokenizer.ggml.token_type")
    assert types[:3] == [2, 3, 3]  # unknown, control, control
    assert all(types[i] == (6 if processor.is_byte(i) else 1) for i in ids[3:])


@pytest.mark.parametrize(
    ("kind", "bound"), [("F32", 0.0), ("F16", 1e-3), ("BF16", 2**-8), ("Q8_0", 1 / 127)], ids=lambda value: str(value)
)
def test_every_type(tmp_path, out, kind, bound):
    source = write_hub(tmp_path / "m", WEIGHTS, RAW)
    assert main(["export", str(source), "--to", "gguf", "-o", str(out), "--gguf-type", kind]) == 0
    reader = gguf.GGUFReader(out)
    found = weights_in(reader)

    assert set(found) == set(WEIGHTS)
    for name, values in WEIGHTS.items():
        limit = bound * np.abs(values).max() if values.ndim == 2 else 0  # norms are exact
        assert np.abs(found[name] - values).max() <= limit, name
    kinds = {tensor.tensor_type.name for tensor in reader.tensors if len(tensor.shape) == 2}
    assert kinds == {kind}
    assert all(tensor.data_offset % 32 == 0 for tensor in reader.tensors)
    assert "tokenizer.chat_template" not in reader.fields


def test_the_type_is_the_models_own_where_none_is_named(tmp_path, out):
    assert export("tiny", "gguf", out).kind == "BF16"
    convert("tiny", tmp_path / "mlx", quantize=True, dtype="float16")
    assert export(tmp_path / "mlx", "gguf", out, force=True).kind == "F16"


def test_padding_rows_get_names_that_no_text_has(tmp_path, out):
    config = RAW | {"vocab_size": 4100}
    export(write_hub(tmp_path / "m", random_checkpoint(config), config), "gguf", out)
    reader = gguf.GGUFReader(out)
    assert value(reader, "tokenizer.ggml.tokens")[4096:] == [f"[PAD{i}]" for i in range(4)]
    assert value(reader, "tokenizer.ggml.token_type")[4096:] == [5] * 4


class TestRefusals:
    """One line, exit 2, and nothing written."""

    def refused(self, capsys, out: Path, *arguments: str) -> str:
        before = {path: path.read_bytes() for path in out.parent.iterdir()}
        assert main(["export", *arguments, "--to", "gguf", "-o", str(out)]) == 2
        error = capsys.readouterr().err
        assert len(error.splitlines()) == 1, error
        assert {path: path.read_bytes() for path in out.parent.iterdir()} == before
        return error

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"share_input_output_layers": False}, "an output head of its own"),
            ({"ffn_with_glu": False}, "without gate"),
            ({"normalize_qk_projections": False}, "no normalised queries"),
        ],
    )
    def test_what_the_format_cannot_hold(self, capsys, tmp_path, out, changes, message):
        # fault G12
        config = RAW | changes
        source = write_hub(tmp_path / "m", random_checkpoint(config), config)
        error = self.refused(capsys, out, str(source))
        assert message in error
        assert "--to hf, pt and corenet can" in error

    def test_values_beyond_the_types_range(self, capsys, tmp_path, out):
        name = "transformer.layers.1.ffn.proj_2.weight"
        wide = WEIGHTS | {name: np.full_like(WEIGHTS[name], 70000)}
        source = write_hub(tmp_path / "m", wide, RAW)
        error = self.refused(capsys, out, str(source), "--gguf-type", "F16")
        assert "blk.1.ffn_down.weight has values beyond the range of float16" in error
        assert export(source, "gguf", out, gguf_type="Q8_0").kind == "Q8_0"  # its scales are in range
        wide[name][:] = 1e7
        source = write_hub(tmp_path / "wider", wide, RAW)
        assert "the range of Q8_0" in self.refused(capsys, out, str(source), "--gguf-type", "Q8_0", "--force")

    def test_rows_that_q8_0_cannot_group(self, capsys, tmp_path, out):
        config = small_config(vocab_size=4096, num_transformer_layers=1, model_dim=80, head_dim=10)
        source = write_hub(tmp_path / "m", random_checkpoint(config), config)
        assert "Q8_0 packs 32 at a time" in self.refused(capsys, out, str(source), "--gguf-type", "Q8_0")

    def test_a_tokenizer_without_scores(self, capsys, tmp_path, out):
        source = tmp_path / "mlx"
        convert("tiny", source)
        (source / "tokenizer.model").unlink()
        assert "name it with --tokenizer" in self.refused(capsys, out, str(source))
        assert main(["export", str(source), "--to", "gguf", "-o", str(out), "--tokenizer", str(TOKENIZER)]) == 0

    def test_the_target(self, capsys, out):
        out.write_text("something else")
        assert "--force" in self.refused(capsys, out, "tiny")
        folder = out.parent.parent / "nothing else" / "folder"
        folder.mkdir(parents=True)
        assert main(["export", "tiny", "--to", "gguf", "-o", str(folder), "--force"]) == 2
        assert "name a file" in capsys.readouterr().err
        assert main(["export", "tiny", "--to", "gguf", "-o", str(out), "--force"]) == 0
        assert out.read_bytes()[:4] == b"GGUF"
        assert [path.name for path in out.parent.iterdir()] == [out.name]

    def test_the_source_is_never_the_target(self, capsys, tmp_path):
        source = write_hub(tmp_path / "m", WEIGHTS, RAW) / "model.safetensors"
        assert "the source itself" in self.refused(capsys, source, str(source), "--force")

    def test_too_little_space(self, capsys, monkeypatch, out):
        # fault C3
        monkeypatch.setattr(atomic.shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(0, 0, 10_000_000))
        assert "has 0.01 GB free" in self.refused(capsys, out, "tiny")

    def test_a_missing_package(self, capsys, monkeypatch, out):
        monkeypatch.setitem(sys.modules, "gguf", None)
        assert "pip install 'openelm-mlx[gguf]'" in self.refused(capsys, out, "tiny")

    def test_an_interrupt_leaves_the_old_file(self, monkeypatch, out):
        # fault C2
        def interrupted(*arguments):
            raise KeyboardInterrupt

        out.write_text("the old one")
        monkeypatch.setattr("openelm_mlx.convert.export_gguf._verify", interrupted)
        assert main(["export", "tiny", "--to", "gguf", "-o", str(out), "--force"]) == 130
        assert [path.read_text() for path in out.parent.iterdir()] == ["the old one"]


def test_what_was_made_is_told_as_json(capsys, out):
    assert main(["export", str(TINY), "--to", "gguf", "-o", str(out), "--gguf-type", "Q8_0", "--json"]) == 0
    shown = capsys.readouterr()
    made = json.loads(shown.out.splitlines()[-1])
    assert (made["format"], made["kind"], made["parameters"]) == ("gguf", "Q8_0", 4607616)
    assert made["nbytes"] < out.stat().st_size < made["nbytes"] + 200_000
    assert "next: llama-cli -m '" in shown.err


def test_the_comparison_with_llama_cpp_says_what_it_needs(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "llama_cpp", None)
    assert llama_cpp_agreement.main([]) == 2
    assert capsys.readouterr().err == ("error: this comparison needs llama.cpp; pip install llama-cpp-python\n")


def test_the_comparisons_divergence_is_kl():
    one, other = np.random.default_rng(0).standard_normal((2, 5, 7)).astype(np.float32)
    assert llama_cpp_agreement._kl(one, one) == pytest.approx(0, abs=1e-12)
    assert llama_cpp_agreement._kl(one, other) == pytest.approx(kl(one, other))
