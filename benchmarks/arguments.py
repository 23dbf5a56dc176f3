"""The flags of `openelm bench`: what to measure, how, what else to find out, and `openelm bench report`."""

import argparse
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from ..config import PUBLISHED_SIZES

DTYPES = ("auto", "bfloat16", "float16", "float32")
BITS = (2, 3, 4, 5, 6, 8)
_REPORT = """\
Merge files that `openelm bench -o` wrote, on one machine or on several, into a table.

With -o also report.md, report.csv and plots: tokens/s by model and precision, decode speed against context, roofline.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags of `openelm bench`."""
    _add_what(parser.add_argument_group("what to measure (lists make every combination)"))
    _add_how(parser.add_argument_group("how"))
    _add_more(parser.add_argument_group("what else to find out"))
    output = parser.add_argument_group("where it goes")
    output.add_argument("-o", "--output", type=Path, metavar="FILE", help="write the JSON object to this file as well")
    output.add_argument("--json", action="store_true", help="print one JSON object instead of the table")
    parser.usage = f"{parser.prog} [options]\n       {parser.prog} report [-o DIR] [--csv] FILE.json ..."
    actions = parser.add_subparsers(
        title="instead of measuring", dest="action", metavar="ACTION", required=False, prog=parser.prog
    )
    report = actions.add_parser(
        "report",
        help="merge files of several runs or machines: 'openelm bench report --help'",
        description=_REPORT,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    report.add_argument("files", nargs="+", type=Path, metavar="FILE.json", help="what `openelm bench -o` wrote")
    report.add_argument(
        "-o", "--output-dir", type=Path, metavar="DIR", help="a new folder for report.md, .csv and .png"
    )
    report.add_argument("--csv", action="store_true", help="print CSV instead of Markdown")


def _add_what(group: "argparse._ArgumentGroup") -> None:
    group.add_argument(
        "--model",
        action="append",
        metavar="MODEL",
        help="a folder, a Hub id such as apple/OpenELM-270M, or 'tiny', the bundled toy (default); may be repeated",
    )
    group.add_argument(
        "--size",
        type=listed(known(PUBLISHED_SIZES)),
        metavar="SIZE,...",
        help=f"of {', '.join(PUBLISHED_SIZES)}: random weights, as fast as the real ones and nothing to download",
    )
    group.add_argument("--adapter-path", type=Path, metavar="DIR", help="a LoRA or DoRA adapter folder to apply")
    group.add_argument("--revision", metavar="REV", help="branch, tag or commit on the Hub")
    group.add_argument("--offline", action="store_true", help="use only what is on this machine")
    group.add_argument(
        "--dtype",
        type=listed(known(DTYPES)),
        metavar="DTYPE,...",
        help=f"of {', '.join(DTYPES)}: the weights' dtype; auto is the model's own, on a CPU float32",
    )
    group.add_argument(
        "--keep-quantized", action="store_true", help="never dequantise a quantised folder, also on a CPU"
    )
    group.add_argument(
        "--q-bits",
        type=listed(bits),
        metavar="BITS,...",
        help="quantise on the fly, as openelm convert -q does, e.g. 4,8",
    )
    for short, name, metavar, text in (
        ("-p", "--prompt-tokens", "P,...", "prompt lengths, e.g. 16,512,1900 (512, or what the context has room for)"),
        ("-g", "--generation-tokens", "G,...", "tokens to generate (128, or what there is room for)"),
        ("-b", "--batch-size", "B,...", "texts at once (1)"),
    ):
        group.add_argument(short, name, type=listed(positive_count), metavar=metavar, help=text)


def _add_how(group: "argparse._ArgumentGroup") -> None:
    group.add_argument("-n", "--num-trials", type=positive_count, metavar="N", help="trials after the warm-up (5)")
    group.add_argument("--delay", type=seconds, default=0.0, metavar="S", help="seconds to cool down before each trial")
    group.add_argument("--decoder", choices=("eager", "compiled"), default="eager", help="how a step is computed")
    group.add_argument("--no-limits", action="store_true", help="do not measure how fast this device could be")
    group.add_argument(
        "--paper", action="store_true", help="the OpenELM paper's protocol: 36 + 1024 tokens, a dry run, five runs"
    )


def _add_more(group: "argparse._ArgumentGroup") -> None:
    group.add_argument("--profile", action="store_true", help="time per layer and part")
    group.add_argument("--norms", action="store_true", help="tokens/s with fused and naive RMSNorm and with LayerNorm")
    group.add_argument("--compare", choices=("mlx-lm",), help="the same folder with mlx-lm, taking turns")
    group.add_argument(
        "--baseline", type=Path, metavar="FILE", help="an earlier --output: exit status 1 when this run is slower"
    )
    group.add_argument(
        "--train", action="store_true", help="LoRA fine-tuning: tokens/s and memory at lengths -p and batches -b"
    )


def positive_count(text: str) -> int:
    """The argparse type of a count."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number of 1 or more, got {text!r}")
    return int(text)


def seconds(text: str) -> float:
    """The argparse type of a pause: a finite number, not negative."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"expected seconds, 0 or more, got {text!r}")
    return value


def bits(text: str) -> int:
    """The argparse type of a number of bits that affine quantisation has."""
    if text not in map(str, BITS):
        raise argparse.ArgumentTypeError(f"expected one of {', '.join(map(str, BITS))} bits, got {text!r}")
    return int(text)


def known(words: Iterable[str]) -> Callable[[str], str]:
    """The argparse type of one of several words."""
    choices = tuple(words)

    def parse(text: str) -> str:
        if text not in choices:
            raise argparse.ArgumentTypeError(f"expected one of {', '.join(choices)}, got {text!r}")
        return text

    return parse


def listed(parse: Callable[[str], Any]) -> Callable[[str], list[Any]]:
    """The argparse type of several values with commas between them, each once."""

    def parse_all(text: str) -> list[Any]:
        return list(dict.fromkeys(parse(part.strip()) for part in text.split(",")))

    return parse_all
