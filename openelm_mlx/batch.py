"""Several texts at once: each result is what its prompt would give alone (in float32), in less time altogether.

A decode step reads all the weights whether it serves one text or eight, so eight cost little more than one. A text that
ends makes room for the next prompt at once. Prompts are prefilled one by one, as alone.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import mlx.core as mx

from .batch_cache import BatchCache
from .cache import KVCache
from .errors import GenerationError, OpenELMError
from .generation import prefill, room_for
from .model import Model
from .sampling import LogitsProcessor, RandomSampler, Sampler, log_softmax
from .stopping import StopStrings
from .tokenizer import Tokenizer, check_ids

DEFAULT_BATCH_SIZE = 8
_CLEAR_CACHE_EVERY = 256  # steps


@dataclass(frozen=True)
class BatchResult:
    """One finished text: `index` is its prompt's place in the list, `finish_reason` "stop" or "length"."""

    index: int
    text: str
    tokens: list[int]
    finish_reason: str
    prompt_tokens: int


def batch_generate(
    model: Model,
    tokenizer: Tokenizer,
    prompts: Sequence[str | Sequence[int]],
    max_tokens: int | None = None,
    **settings: Any,
) -> list[BatchResult]:
    """Continue every prompt; results in the prompts' order. The settings are those of `batch_stream`."""
    results = batch_stream(model, tokenizer, prompts, max_tokens, **settings)
    return sorted(results, key=lambda result: result.index)


def batch_stream(
    model: Model,
    tokenizer: Tokenizer,
    prompts: Sequence[str | Sequence[int]],
    max_tokens: int | None = None,
    *,
    batch_size: int = DEFAULT_BATCH_SIZE,
    stop: Sequence[str] = (),
    sampler: Sampler | None = None,
    logits_processors: Sequence[LogitsProcessor] = (),
    exceed_context: bool = False,
) -> Iterator[BatchResult]:
    """Continue every prompt, each result as soon as it is finished. The settings are those of `stream_generate`.

    Every text draws with the sampler's seed from its beginning, as alone. Raises GenerationError, naming the
    prompt, before any work.
    """
    if batch_size < 1:
        raise GenerationError(f"batch_size must be 1 or more, got {batch_size}")
    waiting = deque(
        _Row(i, ids, room, tokenizer, StopStrings(stop), _restarted(sampler), logits_processors)
        for i, (ids, room) in enumerate(
            _checked(i, prompt, model, tokenizer, max_tokens, exceed_context) for i, prompt in enumerate(prompts)
        )
    )
    return _run(model, waiting, batch_size)


def _run(model: Model, waiting: "deque[_Row]", batch_size: int) -> Iterator[BatchResult]:
    rows: list[_Row] = []
    cache: BatchCache | None = None
    tokens = mx.array([], dtype=mx.int32)  # (B,): each row's next token, queued
    steps = 0
    while rows or waiting:
        while waiting and len(rows) < batch_size:
            row = waiting.popleft()
            own = model.make_cache()
            first = row.choose(_last_logits(model, row.ids, own))
            tokens = mx.concatenate([tokens, first.astype(tokens.dtype)])
            cache = _joined(cache if rows else None, own)
            rows.append(row)
        assert cache is not None
        # The next step is queued before this one's tokens are read: the device works while texts are looked at.
        following = _step(model, rows, tokens, cache) if any(row.left > 1 for row in rows) else None
        mx.async_eval(tokens if following is None else following)
        ended = [row.take(token) for row, token in zip(rows, cast(list[int], tokens.tolist()), strict=True)]
        yield from (row.result() for row, over in zip(rows, ended, strict=True) if over)
        kept = [i for i, over in enumerate(ended) if not over]
        rows = [rows[i] for i in kept]
        tokens = following if following is not None else tokens
        if len(kept) < len(ended):
            tokens = tokens[mx.array(kept, dtype=mx.int32)] if kept else tokens[:0]
            if kept:
                cache.keep(kept)
        steps += 1
        if steps % _CLEAR_CACHE_EVERY == 0:
            mx.clear_cache()


