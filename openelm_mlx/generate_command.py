"""Continue a prompt: the text goes to stdout as it comes, statistics go to stderr.

An Instruct model gets the prompt as one user turn in the form it was trained on; --no-instruct sends the text as it is.
"""

import argparse
import json
import sys
from typing import TYPE_CHECKING

from .errors import GenerationError
from .model_arguments import add_model_arguments, load_from_arguments
from .sampling_arguments import add_sampling_arguments, sampling_from_arguments

if TYPE_CHECKING:
    from .generation import GenerationResponse
    from .tokenizer import Tokenizer

DEFAULT_PROMPT = "Once upon a time there was"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags of `openelm generate`."""
    add_model_arguments(parser)
    parser.add_argument("-p", "--prompt", default=DEFAULT_PROMPT, help="the text to continue; - reads it from stdin")
    parser.add_argument("--escape", action="store_true", help=r"read \n, \t and \\ in --prompt as what they name")
    parser.add_argument(
        "--instruct", action=argparse.BooleanOptionalAction, help="use the Instruct prompt form (told from the model)"
    )
    parser.add_argument("-m", "--max-tokens", type=int, metavar="N", help="how many tokens (256, or the room there is)")
    parser.add_argument("--stop", action="append", default=[], metavar="TEXT", help="end before this text; repeatable")
    parser.add_argument("--exceed-context", action="store_true", help="go beyond the context the model was trained for")
    add_sampling_arguments(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of the text")


def run(args: argparse.Namespace) -> int:
    """Load, generate, print."""
    text = read_prompt(args.prompt, args.escape)
    sampling = sampling_from_arguments(args)  # checked before a model is loaded
    model, tokenizer = load_from_arguments(args)
    from .generation import stream_generate

    instruct = tokenizer.is_instruct if args.instruct is None else args.instruct
    responses = []
    for response in stream_generate(
        model,
        tokenizer,
        _encode(tokenizer, text, instruct),
        args.max_tokens,
        stop=args.stop,
        exceed_context=args.exceed_context,
        **sampling,
    ):
        responses.append(response)
        if not args.json:
            print(response.text, end="", flush=True)
    if args.json:
        print(json.dumps(_record(args.model, responses)))
    else:
        print()
        print(_statistics(responses[-1]), file=sys.stderr)
    return 0


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


def _encode(tokenizer: "Tokenizer", text: str, instruct: bool) -> list[int]:
    from .prompt import encode_chat

    return encode_chat(tokenizer, [{"role": "user", "content": text}]) if instruct else tokenizer.encode(text)


def _record(model: str, responses: "list[GenerationResponse]") -> dict[str, object]:
    last = responses[-1]
    return {
        "text": "".join(response.text for response in responses),
        "tokens": [response.token for response in responses],
        "finish_reason": last.finish_reason,
        "prompt_tokens": last.prompt_tokens,
        "generation_tokens": last.generation_tokens,
        "prompt_tps": last.prompt_tps,
        "generation_tps": last.generation_tps,
        "ttft_s": last.ttft_s,
        "peak_memory_bytes": last.peak_memory_bytes,
        "model": model,
    }


def _statistics(last: "GenerationResponse") -> str:
    lines = (
        f"prompt      {last.prompt_tokens} tokens, {last.prompt_tps:.1f} tokens/s, "
        f"first token after {last.ttft_s:.3f} s\n"
        f"generation  {last.generation_tokens} tokens, {last.generation_tps:.1f} tokens/s\n"
        f"peak memory {last.peak_memory_bytes / 1e6:.0f} MB (MLX allocator)"
    )
    if last.finish_reason == "length":
        lines += f"\nstopped at {last.generation_tokens} tokens; --max-tokens N asks for more"
    return lines
