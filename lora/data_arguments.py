"""The flags that say what is trained on. A flag that is not given is None, so that a YAML file may decide."""

import argparse

from .data_settings import DEFAULT_VAL_SPLIT, LONG_ROWS


def add_data_arguments(parser: argparse.ArgumentParser) -> None:
    """--data and what becomes of it; `DataSettings.from_values` takes them all."""
    group = parser.add_argument_group("data")
    group.add_argument(
        "--data",
        metavar="DIR|FILE|HUB_ID",
        help="a folder with train.jsonl (and valid.jsonl, test.jsonl), one .jsonl or .json file, or a Hub dataset",
    )
    group.add_argument(
        "--val-split",
        type=float,
        metavar="SHARE",
        help=f"share of the training rows kept for validation where there is no file for it (a single file: "
        f"{DEFAULT_VAL_SPLIT}; a folder: none)",
    )
    group.add_argument(
        "--mask-prompt",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="learn the answers only: completions, outputs, and each turn of the assistant",
    )
    group.add_argument("--max-seq-length", type=int, metavar="TOKENS", help="longest sequence (2048)")
    group.add_argument(
        "--long-rows", choices=LONG_ROWS, default=None, help="what becomes of rows longer than that (cut)"
    )
    group.add_argument("--max-rows", type=int, metavar="N", help="read only the first N rows of each file or split")
    group.add_argument(
        "--text-eos",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="end each text row with EOS (yes); --no-text-eos for pieces of a longer text",
    )
    group.add_argument(
        "--pack",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="several short rows in one sequence, none of which sees another",
    )
    group.add_argument(
        "--show-batch",
        action="store_true",
        default=None,
        help="print the first batch token by token, with what counts, and stop",
    )
