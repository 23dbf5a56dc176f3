"""Data-parallel training under `mlx.launch`: every rank takes its rows of each batch, and all add up their sums.

Losses, targets and gradients are sums, so the result does not depend on the number of ranks, nor on how evenly the
rows fall. All ranks make the same number of steps: one without rows of its own computes a row that does not count.
"""

from dataclasses import replace
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten, tree_unflatten

from .batches import Batch


def rank() -> int:
    """This process's number; 0 writes and prints."""
    return mx.distributed.init().rank()


def any_rank(flag: bool) -> bool:
    """Whether any rank says so: what one decides alone (it was interrupted) all must do in the same step."""
    group = mx.distributed.init()
    if group.size() == 1:
        return flag
    return bool(mx.distributed.all_sum(mx.array(float(flag))).item())


def share(batch: Batch) -> Batch:
    """The rows of a batch that this rank computes."""
    group = mx.distributed.init()
    if group.size() == 1:
        return batch
    mine = slice(group.rank(), None, group.size())
    if group.rank() >= len(batch.rows):  # as many steps as the others, and nothing in the sum
        return replace(_rows(batch, slice(0, 1)), counted=mx.zeros((1, batch.tokens.shape[1]), mx.bool_))
    return _rows(batch, mine)


def add_up(total: mx.array, count: mx.array, gradients: Any) -> tuple[mx.array, mx.array, Any]:
    """The sums over all ranks; `gradients` may be None."""
    group = mx.distributed.init()
    if group.size() == 1:
        return total, count, gradients
    total, count = mx.distributed.all_sum(mx.stack([total, count]))
    if gradients is None:
        return total, count, None
    leaves: Any = tree_flatten(gradients)
    joined = mx.distributed.all_sum(mx.concatenate([leaf.astype(mx.float32).reshape(-1) for _, leaf in leaves]))
    summed, start = [], 0
    for name, leaf in leaves:
        summed.append((name, joined[start : start + leaf.size].reshape(leaf.shape).astype(leaf.dtype)))
        start += leaf.size
    return total, count, tree_unflatten(summed)


def _rows(batch: Batch, chosen: slice) -> Batch:
    segments = None if batch.segments is None else batch.segments[chosen]
    return Batch(batch.tokens[chosen], batch.counted[chosen], segments, batch.rows[chosen])
