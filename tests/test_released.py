"""Everything that Apple released: each kind is told from its content and computes what its own formula says."""

import json
from collections import namedtuple
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from artefacts import TOKENIZER, write_corenet_yaml
from reference import random_checkpoint, reference_logits, small_config
from released import (
    PADDING,
    adapter_state,
    apple_mlx,
    corenet_state,
    lora_yaml,
    merged,
    packed_4bit,
    training_checkpoint,
    unpacked_4bit,
)
from torch_writer import BFloat16, write_torch_file

from openelm_mlx import atomic
from openelm_mlx.adapters import load_adapters
from openelm_mlx.checkpoint import load_model
from openelm_mlx.cli import main
from openelm_mlx.convert import convert
from openelm_mlx.convert.torch_tensor import SourceFile
from openelm_mlx.errors import CheckpointError, ConfigError, OutputError
from openelm_mlx.safetensors_file import read_folder, read_header

CONFIG = small_config(vocab_size=4096, num_transformer_layers=2)
IDS = np.array([1, 5, 9, 700, 4095])
SETTINGS = {"tokenizer": str(TOKENIZER), "dtype": "float32"}
EMBEDDING = "transformer.token_embeddings.weight"


@pytest.fixture(scope="module")
def weights() -> dict[str, np.ndarray]:
    return random_checkpoint(CONFIG)


@pytest.fixture
def out(tmp_path) -> Path:
    return tmp_path / "out" / "model"


def logits(folder: Path, adapter: Path | None = None) -> np.ndarray:
    model = load_model(folder, dtype="float32", keep_quantized=True)
    if adapter is not None:
        load_adapters(model, adapter)
    return np.array(model(mx.array(IDS)[None])[0].astype(mx.float32))


def expected(weights: dict[str, np.ndarray]) -> np.ndarray:
    return reference_logits(weights, CONFIG | {"share_input_output_layers": "lm_head.weight" not in weights}, IDS)


def refused(capsys, out: Path, *arguments: object) -> str:
    """The one line with which a conversion is refused; nothing is left of it."""
    assert main(["convert", *map(str, arguments), "--tokenizer", str(TOKENIZER), "-o", str(out)]) == 2
    lines = capsys.readouterr().err.splitlines()  # what was assumed is not told where nothing comes of it
    assert len(lines) == 1, lines
    assert not out.parent.exists() or not any(out.parent.iterdir())
    return lines[0]


