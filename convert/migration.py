"""The options of Apple's own MLX port of OpenELM: taken, answered with the same command in our words, not obeyed.

Apple's `convert.py` (apple/corenet, mlx_examples/open_elm) wrote float16 by default and never packed the embedding.
docs/migrating.md has the whole table.
"""

import argparse
import shlex

from ..errors import ConfigError

# Apple's flag -> ours
_FLAGS = {
    "--input-checkpoint": "",
    "--config-yaml": "--config",
    "--tokenizer-path": "--tokenizer",
    "--output-dir": "-o",
    "--quantization-bits": "--q-bits",
    "--quantization-group-size": "--q-group-size",
}
_DTYPE = "float16"


def add_foreign_arguments(parser: argparse.ArgumentParser) -> None:
    """Accept the flags without showing them."""
    for flag in _FLAGS:
        parser.add_argument(flag, help=argparse.SUPPRESS)


def refuse_foreign(args: argparse.Namespace) -> None:
    """Raise ConfigError with the equivalent command when one of Apple's flags was given."""
    given = {flag: value for flag in _FLAGS if (value := getattr(args, _name(flag))) is not None}
    if given:
        raise ConfigError(
            f"{', '.join(given)}: these are the options of Apple's port; the same is done by: {_command(args, given)}"
        )


def _command(args: argparse.Namespace, given: dict[str, str]) -> str:
    words = ["openelm", "convert", given.get("--input-checkpoint") or args.source or args.hf_path or "SOURCE"]
    for flag, ours in _FLAGS.items():
        packs = flag.startswith("--quantization")
        if ours and flag in given and (args.quantize or not packs):  # Apple's ignored bits without --quantize
            words += [ours, given[flag]]
    if args.quantize:
        words += ["-q", "--embedding-bits", "16"]
    return shlex.join([*words, "--dtype", args.dtype or _DTYPE])


def _name(flag: str) -> str:
    return flag.removeprefix("--").replace("-", "_")
