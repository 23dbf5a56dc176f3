"""OpenELM written a second time, in plain numpy, to check the real one against.

It shares no line with `openelm_mlx` and imports nothing from it. It is slow and means to be read: one sequence, no
cache, a loop over heads, float64 unless asked otherwise. Sources: the paper, and apple/corenet's `general_gpt.py`.

    reference_logits(weights, config, ids)   logits (L, V) for one sequence of L ids
    parameter_shapes(config)                 every tensor's name (the Hub's) and shape
    random_checkpoint(config, seed)          such tensors with random values, float32
    small_config(**changes)                  a `config.json` of a small uneven model, as a dict
    read_safetensors(path)                   a file's tensors as float32

Axes: L positions, D model_dim, H head_dim, F feed-forward width, V vocabulary.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np

Weights = dict[str, np.ndarray]
Config = dict[str, Any]


def reference_logits(weights: Weights, config: Config, ids: Any, dtype: Any = np.float64) -> np.ndarray:
    """Logits (L, V) at every position of one sequence. `weights` have Hub names, `config` the keys of config.json."""
    w = {name: np.asarray(value, dtype=dtype) for name, value in weights.items()}
    embedding = w["transformer.token_embeddings.weight"]  # (V, D)
    x = embedding[np.asarray(ids)]  # (L, D)
    for i, (query_heads, kv_heads, _) in enumerate(layer_widths(config)):
        layer = {name.removeprefix(f"transformer.layers.{i}."): w[name] for name in _names_of_layer(w, i)}
        x = x + _attention(_rms_norm(x, layer["attn_norm.weight"], config), layer, query_heads, kv_heads, config)
        x = x + _feed_forward(_rms_norm(x, layer["ffn_norm.weight"], config), layer, config)
    x = _rms_norm(x, w["transformer.norm.weight"], config)
    head = embedding if config.get("share_input_output_layers", True) else w["lm_head.weight"]
    return x @ head.T


def _attention(x: np.ndarray, layer: Weights, query_heads: int, kv_heads: int, config: Config) -> np.ndarray:
    size = config["head_dim"]
    qkv = x @ layer["attn.qkv_proj.weight"].T  # (L, (Hq + 2 Hkv) H): all queries, then keys, then values
    heads = [qkv[:, n * size : (n + 1) * size] for n in range(query_heads + 2 * kv_heads)]  # each (L, H)
    queries, keys, values = np.split(np.array(heads), [query_heads, query_heads + kv_heads])
    if config.get("normalize_qk_projections", True):  # before the rotation
        queries = [_rms_norm(q, layer["attn.q_norm.weight"], config) for q in queries]
        keys = [_rms_norm(k, layer["attn.k_norm.weight"], config) for k in keys]
    outputs = []
    for n in range(query_heads):
        shared = n * kv_heads // query_heads  # neighbouring query heads share one key/value head
        query, key = _rotate(queries[n], config), _rotate(keys[shared], config)
        outputs.append(_causal_softmax(query @ key.T / np.sqrt(size)) @ values[shared])
    return np.concatenate(outputs, axis=-1) @ layer["attn.out_proj.weight"].T  # (L, Hq H) -> (L, D)


def _causal_softmax(scores: np.ndarray) -> np.ndarray:
    """Softmax over positions up to the row's own. (L, L) -> (L, L)."""
    scores = np.where(np.tri(len(scores), dtype=bool), scores, -np.inf)
    powers = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return powers / powers.sum(axis=-1, keepdims=True)


def _rotate(x: np.ndarray, config: Config) -> np.ndarray:
    """Rotary positions over the whole head, the first half paired with the second. (L, H) -> (L, H)."""
    half = x.shape[-1] // 2
    frequencies = float(config.get("rope_freq_constant", 10000)) ** (-np.arange(half) / half)
    angles = np.arange(len(x))[:, None] * frequencies  # (L, H/2)
    cos, sin = np.cos(angles).astype(x.dtype), np.sin(angles).astype(x.dtype)
    first, second = x[:, :half], x[:, half:]
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def _feed_forward(x: np.ndarray, layer: Weights, config: Config) -> np.ndarray:
    hidden = x @ layer["ffn.proj_1.weight"].T  # (L, 2F) with a gate, (L, F) without
    if config.get("ffn_with_glu", True):
        gate, up = np.split(hidden, 2, axis=-1)
        hidden = _swish(gate) * up
    else:
        hidden = _swish(hidden)
    return hidden @ layer["ffn.proj_2.weight"].T


def _swish(x: np.ndarray) -> np.ndarray:
    return x / (1 + np.exp(-x))


def _rms_norm(x: np.ndarray, weight: np.ndarray, config: Config) -> np.ndarray:
    mean_square = np.mean(np.square(x), axis=-1, keepdims=True)
    return x / np.sqrt(mean_square + config.get("rms_norm_eps", 1e-6)) * weight


def _names_of_layer(weights: Weights, index: int) -> list[str]:
    return [name for name in weights if name.startswith(f"transformer.layers.{index}.")]


# Widths: layer-wise scaling, derived here from the multipliers alone unless the config spells the heads out.


