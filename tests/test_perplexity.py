"""Perplexity and KL over a text: against a plain computation, whatever the windows, and the bundled model's figure."""

import math

import mlx.core as mx
import numpy as np
import pytest
from artefacts import TINY
from measures import kl
from reference import random_checkpoint, reference_logits, small_config

from openelm_mlx.checkpoint import load_model
from openelm_mlx.config import OpenELMConfig
from openelm_mlx.errors import GenerationError
from openelm_mlx.model import Model
from openelm_mlx.perplexity import kl_divergence, perplexity, predictions
from openelm_mlx.tokenizer import Tokenizer

RAW = small_config(num_transformer_layers=2)
IDS = np.random.default_rng(0).integers(0, 256, 50).tolist()


def small(seed: int = 1) -> Model:
    model = Model(OpenELMConfig.from_dict(RAW))
    model.load_weights([(name, mx.array(value)) for name, value in random_checkpoint(RAW, seed=seed).items()])
    return model


def nats(ids: list[int], context: int) -> list[float]:
    """Of every token but the first, by hand: windows that share one token."""
    found = []
    for start in range(0, len(ids) - 1, context - 1):
        window = ids[start : start + context]
        logits = reference_logits(random_checkpoint(RAW, seed=1), RAW, window[:-1])
        found += [
            math.log(np.exp(row - row.max()).sum()) + row.max() - row[target]
            for row, target in zip(logits, window[1:], strict=True)
        ]
    return found


@pytest.mark.parametrize("context", [2, 7, 50, 128])
def test_every_token_but_the_first_is_predicted_once(context):
    expected = nats(IDS, context)
    found = perplexity(small(), IDS, context=context)
    assert found.tokens == len(IDS) - 1 == len(expected)
    assert found.nats == pytest.approx(np.mean(expected), rel=1e-5)
    assert found.perplexity == pytest.approx(math.exp(np.mean(expected)), rel=1e-4)


def test_the_models_own_context_is_the_default_and_progress_counts_tokens():
    ids, counted = IDS * 4, []
    assert perplexity(small(), ids, tick=counted.append) == perplexity(small(), ids, context=128)
    assert sum(counted) == len(ids) - 1


def test_long_windows_are_cut_into_rows(monkeypatch):
    whole = perplexity(small(), IDS)
    monkeypatch.setattr("openelm_mlx.perplexity._ROWS", 8)
    assert perplexity(small(), IDS).nats == pytest.approx(whole.nats, rel=1e-6)
    assert max(rows.shape[0] for rows, _ in predictions(small(), IDS)) == 8


def test_sixteen_bit_models_are_summed_in_float32():
    model = small()
    model.set_dtype(mx.bfloat16)
    assert {rows.dtype for rows, _ in predictions(model, IDS)} == {mx.float32}


def test_kl_is_that_of_the_logits_and_zero_to_itself():
    one, other = small(1), small(2)
    ids = mx.array(IDS[:-1])[None]
    assert kl_divergence(one, other, IDS) == pytest.approx(kl(np.array(one(ids)[0]), np.array(other(ids)[0])), rel=1e-4)
    assert kl_divergence(one, one, IDS) == 0


def test_the_bundled_model_on_text_it_never_saw():
    text = (TINY.parent / "texts" / "held_out.txt").read_text(encoding="utf-8")[:1500]
    found = perplexity(load_model(TINY, dtype="float32"), Tokenizer.from_path(TINY).encode(text))
    assert 3.5 < found.nats < 4.8  # trained to 3.996 on the whole of these books


@pytest.mark.parametrize(
    ("ids", "context", "message"),
    [
        ([1], None, "1 tokens, of which none can be predicted"),
        ([1, 2], 1, "context of 1"),
        ([1, 256], None, "from 0 to 255"),
        ([-1, 2], None, "ids from -1"),
    ],
)
def test_what_cannot_be_measured_is_refused(ids, context, message):
    with pytest.raises(GenerationError, match=message):
        perplexity(small(), ids, context=context)
