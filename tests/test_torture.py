"""Conversions under conditions nobody wishes for: killed, two at once, odd paths, full disks, spoilt files.

The same with larger counts: `python tests/torture.py`, whose results docs/faults.md has.
"""

import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torture

from openelm_mlx.cli import main
from openelm_mlx.convert import convert, job
from openelm_mlx.errors import OutputError

PYTHON = [sys.executable, "-m", "openelm_mlx"]


def convert_in_child(target: Path, *arguments: str) -> subprocess.Popen:
    return subprocess.Popen(
        [*PYTHON, "convert", "tiny", "-o", str(target), *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_killed_at_any_moment(tmp_path):  # fault C2
    seen = torture.kills(1, tmp_path, random.Random())
    assert seen["old"] + seen["new"] == 1


def test_spoilt_files_are_refused_or_read(tmp_path):
    seen = torture.mutations(200, tmp_path, random.Random())
    for kind in ("safetensors header", "config", "pickle"):
        assert seen[f"{kind}: read"] + seen[f"{kind}: refused"] == 200
        assert seen[f"{kind}: refused"] > 50


def test_two_processes_into_one_target(tmp_path):
    both = [convert_in_child(tmp_path / "model") for _ in range(2)]
    errors = [child.communicate()[1] for child in both]
    assert sorted(child.returncode for child in both) == [0, 2]
    refused = next(text for child, text in zip(both, errors, strict=True) if child.returncode)
    assert "another process is writing" in refused or "already exists" in refused
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_sigterm_leaves_nothing(tmp_path):
    code = (
        "import os, signal, sys\n"
        "from openelm_mlx.convert import job\n"
        "from openelm_mlx.cli import main\n"
        "job.copy_extras = lambda *arguments: os.kill(os.getpid(), signal.SIGTERM)\n"
        "sys.exit(main(['convert', 'tiny', '-o', sys.argv[1]]))\n"
    )
    done = subprocess.run([sys.executable, "-c", code, tmp_path / "model"], capture_output=True, text=True)
    assert done.returncode == 128 + signal.SIGTERM
    assert done.stderr == "openelm: terminated\n"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["my model", 'it\'s "the" model', "modèle 模型 🙂", "two\nlines", "-o", "%s{x}$HOME"])
def test_odd_paths(tmp_path, name, capsys):
    source = convert("tiny", tmp_path / "from" / name, dtype="float32").path
    assert main(["convert", f"{source}", "-o", f"{tmp_path / name}"]) == 0
    assert (tmp_path / name / "model.safetensors").is_file()
    capsys.readouterr()
    assert main(["convert", f"{source}", "-o", f"{tmp_path / name}"]) == 2
    assert capsys.readouterr().err.count("\n") == 1


@pytest.fixture
def small_disk(tmp_path):
    """A volume of 6 MB; skipped where mounting is not allowed."""
    disk = tmp_path / "disk"
    disk.mkdir()
    options = ["mount", "-t", "tmpfs", "-o", "size=6m", "tmpfs", str(disk)]
    if sys.platform != "linux" or os.geteuid() != 0 or subprocess.run(options, capture_output=True).returncode:
        pytest.skip("needs the right to mount a tmpfs")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


@pytest.mark.parametrize("options", [{}, {"dtype": "float32"}])
def test_a_disk_that_fills_up(small_disk, monkeypatch, options):  # fault C3
    (small_disk / "model").mkdir()
    (small_disk / "model" / "config.json").write_text("{}")
    monkeypatch.setattr(job, "check_space", lambda target, needed: None)  # somebody else fills it meanwhile
    with pytest.raises(OutputError, match="No space left on device; nothing was changed"):
        convert("tiny", small_disk / "model", force=True, **options)
    assert [path.name for path in small_disk.iterdir()] == ["model"]
    assert (small_disk / "model" / "config.json").read_text() == "{}"
    monkeypatch.undo()
    with pytest.raises(OutputError, match=r"needs 0\.0\d GB, .* has 0\.01 GB free"):
        convert("tiny", small_disk / "model", force=True, **options)


def test_a_read_only_volume(small_disk):
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    with pytest.raises(OutputError, match="is not writable; choose another place"):
        convert("tiny", small_disk / "model")
