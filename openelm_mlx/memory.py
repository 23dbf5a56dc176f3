"""How much memory a model takes, from its configuration alone: nothing is loaded, downloaded or measured.

    weights + keys and values of the whole context + a margin, against what a machine can give

docs/memory.md prints these numbers for the published sizes, `openelm doctor` for the machine it runs on.
"""

import math

from .config import OpenELMConfig
from .quantize import Quantization, QuantizationSettings, plan
from .tensors import itemsize

# Activations of a long prompt and buffers that the allocator keeps for reuse. A judgement: a prompt of 2,040 tokens
# took 0.38 GB beside weights and cache for 270M in bfloat16 on MLX's CPU backend, and larger sizes take more.
MARGIN_BYTES = 2**30
FORMS = ("bf16", "8-bit", "4-bit")  # as `openelm convert` writes them; the embedding keeps 8 bits

_DTYPE = "BF16"


def weight_bytes(config: OpenELMConfig, quantization: Quantization | None = None) -> int:
    """Bytes of the weights, 16 bits for what is not packed: the size of the files too, but for their headers."""
    modules = {} if quantization is None else quantization.modules
    total = 0
    for name, shape in config.parameter_shapes().items():
        settings = modules.get(name.removesuffix(".weight"))
        parts = [(_DTYPE, shape)] if settings is None else settings.packed(shape, _DTYPE).values()
        total += sum(math.prod(part) * itemsize(code) for code, part in parts)
    return total


def cache_bytes(config: OpenELMConfig, tokens: int) -> int:
    """Bytes of the keys and values of this many tokens, in 16 bits."""
    return 2 * sum(config.num_kv_heads) * config.head_dim * tokens * itemsize(_DTYPE)


def form(config: OpenELMConfig, name: str) -> Quantization | None:
    """What one of FORMS does to a model."""
    return None if name == "bf16" else plan(config, QuantizationSettings.of(bits=int(name.removesuffix("-bit"))))


def generation_bytes(config: OpenELMConfig, quantization: Quantization | None = None) -> int:
    """Memory for generating up to the full context."""
    return weight_bytes(config, quantization) + cache_bytes(config, config.max_context_length) + MARGIN_BYTES


def usable_bytes(total_bytes: int) -> int:
    """What a model may take of a machine's memory: two thirds, Metal's recommendation on Macs of up to 32 GB."""
    return total_bytes * 2 // 3
