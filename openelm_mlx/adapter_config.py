"""What an `adapter_config.json` says: which layers are adapted, how, and of which base model.

The keys are mlx-lm's, so it reads what we write. Ours, which it ignores: `format_version`, `base` (the base model's
dimensions), `modules` (what else "full" trains), and in `lora_parameters` `rslora` and `input_embedding`, an adapter of
the input embedding alone.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from .config import OpenELMConfig, read_json_object
from .config_keys import listing, short
from .errors import ConfigError

FORMAT_VERSION = 1  # mlx-lm's own files have none
FINE_TUNE_TYPES = ("lora", "dora", "full")
EMBEDDING_KINDS = ("none", "input", "both")
EMBEDDING_PATH = "transformer.token_embeddings"
LINEAR_KEYS = ("attn.qkv_proj", "attn.out_proj", "ffn.proj_1", "ffn.proj_2")  # every linear layer of an OpenELM's layer


@dataclass(frozen=True)
class AdapterSpec:
    """Which layers are adapted, and how: what an `adapter_config.json` says.

    `num_layers` counts from the last transformer layer; 0 or less means all. `keys` are names inside a transformer
    layer ("attn.qkv_proj") or in the whole model ("transformer.token_embeddings"); None means every linear layer of
    the transformer layers. `input_embedding` adds the input-only embedding adapter. `scale` is what the product of the
    two matrices is multiplied by, already resolved (see `resolved_scale`); `rslora` records that it was alpha /
    sqrt(rank). With "full", `keys` are further modules of the model that are trained whole. `base_model` is its name,
    for messages; `base` its dimensions (`base_dimensions`), None where the folder does not tell.
    """

    num_layers: int
    fine_tune_type: str = "lora"  # or "dora"; or "full": whole weights of those layers, no adapter
    rank: int = 8
    scale: float = 20.0
    dropout: float = 0.0
    keys: tuple[str, ...] | None = None
    input_embedding: bool = False
    rslora: bool = False
    base_model: str | None = None
    base: Mapping[str, Any] | None = None

    def with_embedding(self, kind: str) -> "AdapterSpec":
        """The same with the embedding adapted as `kind` says: "none", "input" (the tied head stays) or "both"."""
        if kind not in EMBEDDING_KINDS:
            raise ConfigError(f"embedding must be {', '.join(EMBEDDING_KINDS)}; got {short(kind)}")
        keys = tuple(key for key in self.keys or LINEAR_KEYS if key != EMBEDDING_PATH)
        return replace(self, keys=(*keys, EMBEDDING_PATH) if kind == "both" else keys, input_embedding=kind == "input")


def resolved_scale(rank: int, *, scale: float | None, alpha: float | None, rslora: bool = False) -> float:
    """The factor of an adapter: `scale` itself, alpha / rank, or with rslora alpha / sqrt(rank).

    Raises ConfigError unless exactly one of the two is given, as a number.
    """
    if scale is not None and alpha is not None:
        # mlx-lm multiplied the two in 2024 and ignores alpha today: which was meant cannot be told.
        raise ConfigError(
            "scale and alpha exclude each other; mlx-lm of 2024 meant scale * alpha / rank: write that as scale"
        )
    given = scale if alpha is None else alpha
    if given is None or not _is_number(given):
        raise ConfigError(f"scale must be a number, got {short(given)}")
    if alpha is None:
        return float(given)
    return given / (math.sqrt(rank) if rslora else rank)


def base_dimensions(config: OpenELMConfig) -> dict[str, Any]:
    """What must be equal in the base model that an adapter is loaded onto, ready for JSON."""
    return {
        "model_dim": config.model_dim,
        "head_dim": config.head_dim,
        "num_transformer_layers": config.num_transformer_layers,
        "vocab_size": config.vocab_size,
        "num_query_heads": list(config.num_query_heads),
        "num_kv_heads": list(config.num_kv_heads),
        "ffn_dims": list(config.ffn_dims),
        "share_input_output_layers": config.share_input_output_layers,
    }


def check_base(spec: AdapterSpec, config: OpenELMConfig, where: str) -> None:
    """Raise ConfigError when the folder records dimensions that are not this model's."""
    here, said = base_dimensions(config), spec.base or {}
    differing = [key for key in here if said.get(key, here[key]) != here[key]]
    if differing:
        key, value = differing[0], said[differing[0]]
        trained_on = f" {short(spec.base_model)}" if spec.base_model else " another base model"
        raise ConfigError(
            f"{where} was trained on{trained_on} with {key} {short(value)}; this model has {short(here[key])}: "
            "name the base model that it was trained on"
        )


