"""Whether a run that goes on has the data and the base model that it began with: checksums of both."""

import zlib
from collections.abc import Sequence as Several
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten

from .sequences import Sequence

_SAMPLE = 64  # numbers of each array


def data_fingerprint(sequences: Several[Sequence]) -> str:
    """Changes when a token or a mark of the training data does."""
    checksum = 0
    for sequence in sequences:
        checksum = zlib.crc32(sequence.counted.tobytes(), zlib.crc32(sequence.tokens.tobytes(), checksum))
    return f"{len(sequences)}:{checksum:08x}"


def model_fingerprint(model: nn.Module) -> str:
    """Of a model as loaded, from any place: names and shapes of its arrays, and the first numbers of each."""
    arrays: Any = sorted(tree_flatten(model.parameters()))
    shapes = ";".join(f"{name}{array.shape}" for name, array in arrays)
    numbers = mx.concatenate([array.reshape(-1)[:_SAMPLE].astype(mx.float32) for _, array in arrays])
    return f"{zlib.crc32(np.array(numbers).tobytes(), zlib.crc32(shapes.encode())):08x}"
