"""Which cache: plain, of bounded size, or quantised."""

from .cache import KVCache
from .errors import GenerationError
from .model import Model
from .quantized_cache import CACHE_BITS, GROUP_SIZES, QuantizedKVCache
from .rotating_cache import RotatingKVCache

_GROUP_SIZE = 64  # as in mlx-lm


def make_cache(
    model: Model, *, max_kv_size: int | None = None, keep: int = 0, kv_bits: int | None = None
) -> list[KVCache]:
    """A fresh cache, one for each layer.

    max_kv_size: hold at most so many tokens, of which the first `keep` stay (BOS and the system prompt).
    kv_bits: hold keys and values in 4 or 8 bits. Raises GenerationError for what cannot be.
    """
    if max_kv_size is not None and kv_bits is not None:
        raise GenerationError("a cache is either bounded or quantised: give max_kv_size or kv_bits, not both")
    if max_kv_size is not None:
        if max_kv_size <= keep:
            raise GenerationError(
                f"max_kv_size {max_kv_size} leaves no room beside the {keep} tokens that always stay "
                f"(BOS, system prompt): give {keep + 1} or more"
            )
        return [RotatingKVCache(max_kv_size, keep) for _ in model.layers]
    if kv_bits is not None:
        head_dim = model.config.head_dim
        group_size = min(_GROUP_SIZE, head_dim)
        if kv_bits not in CACHE_BITS:
            raise GenerationError(f"kv_bits must be {' or '.join(map(str, CACHE_BITS))}, got {kv_bits}")
        if group_size not in GROUP_SIZES or head_dim % group_size:
            raise GenerationError(
                f"kv_bits needs heads whose dimension is 32 or a multiple of 64, this model's have {head_dim}: "
                "leave kv_bits out"
            )
        return [QuantizedKVCache(kv_bits, group_size, head_dim) for _ in model.layers]
    return model.make_cache()
