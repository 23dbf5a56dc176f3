"""Models with trained-looking adapters, and their folders, for the tests of what is done with them."""

import json
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from reference import random_checkpoint, small_config

from openelm_mlx.adapter_config import EMBEDDING_PATH, AdapterSpec
from openelm_mlx.adapter_folder import save_adapters
from openelm_mlx.adapters import adapter_weights, add_adapters
from openelm_mlx.config import OpenELMConfig
from openelm_mlx.model import Model

TINY = Path(__file__).parents[1] / "openelm_mlx" / "data" / "tiny"
IDS = mx.array([[1, 17, 403, 9, 9, 250, 3]])
SPECS = {
    "lora": AdapterSpec(3, rank=4, scale=2.0, dropout=0.1, base_model="tiny"),
    "dora": AdapterSpec(-1, "dora", rank=4, scale=2.0, keys=("attn.qkv_proj", "ffn.proj_2")),
    "input": AdapterSpec(2, rank=4, scale=2.0, input_embedding=True),
    "dora+input": AdapterSpec(2, "dora", rank=4, scale=2.0, input_embedding=True),
    "both": AdapterSpec(-1, rank=4, scale=2.0, keys=("attn.out_proj", EMBEDDING_PATH)),
    "full": AdapterSpec(2, "full", keys=("transformer.norm", EMBEDDING_PATH)),
}


def tiny_weights(dtype: mx.Dtype = mx.float32) -> list[tuple[str, mx.array]]:
    return [(name, value.astype(dtype)) for name, value in mx.load(str(TINY / "model.safetensors")).items()]


def tiny(dtype: mx.Dtype = mx.float32) -> Model:
    """The bundled model."""
    model = Model(OpenELMConfig.from_file(TINY / "config.json"))
    model.load_weights(tiny_weights(dtype), strict=True)
    return model.eval()


def small(**changes) -> Model:
    """Random weights in the reference's small shape."""
    raw = small_config(**changes)
    model = Model(OpenELMConfig.from_dict(raw))
    model.load_weights([(name, mx.array(value)) for name, value in random_checkpoint(raw, seed=1).items()], strict=True)
    return model.eval()


def train(model: nn.Module, seed: int = 3, size: float = 0.05) -> dict[str, np.ndarray]:
    """Stand-in for training: every trained number moved by a random amount. Returns them as numpy."""
    noise = np.random.default_rng(seed)
    moved = {
        name: value + mx.array(size * noise.standard_normal(value.shape), value.dtype)
        for name, value in adapter_weights(model).items()
    }
    model.load_weights(list(moved.items()), strict=False)
    return {name: np.array(value, dtype=np.float64) for name, value in moved.items()}


def trained_folder(folder: Path, spec: AdapterSpec, model: Model, size: float = 0.05) -> Model:
    """`model` with adapters that do something, saved into `folder`."""
    add_adapters(model, spec)
    train(model, size=size)
    save_adapters(folder, model, spec)
    return model.eval()


def read_config(folder: Path) -> dict:
    return json.loads((folder / "adapter_config.json").read_text())


def difference(a: nn.Module, b: nn.Module) -> float:
    return mx.abs(a(IDS) - b(IDS)).max().item()
