"""Converting against mlx_lm.convert, verification included: time, and memory over that of the interpreter.

Random weights of the published sizes; each conversion runs in a process of its own, and the two programs take turns.
`--size 3B` converts 12 GB of float32 in three shards to 4 bits, which needs 16 GB of disk; mlx-lm does not take part.

    python -m openelm_mlx.benchmarks.conversion [--size 3B] [--trials 3] [--json FILE] [--write-docs]
"""

import argparse
import importlib.util
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..config import OpenELMConfig
from .arguments import positive_count
from .child_run import Run, interpreter_bytes, run_in_child
from .comparison import PERFORMANCE_PAGE, Comparison, print_comparisons, write_block, write_json
from .openblas import preload_openblas
from .random_checkpoint import write_random_shards
from .record import machine
from .vs_mlx_lm import describe

_OURS = "from openelm_mlx.convert.conversion import convert"
_THEIRS = "from mlx_lm import convert"
_TORCH = "import torch\nfrom safetensors.torch import save_file"
_CALL = "convert(sys.argv[1], sys.argv[2], {options})"
_TORCH_WORK = """
weights = torch.load(sys.argv[1], map_location="cpu", weights_only=True)
save_file({"transformer." + name: value.contiguous() for name, value in weights.items()}, sys.argv[2])
"""
_MB = 1e6


@dataclass(frozen=True)
class Promise:
    """A conversion and what is claimed of it; `speed` times as fast, at most `limit_mb`, or `share` of mlx-lm's."""

    job: str
    size: str
    source_dtype: str
    options: str
    speed: float
    limit_mb: float | None = None
    share: float | None = None


PROMISES = (
    Promise("270M fp32 -> fp32", "270M", "float32", 'dtype="float32"', 3.0, limit_mb=64),
    Promise("270M fp32 -> bf16", "270M", "float32", 'dtype="bfloat16"', 1.5, share=0.6),
    Promise("270M fp32 -> 4-bit", "270M", "float32", 'dtype="bfloat16", quantize=True', 2.0, share=0.6),
    Promise("1.1B bf16 -> bf16", "1_1B", "bfloat16", 'dtype="bfloat16"', 1.3, limit_mb=64),
)
_PT_SPEED = 2.5
_3B = Promise("3B fp32, 3 shards -> 4-bit", "3B", "float32", 'dtype="bfloat16", quantize=True', 0, limit_mb=150)
_3B_LIMIT_S = 60.0


@dataclass(frozen=True)
class Alone:
    """A row without an opponent: a figure against its limit, or the reason why there is none."""

    job: str
    figure: str
    target: str = ""
    passed: bool = True

    @property
    def cells(self) -> tuple[str, ...]:
        return (self.job, self.figure, "", "", self.target, ("yes" if self.passed else "no") if self.target else "")

    def to_dict(self) -> dict[str, Any]:
        return vars(self)


Row = Comparison | Alone


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print, and write what was asked for. Status 1 when a claim does not hold."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=("3B",), help="instead of the comparison")
    parser.add_argument("--trials", type=positive_count, default=3, help="turns for each side")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every figure to this file")
    parser.add_argument("--write-docs", action="store_true", help="put the table into docs/performance.md")
    args = parser.parse_args(argv)
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="openelm-conversion-") as folder:
        for row in largest(Path(folder)) if args.size else measure(Path(folder), args.trials):
            print(" | ".join(row.cells), file=sys.stderr, flush=True)
            rows.append(row)
    record = machine()
    conditions = f"Random weights, {args.trials} turns; {describe(record)}"
    print_comparisons(rows, conditions)
    if args.json:
        write_json(args.json, rows, record)
    if args.write_docs:
        write_block(PERFORMANCE_PAGE, "conversion_3B" if args.size else "conversion", rows, conditions)
    return 0 if all(row.passed for row in rows) else 1


def measure(root: Path, trials: int, promises: Sequence[Promise] = PROMISES) -> Iterator[Row]:
    """Every claim but 3B's; folders are written below `root`, one source at a time."""
    idle = interpreter_bytes()
    source: Path | None = None
    for promise in promises:
        folder = root / f"{promise.size}-{promise.source_dtype}"
        if folder != source:
            if source is not None:
                shutil.rmtree(source)
            write_random_shards(folder, OpenELMConfig.from_name(promise.size), promise.source_dtype)
            source = folder
        ours = _converter(_OURS, promise, folder, root / "out")
        theirs = _converter(_THEIRS, promise, folder, root / "out")
        yield from compare(promise, *in_turn(ours, theirs, trials), idle)
    yield from _torch_file(root, trials)


