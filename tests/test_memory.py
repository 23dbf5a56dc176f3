"""The memory that a model takes: computed sizes against real arrays and files, and docs/memory.md against both."""

from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_flatten

from openelm_mlx import memory
from openelm_mlx.cache import KVCache
from openelm_mlx.config import PUBLISHED_SIZES, OpenELMConfig
from openelm_mlx.hub import BUNDLED_MODEL
from openelm_mlx.model import Model

DOCUMENT = Path(__file__).parents[1] / "docs" / "memory.md"
MACHINES_GB = (8, 16, 24)  # as Macs are sold: units of 2**30 bytes


def tiny() -> OpenELMConfig:
    return OpenELMConfig.from_file(BUNDLED_MODEL / "config.json")


def gb(count: int) -> str:
    return f"{count / 1e9:.2f}"


def table() -> list[str]:
    """The rows of docs/memory.md."""
    budgets = [memory.usable_bytes(size * 2**30) for size in MACHINES_GB]
    rows = []
    for size in PUBLISHED_SIZES:
        config = OpenELMConfig.from_name(size)
        for name in memory.FORMS:
            quantization = memory.form(config, name)
            weights, needed = (
                measure(config, quantization) for measure in (memory.weight_bytes, memory.generation_bytes)
            )
            cells = [size.replace("_", "."), name, gb(weights), gb(memory.cache_bytes(config, 2048)), gb(needed)]
            cells += ["yes" if needed <= budget else "no" for budget in budgets]
            rows.append(f"| {' | '.join(cells)} |")
    return rows


@pytest.mark.parametrize("name", memory.FORMS)
def test_weights_are_the_bytes_of_the_arrays(name):
    config = tiny()
    quantization = memory.form(config, name)
    model = Model(config)
    model.set_dtype(mx.bfloat16)
    if quantization is not None:
        nn.quantize(model, class_predicate=quantization.parameters_of)
    held = sum(array.nbytes for _, array in tree_flatten(model.parameters()))
    assert memory.weight_bytes(config, quantization) == held


def test_sixteen_bit_weights_are_two_bytes_a_parameter_and_the_size_of_the_file():
    config = tiny()
    assert memory.weight_bytes(config) == 2 * config.num_parameters()
    header = (BUNDLED_MODEL / "model.safetensors").stat().st_size - memory.weight_bytes(config)
    assert 0 < header < 20_000


def test_the_cache_is_what_a_full_context_allocates():
    config, tokens = tiny(), 256
    caches = [KVCache() for _ in config.num_kv_heads]
    for cache, heads in zip(caches, config.num_kv_heads, strict=True):
        block = mx.zeros((1, heads, tokens, config.head_dim), mx.bfloat16)
        cache.update_and_fetch(block, block)
    assert memory.cache_bytes(config, tokens) == sum(cache.nbytes for cache in caches)


def test_published_sizes_and_their_forms():
    """The parameter counts and cache sizes of the published models, in bytes; fewer bits take less."""
    expected = {"270M": (543_054_336, 16_128), "450M": (914_358_272, 23_296), "1_1B": (2_159_782_912, 43_264)}
    expected["3B"] = (6_073_294_848, 83_968)
    for size, (weights, token) in expected.items():
        config = OpenELMConfig.from_name(size)
        sixteen, eight, four = (memory.generation_bytes(config, memory.form(config, name)) for name in memory.FORMS)
        assert (memory.weight_bytes(config), memory.cache_bytes(config, 1)) == (weights, token)
        assert sixteen == weights + 2048 * token + memory.MARGIN_BYTES
        assert four < eight < sixteen
        packed = config.vocab_size * config.model_dim
        assert memory.weight_bytes(config, memory.form(config, "4-bit")) == pytest.approx(
            8.5 / 8 * packed + 4.5 / 8 * (config.num_parameters() - packed), rel=2e-3
        )


def test_the_document_says_what_the_functions_say():
    lines = DOCUMENT.read_text(encoding="utf-8").splitlines()
    sizes = tuple(size.replace("_", ".") for size in PUBLISHED_SIZES)
    assert [line for line in lines if line.startswith(tuple(f"| {size} " for size in sizes))] == table()
    text = " ".join(lines)
    budgets = [f"{memory.usable_bytes(size * 2**30) / 1e9:.1f}" for size in MACHINES_GB]
    assert f"{budgets[0]}, {budgets[1]} and {budgets[2]} GB" in text
    assert f"{memory.MARGIN_BYTES / 1e9:.2f} GB" in text
    assert memory.usable_bytes(3 * 2**30) == 2 * 2**30
