"""`openelm bench` as a user meets it: tables, the JSON object, what is refused, what an interruption leaves."""

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import mlx.core as mx
import pytest
from artefacts import TOKENIZER, write_hub
from fake_bench import FakeModel, run
from reference import random_checkpoint, small_config

from openelm_mlx import device
from openelm_mlx.benchmarks import matrix, paper, suite, table
from openelm_mlx.benchmarks.command import make_plan
from openelm_mlx.benchmarks.matrix import Precision, Source
from openelm_mlx.benchmarks.record import check_record
from openelm_mlx.benchmarks.session import Shape
from openelm_mlx.benchmarks.session import precision as precision_of
from openelm_mlx.cli import COMMANDS, Parser, main
from openelm_mlx.config import OpenELMConfig
from openelm_mlx.errors import GenerationError

SHORT = ["-p", "12", "-g", "4", "-n", "2", "--no-limits"]


@pytest.fixture(scope="module")
def small(tmp_path_factory) -> str:
    """A model folder that takes no time."""
    config = small_config(vocab_size=4096)  # the bundled tokenizer's
    return str(write_hub(tmp_path_factory.mktemp("models") / "small-model", random_checkpoint(config), config))


def bench(capsys, *arguments):
    """(record, stderr) of a run that succeeds."""
    assert main(["bench", *arguments, "--json"]) == 0
    printed = capsys.readouterr()
    record = json.loads(printed.out.splitlines()[-1])
    check_record(record)
    return record, printed.err


def parsed(*arguments):
    from openelm_mlx.benchmarks import command

    parser = Parser(prog="openelm bench")
    command.add_arguments(parser)
    return parser.parse_args(arguments)


def refusal(capsys, *arguments):
    """The one line of a run that is refused, with status 2."""
    try:
        status = main(["bench", *arguments])
    except SystemExit as left:
        status = left.code
    captured = capsys.readouterr()
    assert (status, captured.out) == (2, "")
    (line,) = [line for line in captured.err.splitlines() if "error" in line]
    return line


def test_json_is_one_object_with_the_machine_and_the_trials(small, capsys):
    record, _ = bench(capsys, "--model", small, *SHORT)
    assert {"chip", "cpu_cores", "gpu_cores", "memory_bytes", "os", "backend", "power_source", "low_power_mode",
            "packages", "commit"} <= record["machine"].keys()  # fmt: skip
    assert record["machine"]["packages"]["mlx"] == mx.__version__
    (result,) = record["results"]
    assert (result["model"], result["prompt_tokens"], result["generation_tokens"]) == ("small-model", 12, 4)
    assert len(result["trials"]) == 2
    assert min(result["prompt_tps"], result["generation_tps"], result["ttft_s"]) > 0
    assert result["weight_bytes"] == 4 * OpenELMConfig.from_dict(small_config(vocab_size=4096)).num_parameters()


def test_memory_is_told_apart(small, capsys):
    """Fault I10: weights, keys and values, and peaks are named, in bytes; the allocator is not the process."""
    (result,) = bench(capsys, "--model", small, *SHORT)[0]["results"]
    block, kv_heads = 256, sum(OpenELMConfig.from_dict(small_config()).num_kv_heads)
    assert result["kv_cache_bytes"] == 2 * kv_heads * 32 * block * 4
    assert result["peak_memory_bytes"] >= result["weight_bytes"] + result["kv_cache_bytes"]
    assert result["process_footprint_bytes"] > result["weight_bytes"]
    assert result["peak_memory_bytes"] == max(result["prefill_peak_memory_bytes"], result["decode_peak_memory_bytes"])


