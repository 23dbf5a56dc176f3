"""Small models to fine-tune and made-up rows to do it with."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from artefacts import write_hub
from mlx.utils import tree_flatten, tree_map
from reference import random_checkpoint, small_config

from openelm_mlx.config import OpenELMConfig
from openelm_mlx.lora.batches import Batch
from openelm_mlx.lora.job import prepare
from openelm_mlx.lora.optimizers import make_optimizer
from openelm_mlx.lora.sequences import Sequence
from openelm_mlx.lora.settings import Settings
from openelm_mlx.lora.state import Progress
from openelm_mlx.lora.trainer import Run, batch_gradients
from openelm_mlx.model import Model

SMALL = {"num_transformer_layers": 2, "model_dim": 64, "head_dim": 16, "ffn_multipliers": [1.0, 2.0]}
VOCAB = 96


def settings(**changes: Any) -> Settings:
    return Settings.from_values({"data": "rows", "batch_size": 2, "learning_rate": 1e-2, **changes})


def model_for(chosen: Settings, *, moved: float = 0.02, **config: Any) -> Model:
    """A small random model, made trainable as the settings say; adapters are `moved` off their neutral start."""
    raw = small_config(**{**SMALL, "vocab_size": VOCAB, **config})
    model = Model(OpenELMConfig.from_dict(raw))
    weights = random_checkpoint(raw, seed=1)
    model.load_weights([(name, mx.array(value)) for name, value in weights.items()])
    prepare(model, chosen)
    rng = np.random.default_rng(2)
    model.update(
        tree_map(
            lambda p: p + mx.array(moved * rng.standard_normal(p.shape).astype(np.float32)),
            model.trainable_parameters(),
        )
    )
    model.train()
    mx.eval(model.parameters())
    return model


def rows(lengths: Iterable[int], seed: int = 0, masked: int = 0) -> list[Sequence]:
    """Random rows; the first `masked` targets of each do not count."""
    rng = np.random.default_rng(seed)
    return [
        Sequence(rng.integers(3, VOCAB, length).astype(np.int32), np.arange(length) > masked, f"rows:{i}")
        for i, length in enumerate(lengths, 1)
    ]


class OneBatch:
    """Batches that are always the same rows, padded on the right to `length`."""

    def __init__(self, sequences: list[Sequence], length: int | None = None):
        width = length or max(map(len, sequences))
        tokens, counted = np.zeros((len(sequences), width), np.int32), np.zeros((len(sequences), width), bool)
        for row, sequence in enumerate(sequences):
            tokens[row, : len(sequence)], counted[row, : len(sequence)] = sequence.tokens, sequence.counted
        self._batch = Batch(mx.array(tokens), mx.array(counted), None, tuple(sequence.row for sequence in sequences))

    def __len__(self) -> int:
        return 1

    def batch(self, index: int) -> Batch:
        return self._batch


def gradients(model: Model, batch: Batch, chosen: Settings, iteration: int = 0) -> tuple[float, int, dict[str, Any]]:
    """(sum of the losses, targets, gradients by name) of one batch."""
    total, count, found = batch_gradients(model, batch, chosen, iteration)
    mx.eval(total, count, found)
    return total.item(), int(count.item()), {name: np.array(value) for name, value in tree_flatten(found)}


def new_run(chosen: Settings, batches: Any, iterations: int, model: Model | None = None, **parts: Any) -> Run:
    model = model or model_for(chosen)
    optimizer = make_optimizer(chosen.optimizer, chosen.optimizer_config, chosen.learning_rate)
    optimizer.init(model.trainable_parameters())
    return Run(model, optimizer, lambda update: chosen.learning_rate, batches, chosen, iterations, Progress(), **parts)


def trained(model: Model) -> dict[str, np.ndarray]:
    return {name: np.array(value) for name, value in tree_flatten(model.trainable_parameters())}


def frozen(model: Model) -> dict[str, np.ndarray]:
    own = {name for name, _ in tree_flatten(model.trainable_parameters())}
    return {name: np.array(value) for name, value in tree_flatten(model.parameters()) if name not in own}


def same(one: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> bool:
    """Bit for bit."""
    return one.keys() == other.keys() and all(np.array_equal(one[name], other[name]) for name in one)


def close(one: dict[str, np.ndarray], other: dict[str, np.ndarray], tolerance: float = 1e-5) -> bool:
    """Within `tolerance` of each array's largest element."""
    return one.keys() == other.keys() and all(
        np.abs(one[name] - other[name]).max() <= tolerance * max(np.abs(one[name]).max(), 1e-6) for name in one
    )


def write_small_folder(folder: Path, seed: int = 3, **config: Any) -> Path:
    """A model folder that loads in an instant, with the bundled tokenizer's 4,096 pieces."""
    raw = small_config(**{**SMALL, "vocab_size": 4096, **config})
    return write_hub(folder, random_checkpoint(raw, seed=seed), raw)