class TestTrainingCheckpoints:
    def test_only_the_models_numbers_are_read(self, tmp_path, out, weights, monkeypatch):
        state = corenet_state(weights)
        source = write_torch_file(
            tmp_path / "anything.bin", training_checkpoint(state, {k: v + 1 for k, v in state.items()})
        )
        read, counted = SourceFile.read, []
        monkeypatch.setattr(SourceFile, "read", lambda *args: counted.append(args) or read(*args))
        convert(source, out, **SETTINGS)
        sizes = [np.dtype(args[3]).itemsize * args[2] if len(args) > 3 else args[2] for args in counted]
        model_bytes = sum(value.nbytes for value in weights.values())
        assert sum(sizes) < 2 * model_bytes + 100_000  # once to write, once to compare; the file has five times that
        assert np.abs(logits(out) - expected(weights)).max() < 1e-4

    def test_the_moving_average_on_request(self, tmp_path, out, weights):
        averaged = random_checkpoint(CONFIG, seed=1)
        states = corenet_state(weights), corenet_state(averaged)
        source = write_torch_file(tmp_path / "c.pt", training_checkpoint(*states))
        convert(source, out, use_ema=True, **SETTINGS)
        assert np.abs(logits(out) - expected(averaged)).max() < 1e-4

    @pytest.mark.parametrize("make", [lambda s: s, training_checkpoint, lambda s: {"model": s}])
    def test_without_a_moving_average(self, capsys, tmp_path, out, weights, make):
        source = write_torch_file(tmp_path / "c.pt", make(corenet_state(weights)))
        assert "leave out --use-ema" in refused(capsys, out, source, "--use-ema")

    @pytest.mark.parametrize(
        "wrapped",
        [
            lambda name: f"module.{name}",
            lambda name: f"_fsdp_wrapped_module.{name.replace('layers.0', 'layers.0._fsdp_wrapped_module')}",
            lambda name: "module._orig_mod." + name.replace(".attn.", "._checkpoint_wrapped_module.attn.module."),
        ],
    )
    @pytest.mark.parametrize("key", ["model_state_dict", "model", "state_dict", None])
    def test_wrappers_of_training(self, tmp_path, out, weights, wrapped, key):
        state = {wrapped(name): value for name, value in corenet_state(weights).items()}
        convert(write_torch_file(tmp_path / "c.pt", state if key is None else {key: state, "step": 3}), out, **SETTINGS)
        assert all(np.array_equal(tensor.read(), weights[name]) for name, tensor in read_folder(out).items())

    def test_what_cannot_be_told_apart(self, capsys, tmp_path, out, weights):
        state = corenet_state(weights)
        both = write_torch_file(tmp_path / "both.pt", {"model": state, "state_dict": state})
        assert "several models (model, state_dict)" in refused(capsys, out, both)
        twice = write_torch_file(tmp_path / "twice.pt", state | {"module.norm.weight": state["norm.weight"]})
        assert "norm.weight twice" in refused(capsys, out, twice)

    def test_info_tells_what_else_is_in_it(self, capsys, tmp_path, weights):
        state = corenet_state(weights)
        source = write_torch_file(tmp_path / "c.pt", training_checkpoint(state))
        assert main(["info", "--json", str(source)]) == 0
        facts = json.loads(capsys.readouterr().out)
        assert facts["format"] == "corenet-training"
        moments = sum(2 * value.nbytes + 4 for value in state.values())
        assert facts["training"] == {
            "iterations": 7, "epoch": 0, "best_metric": 0.5, "is_interval_ckpt": True, "has_ema": False,
            "optimizer_bytes": moments,
        }  # fmt: skip


class TestAverage:
    def test_is_the_mean_in_float64(self, tmp_path, out, weights):
        all_weights = [weights, random_checkpoint(CONFIG, seed=1), random_checkpoint(CONFIG, seed=2)]
        files = [write_torch_file(tmp_path / f"{i}.pt", corenet_state(one)) for i, one in enumerate(all_weights)]
        convert(files[0], out, average_with=files[1:], **SETTINGS)
        for name, tensor in read_folder(out).items():
            mean = np.mean([one[name].astype(np.float64) for one in all_weights], axis=0).astype(np.float32)
            assert np.array_equal(tensor.read(), mean), name

    def test_of_bfloat16_is_rounded_to_even(self, tmp_path, out, weights):
        bits = {name: (value.view(np.uint32) >> 16).astype(np.uint16) for name, value in corenet_state(weights).items()}
        files = [write_torch_file(tmp_path / f"{i}.pt", {n: BFloat16(b + i) for n, b in bits.items()}) for i in (0, 1)]
        convert(files[0], out, tokenizer=str(TOKENIZER), average_with=files[1:])
        for name, tensor in read_folder(out).items():
            own = bits[name.removeprefix("transformer.")][: tensor.num_rows]
            assert np.array_equal(tensor.read(), own + (own & 1)), name  # halfway between two neighbours

    @pytest.mark.parametrize("other", ["size", "dtype", "adapter"])
    def test_unlike_files(self, capsys, tmp_path, out, weights, other):
        others = {
            "size": corenet_state(random_checkpoint(small_config(vocab_size=4096))),
            "dtype": {name: value.astype(np.float16) for name, value in corenet_state(weights).items()},
            "adapter": adapter_state(weights, rank=2),
        }
        one = write_torch_file(tmp_path / "one.pt", corenet_state(weights))
        two = write_torch_file(tmp_path / "two.pt", others[other])
        line = refused(capsys, out, one, two, "--average")
        assert ("holds an adapter" if other == "adapter" else "not checkpoints of one training") in line

    def test_asks_for_two(self, capsys, tmp_path, out, weights):
        one = write_torch_file(tmp_path / "one.pt", corenet_state(weights))
        assert "two checkpoints or more" in refused(capsys, out, one, "--average")
        assert "two checkpoints or more" in refused(capsys, out, one, one)


