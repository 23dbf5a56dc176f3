"""Tensors that stay in their file until asked for, and the few dtypes that checkpoints use.

Readers (safetensors, PyTorch) hand out `StoredTensor`s; whoever needs values reads rows. bfloat16 has no numpy dtype:
its values travel as uint16 bit patterns and become bfloat16 in `to_mlx`.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np

# safetensors' spelling of a dtype -> (numpy dtype that carries its bits, MLX name). float64 has no MLX GPU type.
_DTYPES: dict[str, tuple[str, str]] = {
    "F64": ("float64", "float64"),
    "F32": ("float32", "float32"),
    "F16": ("float16", "float16"),
    "BF16": ("uint16", "bfloat16"),
    "I64": ("int64", "int64"),
    "I32": ("int32", "int32"),
    "I16": ("int16", "int16"),
    "I8": ("int8", "int8"),
    "U64": ("uint64", "uint64"),
    "U32": ("uint32", "uint32"),
    "U16": ("uint16", "uint16"),
    "U8": ("uint8", "uint8"),
    "BOOL": ("bool_", "bool_"),
}
_ITEMSIZES = {code: max(1, int("".join(filter(str.isdigit, code)) or 8) // 8) for code in _DTYPES}  # "BF16" -> 2
FLOATING = ("F64", "F32", "F16", "BF16")
CODES = {mlx_name: code for code, (_, mlx_name) in _DTYPES.items()}  # "bfloat16" -> "BF16"


def numpy_dtype(code: str) -> "np.dtype":
    """The numpy dtype that carries the bits of a safetensors dtype code."""
    import numpy as np  # loading reads headers only, and importing numpy takes longer than that

    return np.dtype(_DTYPES[code][0])


def itemsize(code: str) -> int:
    """Bytes of one value."""
    return _ITEMSIZES[code]


def mlx_name(code: str) -> str:
    """`BF16` -> `bfloat16`: the spelling of `mlx.core` and of `torch_dtype` in a config."""
    return _DTYPES[code][1]


def known_dtype(code: object) -> bool:
    """Whether a dtype code is one that this project reads."""
    return code in _DTYPES


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a file: its name, dtype code (safetensors' spelling), shape, and a way to read rows of it.

    `read_rows(start, stop)` gives rows [start, stop) of axis 0 as a C-contiguous numpy array of `numpy_dtype(dtype)`;
    a scalar counts as one row.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    read_rows: "Callable[[int, int], np.ndarray]"

    @property
    def num_rows(self) -> int:
        return self.shape[0] if self.shape else 1

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * itemsize(self.dtype)

    def read(self) -> "np.ndarray":
        """The whole tensor, shape `self.shape`."""
        return self.read_rows(0, self.num_rows).reshape(self.shape)

    def renamed(self, name: str) -> "StoredTensor":
        return replace(self, name=name)

    def transposed(self) -> "StoredTensor":
        """A matrix with its axes exchanged; asked for any row, it reads the whole, so this is for small ones."""
        return replace(
            self, shape=self.shape[::-1], read_rows=lambda start, stop: self.read().T[start:stop].copy(order="C")
        )

    def first_rows(self, count: int) -> "StoredTensor":
        """The same tensor cut to its first `count` rows (CoreNet pads the vocabulary)."""
        return replace(self, shape=(count, *self.shape[1:]))


def to_mlx(values: "np.ndarray", code: str) -> Any:
    """Numpy bits of a given dtype code as an `mx.array` of the real dtype."""
    import mlx.core as mx  # a safetensors copy never needs it

    array = mx.array(values)
    return array.view(mx.bfloat16) if code == "BF16" else array


def from_mlx(array: Any) -> "np.ndarray":
    """The bits of an `mx.array` as numpy (bfloat16 as uint16). Evaluates it."""
    import mlx.core as mx
    import numpy as np

    return np.array(array.view(mx.uint16) if array.dtype == mx.bfloat16 else array)
