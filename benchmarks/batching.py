"""Eight prompts at once against one after the other: tokens/s together, with every text the same either way.

python -m openelm_mlx.benchmarks.batching [--model tiny] [--batch-size 8] [--tokens 64] [--trials 5] [--write-docs]
"""

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median

from ..batch import batch_generate
from ..checkpoint import load
from ..model import Model
from ..tokenizer import Tokenizer
from .arguments import positive_count
from .comparison import PERFORMANCE_PAGE, write_text
from .measure import prompt_ids
from .openblas import preload_openblas
from .record import machine
from .vs_mlx_lm import describe

LIMIT = 3.0  # the batch's tokens/s over single runs', at least
_PROMPT_TOKENS = 16


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print; status 1 when the batch gains less than the limit or changes a text."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="tiny", metavar="MODEL")
    parser.add_argument("--batch-size", type=positive_count, default=8, metavar="B")
    parser.add_argument("--tokens", type=positive_count, default=64, help="to generate for each prompt")
    parser.add_argument("--trials", type=positive_count, default=5, help="turns for each side")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every figure to this file")
    parser.add_argument("--write-docs", action="store_true", help="put the figures into docs/performance.md")
    args = parser.parse_args(argv)
    model, tokenizer = load(args.model, dtype="float32")
    vocabulary = min(model.config.vocab_size, tokenizer.vocab_size)
    ids = prompt_ids(_PROMPT_TOKENS * args.batch_size, vocabulary)
    prompts = [ids[start : start + _PROMPT_TOKENS] for start in range(0, len(ids), _PROMPT_TOKENS)]
    rates: dict[int, list[float]] = {1: [], args.batch_size: []}
    texts = {size: _run(model, tokenizer, prompts, args.tokens, size)[1] for size in rates}  # warms up, too
    for _ in range(args.trials):
        for size, measured in rates.items():
            measured.append(_run(model, tokenizer, prompts, args.tokens, size)[0])
    single, batch = (median(measured) for measured in rates.values())
    same = texts[1] == texts[args.batch_size]
    told = (
        f"one by one {single:.0f} tokens/s, {args.batch_size} at once {batch:.0f}: {batch / single:.2f}x, "
        f"at least {LIMIT} wanted; the texts are {'the same' if same else 'NOT the same'}"
    )
    print(told)
    if args.write_docs:
        write_text(PERFORMANCE_PAGE, "batching", told, f"{args.model}, float32, {describe(machine())}")
    if args.json is not None:
        figures = {"single_tps": rates[1], "batch_tps": rates[args.batch_size], "same_texts": same}
        args.json.write_text(json.dumps(figures) + "\n", encoding="utf-8")
    return 0 if same and batch >= LIMIT * single else 1


def _run(
    model: Model, tokenizer: Tokenizer, prompts: list[list[int]], tokens: int, batch_size: int
) -> tuple[float, list[list[int]]]:
    """Tokens/s over all prompts, and what was generated."""
    start = time.perf_counter()
    results = batch_generate(model, tokenizer, prompts, tokens, batch_size=batch_size)
    seconds = time.perf_counter() - start
    return sum(len(result.tokens) for result in results) / seconds, [result.tokens for result in results]


if __name__ == "__main__":
    preload_openblas()
    sys.exit(main())