KINDS = {
    "LoRA": {"rank": 4},
    "LoRA without the embedding": {"rank": 4, "embedding": False},
    "DoRA with a LoRA embedding": {"rank": 4, "dora": True},
    "DoRA": {"rank": 4, "dora": True, "embedding": False},
}

SPOILT = {
    "a part is missing": (lambda s: {n: v for n, v in s.items() if "0.ffn.proj_1.lora_B" not in n}, "lacks lora_B"),
    "another size": (
        lambda s: s | {"layers.0.ffn.proj_2.lora_A.lora.weight": np.zeros((4, 8), np.float32)}, "expected floats",
    ),
    "two ranks": (
        lambda s: s | {"layers.0.attn.out_proj.lora_A.lora.weight": np.zeros((2, 64), np.float32)}, "out_proj.lora_B",
    ),
    "two adapters": (
        lambda s: s | {"layers.0.attn.out_proj.lora_A.mine.weight": np.zeros((4, 64), np.float32)}, "2 adapters",
    ),
    "no base": (lambda s: {n: v for n, v in s.items() if "base_layer" not in n}, "no matrix"),
}  # fmt: skip


class TestAdapters:
    """Apple's alpha is 32, so rank 4 has a factor of 8."""

    @pytest.mark.parametrize("kind", KINDS)
    def test_fused_and_split_compute_the_formula(self, tmp_path, out, weights, kind):
        state = adapter_state(weights, **KINDS[kind])
        source = write_torch_file(tmp_path / "c.pt", state)
        formula = expected(merged(state, 8, 4096))
        convert(source, out, fuse=True, **SETTINGS)
        assert np.abs(logits(out) - formula).max() < 1e-4
        assert ("lm_head.weight" in read_folder(out)) is KINDS[kind].get("embedding", True)
        base, adapter = tmp_path / "base", tmp_path / "adapter"
        convert(source, base, adapter_path=adapter, **SETTINGS)
        assert np.abs(logits(base, adapter) - formula).max() < 1e-4
        assert all(np.array_equal(tensor.read(), weights[name]) for name, tensor in read_folder(base).items())
        assert any("input_lora_a" in name for name in read_header(adapter / "adapters.safetensors")) is KINDS[kind].get(
            "embedding", True
        )

    def test_a_tied_merge_is_exact_but_for_the_embedding(self, tmp_path, out, weights):
        state = adapter_state(weights, rank=4, dora=True)
        summary = convert(write_torch_file(tmp_path / "c.pt", state), out, fuse=True, tie=True, **SETTINGS)
        tied = merged(state, 8, 4096, tie=True)
        assert np.abs(logits(out) - expected(tied)).max() < 1e-4
        (note,) = summary.notes
        assert "logits differ by up to" in note
        assert np.array_equal(read_folder(out)[EMBEDDING].read(), weights[EMBEDDING])

    @pytest.mark.parametrize(("rslora", "scale"), [(False, 3.0), (True, 6.0)])
    def test_the_factor_of_the_yaml(self, tmp_path, out, weights, rslora, scale):
        state = adapter_state(weights, rank=4)
        yaml = lora_yaml(tmp_path / "lora.yaml", rank=4, alpha=12, rslora=rslora)
        convert(write_torch_file(tmp_path / "c.pt", state), out, fuse=True, config=yaml, **SETTINGS)
        assert np.abs(logits(out) - expected(merged(state, scale, 4096))).max() < 1e-4

    def test_the_output_says_who_loads_an_untied_model(self, capsys, tmp_path, out, weights):
        source = write_torch_file(tmp_path / "c.pt", adapter_state(weights, rank=4))
        assert main(["convert", str(source), "--fuse", "--tokenizer", str(TOKENIZER), "-o", str(out)]) == 0
        assert "mlx-swift and llama.cpp do not" in capsys.readouterr().out
        assert main(["info", "--json", str(out)]) == 0
        answers = json.loads(capsys.readouterr().out)["consumers"]
        assert {name: answer["loads"] for name, answer in answers.items()} == {
            "mlx-lm": True, "mlx-swift": False, "llama.cpp": False, "transformers": False,
        }  # fmt: skip

    @pytest.mark.parametrize("kind", ["lora", "dora"])
    def test_without_a_choice_the_three_are_named(self, capsys, tmp_path, out, weights, kind):
        source = write_torch_file(tmp_path / "model.safetensors", adapter_state(weights, rank=4, dora=kind == "dora"))
        line = refused(capsys, out, source)
        assert all(word in line for word in (kind[0].upper() + "oRA", "--fuse", "--tie", "--adapter-path"))
        assert main(["info", "--json", str(source)]) == 0
        adapter = json.loads(capsys.readouterr().out)["adapter"]
        assert (adapter["kind"], adapter["rank"], adapter["modules"]) == (kind, 4, 9)

    @pytest.mark.parametrize("fails", ["target exists", "base fails"])
    def test_split_writes_both_or_neither(self, tmp_path, out, weights, fails, monkeypatch):
        source = write_torch_file(tmp_path / "c.pt", adapter_state(weights, rank=4))
        adapter = tmp_path / "adapter"
        if fails == "target exists":
            adapter.mkdir()
        else:
            monkeypatch.setattr("openelm_mlx.convert.job.check_copy", _fail)
        with pytest.raises(OutputError):
            convert(source, out, adapter_path=adapter, **SETTINGS)
        assert not out.exists()
        assert not adapter.exists() or not any(adapter.iterdir())

    def test_split_between_the_two_names_is_taken_back(self, tmp_path, out, weights, monkeypatch):
        source = write_torch_file(tmp_path / "c.pt", adapter_state(weights, rank=4))
        install = atomic._install

        def fails_for_the_base(new, target, old):
            if target == out:
                raise KeyboardInterrupt
            install(new, target, old)

        monkeypatch.setattr(atomic, "_install", fails_for_the_base)
        before = sorted(tmp_path.rglob("*"))
        with pytest.raises(KeyboardInterrupt):
            convert(source, out, adapter_path=tmp_path / "adapter", **SETTINGS)
        assert sorted(tmp_path.rglob("*")) == before

    def test_what_cannot_be_written_is_told_before_gptq_calibrates(self, tmp_path, out, weights, monkeypatch):
        source = write_torch_file(tmp_path / "c.pt", adapter_state(weights, rank=4))
        settings = SETTINGS | {"quantize": True, "method": "gptq", "q_group_size": 32}
        monkeypatch.setattr("openelm_mlx.convert.gptq.calibrated", _fail)
        (tmp_path / "taken").touch()
        with pytest.raises(OutputError, match="taken is a file"):
            convert(source, out, adapter_path=tmp_path / "taken", **settings)
        usage = namedtuple("usage", "total used free")
        monkeypatch.setattr("shutil.disk_usage", lambda path: usage(0, 0, 10_000))
        with pytest.raises(OutputError, match="make room"):
            convert(source, out, fuse=True, **settings)

    @pytest.mark.parametrize("place", [".", "inside"])
    def test_the_adapter_needs_a_place_of_its_own(self, tmp_path, out, weights, place):
        source = write_torch_file(tmp_path / "c.pt", adapter_state(weights, rank=4))
        with pytest.raises(OutputError, match="choose another place"):
            convert(source, out, adapter_path=out / place, **SETTINGS)
        assert not out.exists()

    @pytest.mark.parametrize("spoil", SPOILT)
    def test_half_an_adapter(self, capsys, tmp_path, out, weights, spoil):  # fault G1
        change, words = SPOILT[spoil]
        source = write_torch_file(tmp_path / "c.pt", change(adapter_state(weights, rank=4)))
        assert words in refused(capsys, out, source, "--fuse")

    @pytest.mark.parametrize(
        ("arguments", "words"),
        [
            (["--fuse", "--adapter-path", "a"], "choose one"),
            (["--tie"], "add --fuse"),
            (["--fuse"], "holds no adapter"),
            (["--adapter-path", "a"], "holds no adapter"),
            (["-d"], "not quantized"),
        ],
    )
    def test_choices_without_sense(self, capsys, tmp_path, out, weights, arguments, words):
        plain = write_torch_file(tmp_path / "c.pt", corenet_state(weights))
        assert words in refused(capsys, out, plain, *arguments)

    @pytest.mark.parametrize(("rank", "name", "words"), [(8, "small", "its own training"), (4, "270M", "does not fit")])
    def test_the_yaml_of_another_training(self, capsys, tmp_path, out, weights, rank, name, words):
        source = write_torch_file(tmp_path / "c.pt", adapter_state(weights, rank=4))
        yaml = lora_yaml(tmp_path / "x.yaml", rank=rank, alpha=32, name=f"OpenELM-{name}")
        assert words in refused(capsys, out, source, "--fuse", "--config", yaml)


