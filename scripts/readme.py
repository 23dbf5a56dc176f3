"""Puts real output into README.md, between its markers; --check says whether what stands there still holds.

Times and rates change from run to run, so --check compares everything but them.
"""

import contextlib
import io
import re
import sys
from pathlib import Path

from openelm_mlx import cli

README = Path(__file__).parent.parent / "README.md"
BLOCKS = {"demo": ["demo"], "info": ["info", "tiny"]}
_TEMPORARY = re.compile(r"\S*/openelm-demo-\w+/")
# What differs from run to run and from machine to machine: times, rates, memory, and a story drawn at random.
_MEASURED = re.compile(
    r"\d[\d.,]* (?=tokens/s|s\b|MB|GFLOP/s|%)|\d[\d,]*\.\d+|\d(-\d)? (?=warm-ups)|(memory|compute) (?=limit)"
    r"|(?<=--seed 1\n).*?(?=\nprompt +\d+ tokens)",
    re.DOTALL,
)
_ON_SOME_DAYS = re.compile(r"^(drift|warm-up): .*\n", re.MULTILINE)  # what a busy machine makes bench say


def output(arguments: list[str]) -> str:
    """What a command prints, stdout and stderr as a terminal shows them."""
    with io.StringIO() as text, contextlib.redirect_stdout(text), contextlib.redirect_stderr(text):
        status = cli.main(arguments)
        printed = _TEMPORARY.sub("", text.getvalue())
    if status:
        raise SystemExit(f"openelm {' '.join(arguments)} ended with status {status}: {printed}")
    return "\n".join(line.rstrip() for line in printed.splitlines()).strip()


def block(name: str, printed: str) -> str:
    """The marked text of the README."""
    command = "" if name == "demo" else f"$ openelm {' '.join(BLOCKS[name])}\n"
    return f"<!-- {name} -->\n```console\n{command}{printed}\n```\n<!-- /{name} -->"


def lasting(text: str) -> list[str]:
    """The words that must not change."""
    return _MEASURED.sub("#", _ON_SOME_DAYS.sub("", text)).split()


def main(arguments: list[str]) -> int:
    """Rewrite the blocks, or with --check compare them."""
    text = README.read_text(encoding="utf-8")
    fresh = text
    for name, command in BLOCKS.items():
        fresh = re.sub(
            rf"<!-- {name} -->.*?<!-- /{name} -->", lambda _, n=name, c=command: block(n, output(c)), fresh, flags=re.S
        )
    if arguments != ["--check"]:
        README.write_text(fresh, encoding="utf-8")
        return 0
    if lasting(fresh) != lasting(text):
        print("README.md quotes output that has changed: run python scripts/readme.py", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
