"""The jobs of `openelm lora`, put together from model, data and trainer: train, test, dry run, show a batch."""

import math
import shlex
from collections.abc import Sequence as Several
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from .. import checkpoint
from ..adapter_config import AdapterSpec
from ..adapters import adapter_weights, add_adapters, load_adapters
from ..config_keys import listing
from ..device import wired_limit
from ..errors import CheckpointError, ConfigError, OpenELMError
from ..model import Model
from ..safetensors_file import read_header
from ..tokenizer import Tokenizer
from .batches import Batches
from .chat_form import folder_format
from .data_summary import count_of
from .datasets import Datasets, load_datasets
from .estimate import estimate
from .fingerprints import data_fingerprint, model_fingerprint
from .folder import AdapterFolder, check_folder
from .interrupt import asked_to_stop
from .log import LogFile
from .optimizers import make_optimizer
from .parallel import rank
from .progress import counting
from .report import Lines, services, tell
from .schedule import make_schedule, warmup_updates
from .sequences import Sequence
from .settings import Settings
from .show_batch import show_batch
from .state import Progress, restore
from .targets import Targets, describe_targets
from .trainer import Run, evaluate, train
from .watchdog import Watchdog


def train_adapters(settings: Settings, record: dict[str, Any] | None, *, force: bool) -> dict[str, Any]:
    """Train, or go on with the run of `record`. Returns what to print; raises KeyboardInterrupt after saving."""
    folder = Path(settings.adapter_path)
    if record is None and rank() == 0:
        check_folder(folder, force=force)
    try:
        model, tokenizer = load_model(settings)
    except OpenELMError as error:
        if record is None:
            raise
        raise type(error)(f"{error}; if the run's model has moved, name it with --model") from None
    base = model_fingerprint(model)
    if record is not None and record["model"] != base:
        raise ConfigError(
            f"{settings.model or 'tiny'} is not the model that the run began with: name that with --model"
        )
    spec, targets = prepare(model, settings)
    if settings.resume_adapter_file:
        load_weights(model, Path(settings.resume_adapter_file))
    for line in targets.lines:
        tell(line)
    data = load_data(settings, model, tokenizer)
    batches = make_batches(data.train, settings, model)
    iterations = total_iterations(settings, len(batches))
    fingerprint = data_fingerprint(data.train)
    if record is not None and record["data"] != fingerprint:
        raise ConfigError("the training data is not what the run began with: put it back, or begin a new run")
    updates = record["schedule_updates"] if record else iterations // settings.grad_accumulation_steps
    schedule = make_schedule(settings.lr_schedule, settings.learning_rate, updates)
    optimizer = make_optimizer(settings.optimizer, settings.optimizer_config, schedule(0))
    optimizer.init(model.trainable_parameters())
    new_record = {"settings": settings.to_dict(), "schedule_updates": updates, "data": fingerprint, "model": base}
    writer = AdapterFolder(folder, model, optimizer, spec, new_record)
    progress = Progress() if record is None else restore(folder, model, optimizer)
    if record is None and rank() == 0:
        writer.begin()
    _tell_start(settings, iterations, batches, progress)
    run = Run(model, optimizer, schedule, batches, settings, iterations, progress)
    return _run(run, writer, data, settings)


def _run(run: Run, writer: AdapterFolder, data: Datasets, settings: Settings) -> dict[str, Any]:
    progress, folder, writes = run.progress, writer.path, rank() == 0
    lines = Lines(run.iterations, progress)
    watchdog = Watchdog(progress)
    run.callbacks = [watchdog]
    if writes:
        run.save, run.save_best = partial(writer.save, progress), writer.save_best
        run.callbacks += [
            lines,
            LogFile(folder, settings.to_dict(), progress.iteration),
            *services(settings.report_to, settings.project_name, folder, settings.to_dict()),
        ]
    note = partial(tell, "stopping after this update; Ctrl-C again stops at once")
    try:
        with asked_to_stop(note) as interrupted, wired_limit(_wired_bytes(run.model)), watchdog:
            run.interrupted = interrupted
            if data.valid and settings.val_batches:
                run.validate = partial(_validation, run, data.valid, watchdog)
            outcome = train(run)
    finally:
        lines.close()
    if outcome == "interrupted":
        place = shlex.quote(str(folder))
        tell(f"saved at iteration {progress.iteration}; go on with: openelm lora --resume --adapter-path {place}")
        raise KeyboardInterrupt
    if outcome == "stopped early":
        tell(f"stopped at iteration {progress.iteration}: {progress.without_gain} validations without a gain")
    if progress.untrained_loss is not None and (progress.best_loss or 0) > progress.untrained_loss:
        tell(
            f"no validation was better than that of the model itself, {progress.untrained_loss:.4f}: a lower learning "
            "rate may help"
        )
    other = writes and writer.finish(progress)
    kept = progress.best_iteration if other else progress.iteration
    if other:
        tell(f"kept the best adapters, of iteration {kept}; the last are in last_adapters.safetensors")
    return {
        "adapter_path": str(folder),
        "iteration": kept,
        "last_iteration": progress.iteration,
        "updates": progress.update,
        "trained_tokens": progress.trained_tokens,
        "best_val_loss": progress.best_loss,
        "peak_memory_bytes": mx.get_peak_memory(),
    }


