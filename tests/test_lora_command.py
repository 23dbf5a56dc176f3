"""`openelm lora` as a user meets it: files, lines, refusals, a run that is interrupted or killed, and what goes on."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from reference import read_safetensors
from test_lora_settings import EXAMPLE
from tuning import write_small_folder

import openelm_mlx
from openelm_mlx import cli
from openelm_mlx.lora.log import LogFile, read_log
from openelm_mlx.safetensors_file import read_header

SENTENCES = ["the king had a daughter", "once there was a cat", "he went into the wood", "and they lived happily"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A small model beside some rows."""
    root = tmp_path_factory.mktemp("lora")
    write_small_folder(root / "model")
    data = root / "data"
    data.mkdir()
    for name, count in (("train", 10), ("valid", 3), ("test", 2)):
        lines = [json.dumps({"text": " and ".join(SENTENCES[: 1 + i % 4])}) for i in range(count)]
        (data / f"{name}.jsonl").write_text("\n".join(lines))
    return root


def arguments(folder: Path, out: Path, *more: object) -> list[str]:
    flags = {"--model": folder / "model", "--data": folder / "data", "--adapter-path": out}
    given = [str(item) for item in more]
    return ["lora", *(str(x) for pair in flags.items() for x in pair if str(pair[0]) not in given), *given]


def openelm(capsys, *given: str):
    status = cli.main(list(given))
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def tensors(path: Path) -> dict[str, bytes]:
    """Names and bytes, without the file's metadata."""
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    entries = json.loads(data[8 : 8 + length])
    body = data[8 + length :]
    return {name: body[slice(*entry["data_offsets"])] for name, entry in entries.items() if name != "__metadata__"}


QUICK = ("--batch-size", 2, "--learning-rate", 1e-3, "--scale", 2, "--num-layers", 1, "--optimizer", "adamw")


def test_a_whole_run(folder, tmp_path, capsys):
    out = tmp_path / "adapters"
    run = arguments(folder, out, *QUICK, "--iters", 12, "--save-every", 5, "--steps-per-eval", 4, "--train", "--test")
    status, stdout, err = openelm(capsys, *run)
    assert status == 0, err
    assert "4 of 8 linear layers" in err  # faults F9, F3: what is trained is said
    assert "transformer.layers.1.attn.qkv_proj" in err
    assert stdout.startswith("test loss ")
    assert {path.name for path in out.iterdir()} == {
        "adapters.safetensors", "adapter_config.json", "best_adapters.safetensors", "training_state.safetensors",
        "training_log.jsonl", "0000005_adapters.safetensors", "0000010_adapters.safetensors",
        "0000012_adapters.safetensors", *(["last_adapters.safetensors"] if "kept the best" in err else []),
    }  # fmt: skip
    log = read_log(out)
    assert log[0]["settings"]["iters"] == 12
    assert [entry["iteration"] for entry in log if "val_loss" in entry] == [0, 4, 8, 12]
    assert log[-1]["val_loss"] < log[1]["val_loss"]
    config = json.loads((out / "adapter_config.json").read_text())
    assert config["training"]["batch_size"] == 2
    assert config["lora_parameters"]["scale"] == 2
    generated = ("generate", "--model", str(folder / "model"), "--prompt", "the", "-m", "2", "--adapter-path", str(out))
    assert openelm(capsys, *generated)[0] == 0


def test_an_earlier_run_is_kept(folder, tmp_path, capsys):
    # fault G8
    out = tmp_path / "adapters"
    assert openelm(capsys, *arguments(folder, out, *QUICK, "--iters", 2, "--val-batches", 0))[0] == 0
    before = tensors(out / "adapters.safetensors")
    status, _, err = openelm(capsys, *arguments(folder, out, *QUICK, "--iters", 4))
    assert (status, before) == (2, tensors(out / "adapters.safetensors"))
    assert "is not empty: go on with --resume" in err
    (out / "notes.txt").write_text("mine")
    assert openelm(capsys, *arguments(folder, out, *QUICK, "--iters", 3, "--val-batches", 0, "--force"))[0] == 0
    assert sorted(path.name for path in out.glob("0*")) == ["0000003_adapters.safetensors"]
    assert (out / "notes.txt").read_text() == "mine"


