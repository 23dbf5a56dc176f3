"""One step of fine-tuning is PyTorch's: loss, gradients, and the weights after two clipped updates of AdamW."""

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten
from torch_tuning import (
    ADAMW,
    CASES,
    CLIP,
    CONFIG,
    GOLDEN,
    LEARNING_RATE,
    RANK,
    SCALE,
    Z_LOSS,
    adapters,
    digest,
    rows,
    torch_case,
    weights,
)  # fmt: skip
from tuning import OneBatch, close, gradients, new_run, settings, trained

from openelm_mlx.config import OpenELMConfig
from openelm_mlx.lora.batches import Batch
from openelm_mlx.lora.job import prepare
from openelm_mlx.lora.trainer import update
from openelm_mlx.model import Model

cases = pytest.mark.parametrize(("kind", "masked"), CASES)


def our_case(kind, masked):
    """The same three things as `torch_case`."""
    chosen = settings(
        fine_tune_type=kind, lora_parameters={"rank": RANK, "scale": SCALE}, z_loss=Z_LOSS, clip_grad_norm=CLIP,
        learning_rate=LEARNING_RATE, optimizer="adamw",
        optimizer_config={"adamw": {**ADAMW, "betas": list(ADAMW["betas"]), "bias_correction": True}},
    )  # fmt: skip
    model = Model(OpenELMConfig.from_dict(CONFIG))
    model.load_weights([(name, mx.array(value)) for name, value in weights().items()])
    prepare(model, chosen)
    given = adapters(kind)
    assert given.keys() == {name for name, _ in tree_flatten(model.trainable_parameters())}
    model.load_weights([(name, mx.array(value)) for name, value in given.items()], strict=False)
    model.train()
    tokens, counted = rows(masked)
    batch = Batch(mx.array(tokens), mx.array(counted), None, ("a", "b"))
    total, count, found = gradients(model, batch, chosen)
    same_rows = OneBatch.__new__(OneBatch)
    same_rows._batch = batch
    run = new_run(chosen, same_rows, 2, model)
    update(run)
    update(run)
    return total / count, {name: value / count for name, value in found.items()}, trained(model)


@cases
def test_equals_the_golden_numbers_of_pytorch(kind, masked):
    loss, found, updated = our_case(kind, masked)
    key = f"{kind}_{'masked' if masked else 'whole'}"
    with np.load(GOLDEN) as golden:
        assert loss == pytest.approx(float(golden[f"{key}_loss"]), rel=1e-5)
        for name, arrays in (("gradients", found), ("updated", updated)):
            expected = golden[f"{key}_{name}"]
            np.testing.assert_allclose(digest(arrays), expected, rtol=1e-3, atol=1e-3 * np.abs(expected[:, :1]).max())


@pytest.mark.needs_torch
@cases
def test_equals_pytorch(kind, masked):
    loss, found, updated = our_case(kind, masked)
    expected_loss, expected, expected_updated = torch_case(kind, masked)
    assert loss == pytest.approx(expected_loss, rel=1e-5)
    assert close(expected, found, 2e-4)
    assert close(expected_updated, updated, 2e-4)
