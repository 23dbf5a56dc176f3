"""What is in the sdist and in the wheel built from it: the rooms under the one namespace, the data, nothing else."""

import shutil
import subprocess
import sys
import tarfile
import zipfile
from importlib.metadata import version
from pathlib import Path

import pytest

import openelm_mlx

ROOT = Path(__file__).parents[1]
PACKAGE = Path(openelm_mlx.__file__).parent
LEFT_OUT = shutil.ignore_patterns(".*", "build", "dist", "*.egg-info", "__pycache__", "tests")
BUILD = """
import sys
from setuptools import build_meta
print(getattr(build_meta, f"build_{sys.argv[1]}")(sys.argv[2]))
"""

pytestmark = pytest.mark.skipif(
    int(version("setuptools").split(".")[0]) < 77, reason="pyproject.toml asks for setuptools 77"
)


def build(kind: str, source: Path, target: Path) -> Path:
    """Build an 'sdist' or a 'wheel' with the setuptools at hand: no network."""
    done = subprocess.run([sys.executable, "-c", BUILD, kind, target], cwd=source, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return target / done.stdout.splitlines()[-1]


@pytest.fixture(scope="module")
def sdist(tmp_path_factory) -> Path:
    """Built from a copy of the checkout: setuptools leaves folders behind where it builds."""
    folder = tmp_path_factory.mktemp("sdist")
    shutil.copytree(ROOT, folder / "checkout", symlinks=True, ignore=LEFT_OUT)
    return build("sdist", folder / "checkout", folder)


@pytest.fixture(scope="module")
def wheel(sdist, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    with tarfile.open(sdist) as archive:
        archive.extractall(folder, filter="data")
    return build("wheel", folder / sdist.name.removesuffix(".tar.gz"), folder)


def package_files() -> set[str]:
    """Every file of the package, through the links, as `openelm_mlx/...`."""
    folders = [PACKAGE, *(PACKAGE / room for room in ("benchmarks", "convert", "lora"))]
    found = {path for folder in folders for path in folder.rglob("*") if path.is_file()}
    return {f"openelm_mlx/{p.relative_to(PACKAGE)}" for p in found if "__pycache__" not in p.parts}


def test_the_wheel_holds_the_package_and_nothing_beside_it(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    metadata = {name for name in names if name.split("/")[0].endswith(".dist-info")}
    assert names - metadata == package_files()
    assert "openelm_mlx/data/tiny/model.safetensors" in names
    assert "openelm_mlx/py.typed" in names
    assert {f"openelm_mlx/{room}/__init__.py" for room in ("benchmarks", "convert", "lora")} <= names


def test_the_wheel_brings_the_command_and_the_licence(wheel):
    with zipfile.ZipFile(wheel) as archive:
        (entry_points,) = (name for name in archive.namelist() if name.endswith("entry_points.txt"))
        assert "openelm = openelm_mlx.cli:main" in archive.read(entry_points).decode()
        assert any(name.endswith("licenses/LICENSE") for name in archive.namelist())


def test_the_sdist_holds_files_not_links(sdist):
    with tarfile.open(sdist) as archive:
        members = archive.getmembers()
    names = {member.name.partition("/")[2] for member in members if member.isfile()}
    assert all(member.isfile() or member.isdir() for member in members)
    assert package_files() <= names
    assert {"README.md", "CHANGELOG.md", "LICENSE", "pyproject.toml"} <= names
