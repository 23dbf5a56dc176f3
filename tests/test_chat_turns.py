"""The script that holds the tenth turn of a chat against the first, on a model too small for ten."""

import json

import pytest

from openelm_mlx.benchmarks import chat_turns
from openelm_mlx.errors import RunFailedError


@pytest.mark.parametrize(("limit", "status"), [(1e6, 0), (0.0, 1)])
def test_it_says_whether_the_limit_holds(monkeypatch, capsys, tmp_path, limit, status):
    monkeypatch.setattr(chat_turns, "TURNS", 2)
    monkeypatch.setattr(chat_turns, "LIMIT", limit)
    report = tmp_path / "turns.json"
    assert chat_turns.main(["--model", "tiny", "--trials", "2", "--json", str(report)]) == status
    assert f"turn 2 / turn 1: {json.loads(report.read_text())['ratio']:.2f}" in capsys.readouterr().out
    assert [len(times) for times in json.loads(report.read_text())["ttft_s"]] == [2, 2]


def test_a_model_with_too_little_context_is_refused(tmp_path):
    with pytest.raises(RunFailedError, match="10 turns exceed the context of 256"):
        chat_turns.main(["--model", "tiny", "--trials", "1"])
