"""openelm convert: any OpenELM checkpoint -> an MLX model folder.

SOURCE is a Hub id, a folder (safetensors or pytorch_model.bin), a .safetensors file, a CoreNet .pt, or 'tiny'.
Nothing in a file is ever executed, and PyTorch is not needed.
"""

import argparse
import shlex
import sys
from typing import TYPE_CHECKING

from ..errors import ConfigError

if TYPE_CHECKING:
    from .conversion import ConversionSummary

_MODES = ("affine", "mxfp4", "mxfp8", "nvfp4")
_DTYPES = ("bfloat16", "float16", "float32")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags, under mlx-lm's names where it has them."""
    parser.add_argument("source", nargs="?", metavar="SOURCE", help="the checkpoint to convert")
    parser.add_argument("--hf-path", "--model", dest="hf_path", metavar="SOURCE", help="the same, as mlx-lm spells it")
    parser.add_argument("-o", "--mlx-path", default="mlx_model", metavar="FOLDER", help="where the model goes")
    parser.add_argument("--dtype", choices=_DTYPES, default="bfloat16", help="of everything that is not quantized")
    parser.add_argument("-q", "--quantize", action="store_true", help="pack the matrices")
    parser.add_argument("--q-bits", type=int, metavar="N", help="bits per weight (affine: 2 3 4 5 6 8)")
    parser.add_argument("--q-group-size", type=int, metavar="N", help="weights that share a scale (affine: 32 64 128)")
    parser.add_argument("--q-mode", choices=_MODES, help="kind of quantization (affine)")
    parser.add_argument("--embedding-bits", type=int, metavar="N", help="for the embedding, 16 leaves it alone (8)")
    parser.add_argument("--tokenizer", metavar="FILE|DIR|HUB_ID", help="the tokenizer, where the source has none")
    parser.add_argument("--config", metavar="YAML|JSON", help="the configuration, where the source has none")
    parser.add_argument("--revision", metavar="NAME", help="branch, tag or commit of a Hub repository")
    parser.add_argument("--offline", action="store_true", help="use only what is on this disk")
    parser.add_argument("--force", action="store_true", help="replace FOLDER; allow float16 for 3B")
    parser.add_argument("--keep-vocab-padding", action="store_true", help="keep CoreNet's unused embedding rows")
    parser.add_argument(
        "--instruct",
        action=argparse.BooleanOptionalAction,
        help="with or without the Instruct chat template (told from the source's name or folder)",
    )


def run(args: argparse.Namespace) -> int:
    """Convert, then print what was made and what to do next."""
    source = _source(args)
    if not args.quantize:
        _refuse_unused(args)
    from .conversion import convert

    summary = convert(
        source,
        args.mlx_path,
        dtype=args.dtype,
        quantize=args.quantize,
        q_bits=args.q_bits,
        q_group_size=args.q_group_size,
        q_mode=args.q_mode or "affine",
        embedding_bits=8 if args.embedding_bits is None else args.embedding_bits,
        tokenizer=args.tokenizer,
        config=args.config,
        revision=args.revision,
        force=args.force,
        keep_vocab_padding=args.keep_vocab_padding,
        instruct=args.instruct,
        offline=args.offline,
    )
    print(_sentence(summary))
    print(f"next: openelm generate --model {shlex.quote(args.mlx_path)} --prompt 'Once upon a time'", file=sys.stderr)
    return 0


def _source(args: argparse.Namespace) -> str:
    if (args.source is None) == (args.hf_path is None):
        raise ConfigError("name one checkpoint to convert: openelm convert SOURCE (or --hf-path SOURCE)")
    return args.hf_path if args.source is None else args.source


def _refuse_unused(args: argparse.Namespace) -> None:
    unused = [
        flag for flag in ("q_bits", "q_group_size", "q_mode", "embedding_bits") if getattr(args, flag) is not None
    ]
    if unused:
        raise ConfigError(f"--{unused[0].replace('_', '-')} says how to quantize: add -q to do so")


def _sentence(summary: "ConversionSummary") -> str:
    kind = f"{summary.quantization.default}" if summary.quantization else summary.dtype
    return (
        f"{summary.path}: {summary.parameters:,} parameters, {kind}, {summary.bits_per_weight:.2f} bits per weight, "
        f"{summary.nbytes:,} bytes, {summary.seconds:.1f} s"
    )
