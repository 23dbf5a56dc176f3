"""The shell scripts behind `make`: tried with a stand-in Python that writes down what it is asked to do."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

# Answers like a Python: makes a .venv that holds itself, logs everything else, fails where told to.
FAKE_PYTHON = """#!/bin/sh
case "$*" in
*"-m venv"*) mkdir -p .venv/bin; cp "$0" .venv/bin/python ;;
-c*) exit "${FAKE_UNSUITABLE:-0}" ;;
*) echo "$*" >>"$FAKE_LOG" ;;
esac
case "$*" in *"${FAKE_FAILS:-nothing fails}"*) exit 1 ;; esac
"""


@pytest.fixture
def checkout(tmp_path, monkeypatch) -> Path:
    """A folder with our scripts and a fake Python that logs to `log`."""
    folder = tmp_path / "a checkout"
    shutil.copytree(ROOT / "scripts", folder / "scripts")
    (folder / "pyproject.toml").write_text("")
    fake_python(tmp_path / "python")
    monkeypatch.setenv("PYTHON", str(tmp_path / "python"))
    monkeypatch.setenv("FAKE_LOG", str(tmp_path / "log"))
    return folder


def fake_python(path: Path) -> Path:
    path.write_text(FAKE_PYTHON)
    path.chmod(0o755)
    return path


def sh(folder: Path, script: str, *arguments: str) -> subprocess.CompletedProcess:
    return subprocess.run(["sh", f"scripts/{script}", *arguments], cwd=folder, capture_output=True, text=True)


def log(folder: Path) -> list[str]:
    path = folder.parent / "log"
    return path.read_text().splitlines() if path.exists() else []


class TestFindPython:
    def test_the_named_python_comes_first(self, checkout):
        done = sh(checkout, "find-python")
        assert (done.returncode, done.stdout.strip()) == (0, os.environ["PYTHON"])

    def test_a_shim_that_does_not_run_is_passed_over(self, checkout, tmp_path, monkeypatch):
        shims, works = tmp_path / "shims", tmp_path / "works"
        shims.mkdir()
        works.mkdir()
        (shims / "python3.14").write_text("#!/bin/sh\necho 'command not found' >&2\nexit 127\n")
        (shims / "python3.14").chmod(0o755)
        fake_python(works / "python3.12")
        monkeypatch.delenv("PYTHON")
        monkeypatch.setenv("PATH", f"{shims}:{works}:{os.environ['PATH']}")
        assert sh(checkout, "find-python").stdout.strip() in (str(works / "python3.12"), shutil.which("python3.13"))

    @pytest.mark.skipif(Path("/opt/homebrew/bin/python3").exists(), reason="Homebrew's Python is found by its place")
    def test_none_is_one_line_that_says_how_to_get_one(self, checkout, tmp_path, monkeypatch):
        bare = tmp_path / "bin"
        bare.mkdir()
        for tool in ("sh", "uname"):
            (bare / tool).symlink_to(shutil.which(tool))
        monkeypatch.delenv("PYTHON")
        monkeypatch.setenv("PATH", str(bare))
        monkeypatch.setenv("HOME", str(tmp_path))
        done = sh(checkout, "find-python")
        assert (done.returncode, done.stdout) == (2, "")
        assert done.stderr.count("\n") == 1
        assert "Python 3.11 or newer" in done.stderr


class TestSetup:
    def test_a_second_call_does_nothing(self, checkout):
        first, second = sh(checkout, "setup", "dev"), sh(checkout, "setup", "dev")
        assert (first.returncode, second.returncode, second.stdout) == (0, 0, "")
        assert log(checkout) == ["-m pip install -qq --disable-pip-version-check --editable .[dev]"]

    def test_what_tests_need_holds_what_the_demo_needs_but_not_the_reverse(self, checkout):
        for extra in ([], ["dev"], [], ["dev"]):
            assert sh(checkout, "setup", *extra).returncode == 0
        assert [line.rpartition(" ")[2] for line in log(checkout)] == [".", ".[dev]"]

    def test_changed_dependencies_and_a_moved_checkout_install_anew(self, checkout):
        sh(checkout, "setup")
        later = checkout.stat().st_mtime + 60
        os.utime(checkout / "pyproject.toml", (later, later))
        sh(checkout, "setup")
        os.utime(checkout / "pyproject.toml", (1, 1))
        sh(checkout, "setup")
        assert len(log(checkout)) == 2
        moved = checkout.rename(checkout.parent / "moved")
        sh(moved, "setup")
        assert len(log(moved)) == 3

    def test_a_failed_install_is_tried_again(self, checkout, monkeypatch):
        monkeypatch.setenv("FAKE_FAILS", "pip install")
        assert sh(checkout, "setup").returncode != 0
        monkeypatch.delenv("FAKE_FAILS")
        assert sh(checkout, "setup").returncode == 0
        assert len(log(checkout)) == 2


class TestCheck:
    ALL = ("-m ruff format --check .", "-m ruff check .", "-m mypy", "-m pytest -n auto --maxprocesses 4")

    def test_everything_runs(self, checkout):
        done = sh(checkout, "check")
        assert done.returncode == 0
        assert tuple(log(checkout)) == self.ALL

    @pytest.mark.parametrize("failing", ["ruff format", "ruff check", "mypy", "pytest"])
    def test_everything_runs_and_one_failure_is_the_status(self, checkout, monkeypatch, failing):
        monkeypatch.setenv("FAKE_FAILS", failing)
        done = sh(checkout, "check")
        assert done.returncode == 1
        assert done.stderr.splitlines()[-1].startswith("failed: ")
        assert tuple(log(checkout)) == self.ALL

    def test_only_what_is_named(self, checkout):
        assert sh(checkout, "check", "types", "lint").returncode == 0
        assert log(checkout) == ["-m mypy", "-m ruff check ."]
        assert sh(checkout, "check", "nonsense").returncode == 2


class TestWithOpenblas:
    def test_command_arguments_and_status_pass_through(self, checkout):
        done = sh(checkout, "with-openblas", "sh", "-c", 'echo "$1"; exit 7', "_", "two words")
        assert (done.returncode, done.stdout) == (7, "two words\n")

    def test_a_library_already_preloaded_is_left_alone(self, checkout, monkeypatch):
        monkeypatch.setenv("LD_PRELOAD", os.environ.get("LD_PRELOAD", "") or "/nowhere/libblas.so")
        done = sh(checkout, "with-openblas", "sh", "-c", "echo $LD_PRELOAD")
        assert done.stdout.strip() == os.environ["LD_PRELOAD"]


def test_make_knows_what_contributing_promises():
    targets = [line.partition(":")[0] for line in (ROOT / "Makefile").read_text().splitlines() if ":" in line]
    assert {"demo", "test", "check", "clean"} <= set(targets)


@pytest.mark.parametrize(
    "path", [p for p in sorted((ROOT / "scripts").iterdir()) if not p.suffix], ids=lambda p: p.name
)
def test_scripts_can_be_run_as_they_are(path):
    assert os.access(path, os.X_OK)
    assert path.read_text().startswith("#!/bin/sh\n")
