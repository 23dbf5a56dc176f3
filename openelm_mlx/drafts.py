"""Where drafts come from: tokens guessed ahead, for the model to check several of them in one pass.

`Drafter` is what `speculative_step` works with; `ModelDrafter` asks a smaller model. (`prompt_lookup` has another.) A
drafter follows the text by ids alone. What it proposes decides how fast decoding is, never what comes out.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import mlx.core as mx

from .cache import KVCache
from .common_prefix import common_prefix
from .errors import GenerationError
from .generation import prefill
from .model import Model
from .sampling import LogitsProcessor, RandomSampler, Sampler, log_softmax

DEFAULT_NUM_DRAFT_TOKENS = 3


@dataclass
class Acceptance:
    """How many tokens were drafted, and how many of them the model would have said too."""

    proposed: int = 0
    accepted: int = 0

    @property
    def rate(self) -> float:
        """The share that was accepted; 0 where nothing was proposed."""
        return self.accepted / self.proposed if self.proposed else 0.0


@dataclass(frozen=True)
class Draft:
    """K guessed tokens, perhaps not evaluated yet, and the distributions they were drawn from.

    No distributions mean that nothing was drawn: these tokens, whatever the sampler.
    """

    tokens: mx.array  # (K,)
    logprobs: mx.array | None = None  # (K, V), normalised


class Drafter(ABC):
    """Follows a text and proposes how it goes on. One drafter serves one text at a time.

    A chat that keeps its cache keeps its drafter too: it remembers the tokens that the cache holds.
    """

    model: Model | None = None  # whose weights take memory beside the big model's

    def __init__(self, num_draft_tokens: int) -> None:
        if num_draft_tokens < 1:
            raise GenerationError(f"the number of draft tokens must be 1 or more, got {num_draft_tokens}")
        self.num_draft_tokens = num_draft_tokens
        self.acceptance = Acceptance()  # of the generation that began last
        self.text: list[int] = []

    def begin(self, held: int, prompt: Sequence[int]) -> None:
        """A generation begins: `prompt` follows the first `held` tokens, those in the model's cache.

        A drafter that never saw these tokens knows the text from `prompt` on.
        """
        self.acceptance = Acceptance()
        known = self.text[:held] if held <= len(self.text) else []
        self.text = []
        for token in (*known, *prompt):
            self._add(token)

    def expects(self) -> bool:
        """Whether there may be a draft once the next token is known; if not, decoding runs ahead without asking."""
        return True

    @abstractmethod
    def propose(
        self, limit: int, sampler: Sampler | None, logits_processors: Sequence[LogitsProcessor]
    ) -> Draft | None:
        """Up to `limit` (1 or more) tokens that may follow the text, or None. Asked again only after `learn`."""

    def learn(self, tokens: Sequence[int], proposed: int, seconds: float) -> None:
        """One pass of the model, which took `seconds`, gave `tokens`; all but the last were among `proposed` drafts."""
        for token in tokens:
            self._add(token)
        self.acceptance.proposed += proposed
        self.acceptance.accepted += len(tokens) - 1

    def _add(self, token: int) -> None:
        self.text.append(token)


class ModelDrafter(Drafter):
    """A smaller model with the same vocabulary, and a cache of its own, which has other head counts.

    With a `RandomSampler` it draws from its own filtered distribution, with any other sampler it says what is
    likeliest. Logits processors apply to it as they do to the model it drafts for.
    """

    def __init__(self, model: Model, num_draft_tokens: int = DEFAULT_NUM_DRAFT_TOKENS) -> None:
        super().__init__(num_draft_tokens)
        self.model: Model = model
        self._cache = model.make_cache()
        self._drafts: mx.array | None = None  # in the cache behind the text but for the last, not known to be right
        self._prompt_start = 0

    def begin(self, held: int, prompt: Sequence[int]) -> None:
        super().begin(held, prompt)
        self._prompt_start = len(self.text) - len(prompt)
        self._keep(self._prompt_start)

    def propose(self, limit: int, sampler: Sampler | None, logits_processors: Sequence[LogitsProcessor]) -> Draft:
        new = prefill(self.model, mx.array(self.text[self._cache[0].offset :]), self._cache)
        seen = mx.array(self.text[self._prompt_start :] if logits_processors else [])
        tokens, distributions = [], []
        for _ in range(min(limit, self.num_draft_tokens)):
            logits = self.model(new[None], self._cache, last_only=True)[:, -1]  # (1, L) -> (1, 1, V) -> (1, V)
            for process in logits_processors:
                logits = process(seen, logits)
            if isinstance(sampler, RandomSampler):
                distributions.append(sampler.filtered_logprobs(log_softmax(logits)))
                new = mx.random.categorical(distributions[-1], key=sampler.next_key())
            else:
                new = mx.argmax(logits, axis=-1)
            mx.async_eval(new)
            tokens.append(new)
            if logits_processors:
                seen = mx.concatenate([seen, new])
        drafted = mx.concatenate(tokens)
        self._drafts = drafted
        return Draft(drafted, mx.concatenate(distributions) if distributions else None)

    def learn(self, tokens: Sequence[int], proposed: int, seconds: float) -> None:
        right = common_prefix(ids_of(self._drafts), tokens[:-1]) if self._drafts is not None else 0
        self._keep(len(self.text) + right)
        super().learn(tokens, proposed, seconds)

    def _keep(self, count: int) -> None:
        keep_tokens(self._cache, count)
        self._drafts = None


def keep_tokens(cache: Sequence[KVCache], count: int) -> None:
    """Make every layer hold the same tokens, at most the first `count`; an interrupted pass leaves some one ahead."""
    kept = min([count, *(layer.offset for layer in cache)])
    for layer in cache:
        if layer.offset > kept:
            layer.trim(layer.offset - kept)


def ids_of(tokens: mx.array) -> list[int]:
    """Tokens (L,) as plain integers."""
    return cast(list[int], tokens.tolist())
