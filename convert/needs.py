"""What a conversion needs of this machine, told from a configuration alone, before weights are read or fetched."""

import os
from collections.abc import Sequence
from pathlib import Path

from ..atomic import check_space
from ..config import OpenELMConfig
from ..device import available_memory_bytes
from ..errors import OutputError
from ..quantize import Quantization, matrices
from .blocks import BLOCK_BYTES
from .streaming import planned

OTHER_FILES_BYTES = 8 * 2**20  # tokenizer, licence, configuration
# Upper bounds, stated in docs/memory.md. A conversion holds the interpreter, MLX and a tokenizer of 32,000 pieces while
# its files are made; at most 16 row blocks in float32 for the source and for each folder; and a few rows of logits.
_FIXED_BYTES = 192 * 2**20
_BLOCKS = 16
_LOGITS_ROWS = 4 * 64
_FLOAT32_BYTES = 4


def memory_bytes(config: OpenELMConfig, folders: int = 1) -> int:
    """More than a conversion into so many folders at once ever holds, however large the model is."""
    row = _FLOAT32_BYTES * max(shape[1] for shape in matrices(config).values())
    blocks = _BLOCKS * (1 + folders) * max(BLOCK_BYTES, row)  # a block is at least a row
    return _FIXED_BYTES + blocks + _FLOAT32_BYTES * _LOGITS_ROWS * config.vocab_size


def check_memory(config: OpenELMConfig, folders: int = 1) -> None:
    """Raise OutputError when this machine has less memory to give than a conversion may take."""
    needed, available = memory_bytes(config, folders), available_memory_bytes()
    if available < needed:
        raise OutputError(
            f"the conversion needs up to {needed / 1e9:.2f} GB of memory, {available / 1e9:.2f} GB are available; "
            "close other programs" + (", or make one folder at a time" if folders > 1 else "")
        )


def check_disk(
    target: Path,
    config: OpenELMConfig,
    dtype: str,
    quantizations: Sequence[Quantization | None],
    *,
    cache: Path,
    download_bytes: int,
) -> None:
    """Raise OutputError when `target`'s volume lacks room for the folders, and for the download if that goes there."""
    shapes = config.parameter_shapes()
    sizes = [
        sum(tensor.nbytes for group in planned(shapes, dtype, one).values() for tensor in group)
        for one in quantizations
    ]
    parent = next(folder for folder in target.expanduser().absolute().parents if folder.exists())
    shared = os.stat(parent).st_dev == os.stat(cache).st_dev
    check_space(target, sum(sizes) + len(sizes) * OTHER_FILES_BYTES + (download_bytes if shared else 0))
