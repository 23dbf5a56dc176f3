"""The loop: accumulation, clipping, what stops a run, the best kept, and a run resumed as if never stopped."""

import math

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten
from tuning import OneBatch, close, frozen, model_for, new_run, rows, same, settings, trained

from openelm_mlx.errors import CheckpointError, RunFailedError
from openelm_mlx.lora.batches import Batch, Batches
from openelm_mlx.lora.callbacks import TrainingCallback
from openelm_mlx.lora.optimizers import mean_gradients
from openelm_mlx.lora.state import STATE_NAME, Progress, read_record, restore, save_state
from openelm_mlx.lora.trainer import evaluate, train, update


class Told(TrainingCallback):
    def __init__(self):
        self.train, self.val = [], []

    def on_train_loss_report(self, train_info):
        self.train.append(train_info)

    def on_val_loss_report(self, val_info):
        self.val.append(val_info)


def batches(chosen, lengths=(9, 5, 12, 7, 8, 11), **options):
    return Batches(rows(lengths), batch_size=chosen.batch_size, seed=chosen.seed, max_seq_length=32, **options)


def test_eight_rows_at_once_are_four_times_two():
    # fault F8: weighted by targets, however unevenly these are spread
    eight = rows([3, 12, 5, 9, 4, 11, 6, 10])
    parts = [OneBatch(eight[i : i + 2]).batch(0) for i in range(0, 8, 2)]

    class Parts:
        def batch(self, index):
            return parts[index]

    whole = settings(optimizer="sgd", batch_size=8)
    split = settings(optimizer="sgd", batch_size=2, grad_accumulation_steps=4)
    one, other = new_run(whole, OneBatch(eight), 1), new_run(split, Parts(), 4)
    start = trained(one.model)
    first, second = update(one), update(other)
    assert (first.targets, second.targets) == (52, 52)
    assert first.loss == pytest.approx(second.loss, rel=1e-5)
    moved = {name: value - start[name] for name, value in trained(one.model).items()}
    assert close(moved, {name: value - start[name] for name, value in trained(other.model).items()}, 1e-4)
    assert (other.progress.iteration, other.progress.update) == (4, 1)


@pytest.mark.parametrize("kind", ["lora", "dora", "full"])
def test_the_base_never_moves_and_the_loss_falls(kind):
    chosen = settings(fine_tune_type=kind, lora_parameters={"rank": 4, "scale": 2.0}, num_layers=1, steps_per_report=1)
    told = Told()
    run = new_run(chosen, OneBatch(rows([12, 9])), 12, callbacks=[told])
    before = frozen(run.model)
    assert train(run) == "finished"
    assert same(before, frozen(run.model))
    assert told.train[-1]["train_loss"] < told.train[0]["train_loss"] - 0.1


@pytest.mark.parametrize("optimizer", ["adam", "adamw", "sgd", "adafactor", "muon"])
def test_every_optimizer_lowers_the_loss_and_can_be_resumed(optimizer, tmp_path):
    chosen = settings(optimizer=optimizer, learning_rate=1e-2, clip_grad_norm=1.0)
    run = new_run(chosen, OneBatch(rows([12, 9])), 8)
    first = update(run)
    for _ in range(3):
        update(run)
    save_state(tmp_path, run.model, run.optimizer, run.progress, {})
    later = [update(run).loss for _ in range(3)]
    again = new_run(chosen, OneBatch(rows([12, 9])), 8, model_for(chosen, moved=0.0))
    again.progress = restore(tmp_path, again.model, again.optimizer)
    assert [update(again).loss for _ in range(3)] == later
    assert same(trained(run.model), trained(again.model))
    assert later[-1] < first.loss


