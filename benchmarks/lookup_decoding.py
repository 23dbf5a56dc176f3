"""What prompt lookup gains on text that repeats itself, and that it loses next to nothing on prose.

The text is given and the model made to write it, so that what is accepted depends on the text alone and random weights
do as well as real ones. Prose is a story that the bundled model tells after another story; the repetitive text is that
other story told again with every 20th token another one. Both sides take turns, ten tokens at a time; the prompt's
time is left out.

    python -m openelm_mlx.benchmarks.lookup_decoding [--size 270M] [--tokens 100] [--trials 5] [--write-docs]
"""

import argparse
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

import mlx.core as mx

from ..checkpoint import load
from ..config import PUBLISHED_SIZES, OpenELMConfig
from ..drafts import Acceptance
from ..errors import RunFailedError
from ..generation import generate_step
from ..model import Model
from ..prompt_lookup import PromptLookup
from ..sampling import make_sampler
from ..speculative import speculative_step
from .arguments import positive_count
from .comparison import PERFORMANCE_PAGE, Comparison, write_text
from .openblas import preload_openblas
from .record import machine
from .vs_mlx_lm import describe

REPETITIVE, PROSE = 1.3, 0.9  # promised ratios
_CHANGE_EVERY = 20
_BLOCK = 10  # tokens
_HEADINGS = ("text", "with lookup", "plain", "ratio (range)", "target", "reached", "drafts accepted")


@dataclass(frozen=True)
class Writer:
    """A model that writes what it is told to, at the usual cost. A logits processor."""

    prompt: list[int]
    text: list[int]

    def __call__(self, tokens: mx.array, logits: mx.array) -> mx.array:
        logits[:, self.text[tokens.size - len(self.prompt)]] = mx.inf
        return logits


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print. Status 1 when a promise does not hold."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=PUBLISHED_SIZES, help="a published size, random weights (the bundled model)")
    parser.add_argument("--tokens", type=positive_count, default=100, help="length of either story (at most 120)")
    parser.add_argument("--trials", type=positive_count, default=5, help="turns for each side")
    parser.add_argument("--prompt-lookup", type=positive_count, default=10, metavar="N", help="as in openelm generate")
    parser.add_argument("--write-docs", action="store_true", help="put the figures into docs/performance.md")
    args = parser.parse_args(argv)
    tiny, tokenizer = load("tiny", dtype="float32")
    model = tiny if args.size is None else Model(OpenELMConfig.from_name(args.size))
    model.eval()
    stories = [story(tiny, tokenizer.encode("Once upon a time there was"), args.tokens, seed) for seed in (1, 2)]
    conditions = (
        f"{args.size or 'tiny'}, float32, {args.trials} turn{'s' if args.trials > 1 else ''}, {describe(machine())}"
    )
    lines = [" | ".join(_HEADINGS), " | ".join(["---"] * len(_HEADINGS))]
    print(conditions, lines[0], sep="\n")
    passed = True
    for job, text, target in (("repetitive", changed(stories[0]), REPETITIVE), ("prose", stories[1], PROSE)):
        comparison, acceptance = measure(job, model, stories[0], text, target, args.trials, args.prompt_lookup)
        lines.append(" | ".join([*comparison.cells, f"{acceptance.accepted} of {acceptance.proposed}"]))
        print(lines[-1])
        passed = passed and comparison.passed
    if args.write_docs:
        write_text(PERFORMANCE_PAGE, "lookup_decoding", "\n".join(f"| {line} |" for line in lines), conditions)
    return 0 if passed else 1


def story(model: Model, opening: list[int], count: int, seed: int) -> list[int]:
    """`count` tokens that a model tells after `opening`; at this temperature some phrases come up again."""
    return list(generate_step(opening, model, max_tokens=count, sampler=make_sampler(temp=0.6, seed=seed)))


def changed(text: list[int]) -> list[int]:
    """The same text with every 20th token another one, of those that it has."""
    return [text[i // 2] if i % _CHANGE_EVERY == _CHANGE_EVERY - 1 else token for i, token in enumerate(text)]


def measure(
    job: str, model: Model, prompt: list[int], text: list[int], target: float, trials: int, num_draft_tokens: int
) -> tuple[Comparison, Acceptance]:
    """Milliseconds to write `text` after `prompt` with lookup and without, and the acceptance of the last trial."""
    writer = [Writer(prompt, text)]
    with_it, without = [], []
    for trial in range(1 + trials):  # the first is for warming up
        drafter = PromptLookup(num_draft_tokens)
        drafted = speculative_step(prompt, model, drafter, max_tokens=len(text), logits_processors=writer)
        plain = generate_step(prompt, model, max_tokens=len(text), logits_processors=writer)
        lookup_ms, plain_ms = write_in_turns(text, (step.token for step in drafted), plain)
        if trial > 0:
            with_it.append(lookup_ms)
            without.append(plain_ms)
    return Comparison(job, "ms", tuple(with_it), tuple(without), target), drafter.acceptance


def write_in_turns(text: list[int], *sides: Iterator[int]) -> list[float]:
    """Each side's milliseconds for all tokens but the first; blocks in turn, so that other work meets all alike."""
    written = [[next(side)] for side in sides]
    elapsed_ms = [0.0] * len(sides)
    for start in range(1, len(text), _BLOCK):
        for i, side in enumerate(sides):
            mx.synchronize()  # a step that one side has queued is computed on its own time
            began = time.perf_counter()
            written[i] += islice(side, min(_BLOCK, len(text) - start))
            mx.synchronize()
            elapsed_ms[i] += (time.perf_counter() - began) * 1e3
    if any(tokens != text for tokens in written):
        raise RunFailedError("the model did not write the text it was given")
    return elapsed_ms


if __name__ == "__main__":
    preload_openblas()
    raise SystemExit(main())
