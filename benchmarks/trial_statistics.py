"""What a handful of trials says: a median, an interval around it, whether they drift, whether two sets differ.

Trials are few and their errors are not normal (another program, heat), so nothing here assumes a distribution: medians,
the bootstrap, Theil-Sen slopes and ranks.
"""

import math
from collections.abc import Sequence
from itertools import combinations
from statistics import median

import numpy as np

CONFIDENCE = 0.95
_RESAMPLES = 2000
_MIN_DRIFT_TRIALS = 3
_DRIFT = 0.1  # of the beginning, from the first trial to the last
_DRIFT_ORDER = 0.6  # Kendall's tau from which the order is taken to be no accident
_EXACT_SPLITS = 20_000  # more are drawn at random instead of counted


def interval(values: Sequence[float], confidence: float = CONFIDENCE) -> tuple[float, float] | None:
    """A percentile bootstrap interval of the median. None for fewer than two values, which say nothing of spread.

    The draws are seeded: the same values give the same interval. With five values it is their whole range.
    """
    if len(values) < 2:
        return None
    draws = np.random.default_rng(0).choice(np.asarray(values, dtype=float), (_RESAMPLES, len(values)))
    tail = (1 - confidence) / 2
    low, high = np.quantile(np.median(draws, axis=1), [tail, 1 - tail])
    return float(low), float(high)


def drift(values: Sequence[float]) -> float | None:
    """The change from the first trial to the last along a robust line, as a share of its beginning (-0.4: 40 % less).

    None where there is none to speak of: fewer than three trials, less than a tenth, or no clear order.
    """
    if len(values) < _MIN_DRIFT_TRIALS:
        return None
    steps = [(later - earlier, j - i) for (i, earlier), (j, later) in combinations(enumerate(values), 2)]
    slope = median(rise / distance for rise, distance in steps)
    beginning = median(value - slope * i for i, value in enumerate(values))
    if beginning <= 0:
        return None
    change = max(-1.0, slope * (len(values) - 1) / beginning)  # a rate loses no more than all
    order = sum((rise > 0) - (rise < 0) for rise, _ in steps) / len(steps)
    return change if abs(change) > _DRIFT and abs(order) >= _DRIFT_ORDER else None


def chance_of_lower(new: Sequence[float], old: Sequence[float]) -> float:
    """One-sided permutation test on ranks: how likely `new` is to lie so low by chance if nothing changed.

    Counted over all ways to split the values in two where these are few enough, else over seeded random ones.
    """
    values = [*new, *old]
    ranks = np.array([sum(other < value for other in values) + sum(other == value for other in values) / 2
                      for value in values])  # fmt: skip
    size, found = len(new), ranks[: len(new)].sum()
    if math.comb(len(values), size) <= _EXACT_SPLITS:
        sums = np.array([ranks[list(chosen)].sum() for chosen in combinations(range(len(values)), size)])
        return float(np.mean(sums <= found))
    draws = np.random.default_rng(0).permuted(np.tile(ranks, (_EXACT_SPLITS, 1)), axis=1)[:, :size].sum(axis=1)
    return float((1 + np.sum(draws <= found)) / (1 + _EXACT_SPLITS))
