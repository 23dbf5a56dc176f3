"""One run of a model, as `openelm generate` would make it: a prefill, then a decode, EOS ignored.

A single text goes through `generate_step`; a batch as in `openelm_mlx.batch`: prompts are prefilled one after the
other, and every step serves all texts. Both return only when the ids are there.
"""

from typing import Protocol

import mlx.core as mx

from ..batch_cache import BatchCache
from ..generation import generate_step, prefill
from ..model import Model


class Run(Protocol):
    """What is timed: `prefill` gives every text its first token, `decode` so many more."""

    def prefill(self) -> None: ...

    def decode(self, count: int) -> None: ...

    @property
    def kv_cache_bytes(self) -> int: ...


def begin(model: Model, prompts: list[list[int]], decoder: str = "eager") -> Run:
    """A run with these prompts' ids; nothing is computed yet."""
    return _SingleRun(model, prompts[0], decoder) if len(prompts) == 1 else _BatchRun(model, prompts)


class _SingleRun:
    def __init__(self, model: Model, prompt: list[int], decoder: str) -> None:
        self._model, self._newest, self._decoder = model, prompt, decoder
        self._cache = model.make_cache()

    def prefill(self) -> None:
        self._newest = [self._last_token(1)]

    def decode(self, count: int) -> None:
        self._newest = [self._last_token(count)]

    @property
    def kv_cache_bytes(self) -> int:
        return sum(layer.nbytes for layer in self._cache)

    def _last_token(self, count: int) -> int:
        # A decoder chosen by `auto` would put its own trials between those that are timed here.
        *_, last = generate_step(
            self._newest, self._model, max_tokens=count, cache=self._cache, decoder=self._decoder
        )  # hands out evaluated ids
        return last


class _BatchRun:
    def __init__(self, model: Model, prompts: list[list[int]]) -> None:
        self._model, self._prompts = model, prompts
        self._tokens = mx.array([], dtype=mx.int32)  # (B,)
        self._cache: BatchCache | None = None

    def prefill(self) -> None:
        first = []
        for prompt in self._prompts:
            own = self._model.make_cache()
            logits = self._model(prefill(self._model, mx.array(prompt), own)[None], own, last_only=True)
            first.append(mx.argmax(logits[:, -1], axis=-1))
            if self._cache is None:
                self._cache = BatchCache(own)
            else:
                self._cache.join(own)
        self._tokens = mx.concatenate(first)
        mx.eval(self._tokens, self._arrays())

    def decode(self, count: int) -> None:
        assert self._cache is not None, "decode follows prefill"
        for _ in range(count):
            logits = self._model(self._tokens[:, None], self._cache.layers, last_only=True)  # type: ignore[arg-type]
            self._cache.advance()
            following = mx.argmax(logits[:, -1], axis=-1)
            mx.async_eval(following)  # the next step is queued before this one's ids are read, as in a batch
            self._tokens.tolist()
            self._tokens = following
        self._tokens.tolist()

    @property
    def kv_cache_bytes(self) -> int:
        return sum(array.nbytes for array in self._arrays())

    def _arrays(self) -> list[mx.array]:
        layers = [] if self._cache is None else self._cache.layers
        return [array for layer in layers for array in (layer.keys, layer.values)]
