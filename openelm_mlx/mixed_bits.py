"""The recipe `mixed`: two bits more where a model is most easily hurt, or where they cost next to nothing.

Raised are the embedding (with an untied head), the first and the last layer, and the narrow layers that OpenELM begins
with: those with fewer than 0.6 of the mean layer's weights. That makes 0-3 and the last of 270M's 16 layers, 0-4 of
450M's 20, 0-5 of 1.1B's 28, 0-7 of 3B's 36; the narrow ones hold about a tenth of the layers' weights. Measured on the
bundled model: docs/quantization.md.
"""

import math
from collections.abc import Mapping

from .errors import ConfigError

RAISED_BITS = {2: 4, 3: 5, 4: 6, 5: 8, 6: 8}  # two more; MLX packs no 7
_NARROW = 0.6  # of the mean layer's weights
_LAYERS = "transformer.layers."


def raised_bits(bits: int, mode: str) -> int:
    """The bits of what is raised. Raises ConfigError where there are none to add."""
    if mode != "affine":
        raise ConfigError(f"the recipe mixed needs --q-mode affine, whose bits can be chosen; got {mode}")
    if bits not in RAISED_BITS:
        raise ConfigError(f"the recipe mixed adds two bits, and {bits} are the most there are; leave it out")
    return RAISED_BITS[bits]


def raised_layers(shapes: Mapping[str, tuple[int, ...]]) -> list[int]:
    """Numbers of the layers that get more bits, of a model whose matrices (module path -> shape) these are."""
    sizes: dict[int, int] = {}
    for path, shape in shapes.items():
        if path.startswith(_LAYERS):
            layer = int(path.removeprefix(_LAYERS).partition(".")[0])
            sizes[layer] = sizes.get(layer, 0) + math.prod(shape)
    mean, last = sum(sizes.values()) / len(sizes), max(sizes)
    return [layer for layer, size in sorted(sizes.items()) if layer in (0, last) or size < _NARROW * mean]


def is_raised(path: str, layers: list[int]) -> bool:
    """Whether a module belongs to one of these layers."""
    return path.startswith(tuple(f"{_LAYERS}{layer}." for layer in layers))