def _fail(*_: object) -> None:
    raise OutputError("the disk is full")


class TestAppleMlx:
    def test_the_packing_of_mlx_0_10(self):
        matrix = np.random.default_rng(0).standard_normal((8, 128)).astype(np.float32)
        parts = packed_4bit(matrix)
        words = parts[0]
        assert words.dtype == np.uint32
        assert words[0, 0] & 15 == round((matrix[0, 0] - float(parts[2][0, 0])) / float(parts[1][0, 0]))
        by_mlx = mx.dequantize(*map(mx.array, parts), group_size=64, bits=4, dtype=mx.float32)
        assert np.abs(np.array(by_mlx) - unpacked_4bit(*parts)).max() < 2e-3  # MLX computes with 16-bit scales

    def test_sixteen_bits_stay_byte_for_byte(self, tmp_path, out, weights):
        meant = apple_mlx(tmp_path / "apple", weights)
        summary = convert(tmp_path / "apple", out, tokenizer=str(TOKENIZER))
        assert summary.dtype == "float16"
        assert all(np.array_equal(tensor.read(), meant[name]) for name, tensor in read_folder(out).items())
        assert np.abs(logits(out) - expected(meant)).max() < 1e-4

    def test_packed_weights_stay_byte_for_byte(self, tmp_path, out, weights):
        meant = apple_mlx(tmp_path / "apple", weights, packed=True)
        convert(tmp_path / "apple", out, tokenizer=str(TOKENIZER))
        before, after = read_header(tmp_path / "apple" / "weights.safetensors"), read_folder(out)
        assert after.keys() == {f"transformer.{name}" for name in before}
        for name, tensor in after.items():
            rows = before[name.removeprefix("transformer.")].read_rows(0, tensor.num_rows)
            assert np.array_equal(tensor.read(), rows.reshape(tensor.shape)), name
        raw = json.loads((out / "config.json").read_text())
        assert raw["quantization"]["transformer.token_embeddings"] is False
        assert np.abs(logits(out) - expected(meant)).max() < 2e-4

    @pytest.mark.parametrize(("options", "dtype"), [({}, "float16"), ({"dtype": "float32"}, "float32")])
    def test_unpacked_on_request(self, tmp_path, out, weights, options, dtype):
        meant = apple_mlx(tmp_path / "apple", weights, packed=True)
        summary = convert(tmp_path / "apple", out, tokenizer=str(TOKENIZER), dequantize=True, **options)
        assert (summary.dtype, summary.quantization) == (dtype, None)
        assert np.abs(logits(out) - expected(meant)).max() < (5e-3 if dtype == "float16" else 1e-4)

    @pytest.mark.parametrize("options", [{"quantize": True}, {"dtype": "bfloat16"}])
    def test_packed_again_only_when_unpacked_first(self, tmp_path, out, weights, options):  # fault C10
        meant = apple_mlx(tmp_path / "apple", weights, packed=True)
        with pytest.raises(CheckpointError, match="already quantized .*--dequantize"):
            convert(tmp_path / "apple", out, tokenizer=str(TOKENIZER), **options)
        convert(tmp_path / "apple", out, tokenizer=str(TOKENIZER), dequantize=True, quantize=True, q_bits=8)
        assert np.abs(logits(out) - expected(meant)).max() < 0.2

    def test_the_file_alone_knows_its_config(self, tmp_path, out, weights):
        meant = apple_mlx(tmp_path / "apple", weights, packed=True)
        convert(tmp_path / "apple" / "weights.safetensors", out, tokenizer=str(TOKENIZER))
        assert np.abs(logits(out) - expected(meant)).max() < 2e-4

    def test_a_published_name_must_fit_its_tensors(self, capsys, tmp_path, out, weights):
        apple_mlx(tmp_path / "apple", weights, name="OpenELM-270M")
        assert "does not fit its config" in refused(capsys, out, tmp_path / "apple")

    def test_packed_weights_that_the_config_does_not_mention(self, capsys, tmp_path, out, weights):
        apple_mlx(tmp_path / "apple", weights, packed=True, name="OpenELM-270M")
        (tmp_path / "apple" / "config.json").write_text('{"model_name": "OpenELM-270M"}')
        assert "quantized, config.json does not say so" in refused(capsys, out, tmp_path / "apple")

    def test_loading_one_says_to_convert(self, capsys, tmp_path, weights):
        apple_mlx(tmp_path / "apple", weights)
        assert main(["generate", "--model", str(tmp_path / "apple"), "--prompt", "x"]) == 2
        assert "convert" in capsys.readouterr().err


