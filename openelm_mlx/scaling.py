"""OpenELM's layer-wise scaling: from multipliers to widths, and back.

Early layers have few heads and a narrow feed-forward network, late layers many and a wide one (paper, section 2.1;
apple/corenet `general_gpt.py` and `math_utils.py`). Nothing else in the project computes a width.
"""

import math
from collections.abc import Sequence
from itertools import product


def make_divisible(value: float, divisor: int) -> int:
    """`value` rounded to a multiple of `divisor`, at least one, and never more than 10 % below `value`."""
    rounded = max(divisor, int(value + divisor / 2) // divisor * divisor)
    return rounded + divisor if rounded < 0.9 * value else rounded


def interpolate(bounds: Sequence[float], num_layers: int) -> list[float]:
    """Multipliers for each layer between two bounds, rounded to two decimals.

    The rounding comes *before* `make_divisible`: without it 270M layer 5 gets 12 heads instead of 16.
    """
    low, high = bounds
    if num_layers == 1:
        return [round(low, 2)]
    step = (high - low) / (num_layers - 1)  # the order of operations is np.linspace's: it decides ties
    return [round(i * step + low, 2) for i in range(num_layers - 1)] + [round(high, 2)]


def find_bounds(dims: Sequence[int], model_dim: int, divisor: int) -> tuple[float, float] | None:
    """Two-decimal bounds whose interpolation gives `dims`; None where no such pair exists.

    OpenELM's own (0.5, 1.0) and (0.5, 4.0) are among the round numbers tried first, so a published model gets
    its published configuration back.
    """

    def reproduces(bounds: tuple[float, float]) -> bool:
        per_layer = interpolate(bounds, len(dims))
        return all(make_divisible(m * model_dim, divisor) == d for m, d in zip(per_layer, dims, strict=True))

    round_numbers = [i / 2 for i in range(1, 17)]
    exact = (round(dims[0] / model_dim, 2), round(dims[-1] / model_dim, 2))
    return next((bounds for bounds in [*product(round_numbers, round_numbers), exact] if reproduces(bounds)), None)


def ffn_multipliers(dims: Sequence[int], model_dim: int) -> tuple[list[float], int]:
    """(multipliers, divisor) that give these feed-forward widths back.

    The divisor is the largest power of two, up to CoreNet's 256, that divides every width.
    """
    divisor = math.gcd(*dims, 256)
    bounds = find_bounds(dims, model_dim, divisor)
    return (interpolate(bounds, len(dims)) if bounds else [d / model_dim for d in dims]), divisor
