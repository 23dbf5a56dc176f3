"""How well a model predicts a text, and how far two models' predictions are apart.

A text longer than the context goes through in windows that share one token, so that every token but the first is
predicted exactly once. Logits (B, L, V) never exist whole: a few hundred rows at a time, in float32.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from .errors import GenerationError
from .model import Model

_ROWS = 256  # of float32 logits in memory: 33 MB at 32,000 pieces
Tick = Callable[[int], None]  # told how many tokens were predicted


@dataclass(frozen=True)
class Perplexity:
    """`nats`: mean negative log-likelihood of a token; `tokens`: how many were predicted."""

    nats: float
    tokens: int

    @property
    def perplexity(self) -> float:
        """How many tokens the model hesitates between, on average."""
        return math.exp(min(self.nats, 700.0))  # beyond, no float64 has it


def perplexity(model: Model, ids: Sequence[int], *, context: int | None = None, tick: Tick | None = None) -> Perplexity:
    """Of a text given as ids (with BOS). `context`: length of a window, the model's own by default.

    Raises GenerationError for fewer than two ids, for ids outside the vocabulary, and for a context of less than two.
    """
    total, count = 0.0, 0
    for log_probs, targets in predictions(model, ids, context=context):
        total -= _number(mx.take_along_axis(log_probs, targets[:, None], axis=-1).sum())
        count += targets.size
        if tick is not None:
            tick(targets.size)
    return Perplexity(total / count, count)


def kl_divergence(reference: Model, model: Model, ids: Sequence[int], *, context: int | None = None) -> float:
    """Mean KL(reference || model) of the next-token distributions over a text, in nats a token. See `perplexity`."""
    total, count = 0.0, 0
    pairs = (predictions(one, ids, context=context) for one in (reference, model))
    for (expected, targets), (found, _) in zip(*pairs, strict=True):
        total += _number((mx.exp(expected) * (expected - found)).sum())
        count += targets.size
    return total / count


def predictions(model: Model, ids: Sequence[int], *, context: int | None = None) -> Iterator[tuple[mx.array, mx.array]]:
    """Log-probabilities (N, V) in float32 and the ids (N,) that came, for a few tokens of the text at a time."""
    length = model.config.max_context_length if context is None else context
    _check(ids, length, model.config.vocab_size)
    for start in range(0, len(ids) - 1, length - 1):
        window = mx.array(list(ids[start : start + length]))
        hidden = model.transformer(window[None, :-1])  # (1, L, E)
        for i in range(0, hidden.shape[1], _ROWS):
            logits = model.head(hidden[:, i : i + _ROWS])[0].astype(mx.float32)
            yield logits - mx.logsumexp(logits, axis=-1, keepdims=True), window[1:][i : i + _ROWS]


def _number(scalar: mx.array) -> float:
    return float(np.array(scalar))


def _check(ids: Sequence[int], length: int, vocab_size: int) -> None:
    if length < 2:
        raise GenerationError(f"a context of {length} tokens predicts nothing: expected at least 2")
    if len(ids) < 2:
        raise GenerationError(f"a text of {len(ids)} tokens, of which none can be predicted; expected at least 2")
    if not 0 <= min(ids) <= max(ids) < vocab_size:
        raise GenerationError(f"ids from {min(ids)} to {max(ids)}; this model's go from 0 to {vocab_size - 1}")
