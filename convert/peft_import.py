"""A PEFT adapter folder -> an adapter folder of mlx-lm's kind, without PEFT and without PyTorch.

Nothing is read into memory but one matrix at a time; the numbers keep their dtype and every bit.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ..adapter_config import AdapterSpec, adapter_config
from ..atomic import check_apart, check_space, check_target, new_folder
from ..config import read_json_object
from ..config_keys import listing
from ..errors import CheckpointError
from ..safetensors_file import read_header
from ..safetensors_writer import write_file
from ..tensors import StoredTensor
from .blocks import is_finite
from .peft import CONFIG_NAME, MATRICES, WEIGHTS_NAMES, check_complete, our_name, spec_of
from .torch_file import read_torch_file, tensors_of

_ADAPTER_DTYPES = ("F32", "F16", "BF16")
_CONFIG_BYTES = 2**20


@dataclass(frozen=True)
class PeftAdapter:
    """A checked PEFT folder: what it adapts, and its tensors under our names, transposed when they are read."""

    spec: AdapterSpec
    tensors: Mapping[str, StoredTensor]

    @property
    def parameters(self) -> int:
        return sum(math.prod(tensor.shape) for tensor in self.tensors.values())


def read_peft(folder: Path) -> PeftAdapter:
    """The adapter in a PEFT folder. Raises ConfigError or CheckpointError, listing all that cannot be expressed."""
    raw, where = read_json_object(folder / CONFIG_NAME), str(folder)
    stored = _read_weights(folder)
    named = {name: our_name(name) for name in stored}
    strangers = [f"unexpected {name}" for name, ours in named.items() if ours is None]
    if strangers:
        raise CheckpointError(f"{where}: {listing(strangers)}; only LoRA and DoRA tensors are read here")
    tensors: dict[str, StoredTensor] = {}
    parts: dict[str, list[str]] = {}
    for name, ours in named.items():
        path, part = ours or ("", "")
        parts.setdefault(path, []).append(part)
        own = f"{path}.{part}"
        tensors[own] = (stored[name].transposed() if part in MATRICES else stored[name]).renamed(own)
    check_complete(parts, dora=bool(raw.get("use_dora")), where=where)
    return PeftAdapter(spec_of(raw, rank_of(tensors, where), parts, where), tensors)


def import_peft(folder: Path, target: Path, *, force: bool = False) -> PeftAdapter:
    """Write the adapter folder `target` from a PEFT folder; the target is as it was before when that fails."""
    check_target(target, force=force)
    check_apart(target, folder)
    adapter = read_peft(folder)
    for name, tensor in adapter.tensors.items():
        if not is_finite(tensor.read(), tensor.dtype):
            raise CheckpointError(f"{folder}: {name} holds values that are infinite or not a number")
    check_space(target, sum(tensor.nbytes for tensor in adapter.tensors.values()) + _CONFIG_BYTES)
    with new_folder(target, force=force) as made:
        write_file(made / "adapters.safetensors", adapter.tensors)
        text = json.dumps(adapter_config(adapter.spec, None), ensure_ascii=False, indent=2, sort_keys=True) + "\n"
        (made / CONFIG_NAME).write_text(text, encoding="utf-8")
    return adapter


def _read_weights(folder: Path) -> Mapping[str, StoredTensor]:
    found = next((folder / name for name in WEIGHTS_NAMES if (folder / name).is_file()), None)
    if found is None:
        raise CheckpointError(f"{folder} is a PEFT adapter without weights; expected {' or '.join(WEIGHTS_NAMES)}")
    return read_header(found) if found.suffix == ".safetensors" else tensors_of(read_torch_file(found), str(found))


def rank_of(tensors: Mapping[str, StoredTensor], where: str) -> int:
    """The one rank of all matrices, (I, R) and (R, O). Raises CheckpointError for anything else."""
    faults, ranks = [], set()
    for name, tensor in tensors.items():
        part = name.rpartition(".")[2]
        if tensor.dtype not in _ADAPTER_DTYPES:
            faults.append(f"{name} has dtype {tensor.dtype}, expected one of {', '.join(_ADAPTER_DTYPES)}")
        if len(tensor.shape) != (2 if part in MATRICES else 1):
            faults.append(f"{name} has shape {tensor.shape}, expected {'a matrix' if part in MATRICES else 'a vector'}")
        elif part in MATRICES:
            ranks.add(tensor.shape[1 if part.endswith("a") else 0])
    if not faults and len(ranks) > 1:
        faults.append(f"ranks {sorted(ranks)} in one adapter (rank_pattern), expected one rank for all layers")
    if not faults and not all(0 < rank < 2**16 for rank in ranks):
        faults.append(f"a rank of {ranks.pop()}, expected 1 to 65535")
    if faults or not ranks:
        raise CheckpointError(f"{where}: {listing(faults)}")
    return ranks.pop()
