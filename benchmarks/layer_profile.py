"""`openelm bench --profile`: the time of a decode step, layer by layer and part by part.

OpenELM's layers grow with depth: the last reads several times as many bytes as the first, and so takes several times as
long. Attention, feed-forward network and norms are told apart by chaining: a part feeds itself several times within one
graph, so that starting a graph and waiting for it weigh little, and nothing can overlap that could not in a model. A
part without its norm is the chain with the norm, less the chain of the norm alone.

The parts are measured one by one and need not sum up to a whole step exactly; both are given.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import mlx.core as mx

from ..generation import prefill
from ..model import Model, TransformerBlock
from .limits import layer_costs
from .measure import prompt_batch
from .session import Clock, Shape

_CHAIN = 8  # how often a part feeds itself
_ATTEMPTS = 5

Timer = Callable[[Callable[[], mx.array]], float]


@dataclass(frozen=True)
class LayerTime:
    """Seconds of one layer's parts for one token; `layer` is None for embedding, last norm and head together."""

    layer: int | None
    attention_s: float
    ffn_s: float
    norms_s: float  # before attention and before the feed-forward network; those of queries and keys are in attention
    head_s: float
    step_bytes: float  # weights, keys and values

    @property
    def total_s(self) -> float:
        return self.attention_s + self.ffn_s + self.norms_s + self.head_s


@dataclass(frozen=True)
class LayerProfile:
    """All layers, and a whole step for comparison, with `held_tokens` in the cache."""

    layers: tuple[LayerTime, ...]
    step_s: float
    held_tokens: int

    @property
    def sum_s(self) -> float:
        """Of all parts."""
        return sum(layer.total_s for layer in self.layers)

    def part_sums(self) -> dict[str, float]:
        """Seconds of each kind of part, over all layers."""
        return {
            part: sum(getattr(layer, f"{part}_s") for layer in self.layers)
            for part in ("attention", "ffn", "norms", "head")
        }

    def to_dict(self) -> dict[str, Any]:
        layers = [{**asdict(layer), "total_s": layer.total_s} for layer in self.layers]
        return {"held_tokens": self.held_tokens, "step_s": self.step_s, "sum_s": self.sum_s, "layers": layers}


def profile(model: Model, shape: Shape, timer: Timer | None = None) -> LayerProfile:
    """Time a step after a prompt of this shape's length. timer: seconds that evaluating a graph takes."""
    timer = timer or graph_timer()
    cache = model.make_cache()
    (prompt, *_) = prompt_batch(shape, model.config.vocab_size)
    model(prefill(model, mx.array(prompt), cache)[None], cache, last_only=True)
    mx.eval([layer.state for layer in cache], model.parameters())
    costs = layer_costs(model)
    x = model.transformer.token_embeddings(mx.array([[prompt[-1]]]))  # (1, 1, E)
    mx.eval(x)
    times = [
        _layer_time(i, layer, x, cache[i], costs[i].bytes_per_step(len(prompt)), timer)
        for i, layer in enumerate(model.layers)
    ]
    outside = LayerTime(
        None, 0.0, 0.0, 0.0, timer(lambda: model.head(model.transformer.norm(x))), costs[-1].weight_bytes
    )
    step_s = timer(lambda: _step(model, prompt[-1], cache))
    return LayerProfile((*times, outside), step_s, len(prompt))


def graph_timer(clock: Clock = time.perf_counter) -> Timer:
    """Seconds to evaluate the array that a function makes, the building included: the best of some, after a warm-up."""

    def seconds(work: Callable[[], mx.array]) -> float:
        best = float("inf")
        for _ in range(1 + _ATTEMPTS):
            start = clock()
            mx.eval(work())
            best = min(best, clock() - start)
        return best

    return seconds


def _layer_time(
    index: int, layer: TransformerBlock, x: mx.array, cache: Any, step_bytes: float, timer: Timer
) -> LayerTime:
    def attention(x: mx.array) -> mx.array:
        mixed = layer.attn(layer.attn_norm(x), x, cache, False)
        cache.trim(1)  # every link sees the same number of tokens
        return mixed

    attn_norm_s = timer(_chain(layer.attn_norm, x)) / _CHAIN
    ffn_norm_s = timer(_chain(layer.ffn_norm, x)) / _CHAIN
    attention_s = timer(_chain(attention, x)) / _CHAIN
    ffn_s = timer(_chain(lambda x: layer.ffn(layer.ffn_norm(x), x), x)) / _CHAIN
    return LayerTime(
        index,
        attention_s=max(0.0, attention_s - attn_norm_s),
        ffn_s=max(0.0, ffn_s - ffn_norm_s),
        norms_s=attn_norm_s + ffn_norm_s,
        head_s=0.0,
        step_bytes=step_bytes,
    )


def _chain(part: Callable[[mx.array], mx.array], x: mx.array) -> Callable[[], mx.array]:
    def build() -> mx.array:
        y = x
        for _ in range(_CHAIN):
            y = part(y)
        return y

    return build


def _step(model: Model, token: int, cache: list[Any]) -> mx.array:
    """The logits of one more token; the cache forgets it again."""
    logits = model(mx.array([[token]]), cache, last_only=True)
    for layer in cache:
        layer.trim(1)
    return logits


def rows(profile: LayerProfile, width: int = 24) -> Iterator[tuple[str, ...]]:
    """The lines of a table: layer, milliseconds of its parts, share of the sum, GB/s, and a bar."""
    longest = max(layer.total_s for layer in profile.layers)
    for layer in profile.layers:
        share = layer.total_s / profile.sum_s if profile.sum_s > 0 else 0.0
        parts = [layer.attention_s, layer.ffn_s, layer.norms_s, layer.head_s]
        yield (
            "head" if layer.layer is None else str(layer.layer),
            *(f"{1e3 * part:.3f}" if part else "-" for part in parts),
            f"{100 * share:.1f} %",
            f"{layer.step_bytes / layer.total_s / 1e9:.1f}" if layer.total_s > 0 else "-",
            "█" * round(width * layer.total_s / longest) if longest > 0 else "",
        )


HEADINGS = ("layer", "attention", "FFN", "norms", "head", "share", "GB/s", "")