def test_resumed_runs_go_on_and_keep_their_settings(folder, tmp_path, capsys):
    out, whole = tmp_path / "adapters", tmp_path / "whole"
    quick = (*QUICK, "--dropout", 0.1, "--val-batches", 0)
    assert openelm(capsys, *arguments(folder, out, *quick, "--iters", 3))[0] == 0
    status, stdout, err = openelm(capsys, "lora", "--resume", "--adapter-path", str(out), "--iters", "7", "--json")
    assert status == 0, err
    assert "going on at iteration 3 of 7" in err
    assert json.loads(stdout)["iteration"] == 7
    assert openelm(capsys, *arguments(folder, whole, *quick, "--iters", 7))[0] == 0
    assert tensors(out / "adapters.safetensors") == tensors(whole / "adapters.safetensors")
    status, _, err = openelm(capsys, "lora", "--resume", "--adapter-path", str(out), "--batch-size", "4")
    assert (status, "batch_size was 2 and is 4" in err) == (2, True)
    more = ("--iters", "8", "--test", "--json")
    status, stdout, _ = openelm(capsys, "lora", "--resume", "--adapter-path", str(out), *more)
    assert (status, json.loads(stdout)["last_iteration"], "test_loss" in stdout) == (0, 8, True)
    status, _, err = openelm(capsys, "lora", "--resume", "--adapter-path", str(out), "--data", str(folder / "other"))
    assert status == 2
    status, _, err = openelm(capsys, "lora", "--resume", "--adapter-path", str(tmp_path / "none"))
    assert (status, "nothing to resume" in err) == (2, True)


def test_a_damaged_state_says_from_what_to_begin_again(tmp_path, capsys):
    (tmp_path / "training_state.safetensors").write_bytes(b"cut")
    status, _, err = openelm(capsys, "lora", "--resume", "--adapter-path", str(tmp_path))
    assert (status, "is damaged: begin a new run with --resume-adapter-file" in err) == (2, True)


def test_other_data_is_not_resumed(folder, tmp_path, capsys):
    out = tmp_path / "adapters"
    assert openelm(capsys, *arguments(folder, out, *QUICK, "--iters", 1, "--val-batches", 0))[0] == 0
    (tmp_path / "other.jsonl").write_text(json.dumps({"text": "something else"}) + "\n" + json.dumps({"text": "a"}))
    more = ("--resume", "--adapter-path", str(out), "--iters", "2", "--data", str(tmp_path / "other.jsonl"))
    status, _, err = openelm(capsys, "lora", *more)
    assert (status, "the training data is not what the run began with" in err) == (2, True)


def test_begin_with_other_adapters(folder, tmp_path, capsys):
    first, second = tmp_path / "first", tmp_path / "second"
    assert openelm(capsys, *arguments(folder, first, *QUICK, "--iters", 3, "--val-batches", 0))[0] == 0
    start = ("--resume-adapter-file", first / "adapters.safetensors", "--iters", 1, "--val-batches", 0)
    assert openelm(capsys, *arguments(folder, second, *QUICK, *start, "--learning-rate", 1e-12))[0] == 0
    before, after = (read_safetensors(each / "adapters.safetensors") for each in (first, second))
    assert before.keys() == after.keys()
    assert all(np.allclose(before[name], after[name], atol=1e-8) for name in before)
    assert any(value.any() for name, value in after.items() if name.endswith("lora_b"))
    status, _, err = openelm(capsys, *arguments(folder, tmp_path / "x", *QUICK, *start, "--rank", 4))
    assert (status, "does not fit what is to be trained" in err) == (2, True)


def test_a_dry_run_writes_nothing(folder, tmp_path, capsys):
    out = tmp_path / "adapters"
    given = arguments(folder, out, "--dry-run", "--json", "--epochs", 3, "--batch-size", 2)
    status, stdout, _ = openelm(capsys, *given)
    plan = json.loads(stdout)
    assert (status, out.exists()) == (0, False)
    assert (plan["iterations"], plan["targets"], plan["largest_batch"][0]) == (15, "8 of 8 linear layers", 2)
    assert plan["memory_bytes"] > plan["weights_bytes"] > 0
    assert "CPU" in plan["device"] or "Metal" in plan["device"]
    assert "memory " in openelm(capsys, *given[:-6], "--dry-run")[1]


