"""The jobs that this project and mlx-lm both do, timed: one `Comparison` each.

A step generator stands for either side, `steps(prompt, count)` yielding token ids, so that a job is written once. EOS
is ignored by both. In float32 the two must give the same tokens; in fewer bits the arithmetic differs by design.
"""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx

from ..checkpoint import load
from ..decoder import Decoder
from ..errors import RunFailedError
from ..generation import generate_step
from ..model import Model
from .comparison import Comparison, take_turns
from .graph_nodes import decode_step_nodes
from .measure import prompt_ids

Steps = Callable[[list[int], int], Iterator[int]]
Run = Callable[[Steps], tuple[float, list[int]]]  # -> milliseconds, and the tokens that came out

COLD_START = """
from {package} import load, stream_generate
model, tokenizer = load({folder!r})
for response in stream_generate(model, tokenizer, "Once upon a time", max_tokens=1):
    print(response.token, response.text, flush=True)
"""
_LONGER_TEXT = 8  # tokens asked for where only the first is timed: a real text goes on
_DECODE_PROMPT_TOKENS = 16
_DECODE_TOKENS = 16


@dataclass(frozen=True)
class Pair:
    """One folder, loaded by both sides."""

    ours: Model
    theirs: Any
    same_tokens: bool  # whether both compute in float32, and so must agree

    @classmethod
    def load(cls, folder: Path, *, same_tokens: bool = False) -> "Pair":
        from mlx_lm import load as load_theirs

        return cls(load(folder)[0], load_theirs(str(folder))[0], same_tokens)

    def our_steps(self, prompt: list[int], count: int) -> Iterator[int]:
        return generate_step(prompt, self.ours, max_tokens=count, decoder="eager")

    def their_steps(self, prompt: list[int], count: int) -> Iterator[int]:
        from mlx_lm.generate import generate_step as generate_theirs

        return (int(token) for token, _ in generate_theirs(mx.array(prompt), self.theirs, max_tokens=count))

    def drain(self) -> None:
        """Wait for steps that were queued and never asked for, so that nobody else pays for them."""
        from mlx_lm.generate import generation_stream

        mx.synchronize()
        mx.synchronize(generation_stream)


def first_token(job: str, pair: Pair, prompt_tokens: int, target: float, trials: int) -> Comparison:
    """From a prompt's ids to the first token of a longer text."""
    prompt = prompt_ids(prompt_tokens, pair.ours.config.vocab_size)

    def run(steps: Steps) -> tuple[float, list[int]]:
        start = time.perf_counter()
        token = next(steps(prompt, _LONGER_TEXT))
        return (time.perf_counter() - start) * 1e3, [token]

    return _compare(job, pair, run, target, trials)


def decode(job: str, pair: Pair, target: float, trials: int) -> Comparison:
    """Each token after the first."""
    prompt = prompt_ids(_DECODE_PROMPT_TOKENS, pair.ours.config.vocab_size)

    def run(steps: Steps) -> tuple[float, list[int]]:
        running = steps(prompt, 1 + _DECODE_TOKENS)
        first = next(running)
        start = time.perf_counter()
        rest = [next(running) for _ in range(_DECODE_TOKENS)]
        return (time.perf_counter() - start) * 1e3 / _DECODE_TOKENS, [first, *rest]

    return _compare(job, pair, run, target, trials)


def decode_nodes(job: str, pair: Pair, target: float, decoder: str) -> Comparison:
    """Nodes of a decode step's graph, each side with its own cache and its own greedy step; ours is `decoder`'s."""
    from mlx_lm.models.cache import make_prompt_cache

    our_cache, their_cache = pair.ours.make_cache(), make_prompt_cache(pair.theirs)
    our_step = Decoder(pair.ours, our_cache, 1, decoder)

    def our_token(tokens: mx.array) -> mx.array:
        return mx.argmax(our_step(tokens[0]), axis=-1)

    def their_token(tokens: mx.array) -> mx.array:
        logits = pair.theirs(tokens, their_cache)[:, -1, :]
        return mx.argmax(logits - mx.logsumexp(logits, keepdims=True), axis=-1)  # its step always normalises

    ours = decode_step_nodes(pair.ours, our_cache, our_token)
    theirs = decode_step_nodes(pair.theirs, their_cache, their_token)
    return Comparison(job, "nodes", (ours,), (theirs,), target, is_share=True)


def cold_start(job: str, folder: Path, target: float, trials: int) -> Comparison:
    """From starting Python to the first token on its stdout; the files are in the system's page cache for both."""
    tokens = set()
    offline = {**os.environ, "HF_HUB_OFFLINE": "1"}

    def time_ms(package: str) -> float:
        command = [sys.executable, "-c", COLD_START.format(package=package, folder=str(folder))]
        start = time.perf_counter()
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=offline, text=True) as child:
            assert child.stdout is not None
            line = child.stdout.readline()
            elapsed = time.perf_counter() - start
            _, complaints = child.communicate()
        if child.returncode:
            raise RunFailedError(f"{job}: {package} failed: {complaints.strip().splitlines()[-1]}")
        tokens.add(line.split()[0])  # the text differs: mlx-lm drops the space before it
        return elapsed * 1e3

    ours, theirs = take_turns(lambda: time_ms("openelm_mlx"), lambda: time_ms("mlx_lm"), trials)
    _check_equal(job, tokens)
    return Comparison(job, "ms", ours, theirs, target)


def _compare(job: str, pair: Pair, run: Run, target: float, trials: int) -> Comparison:
    given: set[tuple[int, ...]] = set()

    def time_ms(steps: Steps) -> float:
        pair.drain()
        elapsed, tokens = run(steps)
        given.add(tuple(tokens))
        return elapsed

    ours, theirs = take_turns(lambda: time_ms(pair.our_steps), lambda: time_ms(pair.their_steps), trials)
    if pair.same_tokens:
        _check_equal(job, given)
    return Comparison(job, "ms", ours, theirs, target)


def _check_equal(job: str, outputs: set[Any]) -> None:
    if len(outputs) != 1:
        raise RunFailedError(f"{job}: the two sides must do the same work, but gave {sorted(outputs)}")
