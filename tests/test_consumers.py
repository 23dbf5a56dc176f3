"""Who loads a folder: mlx-swift's widths computed as it does, and one reason for every refusal."""

import json
import shutil

import pytest
from artefacts import TINY, TOKENIZER, write_hub, write_hub_torch
from reference import random_checkpoint, small_config

from openelm_mlx.cli import main
from openelm_mlx.config import PUBLISHED_SIZES, OpenELMConfig
from openelm_mlx.convert import convert
from openelm_mlx.convert.swift_widths import swift_agrees, swift_widths


class TestSwiftWidths:
    @pytest.mark.parametrize("size", PUBLISHED_SIZES)
    def test_the_published_sizes_come_out_the_same(self, size):
        config = OpenELMConfig.from_name(size)
        own = list(zip(config.num_query_heads, config.num_kv_heads, config.ffn_dims, strict=True))
        assert swift_widths(config) == own

    @pytest.mark.parametrize(
        "changes",
        [
            {"num_query_heads": [8, 8, 8, 8], "num_kv_heads": [2, 2, 2, 2]},
            {"ffn_multipliers": [1.0, 2.0]},
            {"num_gqa_groups": 2},
            {"num_transformer_layers": 1, "qkv_multipliers": 1.0, "ffn_multipliers": 4.0, "num_gqa_groups": 4},
        ],
    )
    def test_other_widths_do_not(self, changes):
        published = {"ffn_multipliers": [0.5, 4.0], "num_gqa_groups": 4, "model_dim": 256}
        assert swift_agrees(OpenELMConfig.from_dict(small_config(**published)))
        assert not swift_agrees(OpenELMConfig.from_dict(small_config(**published | changes)))


def answers(capsys, folder) -> dict[str, str | None]:
    """Consumer -> why it does not load the folder, None where it does."""
    assert main(["info", "--json", str(folder)]) == 0
    found = json.loads(capsys.readouterr().out)["consumers"]
    assert all(answer["loads"] is (answer["why_not"] is None) for answer in found.values())
    return {name: answer["why_not"] for name, answer in found.items()}


def test_a_converted_folder(capsys, tmp_path):
    convert("tiny", tmp_path / "plain")
    assert [why is None for why in answers(capsys, tmp_path / "plain").values()] == [True, True, True, False]
    convert("tiny", tmp_path / "packed", quantize=True, q_mode="mxfp4")
    found = answers(capsys, tmp_path / "packed")
    assert found["mlx-lm"] is None
    assert "other than affine" in found["mlx-swift"]
    assert "--dequantize" in found["llama.cpp"]


@pytest.mark.parametrize(
    ("changes", "refusing"),
    [
        ({"share_input_output_layers": False}, {"mlx-swift", "llama.cpp"}),
        ({"ffn_with_glu": False}, {"mlx-swift", "llama.cpp"}),
        ({"rope_freq_constant": 20000}, {"mlx-swift", "llama.cpp"}),
        ({"num_gqa_groups": 2}, {"mlx-swift"}),
    ],
)
def test_what_a_program_does_not_read(capsys, tmp_path, changes, refusing):
    published = {"ffn_multipliers": [0.5, 4.0], "num_gqa_groups": 4, "model_dim": 256, "num_transformer_layers": 2}
    config = small_config(vocab_size=4096, **published | changes)
    convert(write_hub(tmp_path / "hub", random_checkpoint(config), config), tmp_path / "out")
    found = answers(capsys, tmp_path / "out")
    assert {name for name, why in found.items() if why is not None} - {"transformers"} == refusing


def test_what_is_missing_beside_the_weights(capsys, tmp_path):
    config = small_config(vocab_size=4096)
    folder = write_hub_torch(tmp_path / "hub", random_checkpoint(config), config)
    assert "pytorch_model.bin" in answers(capsys, folder)["mlx-lm"]
    shutil.copytree(TINY, tmp_path / "tiny")
    (tmp_path / "tiny" / TOKENIZER.name).unlink()
    assert all("token" in why for name, why in answers(capsys, tmp_path / "tiny").items() if name != "transformers")
    raw = json.loads((TINY / "config.json").read_text())
    raw["auto_map"] = {"AutoModelForCausalLM": "apple/OpenELM-270M--modeling_openelm.OpenELMForCausalLM"}
    shutil.copy(TOKENIZER, tmp_path / "tiny")
    (tmp_path / "tiny" / "config.json").write_text(json.dumps(raw))
    found = answers(capsys, tmp_path / "tiny")
    assert found["transformers"] is None
    assert "foreign code" in found["mlx-lm"]
