"""The flags that guess tokens ahead: with a draft model (mlx-lm's names), or from the text's own repetitions."""

import argparse
from typing import TYPE_CHECKING

from .errors import GenerationError

if TYPE_CHECKING:
    from .drafts import Drafter
    from .model import Model
    from .tokenizer import Tokenizer

_NUM_DRAFT_TOKENS = 3  # drafts.DEFAULT_NUM_DRAFT_TOKENS, repeated here because importing it would import mlx


def add_speculation_arguments(parser: argparse.ArgumentParser) -> None:
    """--draft-model with --num-draft-tokens, or --prompt-lookup."""
    kinds = parser.add_mutually_exclusive_group()
    kinds.add_argument(
        "--draft-model", metavar="MODEL", help="a smaller model with the same tokenizer that guesses tokens ahead"
    )
    kinds.add_argument(
        "--prompt-lookup",
        type=_positive_count,
        metavar="N",
        help="guess up to N tokens ahead where the text repeats itself; pauses where that does not pay",
    )
    parser.add_argument(
        "--num-draft-tokens",
        type=_positive_count,
        default=_NUM_DRAFT_TOKENS,
        metavar="N",
        help="how many tokens the draft model guesses at a time",
    )


def drafter_from_arguments(args: argparse.Namespace, model: "Model", tokenizer: "Tokenizer") -> "Drafter | None":
    """The drafter that these flags mean, or None. Raises GenerationError when the draft model does not fit.

    The draft model is loaded as `model` was (--dtype, --offline, --keep-quantized).
    """
    if args.prompt_lookup is not None:
        from .prompt_lookup import PromptLookup

        return PromptLookup(args.prompt_lookup)
    if args.draft_model is None:
        return None
    from .checkpoint import load_model
    from .drafts import ModelDrafter
    from .hub import has_tokenizer, resolve_model

    folder = resolve_model(args.draft_model, offline=args.offline)
    draft_model = load_model(folder, dtype=args.dtype, keep_quantized=args.keep_quantized)
    ours, theirs = model.config.vocab_size, draft_model.config.vocab_size
    if ours != theirs:
        raise GenerationError(
            f"--draft-model {args.draft_model} has a vocabulary of {theirs} tokens, the model one of {ours}: "
            "give a draft model of the same family"
        )
    if has_tokenizer(folder):  # Apple's own repositories have none: nothing to compare
        from .tokenizer import Tokenizer

        if _meaning(Tokenizer.from_path(folder, vocab_size=theirs)) != _meaning(tokenizer):
            raise GenerationError(
                f"--draft-model {args.draft_model} has another tokenizer: its ids mean other text than the model's; "
                "give a draft model of the same family"
            )
    return ModelDrafter(draft_model, args.num_draft_tokens)


def _meaning(tokenizer: "Tokenizer") -> tuple[int, int, str]:
    """What the ids stand for, near enough to tell two tokenizers apart: the text of all of them, and which is EOS."""
    return tokenizer.vocab_size, tokenizer.eos_token_id, tokenizer.decode(range(tokenizer.vocab_size))


def _positive_count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number of 1 or more, got {text!r}")
    return int(text)
