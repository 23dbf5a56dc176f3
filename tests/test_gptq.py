"""GPTQ and the mixed recipe through convert: what is written, that it is better, who loads it, and what is refused."""

import json
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from artefacts import TINY, tiny_config, tiny_weights, write_hub
from measures import kl
from reference import random_checkpoint, reference_logits, small_config

from openelm_mlx.checkpoint import load_model
from openelm_mlx.cli import main
from openelm_mlx.config import OpenELMConfig
from openelm_mlx.convert import convert, gptq
from openelm_mlx.convert.gptq import calibration_windows, needed_bytes
from openelm_mlx.errors import ConfigError, OpenELMError, RunFailedError
from openelm_mlx.quantize import QuantizationSettings, plan

EMBEDDING = "transformer.token_embeddings"
TINY_CONFIG = OpenELMConfig.from_dict(tiny_config())
SHORT = 4000  # characters of calibration text: about five windows of the small models below


def small_model(folder: Path, **changes) -> Path:
    """Two narrow layers with the bundled tokenizer's vocabulary, so that real text goes through."""
    raw = small_config(num_transformer_layers=2, vocab_size=4096, max_context_length=64, **changes)
    return write_hub(folder, uneven_weights(raw), raw)


def uneven_weights(raw: dict) -> dict[str, np.ndarray]:
    """Random weights whose features differ in size, as trained ones do: there is something to make up for."""
    weights = random_checkpoint(raw, seed=4)
    weights[f"{EMBEDDING}.weight"] *= np.exp(np.random.default_rng(1).standard_normal(raw["model_dim"])).astype("f4")
    return weights


@pytest.fixture
def text(tmp_path) -> Path:
    file = tmp_path / "calibration.txt"
    file.write_text(gptq.CALIBRATION_TEXT.read_text(encoding="utf-8")[:SHORT], encoding="utf-8")
    return file


def raw_config(folder: Path) -> dict:
    return json.loads((folder / "config.json").read_text())


def distance(folder: Path, source: Path, windows: np.ndarray) -> float:
    """Mean KL of a folder's logits from those of its float32 source, over windows of ids (N, L)."""
    raw, model = raw_config(source), load_model(folder, dtype="float32")
    weights = uneven_weights(raw)
    return np.mean(
        [kl(reference_logits(weights, raw, ids), np.array(model(mx.array(ids)[None])[0])) for ids in windows]
    )


@pytest.mark.needs_mlx_lm
class TestGptq:
    def test_the_folder_is_like_any_other_and_closer_to_the_source(self, tmp_path, text, capsys):
        source = small_model(tmp_path / "source")
        made, plain = tmp_path / "gptq", tmp_path / "plain"
        flags = ["-q", "--q-bits", "2", "--q-group-size", "32", "--dtype", "float16"]
        assert main(["convert", str(source), "-o", str(plain), *flags]) == 0
        assert main(["convert", str(source), "-o", str(made), *flags, "--method", "gptq", "--calibration", str(text),
                     "--measure"]) == 0  # fmt: skip
        captured = capsys.readouterr()
        assert "KL to the source" in captured.out
        assert "Quantizing" not in captured.err  # mlx-lm's own bars, where no terminal looks
        assert raw_config(made) == raw_config(plain)
        assert sorted(path.name for path in made.iterdir()) == sorted(path.name for path in plain.iterdir())
        assert (made / "model.safetensors").stat().st_size == (plain / "model.safetensors").stat().st_size
        windows = calibration_windows(text, TINY, OpenELMConfig.from_dict(raw_config(source)), 0)[:3]
        assert distance(made, source, windows) < 0.9 * distance(plain, source, windows)  # 0.77 when written

    def test_mlx_lm_loads_it_and_computes_the_same(self, tmp_path, text):
        from mlx_lm.utils import load_model as mlx_lm_load

        convert(small_model(tmp_path / "source"), tmp_path / "m", quantize=True, method="gptq", calibration=text)
        theirs, _ = mlx_lm_load(tmp_path / "m")
        ours = load_model(tmp_path / "m", dtype="bfloat16", keep_quantized=True)
        ids = mx.array([[1, 17, 403, 9]])
        assert mx.abs(theirs(ids) - ours(ids)).max().item() < 0.05

    def test_the_same_seed_gives_the_same_bytes(self, tmp_path, monkeypatch):
        monkeypatch.setattr(gptq, "_WINDOWS", 2)
        source = small_model(tmp_path / "source")
        weights = []
        for name, seed in (("a", 1), ("b", 1), ("c", 2)):
            convert(source, tmp_path / name, quantize=True, method="gptq", seed=seed)
            weights.append((tmp_path / name / "model.safetensors").read_bytes())
        assert weights[0] == weights[1] != weights[2]

    def test_what_gives_no_numbers_fails_and_leaves_nothing(self, tmp_path, text):
        raw = small_config(num_transformer_layers=2, vocab_size=4096)
        weights = random_checkpoint(raw)
        weights["transformer.layers.1.ffn_norm.weight"][:] = np.inf
        with pytest.raises(OpenELMError, match="not numbers|not a number"):
            convert(write_hub(tmp_path / "s", weights, raw), tmp_path / "m", quantize=True, method="gptq",
                    calibration=text)  # fmt: skip
        assert not (tmp_path / "m").exists()

    def test_a_matrix_that_only_sees_zeros(self, tmp_path, text):
        raw = small_config(num_transformer_layers=2, vocab_size=4096)
        weights = random_checkpoint(raw)
        weights["transformer.layers.0.attn.qkv_proj.weight"][:] = 0
        with pytest.raises(RunFailedError, match="GPTQ"):
            convert(write_hub(tmp_path / "s", weights, raw), tmp_path / "m", quantize=True, method="gptq",
                    calibration=text)  # fmt: skip


