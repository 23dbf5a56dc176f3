"""Memory: the estimate against measured peaks, peaks that stay flat, and wired memory that follows the model."""

import gc

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten
from tuning import SMALL, VOCAB, new_run, rows, settings

from openelm_mlx import device
from openelm_mlx.config import OpenELMConfig
from openelm_mlx.lora.batches import Batches
from openelm_mlx.lora.estimate import estimate
from openelm_mlx.lora.job import prepare
from openelm_mlx.lora.trainer import update
from openelm_mlx.model import Model

from reference import small_config  # isort: skip


def made(chosen, **config):
    model = Model(OpenELMConfig.from_dict(small_config(**{**SMALL, "vocab_size": VOCAB, **config})))
    spec, _ = prepare(model, chosen)
    model.train()
    mx.eval(model.parameters())
    return model, spec


@pytest.mark.skipif(device.is_metal(), reason="the estimate was fitted on the CPU backend")
@pytest.mark.parametrize(
    ("kind", "dropout", "checkpoint", "dtype"),
    [
        *((*kind, checkpoint, "float32") for kind in (("lora", 0.0), ("lora", 0.1), ("dora", 0.0))
          for checkpoint in (False, True)),
        ("lora", 0.0, False, "bfloat16"),
    ],
)  # fmt: skip
def test_the_estimate_is_near_the_peak(kind, dropout, dtype, checkpoint):
    adapter = {"fine_tune_type": kind, "lora_parameters": {"dropout": dropout}}
    chosen = settings(**adapter, batch_size=2, grad_checkpoint=checkpoint)
    shape = {"num_transformer_layers": 4, "model_dim": 192, "head_dim": 32, "ffn_multipliers": [0.5, 4.0],
             "vocab_size": 2048, "num_gqa_groups": 4}  # fmt: skip
    model, spec = made(chosen, **shape)
    if dtype == "bfloat16":
        adapters = model.trainable_parameters()
        model.set_dtype(mx.bfloat16)
        model.update(adapters)  # which stay float32
    run = new_run(chosen, Batches(rows([192] * 2), batch_size=2, seed=0, max_seq_length=192), 2, model)
    mx.eval(run.optimizer.state)
    gc.collect()
    here = sum(array.nbytes for tree in (model.parameters(), run.optimizer.state) for _, array in tree_flatten(tree))
    elsewhere = mx.get_active_memory() - here  # what other tests have left
    mx.reset_peak_memory()
    update(run)
    peak = mx.get_peak_memory() - elsewhere
    assert estimate(model, spec, chosen, 2, 192).total == pytest.approx(peak, rel=0.2)


def test_peaks_stay_flat_over_rows_of_many_lengths():
    # fault H1: lengths are padded to a few, and the longest batch comes first
    chosen = settings(batch_size=2, grad_checkpoint=True)
    model, _ = made(chosen)
    lengths = np.random.default_rng(0).integers(4, 200, 24).tolist()
    batches = Batches(rows(lengths), batch_size=2, seed=0, max_seq_length=200)
    assert len({batches.batch(i).tokens.shape[1] for i in range(len(batches))}) <= 7
    run = new_run(chosen, batches, 24, model)
    peaks = []
    for _ in range(2):
        mx.reset_peak_memory()
        for _ in range(len(batches)):
            update(run)
        peaks.append(mx.get_peak_memory())
    assert peaks[1] <= 1.1 * peaks[0]


def test_wired_memory_follows_the_model(monkeypatch):
    # fault H3
    asked = []
    monkeypatch.setattr(device, "is_metal", lambda: True)
    monkeypatch.setattr(mx, "device_info", lambda: {"max_recommended_working_set_size": 10**11})
    monkeypatch.setattr(mx, "set_wired_limit", lambda size: asked.append(size) or 5)
    with device.wired_limit(543_054_336):
        pass
    assert asked[1] == 5
    assert 543_054_336 < asked[0] < 2 * 10**9
