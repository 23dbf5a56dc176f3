"""Speculative decoding: several guessed tokens are checked in one pass, and what comes out is what the model says.

Token ids in, token ids out, as in `generate_step`. A pass over a handful of tokens takes little longer than a pass over
one, so every guess that the model agrees with is a token nearly for free. Two rules of agreement:

* A draft that nothing was drawn for agrees with the token the sampler draws at its place. The n-th token of a text
  always gets the sampler's n-th draw, so the tokens are those of plain decoding, seed by seed.
* A draft drawn from a distribution q is accepted with probability min(1, p/q), else replaced by a draw from what p has
  beyond q (Leviathan et al. 2023, section 2.3): the distribution is the model's p, the tokens of a seed are others.

In float32 greedy text is plain decoding's; in 16 bit, kernels round differently for one row and for several.
"""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import cast

import mlx.core as mx

from .cache import KVCache
from .common_prefix import common_prefix
from .drafts import Draft, Drafter, ids_of, keep_tokens
from .errors import GenerationError
from .generation import DEFAULT_MAX_TOKENS, PREFILL_STEP_SIZE, prefill
from .model import Model
from .rotating_cache import RotatingKVCache
from .sampling import LogitsProcessor, RandomSampler, Sampler, log_softmax
from .tokenizer import check_ids

_CLEAR_CACHE_EVERY = 256  # passes; freed buffers would otherwise pile up over a long text


@dataclass(frozen=True)
class DraftedToken:
    """One generated token, and whether it had been guessed."""

    token: int
    from_draft: bool


def speculative_step(
    prompt: Sequence[int] | mx.array,
    model: Model,
    drafter: Drafter,
    *,
    max_tokens: int = DEFAULT_MAX_TOKENS,
    sampler: Sampler | None = None,
    logits_processors: Sequence[LogitsProcessor] = (),
    cache: list[KVCache] | None = None,
    prefill_step_size: int = PREFILL_STEP_SIZE,
) -> Iterator[DraftedToken]:
    """Yield up to `max_tokens` tokens that continue `prompt`; arguments and errors are those of `generate_step`.

    No pass feeds more than `max_tokens` allows. Close the iterator to stop early (at EOS, say): the cache then holds
    the prompt and every token handed out, or all of these but the last; its `offset` says which. Drafting stops where
    a rotating cache could no longer forget a wrong draft.
    """
    ids = ids_of(prompt) if isinstance(prompt, mx.array) else list(prompt)
    if not ids:
        raise GenerationError("the prompt is empty: give at least one token")
    check_ids(ids, model.config.vocab_size)
    target = _Target(model, cache or model.make_cache(), sampler, logits_processors, mx.array(ids))
    return _passes(ids, target, drafter, max_tokens, prefill_step_size)


def _passes(
    ids: list[int], target: "_Target", drafter: Drafter, max_tokens: int, prefill_step_size: int
) -> Iterator[DraftedToken]:
    if max_tokens < 1:
        return
    left, passes, token = max_tokens, 0, 0
    held = target.offset
    try:
        # The token after those known: queued and not read yet, or None when the last one known is still to be fed.
        pending: mx.array | None = target.queue(prefill(target.model, mx.array(ids), target.cache, prefill_step_size))
        drafter.begin(held, ids)  # while the prompt is computed
        mx.eval(pending)  # the first token is read before the second is queued: it is what a person waits for
        while left > 0:
            start = time.perf_counter()
            limit = target.room(left)
            draft = target.ask(drafter, limit) if pending is None and limit > 0 else None
            if draft is not None:
                tokens = target.check(token, draft)
            else:
                running = target.queue(mx.array([token])) if pending is None else pending
                runs_ahead = left > 1 and not (limit > 0 and drafter.expects())
                pending = target.queue(running) if runs_ahead else None
                tokens = [cast(int, running.item())]
            drafter.learn(tokens, draft.tokens.size if draft is not None else 0, time.perf_counter() - start)
            for i, token in enumerate(tokens, 1):
                left -= 1
                yield DraftedToken(token, from_draft=i < len(tokens))
            passes += 1
            if passes % _CLEAR_CACHE_EVERY == 0:
                mx.clear_cache()
    finally:
        keep_tokens(target.cache, held + len(ids) + max_tokens - left)


