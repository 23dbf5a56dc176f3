"""`openelm bench --train`: what LoRA fine-tuning takes of this machine, tokens/s and peak memory.

Each length and batch size is trained for a few iterations by `openelm lora` in a process of its own, without and with
gradient checkpointing, on made-up text that fills every row. The figures are those of its own log; the first iterations
are left out, as a warm-up.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

from ..errors import GenerationError, RunFailedError
from .record import new_record
from .trial_statistics import interval

LOG = "training_log.jsonl"  # in the adapter folder
WARM_UPS = 2  # iterations
DEFAULT_LENGTHS, DEFAULT_BATCHES, DEFAULT_TRIALS = (512,), (1,), 5
_WORDS = "once upon a time there was a king who had three daughters and a golden apple tree in his garden "


@dataclass(frozen=True)
class TrainingShape:
    """Tokens of a row, rows of an iteration, and whether activations are computed twice to save memory."""

    sequence_length: int
    batch_size: int
    grad_checkpoint: bool


@dataclass(frozen=True)
class TrainingResult:
    """The iterations after the warm-up, in order."""

    model: str
    shape: TrainingShape
    tokens_per_second: tuple[float, ...]
    peak_memory_bytes: int  # of MLX's allocator, weights included

    def to_dict(self) -> dict[str, Any]:
        return {
            "model": self.model,
            **vars(self.shape),
            "tokens_per_second": median(self.tokens_per_second),
            "tokens_per_second_interval": interval(self.tokens_per_second),
            "peak_memory_bytes": self.peak_memory_bytes,
            "trials": list(self.tokens_per_second),
        }


def run_train(args: argparse.Namespace) -> int:
    """Train, print, write. What is finished is kept on Ctrl-C, with status 130."""
    from .command import INTERRUPTED, tell_kept, tell_tiny, write_and_print

    models, shapes, trials = _plan(args)
    if not args.model:
        tell_tiny()
    results, interrupted = [], False
    try:
        for model, shape in product(models, shapes):
            _tell(f"{model}: {_describe(shape)}")
            results.append(train(model, shape, trials, _loading_flags(args)))
    except KeyboardInterrupt:
        interrupted = True
    training = [result.to_dict() for result in results]
    settings = {
        "models": [_label(model) for model in models],
        "shapes": [vars(shape) for shape in shapes],
        "num_trials": trials,
    }
    record = new_record([], settings, training=training, interrupted=interrupted)
    write_and_print(record, args.output, args.json)
    if not args.json:
        print_training(training)
    if interrupted:
        tell_kept(len(results))
    return INTERRUPTED if interrupted else 0


def train(model: str, shape: TrainingShape, trials: int, flags: Sequence[str] = ()) -> TrainingResult:
    """One short training run. Raises RunFailedError, with the trainer's own words, when it fails."""
    with tempfile.TemporaryDirectory(prefix="openelm-bench-train-") as folder:
        data, adapters = Path(folder) / "data", Path(folder) / "adapters"
        write_rows(data, shape, WARM_UPS + trials)
        command = [sys.executable, "-m", "openelm_mlx", *lora_arguments(model, shape, data, adapters, trials), *flags]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            words = [line for line in done.stderr.splitlines() if line.strip()] or [f"status {done.returncode}"]
            raise RunFailedError(f"openelm lora failed: {words[-1].removeprefix('openelm: error: ')}")
        return read_log(model, shape, adapters / LOG)


def lora_arguments(model: str, shape: TrainingShape, data: Path, adapters: Path, trials: int) -> list[str]:
    """`openelm lora` that does nothing but iterate: a report for each, no validation."""
    settings = {
        "--model": model,
        "--data": data,
        "--adapter-path": adapters,
        "--max-seq-length": shape.sequence_length,
        "--batch-size": shape.batch_size,
        "--iters": WARM_UPS + trials,
        "--steps-per-report": 1,
        "--val-batches": 0,
        "--num-layers": -1,
    }
    flags = [word for flag, value in settings.items() for word in (flag, str(value))]
    return ["lora", "--train", *flags, *(["--grad-checkpoint"] if shape.grad_checkpoint else [])]


def write_rows(folder: Path, shape: TrainingShape, iterations: int) -> None:
    """Rows of more tokens than a sequence holds: cut to length, each is full. A word is at least one token."""
    folder.mkdir()
    words = shape.sequence_length // len(_WORDS.split()) + 1
    row = json.dumps({"text": _WORDS * words}) + "\n"
    (folder / "train.jsonl").write_text(row * shape.batch_size * iterations, encoding="utf-8")


