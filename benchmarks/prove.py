"""Run every script here that proves a claim of this project, and rewrite the pages that quote them: `make bench`.

Each script is a program of its own: it measures, prints, ends with status 1 when a claim does not hold, and with
`--write-docs` puts its table, the machine and the date into a page of docs/. Nothing is downloaded. All of them take
the better part of an hour and 16 GB of disk; `--only NAME` runs one.

    python -m openelm_mlx.benchmarks.prove [--only NAME,...] [--no-docs]
"""

import argparse
import importlib.util
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass

from .arguments import known, listed
from .openblas import preload_openblas


@dataclass(frozen=True)
class Script:
    """A module of this room with `main(argv)`, what it proves, and what it needs that is not always there."""

    proves: str
    runs: tuple[tuple[str, ...], ...] = ((),)  # arguments of each
    writes_docs: bool = True
    needs: tuple[str, ...] = ()  # modules


SCRIPTS = {
    "vs_mlx_lm": Script("cold start, first token and decode against mlx-lm", needs=("mlx_lm",)),
    "lookup_decoding": Script("prompt lookup gains on repetitive text and costs next to nothing on prose"),
    "batching": Script("eight prompts at once against one after the other"),
    "chat_turns": Script("a chat's tenth turn begins as promptly as its first"),
    "conversion": Script(
        "conversion against mlx_lm.convert, time and memory", runs=((), ("--size", "3B")), needs=("mlx_lm",)
    ),
    "artefacts": Script("time and memory of converting every kind of file that Apple released", writes_docs=False),
    "training": Script("LoRA fine-tuning against mlx-lm: first step, memory, tokens/s", needs=("mlx_lm",)),
    "quantization": Script("what quantisation costs in perplexity"),
    "llama_cpp_agreement": Script(
        "llama.cpp computes the same from our GGUF files", writes_docs=False, needs=("gguf", "llama_cpp")
    ),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run them one after the other; status 1 when any failed. What cannot run here is named and skipped."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", type=listed(known(SCRIPTS)), metavar="NAME,...", help=f"of {', '.join(SCRIPTS)}")
    parser.add_argument("--no-docs", action="store_true", help="measure and print, rewrite nothing")
    args = parser.parse_args(argv)
    outcomes = {name: run_script(name, SCRIPTS[name], not args.no_docs) for name in args.only or SCRIPTS}
    print("\n== summary")
    for name, outcome in outcomes.items():
        print(f"{name:<20} {outcome}")
    return 1 if any(outcome.startswith("FAILED") for outcome in outcomes.values()) else 0


def run_script(name: str, script: Script, with_docs: bool) -> str:
    """What became of one script, which prints as it goes."""
    missing = [module for module in script.needs if importlib.util.find_spec(module) is None]
    if missing:
        return f"skipped: {missing[0]} is not installed"
    command = [sys.executable, "-m", f"{__package__}.{name}"]
    last = ["--write-docs"] if with_docs and script.writes_docs else []
    print(f"\n== {name}: {script.proves}", flush=True)
    start = time.monotonic()
    statuses = [subprocess.run([*command, *run, *last], check=False).returncode for run in script.runs]
    status = next(filter(None, statuses), 0)
    took = f"{time.monotonic() - start:.0f} s"
    return f"done in {took}" if status == 0 else f"FAILED with status {status} after {took}"


if __name__ == "__main__":
    preload_openblas()
    raise SystemExit(main())
