"""What no user does on purpose: conversions killed at random moments, and files spoilt at random. Seeded, offline.

    python tests/torture.py kills --count 50
    python tests/torture.py mutations --count 100000

Each ends with a line of counts, or with the first thing that must not happen. The suite runs a few of each.
"""

import argparse
import json
import random
import signal
import subprocess
import sys
import tempfile
import time
import zipfile
from collections import Counter
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

from reference import random_checkpoint, small_config
from safetensors.numpy import save_file
from torch_writer import write_torch_file

from openelm_mlx.config import OpenELMConfig
from openelm_mlx.convert import convert
from openelm_mlx.convert.torch_file import read_torch_file, tensors_of
from openelm_mlx.errors import CheckpointError, ConfigError
from openelm_mlx.safetensors_file import read_header

# name -> options of the conversion, and the largest shard
KINDS: dict[str, tuple[dict[str, Any], int]] = {
    "16-bit": ({}, 10**9),
    "4-bit": ({"quantize": True}, 10**9),
    "several shards": ({"dtype": "float32"}, 3_000_000),
}
_CHILD = """
import json, sys
from openelm_mlx.convert.conversion import convert
from openelm_mlx.safetensors_writer import SafetensorsWriter
options, shard, target = json.loads(sys.argv[1])
SafetensorsWriter.__init__.__kwdefaults__["max_shard_bytes"] = shard
print("ready", flush=True)
convert("tiny", target, force=True, **options)
print("done", flush=True)
"""
HANG_S = 5  # for one spoilt file of a few kB


def contents(folder: Path) -> dict[str, bytes] | None:
    return {path.name: path.read_bytes() for path in folder.iterdir()} if folder.exists() else None


def kills(count: int, root: Path, rng: random.Random) -> Counter[str]:
    """Kill `count` conversions, in turn of every kind, with and without an older folder in the target's place."""
    seen: Counter[str] = Counter()
    old = root / "old"
    convert("tiny", old, dtype="float16")
    before = contents(old)
    whole: dict[str, tuple[dict[str, bytes], float]] = {}
    first = rng.randrange(len(KINDS))
    for i in range(count):
        kind = list(KINDS)[(first + i) % len(KINDS)]
        if kind not in whole:
            target = root / "whole" / kind
            seconds = _run(kind, target, None)
            whole[kind] = (contents(target) or {}, seconds)
        new, duration_s = whole[kind]
        target = root / f"{i}" / "model"
        replaces = i % 2 == 0
        if replaces:
            convert("tiny", target, dtype="float16")
        _run(kind, target, rng.uniform(0, 1.1 * duration_s))
        state = contents(target)
        assert state == new or state == (before if replaces else None), f"{kind}: a half-written target in {target}"
        seen["new" if state == new else "old"] += 1
        seen["something hidden left"] += len(list(target.parent.glob(".*"))) if target.parent.exists() else 0
        _run(kind, target, None)
        assert contents(target) == new, f"{kind}: the next run made something else in {target}"
        assert [path.name for path in target.parent.iterdir()] == ["model"], (
            f"{kind}: something is left beside {target}"
        )
    return seen


