"""Reads the keys of a `config.json`, and collects every complaint so that the user mends the file once."""

import reprlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from . import __version__
from .errors import ConfigError
from .scaling import interpolate, make_divisible

_SWISH_NAMES = ("swish", "silu")
_MAX_LAYERS = 1024  # far beyond any OpenELM; keeps a hostile config from filling the memory with widths
_REPR = reprlib.Repr()
_REPR.maxlevel, _REPR.maxstring = 2, 60


def read_keys(raw: Mapping[str, Any], where: str, defaults: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of an OpenELMConfig. Raises one ConfigError that lists every missing or bad key."""
    model_type = raw.get("model_type", "openelm")
    if model_type != "openelm":
        raise ConfigError(
            f"{where}: model_type {short(model_type)} is not supported; openelm-mlx {__version__} reads 'openelm'"
        )
    reader = _KeyReader(raw, defaults)
    fields = reader.fields()
    if reader.faults:
        raise ConfigError(f"{where}: {listing(reader.faults)}")
    return fields


class _KeyReader:
    def __init__(self, raw: Mapping[str, Any], defaults: Mapping[str, Any]):
        self.raw, self.defaults = raw, defaults
        self.faults: list[str] = []

    def fields(self) -> dict[str, Any]:
        sizes = {key: self._positive_int(key) for key in ("model_dim", "head_dim", "num_transformer_layers")}
        if sizes["num_transformer_layers"] > _MAX_LAYERS:
            self.faults.append(f"num_transformer_layers must be at most {_MAX_LAYERS}")
            sizes["num_transformer_layers"] = 0
        if sizes["head_dim"] % 2:
            self.faults.append(f"head_dim must be even (positions rotate pairs), got {sizes['head_dim']}")
        options = self._options()
        self._check_names()
        query_heads = self._query_heads(*sizes.values())
        kv_heads = self._kv_heads(query_heads, sizes["num_transformer_layers"])
        multipliers = self._ffn_multipliers(sizes["num_transformer_layers"])
        divisor = self._positive_int("ffn_dim_divisor")
        return {
            **sizes,
            **options,
            "num_query_heads": query_heads,
            "num_kv_heads": kv_heads,
            "ffn_multipliers": multipliers,
            "ffn_dim_divisor": divisor,
            "ffn_dims": tuple(make_divisible(m * sizes["model_dim"], divisor) for m in multipliers if divisor),
        }

    def _positive_int(self, key: str) -> int:
        """The value, or 0 after a complaint."""
        value = self.raw.get(key, self.defaults.get(key))
        if value is None:
            self.faults.append(f"{key} is missing")
        elif not _is_positive_int(value):
            self.faults.append(f"{key} must be a positive whole number, got {short(value)}")
        else:
            return value
        return 0

    def _options(self) -> dict[str, Any]:
        options: dict[str, Any] = {}
        for key in ("ffn_with_glu", "normalize_qk_projections", "share_input_output_layers"):
            options[key] = self._valid(key, lambda value: isinstance(value, bool), "true or false")
        for key in ("rms_norm_eps", "rope_freq_constant"):
            options[key] = self._valid(key, _is_positive_number, "a positive number")
        for key in ("vocab_size", "rope_max_length", "max_context_length"):
            options[key] = self._positive_int(key)
        vocab_size = options["vocab_size"]
        for key in ("bos_token_id", "eos_token_id"):
            what = f"a token id below {vocab_size}"
            options[key] = self._valid(key, lambda value: _is_int(value) and 0 <= value < (vocab_size or 2**31), what)
        return options

    def _valid(self, key: str, valid: Callable[[Any], bool], what: str) -> Any:
        value = self.raw.get(key, self.defaults[key])
        if not valid(value):
            self.faults.append(f"{key} must be {what}, got {short(value)}")
        return value

    def _check_names(self) -> None:
        activation = self.raw.get("activation_fn_name", "swish")
        if activation not in _SWISH_NAMES:
            self.faults.append(f"activation_fn_name must be 'swish', got {short(activation)}")
        norm = self.raw.get("normalization_layer_name", "rms_norm")
        if norm != "rms_norm":
            self.faults.append(f"normalization_layer_name must be 'rms_norm', got {short(norm)}")

    def _query_heads(self, dim: int, head: int, layers: int) -> tuple[int, ...]:
        if self.raw.get("num_query_heads") is not None:
            return self._per_layer("num_query_heads", layers)
        multipliers = self.raw.get("qkv_multipliers")
        if multipliers is None:
            self.faults.append("num_query_heads is missing (or qkv_multipliers, from which it follows)")
            return ()
        groups = self._positive_int("num_gqa_groups")
        if not (layers and dim and head and groups):
            return ()
        per_layer = self._multipliers("qkv_multipliers", multipliers, layers)
        return tuple(make_divisible(dim * m, head * groups) // head for m in per_layer)

    def _kv_heads(self, query_heads: tuple[int, ...], layers: int) -> tuple[int, ...]:
        if self.raw.get("num_kv_heads") is not None:
            kv_heads = self._per_layer("num_kv_heads", layers)
        elif query_heads:
            groups = self._positive_int("num_gqa_groups")
            kv_heads = tuple(q // groups for q in query_heads) if groups else ()
        else:
            return ()
        for i, (q, kv) in enumerate(zip(query_heads, kv_heads, strict=False)):
            if kv == 0 or q % kv:
                self.faults.append(f"layer {i}: {q} query heads cannot share {kv} key/value heads evenly")
        return kv_heads

    def _ffn_multipliers(self, layers: int) -> tuple[float, ...]:
        value = self.raw.get("ffn_multipliers")
        if value is None:
            self.faults.append("ffn_multipliers is missing")
            return ()
        return self._multipliers("ffn_multipliers", value, layers) if layers else ()

    def _multipliers(self, key: str, value: Any, layers: int) -> tuple[float, ...]:
        """One number for all layers, two bounds to interpolate between, or a list with one for each layer."""
        if _is_positive_number(value):
            return (value,) * layers
        if isinstance(value, list | tuple) and len(value) in (2, layers) and all(map(_is_positive_number, value)):
            return tuple(value) if len(value) == layers else tuple(interpolate(value, layers))
        self.faults.append(f"{key} must be a number, two bounds, or {layers} numbers, got {short(value)}")
        return ()

    def _per_layer(self, key: str, layers: int) -> tuple[int, ...]:
        value = self.raw[key]
        if not isinstance(value, list | tuple) or not all(map(_is_positive_int, value)):
            self.faults.append(f"{key} must be a list of positive whole numbers, got {short(value)}")
        elif layers and len(value) != layers:
            self.faults.append(f"{key} has {counted(len(value), 'entry', 'entries')} for {counted(layers, 'layer')}")
        else:
            return tuple(value)
        return ()


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_positive_int(value: Any) -> bool:
    return _is_int(value) and 0 < value < 2**31


def _is_positive_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < 2**31


def short(value: Any) -> str:
    """A value as an error message shows it: one line, never long, however deep or shared its parts are."""
    try:
        text = _REPR.repr(value)
    except ValueError:  # a number of thousands of digits
        text = f"a huge {type(value).__name__}"
    return text if len(text) <= 60 else text[:57] + "..."


def counted(number: int, what: str, several: str | None = None) -> str:
    """`1 token`, `2 tokens`; `several` is a plural that needs more than an s."""
    return f"{number} {what if number == 1 else several or f'{what}s'}"


def listing(faults: Sequence[str], shown: int = 8) -> str:
    """Complaints on one line; a long list is counted, not printed."""
    more = f"; and {len(faults) - shown} more" if len(faults) > shown else ""
    return "; ".join(faults[:shown]) + more
