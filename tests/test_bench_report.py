"""`openelm bench report`: tables that render, and plots, of one model and of eight on two machines."""

import csv
import io
import json
import re
from pathlib import Path

import pytest
from fake_bench import FakeModel, run

from openelm_mlx.benchmarks import report
from openelm_mlx.benchmarks.record import new_record
from openelm_mlx.cli import main

PNG = b"\x89PNG\r\n\x1a\n"
CHIPS = (("Apple M2 Max", 38, 64), ("Apple M4", 10, 16))
DEVICE = {"bandwidth_bytes_s": 3e11, "matmul_flops_s": 1.2e13, "probe_bytes": 2**30, "dtype": "bfloat16"}


def file_of(path: Path, models, prompts=(16, 512), precisions=("bfloat16", "4-bit"), chip=CHIPS[0]) -> Path:
    """A record with made-up speeds: larger is slower, fewer bits are faster, a longer context is slower."""
    results = []
    for i, model in enumerate(models, 1):
        for precision in precisions:
            for prompt in prompts:
                step_s = 0.004 * i * (0.6 if precision == "4-bit" else 1) * (1 + prompt / 4000)
                result = run(FakeModel(prompt * step_s / 20, step_s, [1, 1, 1.02, 0.98]), 32, trials=3).to_dict()
                phase = {
                    "bytes": step_s * 2e11,
                    "flops": step_s * 4e11,
                    "bound": "memory",
                    "seconds": step_s,
                    "share": 0.7,
                }
                prefill = {**phase, "flops": prompt * phase["flops"], "seconds": prompt * step_s / 20}
                limits = {"device": DEVICE, "prefill": prefill, "decode": phase}
                more = {"model": model, "precision": precision, "prompt_tokens": prompt, "parameters": i * 10**9}
                results.append(result | more | {"limits": limits})
    record = new_record(results, {})
    record["machine"] |= {"chip": chip[0], "gpu_cores": chip[1], "memory_bytes": chip[2] * 2**30, "os": "Darwin 15.5"}
    path.write_text(json.dumps(record))
    return path


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("records")
    models = [f"OpenELM-{size}{kind}" for size in ("270M", "450M", "1_1B", "3B") for kind in ("", "-Instruct")]
    one = file_of(folder / "one.json", ["apple/OpenELM-270M"], (16,), ("bfloat16",))
    eight = [file_of(folder / f"{i}.json", models, chip=chip) for i, chip in enumerate(CHIPS)]
    return {"one": [one], "eight": eight}


def markdown_table(text):
    """The cells of a table's lines, as a renderer splits them."""
    lines = [line for line in text.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines]


@pytest.mark.parametrize(("which", "results"), [("one", 1), ("eight", 64)])
def test_a_table_has_a_row_for_each_result_and_a_cell_for_each_column(files, which, results, capsys):
    assert main(["bench", "report", *map(str, files[which])]) == 0
    printed = capsys.readouterr().out
    heading, rule, *rows = markdown_table(printed)
    assert heading == list(report.HEADINGS)
    assert all(re.fullmatch(r"-+:?", cell) for cell in rule)
    assert len(rows) == results
    assert {len(row) for row in rows} == {len(heading)}
    assert "Apple M2 Max (38 GPU cores, 64 GiB)" in rows[0][0]
    assert "MLX allocator" in printed


def test_csv_holds_every_figure(files, capsys):
    assert main(["bench", "report", "--csv", *map(str, files["eight"])]) == 0
    rows = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert len(rows) == 64
    assert {row["machine"] for row in rows} == {
        "Apple M2 Max (38 GPU cores, 64 GiB)",
        "Apple M4 (10 GPU cores, 16 GiB)",
    }
    assert all(float(row["generation_tps_low"]) <= float(row["generation_tps"]) for row in rows)


@pytest.mark.parametrize("which", ["one", "eight"])
def test_a_folder_gets_tables_and_plots_that_the_page_shows(files, which, tmp_path, capsys):
    assert main(["bench", "report", *map(str, files[which]), "-o", str(tmp_path / "out")]) == 0
    page = (tmp_path / "out" / "report.md").read_text()
    shown = re.findall(r"!\[.+\]\((\S+)\)", page)
    assert set(shown) == {path.name for path in (tmp_path / "out").glob("*.png")}
    assert set(shown) == {"tokens_per_second.png", "context.png", "roofline.png"}
    for name in shown:
        assert (tmp_path / "out" / name).read_bytes().startswith(PNG)
    assert (tmp_path / "out" / "report.csv").is_file()
    capsys.readouterr()
    assert main(["bench", "report", str(files["one"][0]), "-o", str(tmp_path / "out")]) == 2  # never over an older one
    assert "already exists; choose a new folder" in capsys.readouterr().err


def test_what_makes_a_result_less_is_told(tmp_path, capsys):
    file = file_of(tmp_path / "warm.json", ["m"], (16,), ("bfloat16",))
    record = json.loads(file.read_text())
    record["interrupted"] = True
    record["machine"]["power_source"] = "battery"
    record["results"][0]["drift"] = {"generation_tps": -0.4}
    file.write_text(json.dumps(record))
    assert main(["bench", "report", str(file)]) == 0
    told = capsys.readouterr().err
    assert "generation_tps drifted by -40 %" in told
    assert "interrupted" in told
    assert told.count("battery") == 1


def test_a_file_of_the_first_version_is_reported_too(files, tmp_path, capsys):
    record = json.loads(files["one"][0].read_text())
    first = {"model", "prompt_tokens", "generation_tokens", "prompt_tps", "generation_tps", "ttft_s",
             "peak_memory_bytes", "trials"}  # fmt: skip
    old = {"machine": record["machine"], "results": [{k: v for k, v in record["results"][0].items() if k in first}]}
    (tmp_path / "old.json").write_text(json.dumps(old))
    assert main(["bench", "report", str(tmp_path / "old.json"), "-o", str(tmp_path / "out")]) == 0
    (row,) = markdown_table(capsys.readouterr().out)[2:]
    assert row[1:5] == ["apple/OpenELM-270M", "unknown", "16+32", "1"]
    assert not (tmp_path / "out" / "roofline.png").exists()  # it knew no limits
    assert (tmp_path / "out" / "context.png").exists()


def test_a_pipe_in_a_name_stays_in_its_cell(tmp_path):
    rows = report.read_rows([file_of(tmp_path / "x.json", ["a|b"], (16,), ("bfloat16",))])
    assert len(markdown_table(report.to_markdown(rows))[2]) == len(report.HEADINGS)


def test_a_bad_file_among_good_ones_is_one_line(files, tmp_path, capsys):
    bad = tmp_path / "bad.json"
    bad.write_text("{}")
    assert main(["bench", "report", str(files["one"][0]), str(bad)]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith(f"openelm: error: {bad} is no benchmark record")


def test_plots_without_matplotlib_say_what_to_install(files, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(__import__("sys").modules, "matplotlib", None)
    assert main(["bench", "report", str(files["one"][0]), "-o", str(tmp_path / "out")]) == 2
    assert "pip install 'openelm-mlx[plot]'" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_files_without_results_are_refused(tmp_path, capsys):
    (tmp_path / "training.json").write_text(json.dumps(new_record([], {}, training=[])))
    assert main(["bench", "report", str(tmp_path / "training.json")]) == 2
    printed = capsys.readouterr()
    assert (printed.out, "hold no tokens/s" in printed.err) == ("", True)
