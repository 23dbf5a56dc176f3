"""`openelm doctor` on machines of every kind, most of them pretended: what it says, what to do, and the exit status."""

import json
import os
import platform
import shutil
import subprocess
import sys
import venv
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import pytest
from fake_hub import TOKEN, FakeHub, use_hub

import openelm_mlx
from openelm_mlx import cli, doctor, doctor_machine
from openelm_mlx.doctor_machine import Mlx, try_mlx
from openelm_mlx.hub import _GATED_LLAMA as GATED

ROOT = Path(__file__).parents[1]
MODEL = "apple/OpenELM-270M-Instruct"
NO_MLX = Mlx(error="ModuleNotFoundError: No module named 'mlx'")
LINUX = Mlx(version="0.32.4", chip="some CPU", available_bytes=8 * 2**30, fast_blas=True)
declared_requirements = doctor_machine._requirements
M2 = Mlx(version="0.32.4", chip="Apple M2", metal=True, available_bytes=5461 * 2**20)
GB = 10**9


@pytest.fixture(autouse=True)
def _an_ordinary_linux(monkeypatch, tmp_path):
    """What a test does not pretend otherwise: plenty of everything, and a Hub's cache that is empty."""
    pretend(monkeypatch, "Linux", "x86_64", mlx=LINUX)
    monkeypatch.setattr(doctor, "_total_bytes", lambda: 16 * 2**30)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=100 * GB))
    monkeypatch.setattr(platform, "libc_ver", lambda: ("glibc", "2.36"))
    monkeypatch.setattr(doctor_machine, "_requirements", lambda: ["pytest>=1"])
    use_hub(monkeypatch, "http://127.0.0.1:1", tmp_path / "home")
    monkeypatch.chdir(tmp_path)


def pretend(monkeypatch, system, machine, *, mlx, macos="", translated=""):
    monkeypatch.setattr(platform, "system", lambda: system)
    monkeypatch.setattr(platform, "machine", lambda: machine)
    monkeypatch.setattr(platform, "mac_ver", lambda: (macos, ("", "", ""), machine))
    monkeypatch.setattr(doctor_machine, "_sysctl", {"sysctl.proc_translated": translated}.get)
    monkeypatch.setattr(doctor, "try_mlx", lambda: mlx)


def report(capsys, *flags, status=0):
    """name -> check of a run that must end with this status; checked for what holds for every report."""
    assert cli.main(["doctor", "--json", *flags]) == status
    out, err = capsys.readouterr()
    found = {check["name"]: check for check in json.loads(out)["checks"]}
    problems = [name for name, check in found.items() if check["status"] == "problem"]
    assert {check["status"] for check in found.values()} <= {"ok", "warning", "problem"}
    assert all(check["fix"] for check in found.values() if check["status"] != "ok")
    assert bool(problems) == (status == 2)
    expected = f"openelm: error: found a problem with {', '.join(problems)}; the report says how to mend it\n"
    assert err == (expected if problems else "")
    assert "secret" not in out
    return found


def offline(capsys, status=0):
    return report(capsys, "--offline", status=status)


# The machine


def test_a_report_for_people(capsys):
    assert cli.main(["doctor", "--offline"]) == 0
    out, err = capsys.readouterr()
    lines = out.splitlines()
    assert lines[0].startswith("ok       Python     3.")
    assert "ok       MLX        0.32.4, CPU backend (some CPU)" in lines
    assert lines[-2:] == [
        "warning  tokenizer  LLaMA's is not in the Hub cache",
        "                    fix: go online once, or pass --tokenizer FILE",
    ]
    assert err == ""


def test_rosetta(capsys, monkeypatch):
    """Fault J1: no wheel of MLX fits an x86-64 Python on Apple silicon."""
    pretend(monkeypatch, "Darwin", "x86_64", mlx=NO_MLX, macos="15.1", translated="1")
    found = offline(capsys, status=2)
    assert found["system"]["found"] == "macOS 15.1, x86_64: Python runs under Rosetta"
    assert "arm64 Python" in found["system"]["fix"]
    assert found["MLX"]["found"] == "cannot be imported: ModuleNotFoundError: No module named 'mlx'"
    assert found["MLX"]["fix"].startswith("mend the problems above, then ")
    assert "BLAS" not in found


