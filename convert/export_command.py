"""openelm export: a model back out of MLX's format, or an adapter out to PEFT.

  --to hf       a folder in the Hub's layout (safetensors, tokenizer, config.json)
  --to pt       the same with pytorch_model.bin, for PyTorch
  --to corenet  a folder with CoreNet's state dict (openelm.pt) and the model block of its YAML
  --to gguf     one file for llama.cpp, Ollama, LM Studio (needs the extra: pip install 'openelm-mlx[gguf]')
  --to peft     MODEL is an adapter folder: a folder that Hugging Face PEFT loads

MODEL is a folder, a file, a Hub id, or 'tiny'. Quantized models are unpacked. PyTorch is not needed.
"""

import argparse
import json
import logging
import re
import shlex
import sys
from typing import TYPE_CHECKING

from ..errors import ConfigError
from ..home import expand_home
from .arguments import add_description_arguments, add_result_arguments, add_source_arguments

if TYPE_CHECKING:
    from .export import ExportSummary

_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9}
_DTYPES = ("bfloat16", "float16", "float32")
_GGUF_TYPES = ("F32", "F16", "BF16", "Q8_0")
# flag -> the formats that it means something for
_ONLY_FOR = {
    "dtype": ("hf", "pt", "corenet"),
    "max_shard_size": ("hf", "pt"),
    "pad_vocab": ("corenet",),
    "gguf_type": ("gguf",),
    "upload_repo": ("hf",),
    "tokenizer": ("hf", "pt", "corenet", "gguf"),
    "config": ("hf", "pt", "corenet", "gguf"),
    "revision": ("hf", "pt", "corenet", "gguf"),
    "instruct": ("hf", "pt", "corenet", "gguf"),
}
_NEXT = {
    "hf": "mlx_lm.generate --model {out} --prompt 'Once upon a time'",
    "pt": "torch.load({file!r}, weights_only=True)",
    "corenet": "openelm convert {out}/openelm.pt --config {out}/config.json brings it back",
    "gguf": "llama-cli -m {out} -p 'Once upon a time'",
    "peft": "PeftModel.from_pretrained(model, {file!r})",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags."""
    parser.add_argument("model", metavar="MODEL", help="the model to export (for peft: the adapter folder)")
    parser.add_argument("--to", required=True, choices=tuple(_NEXT), help="the format")
    parser.add_argument("-o", "--output", required=True, metavar="OUT", help="where it goes: a folder, for gguf a file")
    parser.add_argument("--force", action="store_true", help="replace OUT")
    parser.add_argument("--dtype", choices=_DTYPES, help="of the weights (hf, pt, corenet; the model's own)")
    parser.add_argument("--gguf-type", choices=_GGUF_TYPES, help="of the matrices (gguf; as the model's dtype)")
    parser.add_argument("--max-shard-size", metavar="SIZE", help="largest weight file, e.g. 500MB (hf, pt; 5GB)")
    parser.add_argument(
        "--pad-vocab",
        type=int,
        metavar="N",
        help="rows of the embedding: a multiple of N, 0 as they are (corenet; 128)",
    )
    add_source_arguments(parser, "model")
    add_description_arguments(parser, "model")
    add_result_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Export, then print what was made and what to do with it."""
    _refuse_unused(args)
    logging.getLogger("gguf").setLevel(logging.ERROR)  # its remarks are for people who write GGUF themselves
    if args.to == "peft":
        return _export_adapter(args)
    from .export import export

    options = {key: getattr(args, key) for key in ("dtype", "tokenizer", "config", "revision", "offline", "instruct")}
    options |= {key: getattr(args, key) for key in ("force", "upload_repo", "upload_private", "upload_dry_run")}
    if args.max_shard_size is not None:
        options["max_shard_bytes"] = _size(args.max_shard_size)
    if args.pad_vocab is not None:
        options["pad_vocab"] = args.pad_vocab
    summary = export(args.model, args.to, args.output, gguf_type=args.gguf_type, **options)
    print(_sentence(summary))
    _print_next(args)
    if args.json:
        print(json.dumps(vars(summary) | {"path": str(summary.path)}))
    return 0


def _export_adapter(args: argparse.Namespace) -> int:
    from .peft_export import export_peft

    target = expand_home(args.output)
    adapter = export_peft(expand_home(args.model), target, force=args.force)
    print(f"{target}: PEFT adapter, {adapter.parameters:,} parameters")
    _print_next(args)
    if args.json:
        print(json.dumps({"path": str(target), "format": "peft", "parameters": adapter.parameters}))
    return 0


def _refuse_unused(args: argparse.Namespace) -> None:
    """A flag that would do nothing was meant to do something."""
    for name, formats in _ONLY_FOR.items():
        if getattr(args, name) is not None and args.to not in formats:
            raise ConfigError(
                f"--{name.replace('_', '-')} is for --to {', '.join(formats)}; leave it out for {args.to}"
            )
    for name in ("upload_private", "upload_dry_run"):
        if getattr(args, name) and args.upload_repo is None:
            raise ConfigError(f"--{name.replace('_', '-')} needs --upload-repo HUB_ID")


def _size(text: str) -> int:
    """`500MB`, `5GB` or bytes, in powers of ten as the Hub counts."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(KB|MB|GB|)", text.strip().upper())
    size = int(float(match[1]) * _UNITS[match[2]]) if match else 0
    if size <= 0:
        raise ConfigError(f"--max-shard-size {text!r} is no size; expected a number with KB, MB or GB, e.g. 5GB")
    return size


def _print_next(args: argparse.Namespace) -> None:
    file = args.output
    if args.to == "pt":
        file = str(min(expand_home(args.output).glob("pytorch_model*.bin")))  # the first, where there are several
    print(f"next: {_NEXT[args.to].format(out=shlex.quote(args.output), file=file)}", file=sys.stderr)


def _sentence(summary: "ExportSummary") -> str:
    facts = [
        f"{summary.path}: {summary.format}",
        f"{summary.parameters:,} parameters",
        summary.kind,
        f"{summary.nbytes:,} bytes",
        f"{summary.seconds:.1f} s",
        *([f"at {summary.uploaded}"] if summary.uploaded else []),
    ]
    return ", ".join(facts)
