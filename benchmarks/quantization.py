"""What quantisation costs: bits per weight, bytes, perplexity on a text the model never saw, and KL to float32.

Every row is a folder that `openelm convert` makes with the flags shown. Without --model it is the bundled model, and
the text is the bundled one that was held out of its training.

    python -m openelm_mlx.benchmarks.quantization [--model tiny] [--text FILE] [--tokens N] [--json FILE] [--write-docs]
"""

import argparse
import contextlib
import json
import math
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import mlx.core as mx
import numpy as np

from ..checkpoint import load, load_model
from ..cli import main as openelm
from ..errors import RunFailedError
from ..hub import BUNDLED_MODEL
from ..model import Model
from ..perplexity import perplexity, predictions
from ..safetensors_file import read_folder
from .arguments import positive_count
from .comparison import replace_block
from .openblas import preload_openblas

PAGE = Path(__file__).resolve().parent.parent / "docs" / "quantization.md"
HELD_OUT = BUNDLED_MODEL.parent / "texts" / "held_out.txt"
_GPTQ = ("--method", "gptq")
# group of rows -> the flags of each
GROUPS: dict[str, Sequence[tuple[str, ...]]] = {
    "plain": ((), *(("-q", "--q-bits", bits) for bits in "86543"), ("-q", "--q-bits", "2")),
    "scales": tuple(("-q", "--q-bits", bits, "--dtype", "float16") for bits in "84"),
    "mixed": tuple(("-q", "--q-bits", bits, "--recipe", "mixed") for bits in "6432"),
    "gptq": tuple(("-q", "--q-bits", bits, *_GPTQ) for bits in "842"),
    "embedding": tuple(("-q", "--embedding-bits", bits) for bits in ("4", "6", "8", "16")),
}
HEADINGS = ("openelm convert", "bits per weight", "bytes", "perplexity", "KL to float32")


@dataclass(frozen=True)
class Row:
    """One folder. `kl`: mean divergence of the next-token distributions from float32's, nats a token."""

    flags: str
    bits_per_weight: float
    nbytes: int
    perplexity: float
    kl: float

    @property
    def cells(self) -> tuple[str, ...]:
        bits, size = f"{self.bits_per_weight:.2f}", f"{self.nbytes:,}"
        return f"`{self.flags or '(bfloat16)'}`", bits, size, f"{self.perplexity:.2f}", f"{self.kl:.5f}"


@dataclass(frozen=True)
class Expected:
    """A text, and what the float32 model predicts at each of its tokens."""

    ids: list[int]
    log_probs: list[mx.array]  # (N, V) each
    perplexity: float

    @classmethod
    def of(cls, model: Model, ids: list[int]) -> "Expected":
        log_probs = [rows for rows, _ in predictions(model, ids)]
        mx.eval(log_probs)
        return cls(ids, log_probs, perplexity(model, ids).perplexity)

    def row(self, folder: Path, flags: Sequence[str]) -> Row:
        """A folder measured against it."""
        model, divergence, nats, tokens = load_model(folder), 0.0, 0.0, 0
        for expected, (found, targets) in zip(self.log_probs, predictions(model, self.ids), strict=True):
            divergence += _number(mx.sum(mx.exp(expected) * (expected - found)))
            nats -= _number(mx.sum(mx.take_along_axis(found, targets[:, None], axis=-1)))
            tokens += targets.size
        nbytes = sum(tensor.nbytes for tensor in read_folder(folder).values())
        bits = 8 * nbytes / model.config.num_parameters()
        kl = max(0.0, divergence / tokens)  # rounding may leave a hair below zero
        return Row(" ".join(flags), bits, nbytes, math.exp(nats / tokens), kl)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print the table, and write what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="tiny", metavar="MODEL", help="an unquantised one")
    parser.add_argument("--text", type=Path, default=HELD_OUT, metavar="FILE", help="to measure on")
    parser.add_argument("--tokens", type=positive_count, help="of the text, from its beginning (all)")
    parser.add_argument("--group", choices=GROUPS, action="append", help="only these rows; may be repeated")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every figure to this file")
    parser.add_argument("--write-docs", action="store_true", help="put the tables into docs/quantization.md")
    args = parser.parse_args(argv)
    model, tokenizer = load(args.model, dtype="float32")
    ids = tokenizer.encode(args.text.read_text(encoding="utf-8"))[: args.tokens and args.tokens + 1]
    expected = Expected.of(model, ids)
    tables = {name: _measure(args.model, expected, GROUPS[name]) for name in args.group or GROUPS}
    print(f"float32: perplexity {expected.perplexity:.2f} on {len(ids) - 1:,} tokens\n")
    for name, rows in tables.items():
        print(f"{name}\n{markdown(rows)}\n")
        if args.write_docs:
            replace_block(PAGE, name, f"\n{markdown(rows)}\n")
    if args.json is not None:
        figures = {name: [asdict(row) for row in rows] for name, rows in tables.items()}
        record = {"model": args.model, "tokens": len(ids) - 1, "float32_perplexity": expected.perplexity}
        args.json.write_text(json.dumps(record | figures, indent=1) + "\n", encoding="utf-8")
    return 0


def _number(scalar: mx.array) -> float:
    return float(np.array(scalar))


def markdown(rows: Sequence[Row]) -> str:
    """The rows as a Markdown table."""
    lines = [HEADINGS, ("---", *("---:" for _ in HEADINGS[1:])), *(row.cells for row in rows)]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def _measure(model: str, expected: Expected, group: Sequence[tuple[str, ...]]) -> list[Row]:
    rows = []
    for flags in group:
        with tempfile.TemporaryDirectory() as folder:
            target = Path(folder, "model")
            with contextlib.redirect_stdout(sys.stderr):
                status = openelm(["convert", model, "-o", str(target), *flags])
            if status != 0:
                raise RunFailedError(f"openelm convert {model} {' '.join(flags)} ended with status {status}")
            rows.append(expected.row(target, flags))
    return rows


if __name__ == "__main__":
    preload_openblas()
    sys.exit(main())
