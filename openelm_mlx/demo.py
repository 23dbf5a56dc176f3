"""The main job on the bundled checkpoint, offline: PyTorch weights to MLX, a story, tokens/s.

Each step is the command that you would type yourself for a model from the Hub.
"""

import argparse
import shlex
import tempfile
from pathlib import Path

from .hub import BUNDLED_MODEL

REAL_MODEL = "apple/OpenELM-270M-Instruct"
_STORY = ("--prompt", "Once upon a time there was a king who", "--max-tokens", "120")
_STORY_SAMPLING = ("--temp", "0.6", "--top-p", "0.9", "--repetition-penalty", "1.15", "--seed", "1")
_BENCH = ("-n", "3")
_NEXT = f"""
That was a toy of 4.6 million parameters. The same for Apple's models:

  openelm convert {REAL_MODEL} -o openelm-270m
  openelm generate --model openelm-270m --prompt "Name three uses of a paper clip."
  openelm bench --model openelm-270m
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The demo takes no flags."""


def run(args: argparse.Namespace) -> int:
    """Run the steps in a temporary folder; return the status of the first that fails."""
    with tempfile.TemporaryDirectory(prefix="openelm-demo-") as folder:
        for title, command in _steps(Path(folder) / "tiny-mlx"):
            print(f"\n== {title}\n$ openelm {shlex.join(command)}\n", flush=True)
            status = _openelm(command)
            if status:
                return status
    print(_NEXT)
    return 0


def _steps(target: Path) -> list[tuple[str, list[str]]]:
    model = ["--model", str(target)]
    source = str(BUNDLED_MODEL) if Path("tiny").exists() else "tiny"  # a folder of that name would be meant instead
    return [
        ("A checkpoint as Apple publishes them, converted to MLX", ["convert", source, "-o", str(target)]),
        ("What it is: every layer has its own width", ["info", str(target)]),
        ("A story", ["generate", *model, *_STORY, *_STORY_SAMPLING]),
        ("How fast", ["bench", *model, *_BENCH]),
    ]


def _openelm(command: list[str]) -> int:
    from .cli import main  # the composition root, which imports this module

    return main(command)
