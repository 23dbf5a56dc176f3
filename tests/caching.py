"""A small model and caches of every kind, for the tests of caches and of their files."""

from pathlib import Path

import mlx.core as mx
import numpy as np
from reference import random_checkpoint, small_config

from openelm_mlx.cache import KVCache
from openelm_mlx.caches import make_cache
from openelm_mlx.config import OpenELMConfig
from openelm_mlx.model import Model
from openelm_mlx.prompt_cache import save_prompt_cache

TINY = Path(__file__).parent.parent / "openelm_mlx" / "data" / "tiny"
KINDS = {
    "plain": {},
    "rotating": {"max_kv_size": 8, "keep": 2},
    "8 bits": {"kv_bits": 8},
    "4 bits": {"kv_bits": 4},
}
IDS = [1, 9, 4, 4, 20, 7, 8, 15, 3, 30, 11, 6, 40, 41, 42, 43, 44, 45, 46, 47]


def small_model(seed: int = 1, **changes) -> Model:
    config = small_config(**changes)
    model = Model(OpenELMConfig.from_dict(config))
    model.load_weights([(name, mx.array(value)) for name, value in random_checkpoint(config, seed=seed).items()])
    model.eval()
    return model


def prefilled(model: Model, kind: str, ids: list[int], chunks=()) -> list[KVCache]:
    """A cache of a kind after ids that came in chunks of these lengths, and the rest at once."""
    cache, start = make_cache(model, **KINDS[kind]), 0
    for length in [*chunks, len(ids) - sum(chunks)]:
        model(mx.array([ids[start : start + length]]), cache)
        start += length
    return cache


def steps(model, ids: list[int], cache) -> np.ndarray:
    """Logits (L, V) of ids run one by one."""
    return np.array(mx.concatenate([model(mx.array([[token]]), cache)[0] for token in ids]))


def saved(model: Model, kind: str, ids: list[int], path: Path, chunks=()) -> None:
    """Write the prompt cache of `prefilled`."""
    save_prompt_cache(path, prefilled(model, kind, ids, chunks), ids, model, model_name="small")
