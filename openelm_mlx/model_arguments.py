"""The flags by which every command names and loads a model, and the loading itself."""

import argparse
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .model import Model
    from .tokenizer import Tokenizer

DTYPES = ("auto", "bfloat16", "float16", "float32")


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    """--model and what decides how it is loaded."""
    parser.add_argument(
        "--model",
        metavar="MODEL",
        help="a folder, a Hub id such as apple/OpenELM-270M-Instruct, or 'tiny', the bundled toy (default)",
    )
    parser.add_argument("--adapter-path", metavar="DIR", help="a LoRA or DoRA adapter folder to apply")
    parser.add_argument("--tokenizer", metavar="FILE|DIR|HUB_ID", help="where the tokenizer is, if not with the model")
    parser.add_argument("--revision", metavar="REV", help="branch, tag or commit on the Hub")
    parser.add_argument("--offline", action="store_true", help="use only what is on this machine")
    parser.add_argument(
        "--dtype", choices=DTYPES, default="auto", help="of unquantised weights; auto on a CPU also dequantises"
    )
    parser.add_argument("--keep-quantized", action="store_true", help="never dequantise, also on a CPU")


def load_from_arguments(args: argparse.Namespace) -> "tuple[Model, Tokenizer]":
    """Load what the flags name; the bundled model where they name none, saying so."""
    from .checkpoint import load

    if args.model is None:
        print(
            "openelm: no --model given, using the bundled 'tiny'; a real one: --model apple/OpenELM-270M-Instruct",
            file=sys.stderr,
        )
        args.model = "tiny"
    return load(
        args.model,
        dtype=args.dtype,
        adapter_path=args.adapter_path,
        tokenizer=args.tokenizer,
        revision=args.revision,
        offline=args.offline,
        keep_quantized=args.keep_quantized,
    )
