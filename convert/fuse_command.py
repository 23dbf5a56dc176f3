"""openelm fuse: merge an adapter into its base model -> a model folder that needs no adapter.

The sum is taken in float32 and written in 16 bits; a quantized base is unpacked unless --requantize is given. Whole
fine-tuned weights (fine_tune_type full) are fused the same way.
"""

import argparse
import json
import shlex
import sys
from typing import TYPE_CHECKING, Any

from ..errors import ConfigError
from ..home import expand_home
from .arguments import add_result_arguments, add_source_arguments

if TYPE_CHECKING:
    from .fusion import Fusion

_DTYPES = ("bfloat16", "float16", "float32")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags, under mlx-lm's names where it has them."""
    parser.add_argument(
        "--model", metavar="MODEL", help="the base model: a folder or a Hub id (what the adapter names)"
    )
    parser.add_argument("--adapter-path", default="adapters", metavar="FOLDER", help="the adapter folder")
    parser.add_argument("--save-path", default="fused_model", metavar="FOLDER", help="where the model goes")
    parser.add_argument(
        "--dtype", choices=_DTYPES, help="of everything not quantized (the base's, bfloat16 for float32)"
    )
    parser.add_argument("--dequantize", action="store_true", help="unpack a quantized base (done anyway; see above)")
    parser.add_argument("--requantize", action="store_true", help="pack the sum as the base is, and show what it cost")
    add_source_arguments(parser, "base")
    parser.add_argument("--force", action="store_true", help="replace the folder of --save-path")
    add_result_arguments(parser)
    for name in ("--export-gguf", "--gguf-path", "--trust-remote-code"):
        parser.add_argument(name, nargs="?", const=True, help=argparse.SUPPRESS)


def run(args: argparse.Namespace) -> int:
    """Fuse, then print what was made and what to do next."""
    _refuse(args)
    from .fusion import fuse

    base = args.model or _trained_on(args.adapter_path)
    made = fuse(
        base,
        args.adapter_path,
        args.save_path,
        dtype=args.dtype,
        requantize=args.requantize,
        tokenizer=args.tokenizer,
        revision=args.revision,
        offline=args.offline,
        force=args.force,
        upload_repo=args.upload_repo,
        upload_private=args.upload_private,
        upload_dry_run=args.upload_dry_run,
    )
    if args.model is None:
        print(
            f"openelm: the base model was {base}, as {args.adapter_path} says (--model names another)", file=sys.stderr
        )
    for line in _notes(made):
        print(f"openelm: {line}", file=sys.stderr)
    print(json.dumps(_facts(made)) if args.json else _sentence(made))
    if not args.json:
        print(f"next: openelm generate --model {shlex.quote(str(made.path))} --prompt '...'", file=sys.stderr)
    return 0


def _refuse(args: argparse.Namespace) -> None:
    """mlx-lm's flags that mean something else here, and flags that contradict each other."""
    if args.export_gguf or args.gguf_path:
        raise ConfigError(
            "a GGUF file is made from the fused folder: openelm fuse first, then openelm export --to gguf"
        )
    if args.trust_remote_code:
        raise ConfigError("nothing in a checkpoint is ever executed: leave --trust-remote-code out")
    if args.dequantize and args.requantize:
        raise ConfigError("--dequantize and --requantize exclude each other; drop one of them")
    if args.upload_dry_run and args.upload_repo is None:
        raise ConfigError("--upload-dry-run needs --upload-repo HUB_ID")


def _trained_on(folder: str) -> str:
    """The base model that the adapter's config names."""
    from ..adapter_config import read_adapter_config
    from ..adapters import CONFIG_NAME

    base = read_adapter_config(expand_home(folder) / CONFIG_NAME).base_model
    if base is None:
        raise ConfigError(f"{folder} does not say on which model it was trained: name it with --model")
    return base


def _notes(made: "Fusion") -> list[str]:
    """What a user may not expect of the result."""
    notes = []
    if made.unpacked:
        notes.append(
            f"the base is quantized, the fused model is not ({made.dtype}): packing rounds most of an adapter away "
            "(--requantize does it and measures)"
        )
    if made.quantization is not None:
        notes.append(
            f"packed again ({made.quantization.default}), which is not what was trained: {_distance(made)}; "
            "fuse without --requantize to lose nothing"
        )
    if made.untied:
        notes.append(
            "the input embedding was trained, the output head was not, so they are two matrices now: openelm-mlx, "
            "mlx-lm and transformers load that, mlx-swift and llama.cpp (GGUF) do not"
        )
    return notes


def _distance(made: "Fusion") -> str:
    return (
        f"KL to the base with its adapter {made.distance.kl:.2g} nats a token, "
        f"logits differ by at most {made.distance.largest:.2g} ({made.distance.tokens} tokens)"
    )


def _facts(made: "Fusion") -> dict[str, Any]:
    """The result, ready for JSON."""
    return {
        "path": str(made.path),
        "fine_tune_type": made.spec.fine_tune_type,
        "parameters": made.parameters,
        "bytes": made.nbytes,
        "dtype": made.dtype,
        "quantization": made.quantization.to_config() if made.quantization else None,
        "tied": not made.untied,
        "kl_to_adapter": made.distance.kl,
        "largest_logit_difference": made.distance.largest,
        "seconds": round(made.seconds, 3),
        "uploaded": made.uploaded,
    }


def _sentence(made: "Fusion") -> str:
    kind = str(made.quantization.default) if made.quantization else made.dtype
    facts = [f"{made.path}: {made.parameters:,} parameters", kind, f"{made.nbytes:,} bytes", f"{made.seconds:.1f} s"]
    return ", ".join([*facts, _distance(made), *([f"at {made.uploaded}"] if made.uploaded else [])])
