"""Hostile pickles in PyTorch files: nothing in them runs, nothing grows without bound, each is one CheckpointError.

Fault C6 (loading a pickle runs code). Hostile and damaged archives and tensors are in test_torch_damage.py.
"""

import os
import pickle
import tracemalloc
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch_checks import refusal
from torch_writer import Opcodes, write_legacy_file, write_torch_file

from openelm_mlx.convert import torch_pickle
from openelm_mlx.convert.torch_pickle import MAX_PICKLE_BYTES

FOUR = np.arange(4, dtype=np.float32)


class Calls:
    """Pickles as a call of `function`, with a state or dictionary items behind it."""

    def __init__(self, function: Callable, *arguments: Any, state: Any = None, items: Any = None):
        self.function, self.arguments, self.state, self.items = function, arguments, state, items

    def __reduce__(self) -> tuple:
        return self.function, self.arguments, self.state, None, iter(self.items) if self.items else None

    def __call__(self) -> None:
        """pickle wants what it calls to be callable already when it is written."""


def attacks(command: str, code: str) -> dict[str, tuple[Any, str]]:
    """Ways to run something by being unpickled, and the name that each has to be refused for."""
    system, run = Calls(os.system, command), Calls(eval, code)
    return {
        "os.system": (system, "posix.system"),
        "eval": (run, "eval"),
        "exec": (Calls(exec, code), "exec"),
        "import": (Calls(__import__, "os"), "__import__"),
        "getattr": (Calls(Calls(getattr, Calls(__import__, "os"), "system"), command), "getattr"),
        "nested": ({"state": [({"deep": (1, system)},)]}, "posix.system"),
        "key": ({"a": 1, Calls(hash, run): 2}, "hash"),
        "build": (Calls(OrderedDict, state={"_metadata": run}), "eval"),
        "setstate": (Calls(Path, "x", state={"__setstate__": run}), "Path"),
        "items": (Calls(OrderedDict, items=[("a", run)]), "eval"),
        "memo": ([system, system], "posix.system"),
        "library": (Calls(np.load, "x.npy"), "numpy"),
    }


NAMES = sorted(attacks("", ""))


def body(program: bytes) -> Opcodes:
    """A pickle without its first and last instruction, to be part of another."""
    return Opcodes(program[2:-1])


@pytest.mark.parametrize("place", ["zip", "legacy", "legacy machine", "legacy keys", "beside a tensor"])
@pytest.mark.parametrize("name", NAMES)
def test_nothing_in_a_file_is_executed(tmp_path: Path, name: str, place: str):
    marker = tmp_path / "marker"
    attack, named = attacks(f"touch {marker}", f"open({str(marker)!r}, 'w').close()")[name]
    evil = body(pickle.dumps(attack, protocol=2))
    path = tmp_path / "model.pt"
    match place:
        case "zip":
            write_torch_file(path, evil)
        case "legacy":
            write_legacy_file(path, evil)
        case "legacy machine":
            write_legacy_file(path, {}, machine=evil)
        case "legacy keys":
            write_legacy_file(path, {}, keys=evil)
        case _:
            write_torch_file(path, {"weight": FOUR, "bias": evil})

    message = refusal(path)
    assert named in message
    assert "nothing in it was executed" in message
    assert not marker.exists()


@pytest.mark.parametrize("name", ["os.system", "eval", "exec", "nested", "items", "memo", "build"])
def test_the_attacks_would_work_on_pickle_itself(tmp_path: Path, name: str):
    marker = tmp_path / "marker"
    attack, _ = attacks(f"touch {marker}", f"open({str(marker)!r}, 'w').close()")[name]
    pickle.loads(pickle.dumps(attack, protocol=2))
    assert marker.exists()


@pytest.mark.parametrize(
    ("code", "named"),
    [
        (b"(ios\nsystem\n", "INST"),
        (b"(cos\nsystem\no", "'os.system'"),
        (b"(o", "OBJ"),
        (b"ccollections\nOrderedDict\n)\x81", "NEWOBJ"),
        (b"\x92", "NEWOBJ_EX"),
        (b"\x82\x01", "EXT1"),
        (b"\x84\x01\x00\x00\x00", "EXT4"),
        (b"\x93", "STACK_GLOBAL"),
        (b"Pstorage\n", "PERSID"),
        (b"I99999999999999999999\n", "INT"),
        (b"Vtext\n", "UNICODE"),
        (b"\x8b\xff\xff\xff\x7f", "LONG4"),
        (b"\x8d" + b"\xff" * 8, "BINUNICODE8"),
        (b"\x8e" + b"\xff" * 8, "BINBYTES8"),
        (b"\x96" + b"\xff" * 8, "BYTEARRAY8"),
        (b"\x95" + b"\xff" * 8, "FRAME"),
        (b"\x97", "NEXT_BUFFER"),
        (b"\xff", "xff"),
        (b"\x80\x05", "protocol 5"),
        (b"cargparse\nNamespace\n", "argparse.Namespace"),
        (b"ctorch.serialization\n_get_layout\n", "torch.serialization._get_layout"),
        (b"ctorch._tensor\n_rebuild_from_type_v2\n", "torch._tensor._rebuild_from_type_v2"),
        (b"ctorch._utils\n_rebuild_qtensor\n", "torch._utils._rebuild_qtensor"),
        (b"ctorch\nQInt8Storage\n", "torch.QInt8Storage"),
        (b"ctorch\ncomplex64\n", "torch.complex64"),
    ],
)
def test_other_instructions_and_names_are_refused_by_name(tmp_path: Path, code: bytes, named: str):
    assert named in refusal(write_torch_file(tmp_path / "model.pt", Opcodes(code)))


