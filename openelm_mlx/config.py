"""What an OpenELM is made of: one frozen record, from any of the four places a configuration can come from.

    OpenELMConfig.from_dict(json)      a Hub `config.json`
    OpenELMConfig.from_name("270M")    one of the four published sizes
    OpenELMConfig.from_yaml(path)      a CoreNet training configuration
    OpenELMConfig.from_shapes(shapes)  tensor shapes alone (a CoreNet `.pt` without its YAML)

The per-layer widths are derived once, on the way in; `scaling.py` has the arithmetic.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Any

from .config_keys import listing, read_keys, short
from .config_shapes import Shapes, keys_from_shapes
from .errors import ConfigError
from .scaling import find_bounds

# apple/corenet general_gpt.py, gpt_configs: what differs between the published sizes.
PUBLISHED_SIZES = {
    "270M": {"num_transformer_layers": 16, "model_dim": 1280, "head_dim": 64},
    "450M": {"num_transformer_layers": 20, "model_dim": 1536, "head_dim": 64},
    "1_1B": {"num_transformer_layers": 28, "model_dim": 2048, "head_dim": 64},
    "3B": {"num_transformer_layers": 36, "model_dim": 3072, "head_dim": 128},
}
# ... and what they share.
_PUBLISHED_COMMON: dict[str, Any] = {
    "qkv_multipliers": (0.5, 1.0),
    "ffn_multipliers": (0.5, 4.0),
    "num_gqa_groups": 4,
    "ffn_dim_divisor": 256,
    "vocab_size": 32000,
}
_MAX_PARAMETERS = 10**12  # the largest OpenELM has 3e9: more is a damaged or hostile file


@dataclass(frozen=True)
class OpenELMConfig:
    """The dimensions of one OpenELM. Per-layer fields are tuples of length `num_transformer_layers`."""

    model_dim: int
    head_dim: int
    num_transformer_layers: int
    vocab_size: int
    num_query_heads: tuple[int, ...]
    num_kv_heads: tuple[int, ...]
    ffn_dims: tuple[int, ...]
    ffn_multipliers: tuple[float, ...]
    ffn_dim_divisor: int = 256
    ffn_with_glu: bool = True
    normalize_qk_projections: bool = True
    share_input_output_layers: bool = True
    rms_norm_eps: float = 1e-6
    rope_freq_constant: float = 10000.0
    rope_max_length: int = 4096
    max_context_length: int = 2048
    bos_token_id: int = 1
    eos_token_id: int = 2

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any], *, where: str = "config.json") -> "OpenELMConfig":
        """From a Hub `config.json` (or the same keys). Raises one ConfigError that lists every bad key."""
        defaults = {field.name: field.default for field in fields(cls) if field.default is not MISSING}
        config = cls(**read_keys(raw, where, defaults))
        if config.num_parameters() > _MAX_PARAMETERS:
            raise ConfigError(f"{where} describes {config.num_parameters():.1e} parameters; no OpenELM is that large")
        return config

    @classmethod
    def from_file(cls, path: Path) -> "OpenELMConfig":
        """From a `config.json` on disk. Raises ConfigError, naming the file."""
        return cls.from_dict(read_json_object(path), where=str(path))

    @classmethod
    def from_name(cls, name: str, **changes: Any) -> "OpenELMConfig":
        """One of the published sizes; `OpenELM-1_1B`, `1.1B` and `1_1B` mean the same."""
        size = published_size(name)
        if size is None:
            known = ", ".join(PUBLISHED_SIZES)
            raise ConfigError(f"{name!r} is not a published OpenELM; known sizes: {known}")
        return cls.from_dict(_PUBLISHED_COMMON | PUBLISHED_SIZES[size] | changes, where=name)

    @classmethod
    def from_yaml(cls, path: Path, shapes: Shapes | None = None) -> "OpenELMConfig":
        """From a CoreNet training YAML; a name that is not published takes its widths from `shapes`.

        Raises ConfigError when the file is not such a YAML, or names a custom model and no shapes are given.
        """
        block = read_corenet_yaml(path)
        name = block.get("model_name")
        size = published_size(name) if isinstance(name, str) else None
        limits = {key: block[key] for key in ("vocab_size", "max_context_length") if block.get(key) is not None}
        if size is not None:
            return cls.from_dict(_PUBLISHED_COMMON | PUBLISHED_SIZES[size] | limits, where=str(path))
        if shapes is None:
            raise ConfigError(
                f"{path}: model_name {short(name)} is not a published OpenELM ({', '.join(PUBLISHED_SIZES)}); "
                "its widths can only be read from a checkpoint's tensors"
            )
        context = limits.get("max_context_length", cls.max_context_length)
        keys = keys_from_shapes(shapes) | {"max_context_length": context}
        if isinstance(context, int):
            keys["rope_max_length"] = 2 * context  # as in every released configuration
        return cls.from_dict(keys, where=f"{path} with the tensor shapes")

    @classmethod
    def from_shapes(cls, shapes: Shapes, **changes: Any) -> "OpenELMConfig":
        """From tensor shapes alone, with Hub names. `changes` are config.json keys that shapes cannot tell.

        Raises ConfigError, naming the tensors that are missing or that contradict each other.
        """
        return cls.from_dict(keys_from_shapes(shapes) | changes, where="the tensor shapes")

    def to_dict(self) -> dict[str, Any]:
        """The keys of a Hub `config.json`, as Apple's, mlx-lm's and Swift's readers want them."""
        return {
            "activation_fn_name": "swish",
            "architectures": ["OpenELMForCausalLM"],
            "bos_token_id": self.bos_token_id,
            "eos_token_id": self.eos_token_id,
            "ffn_dim_divisor": self.ffn_dim_divisor,
            "ffn_multipliers": list(self.ffn_multipliers),
            "ffn_with_glu": self.ffn_with_glu,
            "head_dim": self.head_dim,
            "initializer_range": 0.02,
            "max_context_length": self.max_context_length,
            "model_dim": self.model_dim,
            "model_type": "openelm",
            "normalization_layer_name": "rms_norm",
            "normalize_qk_projections": self.normalize_qk_projections,
            "num_gqa_groups": self.num_query_heads[0] // self.num_kv_heads[0],
            "num_kv_heads": list(self.num_kv_heads),
            "num_query_heads": list(self.num_query_heads),
            "num_transformer_layers": self.num_transformer_layers,
            "qkv_multipliers": self._qkv_multipliers(),
            "rms_norm_eps": self.rms_norm_eps,
            "rope_freq_constant": _as_int_if_whole(self.rope_freq_constant),
            "rope_max_length": self.rope_max_length,
            "share_input_output_layers": self.share_input_output_layers,
            "use_cache": True,
            "vocab_size": self.vocab_size,
        }

    def parameter_shapes(self) -> dict[str, tuple[int, ...]]:
        """Every parameter's name (the Hub's) and shape, in the model's order."""
        dim, head = self.model_dim, self.head_dim
        shapes: dict[str, tuple[int, ...]] = {"transformer.token_embeddings.weight": (self.vocab_size, dim)}
        for i in range(self.num_transformer_layers):
            layer = f"transformer.layers.{i}"
            query, kv, ffn = self.num_query_heads[i], self.num_kv_heads[i], self.ffn_dims[i]
            shapes[f"{layer}.attn_norm.weight"] = (dim,)
            shapes[f"{layer}.attn.qkv_proj.weight"] = ((query + 2 * kv) * head, dim)
            if self.normalize_qk_projections:
                shapes[f"{layer}.attn.q_norm.weight"] = (head,)
                shapes[f"{layer}.attn.k_norm.weight"] = (head,)
            shapes[f"{layer}.attn.out_proj.weight"] = (dim, query * head)
            shapes[f"{layer}.ffn_norm.weight"] = (dim,)
            shapes[f"{layer}.ffn.proj_1.weight"] = ((2 if self.ffn_with_glu else 1) * ffn, dim)
            shapes[f"{layer}.ffn.proj_2.weight"] = (dim, ffn)
        shapes["transformer.norm.weight"] = (dim,)
        if not self.share_input_output_layers:
            shapes["lm_head.weight"] = (self.vocab_size, dim)
        return shapes

    def num_parameters(self) -> int:
        """How many numbers the unquantised model holds (a tied embedding counts once)."""
        return sum(math.prod(shape) for shape in self.parameter_shapes().values())

    def check_shapes(self, shapes: Shapes, *, where: str = "the checkpoint") -> None:
        """Raise one ConfigError that lists every tensor missing from a checkpoint, foreign to it, or misshapen."""
        expected = self.parameter_shapes()
        faults = [f"missing {name}" for name in expected if name not in shapes]
        faults += [f"unexpected {name}" for name in shapes if name not in expected]
        faults += [
            f"{name} has shape {tuple(shapes[name])}, the config gives {expected[name]}"
            for name in expected
            if name in shapes and tuple(shapes[name]) != expected[name]
        ]
        if faults:
            raise ConfigError(f"{where} does not fit its config: {listing(faults)}")

    def _qkv_multipliers(self) -> list[float] | float:
        """Bounds that give these head counts back, or one number where every layer has the same width."""
        groups = self.num_query_heads[0] // self.num_kv_heads[0]
        bounds = find_bounds(
            [heads * self.head_dim for heads in self.num_query_heads], self.model_dim, self.head_dim * groups
        )
        first, last = bounds or (self._width_share(0), self._width_share(-1))
        return first if first == last else [first, last]

    def _width_share(self, layer: int) -> float:
        return self.num_query_heads[layer] * self.head_dim / self.model_dim