@pytest.mark.parametrize(
    ("flags", "match"),
    [
        (("--num-layers", 9), "has 2 layers"),
        (("--keys", "q_proj"), "attn.qkv_proj"),
        (("--plot", "curve.txt"), ".png"),
        (("--report-to", "nobody"), "knows wandb, swanlab"),
        (("--resume", "--force"), "choose one"),
        (("--config", "missing.yaml"), "cannot read"),
        (("--max-seq-length", 1), "max_seq_length"),
    ],
)
def test_refusals_are_one_line_and_leave_nothing(folder, tmp_path, capsys, monkeypatch, flags, match):
    monkeypatch.chdir(tmp_path)
    status, out, err = openelm(capsys, *arguments(folder, tmp_path / "adapters", *QUICK, *flags))
    assert (status, out) == (2, "")
    assert match in err.splitlines()[-1]
    assert not (tmp_path / "adapters" / "adapters.safetensors").exists()


@pytest.mark.parametrize(
    ("flags", "match"),
    [
        (("--report-to", "nobody"), "knows wandb, swanlab"),
        (("--data", "{train}", "--train", "--test"), "one file, and its rows are trained on"),
        (("--data", "{untested}", "--train", "--test"), "has no test.jsonl"),
        (("--test-batches", 0), "leave out --test"),
        (("--iters", 3, "--epochs", 1), "exclude each other"),
        (("--rslora",), "give alpha"),
        (("--scale", 0), "would learn nothing"),
        (("--fine-tune-type", "full", "--keys", "attn.qkv_proj"), "--keys would be ignored"),
    ],
)
def test_what_is_refused_is_refused_before_an_earlier_run_is_replaced(folder, tmp_path, capsys, flags, match):
    out = tmp_path / "adapters"
    out.mkdir()
    (out / "adapters.safetensors").write_bytes(b"earlier")
    (tmp_path / "rows").mkdir()
    (tmp_path / "rows" / "train.jsonl").write_text(json.dumps({"text": SENTENCES[0]}))
    places = {"{train}": tmp_path / "rows" / "train.jsonl", "{untested}": tmp_path / "rows"}
    quick = ("--batch-size", 2, "--force", *(places.get(flag, flag) for flag in flags))
    status, stdout, err = openelm(capsys, *arguments(folder, out, *quick))
    assert (status, stdout) == (2, "")
    assert match in err.splitlines()[-1]
    assert (out / "adapters.safetensors").read_bytes() == b"earlier"


