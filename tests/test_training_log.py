"""openelm info on CoreNet's training_logs.txt: numbers, restarts, damage, and the plot."""

import json
import sys
from pathlib import Path

import pytest

from openelm_mlx.cli import main

BLUE, END = "\x1b[34m\x1b[1m", "\x1b[0m"


def line(iteration: int, loss: object, elapsed: float, *, epoch: int = 0, rate: object = "[0.001, 0.001]") -> str:
    return (
        f"2024-03-01 00:{iteration % 60:02}:00 - {BLUE}LOGS   {END} - Epoch: {epoch:3d} [{iteration:8d}/     100], "
        f"loss: {loss}, LR: {rate}, Avg. batch load time: 0.000, Elapsed time: {elapsed:5.2f}"
    )


LINES = [
    "2024-03-01 00:00:00 - DEBUG    - Cannot load internal arguments, skipping.",
    "OpenELM(\n  (layers): ...\n)",
    line(0, "{'total_loss': 9.5}", 1, rate="1e-06"),
    line(10, "{'z_loss': 0.1, 'total_loss': 4.25}", 20),
    line(20, "{'total_loss': 3.5}", 40, rate="[0.0005]"),
    f"2024-03-01 00:21:00 - {BLUE}LOGS   {END} - *** Training summary for epoch 0",
    "\t loss={'total_loss': 3.4}",
    f"2024-03-01 00:22:00 - {BLUE}LOGS   {END} - *** Validation summary for epoch 0",
    "\t loss={'total_loss': 3.75} || perplexity=42.5",
    line(15, 3.625, 5, epoch=1, rate="[0.0002]"),
    line(30, "nan", 25, epoch=1, rate="[0.0001]"),
]


@pytest.fixture
def log(tmp_path) -> Path:
    path = tmp_path / "whatever.safetensors"
    path.write_text("\n".join(LINES) + "\n")
    return path


def test_the_summary(capsys, log):
    assert main(["info", "--json", str(log)]) == 0
    assert json.loads(capsys.readouterr().out) == {
        "format": "corenet-log", "iterations": 30, "planned_iterations": 100, "epochs": 2, "points": 5, "restarts": 1,
        "first_loss": 9.5, "last_loss": None, "best_loss": 3.5, "best_iteration": 20, "not_finite": 1,
        "max_learning_rate": 0.001, "last_learning_rate": 0.0001, "validation": [{"epoch": 0, "loss": 3.75}],
        "seconds": 65.0, "started": "2024-03-01 00:00:00", "ended": "2024-03-01 00:30:00",
    }  # fmt: skip
    assert main(["info", str(log)]) == 0
    printed = capsys.readouterr().out
    assert "best 3.5000 at iteration 20; 1 not finite" in printed
    assert "validation after epoch 0: loss 3.7500" in printed


def test_the_plot(capsys, log, tmp_path):
    pytest.importorskip("matplotlib")
    assert main(["info", str(log), "--plot", str(tmp_path / "f.png")]) == 0
    assert (tmp_path / "f.png").read_bytes().startswith(b"\x89PNG")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["f.png", log.name]


@pytest.mark.parametrize(
    ("source", "plot", "words"),
    [
        ("log", "f.nonsense", "expected a name that ends in"),
        ("log", "missing/f.png", "is no folder"),
        ("tiny", "f.png", "is for training logs"),
    ],
)
def test_plots_that_are_refused(capsys, log, tmp_path, source, plot, words):
    pytest.importorskip("matplotlib")
    assert main(["info", str(log) if source == "log" else source, "--plot", str(tmp_path / plot)]) == 2
    assert words in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == [log.name]


def test_without_matplotlib_the_extra_is_named(capsys, log, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert main(["info", str(log), "--plot", str(tmp_path / "f.png")]) == 2
    assert "pip install 'openelm-mlx[plot]'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("\n".join(LINES[:2]), "without a line of training"),
        (line(1, "1.2.3", 1), "without a line of training"),
        (line(1, "{'total_loss': 3.5}", 1)[:70], "without a line of training"),
        ("just a text\n", "is no checkpoint"),
    ],
)
def test_a_log_without_training(capsys, tmp_path, content, words):
    path = tmp_path / "training_logs.txt"
    path.write_text(content)
    assert main(["info", str(path)]) == 2
    printed = capsys.readouterr()
    assert words in printed.err
    assert (printed.out, printed.err.count("\n")) == ("", 1)
