"""The size of one decode step's graph: how much the host builds and the device launches for a token.

A count, so the same on every run of one machine: a proxy for launches and host time where no GPU can be timed.
"""

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn

_PROMPT = [1, 2, 3, 4]


def decode_step_nodes(model: nn.Module, cache: list[Any], next_token: Callable[[mx.array], mx.array]) -> int:
    """The nodes of a decode step over the next token and the cache arrays.

    next_token: tokens (1, L) -> the token after them (1,), through `model` and `cache`, unevaluated. Two steps go
    first, so that what is built once (an empty cache, joined norm weights) is not counted.
    """
    mx.eval(model.parameters())
    for tokens in (_PROMPT, [5]):
        mx.eval(next_token(mx.array([tokens])), [layer.state for layer in cache])
    last = mx.array([[7]])
    mx.eval(last)
    token = next_token(last)
    return graph_nodes([token, *(array for layer in cache for array in (layer.keys, layer.values))])


def graph_nodes(outputs: list[mx.array]) -> int:
    """How many operations have to run before these arrays are there."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "graph.dot"
        mx.export_to_dot(str(file), *outputs)
        return file.read_text().count("shape=rectangle")
