"""Flags that several commands of this room have: where a model's other files are, and where the result goes."""

import argparse


def add_source_arguments(parser: argparse.ArgumentParser, noun: str) -> None:
    """Where the tokenizer is, which revision, and whether the network may be asked. `noun`: what the source is here."""
    parser.add_argument("--tokenizer", metavar="FILE|DIR|HUB_ID", help=f"the tokenizer, where the {noun} has none")
    parser.add_argument("--revision", metavar="NAME", help="branch, tag or commit of a Hub repository")
    parser.add_argument("--offline", action="store_true", help="use only what is on this disk")


def add_description_arguments(parser: argparse.ArgumentParser, noun: str) -> None:
    """What a source may not say of itself."""
    parser.add_argument("--config", metavar="YAML|JSON", help=f"the configuration, where the {noun} has none")
    parser.add_argument(
        "--instruct",
        action=argparse.BooleanOptionalAction,
        help=f"with or without the Instruct chat template (told from the {noun}'s name or folder)",
    )


def add_result_arguments(parser: argparse.ArgumentParser) -> None:
    """Sending the folder to the Hub, and telling a program what was made."""
    parser.add_argument("--upload-repo", metavar="HUB_ID", help="send the folder to this Hub repository, with a card")
    parser.add_argument("--upload-private", action="store_true", help="make a new repository private")
    parser.add_argument("--upload-dry-run", action="store_true", help="show what would be sent, and send nothing")
    parser.add_argument("--json", action="store_true", help="what was made as one JSON object, on the last line")