@pytest.mark.parametrize("kind", [{}, {"fine_tune_type": "dora"}, {"fine_tune_type": "full"}, {"embedding": "input"}])
def test_stopped_and_resumed_is_never_stopped(kind, tmp_path):
    # fault G7: bit for bit, with dropout, accumulation, shuffled rows and checkpointing
    chosen = settings(
        **kind, lora_parameters={"rank": 4, "scale": 2.0, "dropout": 0.2}, grad_accumulation_steps=2,
        optimizer="adamw", grad_checkpoint=True, save_every=4,
    )  # fmt: skip
    whole = new_run(chosen, batches(chosen), 10)
    assert train(whole) == "finished"
    begun = new_run(chosen, batches(chosen), 10)
    begun.interrupted = lambda: begun.progress.iteration >= 4
    begun.save = lambda: save_state(tmp_path, begun.model, begun.optimizer, begun.progress, {"note": "kept"})
    assert train(begun) == "interrupted"
    mx.random.seed(99)
    rest = new_run(chosen, batches(chosen), 10, model_for(chosen, moved=0.5))
    count = sum(array.size for _, array in tree_flatten(rest.model.trainable_parameters()))
    rest.progress = restore(tmp_path, rest.model, rest.optimizer)
    assert (rest.progress.iteration, rest.progress.update) == (4, 2)
    assert read_record(tmp_path)["note"] == "kept"
    assert train(rest) == "finished"
    assert same(trained(whole.model), trained(rest.model))
    assert rest.progress.trained_tokens == whole.progress.trained_tokens
    assert count == sum(array.size for _, array in tree_flatten(rest.model.trainable_parameters()))


class TestState:
    def test_of_another_run(self, tmp_path):
        run = new_run(settings(), OneBatch(rows([9])), 1)
        save_state(tmp_path, run.model, run.optimizer, run.progress, {})
        other = new_run(settings(lora_parameters={"rank": 3, "scale": 1.0}), OneBatch(rows([9])), 1)
        with pytest.raises(CheckpointError, match="is not of this run: .*lora_a"):
            restore(tmp_path, other.model, other.optimizer)

    def test_missing_damaged_or_newer(self, tmp_path):
        with pytest.raises(CheckpointError, match="nothing to resume"):
            read_record(tmp_path)
        run = new_run(settings(), OneBatch(rows([9])), 1)
        save_state(tmp_path, run.model, run.optimizer, run.progress, {"format_version": 2})
        with pytest.raises(CheckpointError, match="format version 2, expected 1"):
            read_record(tmp_path)
        path = tmp_path / STATE_NAME
        path.write_bytes(path.read_bytes()[:-9])
        with pytest.raises(CheckpointError, match="is damaged: begin a new run with --resume-adapter-file"):
            read_record(tmp_path)

    def test_a_failed_write_keeps_the_old_one(self, tmp_path, monkeypatch):
        run = new_run(settings(), OneBatch(rows([9])), 1)
        save_state(tmp_path, run.model, run.optimizer, run.progress, {})
        before = (tmp_path / STATE_NAME).read_bytes()

        def half(path, arrays, metadata):
            with open(path, "wb") as file:
                file.write(before[:100])
            raise RuntimeError("disk full")

        monkeypatch.setattr(mx, "save_safetensors", half)
        with pytest.raises(Exception, match="the old state is kept"):
            save_state(tmp_path, run.model, run.optimizer, run.progress, {})
        assert [path.name for path in tmp_path.iterdir()] == [STATE_NAME]
        assert (tmp_path / STATE_NAME).read_bytes() == before


class TestStops:
    def failed(self, run, match):
        saved = []
        run.save = lambda: saved.append(run.progress.iteration)
        with pytest.raises(RunFailedError, match=match) as raised:
            train(run)
        assert raised.value.exit_status == 1
        assert saved == [0]  # what was saved before is not replaced

    def test_a_loss_that_is_no_number(self):
        # fault F4
        run = new_run(settings(optimizer="sgd", learning_rate=1e9), OneBatch(rows([12, 9])), 40)
        self.failed(run, r"(loss is (nan|inf)|gradient is (nan|inf)).*learning rate 1e\+09, float32, rows rows:1")
        assert all(np.isfinite(value).all() for value in trained(run.model).values())

    def test_no_target_counts(self):
        # fault A2
        self.failed(new_run(settings(), OneBatch(rows([12], masked=12)), 4), "no target counts.*rows:1")

    def test_a_gradient_of_exactly_zero(self):
        model = model_for(settings())
        model.transformer.norm.weight = mx.zeros_like(model.transformer.norm.weight)
        self.failed(new_run(settings(), OneBatch(rows([12])), 4, model), "the gradient is exactly 0: nothing can")

    def test_a_loss_of_exactly_zero(self):
        model = model_for(settings(), vocab_size=96)
        model.transformer.norm.weight = mx.zeros_like(model.transformer.norm.weight)
        batch = OneBatch(rows([12])).batch(0)
        alone = Batch(mx.zeros_like(batch.tokens), batch.counted, None, batch.rows)
        run = new_run(settings(), OneBatch(rows([12])), 4, model)
        run.batches.batch = lambda index: alone
        model.head = lambda hidden: mx.where(mx.arange(96) == 0, 1e9, 0.0) + hidden.sum(-1, keepdims=True) * 0
        self.failed(run, "the loss is exactly 0")