@pytest.mark.parametrize(
    ("machine", "macos", "found", "fix"),
    [
        ("x86_64", "14.5", "macOS 14.5, x86_64: an Intel Mac", "MLX needs Apple silicon, or Linux"),
        ("arm64", "13.6.1", "macOS 13.6.1, arm64, expected macOS 14 or later", "update macOS"),
    ],
)
def test_macs_that_mlx_does_not_run_on(capsys, monkeypatch, machine, macos, found, fix):
    pretend(monkeypatch, "Darwin", machine, mlx=NO_MLX, macos=macos)
    system = offline(capsys, status=2)["system"]
    assert (system["status"], system["found"], system["fix"]) == ("problem", found, fix)


def test_a_mac_with_8_gb(capsys, monkeypatch):
    pretend(monkeypatch, "Darwin", "arm64", mlx=M2, macos="26.0")
    monkeypatch.setattr(doctor, "_total_bytes", lambda: 8 * 2**30)
    found = offline(capsys)
    assert found["system"]["found"] == "macOS 26.0, arm64"
    assert found["MLX"]["found"] == "0.32.4, Metal (Apple M2)"
    assert found["memory"]["found"] == "8.6 GB, 5.7 GB of it for a model (Metal's recommendation)"
    assert found["fits"]["found"] == "bf16: 270M, 450M, 1.1B; 4-bit: 270M, 450M, 1.1B, 3B"


def test_a_mac_without_metal(capsys, monkeypatch):
    pretend(monkeypatch, "Darwin", "arm64", mlx=Mlx(version="0.32.4"), macos="15.0")
    assert offline(capsys)["MLX"]["status"] == "warning"


@pytest.mark.parametrize(
    ("machine", "libc", "words"),
    [
        ("x86_64", ("glibc", "2.31"), "glibc 2.35 or later"),
        ("x86_64", ("", ""), "glibc 2.35 or later"),
        ("riscv64", ("glibc", "2.40"), "x86_64 or aarch64"),
    ],
)
def test_linux_that_the_wheels_do_not_fit(capsys, monkeypatch, machine, libc, words):
    """A problem where MLX does not work, a warning where somebody built it."""
    monkeypatch.setattr(platform, "libc_ver", lambda: libc)
    for mlx, status in ((NO_MLX, "problem"), (LINUX, "warning")):
        pretend(monkeypatch, "Linux", machine, mlx=mlx)
        system = offline(capsys, status=2 if mlx.error else 0)["system"]
        assert system["status"] == status
        assert words in system["fix"]


def test_another_system(capsys, monkeypatch):
    pretend(monkeypatch, "Windows", "AMD64", mlx=NO_MLX)
    assert offline(capsys, status=2)["system"]["found"] == "Windows"


def test_an_old_python(capsys, monkeypatch):
    monkeypatch.setattr(platform, "python_version_tuple", lambda: ("3", "10", "1"))
    assert "expected 3.11 or later" in offline(capsys, status=2)["Python"]["found"]


@pytest.mark.parametrize("places", [["/usr/lib/x/openblas-pthread/libblas.so.3"], []])
def test_blas(capsys, monkeypatch, places):
    assert offline(capsys)["BLAS"]["status"] == "ok"
    monkeypatch.setattr("glob.glob", lambda pattern: places if "openblas-pthread" in pattern else [])
    pretend(monkeypatch, "Linux", "x86_64", mlx=Mlx(version="0.32.4"))
    blas = offline(capsys)["BLAS"]
    assert blas["status"] == "warning"
    assert blas["fix"].startswith(f"export LD_PRELOAD={places[0]}" if places else "sudo apt install libopenblas0-")


# MLX, tried in a child process


