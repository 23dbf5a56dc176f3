"""The comparison with mlx-lm: its arithmetic, its page, and that both sides really do the same work."""

import pytest

from openelm_mlx.benchmarks.comparison import Comparison, take_turns, write_block, write_json
from openelm_mlx.benchmarks.vs_mlx_lm import DECODE_NODES, describe
from openelm_mlx.config import OpenELMConfig

SPEED = Comparison("a job", "ms", ours=(10.0, 20.0, 12.0), theirs=(30.0, 22.0, 24.0), target=2.0)
SHARE = Comparison("a count", "nodes", ours=(70,), theirs=(100,), target=0.7, is_share=True)


def test_ratios_are_of_medians_and_above_one_when_we_are_faster():
    assert SPEED.ratio == pytest.approx(2.0)
    assert SPEED.ratio_range == pytest.approx((1.1, 3.0))
    assert SPEED.passed
    assert not Comparison("a job", "ms", (10.0,), (19.9,), 2.0).passed


def test_a_share_is_reached_from_below():
    assert SHARE.ratio == pytest.approx(0.7)
    assert SHARE.passed
    assert not Comparison("a count", "nodes", (71,), (100,), 0.7, is_share=True).passed


def test_both_warm_up_and_then_take_turns_at_going_first():
    ran = []
    figures = take_turns(lambda: ran.append("a") or 1.0, lambda: ran.append("b") or 2.0, 3)
    assert "".join(ran) == "ab" + "ab" + "ba" + "ab"
    assert figures == ((1.0,) * 3, (2.0,) * 3)


def test_the_page_gets_the_table_between_its_marks_and_keeps_the_rest(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- x -->\nold\n<!-- /x -->\nafter\n")
    for _ in range(2):  # a second time replaces the first
        write_block(page, "x", [SPEED, SHARE], "a machine")
    text = page.read_text()
    assert text.startswith("before\n<!-- x -->\na machine, 2")
    assert text.endswith("\n<!-- /x -->\nafter\n")
    assert text.count("| a job | 12 ms | 24 ms | 2.00x (1.10-3.00) | >= 2.00x | yes |") == 1
    assert text.count("| a count | 70 nodes | 100 nodes | 0.70x | <= 0.70x | yes |") == 1


def test_the_json_has_every_figure_and_the_verdict(tmp_path):
    import json

    write_json(tmp_path / "out.json", [SPEED], {"chip": "a chip"})
    record = json.loads((tmp_path / "out.json").read_text())
    assert record["machine"] == {"chip": "a chip"}
    assert record["comparisons"][0]["ours"] == [10.0, 20.0, 12.0]
    assert record["comparisons"][0]["passed"] is True


@pytest.fixture(scope="module")
def small() -> OpenELMConfig:
    """Four layers of uneven width, with room for the bundled tokenizer and more."""
    return OpenELMConfig.from_name("270M", model_dim=128, num_transformer_layers=4, vocab_size=5000)


@pytest.mark.needs_mlx_lm
def test_both_sides_load_a_random_folder_and_agree(small, tmp_path):
    import mlx.core as mx

    from openelm_mlx.benchmarks.random_checkpoint import write_random_folder
    from openelm_mlx.benchmarks.side_by_side import Pair, decode, decode_nodes, first_token

    write_random_folder(tmp_path / "fp32", small, mx.float32)
    pair = Pair.load(tmp_path / "fp32", same_tokens=True)
    assert len(decode("decode", pair, 1.0, trials=1).ours) == 1  # raises when the tokens differ
    assert first_token("first token", pair, 20, 1.0, trials=2).ratio > 0
    for decoder, target in DECODE_NODES.items():  # the claim about a decode step's graph, whatever the size
        assert decode_nodes("nodes", pair, target, decoder).passed


@pytest.mark.needs_mlx_lm
def test_both_sides_load_a_random_quantised_folder(small, tmp_path):
    import mlx.core as mx

    from openelm_mlx.benchmarks.random_checkpoint import write_random_folder
    from openelm_mlx.benchmarks.side_by_side import Pair, first_token

    write_random_folder(tmp_path / "q4", small, mx.bfloat16, bits=4)
    assert first_token("first token", Pair.load(tmp_path / "q4"), 20, 1.0, trials=1).ratio > 0


@pytest.mark.needs_mlx_lm
def test_the_machine_is_described_without_what_identifies_it(monkeypatch):
    record = {
        "blas_preloaded": True,
        "chip": "X",
        "machine": "x86_64",
        "mlx": "0.32.4",
        "backend": "cpu",
        "cpu_cores": 2,
    }
    monkeypatch.delenv("OPENBLAS_CORETYPE", raising=False)
    line = describe(record)
    assert "2 cores, MLX 0.32.4 cpu backend, mlx-lm 0." in line
    assert line.endswith(", OpenBLAS")
    monkeypatch.setenv("OPENBLAS_CORETYPE", "Haswell")
    assert describe(record).endswith(", OpenBLAS with Haswell kernels")
