"""Measure tokens/s: prefill and decode apart, medians and spread over several trials after a warm-up.

The prompt is a fixed list of ids, decoding is greedy, and EOS is ignored: every trial does the same work.
"""

import argparse
import json
import sys
from importlib import metadata
from typing import TYPE_CHECKING, Any

from .. import __version__
from ..model_arguments import add_model_arguments, load_from_arguments

if TYPE_CHECKING:
    from .measure import BenchResult

PACKAGES = ("mlx", "numpy", "safetensors", "sentencepiece")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags of `openelm bench`."""
    add_model_arguments(parser)
    parser.add_argument(
        "-p",
        "--prompt-tokens",
        type=positive_count,
        metavar="P",
        help="prompt length (512, or what the context has room for)",
    )
    parser.add_argument(
        "-g",
        "--generation-tokens",
        type=positive_count,
        metavar="G",
        help="tokens to generate (128, or what there is room for)",
    )
    parser.add_argument(
        "-n", "--num-trials", type=positive_count, default=5, metavar="N", help="trials after the warm-up"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of the table")


def run(args: argparse.Namespace) -> int:
    """Load, measure, print."""
    model, _ = load_from_arguments(args)
    from .measure import DEFAULT_GENERATION_TOKENS, DEFAULT_PROMPT_TOKENS, choose_lengths, measure

    context = model.config.max_context_length
    prompt_tokens, generation_tokens = choose_lengths(args.prompt_tokens, args.generation_tokens, context)
    usual = (args.prompt_tokens or DEFAULT_PROMPT_TOKENS, args.generation_tokens or DEFAULT_GENERATION_TOKENS)
    if (prompt_tokens, generation_tokens) != usual:
        print(
            f"openelm: the model's context is {context} tokens: {prompt_tokens} prompt tokens and "
            f"{generation_tokens} generated instead of {usual[0]} and {usual[1]}",
            file=sys.stderr,
        )
    try:
        result = measure(model, args.model, prompt_tokens, generation_tokens, args.num_trials, progress=_show_progress)
    finally:
        _clear_progress()
    if args.json:
        print(json.dumps(record([result])))
    else:
        print_result(result)
    return 0


def record(results: "list[BenchResult]") -> dict[str, Any]:
    """The JSON object: the machine, and the results."""
    return {"machine": machine(), "results": [result.to_dict() for result in results]}


def machine() -> dict[str, Any]:
    """This machine, and the versions of what computes on it."""
    from ..device import machine_record

    versions = {"openelm-mlx": __version__, **{package: metadata.version(package) for package in PACKAGES}}
    return {**machine_record(), "packages": versions}


def print_result(result: "BenchResult") -> None:
    """One table for people, 80 columns wide."""
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0))
    table.add_column("")
    for heading in ("tokens", "tokens/s", "min - max", "seconds", "peak memory*"):
        table.add_column(heading, justify="right")
    for row in _rows(result):
        table.add_row(*row)
    trials = f"{len(result.trials)} trial{'s' if len(result.trials) > 1 else ''}"
    console = Console(highlight=False, markup=False)
    console.print(f"{result.model}, {result.precision} weights, {_megabytes(result.weight_bytes)}", soft_wrap=True)
    console.print(table)
    console.print(f"first token after {result.ttft_s:.3f} s; median of {trials} after a warm-up, EOS ignored")
    console.print("* of the MLX allocator, weights included")


def _show_progress(step: str) -> None:
    """What runs now, on stderr, where that is a terminal."""
    if sys.stderr.isatty():
        print(f"\r\x1b[Kopenelm: {step}", end="", file=sys.stderr, flush=True)


def _clear_progress() -> None:
    """Take the progress line away again."""
    if sys.stderr.isatty():
        print("\r\x1b[K", end="", file=sys.stderr, flush=True)


def positive_count(text: str) -> int:
    """The argparse type of a count."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number of 1 or more, got {text!r}")
    return int(text)


def _rows(result: "BenchResult") -> list[tuple[str, ...]]:
    return [
        (
            "prefill",
            str(result.prompt_tokens),
            _number(result.prompt_tps),
            _range(result.spread("prompt_tps")),
            f"{result.ttft_s:.3f}",
            _megabytes(result.prefill_peak_memory_bytes),
        ),
        (
            "decode",
            str(result.generation_tokens - 1),
            _number(result.generation_tps),
            _range(result.spread("generation_tps")),
            f"{result.decode_s:.3f}",
            _megabytes(result.decode_peak_memory_bytes),
        ),
    ]


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:,.1f}"


def _range(bounds: tuple[float, float] | None) -> str:
    return "-" if bounds is None else f"{_number(bounds[0])} - {_number(bounds[1])}"


def _megabytes(count: float) -> str:
    return f"{count / 1e6:,.0f} MB"