def read_log(model: str, shape: TrainingShape, log: Path) -> TrainingResult:
    """The iterations that count. Raises RunFailedError for a log without any."""
    entries = [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()]
    steps = [entry for entry in entries if "tokens_per_second" in entry][WARM_UPS:]
    if not steps:
        raise RunFailedError(f"openelm lora reported no iteration after {WARM_UPS} for warming up")
    peak_gb = max(entry["peak_memory"] for entry in steps)
    return TrainingResult(
        _label(model), shape, tuple(entry["tokens_per_second"] for entry in steps), round(peak_gb * 1e9)
    )


def print_training(training: Sequence[dict[str, Any]]) -> None:
    """The table for people."""
    from rich.console import Console

    from .table import columns, megabytes, number, print_table, spread

    rows = (
        (
            str(entry["model"]),
            f"{entry['batch_size']} x {entry['sequence_length']}",
            "yes" if entry["grad_checkpoint"] else "no",
            number(entry["tokens_per_second"]),
            spread(entry["trials"]),
            megabytes(entry["peak_memory_bytes"]),
        )
        for entry in training
    )
    console = Console(highlight=False, markup=False)
    print_table(columns(("model", "tokens", "checkpointing", "tokens/s", "min - max", "peak*"), rows))
    console.print(f"LoRA, all layers; medians of the iterations after {WARM_UPS}")
    console.print("* of the MLX allocator, weights included")


def _plan(args: argparse.Namespace) -> tuple[list[str], list[TrainingShape], int]:
    unfit = {"--size": args.size, "--paper": args.paper, "--norms": args.norms, "--profile": args.profile,
             "--compare": args.compare, "--baseline": args.baseline, "--q-bits": args.q_bits,
             "-g": args.generation_tokens, "--adapter-path": args.adapter_path, "--delay": args.delay,
             "--no-limits": args.no_limits, "--decoder": args.decoder != "eager"}  # fmt: skip
    named = [flag for flag, value in unfit.items() if value]
    if named:
        raise GenerationError(f"--train measures fine-tuning, and takes no {named[0]}: leave it out")
    if args.dtype is not None and len(args.dtype) > 1:
        raise GenerationError("--train takes one --dtype: measure the others in runs of their own")
    lengths, batches = args.prompt_tokens or DEFAULT_LENGTHS, args.batch_size or DEFAULT_BATCHES
    lengths = _fitting(args, lengths)
    shapes = [TrainingShape(*shape) for shape in product(lengths, batches, (False, True))]
    return args.model or ["tiny"], shapes, args.num_trials or DEFAULT_TRIALS


def _label(model: str) -> str:
    """A Hub id, or a folder's last part: the rest is nobody's business."""
    return Path(model).resolve().name if Path(model).exists() else model


def _fitting(args: argparse.Namespace, lengths: Sequence[int]) -> list[int]:
    """The lengths, a default lowered to the shortest context; the trainer would cut rows in silence.

    Raises GenerationError for a length that was asked for and is beyond a model's context.
    """
    from .matrix import Source

    sources = [Source.named(name, revision=args.revision, offline=args.offline) for name in args.model or ["tiny"]]
    shortest = min(sources, key=lambda source: source.config.max_context_length)
    context = shortest.config.max_context_length
    if args.prompt_tokens and max(lengths) > context:
        raise GenerationError(
            f"rows of {max(lengths)} tokens exceed the context of {shortest.name}, {context}: ask for less with -p"
        )
    return [min(length, context) for length in lengths]


def _loading_flags(args: argparse.Namespace) -> list[str]:
    flags = ["--revision", args.revision] if args.revision else []
    flags += ["--dtype", args.dtype[0]] if args.dtype else []
    flags += ["--offline"] if args.offline else []
    return flags + (["--keep-quantized"] if args.keep_quantized else [])


def _describe(shape: TrainingShape) -> str:
    checkpointing = ", gradient checkpointing" if shape.grad_checkpoint else ""
    return f"{shape.batch_size} x {shape.sequence_length} tokens{checkpointing}"


def _tell(text: str) -> None:
    if sys.stderr.isatty():
        print(f"openelm: training {text}", file=sys.stderr, flush=True)
