"""LoRA fine-tuning against mlx-lm in one run: time to the first step, memory above the weights, tokens/s.

Both train the same random-weight folder on the same rows, each in a process of its own, in turns.

    python -m openelm_mlx.benchmarks.training [--size 270M] [--lengths 512 1024] [--steps 3] [--write-docs]
"""

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import mlx.core as mx

from ..config import PUBLISHED_SIZES, OpenELMConfig
from ..errors import RunFailedError
from .arguments import positive_count
from .comparison import PERFORMANCE_PAGE, Comparison, print_comparisons, write_block, write_json
from .openblas import preload_openblas
from .random_checkpoint import write_random_folder
from .record import machine
from .vs_mlx_lm import describe

FIRST_STEP = {"first run on a machine": 2.0, "later runs": 2.0}  # mlx-lm's time over ours, at least
MEMORY, SPEED = {"plain": 0.9, "checkpointed": 0.28}, {"plain": 1.0, "checkpointed": 0.75}
VARIED_SPEED = 1.0
_LOG = "training_log.jsonl"  # of `openelm lora`, in the adapter folder
_SHORT_ROW, _STARTS = 16, 3  # tokens, turns
_VARIED_LENGTHS = (20, 100)  # words, so that padded lengths differ
_VARIED_ROWS, _VARIED_BATCH = 20, 4
_FLOAT32 = 4
# mlx-lm's reports, as it sends them to wandb: its own output has neither memory nor time.
_THEIRS = """
import json, sys, time
import mlx_lm.lora as lora
class Told:
    def on_train_loss_report(self, info):
        print("REPORT", json.dumps({**info, "time": time.time()}), flush=True)
    def on_val_loss_report(self, info):
        pass
lora.get_reporting_callbacks = lambda *args, **options: Told()
lora.main()
"""


@dataclass(frozen=True)
class Training:
    """One process: seconds from its start to the first step, the peak of MLX's allocator, and each later step."""

    first_step_s: float
    peak_bytes: float
    tokens_per_second: tuple[float, ...]

    @property
    def us_per_token(self) -> tuple[float, ...]:
        return tuple(1e6 / rate for rate in self.tokens_per_second)


class Sides:
    """Runs either program on a folder; every run gets an adapter folder of its own."""

    def __init__(self, model: Path, root: Path):
        self._model, self._root, self._number = model, root, count()

    def ours(self, data: Path, *flags: str, fresh: bool = False) -> Training:
        """`fresh`: with an empty temporary folder."""
        out = self._root / f"adapters{next(self._number)}"
        flags = (*flags, "--adapter-path", str(out), "--save-every", "1000000")
        begun = _run([sys.executable, "-m", "openelm_mlx", "lora", *self._common(data), *flags], fresh)[0]
        lines = [json.loads(line) for line in (out / _LOG).read_text(encoding="utf-8").splitlines()]
        return _training(begun, [line for line in lines if "train_loss" in line])

    def theirs(self, data: Path, *flags: str, fresh: bool = False) -> Training:
        flags = (*flags, "--adapter-path", str(self._root / f"adapters{next(self._number)}"))
        begun, output = _run([sys.executable, "-c", _THEIRS, *self._common(data), *flags], fresh)
        lines = [json.loads(line[6:]) for line in output.splitlines() if line.startswith("REPORT ")]
        return _training(begun, lines)

    def _common(self, data: Path) -> list[str]:
        return ["--model", str(self._model), "--train", "--data", str(data), "--num-layers", "-1",
                "--steps-per-report", "1"]  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print, and write what was asked for. Status 1 when a claim does not hold."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", default="270M", choices=PUBLISHED_SIZES)
    parser.add_argument("--lengths", type=positive_count, nargs="*", default=[512, 1024], metavar="TOKENS")
    parser.add_argument("--steps", type=positive_count, default=3, help="timed steps of each process, after the first")
    parser.add_argument("--no-varied", action="store_true", help="leave out the rows of varied lengths")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every figure to this file")
    parser.add_argument("--write-docs", action="store_true", help="put the table into docs/performance.md")
    args = parser.parse_args(argv)
    comparisons = []
    with tempfile.TemporaryDirectory(prefix="openelm-training-") as folder:
        for comparison in measure(args.size, Path(folder), args.lengths, args.steps, varied=not args.no_varied):
            print(" | ".join(comparison.cells), file=sys.stderr, flush=True)
            comparisons.append(comparison)
    record = machine()
    conditions = f"LoRA, rank 8, all linear layers of a random-weight OpenELM-{args.size} in fp32; {describe(record)}"
    print_comparisons(comparisons, conditions)
    if args.json:
        write_json(args.json, comparisons, record)
    if args.write_docs:
        write_block(PERFORMANCE_PAGE, "training", comparisons, conditions)
    return 0 if all(comparison.passed for comparison in comparisons) else 1


