"""The command as a user meets it: what goes to which stream, one line for an error, and exit statuses."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from openelm_mlx import cli

TINY = str(Path(cli.__file__).parent / "data" / "tiny")
PROMPT = "Once upon a time there was a king who"


def openelm(capsys, *arguments):
    status = cli.main(list(arguments))
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def refused(capsys, *arguments):
    """Run a command that must fail: status 2, nothing on stdout, one line on stderr; return the line."""
    try:
        status = cli.main(list(arguments))
    except SystemExit as exit:
        status = exit.code
    captured = capsys.readouterr()
    assert (status, captured.out) == (2, "")
    lines = [line for line in captured.err.splitlines() if "no --model given" not in line]
    assert len(lines) == 1
    assert lines[0].startswith("openelm: error: ")
    return lines[0]


def test_generate_prints_the_text_and_nothing_else(capsys, golden):
    status, out, err = openelm(capsys, "generate", "--model", TINY, "--prompt", PROMPT, "-m", "12")
    assert status == 0
    assert out == openelm(capsys, "generate", "--model", "tiny", "--prompt", PROMPT, "--max-tokens", "12")[1]
    assert out.endswith("\n")
    assert "tokens/s" in err
    assert "stopped at 12 tokens; --max-tokens" in err  # fault D15


def test_generate_json(capsys, golden):
    status, out, _ = openelm(capsys, "generate", "--model", TINY, "--prompt", PROMPT, "-m", "40", "--json")
    record = json.loads(out)
    assert status == 0
    assert record["tokens"] == golden["greedy_0"].tolist()
    assert record["finish_reason"] == "length"
    assert record["prompt_tokens"] == len(golden["ids_0"])
    assert record["model"] == TINY
    assert set(record) == {
        "text", "tokens", "finish_reason", "prompt_tokens", "generation_tokens", "prompt_tps", "generation_tps",
        "ttft_s", "peak_memory_bytes", "model",
    }  # fmt: skip


def test_the_bundled_model_is_the_default_and_says_so(capsys):
    _, _, err = openelm(capsys, "generate", "-m", "2")
    assert "using the bundled 'tiny'" in err
    assert "--model apple/OpenELM-270M-Instruct" in err


def test_stop_strings_and_seed(capsys):
    settings = ("generate", "--model", TINY, "-p", PROMPT, "-m", "30", "--temp", "0.9", "--json")
    first, again, other = (
        json.loads(openelm(capsys, *settings, "--seed", seed)[1])["text"] for seed in ("1", "1", "2")
    )
    assert first == again != other
    word = first.split()[3]
    stopped = json.loads(openelm(capsys, *settings, "--seed", "1", "--stop", word)[1])
    assert stopped["text"] == first[: first.find(word)]
    assert stopped["finish_reason"] == "stop"


@pytest.mark.parametrize(("flags", "ids"), [([], "\\n"), (["--escape"], "\n")])
def test_backslashes_are_text_unless_asked(monkeypatch, capsys, flags, ids):  # fault D16
    seen = []
    monkeypatch.setattr("openelm_mlx.generate_command.prompt_ids", lambda _, text, __: seen.append(text) or [1, 5])
    openelm(capsys, "generate", "--model", TINY, "-m", "1", "-p", "a\\nb", *flags)
    assert seen == [f"a{ids}b"]


def test_a_prompt_from_stdin_is_taken_as_it_is(golden):  # fault D16
    text = 'first line\nsecond {"a": "x\\ny"}\n'
    done = subprocess.run(
        [sys.executable, "-m", "openelm_mlx", "generate", "--model", TINY, "-p", "-", "-m", "3", "--json"],
        input=text, capture_output=True, text=True, check=True,
    )  # fmt: skip
    from openelm_mlx.tokenizer import Tokenizer

    assert json.loads(done.stdout)["prompt_tokens"] == len(Tokenizer.from_path(Path(TINY)).encode(text))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["generate", "--model", "no-such-folder"], "no-such-folder"),
        (["generate", "--model", TINY, "--prompt", ""], "empty"),
        (["generate", "--model", TINY, "-p", "x", "-m", "300"], "context of 256"),
        (["generate", "--model", TINY, "-p", "x", "-m", "0"], "max_tokens"),
        (["generate", "--model", TINY, "-p", "x", "--temp", "-1"], "temp"),
        (["generate", "--model", TINY, "-p", "x", "--temp", "warm"], "--temp"),
        (["generate", "--model", TINY, "-p", "x", "--stop", ""], "stop string"),
        (["generate", "--model", TINY, "-p", "x", "--seed", "-3"], "seed"),
        (["generate", "--model", TINY, "--tokenizer", "nowhere/at/all"], "nowhere/at/all"),
        (["generate", "--nonsense"], "--nonsense"),
        (["flatter"], "flatter"),
    ],
)
def test_bad_input_is_one_line_and_status_2(capsys, arguments, words):
    assert words in refused(capsys, *arguments)


def test_no_command_prints_the_overview(capsys):
    status, out, _ = openelm(capsys)
    assert status == 0
    assert all(f"  {name} " in out for name in cli.COMMANDS)


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_every_command_has_help(capsys, name):
    with pytest.raises(SystemExit) as exit:
        cli.main([name, "--help"])
    assert exit.value.code == 0
    assert f"openelm {name}" in capsys.readouterr().out


def test_interrupt_is_130_without_a_traceback(capsys, monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "_run", interrupted)
    assert cli.main(["generate"]) == 130
    assert capsys.readouterr().err == "openelm: interrupted\n"


def test_a_reader_that_goes_away_is_no_error():
    command = f"{sys.executable} -m openelm_mlx generate --model {TINY} -m 200 | head -c 10"
    done = subprocess.run(
        ["bash", "-c", command], capture_output=True, text=True, env={**os.environ, "LC_ALL": "C.UTF-8"}
    )
    assert len(done.stdout) == 10
    assert "Traceback" not in done.stderr
    assert "BrokenPipe" not in done.stderr


def shell(command: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        ["bash", "-c", command.replace("openelm", f"{sys.executable} -m openelm_mlx", 1)],
        capture_output=True,
        text=True,
    )


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (f"openelm info {TINY} > /dev/full", "No space left"),
        (f"openelm generate --model {TINY} -m 3 > /dev/full", "No space left"),
        (f"openelm convert {TINY} -o {'a' * 300}", "File name too long"),
        (f"openelm generate --model {TINY} -m 3 >&-", "standard output is closed"),
        (f"openelm generate --model {TINY} -p - <&-", "the prompt is empty"),
    ],
)
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
def test_what_the_machine_refuses_is_one_line_too(command, words):
    done = shell(command)
    assert done.returncode == 2
    assert words in done.stderr
    assert "Traceback" not in done.stderr


def test_a_terminal_that_lacks_a_character_shows_another():
    done = shell(f"PYTHONIOENCODING=ascii LC_ALL=C PYTHONUTF8=0 openelm info {TINY}")
    assert done.returncode == 0
    assert "?" in done.stdout


def test_weights_that_are_no_numbers_are_told(capsys, tmp_path):  # fault A1
    import shutil

    import mlx.core as mx

    folder = shutil.copytree(TINY, tmp_path / "m")
    weights = dict(mx.load(f"{folder}/model.safetensors"))
    weights["transformer.norm.weight"] = weights["transformer.norm.weight"] * float("nan")
    mx.eval(weights)
    mx.save_safetensors(f"{folder}/model.safetensors", weights)
    status, out, err = openelm(capsys, "generate", "--model", str(folder), "-m", "5")
    assert (status, out) == (1, "")
    assert "not numbers" in err