def test_the_record_says_what_was_really_in_effect(small, capsys):
    """Fault I11: every flag is found again in the settings and in the results."""
    flags = ["-p", "6,12", "-g", "3", "-b", "1,2", "-n", "2", "--delay", "0.001"]
    record, _ = bench(capsys, "--model", small, *flags, "--dtype", "float32,float16", "--no-limits")
    settings = record["settings"]
    assert settings["models"] == ["small-model"]
    assert settings["precisions"] == ["float32", "float16"]
    assert settings["num_trials"] == 2
    assert (settings["delay_s"], settings["decoder"]) == (0.001, "eager")
    assert (settings["sampling"], settings["eos"]) == ("greedy", "ignored")
    shapes = [(6, 3, 1), (12, 3, 1), (6, 3, 2), (12, 3, 2)]
    assert [tuple(shape.values()) for shape in settings["shapes"][0]] == shapes
    keys = ("prompt_tokens", "generation_tokens", "batch_size")
    assert [tuple(result[key] for key in keys) for result in record["results"]] == shapes * 2
    assert [result["precision"] for result in record["results"]] == ["float32"] * 4 + ["float16"] * 4
    assert make_plan(parsed("--decoder", "compiled")).method.decoder == "compiled"


def test_precisions_are_made_of_one_read(small, monkeypatch, capsys):
    reads = []
    load_model = matrix.load_model
    monkeypatch.setattr(matrix, "load_model", lambda folder, **how: reads.append(folder) or load_model(folder, **how))
    record, _ = bench(capsys, "--model", small, *SHORT, "--dtype", "float32,bfloat16", "--q-bits", "4,8")
    assert len(reads) == 1
    results = record["results"]
    assert [result["precision"] for result in results] == ["float32", "bfloat16", "4-bit", "8-bit"]
    weights = [result["weight_bytes"] for result in results]
    assert weights[0] == 2 * weights[1] > 2 * weights[3] > 2 * weights[2]


@pytest.mark.parametrize("bits", [4, 8])
def test_a_precision_made_on_the_fly_is_that_of_convert(small, tmp_path, bits, capsys):
    from openelm_mlx import load

    assert main(["convert", small, "-o", str(tmp_path / "q"), "-q", "--q-bits", str(bits), "--dtype", "float32"]) == 0
    capsys.readouterr()
    converted, _ = load(tmp_path / "q", keep_quantized=True)
    source = Source.named(small)
    ((model, beside),) = list(source.models([Precision(bits=bits)]))
    tokens = mx.array([[1, 2, 3]])
    assert mx.array_equal(model(tokens), converted(tokens))
    assert beside == 0


def test_random_weights_of_a_published_size_need_no_files(monkeypatch):
    """In small: what is made has the size's shapes, and all of it is bfloat16 or packed where asked for."""
    config = OpenELMConfig.from_name("270M", num_transformer_layers=2, model_dim=128, vocab_size=256)
    source = Source("270M (random weights)", config)
    kinds = []
    for model, _ in source.models([Precision("bfloat16"), Precision(bits=4)]):
        logits = model(mx.array([[1, 2]]))
        kinds.append(str(logits.dtype))
        assert mx.all(mx.isfinite(logits))
    assert kinds == ["mlx.core.bfloat16", str(mx.float32 if mx.default_device() == mx.Device(mx.cpu) else mx.bfloat16)]
    assert make_plan(parsed("--size", "270M,3B")).sources[1].config == OpenELMConfig.from_name("3B")
    monkeypatch.setattr(matrix, "available_memory_bytes", lambda: 1000)
    with pytest.raises(GenerationError, match=r"270M .* needs .* GB of memory and 0.00 GB are free"):
        next(source.models([Precision("float16")]))


def test_few_bits_fit_where_the_folders_own_dtype_does_not(small, monkeypatch):
    """Weights are packed one tensor at a time: what is held at last must fit, and for several also what was read."""
    config = small_config(vocab_size=4096)
    source = Source.named(small)
    parameters = OpenELMConfig.from_dict(config).num_parameters()
    for module in (matrix, device):
        monkeypatch.setattr(module, "available_memory_bytes", lambda: parameters)  # a byte each
    assert [precision_of(model) for model, _ in source.models([Precision(bits=4)])] == ["4-bit"]
    with pytest.raises(GenerationError, match="are free"):
        next(source.models([Precision(bits=4), Precision(bits=8)]))


def test_the_table_fits_a_terminal_and_says_what_its_numbers_are(small, capsys):
    assert main(["bench", "--model", small, *SHORT, "--profile"]) == 0
    printed = capsys.readouterr()
    assert max(map(len, printed.out.splitlines())) <= 80
    for word in ("prefill", "decode", "tokens/s", "95 % interval", "min - max", "MLX allocator", "EOS ignored",
                 "first token after", "keys and values", "process footprint", "attention", "a whole step"):  # fmt: skip
        assert word in " ".join(printed.out.split())
    assert "\r" not in printed.err  # progress is for terminals


