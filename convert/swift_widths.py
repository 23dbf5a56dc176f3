"""The layer widths that mlx-swift-lm gives an OpenELM: computed anew in Float, not read from config.json.

Its loader reads model_dim, head_dim, num_transformer_layers and ffn_dim_divisor, and takes the published models' bounds
and group count for the rest, so a model of other widths does not fit its own weights there.
Source: ml-explore/mlx-swift-lm, Libraries/MLXLLM/Models/OpenELM.swift.
"""

import numpy as np

from ..config import OpenELMConfig

_QKV_BOUNDS, _FFN_BOUNDS, _GROUPS = (0.5, 1.0), (0.5, 4.0), 4
Widths = list[tuple[int, int, int]]


def swift_widths(config: OpenELMConfig) -> Widths:
    """(query heads, key/value heads, feed-forward width) of every layer that Swift makes."""
    divisor = config.head_dim * _GROUPS
    heads = [
        _divisible(m * np.float32(config.model_dim), divisor) // config.head_dim for m in _steps(_QKV_BOUNDS, config)
    ]
    widths = [_divisible(m * np.float32(config.model_dim), config.ffn_dim_divisor) for m in _steps(_FFN_BOUNDS, config)]
    return [(query, query // _GROUPS, width) for query, width in zip(heads, widths, strict=False)]


def swift_agrees(config: OpenELMConfig) -> bool:
    """Whether these are the widths of the model itself."""
    own = zip(config.num_query_heads, config.num_kv_heads, config.ffn_dims, strict=True)
    return swift_widths(config) == list(own)


def _steps(bounds: tuple[float, float], config: OpenELMConfig) -> list[np.float32]:
    """`stride(from:through:by:)` in Float, each value rounded to two decimals.

    A value is start + i * step, rounded once, and the stride ends with the first one beyond the end.
    """
    if config.num_transformer_layers == 1:
        return []  # a step of infinity
    start, end = map(np.float32, bounds)
    step = (end - start) / np.float32(config.num_transformer_layers - 1)
    values, i = [], 0
    while (value := np.float32(float(start) + i * float(step))) <= end:  # exact in double, then rounded
        values.append(_half_away(value * np.float32(100)) / np.float32(100))
        i += 1
    return values


def _half_away(value: np.float32) -> np.float32:
    """Swift's `round`, for positive values."""
    return np.float32(np.floor(float(value) + 0.5))


def _divisible(value: np.float32, divisor: int) -> int:
    unit = np.float32(divisor)
    down = max(divisor, int((value + unit / np.float32(2)) / unit) * divisor)
    # The factor is a Float there too.
    return down + divisor if np.float32(down) < np.float32(0.9) * value else down