class TestSpoilt:
    """Cut short, under another name, mixed up: one line, and nothing is written."""

    @pytest.mark.parametrize("kind", ["training", "lora", "apple"])
    @pytest.mark.parametrize("kept", [0, 100, 0.5, 0.999])
    def test_cut_short(self, capsys, tmp_path, out, weights, kind, kept):
        if kind == "apple":
            apple_mlx(tmp_path / "apple", weights, packed=True)
            file = source = tmp_path / "apple" / "weights.safetensors"
        else:
            state = corenet_state(weights)
            content = training_checkpoint(state) if kind == "training" else adapter_state(weights, rank=2)
            file = source = write_torch_file(tmp_path / "c.pt", content)
        data = file.read_bytes()
        file.write_bytes(data[: int(kept * len(data)) if kept < 1 else kept])
        assert "openelm: error: " in refused(capsys, out, source, "--fuse")

    @pytest.mark.parametrize("name", ["model.safetensors", "weights.npz", "training_logs.txt", "noext"])
    def test_a_name_decides_nothing(self, tmp_path, out, weights, name):
        source = write_torch_file(tmp_path / name, training_checkpoint(corenet_state(weights)))
        assert convert(source, out, **SETTINGS).parameters == sum(value.size for value in weights.values())

    def test_the_yaml_of_another_model(self, capsys, tmp_path, out, weights):
        source = write_torch_file(tmp_path / "c.pt", training_checkpoint(corenet_state(weights)))
        yaml = write_corenet_yaml(tmp_path / "x.yaml")
        yaml.write_text(yaml.read_text().replace("tiny", "OpenELM-450M"))
        assert "does not fit its config" in refused(capsys, out, source, "--config", yaml)

    def test_the_padding_is_the_only_row_that_goes(self, tmp_path, out, weights):
        source = write_torch_file(tmp_path / "c.pt", adapter_state(weights, rank=2))
        convert(source, out, fuse=True, keep_vocab_padding=True, **SETTINGS)
        assert read_folder(out)["lm_head.weight"].shape == (4096 + PADDING, CONFIG["model_dim"])

    def test_an_unknown_option_of_the_library(self, out):
        with pytest.raises(ConfigError, match="choose one"):
            convert("tiny", out, fuse=True, adapter_path="a")
