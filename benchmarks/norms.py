"""The paper's analysis of its own bottleneck, on this device: what the kernel behind the 4L+1 norms costs.

The same model three times, its norms computed by MLX's fused RMSNorm kernel, by RMSNorm written out in small
operations (as naive PyTorch code has it, in float32 and cast back), and by the fused LayerNorm. LayerNorm gives other
logits, and takes the same time whatever they are. The paper found naive RMSNorm to take OpenELM a third of its speed
against LayerNorm; a fused kernel should leave no gap.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import mlx.core as mx

from ..config import OpenELMConfig
from ..model import Model
from .measure import session
from .session import Method, Session, Shape

Norm = Callable[[mx.array, "mx.array | None", float], mx.array]


def naive_rms_norm(x: mx.array, weight: mx.array | None, eps: float) -> mx.array:
    """RMSNorm in operations of one step each; x (..., E), weight (E,) or None."""
    wide = x.astype(mx.float32)
    normed = (wide * mx.rsqrt(mx.mean(mx.square(wide), axis=-1, keepdims=True) + eps)).astype(x.dtype)
    return normed if weight is None else normed * weight


def layer_norm(x: mx.array, weight: mx.array | None, eps: float) -> mx.array:
    """MLX's fused LayerNorm without a bias, in RMSNorm's place."""
    return mx.fast.layer_norm(x, weight, None, eps)


NORMS: dict[str, Norm] = {
    "fused RMSNorm": mx.fast.rms_norm,
    "naive RMSNorm": naive_rms_norm,
    "fused LayerNorm": layer_norm,
}


@contextmanager
def norm_kernel(norm: Norm) -> Iterator[None]:
    """While the block runs, every norm of every model that builds its graph anew is computed by `norm`.

    Exchanged where all of them look it up, `mx.fast.rms_norm`: the graph is otherwise the model's own.
    """
    usual: Any = mx.fast.rms_norm
    mx.fast.rms_norm = norm  # type: ignore[assignment]
    try:
        yield
    finally:
        mx.fast.rms_norm = usual


def norm_sessions(model: Model, name: str, shape: Shape, method: Method, foreign_bytes: int = 0) -> list[Session]:
    """One side for each norm, to be measured in turns. The eager step always: a compiled graph keeps its kernels."""
    eager = Method(method.trials, method.delay_s, "eager", method.max_warm_ups, method.clock, method.sleep)
    sessions = []
    for variant, norm in NORMS.items():
        side = session(model, name, shape, eager, foreign_bytes=foreign_bytes, variant=variant)
        side.around = lambda norm=norm: norm_kernel(norm)  # type: ignore[misc]
        sessions.append(side)
    return sessions


def norm_count(config: OpenELMConfig) -> int:
    """How many norms a token passes, queries' and keys' counted apart as the paper does: 4L+1."""
    return (4 if config.normalize_qk_projections else 2) * config.num_transformer_layers + 1
