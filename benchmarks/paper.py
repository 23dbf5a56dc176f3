"""The paper's own benchmark (arXiv 2404.14619, section on benchmarking): its protocol, and its numbers beside yours.

The protocol is that of Apple's CoreNet `inference.py` as far as it can be read there: a prompt of 36 tokens, 1024
generated, one text, greedy, EOS ignored, a dry run, then the mean of five runs. What differs here, on purpose: the dry
run really runs, and before every model; kernels are not loaded within the timed prompt; a token is evaluated alone
instead of eight at a time. Their generation rate counts all G tokens over a time that leaves the first one out, so `as
the paper counts` does the same.

The numbers were not copied from the paper but written down from memory and checked by arithmetic only: "as recalled".
"""

from statistics import mean
from typing import Any, NamedTuple

from ..config import PUBLISHED_SIZES, OpenELMConfig
from ..errors import GenerationError
from .results import BenchResult, rate
from .session import Shape

SHAPE = Shape(prompt_tokens=36, generation_tokens=1024)
TRIALS = 5
WARM_UPS = 1
MACHINE = "MacBook Pro, M2 Max, 64 GiB, macOS 14.4.1, MLX 0.10.0"
STANDING = "as recalled, not checked against the paper"


def check_context(name: str, context: int) -> None:
    """Raise GenerationError for a model that has no room for the protocol's tokens."""
    needed = SHAPE.prompt_tokens + SHAPE.generation_tokens
    if needed > context:
        raise GenerationError(
            f"--paper takes {SHAPE.prompt_tokens} + {SHAPE.generation_tokens} tokens, and the context of {name} is "
            f"{context}: name a model with a longer one (--model, or --size 270M for random weights)"
        )


class Rates(NamedTuple):
    """Tokens/s of prompt, generation, and both together."""

    prompt: float | None
    generation: float | None
    total: float | None


# (size, bits) -> what the paper reports for MLX, as recalled
RECALLED = {
    ("270M", 16): Rates(1151.41, 212.40, 218.45),
    ("270M", 4): Rates(803.99, 256.35, 262.70),
    ("450M", 16): Rates(910.61, 147.26, 151.57),
    ("450M", 4): Rates(883.19, 197.81, 203.16),
    ("1_1B", 16): Rates(508.56, 78.72, 81.04),
    ("1_1B", 4): Rates(554.17, 117.90, 121.14),
    ("3B", 16): Rates(234.96, 33.96, 34.97),
    ("3B", 4): Rates(211.32, 60.33, 61.83),
}
_BITS = {"bfloat16": 16, "4-bit": 4}


def as_the_paper_counts(result: BenchResult) -> Rates:
    """Means over the trials: prompt tokens over the time to the first, all G tokens over the rest, and all over all."""
    prompt, generated = result.prompt_tokens, result.generation_tokens
    ttft_s = mean(trial.ttft_s for trial in result.trials)
    decode_s = mean(trial.decode_s for trial in result.trials)
    return Rates(rate(prompt, ttft_s), rate(generated, decode_s), rate(prompt + generated, ttft_s + decode_s))


def recalled(config: OpenELMConfig, precision: str) -> Rates | None:
    """The paper's rates for this model in this precision; None unless it is one of the four sizes, and in the table."""
    bits = _BITS.get(precision)
    for size in PUBLISHED_SIZES:
        if bits is not None and _same_work(config, OpenELMConfig.from_name(size)):
            return RECALLED[size, bits]
    return None


def to_dict(result: BenchResult, config: OpenELMConfig) -> dict[str, Any]:
    """The `paper` entry of a result."""
    theirs = recalled(config, result.precision)
    return {
        "as_the_paper_counts": as_the_paper_counts(result)._asdict(),
        "recalled": None if theirs is None else {**theirs._asdict(), "machine": MACHINE, "standing": STANDING},
    }


def _same_work(one: OpenELMConfig, other: OpenELMConfig) -> bool:
    return one.parameter_shapes() == other.parameter_shapes()
