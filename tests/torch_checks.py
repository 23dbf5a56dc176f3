"""What tests of the PyTorch reader ask of every file: it is read whole, or refused in one line that names it."""

from pathlib import Path
from typing import Any

import pytest

from openelm_mlx.convert.torch_file import read_torch_file
from openelm_mlx.errors import CheckpointError
from openelm_mlx.tensors import StoredTensor


def refusal(path: Path) -> str:
    """The one line that reading `path` must end with. It names the file."""
    with pytest.raises(CheckpointError) as caught:
        read_everything(path)
    message = str(caught.value)
    assert str(path) in message
    assert "\n" not in message
    assert len(message) < len(str(path)) + 400
    return message


def read_or_refused(path: Path) -> int:
    """How many tensors could be read of a file that may be refused: none if it was."""
    try:
        return read_everything(path)
    except CheckpointError:
        return 0


def read_everything(path: Path) -> int:
    """Reads a file and every tensor in it; how many there are."""

    def walk(value: Any) -> int:
        if isinstance(value, StoredTensor):
            assert value.read().shape == value.shape
            return 1
        if isinstance(value, dict):
            return sum(map(walk, value.values()))
        return sum(map(walk, value)) if isinstance(value, list | tuple) else 0

    return walk(read_torch_file(path))
