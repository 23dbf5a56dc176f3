"""The comparison of conversions: children are timed and watched, rows hold their promises, sources stream to disk."""

import sys

import numpy as np
import pytest

from openelm_mlx.benchmarks.child_run import Run, run_in_child
from openelm_mlx.benchmarks.conversion import PROMISES, Alone, compare, in_turn
from openelm_mlx.benchmarks.random_checkpoint import write_random_shards
from openelm_mlx.config import OpenELMConfig
from openelm_mlx.convert import convert
from openelm_mlx.errors import RunFailedError
from openelm_mlx.safetensors_file import read_folder


def test_a_child_is_timed_without_its_imports_and_its_memory_is_seen():
    work = "data = b'x' * int(sys.argv[1]); time.sleep(0.05)"
    run = run_in_child("time.sleep(0.2)", work, [50_000_000])
    assert 0.05 <= run.seconds < run.process_s - 0.2
    if sys.platform == "linux":
        assert 50e6 < run.peak_bytes < 120e6


def test_a_child_that_fails_is_told():
    with pytest.raises(RunFailedError, match="ZeroDivisionError"):
        run_in_child("", "1 / 0", [])


def test_both_take_turns_after_a_warm_up():
    ran = []
    sides = [lambda side=side: ran.append(side) or Run(len(ran), 0, None) for side in "ab"]
    ours, theirs = in_turn(*sides, 2)
    assert "".join(ran) == "baabba"
    assert [run.seconds for run in ours] == [3, 6]
    assert [run.seconds for run in theirs] == [4, 5]


def test_the_rows_of_a_promise():
    ours, theirs = [Run(1.0, 1.2, 70_000_000)], [Run(4.0, 6.0, 900_000_000)]
    copy, bf16 = PROMISES[0], PROMISES[1]
    speed, command, memory = compare(copy, ours, theirs, 10_000_000)
    assert (speed.ratio, command.ratio) == (pytest.approx(4.0), pytest.approx(5.0))
    assert isinstance(memory, Alone)
    assert memory.passed
    assert not list(compare(copy, [Run(1.0, 1.2, 75_000_000)], theirs, 10_000_000))[2].passed
    assert list(compare(bf16, ours, theirs, 10_000_000))[2].ratio == pytest.approx(60 / 890)
    assert len(list(compare(bf16, [Run(1.0, 1.2, None)], theirs, None))) == 2


def test_random_shards_are_a_model(tmp_path):
    config = OpenELMConfig.from_name("270M", model_dim=128, num_transformer_layers=2, vocab_size=5000)
    write_random_shards(tmp_path / "source", config, "float32")
    written = read_folder(tmp_path / "source")
    assert {name: tensor.shape for name, tensor in written.items()} == config.parameter_shapes()
    assert np.std(written["transformer.token_embeddings.weight"].read()) == pytest.approx(128**-0.5, rel=0.05)
    assert convert(tmp_path / "source", tmp_path / "out", quantize=True).parameters == config.num_parameters()
