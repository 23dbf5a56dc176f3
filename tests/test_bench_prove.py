"""`make bench`: every script that proves a claim is in the table, runs, and has a block to write into."""

import ast
import re
import sys
from importlib import import_module
from pathlib import Path

import pytest

import openelm_mlx
from openelm_mlx.benchmarks import batching, prove
from openelm_mlx.benchmarks.comparison import write_text

ROOM = Path(openelm_mlx.__file__).parent / "benchmarks"
ROOT = Path(__file__).parents[1]
PERFORMANCE = (ROOT / "docs" / "performance.md").read_text(encoding="utf-8")


def programs():
    """Modules that are programs of their own."""
    guard = re.compile(r"^if __name__ == .__main__.:", re.MULTILINE)
    return {path.stem for path in ROOM.glob("*.py") if guard.search(path.read_text(encoding="utf-8"))} - {"prove"}


def test_every_script_is_in_the_table_of_prove():
    """A new one: add a line to SCRIPTS in benchmarks/prove.py."""
    assert set(prove.SCRIPTS) == programs()


@pytest.mark.parametrize("name", prove.SCRIPTS)
def test_each_has_a_main_and_a_block_where_it_writes(name, capsys):
    script = prove.SCRIPTS[name]
    source = (ROOM / f"{name}.py").read_text(encoding="utf-8")
    assert ast.get_docstring(ast.parse(source))
    with pytest.raises(SystemExit) as left:
        import_module(f"openelm_mlx.benchmarks.{name}").main(["--help"])
    assert left.value.code == 0
    assert ("--write-docs" in capsys.readouterr().out) == script.writes_docs
    assert "PERFORMANCE_PAGE" not in source or f"<!-- {name} -->" in PERFORMANCE


def test_scripts_run_one_after_the_other_and_a_failure_is_the_status(monkeypatch, capsys):
    ran = []

    def fake(command, **_):
        ran.append(command[1:])
        return type("Done", (), {"returncode": int("batching" in command[2])})

    monkeypatch.setattr(prove.subprocess, "run", fake)
    monkeypatch.setattr(prove, "SCRIPTS", {n: prove.SCRIPTS[n] for n in ("batching", "lookup_decoding")} | {
        "other": prove.Script("nothing", needs=("no_such_module",))})  # fmt: skip
    assert prove.main([]) == 1
    assert ran == [["-m", f"openelm_mlx.benchmarks.{n}", "--write-docs"] for n in ("batching", "lookup_decoding")]
    printed = capsys.readouterr().out
    assert "FAILED with status 1" in printed
    assert "skipped: no_such_module is not installed" in printed
    assert prove.main(["--only", "lookup_decoding", "--no-docs"]) == 0
    assert ran[-1] == ["-m", "openelm_mlx.benchmarks.lookup_decoding"]


@pytest.mark.parametrize("statuses", [(0, -9), (1, 0)])
def test_both_tables_of_conversion_are_rewritten_and_either_may_fail(monkeypatch, capsys, statuses):
    ran, left = [], list(statuses)

    def fake(command, **_):
        ran.append(command[3:])
        return type("Done", (), {"returncode": left.pop(0)})

    monkeypatch.setattr(prove.subprocess, "run", fake)
    monkeypatch.setattr(prove.importlib.util, "find_spec", lambda name: name)
    assert prove.main(["--only", "conversion"]) == 1
    assert ran == [["--write-docs"], ["--size", "3B", "--write-docs"]]
    assert f"FAILED with status {sum(statuses)}" in capsys.readouterr().out


def test_a_script_puts_its_words_with_machine_and_date_into_the_page(monkeypatch, tmp_path, capsys):
    page = tmp_path / "page.md"
    page.write_text("<!-- batching -->\nold\n<!-- /batching -->\n")
    monkeypatch.setattr(batching, "PERFORMANCE_PAGE", page)
    monkeypatch.setattr(batching, "_run", lambda model, tokenizer, prompts, tokens, size: (100.0 * size, [[1]]))
    assert batching.main(["--trials", "1", "--write-docs"]) == 0
    text = page.read_text()
    assert "8 at once 800: 8.00x" in text
    assert re.search(r"tiny, float32, .*MLX .*, \d{4}-\d\d-\d\d\n", text)
    assert "old" not in text
    with pytest.raises(AssertionError, match="0 blocks"):
        write_text(page, "nowhere", "x", "y")


def test_make_bench_runs_it():
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert "openelm_mlx.benchmarks.prove" in makefile
    assert sys.modules[prove.__name__] is prove