class TestCalibration:
    def test_windows_of_the_bundled_text(self):
        windows = calibration_windows(None, TINY, TINY_CONFIG, 0)
        assert windows.shape == (128, 256)
        assert 0 <= windows.min() <= windows.max() < TINY_CONFIG.vocab_size
        assert (windows == calibration_windows(None, TINY, TINY_CONFIG, 0)).all()
        assert not (windows == calibration_windows(None, TINY, TINY_CONFIG, 1)).all()

    @pytest.mark.parametrize(
        ("content", "message"),
        [(b"short", r"has 2 tokens, expected at least 256"), (b"\xff\xfe\x00", "not UTF-8"), (None, "No such file")],
    )
    def test_a_text_that_is_none(self, tmp_path, content, message):
        file = tmp_path / "t.txt"
        if content is not None:
            file.write_bytes(content)
        with pytest.raises(OpenELMError, match=message):
            calibration_windows(file, TINY, TINY_CONFIG, 0)

    def test_memory_is_asked_for_first(self, tmp_path, monkeypatch, capsys):
        monkeypatch.setattr(gptq, "available_memory_bytes", lambda: 10**9)
        assert main(["convert", "tiny", "-q", "--method", "gptq", "-o", str(tmp_path / "m")]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert f"needs {needed_bytes(TINY_CONFIG) / 1e9:.2f} GB, 1.00 GB are available" in line


REFUSED = {
    "bits": (["-q", "--method", "gptq", "--q-bits", "3"], "packs 2, 4 or 8 bits, got 3"),
    "mode": (["-q", "--method", "gptq", "--q-mode", "mxfp4"], "needs --q-mode affine"),
    "both": (["-q", "--method", "gptq", "--recipe", "mixed"], "leave out --recipe mixed"),
    "several": (["-q", "--method", "gptq", "--q-bits", "2", "--q-bits", "4"], "one folder at a time"),
    "method without -q": (["--method", "gptq"], "add -q"),
    "recipe without -q": (["--recipe", "mixed"], "add -q"),
    "text without gptq": (["-q", "--calibration", "x.txt"], "are for --method gptq"),
    "seed without gptq": (["-q", "--seed", "1"], "are for --method gptq"),
    "recipe of a mode": (["-q", "--recipe", "mixed", "--q-mode", "mxfp8"], "needs --q-mode affine"),
    "recipe at 8": (["-q", "--recipe", "mixed", "--q-bits", "8"], "8 are the most there are"),
}


@pytest.mark.parametrize(("flags", "message"), REFUSED.values(), ids=REFUSED)
def test_what_does_not_go_together_is_refused_before_any_work(tmp_path, monkeypatch, capsys, flags, message):
    monkeypatch.setattr("openelm_mlx.convert.conversion.resolve_model", lambda *_, **__: pytest.fail("too late"))
    assert main(["convert", "tiny", "-o", str(tmp_path / "m"), *flags]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line


def test_gptq_needs_whole_groups_everywhere(tmp_path):
    odd = small_model(tmp_path / "odd", model_dim=96)
    with pytest.raises(ConfigError, match="rows of 96 are not whole groups of 64"):
        convert(odd, tmp_path / "m", quantize=True, method="gptq")


def test_mixed_is_written_and_read_as_planned(tmp_path):
    weights, made = tiny_weights(), tmp_path / "m"
    summary = convert("tiny", made, quantize=True, recipe="mixed")
    assert summary.quantization == plan(TINY_CONFIG, QuantizationSettings.of(), recipe="mixed")
    entry = raw_config(made)["quantization"]
    assert (entry["bits"], entry[EMBEDDING]["bits"], entry["transformer.layers.5.ffn.proj_1"]["bits"]) == (4, 6, 6)
    assert "transformer.layers.1.ffn.proj_1" not in entry
    model = load_model(made, dtype="float32", keep_quantized=True)
    assert (model.layers[0].ffn.proj_1.bits, model.layers[1].ffn.proj_1.bits) == (6, 4)
    ids = np.arange(100, 140)
    expected = reference_logits(weights, tiny_config(), ids)
    assert kl(expected, np.array(model(mx.array(ids)[None])[0])) < 0.03


@pytest.mark.needs_mlx_lm
def test_mlx_lm_reads_the_bits_of_each_layer(tmp_path):
    from mlx_lm.utils import load_model as mlx_lm_load

    convert("tiny", tmp_path / "m", quantize=True, recipe="mixed")
    theirs, _ = mlx_lm_load(tmp_path / "m")
    assert theirs.transformer.layers[0].ffn.proj_1.bits == theirs.transformer.token_embeddings.bits == 6
    ids = mx.array([[1, 17, 403, 9]])
    ours = load_model(tmp_path / "m", dtype="bfloat16", keep_quantized=True)
    assert mx.abs(theirs(ids) - ours(ids)).max().item() < 0.2
