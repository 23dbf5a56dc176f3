"""What `openelm doctor` says of the machine and of what is installed: Python, system, MLX, BLAS, packages.

Nothing here imports MLX into this process: a child tries that, since on some machines the attempt ends the process.
"""

import glob
import json
import os
import platform
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path

OK, WARNING, PROBLEM = "ok", "warning", "problem"

_MIN_PYTHON = (3, 11)
_MIN_MACOS = 14
_MIN_GLIBC = (2, 35)  # of MLX's wheels: manylinux_2_35
_LINUX_MACHINES = ("x86_64", "aarch64")
_OPENBLAS = ("/usr/lib/*/openblas-pthread/libblas.so.3", "/usr/lib64/libopenblas.so.0", "/usr/lib/libopenblas.so.0")
_SHOWN_PACKAGES = ("mlx-lm", "transformers", "huggingface_hub")
_IMPORT_TIMEOUT_S = 60
_PIP = f"{shlex.quote(sys.executable)} -m pip install"


@dataclass(frozen=True)
class Check:
    """One line of the report: what was found, and for anything but `ok` what to do about it."""

    name: str
    status: str
    found: str
    fix: str = ""


@dataclass(frozen=True)
class Mlx:
    """MLX as a child process found it; `error` says why it cannot be imported."""

    error: str = ""
    version: str = ""
    chip: str = ""
    metal: bool = False
    available_bytes: int = 0
    fast_blas: bool = False


def describe_mlx() -> None:
    """Print an `Mlx` as JSON: what the child process runs."""
    from . import device

    maps = Path("/proc/self/maps")
    loaded = maps.read_text(encoding="utf-8", errors="replace") if maps.exists() else ""
    found = Mlx(
        version=metadata.version("mlx"),
        chip=device.chip_name(),
        metal=device.is_metal(),
        available_bytes=device.available_memory_bytes(),
        fast_blas=re.search(r"openblas|libmkl|libblis", loaded) is not None,
    )
    print(json.dumps(asdict(found)))


def try_mlx() -> Mlx:
    """Import MLX in a child process that sees what this one sees."""
    code = f"from {__name__} import describe_mlx; describe_mlx()"
    paths = os.pathsep.join([*sys.path, str(Path(__file__).parents[1])])
    try:
        child = subprocess.run(
            [sys.executable, "-c", code],
            env=os.environ | {"PYTHONPATH": paths},
            capture_output=True,
            text=True,
            errors="replace",
            check=False,
            timeout=_IMPORT_TIMEOUT_S,
        )
    except subprocess.TimeoutExpired:
        return Mlx(error=f"the import did not end within {_IMPORT_TIMEOUT_S} s")
    if child.returncode == 0:
        return Mlx(**json.loads(child.stdout.splitlines()[-1]))
    words = [line for line in child.stderr.splitlines() if line.strip()][-1:]
    if child.returncode < 0:
        words.append(f"the process was ended by {signal.Signals(-child.returncode).name}")
    return Mlx(error="; ".join(" ".join(word.split()) for word in words) or f"exit status {child.returncode}")


def check_machine(mlx: Mlx) -> Iterator[Check]:
    """Python and the system: what MLX's wheels ask for, a mere warning where MLX works all the same."""
    bad = PROBLEM if mlx.error else WARNING
    version = platform.python_version()
    if tuple(map(int, platform.python_version_tuple()[:2])) < _MIN_PYTHON:
        yield Check("Python", PROBLEM, f"{version}, expected 3.11 or later", "make the environment with a newer Python")
    else:
        yield Check("Python", OK, f"{version} ({sys.executable})")
    machine = platform.machine()
    if platform.system() == "Darwin":
        yield _mac(machine, platform.mac_ver()[0], bad)
    elif platform.system() == "Linux":
        yield _linux(machine, bad)
    else:
        yield Check("system", bad, platform.system(), "MLX runs on macOS and Linux: use a Mac, or WSL on Windows")