def test_gradients_are_means_and_are_clipped():
    tree = {"a": mx.array([3.0, 4.0]), "b": [mx.array([12.0])]}
    mean, norm = mean_gradients(tree, mx.array(2.0), None)
    assert norm.item() == pytest.approx(6.5)
    assert mean["b"][0].tolist() == [6.0]
    clipped, norm = mean_gradients(tree, mx.array(2.0), 1.0)
    assert norm.item() == pytest.approx(6.5)
    length = math.sqrt(sum(mx.square(leaf).sum().item() for _, leaf in tree_flatten(clipped)))
    assert length == pytest.approx(1.0, rel=1e-5)
    assert mean_gradients({"a": mx.full((4,), 300.0, mx.float16)}, mx.array(1.0), None)[1].item() == pytest.approx(600)


class TestValidation:
    def test_is_weighted_by_targets_and_uses_every_row(self):
        chosen = settings(lora_parameters={"rank": 4, "scale": 2.0, "dropout": 0.5})
        model = model_for(chosen)
        uneven = rows([3, 14, 5])
        single = [
            evaluate(model, OneBatch([row]), 1, interrupted=lambda: False, tick=lambda count: None) for row in uneven
        ]
        ticks = []
        loss = evaluate(model, batches(chosen, (3, 14, 5)), -1, interrupted=lambda: False, tick=ticks.append)
        weights = [2, 13, 4]
        assert loss == pytest.approx(sum(w * s for w, s in zip(weights, single, strict=True)) / 19, rel=1e-5)
        assert ticks == [1, 1]
        assert model.training

    def test_the_best_is_kept_and_no_number_is_never_best(self):
        # fault F13
        chosen = settings(steps_per_eval=1, steps_per_report=1)
        losses, kept, told = iter([9.0, 2.0, 1.0, math.nan, 3.0]), [], Told()
        run = new_run(chosen, OneBatch(rows([9])), 4, callbacks=[told], validate=lambda: next(losses))
        run.save_best = lambda: kept.append(run.progress.iteration)
        assert train(run) == "finished"
        assert kept == [1, 2]
        assert (run.progress.best_iteration, run.progress.best_loss) == (2, 1.0)
        assert [report["iteration"] for report in told.val] == [0, 1, 2, 3, 4]

    def test_early_stopping(self):
        chosen = settings(steps_per_eval=2, early_stopping=2)
        losses = iter([5.0, 2.0, 3.0, 3.0, 1.0])
        run = new_run(chosen, OneBatch(rows([9])), 40, validate=lambda: next(losses))
        saved = []
        run.save = lambda: saved.append(run.progress.iteration)
        assert train(run) == "stopped early"
        assert saved == [0, 6]


def test_reports_say_where_the_run_stands():
    chosen = settings(steps_per_report=4, grad_accumulation_steps=2)
    told = Told()
    run = new_run(chosen, OneBatch(rows([9, 5])), 10, callbacks=[told])
    train(run)
    assert [report["iteration"] for report in told.train] == [4, 8, 10]
    assert [report["update"] for report in told.train] == [2, 4, 5]
    assert [report["trained_tokens"] for report in told.train] == [48, 96, 120]
    assert told.train[-1]["eta_s"] == 0
    assert all(report["tokens_per_second"] > 0 and report["peak_memory"] > 0 for report in told.train)


def test_progress_is_a_record():
    progress = Progress()
    assert progress.note_validation(2.0)
    assert not progress.note_validation(math.nan)
    assert not progress.note_validation(2.0)
    assert (progress.best_loss, progress.without_gain) == (2.0, 2)
