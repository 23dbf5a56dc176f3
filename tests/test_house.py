"""The rules of the house: which way imports point, how light the inference path is, what never lands in a file."""

import ast
import os
import re
import subprocess
import sys
import tomllib
from importlib.util import resolve_name
from pathlib import Path

import pytest

import openelm_mlx

ROOT = Path(__file__).parents[1]
PACKAGE = Path(openelm_mlx.__file__).parent
ROOMS = ("benchmarks", "convert", "lora")
CORE = sorted([*PACKAGE.glob("*.py"), *(PACKAGE / "chat").glob("*.py")])
ROOM_FILES = {room: sorted((PACKAGE / room).rglob("*.py")) for room in ROOMS}
OURS = [*CORE, *(path for files in ROOM_FILES.values() for path in files)]
HEAVY = {"torch", "transformers", "mlx_lm", "huggingface_hub", "tokenizers", "jinja2", "yaml", "rich", "prompt_toolkit"}


def imports(path: Path) -> set[str]:
    """Absolute names of everything a file imports, lazily or not; `from x import y` counts as x.y."""
    inside = path.is_relative_to(PACKAGE)
    package = ".".join(("openelm_mlx", *path.relative_to(PACKAGE).parts[:-1])) if inside else ""
    names = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = "." * node.level + (node.module or "")
            base = resolve_name(base, package) if node.level else base
            names |= {f"{base}.{alias.name}" for alias in node.names}
    return names


def is_under(name: str, *packages: str) -> bool:
    return any(name == package or name.startswith(f"{package}.") for package in packages)


def run_python(code: str, cwd: Path) -> subprocess.CompletedProcess:
    """A fresh interpreter that sees the openelm_mlx under test, from a folder that holds nothing."""
    env = os.environ | {"PYTHONPATH": str(PACKAGE.parent), "HF_HUB_OFFLINE": "1"}
    return subprocess.run([sys.executable, "-c", code], cwd=cwd, env=env, capture_output=True, text=True)


class TestImports:
    @pytest.mark.parametrize("path", [*OURS, *sorted((ROOT / "tests").glob("*.py"))], ids=lambda path: path.name)
    def test_rooms_are_never_top_level_packages(self, path):
        assert [name for name in imports(path) if is_under(name, *ROOMS)] == []

    @pytest.mark.parametrize("path", CORE, ids=lambda path: path.name)
    def test_core_imports_no_room(self, path):
        rooms = [f"openelm_mlx.{room}" for room in ROOMS]
        assert [name for name in imports(path) if is_under(name, *rooms)] == []

    @pytest.mark.parametrize("room", ROOMS)
    def test_rooms_do_not_import_each_other(self, room):
        others = [f"openelm_mlx.{other}" for other in ROOMS if other != room]
        assert [(path.name, n) for path in ROOM_FILES[room] for n in imports(path) if is_under(n, *others)] == []

    def test_only_cli_names_the_rooms(self):
        quoted = re.compile(r"""["'](openelm_mlx)?\.(benchmarks|convert|lora)\b""")
        assert [path.name for path in CORE if quoted.search(path.read_text(encoding="utf-8"))] == ["cli.py"]

    @pytest.mark.parametrize("path", CORE, ids=lambda path: path.name)
    def test_the_core_never_imports_the_heavy_three(self, path):
        assert [name for name in imports(path) if is_under(name, "torch", "transformers", "mlx_lm")] == []

    def test_nothing_we_run_imports_torch(self):
        assert [path.name for path in OURS if any(is_under(name, "torch") for name in imports(path))] == []


class TestInferencePath:
    def test_importing_the_package_is_free(self, tmp_path):
        done = run_python("import sys, openelm_mlx; print(*sys.modules)", tmp_path)
        ours = {name for name in done.stdout.split() if is_under(name, "openelm_mlx")}
        assert ours == {"openelm_mlx"}
        assert not {"mlx", "numpy", *HEAVY} & set(done.stdout.split())

    def test_loading_and_generating_is_light(self, tmp_path):
        # fault A18, J2
        code = """
import sys
from openelm_mlx import generate, load
model, tokenizer = load("tiny")
assert generate(model, tokenizer, "Once upon a time", max_tokens=3)
print("loaded:", *sys.modules)
"""
        done = run_python(code, tmp_path)
        assert done.returncode == 0, done.stderr
        modules = set(done.stdout.rpartition("loaded:")[2].split())
        assert "mlx.core" in modules
        assert not HEAVY & modules

    def test_help_does_not_load_mlx(self, tmp_path):
        # fault J3
        code = """
import sys
from openelm_mlx.cli import COMMANDS, main
for arguments in (["--help"], *([command, "--help"] for command in COMMANDS)):
    try:
        main(arguments)
    except SystemExit as stop:
        assert stop.code == 0, arguments
    else:
        raise AssertionError(arguments)
    print("after", *arguments, *({"mlx", "mlx.core", "numpy", *HEAVY} & set(sys.modules)), file=sys.stderr)
"""
        done = run_python(code.replace("*HEAVY", f"*{HEAVY}"), tmp_path)
        lines = [line for line in done.stderr.splitlines() if line.startswith("after")]
        assert done.returncode == 0, done.stderr
        assert lines[0] == "after --help"
        assert done.stderr.splitlines() == lines
        assert [line for line in lines if "mlx" in line.split()] == []


