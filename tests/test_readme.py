"""The README's words are true: commands exist, quoted output is real, the Python runs, links lead somewhere."""

import os
import re
import shlex
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

from openelm_mlx import cli

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
COMMANDS = re.findall(r"^(?:\$ |  )openelm (.*)$", README, re.MULTILINE)


def test_there_are_commands_to_check():
    assert len(COMMANDS) > 8


@pytest.mark.parametrize("line", sorted(set(COMMANDS)))
def test_every_command_is_understood(line):
    name, *arguments = shlex.split(line.split(" < ")[0])
    module = import_module(cli.COMMANDS[name][0], "openelm_mlx")
    parser = cli.Parser(prog=f"openelm {name}")
    module.add_arguments(parser)
    parser.parse_args(arguments)  # exits, and so fails, for a flag that does not exist
    assert callable(module.run)


def test_quoted_output_is_real():
    done = subprocess.run(
        [sys.executable, "scripts/readme.py", "--check"],
        cwd=ROOT, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


def test_the_python_example_runs(capsys):
    (example,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    exec(compile(example, "README.md", "exec"), {})
    assert "tokens/s, length" in capsys.readouterr().out


@pytest.mark.parametrize("target", sorted(set(re.findall(r"\]\(([\w./-]+)\)", README))))
def test_links_to_files_lead_somewhere(target):
    assert (ROOT / target).is_file()
