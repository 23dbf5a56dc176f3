"""`openelm bench --train`: the trainer is a program of its own, and its log is what counts."""

import json
from importlib import import_module

import pytest
from artefacts import TOKENIZER

from openelm_mlx.benchmarks import command, train
from openelm_mlx.benchmarks.record import check_record
from openelm_mlx.cli import COMMANDS, Parser, main
from openelm_mlx.errors import RunFailedError
from openelm_mlx.hub import BUNDLED_MODEL
from openelm_mlx.tokenizer import Tokenizer


def log(path, rates, peak=0.5):
    lines = [{"settings": {}}, *({"iteration": i, "tokens_per_second": rate, "peak_memory": peak} for i, rate in
                                 enumerate(rates, 1)), {"iteration": 9, "val_loss": 1.0}]  # fmt: skip
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_the_first_iterations_are_a_warm_up(tmp_path):
    shape = train.TrainingShape(512, 1, False)
    result = train.read_log("m", shape, log(tmp_path / "log", [1, 2, 100, 120, 110]))
    assert result.tokens_per_second == (100, 120, 110)
    assert result.to_dict()["tokens_per_second"] == 110
    assert result.peak_memory_bytes == 500_000_000
    with pytest.raises(RunFailedError, match="no iteration after 2"):
        train.read_log("m", shape, log(tmp_path / "log", [1, 2]))


def test_every_length_and_batch_with_and_without_checkpointing(monkeypatch, capsys):
    ran = []

    def fake(model, shape, trials, flags):
        ran.append((model, *vars(shape).values(), trials, *flags))
        return train.TrainingResult(model, shape, (10.0, 12.0), 10**9)

    monkeypatch.setattr(train, "train", fake)
    assert main(["bench", "--train", "-p", "64,128", "-b", "1,2", "-n", "3", "--dtype", "float32", "--json"]) == 0
    assert len(ran) == 8
    assert ran[:2] == [
        ("tiny", 64, 1, False, 3, "--dtype", "float32"),
        ("tiny", 64, 1, True, 3, "--dtype", "float32"),
    ]
    record = json.loads(capsys.readouterr().out)
    check_record(record)
    assert len(record["training"]) == 8
    assert main(["bench", "--train", "-n", "3"]) == 0
    printed = capsys.readouterr()
    assert "1 x 256" in printed.out  # tiny's context; the trainer would have cut 512 to it
    assert main(["bench", "--train", "-p", "64,300"]) == 2
    assert "rows of 300 tokens exceed the context of tiny, 256" in capsys.readouterr().err
    assert "no --model given" in printed.err


def test_a_record_of_training_names_no_path(monkeypatch, tmp_path, capsys):
    def fake(model, shape, trials, flags):
        return train.TrainingResult("m", shape, (10.0,), 10**9)

    monkeypatch.setattr(train, "train", fake)
    (tmp_path / "config.json").write_bytes((BUNDLED_MODEL / "config.json").read_bytes())
    assert main(["bench", "--train", "--model", str(tmp_path), "-n", "1", "--json"]) == 0
    printed = capsys.readouterr().out
    assert json.loads(printed)["settings"]["models"] == [tmp_path.name]
    assert str(tmp_path) not in printed


def test_the_trainers_own_words_tell_of_its_failure(monkeypatch):
    monkeypatch.setattr(train, "lora_arguments", lambda *_: ["lora", "--no-such-flag"])
    with pytest.raises(RunFailedError, match=r"openelm lora failed: .*--no-such-flag"):
        train.train("tiny", train.TrainingShape(8, 1, False), 1)


def test_the_trainer_knows_the_flags(tmp_path):
    """What is run is what `openelm lora` understands; it is looked up as the command line does."""
    shape = train.TrainingShape(64, 2, True)
    name, *flags = train.lora_arguments("tiny", shape, tmp_path, tmp_path, 3)
    ours, theirs = Parser(prog="openelm bench"), Parser(prog="openelm lora")
    command.add_arguments(ours)
    import_module(COMMANDS[name][0], "openelm_mlx").add_arguments(theirs)
    asked = ours.parse_args(["--train", "--dtype", "float32", "--offline", "--revision", "x", "--keep-quantized"])
    understood = theirs.parse_args([*flags, *train._loading_flags(asked)])
    assert (understood.max_seq_length, understood.batch_size, understood.iters) == (64, 2, 5)
    assert (understood.grad_checkpoint, understood.keep_quantized, understood.dtype) == (True, True, "float32")


def test_every_row_is_longer_than_a_sequence(tmp_path):
    shape = train.TrainingShape(300, 2, False)
    train.write_rows(tmp_path / "data", shape, iterations=3)
    rows = (tmp_path / "data" / "train.jsonl").read_text().splitlines()
    assert len(rows) == 6
    assert len(Tokenizer.from_path(TOKENIZER).encode(json.loads(rows[0])["text"])) >= 300