def test_a_matrix_is_one_row_a_shape(small, capsys):
    """Fault I9: prefill, decode, first token and all of it at several lengths, side by side."""
    assert main(["bench", "--model", small, "-p", "4,16,100", "-g", "3", "-b", "1,2", "-n", "1", "--no-limits"]) == 0
    printed = capsys.readouterr().out
    assert max(map(len, printed.splitlines())) <= 80
    for shape in ("4+3", "16+3", "100+3"):
        assert sum(line.startswith(shape) for line in printed.splitlines()) == 2
    assert all(word in printed for word in ("prefill/s", "decode/s", "first s", "total s", "peak*"))


def test_limits_are_measured_in_the_run_and_shares_told(small, capsys, monkeypatch):
    monkeypatch.setattr("openelm_mlx.benchmarks.device_limits._LARGEST_PRODUCT", 256)
    assert main(["bench", "--model", small, "-p", "12", "-g", "4", "-n", "1", "--baseline", "nowhere.json"]) == 2
    assert main(["bench", "--model", small, "-p", "12", "-g", "4", "-n", "1"]) == 0
    printed = capsys.readouterr().out
    assert "this device now:" in printed
    assert "% of its memory limit" in printed


def test_norms_are_compared_in_one_run(small, capsys):
    record, _ = bench(capsys, "--model", small, *SHORT, "--norms")
    assert [result["variant"] for result in record["results"]] == ["fused RMSNorm", "naive RMSNorm", "fused LayerNorm"]
    assert main(["bench", "--model", small, *SHORT, "--norms"]) == 0
    printed = capsys.readouterr().out
    assert "(17 norms a token)" in printed
    assert "small-model, float32, 12+4 tokens:" in printed
    assert "fused LayerNorm" in printed
    assert "…" not in printed  # nothing is cut off


@pytest.mark.needs_mlx_lm
def test_mlx_lm_measures_the_same_folder_in_turn(small, capsys):
    record, _ = bench(capsys, "--model", small, *SHORT, "--compare", "mlx-lm")
    ours, theirs = record["results"]
    assert (ours["variant"], theirs["variant"]) == ("", "mlx-lm")
    assert ours["weight_bytes"] == theirs["weight_bytes"]
    (entry,) = record["comparison"]
    assert entry["generation_tps_ratio"] == pytest.approx(ours["generation_tps"] / theirs["generation_tps"])
    low, high = entry["prompt_tps_ratio_range"]
    assert low <= high
    assert main(["bench", "--model", small, *SHORT, "--compare", "mlx-lm"]) == 0
    printed = capsys.readouterr().out
    assert "by mlx-lm" in printed
    assert "against mlx-lm, 12+4 tokens: prefill" in printed


def test_a_baseline_decides_the_exit_status(small, capsys, tmp_path):
    file = tmp_path / "before.json"
    flags = ["bench", "--model", small, "-p", "12", "-g", "4", "-n", "3", "--no-limits"]
    assert main([*flags, "-o", str(file)]) == 0
    before = json.loads(file.read_text())
    for factor, status in ((1e3, 1), (1e-3, 0)):
        record = json.loads(json.dumps(before))
        for holder in (record["results"][0], *record["results"][0]["trials"]):
            for rate in ("prompt_tps", "generation_tps"):
                holder[rate] *= factor
        file.write_text(json.dumps(record))
        capsys.readouterr()
        assert main([*flags, "--baseline", str(file)]) == status
        assert capsys.readouterr().out.count("SLOWER") == 2 * status


