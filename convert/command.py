"""openelm convert: any OpenELM checkpoint -> an MLX model folder.

SOURCE is a Hub id, a folder (safetensors, pytorch_model.bin or Apple's MLX files), a .safetensors file, a CoreNet .pt
(weights, training checkpoint, LoRA or DoRA), or 'tiny'; with --average several checkpoints of one training.
Nothing in a file is ever executed, and PyTorch is not needed. '-q --q-bits 4 --q-bits 8' makes FOLDER-4bit and
FOLDER-8bit from one read.
"""

import argparse
import json
import shlex
import sys
from typing import TYPE_CHECKING, Any

from ..errors import AdapterError, ConfigError
from .arguments import add_description_arguments, add_result_arguments, add_source_arguments
from .migration import add_foreign_arguments, refuse_foreign
from .peft_command import convert_adapter, peft_folder

if TYPE_CHECKING:
    from .conversion import ConversionSummary

_MODES = ("affine", "mxfp4", "mxfp8", "nvfp4")
_DTYPES = ("bfloat16", "float16", "float32")
_METHODS, _RECIPES = ("plain", "gptq"), ("uniform", "mixed")
_QUANTIZATION_FLAGS = (
    "q_bits", "q_group_size", "q_mode", "embedding_bits", "recipe", "method", "calibration", "seed",
)  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags, under mlx-lm's names where it has them."""
    parser.add_argument("source", nargs="?", metavar="SOURCE", help="the checkpoint to convert")
    parser.add_argument("more", nargs="*", metavar="SOURCE", help="with --average: further ones")
    parser.add_argument("--hf-path", "--model", dest="hf_path", metavar="SOURCE", help="the same, as mlx-lm spells it")
    parser.add_argument("-o", "--mlx-path", default="mlx_model", metavar="FOLDER", help="where the model goes")
    parser.add_argument(
        "--dtype", choices=_DTYPES, help="of everything that is not quantized (bfloat16; Apple's MLX: its own)"
    )
    _add_quantization(parser)
    _add_choices(parser)
    add_source_arguments(parser, "source")
    add_description_arguments(parser, "source")
    parser.add_argument("--force", action="store_true", help="replace FOLDER; allow float16 for 3B")
    parser.add_argument("--keep-vocab-padding", action="store_true", help="keep CoreNet's unused embedding rows")
    parser.add_argument("--measure", action="store_true", help="show the KL divergence from the source's predictions")
    add_result_arguments(parser)
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
    parser.add_argument(
        "--recipe", choices=_RECIPES, help="mixed: two bits more for embedding, first, last and narrow layers (uniform)"
    )
    parser.add_argument("--method", choices=_METHODS, help="gptq: round by what a text sends through the model (plain)")
    parser.add_argument("--calibration", metavar="FILE", help="with --method gptq: that text (a bundled one)")
    parser.add_argument("--seed", type=int, metavar="N", help="with --method gptq: which parts of a long text (0)")


def _add_choices(parser: argparse.ArgumentParser) -> None:
    """What is to become of a source that holds more than one plain model."""
    parser.add_argument("-d", "--dequantize", action="store_true", help="unpack a quantized source (-q packs it again)")
    parser.add_argument("--average", action="store_true", help="the mean of all SOURCEs, summed in float64")
    parser.add_argument("--use-ema", action="store_true", help="a training checkpoint's moving average of the weights")
    parser.add_argument("--fuse", action="store_true", help="merge the adapter of a LoRA or DoRA checkpoint")
    parser.add_argument("--tie", action="store_true", help="with --fuse: leave out the embedding's part, stay tied")
    parser.add_argument("--adapter-path", metavar="DIR", help="split: the adapter goes to DIR, its base to FOLDER")


def run(args: argparse.Namespace) -> int:
    """Convert, then print what was made and what to do next."""
    refuse_foreign(args)
    source = _source(args)
    adapter = peft_folder(source)
    if adapter is not None:
        return convert_adapter(adapter, args)
    _refuse_unused(args)
    try:
        return _convert_model(source, args)
    except AdapterError:  # a repository of the Hub is known when it is here
        from ..hub import resolve_model

        adapter = peft_folder(str(resolve_model(source, revision=args.revision, offline=True)))
        if adapter is None:
            raise
        return convert_adapter(adapter, argparse.Namespace(**vars(args) | {"revision": None}))


def _convert_model(source: str, args: argparse.Namespace) -> int:
    from .conversion import convert, convert_all

    options = {
        "average_with": args.more,
        "use_ema": args.use_ema,
        "dequantize": args.dequantize,
        "fuse": args.fuse,
        "tie": args.tie,
        "adapter_path": args.adapter_path,
        "dtype": args.dtype,
        "q_group_size": args.q_group_size,
        "q_mode": args.q_mode or "affine",
        "embedding_bits": args.embedding_bits,
        "recipe": args.recipe or "uniform",
        "method": args.method or "plain",
        "calibration": args.calibration,
        "seed": args.seed,
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
        print("\n".join([_sentence(summary), *summary.notes]))
    model = shlex.quote(str(summaries[0].path))
    if args.adapter_path is not None:
        model += f" --adapter-path {shlex.quote(args.adapter_path)}"
    print(f"next: openelm generate --model {model} --prompt 'Once upon a time'", file=sys.stderr)
    if args.json:
        print(json.dumps({"models": [_facts(summary) for summary in summaries], "adapter_path": args.adapter_path}))
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
    if args.average != bool(args.more):
        raise ConfigError("--average takes the mean of two checkpoints or more: openelm convert A B ... --average")
    for flag in ("upload_private", "upload_dry_run"):
        if getattr(args, flag) and args.upload_repo is None:
            raise ConfigError(f"--{flag.replace('_', '-')} needs --upload-repo HUB_ID")


def _facts(summary: "ConversionSummary") -> dict[str, Any]:
    """What was made, ready for JSON."""
    return {
        "path": str(summary.path),
        "parameters": summary.parameters,
        "bits_per_weight": round(summary.bits_per_weight, 3),
        "bytes": summary.nbytes,
        "dtype": summary.dtype,
        "quantization": summary.quantization.to_config() if summary.quantization else None,
        "instruct": summary.instruct,
        "kl_to_source": summary.measured.kl if summary.measured else None,
        "uploaded": summary.uploaded,
        "notes": list(summary.notes),
        "seconds": round(summary.seconds, 3),
    }


def _sentence(summary: "ConversionSummary") -> str:
    kind = str(summary.quantization.default) if summary.quantization else summary.dtype
    facts = [
        f"{summary.path}: {summary.parameters:,} parameters",
        f"{kind}, {summary.refinement}" if summary.refinement else kind,
        f"{summary.bits_per_weight:.2f} bits per weight",
        f"{summary.nbytes:,} bytes",
        f"{summary.seconds:.1f} s",
        *([str(summary.measured)] if summary.measured else []),
        *([f"at {summary.uploaded}"] if summary.uploaded else []),
    ]
    return ", ".join(facts)
