"""What is said of a handful of trials: intervals that hold what they promise, drift, and a test against a baseline."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from openelm_mlx.benchmarks.baseline import check_works, compare_records
from openelm_mlx.benchmarks.trial_statistics import chance_of_lower, drift, interval
from openelm_mlx.errors import RecordError

RATES = st.lists(st.floats(1, 1000), min_size=2, max_size=12)


@pytest.mark.parametrize(("trials", "least"), [(5, 0.88), (11, 0.90), (20, 0.90)])
def test_the_interval_covers_the_true_median_about_as_often_as_it_says(trials, least):
    """Skewed samples, as times are: mostly at the best, sometimes much slower."""
    draw = np.random.default_rng(7)
    covered = 0
    for _ in range(300):
        low, high = interval(100 / (1 + draw.exponential(0.1, trials)))
        covered += low <= 100 / (1 + 0.1 * np.log(2)) <= high
    assert least <= covered / 300 <= 0.995


@given(RATES)
def test_the_interval_holds_the_median_lies_within_the_range_and_repeats(values):
    low, high = interval(values)
    assert min(values) <= low <= np.median(values) <= high <= max(values)
    assert interval(values) == (low, high)


def test_one_value_has_no_interval():
    assert interval([5.0]) is None
    assert interval([]) is None


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([100, 80, 60], -0.4),  # fault I8
        ([60, 80, 100], 40 / 60),
        ([100, 99, 98, 97, 96], None),  # a steady 4 % is no drift
        ([100, 60, 100, 60, 100], None),  # large, without an order
        ([284, 127, 117], -167 / 284),  # no rate loses more than all
        ([100, 50], None),
        ([], None),
        ([0.0, 0.0, 0.0], None),
    ],
)
def test_drift(values, expected):
    assert drift(values) == (None if expected is None else pytest.approx(expected))


def test_one_outlier_is_no_drift():
    assert drift([100, 101, 99, 100, 60]) is None


@given(RATES, RATES)
def test_a_chance_is_a_chance_and_the_same_again(new, old):
    chance = chance_of_lower(new, old)
    assert 0 < chance <= 1
    assert chance_of_lower(new, old) == chance


def test_chances_are_those_of_the_rank_test():
    assert chance_of_lower([1, 2, 3], [4, 5, 6]) == pytest.approx(1 / 20)
    assert chance_of_lower([1, 2, 3, 4, 5], [6, 7, 8, 9, 10]) == pytest.approx(1 / 252)
    assert chance_of_lower([4, 5, 6], [1, 2, 3]) == 1
    assert chance_of_lower([1, 2], [1, 2]) > 0.5
    many = chance_of_lower(list(range(30)), list(range(30)))  # too many splits to count: drawn
    assert many == pytest.approx(0.5, abs=0.05)


def record(rates, **machine):
    """A record of one shape, its trials at these decode rates."""
    trials = [{"prompt_tps": 1000.0, "generation_tps": rate} for rate in rates]
    result = {
        "model": "m", "precision": "bfloat16", "prompt_tokens": 16, "generation_tokens": 8, "batch_size": 1,
        "decoder": "eager", "variant": "", "prompt_tps": 1000.0, "generation_tps": float(np.median(rates)),
        "trials": trials,
    }  # fmt: skip
    return {"machine": {"chip": "X", "backend": "metal", **machine}, "results": [result]}


def test_a_slower_run_is_a_regression_and_noise_is_not():
    before = record([100, 101, 99, 100, 102])
    decode = [
        compare_records(record(now), before, "b.json")[1] for now in ([80, 81, 79, 80, 82], [99, 101, 100, 98, 102])
    ]
    assert [verdict.is_regression for verdict in decode] == [True, False]
    assert "SLOWER, p = 0.004" in str(decode[0])
    assert "(-20.0 %)" in str(decode[0])


def test_a_certain_but_small_change_is_no_regression():
    assert not compare_records(record([99.0] * 5), record([100.0] * 5), "b")[1].is_regression


def test_too_few_trials_tell_nothing_and_that_is_said():
    verdict = compare_records(record([10, 10]), record([100, 100, 100]), "b")[1]
    assert not verdict.is_regression
    assert "too few trials" in str(verdict)


@pytest.mark.parametrize(
    ("machine", "words"),
    [({"chip": "Y"}, "chip 'Y'"), ({"low_power_mode": True}, "low_power_mode True")],
)
def test_another_machine_or_power_mode_is_no_baseline(machine, words):
    with pytest.raises(RecordError, match=words):
        compare_records(record([1, 1, 1]), record([1, 1, 1], **machine), "b.json")


def test_nothing_in_common_is_no_baseline():
    other = record([1, 1, 1])
    other["results"][0]["prompt_tokens"] = 512
    with pytest.raises(RecordError, match="nothing that this run measures"):
        compare_records(record([1, 1, 1]), other, "b.json")


def test_a_baseline_of_the_first_version_does_not_tell_enough():
    old = record([1, 1, 1])
    del old["results"][0]["precision"]
    with pytest.raises(RecordError, match="version 1, which does not tell the precision"):
        check_works(old, [{"model": "m"}], "b.json")


def test_works_are_told_apart_in_a_verdict():
    batch = record([1, 1, 1])
    batch["results"][0]["batch_size"] = 4
    assert "16+8 x 4 tokens" in compare_records(batch, batch, "b.json")[0].what
