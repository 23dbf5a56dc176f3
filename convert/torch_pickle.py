"""The pickle in a PyTorch checkpoint, read by an interpreter that can only build tensors and plain containers.

A pickle is a program that may name and call any function of the machine it is read on. So Python's own unpickler is
never used. This interpreter knows the instructions that torch.save writes (pickle protocol 2) and a short list of
names (torch_names.py), each of which means an inert value here. Nothing is imported, nothing in a file is executed,
and every other instruction or name is refused by name. Work and memory are bounded: see the limits below.
"""

import pickle  # for the names of the instructions only
import pickletools
import struct
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, NoReturn

from ..tensors import StoredTensor
from .torch_names import CALLS, DTYPES, OTHER_DTYPE, STORAGE_DTYPES, Name
from .torch_tensor import SourceFile, Storage

MAX_PICKLE_BYTES = 16 * 2**20  # OpenELM-3B's training checkpoint needs about 0.1 MB
# An instruction makes at most one object, of about 100 bytes. The same checkpoint needs about 40,000.
MAX_INSTRUCTIONS = 500_000
_MAX_NAME_BYTES = 256
_MAX_DEPTH = 50  # whoever walks the result may recurse
_MAX_VALUES = 500_000  # ... and meets shared parts again each time

FindStorage = Callable[[str, str | None, int], Storage]  # (key, dtype, count) of a storage -> where it is

_SCALARS = (str, int, float, bool, type(None), StoredTensor)


def unpickle(data: bytes, position: int, file: SourceFile, find_storage: FindStorage) -> tuple[Any, int]:
    """The object pickled at `position` of `data`, and the position behind it. Raises CheckpointError."""
    machine = _Machine(data, position, file, find_storage)
    try:
        value = machine.run()
    except (IndexError, KeyError, ValueError, TypeError):
        raise file.error("is damaged: its pickle makes no sense; download it again") from None
    _check_plain(value, file)
    return value, machine.position


class _Machine:
    """The state of the interpreter. A frame is the part of the stack since the last MARK."""

    def __init__(self, data: bytes, position: int, file: SourceFile, find_storage: FindStorage):
        self.data, self.position, self.file, self.find_storage = data, position, file, find_storage
        self.stack: list[Any] = []
        self.outer_frames: list[list[Any]] = []
        self.memo: dict[int, Any] = {}

    def run(self) -> Any:
        for _ in range(MAX_INSTRUCTIONS):
            opcode = self.take(1)
            if opcode == pickle.STOP:
                (value,) = self.stack
                return value
            instruction = _INSTRUCTIONS.get(opcode)
            if instruction is None:
                self.refuse_instruction(opcode)
            instruction(self)
        raise self.file.error(f"is refused: its pickle has more than {MAX_INSTRUCTIONS:,} instructions")

    def refuse_instruction(self, opcode: bytes) -> NoReturn:
        name = next((op.name for op in pickletools.opcodes if op.code == opcode.decode("latin-1")), repr(opcode))
        raise self.file.error(
            f"is refused: its pickle contains the instruction {name}, which torch.save does not write; "
            "nothing in it was executed"
        )

    def take(self, count: int) -> bytes:
        chunk = self.data[self.position : self.position + count]
        if len(chunk) != count:
            raise self.file.error("is cut short or damaged: its pickle has no end; download it again")
        self.position += count
        return chunk

    def number(self, layout: str) -> Any:
        return struct.unpack(layout, self.take(struct.calcsize(layout)))[0]

    def line(self) -> str:
        end = self.data.index(b"\n", self.position, self.position + _MAX_NAME_BYTES)
        line = self.take(end + 1 - self.position)
        return line[:-1].decode("ascii")

    def push(self, value: Any) -> None:
        self.stack.append(value)

    def mark(self) -> None:
        self.outer_frames.append(self.stack)
        self.stack = []

    def pop_frame(self) -> list[Any]:
        frame, self.stack = self.stack, self.outer_frames.pop()
        return frame

    def protocol(self) -> None:
        version = self.take(1)[0]
        if version != 2:
            raise self.file.error(
                f"is refused: its pickle has protocol {version}; torch.save's default, 2, is expected"
            )

    def text(self) -> None:
        self.push(self.take(self.number("<I")).decode("utf-8"))

    def long(self) -> None:
        self.push(int.from_bytes(self.take(self.number("<B")), "little", signed=True))

    def pack(self, count: int) -> None:
        """Replaces the last `count` values by a tuple of them."""
        items = tuple(self.stack[-count:])
        if len(items) != count:
            raise IndexError
        self.stack[-count:] = [items]

    def put(self, layout: str) -> None:
        self.memo[self.number(layout)] = self.stack[-1]

    def get(self, layout: str) -> None:
        self.push(self.memo[self.number(layout)])

    def extend(self, items: list[Any]) -> None:
        """Appends to the list on top."""
        if type(self.stack[-1]) is not list:
            raise TypeError
        self.stack[-1].extend(items)

    def update(self, items: list[Any]) -> None:
        """Adds keys and values, alternating, to the dictionary on top."""
        if type(self.stack[-1]) not in (dict, OrderedDict):
            raise TypeError
        for key, value in zip(items[::2], items[1::2], strict=True):
            # Other keys do not occur, and hashing one may recurse or be slow by design.
            if type(key) is not str and not (type(key) is int and abs(key) < 2**31):
                raise self.file.error("is refused: a key of a dictionary is neither a string nor a small number")
            self.stack[-1][key] = value

    def name(self) -> None:
        name = f"{self.line()}.{self.line()}"
        if name in CALLS or name in STORAGE_DTYPES:
            self.push(Name(name))
        elif name in DTYPES:
            self.push(name)
        elif OTHER_DTYPE.fullmatch(name):
            raise self.file.error(f"holds numbers of type {name}, which are not read; those read: {', '.join(DTYPES)}")
        else:
            raise self.file.error(
                f"is refused: it asks for {name!r}, and only tensors and plain containers are read; nothing in it was "
                "executed. Of a file you trust, save the model's state_dict() with torch.save and use that"
            )

    def call(self) -> None:
        arguments, function = self.stack.pop(), self.stack.pop()
        if type(arguments) is not tuple or type(function) is not Name or function.name not in CALLS:
            raise TypeError
        self.push(CALLS[function.name](*arguments))

    def set_state(self) -> None:
        """A state dict carries version numbers as attributes: they are dropped, and nothing else can have a state."""
        state = self.stack.pop()
        if type(self.stack[-1]) is not OrderedDict or type(state) is not dict:
            raise TypeError

    def storage(self) -> None:
        """A reference to a storage: ("storage", type, key, device, count), in old files with a view of it behind."""
        kind, storage_type, key, _device, count, *view = self.stack.pop()
        if kind != "storage" or view not in ([], [None]):
            raise self.file.error("is refused: it refers to something that is not a plain storage")
        if type(storage_type) is not Name or type(key) is not str or type(count) is not int:
            raise TypeError
        if not 0 <= count < 2**48:
            raise self.file.error("is damaged: one of its storages has an impossible length")
        self.push(self.find_storage(key, STORAGE_DTYPES[storage_type.name], count))