def test_an_interrupted_run_keeps_what_is_finished(small, capsys, monkeypatch, tmp_path):
    """Ctrl-C in the second shape's second trial: one shape, one trial, a whole file, status 130."""
    told = []

    def interrupting(step, share=0.0):
        told.append(step)
        if "9+4: trial 2" in step:
            raise KeyboardInterrupt

    run_suite = suite.run
    monkeypatch.setattr(
        suite, "run", lambda plan, progress: run_suite(plan, type(progress)(interrupting, progress.total))
    )
    file = tmp_path / "part.json"
    flags = ["-p", "4,9,12", "-g", "4", "-n", "3", "--no-limits", "--json", "-o", str(file)]
    assert main(["bench", "--model", small, *flags]) == 130
    printed = capsys.readouterr()
    record = json.loads(file.read_text())
    assert record == json.loads(printed.out.splitlines()[-1])
    check_record(record)
    assert record["interrupted"] is True
    assert [(result["prompt_tokens"], len(result["trials"])) for result in record["results"]] == [(4, 3), (9, 1)]
    assert "interrupted; 2 results are kept" in printed.err


def test_an_interruption_before_any_result_is_a_record_too(small, capsys, monkeypatch):
    def interrupting(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(suite, "measure_in_turns", interrupting)
    assert main(["bench", "--model", small, *SHORT, "--json"]) == 130
    assert json.loads(capsys.readouterr().out)["results"] == []
    assert main(["bench", "--model", small, *SHORT]) == 130
    assert capsys.readouterr().out == ""


def test_lengths_that_shrank_are_named(small, capsys):
    assert "context" not in bench(capsys, "--model", small, "-g", "2", "-p", "120", "-n", "1", "--no-limits")[1]
    shrunk = bench(capsys, "--model", small, "-g", "2", "-n", "1", "--no-limits")[1]
    assert "context is 128 tokens: 102 prompt tokens and 2 generated instead of 512 and 2" in shrunk


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["-n", "0"], "expected a whole number of 1 or more, got '0'"),
        (["-p", "4,x"], "expected a whole number of 1 or more, got 'x'"),
        (["-p", "8,250", "-g", "7"], "250 prompt tokens and 7 generated exceed the model's context of 256"),
        (["--delay", "-1"], "expected seconds, 0 or more, got '-1'"),
        (["--delay", "inf"], "expected seconds, 0 or more, got 'inf'"),
        (["--q-bits", "4,7"], "expected one of 2, 3, 4, 5, 6, 8 bits, got '7'"),
        (["--dtype", "int8"], "expected one of auto, bfloat16, float16, float32, got 'int8'"),
        (["--size", "7B"], "expected one of 270M, 450M, 1_1B, 3B, got '7B'"),
        (["--paper"], "--paper takes 36 + 1024 tokens, and the context of tiny is 256: name a model with a longer one"),
        (["--paper", "-p", "12"], "--paper is a fixed protocol (36 + 1024 tokens, one text, five runs): leave out -p"),
        (["--compare", "mlx-lm", "--q-bits", "4"], "--compare measures a folder as it is"),
        (["--norms", "-b", "2"], "measure single texts: leave out --batch-size"),
        (["--norms", "--compare", "mlx-lm"], "--norms and --compare are two measurements: make two runs"),
        (["--norms", "--decoder", "compiled"], "--norms measures the eager step"),
        (["-b", "2", "--decoder", "compiled"], "--decoder compiled serves single texts: leave out --batch-size"),
        (["--size", "270M", "--adapter-path", "x"], "--adapter-path belongs to the model it was trained for"),
        (["reprot"], "argument ACTION: invalid choice: 'reprot' (choose from 'report')"),
        (["--train", "--delay", "3"], "--train measures fine-tuning, and takes no --delay"),
        (["--train", "--decoder", "compiled"], "takes no --decoder"),
        (["--train", "--no-limits"], "takes no --no-limits"),
        (["--baseline", "/no/such/file"], "cannot read /no/such/file: No such file"),
        (["-o", "/no/such/folder/x.json"], "/no/such/folder is no folder"),
        (["--train", "--norms"], "--train measures fine-tuning, and takes no --norms"),
        (["report", "/no/such.json"], "cannot read /no/such.json"),
    ],
)
def test_what_cannot_be_measured_is_refused_in_one_line(arguments, expected, capsys):
    assert expected in refusal(capsys, *arguments)


