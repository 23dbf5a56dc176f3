"""What an OpenELM is made of: one frozen record, from any of the four places a configuration can come from.

OpenELM scales its layers: early layers have few heads and a narrow feed-forward network, late layers many and a wide
one (paper, section 2.1; apple/corenet `general_gpt.py`). The per-layer widths are derived here, once; nothing
else in the project computes a width.

    OpenELMConfig.from_dict(json)      a Hub `config.json`
    OpenELMConfig.from_name("270M")    one of the four published sizes
    OpenELMConfig.from_yaml(path)      a CoreNet training configuration
    OpenELMConfig.from_shapes(shapes)  tensor shapes alone (a CoreNet `.pt` without its YAML)
"""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

from .errors import ConfigError

Shapes = Mapping[str, tuple[int, ...]]

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
_SWISH_NAMES = ("swish", "silu")
_MAX_LAYERS = 1024  # far beyond any OpenELM; keeps a hostile config from filling the memory with widths


def make_divisible(value: float, divisor: int) -> int:
    """`value` rounded to a multiple of `divisor`, at least one, and never more than 10 % below `value`.

    Source: apple/corenet `math_utils.make_divisible`.
    """
    rounded = max(divisor, int(value + divisor / 2) // divisor * divisor)
    return rounded + divisor if rounded < 0.9 * value else rounded


def interpolate(bounds: Sequence[float], num_layers: int) -> list[float]:
    """Multipliers for each layer between two bounds, rounded to two decimals.

    The rounding comes *before* `make_divisible`: without it 270M layer 5 gets 12 heads instead of 16.
    """
    low, high = bounds
    if num_layers == 1:
        return [round(low, 2)]
    step = (high - low) / (num_layers - 1)  # the order of operations is np.linspace's: it decides ties
    return [round(i * step + low, 2) for i in range(num_layers - 1)] + [round(high, 2)]


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
        return _Reader(raw, where).config()

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
        name = str(block.get("model_name", ""))
        limits = {
            key: block[key]
            for key in ("vocab_size", "max_context_length")
            if isinstance(block.get(key), int) and not isinstance(block[key], bool)
        }
        if published_size(name) is not None:
            return cls.from_name(name, **limits)
        if shapes is None:
            raise ConfigError(
                f"{path}: model_name {name!r} is not a published OpenELM ({', '.join(PUBLISHED_SIZES)}); "
                "its widths can only be read from a checkpoint's tensors"
            )
        context = limits.get("max_context_length", cls.max_context_length)
        return replace(cls.from_shapes(shapes), max_context_length=context, rope_max_length=2 * context)

    @classmethod
    def from_shapes(cls, shapes: Shapes, **changes: Any) -> "OpenELMConfig":
        """From tensor shapes alone, with Hub names. `changes` are config.json keys that shapes cannot tell.

        Raises ConfigError, naming the tensors that are missing or that contradict each other.
        """
        return cls.from_dict(_keys_from_shapes(shapes) | changes, where="the tensor shapes")

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
        """Compare with a checkpoint's tensors; raise one ConfigError listing all that is missing, extra or misshapen."""
        expected = self.parameter_shapes()
        faults = [f"missing {name}" for name in expected if name not in shapes]
        faults += [f"unexpected {name}" for name in shapes if name not in expected]
        faults += [
            f"{name} has shape {tuple(shapes[name])}, the config gives {expected[name]}"
            for name in expected
            if name in shapes and tuple(shapes[name]) != expected[name]
        ]
        if faults:
            raise ConfigError(f"{where} does not fit its config: {_listing(faults)}")

    def _qkv_multipliers(self) -> list[float] | float:
        """Bounds that give these head counts back, or one number where every layer has the same width."""
        groups = self.num_query_heads[0] // self.num_kv_heads[0]
        bounds = _find_bounds(
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
    import yaml  # only people who convert CoreNet checkpoints need it

    try:
        value: Any = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror or error}") from None
    except (yaml.YAMLError, ValueError, RecursionError):
        raise ConfigError(f"{path} is not valid YAML") from None
    for key in ("model", "language_modeling", "general_gpt"):
        value = value.get(key) if isinstance(value, dict) else None
    if not isinstance(value, dict):
        raise ConfigError(f"{path} has no model.language_modeling.general_gpt block; expected CoreNet's training YAML")
    return value


class _Reader:
    """Reads raw keys and collects every complaint, so that the user mends the file once."""

    def __init__(self, raw: Mapping[str, Any], where: str):
        self.raw, self.where = raw, where
        self.faults: list[str] = []

    def config(self) -> OpenELMConfig:
        model_type = self.raw.get("model_type", "openelm")
        if model_type != "openelm":
            raise ConfigError(f"{self.where}: model_type {model_type!r} is not supported; this tool reads 'openelm'")
        sizes = {
            key: self._positive_int(key)
            for key in ("model_dim", "head_dim", "num_transformer_layers", "vocab_size", "ffn_dim_divisor")
        }
        if sizes["num_transformer_layers"] > _MAX_LAYERS:
            self.faults.append(f"num_transformer_layers must be at most {_MAX_LAYERS}")
            sizes["num_transformer_layers"] = 0
        options = self._options()
        self._check_names()
        query_heads = self._query_heads(sizes)
        kv_heads = self._kv_heads(query_heads) if query_heads else ()
        multipliers = self._ffn_multipliers(sizes["num_transformer_layers"])
        if self.faults:
            raise ConfigError(f"{self.where}: {_listing(self.faults)}")
        ffn_dims = tuple(make_divisible(m * sizes["model_dim"], sizes["ffn_dim_divisor"]) for m in multipliers)
        return OpenELMConfig(
            **sizes,
            **options,
            num_query_heads=query_heads,
            num_kv_heads=kv_heads,
            ffn_dims=ffn_dims,
            ffn_multipliers=multipliers,
        )

    def _positive_int(self, key: str, default: int | None = None) -> int:
        value = self.raw.get(key, default)
        if value is None:
            self.faults.append(f"{key} is missing")
        elif not _is_int(value) or not 0 < value < 2**31:
            self.faults.append(f"{key} must be a positive whole number, got {value!r}")
        else:
            return value
        return 0

    def _options(self) -> dict[str, Any]:
        defaults = OpenELMConfig
        options: dict[str, Any] = {}
        for key in ("ffn_with_glu", "normalize_qk_projections", "share_input_output_layers"):
            options[key] = self.raw.get(key, getattr(defaults, key))
            if not isinstance(options[key], bool):
                self.faults.append(f"{key} must be true or false, got {options[key]!r}")
        for key in ("rms_norm_eps", "rope_freq_constant"):
            options[key] = self.raw.get(key, getattr(defaults, key))
            if not _is_positive_number(options[key]):
                self.faults.append(f"{key} must be a positive number, got {options[key]!r}")
        for key in ("rope_max_length", "max_context_length"):
            options[key] = self._positive_int(key, getattr(defaults, key))
        for key in ("bos_token_id", "eos_token_id"):
            options[key] = self.raw.get(key, getattr(defaults, key))
            if not _is_int(options[key]) or options[key] < 0:
                self.faults.append(f"{key} must be a token id, got {options[key]!r}")
        return options

    def _check_names(self) -> None:
        activation = self.raw.get("activation_fn_name", "swish")
        if activation not in _SWISH_NAMES:
            self.faults.append(f"activation_fn_name must be 'swish', got {activation!r}")
        norm = self.raw.get("normalization_layer_name", "rms_norm")
        if norm != "rms_norm":
            self.faults.append(f"normalization_layer_name must be 'rms_norm', got {norm!r}")

    def _query_heads(self, sizes: Mapping[str, int]) -> tuple[int, ...]:
        layers, dim, head = (sizes[key] for key in ("num_transformer_layers", "model_dim", "head_dim"))
        if isinstance(self.raw.get("num_query_heads"), list | tuple):
            return self._per_layer("num_query_heads", layers, _is_positive_int, "positive whole numbers")
        multipliers = self.raw.get("qkv_multipliers")
        if multipliers is None:
            self.faults.append("num_query_heads is missing (or qkv_multipliers, from which it follows)")
            return ()
        if not (layers and dim and head):
            return ()
        groups = self._positive_int("num_gqa_groups")
        per_layer = self._multipliers("qkv_multipliers", multipliers, layers)
        if not groups:
            return ()
        return tuple(make_divisible(dim * m, head * groups) // head for m in per_layer)

    def _kv_heads(self, query_heads: tuple[int, ...]) -> tuple[int, ...]:
        if isinstance(self.raw.get("num_kv_heads"), list | tuple):
            kv = self._per_layer("num_kv_heads", len(query_heads), _is_positive_int, "positive whole numbers")
        else:
            groups = self._positive_int("num_gqa_groups")
            kv = tuple(q // groups for q in query_heads) if groups else ()
        for i, (q, k) in enumerate(zip(query_heads, kv, strict=False)):
            if k == 0 or q % k:
                self.faults.append(f"layer {i}: {q} query heads cannot share {k} key/value heads evenly")
        return kv

    def _ffn_multipliers(self, layers: int) -> tuple[float, ...]:
        value = self.raw.get("ffn_multipliers")
        if value is None:
            self.faults.append("ffn_multipliers is missing")
        return self._multipliers("ffn_multipliers", value, layers) if value is not None and layers else ()

    def _multipliers(self, key: str, value: Any, layers: int) -> tuple[float, ...]:
        """One number for all layers, two bounds to interpolate between, or a list with one for each layer."""
        if _is_positive_number(value):
            return (value,) * layers
        if isinstance(value, list | tuple) and len(value) in (2, layers) and all(map(_is_positive_number, value)):
            return tuple(value) if len(value) == layers else tuple(interpolate(value, layers))
        self.faults.append(f"{key} must be a number, two bounds, or {layers} numbers, got {_short(value)}")
        return ()

    def _per_layer(self, key: str, layers: int, valid: Callable[[Any], bool], what: str) -> tuple[int, ...]:
        value = self.raw[key]
        if layers and len(value) != layers:
            self.faults.append(f"{key} has {len(value)} entries for {layers} layers")
        elif not all(map(valid, value)):
            self.faults.append(f"{key} must hold {what}, got {_short(value)}")
        else:
            return tuple(value)
        return ()


def _keys_from_shapes(shapes: Shapes) -> dict[str, Any]:
    """config.json keys that give the widths of these tensors (Hub names) back."""
    layers = 0
    while f"transformer.layers.{layers}.attn.qkv_proj.weight" in shapes:
        layers += 1
    faults = []

    def shape(name: str, rank: int = 2) -> tuple[int, ...]:
        found = shapes.get(name)
        if found is None or len(found) != rank or 0 in found:
            faults.append(f"{name} is missing" if found is None else f"{name} has shape {tuple(found)}")
            return (0,) * rank
        return tuple(found)

    vocab_size, model_dim = shape("transformer.token_embeddings.weight")
    if layers == 0:
        faults.append("transformer.layers.0.attn.qkv_proj.weight is missing")
    head_dim = shape("transformer.layers.0.attn.q_norm.weight", 1)[0] if layers else 0
    query_heads, kv_heads, ffn_dims, fans = [], [], [], set()
    for i in range(layers):
        prefix = f"transformer.layers.{i}"
        qkv_rows, _ = shape(f"{prefix}.attn.qkv_proj.weight")
        _, query_dim = shape(f"{prefix}.attn.out_proj.weight")
        ffn_rows, _ = shape(f"{prefix}.ffn.proj_1.weight")
        _, ffn_dim = shape(f"{prefix}.ffn.proj_2.weight")
        if faults or not head_dim:
            continue
        if query_dim % head_dim or qkv_rows <= query_dim or (qkv_rows - query_dim) % (2 * head_dim):
            faults.append(f"layer {i}: qkv_proj {qkv_rows} and out_proj {query_dim} are no heads of {head_dim}")
            continue
        query_heads.append(query_dim // head_dim)
        kv_heads.append((qkv_rows - query_dim) // (2 * head_dim))
        ffn_dims.append(ffn_dim)
        fans.add(ffn_rows / ffn_dim)
        if ffn_rows / ffn_dim not in (1, 2):
            faults.append(f"layer {i}: proj_1 has {ffn_rows} rows for proj_2's {ffn_dim} columns")
    if not faults and len(fans) > 1:
        faults.append("some layers have a gated feed-forward network and some do not")
    if faults:
        hint = "; without q_norm pass the configuration with --config" if layers and not head_dim else ""
        raise ConfigError(f"no OpenELM can be read from the tensor shapes: {_listing(faults)}{hint}")
    divisor = _ffn_divisor(ffn_dims)
    bounds = _find_bounds(ffn_dims, model_dim, divisor)
    return {
        "model_dim": model_dim,
        "vocab_size": vocab_size,
        "head_dim": head_dim,
        "num_transformer_layers": layers,
        "num_query_heads": query_heads,
        "num_kv_heads": kv_heads,
        "ffn_multipliers": interpolate(bounds, layers) if bounds else [d / model_dim for d in ffn_dims],
        "ffn_dim_divisor": divisor,
        "ffn_with_glu": fans == {2.0},
        "share_input_output_layers": "lm_head.weight" not in shapes,
    }


def _ffn_divisor(ffn_dims: Sequence[int]) -> int:
    """The largest power of two up to CoreNet's 256 that divides every width."""
    common = math.gcd(*ffn_dims)
    return math.gcd(common, 256)


def _find_bounds(dims: Sequence[int], model_dim: int, divisor: int) -> tuple[float, float] | None:
    """Two-decimal bounds (m0, m1) whose interpolation gives `dims`; None where no such pair exists.

    OpenELM's own (0.5, 1.0) and (0.5, 4.0) are among the round numbers tried first, so a published model gets
    its published configuration back.
    """

    def reproduces(bounds: tuple[float, float]) -> bool:
        per_layer = interpolate(bounds, len(dims))
        return all(make_divisible(m * model_dim, divisor) == d for m, d in zip(per_layer, dims, strict=True))

    round_numbers = [i / 2 for i in range(1, 17)]
    exact = [(round(dims[0] / model_dim, 2), round(dims[-1] / model_dim, 2))]
    candidates = [*product(round_numbers, round_numbers), *exact]
    return next((bounds for bounds in candidates if reproduces(bounds)), None)


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_positive_int(value: Any) -> bool:
    return _is_int(value) and 0 < value < 2**31


def _is_positive_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < 2**31


def _as_int_if_whole(value: float) -> float:
    return int(value) if value == int(value) else value


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _listing(faults: Sequence[str], shown: int = 8) -> str:
    """Complaints on one line; a long list is counted, not printed."""
    more = f"; and {len(faults) - shown} more" if len(faults) > shown else ""
    return "; ".join(faults[:shown]) + more
