"""A long chat answers as promptly as a new one: from Enter to the first token, in the tenth turn and in the first.

Keys and values are kept between turns, so a turn computes only its own tokens; the last column shows what it would
cost to compute the whole conversation again. Random weights of a published size, or any model that is named.

    python -m openelm_mlx.benchmarks.chat_turns [--size 270M | --model MODEL] [--trials 3] [--write-docs]
"""

import argparse
import json
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median

import mlx.core as mx

from ..chat.conversation import Conversation
from ..chat.format import InstructFormat
from ..checkpoint import load
from ..config import PUBLISHED_SIZES, OpenELMConfig
from ..errors import RunFailedError
from ..model import Model
from ..tokenizer import Tokenizer
from .arguments import positive_count
from .comparison import PERFORMANCE_PAGE, write_text
from .openblas import preload_openblas
from .random_checkpoint import write_random_folder
from .record import machine
from .vs_mlx_lm import describe

TURNS = 10
LIMIT = 1.2  # the tenth turn's time over the first's, at most
_MESSAGE = "Tell me one more thing about the king and his three daughters, please."
_ANSWER_TOKENS = 12


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print. Status 1 when the tenth turn takes too much longer than the first."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", default="270M", choices=PUBLISHED_SIZES)
    parser.add_argument("--model", metavar="MODEL", help="a folder or Hub id instead of random weights")
    parser.add_argument("--trials", type=positive_count, default=3, help="chats, after a first that warms up")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every figure to this file")
    parser.add_argument("--write-docs", action="store_true", help="put the figures into docs/performance.md")
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory(prefix="openelm-chat-turns-") as folder:
        if args.model is None:
            write_random_folder(Path(folder) / "model", OpenELMConfig.from_name(args.size), mx.float32)
        model, tokenizer = load(args.model or Path(folder) / "model")
        one_chat(model, tokenizer)
        chats = [one_chat(model, tokenizer) for _ in range(args.trials)]
        again_s = whole_again(model, tokenizer)
    turns = [median(times) for times in zip(*chats, strict=True)]
    ratio = turns[-1] / turns[0]
    print("turn           " + "".join(f"{turn:>8}" for turn in range(1, TURNS + 1)) + f"{'anew':>9}")
    print("first token, ms" + "".join(f"{1e3 * seconds:>8.1f}" for seconds in turns) + f"{1e3 * again_s:>9.1f}")
    told = f"turn {TURNS} / turn 1: {ratio:.2f}, at most {LIMIT}: {'yes' if ratio <= LIMIT else 'no'}"
    print(told)
    if args.write_docs:
        first, last = 1e3 * turns[0], 1e3 * turns[-1]
        more = f"{told} ({first:.0f} and {last:.0f} ms to the first token; {1e3 * again_s:.0f} with nothing kept)"
        write_text(PERFORMANCE_PAGE, "chat_turns", more, f"{args.model or args.size}, {describe(machine())}")
    if args.json:
        record = {"machine": machine(), "ttft_s": chats, "anew_s": again_s, "ratio": ratio, "limit": LIMIT}
        args.json.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    return 0 if ratio <= LIMIT else 1


def one_chat(model: Model, tokenizer: Tokenizer) -> list[float]:
    """Seconds from Enter to the first token, for each turn of a new chat."""
    conversation = Conversation(model, tokenizer, InstructFormat(tokenizer))
    times = [_turn_s(conversation) for _ in range(TURNS)]
    if conversation.dropped:
        raise RunFailedError(f"{TURNS} turns exceed the context of {conversation.limit}: choose a larger model")
    return times


def whole_again(model: Model, tokenizer: Tokenizer) -> float:
    """Seconds for the last turn of such a chat when nothing was kept."""
    conversation = Conversation(model, tokenizer, InstructFormat(tokenizer))
    for _ in range(TURNS - 1):
        _turn_s(conversation)
    conversation.forget_cache()
    return _turn_s(conversation)


def _turn_s(conversation: Conversation) -> float:
    start = time.perf_counter()
    prompt = conversation.prepare(_MESSAGE, max_tokens=_ANSWER_TOKENS)
    answer = conversation.answer(prompt, max_tokens=_ANSWER_TOKENS)
    next(answer)
    elapsed = time.perf_counter() - start
    for _ in answer:  # the rest of the answer is what the next turn continues
        pass
    mx.synchronize()
    return elapsed


if __name__ == "__main__":
    preload_openblas()
    raise SystemExit(main())
