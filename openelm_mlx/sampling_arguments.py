"""The flags that choose how tokens are drawn, under mlx-lm's names."""

import argparse
from typing import Any

from .stopping import StopStrings

_REPETITION_CONTEXT_SIZE = 64  # sampling.REPETITION_CONTEXT_SIZE, repeated here because importing it would import mlx


def add_sampling_arguments(parser: argparse.ArgumentParser) -> None:
    """--temp, the filters, the repetition penalty and the seed."""
    parser.add_argument("--temp", type=float, default=0.0, help="temperature; 0 is greedy")
    parser.add_argument("--top-p", type=float, default=1.0, help="keep the likeliest tokens of this total probability")
    parser.add_argument("--min-p", type=float, default=0.0, help="drop tokens this much less likely than the likeliest")
    parser.add_argument("--top-k", type=int, default=0, help="keep this many of the likeliest tokens; 0 keeps all")
    parser.add_argument("--repetition-penalty", type=float, help="above 1 makes recent tokens less likely (Apple: 1.2)")
    parser.add_argument(
        "--repetition-context-size",
        type=int,
        default=_REPETITION_CONTEXT_SIZE,
        help="how many recent tokens the penalty sees, prompt included",
    )
    parser.add_argument("--seed", type=int, help="the same seed draws the same tokens; moot at --temp 0")


def sampling_from_arguments(args: argparse.Namespace) -> dict[str, Any]:
    """The keyword arguments of `stream_generate` that these flags mean. Raises GenerationError for bad values."""
    from .sampling import make_logits_processors, make_sampler

    StopStrings(getattr(args, "stop", ()))
    return {
        "sampler": make_sampler(args.temp, args.top_p, args.min_p, args.top_k, args.seed),
        "logits_processors": make_logits_processors(args.repetition_penalty, args.repetition_context_size),
    }