def fake_mlx(monkeypatch, tmp_path, code):
    (tmp_path / "site" / "mlx").mkdir(parents=True)
    (tmp_path / "site" / "mlx" / "__init__.py").write_text("")
    (tmp_path / "site" / "mlx" / "core.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path / "site")


def test_mlx_as_it_is():
    mlx = try_mlx()
    assert mlx.error == ""
    assert mlx.version == metadata.version("mlx")
    assert mlx.available_bytes > 0
    assert mlx.chip


@pytest.mark.parametrize(
    ("code", "error"),
    [
        ("raise ImportError('libmlx.so: cannot open\\n shared object')", "shared object"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGILL)", "the process was ended by SIGILL"),
        ("raise SystemExit(3)", "exit status 3"),
    ],
)
def test_an_mlx_that_cannot_be_imported(capsys, monkeypatch, tmp_path, code, error):
    """Fault J1, and worse: an import that ends its process must not end ours."""
    fake_mlx(monkeypatch, tmp_path, code)
    monkeypatch.setattr(doctor, "try_mlx", try_mlx)
    mlx = offline(capsys, status=2)["MLX"]
    assert mlx["found"].startswith("cannot be imported: ")
    assert error in mlx["found"]
    assert mlx["fix"] == f'{doctor_machine._PIP} --upgrade --force-reinstall "mlx[cpu]"'


def test_an_import_that_never_ends(monkeypatch, tmp_path):
    fake_mlx(monkeypatch, tmp_path, "import time; time.sleep(60)")
    monkeypatch.setattr(doctor_machine, "_IMPORT_TIMEOUT_S", 0.2)
    assert try_mlx() == Mlx(error="the import did not end within 0.2 s")


def test_a_python_with_nothing_installed(tmp_path):
    """The doctor itself needs only Python."""
    venv.create(tmp_path / "venv", with_pip=False, symlinks=True)
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "openelm_mlx").symlink_to(Path(openelm_mlx.__file__).parent)
    shutil.copy(ROOT / "pyproject.toml", tmp_path / "site")
    done = subprocess.run(
        [tmp_path / "venv" / "bin" / "python", "-m", "openelm_mlx", "doctor", "--json"],
        env=os.environ | {"PYTHONPATH": str(tmp_path / "site")}, cwd=tmp_path, capture_output=True, text=True,
    )  # fmt: skip
    found = {check["name"]: check for check in json.loads(done.stdout)["checks"]}
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1
    assert "No module named 'mlx'" in found["MLX"]["found"]
    assert found["packages"]["status"] == "problem"
    assert "'sentencepiece>=0.2'" in found["packages"]["fix"]
    assert found["Python"]["status"] == "ok"


# Packages, memory, disk


def test_packages_are_held_against_what_we_declare(capsys, monkeypatch):
    declared = ["numpy>=999", "no-such-package>=1", 'mlx>=999; sys_platform == "none"', 'pytest>=999; extra == "dev"']
    monkeypatch.setattr(doctor_machine, "_requirements", lambda: declared)
    packages = offline(capsys, status=2)["packages"]
    assert packages["found"] == f"numpy {metadata.version('numpy')}, no-such-package is missing"
    assert packages["fix"] == f"{doctor_machine._PIP} 'numpy>=999' 'no-such-package>=1'"


def test_what_we_declare_is_in_the_metadata_or_for_a_checkout_in_pyproject(monkeypatch):
    def not_installed(name):
        raise metadata.PackageNotFoundError(name)

    with monkeypatch.context() as patch:
        patch.setattr(metadata, "requires", {"openelm-mlx": ["numpy>=1"]}.get)
        assert declared_requirements() == ["numpy>=1"]
    monkeypatch.setattr(metadata, "requires", not_installed)
    monkeypatch.setattr(doctor_machine, "__file__", str(ROOT / "openelm_mlx" / "doctor_machine.py"))
    assert {"sentencepiece>=0.2", "mlx>=0.32.2; sys_platform == 'darwin'"} <= set(declared_requirements())


def test_versions_are_read_without_importing(tmp_path):
    code = "from openelm_mlx.doctor_machine import check_packages; import sys; check_packages(); "
    code += "print([name for name in ('mlx', 'mlx_lm', 'transformers') if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_little_memory(capsys, monkeypatch):
    monkeypatch.setattr(doctor, "_total_bytes", lambda: 2 * 2**30)
    fits = offline(capsys)["fits"]
    assert (fits["status"], fits["found"]) == ("warning", "bf16: none; 4-bit: 270M, 450M")