@pytest.mark.parametrize(
    "code",
    [
        b"",
        b"0",
        b"K",
        b"R",
        b"))R",
        b"Nb",
        b"]}b",
        b"ctorch\nFloatStorage\n)R",
        b"ccollections\nOrderedDict\nNR",
        b"ccollections\nOrderedDict\n(]tR",
        b"ccollections\nOrderedDict\n)R]b",
        b"ctorch\nSize\n]\x85R",
        b"ctorch._utils\n_rebuild_tensor_v2\n(NNNNNNtR",
        b"ctorch._utils\n_rebuild_parameter\n(NNNtR",
        b"NQ",
        b")Q",
        b"(X\x06\x00\x00\x00moduleNNNNtQ",
        b"(X\x07\x00\x00\x00storageNX\x01\x00\x00\x000NK\x04tQ",
        b"X\xff\xff\xff\xffabc",
        b"X\x01\x00\x00\x00\xff",
        b"h\x05",
        b"j\xff\xff\xff\xff",
        b"r\xff\xff\xff\xff",
        b"t",
        b"NN",
        b"Na",
        b"}Nu",
        b"](K\x01u",
        b"}(K\x01u",
        b"}NNs",
        b"})K\x01s",
        b"}\x8a\x09" + b"\xff" * 8 + b"\x00K\x01s",
        b"c" + b"a" * 5000 + b"\nb\n",
        b"c\xff\n\xff\n",
        b"ctorch\nFloatStorage\n",
        b"ccollections\nOrderedDict\n",
    ],
)
def test_pickles_that_make_no_sense_are_one_error(tmp_path: Path, code: bytes):
    refusal(write_torch_file(tmp_path / "model.pt", Opcodes(code)))
    refusal(write_legacy_file(tmp_path / "old.pt", Opcodes(code)))


DEEP = b")" + b"\x85" * 200_000  # a tuple in a tuple in a tuple ...: to hash, compare or print it would end Python


@pytest.mark.parametrize(
    "code",
    [
        DEEP,
        b"}" + DEEP + b"K\x01s",
        b"]" + DEEP + b"a",
        b"(" + DEEP + b"NNNNtQ",
        b"(X\x07\x00\x00\x00storage" + DEEP + b"X\x01\x00\x00\x000NK\x04tQ",
        b"(X\x07\x00\x00\x00storagectorch\nFloatStorage\nX\x01\x00\x00\x000N" + DEEP + b"tQ",
        b"ctorch._utils\n_rebuild_tensor_v3\n(NNNNNN" + DEEP + b"tR",
        b"ccollections\nOrderedDict\n" + DEEP + b"R",
        b"]q\x00h\x00a",
        b"]q\x00(" + b"h\x00" * 1000 + b"e",
        b"]" + b"".join(b"q%c0](h%ch%ce" % (i, i, i) for i in range(40)),  # 2 ** 40 values, if walked
        b"]" + b"".join(b"q%c0](h%ch%ce" % (i, i, i) for i in range(200)),
    ],
    ids=range(12),
)
def test_structures_that_break_whoever_walks_them_are_refused(tmp_path: Path, code: bytes):
    refusal(write_torch_file(tmp_path / "model.pt", Opcodes(code)))


@pytest.mark.parametrize(
    "code",
    [b"(", b"]", b"}", b")", b"N\x85", b"Nq\x00", b"K\x01K\x02\x86", b"ccollections\nOrderedDict\n)R"],
    ids=range(8),
)
def test_a_pickle_has_a_bounded_number_of_instructions_and_each_makes_little(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: bytes
):
    monkeypatch.setattr(torch_pickle, "MAX_INSTRUCTIONS", 10_000)
    path = write_torch_file(tmp_path / "model.pt", Opcodes(code * 10_000))
    tracemalloc.start()
    try:
        assert "more than 10,000 instructions" in refusal(path)
        assert tracemalloc.get_traced_memory()[1] < 10_000 * 200 + 2**20
    finally:
        tracemalloc.stop()


def test_a_pickle_has_a_bounded_size(tmp_path: Path):
    assert "its pickle has" in refusal(write_torch_file(tmp_path / "model.pt", "x" * MAX_PICKLE_BYTES))
