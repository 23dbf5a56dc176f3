"""Cross entropy in float32, a few positions at a time: the logits (B, L, V) never exist whole.

For each chunk the loss and its gradient are computed together and the chunk's logits are dropped: what is kept for the
backward pass is the gradient of the hidden states, as large as these, and that of whatever the output head trains.

Axes: B rows, L tokens, N positions of a chunk, E model_dim, V vocabulary.
"""

from collections.abc import Callable
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten, tree_unflatten

from ..model import Model

CHUNK = 128  # positions; 128 x 32,000 logits in float32 are 16 MB

Head = Callable[[Any, mx.array], mx.array]  # (trained parameters, hidden (N, E)) -> logits (N, V)


def token_losses(logits: mx.array, targets: mx.array, z_loss: float = 0.0) -> mx.array:
    """-log p(target) of each position, (N,) in float32, plus `z_loss` times the squared log of the normaliser.

    logits: (N, V), any float dtype. targets: int (N,). The second term (apple/corenet pre-trains with 1e-4) keeps
    logits from drifting away together.
    """
    return losses_and_normaliser(logits, targets, z_loss)[0]


def losses_and_normaliser(logits: mx.array, targets: mx.array, z_loss: float) -> tuple[mx.array, mx.array]:
    """`token_losses`, and the logarithm of what the probabilities are divided by, (N,)."""
    logits = logits.astype(mx.float32)
    normaliser = mx.logsumexp(logits, axis=-1)
    losses = normaliser - mx.take_along_axis(logits, targets[:, None], axis=-1)[:, 0]
    return (losses + z_loss * mx.square(normaliser) if z_loss else losses), normaliser


def summed_loss(
    model: Model,
    hidden: mx.array,
    tokens: mx.array,
    counted: mx.array,
    *,
    z_loss: float = 0.0,
    chunk: int = CHUNK,
) -> tuple[mx.array, mx.array]:
    """(sum of the losses, number of the targets): what adds up over batches of any size.

    hidden: (B, L, E) for tokens (B, L). counted: bool (B, L), whether token i is a target, to be predicted from i - 1.
    """
    flat = hidden[:, :-1].reshape(-1, hidden.shape[-1])  # (B, L, E) -> (B * (L - 1), E)
    targets, weights = tokens[:, 1:].reshape(-1), counted[:, 1:].reshape(-1).astype(mx.float32)
    module = model.transformer.token_embeddings if model.config.share_input_output_layers else model.lm_head
    parameters = module.trainable_parameters()

    def head(parameters: Any, hidden: mx.array) -> mx.array:
        module.update(parameters)
        return model.head(hidden)

    run = chunked_with_gradient if model.training else chunked
    total = run(head, parameters, flat, targets, weights, z_loss, chunk)
    module.update(parameters)
    return total, weights.sum()


def chunked(
    head: Head, parameters: Any, hidden: mx.array, targets: mx.array, weights: mx.array, z_loss: float, chunk: int
) -> mx.array:
    """The weighted sum of `token_losses`, for evaluation: nothing is kept for a gradient."""
    total = mx.array(0.0)
    for start in range(0, len(targets), chunk):
        part = slice(start, start + chunk)
        total = total + (token_losses(head(parameters, hidden[part]), targets[part], z_loss) * weights[part]).sum()
    return total


def chunked_with_gradient(
    head: Head, parameters: Any, hidden: mx.array, targets: mx.array, weights: mx.array, z_loss: float, chunk: int
) -> mx.array:
    """The same sum, differentiable by `parameters` and `hidden`, whose gradients are computed along with it."""

    def chunk_loss(parameters: Any, hidden: mx.array, targets: mx.array, weights: mx.array) -> mx.array:
        return _weighted_sum(head(parameters, hidden), targets, weights, z_loss)

    by_both: Any = mx.value_and_grad(chunk_loss, argnums=(0, 1))
    names, leaves = _flatten(parameters)

    @mx.custom_function
    def loss(hidden: mx.array, *leaves: mx.array) -> tuple[mx.array, ...]:
        total, by_leaves, by_hidden = mx.array(0.0), [mx.zeros_like(leaf) for leaf in leaves], []
        for start in range(0, len(targets), chunk):
            part = slice(start, start + chunk)
            tree = tree_unflatten(list(zip(names, leaves, strict=True))) if names else {}
            value, (by_tree, by_part) = by_both(tree, hidden[part], targets[part], weights[part])
            total = total + value
            by_leaves = [old + new for old, new in zip(by_leaves, _flatten(by_tree)[1], strict=True)]
            by_hidden.append(by_part)
        return total, mx.concatenate(by_hidden), *by_leaves

    @loss.vjp
    def _(primals: Any, cotangents: Any, outputs: Any) -> Any:
        return tuple((cotangents[0] * gradient).astype(gradient.dtype) for gradient in outputs[1:])

    results: Any = loss(hidden, *leaves)
    return results[0]


def _weighted_sum(logits: mx.array, targets: mx.array, weights: mx.array, z_loss: float) -> mx.array:
    """sum(weights * token_losses), with its gradient written out: softmax - onehot, in the logits' own memory."""

    @mx.custom_function
    def total(logits: mx.array) -> tuple[mx.array, mx.array]:
        losses, normaliser = losses_and_normaliser(logits, targets, z_loss)
        return (losses * weights).sum(), normaliser

    @total.vjp
    def _(logits: mx.array, cotangents: Any, outputs: Any) -> mx.array:
        normaliser = outputs[1][:, None]
        scale = cotangents[0] * weights[:, None]
        by_logits = mx.exp(logits.astype(mx.float32) - normaliser) * (scale * (1 + 2 * z_loss * normaliser))
        chosen = targets[:, None]
        less = mx.take_along_axis(by_logits, chosen, axis=-1) - scale
        return mx.put_along_axis(by_logits, chosen, less, axis=-1).astype(logits.dtype)

    results: Any = total(logits)
    return results[0]


def _flatten(tree: Any) -> tuple[list[str], list[mx.array]]:
    pairs: Any = tree_flatten(tree)
    return [name for name, _ in pairs], [leaf for _, leaf in pairs]