def test_a_plot_without_a_run_is_refused(folder, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    given = arguments(folder, tmp_path / "none", "--test", "--plot", tmp_path / "loss.png")
    status, _, err = openelm(capsys, *given)
    assert (status, len(err.splitlines()), "has no training_log.jsonl" in err) == (2, 1, True)
    assert not (tmp_path / "loss.png").exists()


def test_a_run_whose_model_has_moved_goes_on_and_one_of_another_model_does_not(folder, tmp_path, capsys):
    out, moved = tmp_path / "adapters", tmp_path / "moved"
    shutil.copytree(folder / "model", tmp_path / "model")
    quick = (*QUICK, "--model", tmp_path / "model", "--iters", 1, "--val-batches", 0)
    assert openelm(capsys, *arguments(folder, out, *quick))[0] == 0
    (tmp_path / "model").rename(moved)
    resume = ("lora", "--resume", "--adapter-path", str(out), "--iters", "2")
    status, _, err = openelm(capsys, *resume)
    assert (status, "has moved, name it with --model" in err) == (2, True)
    assert openelm(capsys, *resume, "--model", str(moved))[0] == 0
    write_small_folder(tmp_path / "other", seed=9)
    status, _, err = openelm(capsys, *resume, "--model", str(tmp_path / "other"))
    assert (status, "is not the model that the run began with" in err) == (2, True)
    status, _, err = openelm(capsys, *resume, "--model", str(moved))
    assert (status, "nothing to go on with: 2 iterations of 2 are done" in err) == (0, True)


def test_what_goes_other_than_asked_is_told(folder, tmp_path, capsys):
    more = ("--iters", 1, "--batch-size", 1, "--warmup", 3, "--warmup-init", 100, "--num-layers", 1)
    status, _, err = openelm(capsys, *arguments(folder, tmp_path / "a", *more))
    assert status == 0, err
    assert "training for 1 iteration of 1 row, 1 update," in err
    assert "the warm-up takes 3 updates: the run ends before" in err
    assert "no validation was better than that of the model itself" in err


def test_few_rows_and_no_validation(folder, tmp_path, capsys):
    # faults E2, E4
    (tmp_path / "one").mkdir()
    (tmp_path / "one" / "train.jsonl").write_text(json.dumps({"text": "the only one"}))
    given = ("--data", tmp_path / "one", "--iters", 3, "--batch-size", 4)
    status, _, err = openelm(capsys, *arguments(folder, tmp_path / "a", *given))
    assert (status, "no validation" in err) == (0, True)
    (tmp_path / "one" / "train.jsonl").write_text("")
    status, _, err = openelm(capsys, *arguments(folder, tmp_path / "b", *given))
    assert (status, "no rows" in err) == (2, True)


def test_the_log_survives_a_cut_line(tmp_path):
    (tmp_path / "training_log.jsonl").write_text('{"settings": {}}\n{"iteration": 5, "train_loss": 1}\n{"itera')
    LogFile(tmp_path, {}, 4).on_train_loss_report({"iteration": 5, "train_loss": 2})
    assert read_log(tmp_path) == [{"settings": {}}, {"iteration": 5, "train_loss": 2}]


def start(folder: Path, out: Path, *more: object) -> subprocess.Popen:
    env = os.environ | {"PYTHONPATH": str(Path(openelm_mlx.__file__).parents[1])}
    command = [sys.executable, "-m", "openelm_mlx", *arguments(folder, out, *QUICK, "--save-every", 1, *more)]
    return subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def wait_for(path: Path) -> None:
    deadline = time.monotonic() + 60
    while not path.exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    assert path.exists()


def test_ctrl_c_saves_and_says_how_to_go_on(folder, tmp_path, capsys):
    out = tmp_path / "adapters"
    process = start(folder, out, "--iters", 100000, "--val-batches", 0)
    wait_for(out / "0000002_adapters.safetensors")
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert f"go on with: openelm lora --resume --adapter-path {out}" in err
    assert "Traceback" not in err
    saved = max(int(path.name[:7]) for path in out.glob("0*"))
    status, stdout, _ = openelm(
        capsys, "lora", "--resume", "--adapter-path", str(out), "--iters", str(saved + 2), "--json"
    )
    assert (status, json.loads(stdout)["last_iteration"]) == (0, saved + 2)


def test_killed_at_any_moment_it_goes_on(folder, tmp_path, capsys):
    """Killed runs of one folder, each resumed; OPENELM_KILLS=20 for more of them."""
    out, draw = tmp_path / "adapters", random.Random(7)
    process = start(folder, out, "--iters", 100000)
    wait_for(out / "training_state.safetensors")
    for kill in range(int(os.environ.get("OPENELM_KILLS", "1"))):
        if kill:
            process = start(folder, out, "--resume")
        time.sleep(draw.uniform(0.1, 1.0) + (1.0 if kill else 0.0))
        process.send_signal(signal.SIGKILL)
        process.communicate(timeout=60)
    record = out / "training_state.safetensors"
    assert read_header(record)
    status, stdout, err = openelm(capsys, "lora", "--resume", "--adapter-path", str(out), "--iters", "1", "--json")
    assert status == 0, err
    done = json.loads(stdout)["last_iteration"]
    if done:
        assert openelm(capsys, "lora", "--model", str(folder / "model"), "--data", str(folder / "data"), "--test",
                       "--adapter-path", str(out))[0] == 0  # fmt: skip


def test_a_quantised_base_is_trained_as_it_is(folder, tmp_path, capsys):
    packed = tmp_path / "packed"
    convert = ("convert", str(folder / "model"), "--mlx-path", str(packed), "-q", "--q-group-size", "32")
    assert openelm(capsys, *convert)[0] == 0
    quick = [
        *QUICK,
        "--model",
        packed,
        "--keep-quantized",
        "--iters",
        4,
        "--steps-per-eval",
        4,
        "--learning-rate",
        0.01,
    ]
    status, _, err = openelm(capsys, *arguments(folder, tmp_path / "a", *quick))
    assert status == 0, err
    losses = [entry["val_loss"] for entry in read_log(tmp_path / "a") if "val_loss" in entry]
    assert losses[-1] < losses[0]
    whole = ("--model", packed, "--keep-quantized", "--fine-tune-type", "full")
    status, _, err = openelm(capsys, *arguments(folder, tmp_path / "b", *whole))
    assert (status, "is quantized, and whole weights need plain ones" in err) == (2, True)


def test_mlx_lms_example_runs_once_model_data_and_keys_are_ours(folder, tmp_path, capsys):
    text = EXAMPLE.replace("self_attn.q_proj", "attn.qkv_proj").replace("self_attn.v_proj", "ffn.proj_2")
    changed = {"mlx_model": folder / "model", "some/dataset": folder / "data", '"adapters"': tmp_path / "out"}
    for old, new in changed.items():
        text = text.replace(old, str(new))
    (tmp_path / "lora.yaml").write_text(text.replace("num_layers: 16", "num_layers: 2"))
    assert openelm(capsys, "lora", "-c", str(tmp_path / "lora.yaml"), "--iters", "2")[0] == 0
    names = read_header(tmp_path / "out" / "adapters.safetensors")
    assert len(names) == 2 * 2 * 2
    (tmp_path / "lora.yaml").write_text(text.replace("attn.qkv_proj", "self_attn.q_proj"))
    more = ("--num-layers", "2", "--adapter-path", str(tmp_path / "other"))
    status, _, err = openelm(capsys, "lora", "-c", str(tmp_path / "lora.yaml"), *more)
    assert (status, "attn.out_proj, attn.qkv_proj, ffn.proj_1, ffn.proj_2" in err) == (2, True)


def test_services_get_mlx_lms_reports(folder, tmp_path, capsys, monkeypatch):
    calls = []
    fake = ModuleType("wandb")
    fake.init = lambda **options: calls.append(options)
    fake.log = lambda info, step: calls.append((step, info))
    monkeypatch.setitem(sys.modules, "wandb", fake)
    more = ("--iters", 2, "--steps-per-report", 1, "--report-to", "wandb", "--project-name", "tales")
    assert openelm(capsys, *arguments(folder, tmp_path / "out", *QUICK, *more))[0] == 0
    assert (calls[0]["project"], calls[0]["name"]) == ("tales", "out")
    reports = [info for step, info in calls[1:] if "train_loss" in info]
    assert {"iteration", "train_loss", "learning_rate", "iterations_per_second", "tokens_per_second",
            "trained_tokens", "peak_memory"} <= set(reports[0])  # fmt: skip
    monkeypatch.setitem(sys.modules, "swanlab", None)
    status, _, err = openelm(capsys, *arguments(folder, tmp_path / "x", *QUICK, "--report-to", "swanlab"))
    assert (status, "pip install swanlab" in err) == (2, True)


def test_a_curve_is_drawn_or_the_extra_is_named(folder, tmp_path, capsys, monkeypatch):
    run = arguments(folder, tmp_path / "out", *QUICK, "--iters", 2, "--plot", tmp_path / "loss.svg")
    with monkeypatch.context() as without:
        without.setitem(sys.modules, "matplotlib.figure", None)
        status, _, err = openelm(capsys, *run)
    assert (status, "openelm-mlx[plot]" in err, (tmp_path / "out").exists()) == (2, True, False)
    pytest.importorskip("matplotlib")
    assert openelm(capsys, *run)[0] == 0
    assert "<svg" in (tmp_path / "loss.svg").read_text()
