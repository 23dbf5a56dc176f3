"""From logits to the next token: samplers and the repetition penalty.

Names and order follow mlx-lm: the filters (top-p, min-p, top-k) look at the model's own distribution, and the
temperature is applied to what they leave.
"""

import math
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import mlx.core as mx

from .errors import GenerationError

Sampler = Callable[[mx.array], mx.array]  # log-probabilities (B, V) -> tokens (B,)
LogitsProcessor = Callable[[mx.array, mx.array], mx.array]  # tokens so far (N,), logits (B, V) -> logits (B, V)

# Long enough for the loops small models fall into (about 50 tokens); mlx-lm looks back 20 only.
REPETITION_CONTEXT_SIZE = 64


def make_sampler(
    temp: float = 0.0, top_p: float = 1.0, min_p: float = 0.0, top_k: int = 0, seed: int | None = None
) -> Sampler | None:
    """A sampler with these settings; None, meaning greedy, for temperature 0 (the other settings then do nothing).

    The same seed gives the same tokens, within one process too; without one every sampler draws anew.
    Raises GenerationError, naming the setting that is out of range.
    """
    _check("temp", temp, 0 <= temp < math.inf, "0 or more")
    _check("top_p", top_p, 0 < top_p <= 1, "above 0 and at most 1")
    _check("min_p", min_p, 0 <= min_p <= 1, "between 0 and 1")
    _check("top_k", top_k, top_k >= 0, "0 (off) or more")
    _check("seed", seed, seed is None or 0 <= seed < 2**63, "from 0 to 2**63 - 1")
    if temp == 0:
        return None
    return RandomSampler(temp, top_p, min_p, top_k, seed if seed is not None else secrets.randbits(63))


def make_logits_processors(
    repetition_penalty: float | None = None, repetition_context_size: int = REPETITION_CONTEXT_SIZE
) -> list[LogitsProcessor]:
    """The processors for these settings: none, or the repetition penalty. Raises GenerationError."""
    if repetition_penalty is None or repetition_penalty == 1:
        return []
    _check("repetition_penalty", repetition_penalty, repetition_penalty > 0, "above 0 (1 is off)")
    _check("repetition_context_size", repetition_context_size, repetition_context_size > 0, "1 or more")
    return [RepetitionPenalty(repetition_penalty, repetition_context_size)]


@dataclass
class RandomSampler:
    """Draws from the filtered distribution. Draw n of a seed is always the same noise, whatever was drawn before it."""

    temp: float
    top_p: float
    min_p: float
    top_k: int
    seed: int

    def __post_init__(self) -> None:
        self.drawn = 0  # how many draws have been made; lowered to take back the latest
        self._stream = mx.random.split(mx.random.key(self.seed))[0]  # so that neighbouring seeds share no keys

    def __call__(self, logprobs: mx.array) -> mx.array:
        """logprobs: (B, V), normalised -> tokens (B,)."""
        return mx.random.categorical(self.filtered_logprobs(logprobs), key=self.next_key())

    def filtered_logprobs(self, logprobs: mx.array) -> mx.array:
        """The distribution that is drawn from, (B, V) -> (B, V), both normalised; what a filter drops is -inf."""
        if self.top_p < 1:
            logprobs = keep_top_p(logprobs, self.top_p)
        if self.min_p > 0:
            logprobs = keep_min_p(logprobs, self.min_p)
        if 0 < self.top_k < logprobs.shape[-1]:
            logprobs = keep_top_k(logprobs, self.top_k)
        return log_softmax(logprobs.astype(mx.float32) * (1 / self.temp))

    def next_key(self) -> mx.array:
        """The random key of the next draw."""
        self.drawn += 1
        return self._stream + mx.array([0, self.drawn], mx.uint32)


def log_softmax(logits: mx.array) -> mx.array:
    """Normalised log-probabilities over the last axis."""
    return logits - mx.logsumexp(logits, axis=-1, keepdims=True)


def keep_top_p(logprobs: mx.array, top_p: float) -> mx.array:
    """Keep the smallest set of most likely tokens whose probability reaches `top_p`; the rest become -inf."""
    order = mx.argsort(-logprobs, axis=-1)
    probs = mx.take_along_axis(mx.exp(logprobs.astype(mx.float32)), order, axis=-1)
    before = mx.cumsum(probs, axis=-1) - probs  # the mass of all that is likelier: 0 for the first, which stays
    keep = mx.put_along_axis(mx.zeros(order.shape, dtype=mx.bool_), order, before < top_p, axis=-1)
    return mx.where(keep, logprobs, -mx.inf)


def keep_min_p(logprobs: mx.array, min_p: float) -> mx.array:
    """Keep tokens at least `min_p` times as likely as the likeliest; the rest become -inf."""
    threshold = mx.max(logprobs, axis=-1, keepdims=True) + mx.log(mx.array(min_p))
    return mx.where(logprobs < threshold, -mx.inf, logprobs)


def keep_top_k(logprobs: mx.array, top_k: int) -> mx.array:
    """Keep exactly the `top_k` likeliest tokens; the rest become -inf."""
    rest = mx.argpartition(-logprobs, kth=top_k - 1, axis=-1)[..., top_k:]
    return mx.put_along_axis(logprobs, rest, mx.array(-mx.inf, logprobs.dtype), axis=-1)


@dataclass(frozen=True)
class RepetitionPenalty:
    """Makes tokens of the last `context_size` (prompt included) less likely (Keskar et al. 2019, section 4.1).

    A positive logit is divided by the penalty and a negative one multiplied, so both go down.
    """

    penalty: float
    context_size: int

    def __call__(self, tokens: mx.array, logits: mx.array) -> mx.array:
        recent = tokens[-self.context_size :]
        seen = logits[:, recent]
        logits[:, recent] = mx.where(seen < 0, seen * self.penalty, seen / self.penalty)
        return logits


@dataclass(frozen=True)
class MinTokens:
    """Forbids the tokens that end a text until `min_tokens` have been made after a prompt of `prompt_tokens`."""

    min_tokens: int
    prompt_tokens: int
    eos_token_ids: frozenset[int]

    def __call__(self, tokens: mx.array, logits: mx.array) -> mx.array:
        if tokens.size - self.prompt_tokens < self.min_tokens:
            logits[:, mx.array(sorted(self.eos_token_ids))] = -mx.inf
        return logits


def with_history(history: Sequence[int], process: LogitsProcessor) -> LogitsProcessor:
    """A processor that also sees the tokens which a cache holds already, as it would without one."""
    held = mx.array(list(history), dtype=mx.int32)
    return lambda tokens, logits: process(mx.concatenate([held, tokens]), logits)


def _check(name: str, value: object, valid: bool, expected: str) -> None:
    if not valid:
        raise GenerationError(f"{name} must be {expected}, got {value}")
