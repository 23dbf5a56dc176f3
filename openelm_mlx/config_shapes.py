"""Reads a configuration out of tensor shapes: a CoreNet `.pt` without its YAML holds nothing else."""

from collections.abc import Mapping
from typing import Any

from .config_keys import listing
from .errors import ConfigError
from .scaling import ffn_multipliers

Shapes = Mapping[str, tuple[int, ...]]

_EMBEDDING = "transformer.token_embeddings.weight"
_FIRST_QKV = "transformer.layers.0.attn.qkv_proj.weight"
_FIRST_Q_NORM = "transformer.layers.0.attn.q_norm.weight"
_MAX_LAYERS = 2000  # enough for the complaint about too many


def keys_from_shapes(shapes: Shapes) -> dict[str, Any]:
    """config.json keys that give the widths of these tensors (Hub names) back.

    Raises ConfigError, naming the tensors that are missing or that contradict each other.
    """
    if _FIRST_QKV not in shapes:
        raise ConfigError(f"no OpenELM can be read from the tensor shapes: {_FIRST_QKV} is missing")
    if _FIRST_Q_NORM not in shapes:
        raise ConfigError(f"head_dim cannot be read from the tensor shapes without {_FIRST_Q_NORM}; pass --config")
    return _ShapeReader(shapes).keys()


class _ShapeReader:
    def __init__(self, shapes: Shapes):
        self.shapes = shapes
        self.faults: list[str] = []

    def keys(self) -> dict[str, Any]:
        vocab_size, model_dim = self._shape(_EMBEDDING, rank=2)
        (head_dim,) = self._shape(_FIRST_Q_NORM, rank=1)
        layers = [self._layer(i, head_dim) for i in range(self._num_layers())]
        if not self.faults and len({gate for *_, gate in layers}) > 1:
            self.faults.append("some layers have a gated feed-forward network and some do not")
        if self.faults:
            raise ConfigError(f"no OpenELM can be read from the tensor shapes: {listing(self.faults)}")
        query_heads, kv_heads, ffn_dims, gates = (list(column) for column in zip(*layers, strict=True))
        multipliers, divisor = ffn_multipliers(ffn_dims, model_dim)
        return {
            "model_dim": model_dim,
            "vocab_size": vocab_size,
            "head_dim": head_dim,
            "num_transformer_layers": len(layers),
            "num_query_heads": query_heads,
            "num_kv_heads": kv_heads,
            "ffn_multipliers": multipliers,
            "ffn_dim_divisor": divisor,
            "ffn_with_glu": gates[0] == 2,
            "share_input_output_layers": "lm_head.weight" not in self.shapes,
        }

    def _num_layers(self) -> int:
        layers = 1
        while layers < _MAX_LAYERS and f"transformer.layers.{layers}.attn.qkv_proj.weight" in self.shapes:
            layers += 1
        return layers

    def _layer(self, index: int, head_dim: int) -> tuple[int, int, int, int]:
        """(query heads, key/value heads, feed-forward width, 2 with a gate or 1 without); complaints aside."""
        name = f"transformer.layers.{index}"
        qkv_rows, _ = self._shape(f"{name}.attn.qkv_proj.weight", rank=2)
        _, query_dim = self._shape(f"{name}.attn.out_proj.weight", rank=2)
        ffn_rows, _ = self._shape(f"{name}.ffn.proj_1.weight", rank=2)
        _, ffn_dim = self._shape(f"{name}.ffn.proj_2.weight", rank=2)
        if self.faults:
            return (0, 0, 0, 0)
        if query_dim % head_dim or qkv_rows <= query_dim or (qkv_rows - query_dim) % (2 * head_dim):
            self.faults.append(
                f"layer {index}: qkv_proj {qkv_rows} and out_proj {query_dim} are no heads of {head_dim}"
            )
        if ffn_rows not in (ffn_dim, 2 * ffn_dim):
            self.faults.append(f"layer {index}: proj_1 has {ffn_rows} rows for proj_2's {ffn_dim} columns")
        return query_dim // head_dim, (qkv_rows - query_dim) // (2 * head_dim), ffn_dim, ffn_rows // ffn_dim

    def _shape(self, name: str, rank: int) -> tuple[int, ...]:
        """The shape, or zeros after a complaint."""
        found = self.shapes.get(name)
        if found is not None and len(found) == rank and 0 not in found:
            return tuple(found)
        self.faults.append(f"{name} is missing" if found is None else f"{name} has shape {tuple(found)}")
        return (0,) * rank