def published_size(name: str) -> str | None:
    """The published size that a model name means (`apple/OpenELM-1_1B-Instruct` -> `1_1B`), or None."""
    bare = name.rsplit("/", 1)[-1].removeprefix("OpenELM-").removesuffix("-Instruct").replace(".", "_")
    return next((size for size in PUBLISHED_SIZES if size.lower() == bare.lower()), None)


def read_json_object(path: Path) -> dict[str, Any]:
    """A JSON file that must hold an object. Raises ConfigError for anything else."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror or error}") from None
    except (ValueError, RecursionError):
        raise ConfigError(f"{path} is not valid JSON: it may be cut short; download it again") from None
    if not isinstance(value, dict):
        raise ConfigError(f"{path} must hold a JSON object, got {type(value).__name__}")
    return value


def read_corenet_yaml(path: Path) -> dict[str, Any]:
    """The `model.language_modeling.general_gpt` block of a CoreNet training configuration."""
    value = read_yaml(path)
    for key in ("model", "language_modeling", "general_gpt"):
        value = value.get(key) if isinstance(value, dict) else None
    if not isinstance(value, dict):
        raise ConfigError(f"{path} has no model.language_modeling.general_gpt block; expected CoreNet's training YAML")
    return value


def read_yaml(path: Path) -> Any:
    """What a YAML file holds. Raises ConfigError when it cannot be read."""
    import yaml  # only people who convert CoreNet checkpoints need it

    try:
        return yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror or error}") from None
    except (yaml.YAMLError, ValueError, LookupError, AttributeError, RecursionError):  # PyYAML lets the last four out
        raise ConfigError(f"{path} is not valid YAML") from None


def _as_int_if_whole(value: float) -> float:
    return int(value) if value == int(value) else value
