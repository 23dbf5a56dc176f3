"""Continue a prompt: the text goes to stdout as it comes, statistics go to stderr.

An Instruct model gets the prompt as one user turn in the form it was trained on; --no-instruct sends the text as it is.
With --prompts-file many prompts are continued at once.
"""

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .cache_arguments import add_cache_arguments, cache_from_arguments, kept_tokens
from .errors import GenerationError
from .model_arguments import add_model_arguments, load_from_arguments
from .sampling_arguments import add_sampling_arguments, sampling_from_arguments
from .speculation_arguments import add_speculation_arguments, drafter_from_arguments

if TYPE_CHECKING:
    from .cache import KVCache
    from .drafts import Drafter
    from .model import Model
    from .tokenizer import Tokenizer

DEFAULT_PROMPT = "Once upon a time there was"
_BATCH_SIZE = 8
_DECODERS = ("auto", "eager", "compiled", "measure")  # decoder.MODES, repeated because importing it imports mlx


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags of `openelm generate`."""
    add_model_arguments(parser)
    prompts = parser.add_mutually_exclusive_group()
    prompts.add_argument("-p", "--prompt", default=DEFAULT_PROMPT, help="the text to continue; - reads it from stdin")
    prompts.add_argument("--prompts-file", type=Path, metavar="FILE", help="many prompts: a line each, or .jsonl")
    parser.add_argument("--batch-size", type=int, default=_BATCH_SIZE, metavar="B", help="how many prompts at once")
    parser.add_argument("--escape", action="store_true", help=r"read \n, \t and \\ in --prompt as what they name")
    parser.add_argument(
        "--instruct", action=argparse.BooleanOptionalAction, help="use the Instruct prompt form (told from the model)"
    )
    parser.add_argument("--chat-template", metavar="FILE|TEXT", help="use this jinja2 template for the prompt instead")
    parser.add_argument(
        "--ignore-chat-template", action="store_true", help="do without the model folder's own template"
    )
    parser.add_argument("--show-prompt", action="store_true", help="print text and ids of what is sent, on stderr")
    parser.add_argument("--system-prompt", metavar="TEXT", help="how an Instruct model is to behave")
    parser.add_argument("--prefill-response", metavar="TEXT", default="", help="words the answer is to begin with")
    parser.add_argument("-m", "--max-tokens", type=int, metavar="N", help="how many tokens (256, or the room there is)")
    parser.add_argument("--min-tokens", type=int, default=0, metavar="N", help="do not end before so many tokens")
    parser.add_argument("--stop", action="append", default=[], metavar="TEXT", help="end before this text; repeatable")
    parser.add_argument("--exceed-context", action="store_true", help="go beyond the context the model was trained for")
    add_sampling_arguments(parser)
    add_cache_arguments(parser)
    add_speculation_arguments(parser)
    parser.add_argument(
        "--logprobs", type=int, metavar="K", help="in JSON: each token's log-probability, and the best K"
    )
    parser.add_argument("--decoder", choices=_DECODERS, help="how a step is computed; measure compares them here")
    parser.add_argument("--verbose", action="store_true", help="tell which decoder was taken, and why")
    formats = parser.add_mutually_exclusive_group()
    formats.add_argument("--json", action="store_true", help="print one JSON object instead of the text")
    formats.add_argument("--jsonl", action="store_true", help="print JSON lines: one for each token, the whole last")


def run(args: argparse.Namespace) -> int:
    """Load, generate, print."""
    _check(args)
    sampling = sampling_from_arguments(args)  # checked before a model is loaded
    if args.prompts_file is not None:
        from .batch_command import run_batch

        return run_batch(args, sampling)
    text = read_prompt(args.prompt, args.escape)
    model, tokenizer = load_from_arguments(args)
    ids = prompt_ids(tokenizer, text, args)
    if args.show_prompt:
        from .chat.format import spell

        print(f"{spell(tokenizer, ids)}\n{ids}", file=sys.stderr)
    drafter = drafter_from_arguments(args, model, tokenizer)
    cache, rest = _cache(args, model, tokenizer, ids)
    held = ids[: len(ids) - len(rest)]
    _print(args, model, tokenizer, held, rest, {"drafter": drafter, "cache": cache, **sampling})
    return 0


def prompt_ids(tokenizer: "Tokenizer", text: str, args: argparse.Namespace) -> list[int]:
    """The ids that are sent for a prompt's text: in the form that the model was trained on, or that a flag wants."""
    from .chat.command import choose_format
    from .prompt import encode_chat

    form = choose_format(args, tokenizer)
    if form.name == "completion":
        if args.system_prompt is not None:
            raise GenerationError(
                "--system-prompt is for Instruct models; this one continues text (or give --instruct)"
            )
        return tokenizer.encode(text + args.prefill_response)
    if form.name != "instruct":  # a template of another form
        return form.encode(args.system_prompt or "", (), text) + tokenizer.encode_segment(args.prefill_response)
    messages = [{"role": "user", "content": text}]
    if args.system_prompt is not None:
        messages.insert(0, {"role": "system", "content": args.system_prompt})
    if not args.prefill_response:
        return encode_chat(tokenizer, messages)
    messages.append({"role": "assistant", "content": args.prefill_response})
    ids = encode_chat(tokenizer, messages, add_generation_prompt=False)
    return ids[: len(ids) - 1 - ids[::-1].index(tokenizer.eos_token_id)]  # the answer is begun, not ended