class _Target:
    """The model whose text it is, with all that decides its next token."""

    def __init__(
        self,
        model: Model,
        cache: list[KVCache],
        sampler: Sampler | None,
        logits_processors: Sequence[LogitsProcessor],
        seen: mx.array,
    ) -> None:
        self.model, self.cache = model, cache
        self.sampler, self.logits_processors = sampler, logits_processors
        self.seen = seen  # what the processors are shown: the prompt and all tokens drawn

    @property
    def offset(self) -> int:
        """How many tokens the cache holds."""
        return self.cache[0].offset

    def room(self, left: int) -> int:
        """How many drafts to check at most with `left` tokens to go: the cache must be able to forget them."""
        rotating = [layer for layer in self.cache if isinstance(layer, RotatingKVCache)]
        return min([left - 1, *(layer.max_size - layer.offset - 1 for layer in rotating)])

    def ask(self, drafter: Drafter, limit: int) -> Draft | None:
        return drafter.propose(limit, self.sampler, self.logits_processors)

    def queue(self, new: mx.array) -> mx.array:
        """The token (1,) that follows `new` (L,), on its way."""
        logits = self.model(new[None], self.cache, last_only=True)[:, -1]  # (1, L) -> (1, 1, V) -> (1, V)
        token = self._choose(self._process(self.seen, logits))
        self._remember(token)
        mx.async_eval(token)
        return token

    def check(self, token: int, draft: Draft) -> list[int]:
        """Feed `token` and the draft; the drafts that are accepted, and the token that follows them."""
        fed = mx.concatenate([mx.array([token], mx.uint32), draft.tokens])
        logits = self.model(fed[None], self.cache)[0]  # (1, K+1) -> (K+1, V)
        if self.logits_processors:
            seen = [mx.concatenate([self.seen, draft.tokens[:i]]) for i in range(len(fed))]
            logits = mx.concatenate([self._process(seen[i], logits[i : i + 1]) for i in range(len(fed))])
        tokens = self._equal(logits, draft.tokens) if draft.logprobs is None else self._sampled(logits, draft)
        keep_tokens(self.cache, self.offset - len(fed) + len(tokens))
        self._remember(mx.array(tokens))
        return tokens

    def _equal(self, logits: mx.array, drafts: mx.array) -> list[int]:
        """Accept drafts as long as they are what plain decoding would choose."""
        if self.sampler is None:
            chosen = self._choose(logits)
        else:  # one draw a row, as in plain decoding
            chosen = mx.concatenate([self._choose(logits[i : i + 1]) for i in range(len(logits))])
        mx.eval(chosen, drafts)
        accepted = common_prefix(ids_of(drafts), ids_of(chosen))
        if isinstance(self.sampler, RandomSampler):
            self.sampler.drawn -= len(drafts) - accepted  # these draws were for places not reached yet
        return ids_of(chosen)[: accepted + 1]

    def _sampled(self, logits: mx.array, draft: Draft) -> list[int]:
        """Accept drafts, or replace the first that is not, such that the distribution is the model's."""
        assert isinstance(self.sampler, RandomSampler), "a draft was drawn where nothing is drawn"
        assert draft.logprobs is not None
        wanted = self.sampler.filtered_logprobs(log_softmax(logits))
        accepted, following = accept_or_redraw(draft.tokens, draft.logprobs, wanted, self.sampler.next_key())
        mx.eval(accepted, following, draft.tokens)
        return [*ids_of(draft.tokens)[: cast(int, accepted.item())], *ids_of(following)]

    def _choose(self, logits: mx.array) -> mx.array:
        """(B, V) -> (B,)"""
        return mx.argmax(logits, axis=-1) if self.sampler is None else self.sampler(log_softmax(logits))

    def _process(self, seen: mx.array, logits: mx.array) -> mx.array:
        for process in self.logits_processors:
            logits = process(seen, logits)
        return logits

    def _remember(self, tokens: mx.array) -> None:
        if self.logits_processors:
            self.seen = mx.concatenate([self.seen, tokens])


def accept_or_redraw(
    drafts: mx.array, drawn_from: mx.array, wanted: mx.array, key: mx.array
) -> tuple[mx.array, mx.array]:
    """How many of the drafts (K,) to accept, a scalar, and the token (1,) that follows these.

    drawn_from: log-probabilities (K, V) that each draft was drawn from; wanted: those to obey, (K+1, V).
    """
    accept_key, redraw_key = mx.random.split(key)
    at = drafts[:, None]
    log_ratio = (mx.take_along_axis(wanted[:-1], at, axis=1) - mx.take_along_axis(drawn_from, at, axis=1))[:, 0]
    accepts = mx.log(mx.random.uniform(shape=drafts.shape, key=accept_key)) < log_ratio
    accepted = mx.cumprod(accepts.astype(mx.int32)).sum()
    beyond = mx.maximum(mx.exp(wanted[:-1]) - mx.exp(drawn_from), 0)  # what `wanted` has more of
    some = mx.any(beyond > 0, axis=1, keepdims=True)  # none where the two are equal but for rounding
    following = mx.concatenate([mx.where(some, mx.log(beyond), wanted[:-1]), wanted[-1:]])
    return accepted, mx.random.categorical(following[accepted][None], key=redraw_key)