class TestPublicApi:
    def test_all_is_the_public_api(self):
        public = {name for name in vars(openelm_mlx) if not name.startswith("_")}
        values = {name: getattr(openelm_mlx, name) for name in openelm_mlx.__all__}
        assert sorted(set(openelm_mlx.__all__)) == openelm_mlx.__all__
        assert set(openelm_mlx._HOMES) == set(openelm_mlx.__all__)
        assert {value.__module__.partition(".")[0] for value in values.values()} == {"openelm_mlx"}
        modules = {path.stem for path in CORE} | {"chat", *ROOMS}
        assert public - modules - {"TYPE_CHECKING", "Any"} <= set(openelm_mlx.__all__)

    def test_type_checkers_see_the_same_names(self):
        tree = ast.parse((PACKAGE / "__init__.py").read_text(encoding="utf-8"))
        (block,) = (node for node in tree.body if isinstance(node, ast.If))
        assert {alias.name for node in block.body for alias in node.names} == set(openelm_mlx.__all__)

    def test_an_unknown_name_is_an_attribute_error(self):
        with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
            _ = openelm_mlx.nonsense

    def test_version_is_the_packages(self):
        project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
        assert project["version"] == openelm_mlx.__version__


SKIPPED_FOLDERS = {".git", ".venv", ".hypothesis", "build", "dist", "__pycache__"}
TEXT = {".py", ".md", ".toml", ".yaml", ".yml", ".json", ".in", ".txt", ".jsonl", ".svg", ""}


def text_files() -> list[Path]:
    """Every text file of the checkout, each once: links are not followed."""
    found = []
    for folder, folders, files in os.walk(ROOT):
        folders[:] = [f for f in folders if f not in SKIPPED_FOLDERS and not f.endswith((".egg-info", "_cache"))]
        found += [Path(folder, file) for file in files if Path(file).suffix in TEXT]
    return found


class TestFiles:
    def test_no_file_names_this_machine(self):
        paths = "|".join(["/" + "work/", "/" + "root/", "/" + "tmp/dev", r"/home/[a-z]", "/" + r"Users/[a-z]"])
        hosts = "|".join(["python" + "hosted", "pypi" + r"\.org", "find" + "-links"])
        pattern = re.compile(f"({paths}|{hosts})")
        found = [(path.name, m[0]) for path in text_files() if (m := pattern.search(path.read_text(encoding="utf-8")))]
        assert found == []

    def test_linters_walk_each_room_once(self):
        ruff = [sys.executable, "-m", "ruff", "check", "--show-files", "."]
        walked = [
            Path(line).resolve() for line in subprocess.check_output(ruff, cwd=ROOT, text=True).split("\n") if line
        ]
        assert len(walked) == len(set(walked))
        assert {path.resolve() for path in OURS if path.is_relative_to(ROOT)} <= set(walked)

    def test_nothing_is_left_to_do(self):
        pattern = re.compile(r"\b(" + "|".join(["TO" + "DO", "FIX" + "ME", "X" + "XX", "HA" + "CK"]) + r")\b")
        assert [path.name for path in text_files() if pattern.search(path.read_text(encoding="utf-8"))] == []

    @pytest.mark.parametrize("path", OURS, ids=lambda path: path.name)
    def test_a_file_has_one_idea_and_says_which(self, path):
        source = path.read_text(encoding="utf-8")
        tree = ast.parse(source)
        functions = [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]
        assert not source or ast.get_docstring(tree)
        assert len(source.splitlines()) <= 400
        assert [f.name for f in functions if f.end_lineno - f.lineno >= 60] == []
