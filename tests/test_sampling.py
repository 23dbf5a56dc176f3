"""Samplers against the distributions they promise, and the repetition penalty against its formula."""

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from openelm_mlx import sampling
from openelm_mlx.errors import GenerationError
from openelm_mlx.sampling import keep_min_p, keep_top_k, keep_top_p, make_logits_processors, make_sampler
from openelm_mlx.sampling_arguments import _REPETITION_CONTEXT_SIZE

PROBS = np.array([0.5, 0.25, 0.15, 0.07, 0.03])
LOGPROBS = mx.array(np.log(PROBS)[None].astype(np.float32))


def kept(filtered: mx.array) -> list[int]:
    return np.flatnonzero(np.isfinite(np.array(filtered[0]))).tolist()


@pytest.mark.parametrize(
    ("top_p", "expected"), [(0.4, [0]), (0.6, [0, 1]), (0.74, [0, 1]), (0.76, [0, 1, 2]), (1.0, [0, 1, 2, 3, 4])]
)
def test_top_p_keeps_the_smallest_set_that_reaches_p(top_p, expected):
    assert kept(keep_top_p(LOGPROBS, top_p)) == expected


@pytest.mark.parametrize(
    ("min_p", "expected"), [(0.01, [0, 1, 2, 3, 4]), (0.1, [0, 1, 2, 3]), (0.4, [0, 1]), (1.0, [0])]
)
def test_min_p_is_relative_to_the_likeliest(min_p, expected):
    assert kept(keep_min_p(LOGPROBS, min_p)) == expected


@given(st.lists(st.integers(-5, 5), min_size=2, max_size=12), st.integers(1, 11))
def test_top_k_keeps_k_of_the_likeliest(values, k):
    k = min(k, len(values) - 1)
    logits = mx.array([values], dtype=mx.float32)
    survivors = kept(keep_top_k(logits, k))
    assert len(survivors) == k
    assert sorted((values[i] for i in survivors), reverse=True) == sorted(values, reverse=True)[:k]


def test_the_input_of_a_filter_is_left_alone():
    before = np.array(LOGPROBS)
    mx.eval(keep_top_k(LOGPROBS, 2), keep_top_p(LOGPROBS, 0.5), keep_min_p(LOGPROBS, 0.5))
    assert (np.array(LOGPROBS) == before).all()


def test_frequencies_follow_the_distribution():
    sampler = make_sampler(temp=1.0, seed=0)
    counts = np.bincount(np.array(sampler(mx.broadcast_to(LOGPROBS, (20000, 5)))), minlength=5)
    assert np.abs(counts / 20000 - PROBS).max() < 0.015


def test_temperature_sharpens():
    sampler = make_sampler(temp=0.5, seed=0)
    counts = np.bincount(np.array(sampler(mx.broadcast_to(LOGPROBS, (20000, 5)))), minlength=5)
    assert np.abs(counts / 20000 - PROBS**2 / (PROBS**2).sum()).max() < 0.015


def test_seed_decides_within_one_process_too():  # fault D14
    def draw(seed):
        sampler = make_sampler(temp=1.0, seed=seed)
        return [sampler(LOGPROBS).item() for _ in range(30)]

    assert draw(1) == draw(1)
    assert draw(1) != draw(2)
    assert draw(None) != draw(None)


def test_temperature_zero_is_greedy():
    assert make_sampler(temp=0, top_p=0.5, seed=3) is None


@pytest.mark.parametrize(
    "setting",
    [{"temp": -1}, {"top_p": 0}, {"top_p": 1.1}, {"min_p": 2}, {"top_k": -1}, {"seed": -1}, {"temp": float("nan")}],
)
def test_a_setting_out_of_range_is_named(setting):
    with pytest.raises(GenerationError, match=next(iter(setting))):
        make_sampler(**{"temp": 1.0} | setting)


def test_penalty_lowers_positive_and_negative_logits():  # fault D11
    (penalise,) = make_logits_processors(1.25)
    logits = penalise(mx.array([0, 1, 1]), mx.array([[2.0, -2.0, 2.0, -2.0]]))
    assert np.allclose(np.array(logits), [[1.6, -2.5, 2.0, -2.0]])


@pytest.mark.parametrize(("window", "penalised"), [(64, True), (20, False)])
def test_penalty_window(window, penalised):  # fault D11: last seen 25 tokens back
    (penalise,) = make_logits_processors(2.0, window)
    tokens = mx.array([3] + [1] * 25)
    assert (penalise(tokens, mx.array([[1.0, 1.0, 1.0, 1.0]]))[0, 3].item() == 0.5) == penalised


def test_no_penalty_is_no_processor():
    assert make_logits_processors(None) == make_logits_processors(1.0) == []
    with pytest.raises(GenerationError, match="repetition_penalty"):
        make_logits_processors(0.0)


def test_the_flags_default_is_the_librarys():
    assert _REPETITION_CONTEXT_SIZE == sampling.REPETITION_CONTEXT_SIZE
