"""Several ranks train as one: the same losses and steps, one that writes, and none that waits for ever."""

import json
import os
import subprocess
import sys
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from reference import read_safetensors
from tuning import OneBatch, rows, write_small_folder

import openelm_mlx
from openelm_mlx.lora import parallel, watchdog
from openelm_mlx.lora.batches import Batch
from openelm_mlx.lora.log import read_log
from openelm_mlx.lora.state import Progress


class FakeGroup:
    def __init__(self, rank, size):
        self._rank, self._size = rank, size

    def rank(self):
        return self._rank

    def size(self):
        return self._size


def share_of(monkeypatch, rank: int, size: int, batch: Batch) -> Batch:
    monkeypatch.setattr(mx.distributed, "init", lambda: FakeGroup(rank, size))
    return parallel.share(batch)


def test_every_row_is_one_ranks_and_no_rank_is_idle(monkeypatch):
    # fault K2: 5 rows, 2 ranks; and more ranks than rows
    batch = OneBatch(rows([9, 5, 7, 8, 6])).batch(0)
    mine = [share_of(monkeypatch, rank, 2, batch) for rank in (0, 1)]
    assert [part.rows for part in mine] == [batch.rows[::2], batch.rows[1::2]]
    assert sum(part.counted.sum().item() for part in mine) == batch.counted.sum().item()
    idle = share_of(monkeypatch, 6, 7, batch)
    assert idle.tokens.shape == (1, 9)
    assert idle.counted.sum().item() == 0


def train(out: Path, folder: Path, data: Path, ranks: int) -> None:
    program = [sys.executable, "-m", "openelm_mlx"]
    if ranks > 1:
        launch = Path(sys.executable).parent / "mlx.launch"
        program = [str(launch), "--backend", "ring", "-n", str(ranks), "--", *program]
    flags = ["--model", folder, "--data", data, "--adapter-path", out, "--iters", 4, "--batch-size", 3,
             "--steps-per-report", 1, "--learning-rate", 1e-3, "--scale", 2, "--steps-per-eval", 2]  # fmt: skip
    env = os.environ | {"PYTHONPATH": str(Path(openelm_mlx.__file__).parents[1])}
    done = subprocess.run([*program, "lora", *map(str, flags)], env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (done.stdout + done.stderr).count("iteration 4/4") == 1  # one rank tells


@pytest.mark.skipif(not (Path(sys.executable).parent / "mlx.launch").exists(), reason="mlx.launch is not installed")
def test_two_ranks_are_one(tmp_path):
    # fault K3
    folder = write_small_folder(tmp_path / "model")
    data = tmp_path / "rows.jsonl"
    data.write_text("\n".join(json.dumps({"text": "and then " * n}) for n in (1, 7, 3, 9, 2, 5, 4)))
    for ranks in (1, 2):
        train(tmp_path / f"out{ranks}", folder, data, ranks)
    one, two = (read_log(tmp_path / f"out{ranks}") for ranks in (1, 2))
    for key in ("train_loss", "val_loss", "grad_norm", "trained_tokens"):
        figures = [[entry[key] for entry in log if key in entry] for log in (one, two)]
        assert figures[0] == pytest.approx(figures[1], rel=1e-4)
    weights = [read_safetensors(tmp_path / f"out{ranks}" / "adapters.safetensors") for ranks in (1, 2)]
    assert all(np.allclose(weights[0][name], weights[1][name], atol=1e-5) for name in weights[0])


class TestWatchdog:
    def test_tells_and_goes_on_alone(self, capsys):
        # fault F14
        with watchdog.Watchdog(Progress(iteration=7), patience_s=0.02) as dog:
            dog._done.wait(0.2)
        err = capsys.readouterr().err
        assert "rank 0 of 1: no step for 0 s, since iteration 7" in err
        assert "GB in use" in err

    def test_ends_a_rank_that_waits_for_another(self, capsys, monkeypatch):
        # fault K4
        ended = []
        monkeypatch.setattr(mx.distributed, "init", lambda: FakeGroup(1, 2))
        monkeypatch.setattr(watchdog.os, "_exit", ended.append)
        with watchdog.Watchdog(Progress(iteration=3), patience_s=0.02) as dog:
            dog._done.wait(0.1)
        assert set(ended) == {1}
        assert "rank 1 of 2: no step" in capsys.readouterr().err

    def test_is_silent_while_steps_are_made(self, capsys):
        with watchdog.Watchdog(Progress(), patience_s=30) as dog:
            dog.on_update(Progress())
            dog.on_val_loss_report({})
        assert capsys.readouterr().err == ""
