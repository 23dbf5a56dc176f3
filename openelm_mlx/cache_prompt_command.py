"""Compute the beginning of a prompt once and save it: `openelm generate --prompt-cache-file F` continues from there.

An Instruct model gets the text as the beginning of a user's message that is still open; --no-instruct takes the text as
it is. mlx-lm reads the file too.
"""

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from .cache_arguments import add_cache_kind_arguments, kept_tokens
from .config_keys import counted
from .generate_command import read_prompt
from .model_arguments import add_model_arguments, load_from_arguments

if TYPE_CHECKING:
    from .tokenizer import Tokenizer


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags of `openelm cache-prompt`."""
    add_model_arguments(parser)
    parser.add_argument("-p", "--prompt", required=True, help="the text to begin with; - reads it from stdin")
    parser.add_argument("--escape", action="store_true", help=r"read \n, \t and \\ in --prompt as what they name")
    parser.add_argument(
        "--instruct", action=argparse.BooleanOptionalAction, help="use the Instruct prompt form (told from the model)"
    )
    parser.add_argument(
        "--prompt-cache-file", required=True, type=Path, metavar="FILE", help="what to write, a .safetensors file"
    )
    parser.add_argument("--exceed-context", action="store_true", help="go beyond the context the model was trained for")
    add_cache_kind_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Load, prefill, save."""
    from .caches import make_cache
    from .generation import generate_step, room_for
    from .prompt_cache import check_prompt_cache_target, save_prompt_cache

    check_prompt_cache_target(args.prompt_cache_file)
    text = read_prompt(args.prompt, args.escape)
    model, tokenizer = load_from_arguments(args)
    instruct = tokenizer.is_instruct if args.instruct is None else args.instruct
    ids = _encode_open(tokenizer, text) if instruct else tokenizer.encode(text)
    room_for(len(ids), 1, model.config.max_context_length, args.exceed_context)
    keep = kept_tokens(ids, tokenizer.eos_token_id)
    cache = make_cache(model, max_kv_size=args.max_kv_size, keep=keep, kv_bits=args.kv_bits)
    for _ in generate_step(ids, model, max_tokens=1, cache=cache):  # that is the prefill; its one token is not run
        pass
    save_prompt_cache(args.prompt_cache_file, cache, ids, model, model_name=args.model)
    size_bytes = args.prompt_cache_file.stat().st_size
    print(f"{args.prompt_cache_file}: {counted(len(ids), 'token')}, {size_bytes / 1e6:.2f} MB", file=sys.stderr)
    return 0


def _encode_open(tokenizer: "Tokenizer", text: str) -> list[int]:
    """The Instruct prompt up to the end of the text, without the EOS that would end the message."""
    from .prompt import encode_chat

    ids = encode_chat(tokenizer, [{"role": "user", "content": text}], add_generation_prompt=False)
    return ids[: len(ids) - 1 - ids[::-1].index(tokenizer.eos_token_id)]