_INSTRUCTIONS: dict[bytes, Callable[[_Machine], None]] = {
    pickle.PROTO: _Machine.protocol,
    pickle.MARK: _Machine.mark,
    pickle.NONE: lambda m: m.push(None),
    pickle.NEWTRUE: lambda m: m.push(True),
    pickle.NEWFALSE: lambda m: m.push(False),
    pickle.BININT: lambda m: m.push(m.number("<i")),
    pickle.BININT1: lambda m: m.push(m.number("<B")),
    pickle.BININT2: lambda m: m.push(m.number("<H")),
    pickle.LONG1: _Machine.long,
    pickle.BINFLOAT: lambda m: m.push(m.number(">d")),
    pickle.BINUNICODE: _Machine.text,
    pickle.EMPTY_TUPLE: lambda m: m.push(()),
    pickle.TUPLE1: lambda m: m.pack(1),
    pickle.TUPLE2: lambda m: m.pack(2),
    pickle.TUPLE3: lambda m: m.pack(3),
    pickle.TUPLE: lambda m: m.push(tuple(m.pop_frame())),
    pickle.EMPTY_LIST: lambda m: m.push([]),
    pickle.APPEND: lambda m: m.extend([m.stack.pop()]),
    pickle.APPENDS: lambda m: m.extend(m.pop_frame()),
    pickle.EMPTY_DICT: lambda m: m.push({}),
    pickle.SETITEM: lambda m: m.update([m.stack.pop(), m.stack.pop()][::-1]),
    pickle.SETITEMS: lambda m: m.update(m.pop_frame()),
    pickle.BINPUT: lambda m: m.put("<B"),
    pickle.LONG_BINPUT: lambda m: m.put("<I"),
    pickle.BINGET: lambda m: m.get("<B"),
    pickle.LONG_BINGET: lambda m: m.get("<I"),
    pickle.GLOBAL: _Machine.name,
    pickle.REDUCE: _Machine.call,
    pickle.BUILD: _Machine.set_state,
    pickle.BINPERSID: _Machine.storage,
}


def _check_plain(value: Any, file: SourceFile) -> None:
    """Raise unless `value` is made of plain containers and values, and whoever walks it soon comes to an end."""
    known: dict[int, tuple[int, int]] = {}  # containers looked at: id -> height, values met on a walk

    def measure(value: Any, depth: int) -> tuple[int, int]:
        if type(value) in _SCALARS:
            return 0, 1
        if type(value) not in (dict, OrderedDict, list, tuple):
            raise file.error("is refused: it holds something that is neither a tensor nor a plain container")
        if depth < _MAX_DEPTH and id(value) not in known:
            children = value.values() if isinstance(value, dict) else value
            parts = [measure(child, depth + 1) for child in children]
            known[id(value)] = 1 + max((p[0] for p in parts), default=0), 1 + sum(p[1] for p in parts)
        height, count = known.get(id(value), (_MAX_DEPTH, 0))
        if depth + height > _MAX_DEPTH or count > _MAX_VALUES:
            raise file.error("is refused: its containers are nested too deeply, or repeat each other without end")
        return height, count

    measure(value, 0)