def _last_logits(model: Model, ids: list[int], cache: list[KVCache]) -> mx.array:
    """Prefill one prompt: the logits (1, 1, V) that follow it."""
    return model(prefill(model, mx.array(ids), cache)[None], cache, last_only=True)


def _step(model: Model, rows: "list[_Row]", tokens: mx.array, cache: BatchCache) -> mx.array:
    """Each row's token after `tokens` (B,), queued."""
    for i, row in enumerate(rows):
        row.seen(tokens[i : i + 1])
    logits = model(tokens[:, None], cache.layers)  # type: ignore[arg-type]  # a cache by what it does
    cache.advance()
    if all(row.is_greedy for row in rows):
        return mx.argmax(logits[:, -1], axis=-1).astype(tokens.dtype)
    chosen = [row.choose(logits[i : i + 1]) for i, row in enumerate(rows)]
    return mx.concatenate(chosen).astype(tokens.dtype)


class _Row:
    """One text of the batch: what it has, and when it ends."""

    def __init__(
        self,
        index: int,
        ids: list[int],
        left: int,
        tokenizer: Tokenizer,
        stops: StopStrings,
        sampler: Sampler | None,
        processors: Sequence[LogitsProcessor],
    ) -> None:
        self.index, self.ids, self.left, self.stops = index, ids, left, stops
        self.sampler, self.processors = sampler, processors
        self.tokens: list[int] = []
        self._pieces: list[str] = []
        self._detokenizer, self._eos = tokenizer.detokenizer(), tokenizer.eos_token_ids
        self._history = mx.array(ids)
        self._reason = "length"

    @property
    def is_greedy(self) -> bool:
        return self.sampler is None and not self.processors

    def choose(self, logits: mx.array) -> mx.array:
        """The next token (1,) from this row's logits (1, 1, V)."""
        chosen = logits[:, -1]
        for process in self.processors:
            chosen = process(self._history, chosen)
        return mx.argmax(chosen, axis=-1) if self.sampler is None else self.sampler(log_softmax(chosen))

    def seen(self, token: mx.array) -> None:
        """A token (1,) that the processors are to know of."""
        if self.processors:
            self._history = mx.concatenate([self._history, token])

    def take(self, token: int) -> bool:
        """Add a token to the text; whether the text is over."""
        self.tokens.append(token)
        self.left -= 1
        ended = token in self._eos
        if not ended:
            self._pieces.append(self.stops.feed(self._detokenizer.add(token)))
        if ended or self.left == 0:
            self._pieces.append(self.stops.feed(self._detokenizer.finish()))
        if ended or self.stops.stopped:
            self._reason = "stop"
        return ended or self.stops.stopped or self.left == 0

    def result(self) -> BatchResult:
        text = "".join(self._pieces) + self.stops.finish()
        return BatchResult(self.index, text, self.tokens, self._reason, len(self.ids))


def _checked(
    index: int,
    prompt: str | Sequence[int],
    model: Model,
    tokenizer: Tokenizer,
    max_tokens: int | None,
    exceed_context: bool,
) -> tuple[list[int], int]:
    """A prompt's ids, and how many tokens it may get."""
    ids = tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)
    try:
        if not ids:
            raise GenerationError("the prompt is empty: give at least one token")
        check_ids(ids, model.config.vocab_size)
        return ids, room_for(len(ids), max_tokens, model.config.max_context_length, exceed_context)
    except OpenELMError as error:
        raise type(error)(f"prompt {index + 1}: {error}") from None


def _restarted(sampler: Sampler | None) -> Sampler | None:
    """A sampler that draws from its seed's beginning."""
    return replace(sampler) if isinstance(sampler, RandomSampler) else sampler


def _joined(cache: BatchCache | None, own: list[KVCache]) -> BatchCache:
    if cache is None:
        return BatchCache(own)
    cache.join(own)
    return cache
