"""Tokens/s of one model at one shape, or of several sides in turn: what `openelm bench` reports.

Prefill and decode are timed apart: prefill is P prompt tokens up to the first generated token, decode the other G-1
tokens. The prompt is a fixed list of ids, decoding is greedy, and EOS is ignored, so that every trial does the same
work. Runs of the same shape go first and are thrown away, until they stop getting faster: they pay for reading lazy
weights, compiling kernels, MLX's first allocations and a device that wakes up.
"""

import random
from collections.abc import Sequence

from ..device import wired_limit
from ..model import Model
from .results import BenchResult
from .runs import begin
from .session import Method, Progress, Session, Shape, check_positive

_PROMPT_SEED = 0


class Interrupted(KeyboardInterrupt):
    """Ctrl-C while measuring. `results` have the trials that were finished."""

    def __init__(self, results: list[BenchResult]) -> None:
        super().__init__()
        self.results = results


def measure(
    model: Model,
    name: str,
    shape: Shape,
    method: Method = Method(),  # noqa: B008  # frozen
    *,
    foreign_bytes: int = 0,
    progress: Progress = lambda step: None,
) -> BenchResult:
    """Warm up, then run the trials. `progress` is told what runs, before each run.

    foreign_bytes: what MLX's allocator holds besides this model, taken off its peaks.
    Raises GenerationError for a shape that the model's context cannot hold, or fewer than one trial; Interrupted, with
    the finished trials, on Ctrl-C.
    """
    return measure_in_turns([session(model, name, shape, method, foreign_bytes=foreign_bytes)], progress)[0]


def session(
    model: Model, name: str, shape: Shape, method: Method, *, foreign_bytes: int = 0, variant: str = ""
) -> Session:
    """This project's side of a measurement."""
    check_positive("the number of trials (-n)", method.trials)
    shape.check(model.config.max_context_length)
    prompts = prompt_batch(shape, model.config.vocab_size)
    return Session(
        model,
        name,
        shape,
        method,
        begin=lambda: begin(model, prompts, method.decoder),
        parameters=model.config.num_parameters(),
        variant=variant,
        foreign_bytes=foreign_bytes,
    )


def measure_in_turns(sessions: Sequence[Session], progress: Progress = lambda step: None) -> list[BenchResult]:
    """All warm up, then each runs a trial after the other, so that heat and other work meet all alike.

    Whose turn comes first changes with every round.
    """
    try:
        with wired_limit(sum({id(one.model): one.weight_bytes for one in sessions}.values())):
            for one in sessions:
                one.warm_up(progress)
            for turn in range(sessions[0].method.trials):
                first = turn % len(sessions)
                for one in (*sessions[first:], *sessions[:first]):
                    one.trial(progress)
    except KeyboardInterrupt:
        raise Interrupted([one.result() for one in sessions if one.trials]) from None
    return [one.result() for one in sessions]


def prompt_ids(count: int, vocab_size: int) -> list[int]:
    """The same ids on every machine and in every run, spread over the vocabulary."""
    draw = random.Random(_PROMPT_SEED)
    return [draw.randrange(vocab_size) for _ in range(count)]


def prompt_batch(shape: Shape, vocab_size: int) -> list[list[int]]:
    """A batch's prompts, each with ids of its own."""
    ids = prompt_ids(shape.batch_size * shape.prompt_tokens, vocab_size)
    return [ids[start : start + shape.prompt_tokens] for start in range(0, len(ids), shape.prompt_tokens)]