@pytest.mark.parametrize(
    ("free", "status", "words"),
    [
        (10_000_000, "problem", "0.0 GB free, expected 0.5 GB for 270M, the smallest model"),
        (3 * GB, "warning", "3.0 GB free, room for up to 1.1B in bf16"),
        (7 * GB, "ok", "7.0 GB free"),
    ],
)
def test_a_small_disk(capsys, monkeypatch, tmp_path, free, status, words):
    """Fault C3, before anybody starts."""
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=free))
    found = offline(capsys, status=2 if status == "problem" else 0)
    for name, folder in (("disk here", tmp_path), ("Hub cache", tmp_path / "home" / "hub")):
        assert (found[name]["status"], found[name]["found"]) == (status, f"{folder}: {words}")
    if status != "ok":
        assert "-o" in found["disk here"]["fix"]
        assert "HF_HOME" in found["Hub cache"]["fix"]


def test_folders_that_cannot_be_used(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    assert offline(capsys)["Hub cache"]["found"].endswith("100.0 GB free, but not writable")

    def denied(path):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(shutil, "disk_usage", denied)
    assert offline(capsys)["disk here"]["found"] == f"{tmp_path}: Permission denied"


# The Hub


@pytest.fixture
def served(monkeypatch, tmp_path):
    with FakeHub({MODEL: {"config.json": b"{}"}, GATED: {"tokenizer.model": b"pieces"}}) as hub:
        use_hub(monkeypatch, hub.url, tmp_path / "home")
        yield hub


def test_a_hub_without_login(capsys, served):
    found = report(capsys)
    assert found["Hub"]["found"] == f"{served.url} answers; not logged in, which public models do not need"
    assert "TinyLlama/TinyLlama-1.1B-Chat-v1.0" in found["tokenizer"]["found"]
    assert len(served.requests) == 1


@pytest.mark.parametrize(
    ("gated", "words"),
    [("", f"will come from {GATED}: your account has access"), ("gated", "your account has no access to it (403)")],
)
def test_a_hub_with_login(capsys, monkeypatch, served, gated, words):
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    served.failures[GATED] = gated
    found = report(capsys)
    assert found["Hub"]["found"] == f"{served.url} answers; your token is accepted"
    assert found["tokenizer"]["status"] == "ok"
    assert words in found["tokenizer"]["found"]


def test_a_refused_token_is_a_problem(capsys, monkeypatch, served):
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    served.failures[MODEL] = "401"
    assert "log in again (`hf auth login`)" in report(capsys, status=2)["Hub"]["fix"]


@pytest.mark.parametrize(
    ("failure", "words"), [("slow", "did not answer in time"), ("503", "is out of order"), ("off", "cannot connect")]
)
def test_a_hub_out_of_reach_is_a_warning(capsys, monkeypatch, served, failure, words):
    monkeypatch.setattr(doctor, "_TIMEOUT_S", 0.1)
    served.failures[MODEL] = failure
    if failure == "off":
        served.stop()
    found = report(capsys)
    assert (found["Hub"]["status"], found["tokenizer"]["status"]) == ("warning", "warning")
    assert words in found["Hub"]["fix"]


def test_offline_asks_nobody(capsys, monkeypatch, served):
    from huggingface_hub import constants

    assert offline(capsys)["Hub"]["found"] == "not asked: offline"
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert report(capsys)["Hub"]["found"] == "not asked: offline"
    assert served.requests == []


def test_a_tokenizer_in_the_cache(capsys, tmp_path):
    storage = tmp_path / "home" / "hub" / f"models--{GATED.replace('/', '--')}"
    (storage / "snapshots" / "abc").mkdir(parents=True)
    (storage / "snapshots" / "abc" / "tokenizer.model").touch()
    (storage / "refs").mkdir()
    (storage / "refs" / "main").write_text("abc")
    assert offline(capsys)["tokenizer"]["found"] == f"LLaMA's, in the Hub cache (from {GATED})"
