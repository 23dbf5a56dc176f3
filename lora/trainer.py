"""The training loop: batches in, updates of the trained weights out, everything worth telling to callbacks.

An iteration is a batch, an update is `grad_accumulation_steps` of them. Losses and gradients are sums, divided once by
the number of targets of the whole update: eight rows at once and four times two rows are the same update.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import mlx.core as mx
from mlx.utils import tree_map

from ..errors import RunFailedError
from ..model import Model
from .batches import Batch, Batches
from .callbacks import Meter, Step, TrainingCallback
from .forward import hidden_states
from .loss import summed_loss
from .optimizers import mean_gradients
from .parallel import add_up, any_rank, share
from .schedule import Schedule
from .settings import Settings
from .state import Progress

_SEEDS_PER_ITERATION = 4096  # more than any model has layers


@dataclass
class Run:
    """All that a training run works with. `validate` returns the loss, None where it was interrupted."""

    model: Model
    optimizer: Any
    schedule: Schedule
    batches: Batches
    settings: Settings
    iterations: int  # in total
    progress: Progress
    validate: Callable[[], float | None] | None = None
    save: Callable[[], None] = lambda: None  # the state from which the run can go on
    save_best: Callable[[], None] = lambda: None
    interrupted: Callable[[], bool] = lambda: False
    callbacks: Sequence[TrainingCallback] = field(default_factory=list)


def train(run: Run) -> str:
    """Train until all iterations are done; returns "finished", "stopped early" or "interrupted", the state saved.

    Raises RunFailedError, nothing saved since the last good state, when loss or gradients stop being meaningful.
    """
    progress, settings = run.progress, run.settings
    if progress.iteration == 0:
        run.save()
        _evaluate(run, first=True)
    meter = Meter(run.iterations, progress)
    run.model.train()
    while progress.iteration < run.iterations and not any_rank(run.interrupted()):
        before = progress.iteration
        meter.add(update(run))
        for callback in run.callbacks:
            callback.on_update(progress)
        last = progress.iteration >= run.iterations
        if _due(settings.steps_per_report, before, progress.iteration) or last:
            report = meter.report()
            for callback in run.callbacks:
                callback.on_train_loss_report(report)
        if _due(settings.steps_per_eval, before, progress.iteration) or last:
            _evaluate(run)
            if settings.early_stopping and progress.without_gain >= settings.early_stopping:
                run.save()
                return "stopped early"
        if _due(settings.save_every, before, progress.iteration) or last:
            run.save()
    if progress.iteration < run.iterations:
        run.save()
        return "interrupted"
    return "finished"


def update(run: Run) -> Step:
    """One step of the optimizer."""
    progress, settings = run.progress, run.settings
    start = time.perf_counter()
    window = [run.batches.batch(progress.iteration + i) for i in range(settings.grad_accumulation_steps)]
    total, count, gradients = mx.array(0.0), mx.array(0.0), None
    for number, batch in enumerate(window, start=progress.iteration):
        value, counted, new = batch_gradients(run.model, share(batch), settings, number)
        gradients = new if gradients is None else tree_map(mx.add, gradients, new)
        total, count = total + value, count + counted
        mx.eval(total, count, gradients)  # now, so that only one batch's activations are held
    total, count, gradients = add_up(total, count, gradients)
    gradients, norm = mean_gradients(gradients, count, settings.clip_grad_norm)
    mx.eval(gradients, norm)
    loss, targets, length = cast(float, total.item()), int(cast(float, count.item())), cast(float, norm.item())
    learning_rate = run.schedule(progress.update)
    check_step(run, loss, targets, length, learning_rate, window)
    run.optimizer.learning_rate = learning_rate
    run.optimizer.update(run.model, gradients)
    del gradients
    mx.eval(run.model.trainable_parameters(), run.optimizer.state)
    if mx.get_cache_memory() > settings.clear_cache_threshold:
        mx.clear_cache()
    progress.iteration += len(window)
    progress.update += 1
    progress.trained_tokens += targets
    return Step(loss, targets, length, learning_rate, time.perf_counter() - start)


def batch_gradients(model: Model, batch: Batch, settings: Settings, iteration: int) -> tuple[mx.array, mx.array, Any]:
    """(sum of the losses, number of targets, gradients of that sum) of one batch, unevaluated."""
    parameters = model.trainable_parameters()
    seed = (settings.seed << 40) + iteration * _SEEDS_PER_ITERATION

    def loss(parameters: Any) -> tuple[mx.array, mx.array]:
        model.update(parameters)
        hidden = hidden_states(model, batch.tokens, batch.segments, checkpoint=settings.grad_checkpoint, seed=seed)
        return summed_loss(model, hidden, batch.tokens, batch.counted, z_loss=settings.z_loss)

    (total, count), gradients = mx.value_and_grad(loss)(parameters)
    model.update(parameters)  # the arrays themselves again, not what the gradient was traced with
    return total, count, gradients


def check_step(run: Run, loss: float, targets: int, norm: float, learning_rate: float, window: list[Batch]) -> None:
    """Raise RunFailedError before an update that would teach nothing, or ruin the weights."""
    if targets == 0:
        reason = "no target counts, so there is nothing to learn from"
    elif loss != loss or abs(loss) == float("inf"):
        reason = f"the loss is {loss / targets}"
    elif loss == 0:
        reason = "the loss is exactly 0, which no text gives: the logits are broken"
    elif norm != norm or norm == float("inf"):
        reason = f"the loss is {loss / targets:.4g}, but the gradient is {norm}"
    elif norm == 0:
        reason = f"the loss is {loss / targets:.4g}, but the gradient is exactly 0: nothing can be learned any more"
    else:
        return
    rows = [name for batch in window for name in batch.rows]
    shown = ", ".join(rows[:4]) + (f" and {len(rows) - 4} more" if len(rows) > 4 else "")
    dtype = str(run.model.transformer.norm.weight.dtype).rpartition(".")[-1]
    raise RunFailedError(
        f"stopped at iteration {run.progress.iteration + len(window)}: {reason} (learning rate {learning_rate:g}, "
        f"{dtype}, rows {shown}); what was saved before is kept: a lower learning rate may help"
    )


def evaluate(
    model: Model, batches: Batches, count: int, *, interrupted: Callable[[], bool], tick: Callable[[int], None]
) -> float | None:
    """Mean loss per target over `count` batches (-1 is all), without dropout; None where interrupted.

    Raises RunFailedError where no target counts.
    """
    total, targets = 0.0, 0.0
    training = model.training
    model.eval()
    try:
        for number in range(len(batches) if count == -1 else min(count, len(batches))):
            if any_rank(interrupted()):
                return None
            batch = share(batches.batch(number))
            hidden = hidden_states(model, batch.tokens, batch.segments)
            added, counted, _ = add_up(*summed_loss(model, hidden, batch.tokens, batch.counted), None)
            mx.eval(added, counted)
            total, targets = total + cast(float, added.item()), targets + cast(float, counted.item())
            tick(1)
    finally:
        model.train(training)
    if targets == 0:
        raise RunFailedError("no target of these rows counts: there is no loss to report")
    return total / targets


def _evaluate(run: Run, *, first: bool = False) -> None:
    """Validate, tell, and keep the best. The untrained model is measured and told, never kept."""
    if run.validate is None:
        return
    start = time.perf_counter()
    loss = run.validate()
    if loss is None:
        return
    if first:
        run.progress.untrained_loss = loss
    elif run.progress.note_validation(loss):
        run.save_best()
    report = {
        "iteration": run.progress.iteration,
        "val_loss": loss,
        "val_time": time.perf_counter() - start,
        "best_iteration": run.progress.best_iteration,
    }
    for callback in run.callbacks:
        callback.on_val_loss_report(report)


def _due(every: int, before: int, after: int) -> bool:
    """Whether a multiple of `every` was reached: an update may take several iterations."""
    return after // every > before // every