def adapter_config(spec: AdapterSpec, config: OpenELMConfig | None) -> dict[str, Any]:
    """The object to write for an adapter of a model with this configuration; keys and scale are resolved.

    None where the model is not at hand (an adapter that is only translated): the dimensions stay as `spec` has them.
    """
    raw: dict[str, Any] = {
        "base": spec.base if config is None else base_dimensions(config),
        "fine_tune_type": spec.fine_tune_type,
        "format_version": FORMAT_VERSION,
        "model": spec.base_model,
        "num_layers": spec.num_layers,
    }
    if spec.fine_tune_type == "full":
        return raw | {"modules": list(spec.keys or ())}
    return raw | {
        "lora_parameters": {
            "rank": spec.rank,
            "scale": spec.scale,
            "dropout": spec.dropout,
            "keys": list(LINEAR_KEYS if spec.keys is None else spec.keys),
            "rslora": spec.rslora,
            "input_embedding": spec.input_embedding,
        }
    }


def read_adapter_config(path: Path) -> AdapterSpec:
    """An `adapter_config.json` of this project or of mlx-lm. Raises one ConfigError listing every missing or bad key.

    Old files have no version, and say `lora_layers` for `num_layers` and `use_dora` for the type.
    """
    raw = read_json_object(path)
    _check_kind_of_file(raw, path)
    kind = raw.get("fine_tune_type", "dora" if raw.get("use_dora") else "lora")
    model = raw.get("model")
    fields: dict[str, Any] = {
        "num_layers": raw.get("num_layers", raw.get("lora_layers")),
        "fine_tune_type": kind,
        "base_model": model if isinstance(model, str) else None,
        "base": raw.get("base"),
    }
    faults = []
    if kind not in FINE_TUNE_TYPES:
        faults.append(f"fine_tune_type must be lora, dora or full, got {short(kind)}")
    if type(fields["num_layers"]) is not int:
        faults.append(f"num_layers must be a whole number, got {short(fields['num_layers'])}")
    if not isinstance(fields["base"], dict | None):
        faults.append(f"base must be an object, got {short(fields['base'])}")
    if kind == "full":
        fields["keys"] = _names(raw.get("modules", []), "modules", faults)
    elif isinstance(parameters := raw.get("lora_parameters"), dict):
        fields |= read_lora_parameters(parameters, faults)
    else:
        faults.append(f"lora_parameters must be an object, got {short(parameters)}")
    if faults:
        raise ConfigError(f"{path}: {listing(faults)}")
    return AdapterSpec(**fields)


def read_lora_parameters(parameters: Mapping[str, Any], faults: list[str]) -> dict[str, Any]:
    """The fields of an AdapterSpec that `lora_parameters` has; complaints are added to `faults`."""
    rank, dropout = parameters.get("rank"), parameters.get("dropout", 0.0)
    scale: float | None = None
    good_rank = rank if isinstance(rank, int) and not isinstance(rank, bool) and 0 < rank < 2**16 else 0
    if not good_rank:
        faults.append(f"rank must be a whole number from 1 to 65535, got {short(rank)}")
    flags = {name: parameters.get(name, False) for name in ("rslora", "input_embedding")}
    faults += [
        f"{name} must be true or false, got {short(value)}" for name, value in flags.items() if type(value) is not bool
    ]
    try:
        given = {name: parameters.get(name) for name in ("scale", "alpha")}
        scale = resolved_scale(good_rank or 1, **given, rslora=bool(flags["rslora"]))
    except ConfigError as error:
        faults.append(str(error))
    if not (_is_number(dropout) and 0 <= dropout < 1):
        faults.append(f"dropout must be at least 0 and below 1, got {short(dropout)}")
    keys = parameters.get("keys")
    keys = None if keys is None else _names(keys, "keys", faults)
    return {"rank": rank, "scale": scale, "dropout": dropout, "keys": keys} | flags


def _check_kind_of_file(raw: Mapping[str, Any], path: Path) -> None:
    """Raise ConfigError for a newer format of ours, and for a folder of PEFT's, which is of another kind."""
    version = raw.get("format_version", 0)
    if type(version) is not int or not 0 <= version <= FORMAT_VERSION:
        raise ConfigError(
            f"{path} has format_version {short(version)}; this openelm-mlx reads up to {FORMAT_VERSION}: update it"
        )
    if "peft_type" in raw:
        raise ConfigError(f"{path} is PEFT's, expected an adapter of openelm-mlx or mlx-lm; convert it first")


def _names(value: Any, key: str, faults: list[str]) -> tuple[str, ...]:
    if isinstance(value, list) and all(isinstance(name, str) for name in value):
        return tuple(value)
    faults.append(f"{key} must be a list of names, got {short(value)}")
    return ()


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) < 2**31  # false for NaN
