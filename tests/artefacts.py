"""OpenELM checkpoints in the forms people have them, made from the bundled one or from random weights.

`weights` are float32 under Hub names throughout; `write_*` return what `openelm convert` would be given.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
from reference import read_safetensors
from safetensors.numpy import save_file
from torch_writer import write_torch_file

TINY = Path(__file__).parents[1] / "openelm_mlx" / "data" / "tiny"
TOKENIZER = TINY / "tokenizer.model"
PADDED_ROWS = 4224  # as CoreNet pads: the padding id itself, then up to a multiple of 128

Weights = dict[str, np.ndarray]


def tiny_weights() -> Weights:
    return read_safetensors(TINY / "model.safetensors")


def tiny_config() -> dict[str, Any]:
    return json.loads((TINY / "config.json").read_text())


def write_hub(folder: Path, weights: Weights, config: dict[str, Any], *, shards: int = 1) -> Path:
    """A Hub folder with safetensors, in one file or several with an index."""
    _write_common(folder, config)
    files = _split(weights, shards, "model{}.safetensors")
    for name, part in files.items():
        save_file(part, folder / name, metadata={"format": "pt"})
    if shards > 1:
        _write_index(folder / "model.safetensors.index.json", files)
    return folder


def write_hub_torch(folder: Path, weights: Weights, config: dict[str, Any], *, shards: int = 1) -> Path:
    """A Hub folder with pytorch_model.bin, in one file or several with an index."""
    _write_common(folder, config)
    files = _split(weights, shards, "pytorch_model{}.bin")
    for name, part in files.items():
        write_torch_file(folder / name, part)
    if shards > 1:
        _write_index(folder / "pytorch_model.bin.index.json", files)
    return folder


def write_corenet(path: Path, weights: Weights, rows: int = PADDED_ROWS) -> Path:
    """A CoreNet state dict: no prefix, the vocabulary padded."""
    state = {name.removeprefix("transformer."): value for name, value in weights.items()}
    padding = ((0, rows - len(state["token_embeddings.weight"])), (0, 0))
    state["token_embeddings.weight"] = np.pad(state["token_embeddings.weight"], padding)
    write_torch_file(path, state)
    return path


def write_corenet_yaml(path: Path) -> Path:
    block = f"model_name: tiny\n      vocab_size: {PADDED_ROWS}\n      max_context_length: 256\n"
    path.write_text(f"model:\n  language_modeling:\n    general_gpt:\n      {block}")
    return path


def _write_common(folder: Path, config: dict[str, Any]) -> None:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    shutil.copy(TOKENIZER, folder)


def _split(weights: Weights, shards: int, pattern: str) -> dict[str, Weights]:
    if shards == 1:
        return {pattern.format(""): weights}
    names = np.array_split(list(weights), shards)
    return {
        pattern.format(f"-{i:05d}-of-{shards:05d}"): {name: weights[name] for name in part}
        for i, part in enumerate(names, start=1)
    }


def _write_index(path: Path, files: dict[str, Weights]) -> None:
    weight_map = {name: file for file, part in files.items() for name in part}
    path.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
