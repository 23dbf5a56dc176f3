"""`openelm generate --prompts-file`: many prompts at once, results in the prompts' order."""

import argparse
import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .errors import GenerationError
from .generate_command import prompt_ids
from .model_arguments import load_from_arguments

if TYPE_CHECKING:
    from .batch import BatchResult

_SINGLE_ONLY = ("draft_model", "prompt_lookup", "max_kv_size", "kv_bits", "prompt_cache_file", "logprobs")
_SHOWN = 60


def run_batch(args: argparse.Namespace, sampling: dict[str, Any]) -> int:
    """Continue every prompt of the file, and print each result once all before it are out."""
    _refuse_single_only(args)
    prompts = read_prompts(args.prompts_file)
    model, tokenizer = load_from_arguments(args)
    from .batch import batch_stream

    started, made = time.perf_counter(), 0
    waiting: dict[int, BatchResult] = {}
    results = batch_stream(
        model,
        tokenizer,
        [prompt_ids(tokenizer, prompt, args) for prompt in prompts],
        args.max_tokens,
        batch_size=args.batch_size,
        stop=args.stop,
        exceed_context=args.exceed_context,
        **sampling,
    )
    shown = 0
    for result in results:
        waiting[result.index] = result
        made += len(result.tokens)
        while shown in waiting:
            _print(args, prompts[shown], waiting.pop(shown))
            shown += 1
    seconds = time.perf_counter() - started
    print(
        f"{len(prompts)} texts, {made} tokens in {seconds:.1f} s: {made / seconds:.1f} tokens/s together",
        file=sys.stderr,
    )
    return 0


def read_prompts(path: Path) -> list[str]:
    """A prompt from every line; in a .jsonl file each line is a string, or an object with "prompt".

    Raises GenerationError naming the file and the line.
    """
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except OSError as error:
        raise GenerationError(f"cannot read {path}: {error.strerror or error}") from None
    except UnicodeDecodeError:
        raise GenerationError(f"{path} is not UTF-8 text") from None
    parse = _from_json if path.suffix == ".jsonl" else lambda line, where: line
    prompts = [parse(line, f"{path}, line {number}") for number, line in enumerate(lines, 1) if line.strip()]
    if not prompts:
        raise GenerationError(f"{path} has no prompts: give one a line")
    return prompts


def _from_json(line: str, where: str) -> str:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        raise GenerationError(f"{where} is not JSON: {line[:_SHOWN]}") from None
    prompt = value.get("prompt") if isinstance(value, dict) else value
    if not isinstance(prompt, str) or not prompt:
        raise GenerationError(f'{where}: expected a string or {{"prompt": "..."}}, got {line[:_SHOWN]}')
    return prompt


def _refuse_single_only(args: argparse.Namespace) -> None:
    given = [name for name in _SINGLE_ONLY if getattr(args, name) is not None] + ["min_tokens"] * bool(args.min_tokens)
    if given:
        raise GenerationError(f"--{given[0].replace('_', '-')} is for single prompts: leave it out with --prompts-file")


def _print(args: argparse.Namespace, prompt: str, result: "BatchResult") -> None:
    if args.json or args.jsonl:
        record = {
            "index": result.index,
            "prompt": prompt,
            "text": result.text,
            "tokens": result.tokens,
            "finish_reason": result.finish_reason,
            "prompt_tokens": result.prompt_tokens,
            "generation_tokens": len(result.tokens),
            "model": args.model,
        }
        print(json.dumps(record), flush=True)
    else:
        print(f"== {result.index + 1}: {' '.join(prompt.split())[:_SHOWN]}\n{result.text}\n", flush=True)
