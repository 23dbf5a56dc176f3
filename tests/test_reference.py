"""The reference against numbers made by Apple's own PyTorch code: only then may it judge anything else."""

import json
from pathlib import Path

import numpy as np
import pytest
from reference import (
    layer_widths,
    parameter_shapes,
    random_checkpoint,
    read_safetensors,
    reference_logits,
    small_config,
)

TINY = Path(__file__).parents[1] / "openelm_mlx" / "data" / "tiny"

UNUSUAL = {  # the shapes that apple/corenet's model code can make besides the published ones
    "multi-head": {"num_gqa_groups": 1},
    "multi-query": {"num_query_heads": [2, 4, 4, 6], "num_kv_heads": [1, 1, 1, 1]},
    "grouped, uneven": {"num_query_heads": [2, 4, 4, 6], "num_kv_heads": [1, 2, 2, 3]},
    "one number for all layers": {"qkv_multipliers": 1.0, "ffn_multipliers": 1.5},
    "untied": {"share_input_output_layers": False},
    "no gate": {"ffn_with_glu": False},
    "no q/k norm": {"normalize_qk_projections": False},
}


@pytest.fixture(scope="module")
def tiny():
    return read_safetensors(TINY / "model.safetensors"), json.loads((TINY / "config.json").read_text())


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
@pytest.mark.parametrize("prompt", [0, 1])
def test_logits_are_those_of_the_released_model_code(tiny, golden, prompt, dtype):
    logits = reference_logits(*tiny, golden[f"ids_{prompt}"], dtype)
    np.testing.assert_allclose(logits, golden[f"logits_{prompt}"], rtol=0, atol=1e-4)


@pytest.mark.parametrize("prompt", [0, 1])
def test_greedy_continuation_is_that_of_the_released_model_code(tiny, golden, prompt):
    ids, continuation = golden[f"ids_{prompt}"], golden[f"greedy_{prompt}"]
    logits = reference_logits(*tiny, [*ids, *continuation[:-1]], np.float32)
    assert logits[len(ids) - 1 :].argmax(axis=-1).tolist() == continuation.tolist()


@pytest.mark.parametrize("changes", UNUSUAL.values(), ids=UNUSUAL.keys())
def test_every_shape_of_model_is_causal_and_knows_positions(changes):
    # fault A7
    config = small_config(**changes)
    weights = random_checkpoint(config, seed=1)
    ids = [1, 5, 6, 7, 8]
    logits = reference_logits(weights, config, ids)
    assert logits.shape == (5, config["vocab_size"])
    assert np.isfinite(logits).all()
    np.testing.assert_allclose(reference_logits(weights, config, ids[:3]), logits[:3], atol=1e-12)
    swapped = reference_logits(weights, config, [1, 6, 5, 7, 8])
    assert np.abs(swapped[-1] - logits[-1]).max() > 1e-3


def test_equal_kv_heads_make_grouped_attention_equal_multi_head():
    """Writing every shared key/value head out once for each query head changes nothing."""
    grouped = small_config(num_query_heads=[4] * 4, num_kv_heads=[2] * 4)
    weights = random_checkpoint(grouped)
    plain = grouped | {"num_kv_heads": [4] * 4}
    written_out = dict(weights)
    for i in range(4):
        name = f"transformer.layers.{i}.attn.qkv_proj.weight"
        q, k, v = np.split(weights[name].reshape(8, 32, 128), [4, 6])
        rows = np.concatenate([q, np.repeat(k, 2, axis=0), np.repeat(v, 2, axis=0)])
        written_out[name] = rows.reshape(-1, 128)
    ids = [1, 9, 8, 7]
    np.testing.assert_allclose(
        reference_logits(written_out, plain, ids), reference_logits(weights, grouped, ids), atol=1e-12
    )


def test_random_checkpoint_is_a_whole_model_and_repeats():
    config = small_config(share_input_output_layers=False)
    first, second, other = (random_checkpoint(config, seed) for seed in (3, 3, 4))
    assert {name: value.shape for name, value in first.items()} == parameter_shapes(config)
    assert all(np.array_equal(first[name], second[name]) for name in first)
    assert not np.array_equal(first["lm_head.weight"], other["lm_head.weight"])
    assert {value.dtype for value in first.values()} == {np.dtype("float32")}


def test_small_config_has_uneven_layers_that_every_group_size_divides():
    widths = layer_widths(small_config())
    assert widths == [(2, 1, 64), (4, 2, 128), (4, 2, 192), (4, 2, 256)]
    assert all(shape[-1] % 64 == 0 for shape in parameter_shapes(small_config()).values() if len(shape) == 2)
