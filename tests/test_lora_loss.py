"""Loss and gradient are those of the plain formula, whatever is done to compute them with less."""

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten
from tuning import VOCAB, OneBatch, close, frozen, gradients, model_for, rows, same, settings

from openelm_mlx.lora.batches import Batches
from openelm_mlx.lora.forward import hidden_states, packed_mask
from openelm_mlx.lora.loss import summed_loss, token_losses

KINDS = {
    "lora": {"lora_parameters": {"rank": 4, "scale": 2.0}},
    "dora": {"fine_tune_type": "dora", "lora_parameters": {"rank": 4, "scale": 2.0}},
    "full": {"fine_tune_type": "full"},
    "embedding, head too": {"embedding": "both", "lora_parameters": {"rank": 4, "scale": 2.0}},
    "embedding, input only": {"embedding": "input", "lora_parameters": {"rank": 4, "scale": 2.0}},
    "full with embedding": {"fine_tune_type": "full", "embedding": "both"},
}
kinds = pytest.mark.parametrize("kind", KINDS)


def plain_loss(model, batch, z_loss=0.0):
    """The formula, with all logits at once."""
    logits = model(batch.tokens)[:, :-1].reshape(-1, VOCAB)
    losses = token_losses(logits, batch.tokens[:, 1:].reshape(-1), z_loss)
    return (losses * batch.counted[:, 1:].reshape(-1)).sum()


def plain_gradients(model, batch, z_loss):
    parameters = model.trainable_parameters()

    def loss(parameters):
        model.update(parameters)
        return plain_loss(model, batch, z_loss)

    value, found = mx.value_and_grad(loss)(parameters)
    model.update(parameters)
    return value.item(), {name: np.array(array) for name, array in tree_flatten(found)}


@kinds
@pytest.mark.parametrize("tied", [True, False])
def test_chunked_is_plain(kind, tied):
    chosen = settings(**KINDS[kind], z_loss=1e-3)
    if not tied and "head" in kind:
        pytest.skip("the head has its own matrix")
    model = model_for(chosen, share_input_output_layers=tied)
    batch = OneBatch(rows([101, 80, 97], masked=3)).batch(0)  # 300 positions: two chunks and a part of one
    expected_loss, expected = plain_gradients(model, batch, chosen.z_loss)
    loss, count, found = gradients(model, batch, chosen)
    assert count == 97 + 76 + 93
    assert loss == pytest.approx(expected_loss, rel=1e-5)
    assert close(expected, found)


@kinds
def test_checkpointing_changes_nothing(kind):
    # fault F12
    dropout = {} if "full" in kind else {"lora_parameters": {"rank": 4, "scale": 2.0, "dropout": 0.3}}
    plain = settings(**{**KINDS[kind], **dropout})
    less = settings(**{**KINDS[kind], **dropout}, grad_checkpoint=True)
    model = model_for(plain, num_transformer_layers=3)
    batch = OneBatch(rows([20, 20])).batch(0)
    loss, _, expected = gradients(model, batch, plain, iteration=4)
    again, _, found = gradients(model, batch, less, iteration=4)
    assert again == pytest.approx(loss, rel=1e-6)
    assert close(expected, found, 1e-6)
    other, _, _ = gradients(model, batch, less, iteration=5)
    assert (other != loss) == bool(dropout)


def test_padding_and_batch_mates_change_nothing():
    # fault F1: a row of L tokens has L - 1 targets, wherever it stands
    chosen = settings(**KINDS["lora"])
    model = model_for(chosen)
    short, long = rows([3, 9])
    alone = [gradients(model, OneBatch([row]).batch(0), chosen) for row in (short, long)]
    together = gradients(model, OneBatch([short, long], length=16).batch(0), chosen)
    assert [count for _, count, _ in alone] == [2, 8]
    assert together[1] == 10
    assert together[0] == pytest.approx(alone[0][0] + alone[1][0], rel=1e-5)
    assert close({name: alone[0][2][name] + alone[1][2][name] for name in together[2]}, together[2])


@pytest.mark.parametrize("checkpoint", [False, True])
def test_a_packed_sequence_has_the_loss_of_the_separate_ones(checkpoint):
    chosen = settings(**KINDS["lora"], grad_checkpoint=checkpoint)
    model = model_for(chosen)
    separate = rows([5, 11, 7], masked=1)
    sums = [gradients(model, OneBatch([row]).batch(0), chosen) for row in separate]
    packed = Batches(separate, batch_size=4, seed=0, max_seq_length=32, pack=True).batch(0)
    assert packed.tokens.shape[0] == 1
    loss, count, found = gradients(model, packed, chosen)
    assert count == sum(targets for _, targets, _ in sums)
    assert loss == pytest.approx(sum(value for value, _, _ in sums), rel=1e-5)
    assert close({name: sum(each[2][name] for each in sums) for name in found}, found)


def test_the_mask_of_a_packed_row():
    mask = np.array(packed_mask(mx.array([[0, 0, 1, 1, -1]])))[0, 0]
    assert mask.astype(int).tolist() == [
        [1, 0, 0, 0, 0],
        [1, 1, 0, 0, 0],
        [0, 0, 1, 0, 0],
        [0, 0, 1, 1, 0],
        [0, 0, 0, 0, 1],
    ]


def test_evaluation_is_the_same_sum_without_dropout():
    chosen = settings(lora_parameters={"rank": 4, "scale": 2.0, "dropout": 0.5})
    model = model_for(chosen)
    batch = OneBatch(rows([12, 9])).batch(0)
    model.eval()
    total, count = summed_loss(model, hidden_states(model, batch.tokens), batch.tokens, batch.counted, chunk=5)
    assert total.item() == pytest.approx(plain_loss(model, batch).item(), rel=1e-5)
    assert count.item() == 19


def test_sixteen_bit_models_have_a_float32_loss():
    chosen = settings(**KINDS["lora"])
    model = model_for(chosen)
    batch = OneBatch(rows([12])).batch(0)
    expected = gradients(model, batch, chosen)
    adapters = model.trainable_parameters()
    model.set_dtype(mx.bfloat16)
    model.update(adapters)
    total, _, found = gradients(model, batch, chosen)
    assert total == pytest.approx(expected[0], rel=2e-2)
    assert {array.dtype for array in found.values()} == {np.dtype(np.float32)}


def test_only_what_is_trained_has_a_gradient_and_the_model_is_as_before():
    chosen = settings(**KINDS["lora"], num_layers=1)
    model = model_for(chosen)
    before, kept = frozen(model), dict(tree_flatten(model.parameters()))
    _, _, found = gradients(model, OneBatch(rows([9])).batch(0), chosen)
    assert {name.split(".")[2] for name in found} == {"1"}
    assert same(before, frozen(model))
    assert all(array is kept[name] for name, array in tree_flatten(model.parameters()))