def _run(kind: str, target: Path, kill_after_s: float | None) -> float:
    """One conversion in a process of its own, killed or not; the seconds of its work."""
    job = json.dumps([*KINDS[kind], str(target)])
    child = subprocess.Popen([sys.executable, "-c", _CHILD, job], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    assert child.stdout.readline() == "ready\n"
    begun = time.perf_counter()
    if kill_after_s is not None:
        time.sleep(kill_after_s)
        child.send_signal(signal.SIGKILL)
    child.communicate()
    assert kill_after_s is not None or child.returncode == 0, f"{kind} failed"
    return time.perf_counter() - begun


def mutations(count: int, root: Path, rng: random.Random) -> Counter[str]:
    """Read `count` spoilt files of every kind; whatever is in them, the answer is a value or an error of ours."""
    seen: Counter[str] = Counter()
    config = small_config(num_transformer_layers=2, vocab_size=64, model_dim=32, head_dim=16, ffn_dim_divisor=16)
    weights = random_checkpoint(config)
    save_file(weights, root / "good.safetensors")
    write_torch_file(root / "good.pt", {name.removeprefix("transformer."): value for name, value in weights.items()})
    kinds: dict[str, tuple[Callable[[random.Random], Path], Callable[[Path], object]]] = {
        "safetensors header": (_header_spoiler(root), _read_safetensors),
        "config": (_config_spoiler(root, config), OpenELMConfig.from_file),
        "pickle": (_pickle_spoiler(root), _read_pickle),
    }
    signal.signal(signal.SIGALRM, _hangs)
    longest = 0
    for name, (spoil, read) in kinds.items():
        for _ in range(count):
            file = spoil(rng)
            signal.alarm(HANG_S)
            try:
                read(file)
                seen[f"{name}: read"] += 1
            except (CheckpointError, ConfigError) as error:
                longest = max(longest, len(str(error)))
                seen[f"{name}: refused"] += 1
            finally:
                signal.alarm(0)
    assert longest < 4000, f"a message of {longest} characters"
    return seen


def _hangs(*_: object) -> None:
    raise AssertionError(f"a spoilt file took more than {HANG_S} s")


def _read_safetensors(path: Path) -> None:
    for tensor in read_header(path).values():
        tensor.read()


def _read_pickle(path: Path) -> None:
    for tensor in tensors_of(read_torch_file(path), str(path)).values():
        tensor.read()


def _header_spoiler(root: Path) -> Callable[[random.Random], Path]:
    data = (root / "good.safetensors").read_bytes()
    length = int.from_bytes(data[:8], "little")
    header, tensors = json.loads(data[8 : 8 + length]), data[8 + length :]

    def spoil(rng: random.Random) -> Path:
        path = root / "spoilt.safetensors"
        if rng.random() < 0.5:
            text = json.dumps(_spoilt_json(header, rng)).encode()
            content = len(text).to_bytes(8, "little") + text + tensors
        else:
            content = _spoilt_bytes(data[: 8 + length], rng) + tensors
        path.write_bytes(content[: rng.randrange(len(content))] if rng.random() < 0.1 else content)
        return path

    return spoil


def _config_spoiler(root: Path, config: dict[str, Any]) -> Callable[[random.Random], Path]:
    def spoil(rng: random.Random) -> Path:
        path = root / "config.json"
        text = json.dumps(_spoilt_json(config, rng)).encode()
        path.write_bytes(text if rng.random() < 0.7 else _spoilt_bytes(text, rng))
        return path

    return spoil


def _pickle_spoiler(root: Path) -> Callable[[random.Random], Path]:
    with zipfile.ZipFile(root / "good.pt") as archive:
        entries = {name: archive.read(name) for name in archive.namelist()}
    pickle = next(name for name in entries if name.endswith("data.pkl"))
    whole = (root / "good.pt").read_bytes()

    def spoil(rng: random.Random) -> Path:
        path = root / "spoilt.pt"
        if rng.random() < 0.2:  # the zip itself
            path.write_bytes(_spoilt_bytes(whole, rng))
            return path
        with zipfile.ZipFile(path, "w") as archive:
            for name, content in entries.items():
                archive.writestr(name, _spoilt_bytes(content, rng) if name == pickle else content)
        return path

    return spoil


def _spoilt_bytes(data: bytes, rng: random.Random) -> bytes:
    """A few bytes changed, taken out, doubled, or put elsewhere."""
    result = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 5))):
        at, size = rng.randrange(len(result) or 1), rng.choice((1, 1, 2, 8, 40))
        piece = bytes(result[at : at + size])
        how = rng.randrange(5)
        if how == 0:
            result[at : at + size] = rng.randbytes(len(piece))
        elif how == 1:
            del result[at : at + size]
        elif how == 2:
            result[at:at] = piece * rng.choice((1, 3, 50))
        elif how == 3:
            other = rng.randrange(len(result) or 1)
            result[other : other + size] = piece
        elif result:
            result[at % len(result)] ^= 1 << rng.randrange(8)
    return bytes(result)


_ODD: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 2**31, 2**63, 2**64, -(2**63), 10**400, 0.5, -0.0, 1e308, float("nan"), float("inf"),
    "", "F32", "F64", "openelm", "\u0000", "\ud800", "x" * 5000, [], [[]], [0] * 40, [1e9] * 4, {}, {"a": {}}, [None],
)  # fmt: skip


def _spoilt_json(value: Any, rng: random.Random) -> Any:
    """A copy with one or a few nodes replaced, dropped, or swapped with another."""
    copy = deepcopy(value)
    for _ in range(rng.choice((1, 1, 2, 4))):
        places = _places(copy)
        if not places:
            return deepcopy(rng.choice(_ODD))
        holder, key = rng.choice(places)
        how = rng.randrange(4)
        if how == 0:
            del holder[key]
        elif how == 1 and isinstance(holder[key], int):
            holder[key] = rng.choice((holder[key] + 1, holder[key] - 1, -holder[key], holder[key] * 2**40))
        elif how == 2:
            other, name = rng.choice(places)
            holder[key] = deepcopy(other[name]) if name in other or isinstance(other, list) else None
        else:
            holder[key] = deepcopy(rng.choice(_ODD))
    return copy


def _places(value: Any) -> list[tuple[Any, Any]]:
    """Every (container, key) below a value."""
    if not isinstance(value, dict | list):
        return []
    keys = list(value) if isinstance(value, dict) else range(len(value))
    return [(value, key) for key in keys] + [place for key in keys for place in _places(value[key])]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("kills", "mutations"))
    parser.add_argument("--count", type=int, required=True)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="openelm-torture-") as folder:
        seen = globals()[args.what](args.count, Path(folder), random.Random(args.seed))
    print(f"{args.what}, {args.count}, seed {args.seed}: " + ", ".join(f"{key} {seen[key]}" for key in sorted(seen)))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