def measure(size: str, root: Path, lengths: Sequence[int], steps: int, *, varied: bool) -> Iterator[Comparison]:
    """Every claim, in the order of the table."""
    config = OpenELMConfig.from_name(size)
    write_random_folder(root / "model", config, mx.float32)
    mx.clear_cache()
    sides, weights = Sides(root / "model", root), config.num_parameters() * _FLOAT32
    yield from _start(sides, root)
    for length in lengths:
        data = write_rows(root / f"data{length}", [length] * 4)
        flags = ("--iters", str(steps + 1), "--batch-size", "1", "--max-seq-length", str(length))
        yield from _fixed_length(sides, data, flags, length, weights)
    if varied:
        yield _varied(sides, root)


def _start(sides: Sides, root: Path) -> Iterator[Comparison]:
    """From the shell to the first step on short rows, which leave the time to the programs themselves.

    On a CPU, MLX compiles fused functions with the system's compiler and keeps them in the temporary folder: a fresh
    one is a new machine, or one that was started again.
    """
    data = write_rows(root / "short", [_SHORT_ROW] * 4)
    flags = ("--iters", "1", "--batch-size", "1", "--max-seq-length", str(_SHORT_ROW))
    for name, target in FIRST_STEP.items():
        fresh = name.startswith("first")
        runs = [
            (sides.ours(data, *flags, fresh=fresh), sides.theirs(data, *flags, fresh=fresh)) for _ in range(_STARTS)
        ]
        ours, theirs = (tuple(run.first_step_s * 1e3 for run in each) for each in zip(*runs, strict=True))
        yield Comparison(f"start to first step, {_SHORT_ROW} tokens, {name}", "ms", ours, theirs, target)


def _fixed_length(sides: Sides, data: Path, flags: tuple[str, ...], length: int, weights: int) -> Iterator[Comparison]:
    """Plain and checkpointed, against mlx-lm's plain run of the same rows."""
    theirs = sides.theirs(data, *flags)
    runs = {"plain": sides.ours(data, *flags), "checkpointed": sides.ours(data, *flags, "--grad-checkpoint")}
    for name, ours in runs.items():
        job = f"{length} tokens, {name}"
        above = ((ours.peak_bytes - weights) / 1e6,), ((theirs.peak_bytes - weights) / 1e6,)
        yield Comparison(f"memory above the weights, {job}", "MB", *above, MEMORY[name], is_share=True)
        yield Comparison(f"time per token, {job}", "us", ours.us_per_token, theirs.us_per_token, SPEED[name])


def _varied(sides: Sides, root: Path) -> Comparison:
    """One epoch of rows of many lengths; the time of all its tokens, new shapes included, without the first step."""
    draw = random.Random(0)
    data = write_rows(root / "varied", [draw.randint(*_VARIED_LENGTHS) for _ in range(_VARIED_ROWS)], exact=True)
    flags = ("--iters", str(_VARIED_ROWS // _VARIED_BATCH), "--batch-size", str(_VARIED_BATCH))
    theirs, ours = sides.theirs(data, *flags), sides.ours(data, *flags)
    mean = [sum(each.us_per_token) / len(each.us_per_token) for each in (ours, theirs)]
    return Comparison("time per token, varied lengths", "us", (mean[0],), (mean[1],), VARIED_SPEED)


def write_rows(folder: Path, words: Sequence[int], *, exact: bool = False) -> Path:
    """A data folder with a train.jsonl of made-up text: so many words a row, or enough to be cut at that length."""
    folder.mkdir()
    draw = random.Random(1)
    known = ("the", "king", "had", "a", "daughter", "who", "went", "into", "wood", "and", "found", "an", "old", "woman")
    with (folder / "train.jsonl").open("w", encoding="utf-8") as file:
        for number in words:
            text = " ".join(draw.choice(known) for _ in range(number if exact else 2 * number))
            file.write(json.dumps({"text": text}) + "\n")
    return folder


def _training(begun: float, reports: list[dict[str, Any]]) -> Training:
    first, *rest = reports
    rates = tuple(report["tokens_per_second"] for report in rest)
    return Training(first["time"] - begun, max(report["peak_memory"] for report in reports) * 1e9, rates)


def _run(command: list[str], fresh: bool) -> tuple[float, str]:
    """(time of the start, what was printed). Raises RunFailedError with its last line when the process failed."""
    with tempfile.TemporaryDirectory(prefix="openelm-fresh-") as folder:
        env = os.environ | ({"TMPDIR": folder} if fresh else {})
        begun = time.time()
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=env)
    if done.returncode != 0:
        raise RunFailedError(f"{command[3:5]} failed: {' '.join(done.stderr.strip().splitlines()[-1:])}")
    return begun, done.stdout


if __name__ == "__main__":
    preload_openblas()
    raise SystemExit(main())
