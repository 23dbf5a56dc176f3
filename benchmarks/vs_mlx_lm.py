"""This project against mlx-lm, in one run on one machine: the claims of docs/performance.md.

Both sides load the same folders with random weights and take turns.

    python -m openelm_mlx.benchmarks.vs_mlx_lm [--size 270M] [--trials 5] [--json FILE] [--write-docs]
"""

import argparse
import os
import platform
import sys
import tempfile
from collections.abc import Iterator, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import mlx.core as mx

from ..config import PUBLISHED_SIZES, OpenELMConfig
from ..device import is_metal
from .arguments import positive_count
from .comparison import PERFORMANCE_PAGE, Comparison, print_comparisons, write_block, write_json
from .openblas import preload_openblas
from .random_checkpoint import write_random_folder
from .record import machine
from .side_by_side import Pair, cold_start, decode, decode_nodes, first_token

# Promised ratios, as measured when the levers behind them were chosen, less what a busy machine takes away.
COLD_START = 3.5
FIRST_TOKEN = {16: 1.8, 128: 1.2, 512: 1.0}  # prompt tokens -> ratio
DECODE = 0.98
DECODE_NODES = {"eager": 0.70, "compiled": 0.45}  # kind of step -> share of mlx-lm's
UPCAST = {"bf16": (2.0, 5.0), "4-bit": (2.5, 5.0)}  # on a CPU: folder -> ratios of decode, of a 64-token prompt


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print, and write what was asked for. Status 1 when a claim does not hold."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", default="270M", choices=PUBLISHED_SIZES)
    parser.add_argument("--trials", type=positive_count, default=5, help="turns for each side")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every figure to this file")
    parser.add_argument("--write-docs", action="store_true", help="put the table into docs/performance.md")
    args = parser.parse_args(argv)
    comparisons = []
    with tempfile.TemporaryDirectory(prefix="openelm-vs-mlx-lm-") as folder:
        for comparison in measure(OpenELMConfig.from_name(args.size), Path(folder), args.trials):
            print(" | ".join(comparison.cells), file=sys.stderr, flush=True)
            comparisons.append(comparison)
    record = machine()
    conditions = f"Random-weight OpenELM-{args.size}, {args.trials} turns; {describe(record)}"
    print_comparisons(comparisons, conditions)
    if args.json:
        write_json(args.json, comparisons, record)
    if args.write_docs:
        write_block(PERFORMANCE_PAGE, "vs_mlx_lm", comparisons, conditions)
    return 0 if all(comparison.passed for comparison in comparisons) else 1


def measure(config: OpenELMConfig, root: Path, trials: int) -> Iterator[Comparison]:
    """Every claim, in the order of the table; folders are written below `root`."""
    folder = root / "fp32"
    write_random_folder(folder, config, mx.float32)
    yield cold_start("new process to first token, fp32", folder, COLD_START, trials)
    pair = Pair.load(folder, same_tokens=True)
    for tokens, target in FIRST_TOKEN.items():
        yield first_token(f"first token, {tokens}-token prompt, fp32", pair, tokens, target, trials)
    yield decode("each further token, fp32", pair, DECODE, trials)
    for decoder, target in DECODE_NODES.items():
        yield decode_nodes(f"graph nodes of a decode step, {decoder}, fp32", pair, target, decoder)
    del pair
    if not is_metal():  # there the folder's own precision is the fast one, and both sides keep it
        yield from _upcast(config, root, trials)


def _upcast(config: OpenELMConfig, root: Path, trials: int) -> Iterator[Comparison]:
    for name, (decode_target, prompt_target) in UPCAST.items():
        write_random_folder(root / name, config, mx.bfloat16, bits=4 if name == "4-bit" else None)
        pair = Pair.load(root / name)
        yield decode(f"each further token, {name} folder", pair, decode_target, trials)
        turns = 1 if name == "4-bit" else trials  # mlx-lm takes minutes for each
        yield first_token(f"first token, 64-token prompt, {name} folder", pair, 64, prompt_target, turns)


def describe(record: dict[str, Any]) -> str:
    """The machine in a line, without what would identify it; a chip is named on a Mac, where it decides."""
    kernels = os.environ.get("OPENBLAS_CORETYPE")
    blas = f", OpenBLAS{f' with {kernels} kernels' if kernels else ''}" if record["blas_preloaded"] else ""
    where = record["chip"] if platform.system() == "Darwin" else f"{platform.system()} {record['machine']}"
    versions = f"MLX {record['mlx']} {record['backend']} backend, mlx-lm {metadata.version('mlx-lm')}"
    return f"{where}, {record['cpu_cores']} cores, {versions}{blas}"


if __name__ == "__main__":
    preload_openblas()
    raise SystemExit(main())