def _validation(run: Run, sequences: list[Sequence], watchdog: Watchdog) -> float | None:
    batches = make_batches(sequences, run.settings, run.model, training=False)
    count = run.settings.val_batches
    shown = len(batches) if count == -1 else min(count, len(batches))
    with counting("validation", shown) as bar:

        def tick(done: int) -> None:
            watchdog.beat()
            bar(done)

        return evaluate(run.model, batches, count, interrupted=run.interrupted, tick=tick)


def test_adapters(settings: Settings) -> dict[str, Any]:
    """The loss on the test data, of the adapters in the folder; of the model itself where `adapter_path` is empty."""
    model, tokenizer = load_model(settings)
    if settings.adapter_path:
        load_adapters(model, Path(settings.adapter_path))
    data = load_data(settings, model, tokenizer, splits=("test",))
    batches = make_batches(data.test, settings, model, training=False)
    with counting("test", len(batches)) as tick:
        loss = evaluate(model, batches, settings.test_batches, interrupted=lambda: False, tick=tick)
    assert loss is not None
    return {"test_loss": loss, "test_perplexity": math.exp(min(loss, 700))}


def show_first_batch(settings: Settings) -> dict[str, Any]:
    """Print what the first iteration would read and learn."""
    model, tokenizer = load_model(settings)
    data = load_data(settings, model, tokenizer)
    show_batch(make_batches(data.train, settings, model).batch(0), tokenizer)
    return {}


