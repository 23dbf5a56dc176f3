"""openelm convert: any OpenELM checkpoint -> an MLX model folder.

SOURCE is a Hub id, a folder (safetensors or pytorch_model.bin), a .safetensors file, a CoreNet .pt, or 'tiny'.
Nothing in a file is ever executed, and PyTorch is not needed. '-q --q-bits 4 --q-bits 8' makes FOLDER-4bit and
FOLDER-8bit from one read.
"""

import argparse
import shlex
import sys
from typing import TYPE_CHECKING

from ..errors import ConfigError
from .migration import add_foreign_arguments, refuse_foreign
from .peft_command import convert_adapter, peft_folder

if TYPE_CHECKING:
    from .conversion import ConversionSummary

_MODES = ("affine", "mxfp4", "mxfp8", "nvfp4")
_DTYPES = ("bfloat16", "float16", "float32")
_QUANTIZATION_FLAGS = ("q_bits", "q_group_size", "q_mode", "embedding_bits")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags, under mlx-lm's names where it has them."""
    parser.add_argument("source", nargs="?", metavar="SOURCE", help="the checkpoint to convert")
    parser.add_argument("--hf-path", "--model", dest="hf_path", metavar="SOURCE", help="the same, as mlx-lm spells it")
    parser.add_argument("-o", "--mlx-path", default="mlx_model", metavar="FOLDER", help="where the model goes")
    parser.add_argument("--dtype", choices=_DTYPES, help="of everything that is not quantized (bfloat16)")
    _add_quantization(parser)
    parser.add_argument("--tokenizer", metavar="FILE|DIR|HUB_ID", help="the tokenizer, where the source has none")
    parser.add_argument("--config", metavar="YAML|JSON", help="the configuration, where the source has none")
    parser.add_argument("--revision", metavar="NAME", help="branch, tag or commit of a Hub repository")
    parser.add_argument("--offline", action="store_true", help="use only what is on this disk")
    parser.add_argument("--force", action="store_true", help="replace FOLDER; allow float16 for 3B")
    parser.add_argument("--keep-vocab-padding", action="store_true", help="keep CoreNet's unused embedding rows")
    parser.add_argument("--measure", action="store_true", help="show the KL divergence from the source's predictions")
    parser.add_argument(
        "--instruct",
        action=argparse.BooleanOptionalAction,
        help="with or without the Instruct chat template (told from the source's name or folder)",
    )
    parser.add_argument("--upload-repo", metavar="HUB_ID", help="send the folder to this Hub repository, with a card")
    parser.add_argument("--upload-private", action="store_true", help="make a new repository private")
    parser.add_argument("--upload-dry-run", action="store_true", help="show what would be sent, and send nothing")
    add_foreign_arguments(parser)


def _add_quantization(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("-q", "--quantize", action="store_true", help="pack the matrices")
    parser.add_argument(
        "--q-bits",
        type=int,
        action="append",
        metavar="N",
        help="bits per weight (affine: 2 3 4 5 6 8); may be repeated",
    )
    parser.add_argument("--q-group-size", type=int, metavar="N", help="weights that share a scale (affine: 32 64 128)")
    parser.add_argument("--q-mode", choices=_MODES, help="kind of quantization (affine)")
    parser.add_argument("--embedding-bits", type=int, metavar="N", help="for the embedding, 16 leaves it alone (8)")


def run(args: argparse.Namespace) -> int:
    """Convert, then print what was made and what to do next."""
    refuse_foreign(args)
    source = _source(args)
    adapter = peft_folder(source)
    if adapter is not None:
        return convert_adapter(adapter, args)
    _refuse_unused(args)
    from .conversion import convert, convert_all

    options = {
        "dtype": args.dtype or "bfloat16",
        "q_group_size": args.q_group_size,
        "q_mode": args.q_mode or "affine",
        "embedding_bits": 8 if args.embedding_bits is None else args.embedding_bits,
        "tokenizer": args.tokenizer,
        "config": args.config,
        "revision": args.revision,
        "force": args.force,
        "keep_vocab_padding": args.keep_vocab_padding,
        "instruct": args.instruct,
        "offline": args.offline,
        "measure": args.measure,
        "upload_repo": args.upload_repo,
        "upload_private": args.upload_private,
        "upload_dry_run": args.upload_dry_run,
    }
    bits = args.q_bits or [None]
    if len(bits) > 1:
        summaries = convert_all(source, args.mlx_path, q_bits=bits, **options)
    else:
        summaries = [convert(source, args.mlx_path, quantize=args.quantize, q_bits=bits[0], **options)]
    for summary in summaries:
        print(_sentence(summary))
    model = shlex.quote(str(summaries[0].path))
    print(f"next: openelm generate --model {model} --prompt 'Once upon a time'", file=sys.stderr)
    return 0


def _source(args: argparse.Namespace) -> str:
    if (args.source is None) == (args.hf_path is None):
        raise ConfigError("name one checkpoint to convert: openelm convert SOURCE (or --hf-path SOURCE)")
    return args.hf_path if args.source is None else args.source


def _refuse_unused(args: argparse.Namespace) -> None:
    """A flag that would do nothing was meant to do something."""
    unused = [flag for flag in _QUANTIZATION_FLAGS if getattr(args, flag) is not None]
    if unused and not args.quantize:
        raise ConfigError(f"--{unused[0].replace('_', '-')} says how to quantize: add -q to do so")
    for flag in ("upload_private", "upload_dry_run"):
        if getattr(args, flag) and args.upload_repo is None:
            raise ConfigError(f"--{flag.replace('_', '-')} needs --upload-repo HUB_ID")


def _sentence(summary: "ConversionSummary") -> str:
    kind = f"{summary.quantization.default}" if summary.quantization else summary.dtype
    facts = [
        f"{summary.path}: {summary.parameters:,} parameters",
        kind,
        f"{summary.bits_per_weight:.2f} bits per weight",
        f"{summary.nbytes:,} bytes",
        f"{summary.seconds:.1f} s",
        *([str(summary.measured)] if summary.measured else []),
        *([f"at {summary.uploaded}"] if summary.uploaded else []),
    ]
    return ", ".join(facts)