def test_a_refusal_stands_alone(capsys):
    """What was assumed is told once work begins."""
    assert main(["bench", "-b", "2", "--norms"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("openelm: error: ")


def test_a_baseline_that_does_not_fit_is_refused_before_the_work(small, capsys, monkeypatch, tmp_path):
    record, _ = bench(capsys, "--model", small, *SHORT)
    file = tmp_path / "before.json"
    file.write_text(json.dumps(record))
    monkeypatch.setattr(suite, "run", None)
    assert "nothing that this run measures too" in refusal(
        capsys, "--model", small, "-p", "9", "-g", "4", "--baseline", str(file)
    )
    record["machine"]["chip"] = "another"
    file.write_text(json.dumps(record))
    assert "measured with chip 'another'" in refusal(capsys, "--model", small, *SHORT, "--baseline", str(file))


def test_what_was_measured_is_kept_when_the_baseline_turns_out_not_to_fit(small, capsys, tmp_path):
    """The precision is known only when the model is loaded."""
    record, _ = bench(capsys, "--model", small, *SHORT)
    before, now = tmp_path / "before.json", tmp_path / "now.json"
    record["results"][0]["precision"] = "3-bit"
    before.write_text(json.dumps(record))
    assert main(["bench", "--model", small, *SHORT, "--baseline", str(before), "-o", str(now)]) == 2
    assert len(json.loads(now.read_text())["results"]) == 1
    printed = capsys.readouterr()
    assert "nothing that this run measures too" in printed.err
    assert "small-model, float32 weights" in printed.out


def test_a_model_that_fails_does_not_take_the_others_results(small, capsys, tmp_path):
    config = small_config(vocab_size=4096)
    broken = write_hub(tmp_path / "broken", random_checkpoint(config), config)
    (broken / "model.safetensors").write_bytes(b"broken")
    file = tmp_path / "part.json"
    assert main(["bench", "--model", small, "--model", str(broken), *SHORT, "-o", str(file)]) != 0
    record = json.loads(file.read_text())
    assert [result["model"] for result in record["results"]] == ["small-model"]
    assert record["interrupted"] is True
    assert "error" in capsys.readouterr().err


def test_footnotes_say_which_result_they_are_about(capsys):
    slower = run(FakeModel(slowness=(1, 1, 1, 1.5, 2)), trials=3)
    single = run(FakeModel(), trials=1)
    measured = [dataclasses.replace(slower, precision=name, batch_size=2) for name in ("float32", "4-bit")] + [single]
    table.print_results([(result, {}) for result in measured])
    printed = capsys.readouterr().out
    assert "median of 1-3 trials after" in printed
    assert "decode at 8+11 x 2, float32 changed by -" in printed
    assert "decode at 8+11 x 2, 4-bit changed by -" in printed
    table.print_results([(single, {})])
    assert "median of 1 trial after" in capsys.readouterr().out


def test_no_digit_is_cut_away_where_the_terminal_is_narrow(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "50")
    result = dataclasses.replace(run(FakeModel(0.0001, 0.0001), trials=3))
    table.print_results([(result, {}), (dataclasses.replace(result, batch_size=16), {})])
    table.print_results([(result, {})])
    printed = capsys.readouterr().out
    assert "…" not in printed
    assert printed.count("80,000.0") == 3
    assert max(len(line) for line in printed.splitlines() if line.startswith("prefill")) <= 80


def test_a_profile_names_its_precision(small, capsys):
    flags = [
        "--model",
        small,
        "-p",
        "8",
        "-g",
        "2",
        "-n",
        "1",
        "--no-limits",
        "--profile",
        "--dtype",
        "float16,float32",
    ]
    assert main(["bench", *flags]) == 0
    printed = capsys.readouterr().out
    assert "small-model, float16, ms of one token with 8 in the cache" in printed
    assert "small-model, float32, ms of one token with 8 in the cache" in printed
    assert [entry["precision"] for entry in bench(capsys, *flags)[0]["profile"]] == ["float16", "float32"]


def test_one_generated_token_is_no_decode(small, capsys):
    assert main(["bench", "--model", small, "-p", "12", "-g", "1", "-n", "1", "--no-limits"]) == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("decode")]
    assert line.split() == ["decode", "0", "-", "-", "-", "-", "-"]


def test_a_quantised_folder_is_measured_as_it_is(small, tmp_path, capsys):
    folder = str(tmp_path / "q4")
    assert main(["convert", small, "-o", folder, "-q"]) == 0
    capsys.readouterr()
    assert "quantized already" in refusal(capsys, "--model", folder, "--q-bits", "8")
    kept, _ = bench(capsys, "--model", folder, *SHORT, "--keep-quantized")
    assert kept["results"][0]["precision"] == "4-bit"


def test_no_tokenizer_is_needed(tmp_path, capsys):
    config = small_config()
    folder = write_hub(tmp_path / "bare", random_checkpoint(config), config)
    (folder / TOKENIZER.name).unlink()
    assert bench(capsys, "--model", str(folder), *SHORT)[0]["results"]


def test_declaring_the_flags_imports_nothing_heavy():
    heavy = "{'mlx.core', 'rich', 'numpy', 'matplotlib'}"
    code = f"import sys, openelm_mlx.benchmarks.command; sys.exit(bool({heavy} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_help_shows_both_uses(capsys):
    with pytest.raises(SystemExit):
        main(["bench", "--help"])
    printed = capsys.readouterr().out
    assert "openelm bench [options]\n       openelm bench report" in printed
    with pytest.raises(SystemExit):
        main(["bench", "report", "--help"])
    assert "roofline" in capsys.readouterr().out
    assert COMMANDS["bench"][0] == ".benchmarks.command"
    assert Path(parsed("report", "a.json", "b.json", "-o", "out").files[1]).name == "b.json"


def test_progress_counts_runs_by_their_tokens_and_never_beyond_the_end():
    from openelm_mlx.benchmarks.progress import Progress, total_cost

    shapes, shown = [Shape(10, 1), Shape(100, 1)], []
    progress = Progress(lambda step, share: shown.append(share), total_cost(shapes, trials=2))
    for shape in shapes:
        tell = progress.shape(shape, trials=2)
        for step in range(6):  # two warm-ups more than expected
            tell(str(step))
    assert shown == sorted(shown)
    assert shown[0] == 0.0
    assert shown[6] == pytest.approx(40 / 170)  # the first shape is done: 10 + 30 tokens against 100 + 30
    assert shown[-1] == pytest.approx(1.0)


def test_the_papers_protocol(tmp_path, capsys, monkeypatch):
    """In small: one dry run, five runs, means in the paper's way, nothing recalled beside what is no OpenELM size."""
    config = small_config(vocab_size=4096)
    folder = write_hub(tmp_path / "m", random_checkpoint(config), config)
    monkeypatch.setattr(paper, "SHAPE", Shape(36, 4))
    record, _ = bench(capsys, "--model", str(folder), "--paper", "--no-limits")
    (result,) = record["results"]
    assert (result["prompt_tokens"], result["generation_tokens"], result["warm_ups"]) == (36, 4, 1)
    assert len(result["trials"]) == 5
    assert record["settings"]["protocol"] == "paper"
    decode_s = [trial["decode_s"] for trial in result["trials"]]
    assert result["paper"]["as_the_paper_counts"]["generation"] == pytest.approx(4 / (sum(decode_s) / 5))
    assert result["paper"]["recalled"] is None
    assert main(["bench", "--model", str(folder), "--paper", "--no-limits"]) == 0
    printed = capsys.readouterr().out
    assert "as the paper counts (mean of 5)" in printed
    assert "recalled" not in printed
    assert "still getting faster" not in printed  # a single dry run does not tell


def test_the_papers_numbers_stand_beside_the_real_sizes_and_are_marked(capsys):
    config = OpenELMConfig.from_name("270M")
    result = dataclasses.replace(run(FakeModel(), trials=5), precision="bfloat16", model="apple/OpenELM-270M")
    table.print_results([(result, {"paper": paper.to_dict(result, config)})])
    printed = " ".join(capsys.readouterr().out.split())
    assert (
        "the paper, MacBook Pro, M2 Max, 64 GiB, macOS 14.4.1, MLX 0.10.0: prompt 1,151.4, generation 212.4" in printed
    )
    assert "as recalled, not checked against the paper" in printed
