"""A LoRA or DoRA checkpoint as the one model that it computes: every adapted matrix is summed while its rows are read.

    linear layer   W + s B A                        DoRA scales each row of that to its magnitude
    embedding      E + s (B A)'                     a tied output head keeps E, so the model becomes an untied one

Sums are taken in float64 and rounded once, to float32. Axes: I input, O output, R rank, V vocabulary, E model_dim.
"""

from dataclasses import replace
from functools import partial

import numpy as np

from ..adapter_config import EMBEDDING_PATH
from ..tensors import StoredTensor
from .adapter_checkpoint import AdapterPart, CheckpointAdapter
from .computed import floats, mapped
from .sources import EMBEDDING, HEAD, Source

_SHORTEST_ROW = 1e-30  # a row of zeros stays zeros


def merged(source: Source, *, tie: bool = False) -> Source:
    """`source` with its adapter summed in, and none beside it.

    An adapter of the input embedding unties a tied output head; `tie` leaves that adapter out instead, so that the
    rest stays exact and the model tied.
    """
    adapter, config = source.adapter, source.config
    assert adapter is not None
    tensors = dict(source.tensors)
    if unties(source):
        if tie:
            adapter = adapter.without_embedding()
        else:
            config = replace(config, share_input_output_layers=False)
            tensors[HEAD] = tensors[EMBEDDING].renamed(HEAD)
    for path, part in adapter.parts.items():
        name = f"{path}.weight"
        change = _embedding_rows if path == EMBEDDING_PATH else _linear_rows
        tensors[name] = mapped(source.tensors[name], partial(change, part, adapter.scale))
    return replace(source, tensors=tensors, config=config, adapter=None, is_computed=True)


def unties(source: Source) -> bool:
    """Whether merging gives the model an output head of its own."""
    adapter = source.adapter
    if adapter is None or adapter.embedding is None or adapter.head_follows:
        return False
    return source.config.share_input_output_layers


def base_of(source: Source) -> tuple[Source, CheckpointAdapter]:
    """The base model alone, byte for byte, and the adapter that was trained on it."""
    assert source.adapter is not None
    return replace(source, adapter=None), source.adapter


def _linear_rows(part: AdapterPart, scale: float, rows: np.ndarray, start: int, stop: int) -> np.ndarray:
    """Rows [start, stop) of W + s B A, (rows, I)."""
    b = floats(part.b.read_rows(start, stop), part.b.dtype)  # (rows, R)
    summed = rows + scale * (b @ _whole(part.a))
    if part.magnitude is None:
        return summed
    lengths = np.maximum(np.linalg.norm(summed, axis=1), _SHORTEST_ROW)
    magnitude = floats(part.magnitude.read_rows(start, stop), part.magnitude.dtype)
    return summed * (magnitude / lengths)[:, None]


def _embedding_rows(part: AdapterPart, scale: float, rows: np.ndarray, start: int, stop: int) -> np.ndarray:
    """Rows [start, stop) of E + s (B A)', (rows, E)."""
    a = floats(part.a.read()[:, start:stop], part.a.dtype)  # (R, rows)
    return rows + scale * (a.T @ _whole(part.b).T)


def _whole(tensor: StoredTensor) -> np.ndarray:
    return floats(tensor.read(), tensor.dtype)