def read_prompt(prompt: str, escape: bool) -> str:
    """The prompt's text: from stdin for `-`, with escapes resolved when asked for."""
    if prompt == "-":
        data = sys.stdin.buffer.read()
        try:
            prompt = data.decode("utf-8")
        except UnicodeDecodeError:
            raise GenerationError("the prompt on stdin is not UTF-8 text") from None
    if escape:
        for written, meant in (("\\\\", "\0"), ("\\n", "\n"), ("\\t", "\t"), ("\0", "\\")):
            prompt = prompt.replace(written, meant)
    if not prompt:
        raise GenerationError("the prompt is empty: give --prompt TEXT, or text on stdin with --prompt -")
    return prompt


def _check(args: argparse.Namespace) -> None:
    """Refuse flags that would do nothing."""
    speculates = args.draft_model is not None or args.prompt_lookup is not None
    if args.logprobs is not None:
        if not (args.json or args.jsonl):
            raise GenerationError("--logprobs are printed in JSON only: add --json or --jsonl")
        if speculates:
            raise GenerationError("--logprobs cannot be had with --draft-model or --prompt-lookup: leave one out")
    if speculates and args.decoder is not None:
        raise GenerationError("--decoder is for plain decoding: leave it out with --draft-model or --prompt-lookup")
    if args.min_tokens < 0 or (args.max_tokens is not None and args.min_tokens > args.max_tokens >= 1):
        raise GenerationError(f"min_tokens must be between 0 and max_tokens, got {args.min_tokens}")


def _cache(
    args: argparse.Namespace, model: "Model", tokenizer: "Tokenizer", ids: list[int]
) -> "tuple[list[KVCache], list[int]]":
    """The cache, and what of the prompt it does not hold yet."""
    cache, held = cache_from_arguments(args, model, kept_tokens(ids, tokenizer.eos_token_id))
    if held is None:
        return cache, ids[1:]  # mlx-lm's file does not say what it holds: the prompt follows it, without a second BOS
    if not held:
        return cache, ids
    from .prompt_cache import rest_of_prompt

    return cache, rest_of_prompt(cache, held, ids, tokenizer)


def _print(
    args: argparse.Namespace,
    model: "Model",
    tokenizer: "Tokenizer",
    held: list[int],
    rest: list[int],
    settings: dict[str, Any],
) -> None:
    """Generate what follows `rest`, where the cache holds `held` already, and print as asked."""
    from .decoder import Decoder
    from .generate_output import printer
    from .generation import DEFAULT_MAX_TOKENS, stream_generate
    from .logprobs import LogprobRecorder
    from .sampling import MinTokens, with_history

    decoder = None
    if settings["drafter"] is None:
        decoder = Decoder(model, settings["cache"], args.max_tokens or DEFAULT_MAX_TOKENS, args.decoder)
    recorder = LogprobRecorder(args.logprobs) if args.logprobs is not None else None
    shortest = MinTokens(args.min_tokens, len(rest), frozenset(tokenizer.eos_token_ids)) if args.min_tokens else None
    penalties = [with_history(held, process) for process in settings.pop("logits_processors")]
    processors = [recorder, *penalties, shortest]
    output = printer(args, tokenizer, recorder)
    for response in stream_generate(
        model,
        tokenizer,
        rest,
        args.max_tokens,
        stop=args.stop,
        exceed_context=args.exceed_context,
        decoder=decoder,
        logits_processors=[process for process in processors if process is not None],
        **settings,
    ):
        output.token(response)
    drafter: Drafter | None = settings["drafter"]
    output.end(drafter.acceptance if drafter is not None else None)
    if args.verbose and decoder is not None:
        print(f"decoder     {decoder}", file=sys.stderr)
