"""The script that holds the tenth turn of a chat against the first."""

import json

import pytest

from openelm_mlx.benchmarks import chat_turns
from openelm_mlx.errors import RunFailedError


@pytest.mark.parametrize(("last", "ratio", "status"), [(0.11, "1.10", 0), (0.13, "1.30", 1)])
def test_it_says_whether_the_limit_holds(monkeypatch, capsys, tmp_path, last, ratio, status):
    monkeypatch.setattr(chat_turns, "one_chat", lambda *_: [0.1] * 9 + [last])
    monkeypatch.setattr(chat_turns, "whole_again", lambda *_: 0.5)
    report = tmp_path / "turns.json"
    assert chat_turns.main(["--model", "tiny", "--trials", "2", "--json", str(report)]) == status
    assert f"turn 10 / turn 1: {ratio}, at most 1.2" in capsys.readouterr().out
    assert json.loads(report.read_text())["ttft_s"] == [[0.1] * 9 + [last]] * 2


def test_each_turn_is_timed_and_a_context_too_small_refused(monkeypatch):
    """Ten turns are too many for the bundled model, three are not."""
    with pytest.raises(RunFailedError, match="10 turns exceed the context of 256"):
        chat_turns.main(["--model", "tiny", "--trials", "1"])
    monkeypatch.setattr(chat_turns, "TURNS", 3)
    assert chat_turns.main(["--model", "tiny", "--trials", "1"]) in (0, 1)
