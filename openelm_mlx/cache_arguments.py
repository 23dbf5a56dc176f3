"""The flags that choose the cache of a generation: its size, its bits, or a file."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from .errors import GenerationError

if TYPE_CHECKING:
    from .cache import KVCache
    from .model import Model


def add_cache_kind_arguments(parser: argparse.ArgumentParser) -> None:
    """--max-kv-size and --kv-bits."""
    parser.add_argument(
        "--max-kv-size",
        type=int,
        metavar="N",
        help="hold at most N tokens in the cache: BOS, system prompt and the newest (the context limit stays)",
    )
    parser.add_argument("--kv-bits", type=int, metavar="4|8", help="hold the cache in 4 or 8 bits")


def add_cache_arguments(parser: argparse.ArgumentParser) -> None:
    """The same, and --prompt-cache-file to begin from."""
    add_cache_kind_arguments(parser)
    parser.add_argument(
        "--prompt-cache-file",
        type=Path,
        metavar="FILE",
        help="what `openelm cache-prompt` made of the prompt's beginning",
    )


def cache_from_arguments(
    args: argparse.Namespace, model: "Model", keep: int
) -> "tuple[list[KVCache], list[int] | None]":
    """The cache that these flags mean, and the ids it holds already: [] in a fresh one, None where nobody knows.

    keep: how many first tokens a bounded cache never forgets (see `kept_tokens`). Raises GenerationError for
    contradictions and bad values, CheckpointError for a file that does not fit.
    """
    if args.prompt_cache_file is None:
        from .caches import make_cache

        return make_cache(model, max_kv_size=args.max_kv_size, keep=keep, kv_bits=args.kv_bits), []
    if args.max_kv_size is not None or args.kv_bits is not None:
        raise GenerationError(
            "--prompt-cache-file is of one kind already: --max-kv-size and --kv-bits belong to `openelm cache-prompt`"
        )
    from .prompt_cache import load_prompt_cache

    return load_prompt_cache(args.prompt_cache_file, model)


def kept_tokens(ids: list[int], eos_token_id: int) -> int:
    """How many first tokens of a prompt to keep: up to the end of the system turn, or BOS alone where there is none."""
    return ids.index(eos_token_id) + 1 if eos_token_id in ids else 1