def largest(root: Path) -> Iterator[Row]:
    """3B, which has more weights than a laptop has memory."""
    write_random_shards(root / "3B", OpenELMConfig.from_name(_3B.size), _3B.source_dtype)
    run, idle = _converter(_OURS, _3B, root / "3B", root / "out")(), interpreter_bytes()
    limit = f"<= {_3B_LIMIT_S:.0f} s"
    yield Alone(f"{_3B.job}, time", f"{run.seconds:.0f} s", limit, run.seconds <= _3B_LIMIT_S)
    if run.peak_bytes is not None and idle is not None:
        peak, most = (run.peak_bytes - idle) / _MB, _3B.limit_mb or 0
        yield Alone(f"{_3B.job}, memory", f"{peak:.0f} MB", f"<= {most:.0f} MB", peak <= most)


def compare(promise: Promise, ours: Sequence[Run], theirs: Sequence[Run], idle: int | None) -> Iterator[Row]:
    """The rows of one promise: time, and memory where the system tells."""
    yield _faster(f"{promise.job}, time", [run.seconds for run in ours], [run.seconds for run in theirs], promise.speed)
    whole = [run.process_s for run in ours], [run.process_s for run in theirs]
    yield _faster(f"{promise.job}, time as a command, imports included", *whole, promise.speed)
    our_peaks, their_peaks = _peaks_mb(ours, idle), _peaks_mb(theirs, idle)
    if not our_peaks or not their_peaks:
        return
    if promise.share is not None:
        yield Comparison(f"{promise.job}, memory", "MB", our_peaks, their_peaks, promise.share, is_share=True)
    elif promise.limit_mb is not None:
        worst = max(our_peaks)
        job = f"{promise.job}, memory (mlx-lm: {max(their_peaks):,.0f} MB)"
        yield Alone(job, f"{worst:,.0f} MB", f"<= {promise.limit_mb:.0f} MB", worst <= promise.limit_mb)


def _faster(job: str, ours_s: Sequence[float], theirs_s: Sequence[float], target: float) -> Comparison:
    return Comparison(job, "ms", tuple(1e3 * s for s in ours_s), tuple(1e3 * s for s in theirs_s), target)


def _peaks_mb(runs: Sequence[Run], idle: int | None) -> tuple[float, ...]:
    """What each took over an idle interpreter; () where that is not known."""
    return tuple((run.peak_bytes - idle) / _MB for run in runs if run.peak_bytes and idle)


def in_turn(ours: Callable[[], Run], theirs: Callable[[], Run], trials: int) -> tuple[list[Run], list[Run]]:
    """As `comparison.take_turns`, for runs that have two figures: one warm-up each, then in alternation."""
    runs: tuple[list[Run], list[Run]] = ([], [])
    for trial in range(-1, trials):
        for side in (0, 1) if trial % 2 == 0 else (1, 0):
            run = (ours, theirs)[side]()
            if trial >= 0:
                runs[side].append(run)
    return runs


def _converter(imports: str, promise: Promise, source: Path, out: Path) -> Callable[[], Run]:
    def convert() -> Run:
        try:
            return run_in_child(imports, _CALL.format(options=promise.options), [source, out])
        finally:
            shutil.rmtree(out, ignore_errors=True)

    return convert


def _torch_file(root: Path, trials: int) -> Iterator[Row]:
    """CoreNet's .pt against what people do with PyTorch."""
    job = "270M .pt -> safetensors, time (theirs: torch.load + save)"
    if importlib.util.find_spec("torch") is None:
        yield Alone(job, "not measured: torch is not installed")
        return
    folder, file = root / "270M-float32-pt", root / "270M-float32-pt" / "checkpoint.pt"
    write_random_shards(folder, OpenELMConfig.from_name("270M"), "float32")
    save = (
        "weights = load_file(sys.argv[1])\n"
        "torch.save({name.removeprefix('transformer.'): value for name, value in weights.items()}, sys.argv[2])"
    )
    run_in_child("import torch\nfrom safetensors.torch import load_file", save, [folder / "model.safetensors", file])
    (folder / "model.safetensors").unlink()
    promise = Promise(job, "270M", "float32", f'dtype="float32", tokenizer={str(folder)!r}', _PT_SPEED)
    ours = _converter(_OURS, promise, file, root / "out")

    def theirs() -> Run:
        return run_in_child(_TORCH, _TORCH_WORK, [file, root / "theirs.safetensors"])

    our_runs, their_runs = in_turn(ours, theirs, trials)
    yield _faster(job, [run.seconds for run in our_runs], [run.seconds for run in their_runs], _PT_SPEED)


if __name__ == "__main__":
    preload_openblas()
    raise SystemExit(main())
