"""A target is the old folder or the whole new one, whatever happens to the process that writes it."""

import errno
import fcntl
import os
import shutil
import signal
import subprocess
import sys
from collections import namedtuple
from pathlib import Path

import pytest

from openelm_mlx import atomic
from openelm_mlx.atomic import check_space, check_target, new_folder, new_folders
from openelm_mlx.errors import OutputError

NAMES = ["model", "with space", 'it\'s "quoted"', "modèle-模型"]


def fill(folder: Path, text: str = "new") -> None:
    (folder / "config.json").write_text(text)


def write_and_fail(target: Path, error: BaseException, force: bool = False) -> None:
    with new_folder(target, force=force) as folder:
        fill(folder)
        raise error


def write_all(targets: list[Path]) -> None:
    with new_folders(targets, force=True) as folders:
        for folder in folders:
            fill(folder)


def content(target: Path) -> str:
    return (target / "config.json").read_text()


def entries(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.fixture
def old(tmp_path) -> Path:
    (tmp_path / "model").mkdir()
    fill(tmp_path / "model", "old")
    return tmp_path / "model"


@pytest.mark.parametrize("name", NAMES)
def test_a_folder_appears_whole(tmp_path, name):
    target = tmp_path / "made" / "on the way" / name
    with new_folder(target, force=False) as folder:
        assert not target.exists()
        assert folder.parent.parent == target.parent  # one volume: the rename is a rename
        fill(folder)
    assert content(target) == "new"
    assert entries(target.parent) == [name]


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_an_error_leaves_nothing(tmp_path, error):  # fault C2
    with pytest.raises(error):
        write_and_fail(tmp_path / "a" / "model", error())
    assert entries(tmp_path) == []


class TestExistingTarget:
    def test_is_refused_by_default(self, old):  # fault C1
        with pytest.raises(OutputError, match=r"already exists; .*--force"), new_folder(old, force=False):
            pytest.fail("no work before the refusal")
        assert content(old) == "old"

    @pytest.mark.parametrize("can_exchange", [True, False])
    def test_is_replaced_by_force(self, old, monkeypatch, can_exchange):
        if not can_exchange:
            monkeypatch.setattr(atomic, "_exchange", lambda one, other: False)
        with new_folder(old, force=True) as folder:
            assert content(old) == "old"
            fill(folder)
        assert content(old) == "new"
        assert entries(old.parent) == ["model"]

    def test_survives_an_error(self, old):
        with pytest.raises(RuntimeError):
            write_and_fail(old, RuntimeError(), force=True)
        assert content(old) == "old"
        assert entries(old.parent) == ["model"]

    def test_a_file_is_told_apart(self, tmp_path):
        (tmp_path / "model").write_text("")
        with pytest.raises(OutputError, match="is a file"):
            check_target(tmp_path / "model", force=True)
        with pytest.raises(OutputError, match="model is a file, so"):
            check_target(tmp_path / "model" / "inner", force=False)

    def test_a_link_is_told_apart(self, old):
        link = old.with_name("link")
        link.symlink_to(old)
        with pytest.raises(OutputError, match=r"is a symbolic link.*model\)"):
            check_target(link, force=True)

    def test_an_unwritable_place_is_told_apart(self, tmp_path, monkeypatch):
        monkeypatch.setattr(os, "access", lambda path, mode: False)  # root may write anywhere
        with pytest.raises(OutputError, match="is not writable"):
            check_target(tmp_path / "model", force=False)

    def test_force_is_for_model_folders_only(self, tmp_path, monkeypatch):
        (tmp_path / "home" / "work").mkdir(parents=True)
        with pytest.raises(OutputError, match=r"holds no config\.json"):
            check_target(tmp_path / "home", force=True)
        fill(tmp_path / "home")
        monkeypatch.chdir(tmp_path / "home" / "work")
        with pytest.raises(OutputError, match="where you are working"):
            check_target(tmp_path / "home", force=True)


class TestSeveral:
    @pytest.mark.parametrize("can_exchange", [True, False])
    @pytest.mark.parametrize("error", [KeyboardInterrupt, OSError(errno.EIO, "Input/output error")])
    def test_all_get_their_names_or_none(self, old, monkeypatch, can_exchange, error):
        install = atomic._install
        installed = []

        def fails_at_last(new, target, old_state):
            install(new, target, old_state)
            installed.append(content(target))
            if len(installed) == 3:
                raise error

        if not can_exchange:
            monkeypatch.setattr(atomic, "_exchange", lambda one, other: False)
        monkeypatch.setattr(atomic, "_install", fails_at_last)
        with pytest.raises((KeyboardInterrupt, OutputError)):
            write_all([old.with_name("fresh"), old, old.with_name("last")])
        assert installed == ["new"] * 3
        assert (content(old), entries(old.parent)) == ("old", ["model"])


class TestTwoProcesses:
    def test_the_second_is_refused(self, tmp_path):
        with new_folder(tmp_path / "model", force=False) as folder:
            fill(folder)
            with (
                pytest.raises(OutputError, match="another process is writing"),
                new_folder(tmp_path / "model", force=False),
            ):
                pytest.fail("two writers")
        assert content(tmp_path / "model") == "new"

    def test_a_killed_one_is_cleaned_up_after(self, tmp_path):
        code = """
import os, signal, sys
from pathlib import Path
from openelm_mlx.atomic import new_folder
with new_folder(Path(sys.argv[1]), force=False) as folder:
    (folder / "half").write_text("x")
    os.kill(os.getpid(), signal.SIGKILL)
"""
        path = os.pathsep.join(sys.path)
        killed = subprocess.run(
            [sys.executable, "-c", code, str(tmp_path / "model")], env=os.environ | {"PYTHONPATH": path}
        )
        assert killed.returncode == -signal.SIGKILL
        assert entries(tmp_path) == [".model.partial"]
        with new_folder(tmp_path / "model", force=False) as folder:
            assert entries(folder) == []
            fill(folder)
        assert entries(tmp_path) == ["model"]

    def test_killed_between_two_renames_the_old_folder_returns(self, old):
        """Only where the volume cannot exchange two names."""
        partial = old.with_name(".model.partial")
        partial.mkdir()
        old.rename(partial / "old")
        with pytest.raises(OutputError, match="already exists"), new_folder(old, force=False):
            pytest.fail("the old folder is back")
        assert content(old) == "old"
        assert entries(old.parent) == ["model"]

    def test_a_volume_without_locks_is_written_too(self, tmp_path, monkeypatch):
        def no_locks(file, operation):
            raise OSError(errno.ENOLCK, "No locks available")

        monkeypatch.setattr(fcntl, "flock", no_locks)
        with new_folder(tmp_path / "model", force=False) as folder:
            fill(folder)
        assert entries(tmp_path) == ["model"]


class TestSpace:
    def test_both_numbers_are_named(self, tmp_path, monkeypatch):  # fault C3
        usage = namedtuple("usage", "total used free")
        monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(0, 0, 10_000_000))
        with pytest.raises(OutputError, match=r"needs 0\.54 GB.*0\.01 GB free"):
            check_space(tmp_path / "not" / "yet" / "there", 543_000_000)
        check_space(tmp_path / "model", 10_000_000)

    def test_a_full_disk_is_one_line(self, tmp_path):
        full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        with pytest.raises(OutputError, match="No space left on device; nothing was changed"):
            write_and_fail(tmp_path / "model", full)
        assert entries(tmp_path) == []
