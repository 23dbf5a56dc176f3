"""An adapter folder of ours or of mlx-lm -> the folder that Hugging Face PEFT loads, without PEFT and PyTorch."""

import json
from pathlib import Path

from ..adapter_config import EMBEDDING_PATH, read_adapter_config
from ..atomic import check_apart, check_space, check_target, new_folder
from ..config_keys import listing
from ..errors import CheckpointError, ConfigError
from ..safetensors_file import read_header
from ..safetensors_writer import write_file
from ..tensors import StoredTensor
from .peft import CONFIG_NAME, MAGNITUDE, MATRICES, WEIGHTS_NAMES, check_complete, config_of, their_name
from .peft_import import PeftAdapter, rank_of

_WEIGHTS, _CONFIG_BYTES = "adapters.safetensors", 2**20


def export_peft(adapter: Path, target: Path, *, force: bool = False) -> PeftAdapter:
    """Write the PEFT folder `target` from the adapter folder `adapter`; the base model is not needed.

    Raises ConfigError or CheckpointError for what PEFT does not compute: whole trained layers, mlx-lm's embedding
    adapter (which changes a tied output head too), DoRA beside an embedding adapter.
    """
    check_target(target, force=force)
    check_apart(target, adapter)
    read = _read(adapter)
    theirs = {}
    for name, tensor in read.tensors.items():
        path, _, part = name.rpartition(".")
        theirs[their_name(path, part)] = tensor.transposed() if part in MATRICES else tensor
    check_space(target, sum(tensor.nbytes for tensor in theirs.values()) + _CONFIG_BYTES)
    paths = {name.rpartition(".")[0] for name in read.tensors}
    with new_folder(target, force=force) as made:
        write_file(made / WEIGHTS_NAMES[0], theirs, format="pt")
        text = json.dumps(config_of(read.spec, paths), indent=2) + "\n"
        (made / CONFIG_NAME).write_text(text, encoding="utf-8")
    return read


def _read(folder: Path) -> PeftAdapter:
    if not (folder / CONFIG_NAME).is_file():
        raise CheckpointError(
            f"no adapter folder {folder}; expected one with {CONFIG_NAME} and {_WEIGHTS} (a model goes --to hf, pt, "
            "corenet or gguf)"
        )
    spec = read_adapter_config(folder / CONFIG_NAME)
    if spec.fine_tune_type == "full":
        raise ConfigError(
            f"{folder} holds whole trained layers, which no PEFT adapter can; fuse it into its base model"
        )
    if not (folder / _WEIGHTS).is_file():
        raise CheckpointError(f"{folder} is no adapter folder; expected {CONFIG_NAME} and {_WEIGHTS}")
    tensors: dict[str, StoredTensor] = dict(read_header(folder / _WEIGHTS))
    parts: dict[str, list[str]] = {}
    strangers = []
    for name in tensors:
        path, _, part = name.rpartition(".")
        parts.setdefault(path, []).append(part)
        if part not in MATRICES | MAGNITUDE:
            strangers.append(f"unexpected {name}")
    if strangers:
        raise CheckpointError(f"{folder}: {listing(strangers)}; only LoRA and DoRA adapters go to PEFT")
    if "lora_a" in parts.get(EMBEDDING_PATH, ()):
        raise ConfigError(
            f"{folder} adapts the embedding in mlx-lm's way, which changes a tied output head too; PEFT changes the "
            "input alone: train it with input_embedding instead, or fuse it into its base model"
        )
    check_complete(parts, dora=spec.fine_tune_type == "dora", where=str(folder))
    rank = rank_of(tensors, str(folder))
    if rank != spec.rank:
        raise CheckpointError(f"{folder}: the tensors have rank {rank}, {CONFIG_NAME} says {spec.rank}")
    return PeftAdapter(spec, tensors)