def check_mlx(mlx: Mlx, earlier: list[Check]) -> Iterator[Check]:
    """MLX, and on Linux the BLAS that it computes with."""
    mac = platform.system() == "Darwin"
    if mlx.error:
        package = "mlx" if mac else '"mlx[cpu]"'
        first = "mend the problems above, then " if any(check.status == PROBLEM for check in earlier) else ""
        fix = f"{first}{_PIP} --upgrade --force-reinstall {package}"
        yield Check("MLX", PROBLEM, f"cannot be imported: {mlx.error}", fix)
    elif mac and not mlx.metal:
        fix = "virtual machines have no GPU: run on the Mac itself"
        yield Check("MLX", WARNING, f"{mlx.version}, computes on the CPU: no Metal device", fix)
    else:
        yield Check("MLX", OK, f"{mlx.version}, {'Metal' if mlx.metal else 'CPU backend'} ({mlx.chip})")
    if platform.system() == "Linux" and not mlx.error:
        yield _blas(mlx.fast_blas)


def check_packages() -> Check:
    """Versions of what this package needs, from their metadata: nothing is imported."""
    declared = [text for text in _requirements() if "extra ==" not in text]
    try:
        from packaging.requirements import Requirement
    except ImportError:  # every proper installation brings it
        fix = f"{_PIP} {' '.join(map(shlex.quote, declared))}"
        return Check("packages", PROBLEM, "hardly anything that openelm-mlx needs is installed", fix)
    needed = [item for item in map(Requirement, declared) if item.marker is None or item.marker.evaluate()]
    faulty = [item for item in needed if not item.specifier.contains(_version(item.name) or "0", prereleases=True)]
    if faulty:
        found = ", ".join(f"{item.name} {_version(item.name) or 'is missing'}" for item in faulty)
        wanted = " ".join(shlex.quote(str(item).split(";")[0].strip()) for item in faulty)
        return Check("packages", PROBLEM, found, f"{_PIP} {wanted}")
    return Check("packages", OK, ", ".join(f"{name} {_version(name) or 'missing'}" for name in _SHOWN_PACKAGES))


def _mac(machine: str, version: str, bad: str) -> Check:
    found = f"macOS {version}, {machine}"
    if machine != "arm64" and _sysctl("sysctl.proc_translated") == "1":
        fix = "MLX needs an arm64 Python: install one (python.org, or Homebrew in /opt/homebrew) from a terminal whose "
        fix += "'Open using Rosetta' is off, and make the environment again with it"
        return Check("system", bad, f"{found}: Python runs under Rosetta", fix)
    if machine != "arm64":
        return Check("system", bad, f"{found}: an Intel Mac", "MLX needs Apple silicon, or Linux")
    if int(version.split(".")[0] or 0) < _MIN_MACOS:
        return Check("system", bad, f"{found}, expected macOS {_MIN_MACOS} or later", "update macOS")
    return Check("system", OK, found)


def _linux(machine: str, bad: str) -> Check:
    library, version = platform.libc_ver()
    found = f"Linux {machine}, {library or 'no glibc'} {version}".rstrip()
    if machine not in _LINUX_MACHINES:
        return Check("system", bad, found, f"MLX has no wheels for it: use {' or '.join(_LINUX_MACHINES)}")
    if library != "glibc" or tuple(map(int, version.split(".")[:2])) < _MIN_GLIBC:
        fix = "MLX's wheels need glibc 2.35 or later: Debian 12, Ubuntu 22.04, or newer"
        return Check("system", bad, found, fix)
    return Check("system", OK, found)


def _blas(fast: bool) -> Check:
    if fast:
        return Check("BLAS", OK, "OpenBLAS (or its like) is preloaded")
    installed = [file for place in _OPENBLAS for file in glob.glob(place)]
    found = "MLX's own reference BLAS: float32 matrix products are some 35 times slower than with OpenBLAS"
    if installed:
        return Check("BLAS", WARNING, found, f"export LD_PRELOAD={installed[0]}")
    return Check("BLAS", WARNING, found, "sudo apt install libopenblas0-pthread, then run this again")


def _sysctl(name: str) -> str:
    asked = subprocess.run(["/usr/sbin/sysctl", "-n", name], capture_output=True, text=True, check=False)
    return asked.stdout.strip()


def _requirements() -> list[str]:
    """The dependencies that this package declares, installed or run from a checkout."""
    try:
        return metadata.requires("openelm-mlx") or []
    except metadata.PackageNotFoundError:
        import tomllib

        project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text(encoding="utf-8"))
        return project["project"]["dependencies"]


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""
