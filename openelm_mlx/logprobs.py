"""How likely the model found each token it said, and what it would have said instead."""

from collections import deque
from dataclasses import dataclass

import mlx.core as mx

from .errors import GenerationError
from .sampling import log_softmax


@dataclass(frozen=True)
class TokenLogprob:
    """Natural logarithms of probabilities: of the token, and of the likeliest ones with theirs, best first."""

    token: int
    logprob: float
    top: list[tuple[int, float]]


class LogprobRecorder:
    """A logits processor that changes nothing and remembers the distribution of every step until it is asked for.

    Put first among the processors it sees the model's own distribution, before any penalty.
    """

    def __init__(self, top: int) -> None:
        if top < 1:
            raise GenerationError(f"logprobs must be 1 or more, got {top}")
        self.top = top
        self._steps: deque[mx.array] = deque()

    def __call__(self, tokens: mx.array, logits: mx.array) -> mx.array:
        self._steps.append(log_softmax(logits[0].astype(mx.float32)))
        return logits

    def of(self, token: int) -> TokenLogprob:
        """The next step's record, for the token that was chosen there."""
        logprobs = self._steps.popleft()  # (V,)
        top = min(self.top, logprobs.size)
        best = mx.argpartition(-logprobs, kth=top - 1)[:top]
        best = best[mx.argsort(-logprobs[best])]
        ids, values = best.tolist(), logprobs[best].tolist()
        return TokenLogprob(token, float(logprobs[token].item()), list(zip(ids, values, strict=True)))  # type: ignore[arg-type]