def layer_widths(config: Config) -> list[tuple[int, int, int]]:
    """(query heads, key/value heads, feed-forward width) of every layer."""
    layers, dim, size = config["num_transformer_layers"], config["model_dim"], config["head_dim"]
    groups = config["num_gqa_groups"]
    heads = config.get("num_query_heads")
    if heads is None:
        heads = [_divisible(m * dim, size * groups) // size for m in _per_layer(config["qkv_multipliers"], layers)]
    kv_heads = config.get("num_kv_heads") or [n // groups for n in heads]
    widths = [_divisible(m * dim, config["ffn_dim_divisor"]) for m in _per_layer(config["ffn_multipliers"], layers)]
    return list(zip(heads, kv_heads, widths, strict=True))


def _per_layer(multipliers: Any, layers: int) -> list[float]:
    """One number for all layers, one for each, or two bounds: interpolated, then rounded to two decimals."""
    if not isinstance(multipliers, list | tuple):
        return [multipliers] * layers
    if len(multipliers) == layers:
        return list(multipliers)
    return [round(float(m), 2) for m in np.linspace(*multipliers, num=layers)]


def _divisible(value: float, divisor: int) -> int:
    """The nearest multiple (halves go up), one step higher if that lost more than a tenth; never zero."""
    nearest = max(divisor, int((value + divisor / 2) // divisor) * divisor)
    return nearest if nearest >= 0.9 * value else nearest + divisor


def parameter_shapes(config: Config) -> dict[str, tuple[int, ...]]:
    """Every tensor of such a model: its name on the Hub, and its shape."""
    dim, size, vocab = config["model_dim"], config["head_dim"], config["vocab_size"]
    shapes: dict[str, tuple[int, ...]] = {"transformer.token_embeddings.weight": (vocab, dim)}
    for i, (query_heads, kv_heads, width) in enumerate(layer_widths(config)):
        layer = {
            "attn_norm": (dim,),
            "attn.qkv_proj": ((query_heads + 2 * kv_heads) * size, dim),
            "attn.out_proj": (dim, query_heads * size),
            "ffn_norm": (dim,),
            "ffn.proj_1": (width * (1 + config.get("ffn_with_glu", True)), dim),
            "ffn.proj_2": (dim, width),
        }
        if config.get("normalize_qk_projections", True):
            layer |= {"attn.q_norm": (size,), "attn.k_norm": (size,)}
        shapes |= {f"transformer.layers.{i}.{name}.weight": shape for name, shape in layer.items()}
    shapes["transformer.norm.weight"] = (dim,)
    if not config.get("share_input_output_layers", True):
        shapes["lm_head.weight"] = (vocab, dim)
    return shapes


def random_checkpoint(config: Config, seed: int = 0) -> Weights:
    """Random float32 weights scaled so that activations and logits stay near one; norm weights near one."""
    rng = np.random.default_rng(seed)
    weights = {}
    for name, shape in parameter_shapes(config).items():
        values = rng.standard_normal(shape)
        values = 1 + 0.1 * values if len(shape) == 1 else values / np.sqrt(shape[-1])
        weights[name] = values.astype(np.float32)
    return weights


def small_config(**changes: Any) -> Config:
    """The `config.json` of a small model with uneven layers (heads 2 4 4 4, widths 64 128 192 256), as a dict.

    Head lists follow from the multipliers, unless `changes` hold them. Every input width divides by 64.
    """
    config: Config = {
        "activation_fn_name": "swish",
        "architectures": ["OpenELMForCausalLM"],
        "bos_token_id": 1,
        "eos_token_id": 2,
        "ffn_dim_divisor": 64,
        "ffn_multipliers": [0.5, 2.0],
        "ffn_with_glu": True,
        "head_dim": 32,
        "max_context_length": 128,
        "model_dim": 128,
        "model_type": "openelm",
        "normalization_layer_name": "rms_norm",
        "normalize_qk_projections": True,
        "num_gqa_groups": 2,
        "num_transformer_layers": 4,
        "qkv_multipliers": [0.5, 1.0],
        "rope_freq_constant": 10000,
        "rope_max_length": 256,
        "share_input_output_layers": True,
        "vocab_size": 256,
    } | changes
    widths = layer_widths(config)
    config["num_query_heads"] = [query for query, _, _ in widths]
    config["num_kv_heads"] = [kv for _, kv, _ in widths]
    config["ffn_multipliers"] = _per_layer(config["ffn_multipliers"], config["num_transformer_layers"])
    return config


def read_safetensors(path: Path) -> Weights:
    """The tensors of a safetensors file (F32, F16 or BF16) as float32."""
    data = Path(path).read_bytes()
    header_end = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:header_end])
    weights = {}
    for name, entry in header.items():
        if name != "__metadata__":
            start, stop = (header_end + offset for offset in entry["data_offsets"])
            weights[name] = _floats(data[start:stop], entry["dtype"]).reshape(entry["shape"])
    return weights


def _floats(data: bytes, dtype: str) -> np.ndarray:
    if dtype == "BF16":  # the upper half of a float32
        return (np.frombuffer(data, np.uint16).astype(np.uint32) << 16).view(np.float32)
    return np.frombuffer(data, {"F32": np.float32, "F16": np.float16}[dtype]).astype(np.float32)
