"""What a PyTorch checkpoint may name: how tensors are rebuilt, storage types and dtypes, each as an inert value.

torch.save writes a tensor as "call torch._utils._rebuild_tensor_v2 with a storage, offset, shape, strides ...". Here
that name stands for a function of ours, which looks at its arguments (they may be anything) and builds a StoredTensor.
Arguments of a wrong kind are a TypeError, for the interpreter to report.
"""

import re
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ..tensors import CODES, StoredTensor
from .torch_tensor import Storage, stored_tensor

STORAGE_DTYPES: dict[str, str | None] = {
    "torch.DoubleStorage": "F64",
    "torch.FloatStorage": "F32",
    "torch.HalfStorage": "F16",
    "torch.BFloat16Storage": "BF16",
    "torch.LongStorage": "I64",
    "torch.IntStorage": "I32",
    "torch.ShortStorage": "I16",
    "torch.CharStorage": "I8",
    "torch.ByteStorage": "U8",
    "torch.BoolStorage": "BOOL",
    "torch.storage.UntypedStorage": None,
}
DTYPES = {f"torch.{name.rstrip('_')}": code for name, code in CODES.items()}  # "torch.bool" -> "BOOL"
OTHER_DTYPE = re.compile(r"torch\.((float|complex|q?u?int|bits)\d\w*|\w+Storage)")


@dataclass(frozen=True)
class Name:
    """What naming a function or class of torch leaves on the stack."""

    name: str


def _tensor(storage: Any, offset: Any, shape: Any, strides: Any, dtype: str | None, bits: Any) -> StoredTensor:
    """`bits`, the negative or conjugate bit, says that the stored numbers are not quite the tensor's."""
    if type(storage) is not Storage or type(shape) is not tuple or type(strides) is not tuple:
        raise TypeError
    if bits:
        raise storage.file.error("holds a tensor that is stored negated or conjugated: save it after resolve_neg()")
    code = dtype or storage.dtype
    if code is None:
        raise TypeError
    return stored_tensor(storage, code, offset, shape, strides)


def _tensor_v1(storage: Any, offset: Any, shape: Any, strides: Any) -> StoredTensor:
    return _tensor(storage, offset, shape, strides, None, None)


def _tensor_v2(
    storage: Any, offset: Any, shape: Any, strides: Any, _grad: Any, _hooks: Any, bits: Any = None
) -> StoredTensor:
    return _tensor(storage, offset, shape, strides, None, bits)


def _tensor_v3(
    storage: Any, offset: Any, shape: Any, strides: Any, _grad: Any, _hooks: Any, dtype: Any, bits: Any = None
) -> StoredTensor:
    if type(dtype) is not str:  # before it is looked up: to hash a tuple in a tuple in a tuple ... can end the process
        raise TypeError
    return _tensor(storage, offset, shape, strides, DTYPES[dtype], bits)


def _parameter(tensor: Any, _grad: Any, _hooks: Any, _state: Any = None) -> StoredTensor:
    if type(tensor) is not StoredTensor:
        raise TypeError
    return tensor


def _size(lengths: Any) -> tuple[Any, ...]:
    if type(lengths) is not tuple:
        raise TypeError
    return lengths


# What a file may call. All of them look at their arguments and build; an OrderedDict is filled by later instructions,
# so it takes no arguments: copying a list each time it is named could fill the memory.
CALLS: dict[str, Callable[..., Any]] = {
    "collections.OrderedDict": lambda: OrderedDict(),
    "torch.Size": _size,
    "torch._utils._rebuild_tensor": _tensor_v1,
    "torch._utils._rebuild_tensor_v2": _tensor_v2,
    "torch._utils._rebuild_tensor_v3": _tensor_v3,
    "torch._utils._rebuild_parameter": _parameter,
    "torch._utils._rebuild_parameter_with_state": _parameter,
}