def dry_run(settings: Settings) -> dict[str, Any]:
    """What a run would train, on how much, for how long, in how much memory; nothing is written."""
    model, tokenizer = load_model(settings)
    spec, targets = prepare(model, settings)
    for line in targets.lines:
        tell(line)
    data = load_data(settings, model, tokenizer)
    batches = make_batches(data.train, settings, model)
    iterations = total_iterations(settings, len(batches))
    updates = iterations // settings.grad_accumulation_steps
    schedule = make_schedule(settings.lr_schedule, settings.learning_rate, updates)
    _tell_start(settings, iterations, batches, Progress())
    largest = max((batches.batch(i).tokens.shape for i in range(len(batches))), key=math.prod)
    memory = estimate(model, spec, settings, *largest)
    return {
        "model": settings.model or "tiny",
        "trainable_parameters": targets.trainable,
        "parameters": targets.total,
        "targets": targets.adapted,
        "names": list(targets.names),
        "rows": len(data.train),
        "epoch_tokens": batches.epoch_tokens,
        "tokens": round(batches.epoch_tokens * iterations / len(batches)),
        "iterations": iterations,
        "updates": updates,
        "learning_rates": [schedule(0), schedule(updates // 2), schedule(updates - 1)],
        "largest_batch": list(largest),
        "memory_bytes": memory.total,
        "weights_bytes": memory.weights,
        "device": memory.device,
    }


def load_model(settings: Settings) -> tuple[Model, Tokenizer]:
    """The base model and its tokenizer. What full fine-tuning holds in 16 bits becomes float32, unless asked not to."""
    model, tokenizer = checkpoint.load(
        settings.model or "tiny",
        dtype=settings.dtype,
        tokenizer=settings.tokenizer,
        revision=settings.revision,
        offline=settings.offline,
        keep_quantized=settings.keep_quantized,
    )
    if settings.fine_tune_type == "full" and settings.dtype == "auto":
        model.set_dtype(mx.float32)  # a step of 1e-5 is lost when it is added to a weight of 16 bits
    return model, tokenizer


def prepare(model: Model, settings: Settings) -> tuple[AdapterSpec, Targets]:
    """Make the model trainable as the settings say; the fresh adapters depend on the seed alone."""
    spec = settings.adapter_spec()
    mx.random.seed(settings.seed)
    trained = add_adapters(model, spec)
    mx.eval(model.trainable_parameters())
    return spec, describe_targets(model, spec, trained)


def load_weights(model: Model, file: Path) -> None:
    """Begin with the weights of an `adapters.safetensors`. Raises CheckpointError unless names and shapes agree."""
    expected = adapter_weights(model)
    stored = read_header(file)
    faults = [f"missing {name}" for name in expected if name not in stored]
    faults += [f"unexpected {name}" for name in stored if name not in expected]
    faults += [
        f"{name} has shape {stored[name].shape}, expected {array.shape}"
        for name, array in expected.items()
        if name in stored and stored[name].shape != array.shape
    ]
    if faults:
        raise CheckpointError(f"{file} does not fit what is to be trained: {listing(faults)}")
    loaded: Any = mx.load(str(file))
    model.load_weights([(name, loaded[name].astype(array.dtype)) for name, array in expected.items()], strict=False)


def load_data(
    settings: Settings, model: Model, tokenizer: Tokenizer, splits: Several[str] = ("train", "valid")
) -> Datasets:
    """The sequences that the settings name, chats in the form in which `openelm chat` talks to the model."""
    form = folder_format(settings.model or "tiny", tokenizer, revision=settings.revision, offline=settings.offline)
    limit = model.config.max_context_length
    data = load_datasets(settings.data, tokenizer, splits=splits, max_context=limit, chat_format=form, notify=tell)
    if 0 < len(data.train) < settings.batch_size and not settings.data.pack:
        rows = count_of(len(data.train), "row")
        tell(f"train: {rows} in every batch, as there are no {settings.batch_size} for --batch-size")
    return data


def make_batches(sequences: Several[Sequence], settings: Settings, model: Model, *, training: bool = True) -> Batches:
    """Training's batches, or those of an evaluation: drawn once from all rows, whatever the seed of the run.

    So a few of them are like all, and runs with different seeds are measured on the same rows.
    """
    return Batches(
        sequences,
        batch_size=settings.batch_size,
        seed=settings.seed if training else 0,
        max_seq_length=min(settings.data.max_seq_length, model.config.max_context_length),
        pack=settings.data.pack,
        longest_first=training,
    )


def total_iterations(settings: Settings, per_epoch: int) -> int:
    """Iterations of the whole run, filled up to whole updates."""
    wanted = settings.iters if settings.epochs is None else max(1, round(settings.epochs * per_epoch))
    whole = -(-wanted // settings.grad_accumulation_steps) * settings.grad_accumulation_steps
    if whole != wanted and settings.epochs is None:
        tell(f"{wanted} iterations are not whole updates of {settings.grad_accumulation_steps}: training {whole}")
    return whole


def _tell_start(settings: Settings, iterations: int, batches: Batches, progress: Progress) -> None:
    """How long the run is, and what will not be as it was asked for."""
    if progress.iteration >= iterations:
        done = count_of(progress.iteration, "iteration")
        tell(f"nothing to go on with: {done} of {iterations} are done; name more with --iters or --epochs")
        return
    begun = f"going on at iteration {progress.iteration} of" if progress.iteration else "training for"
    updates = iterations // settings.grad_accumulation_steps
    tell(
        f"{begun} {count_of(iterations, 'iteration')} of {count_of(batches.rows, 'row')}, "
        f"{count_of(updates, 'update')}, {iterations / len(batches):.2f} epochs"
    )
    warmup = warmup_updates(settings.lr_schedule, updates)
    if warmup >= updates:
        tell(f"the warm-up takes {count_of(warmup, 'update')}: the run ends before the learning rate is reached")


def _wired_bytes(model: nn.Module) -> int:
    arrays: Any = tree_flatten(model.parameters())
    return sum(array.nbytes for _, array in arrays)
