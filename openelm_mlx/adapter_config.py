"""What an `adapter_config.json` says: which layers are adapted, and how.

The keys are mlx-lm's. One is ours, `input_embedding` in `lora_parameters`: an adapter of the input embedding alone.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .config import read_json_object
from .config_keys import listing, short
from .errors import ConfigError


@dataclass(frozen=True)
class AdapterSpec:
    """Which layers are adapted, and how: what an `adapter_config.json` says.

    `num_layers` counts from the last transformer layer; 0 or less means all. `keys` are names inside a transformer
    layer ("attn.qkv_proj") or in the whole model ("transformer.token_embeddings"); None means every linear layer of
    the transformer layers. `input_embedding` adds the input-only embedding adapter. `base_model` is for messages only.
    """

    num_layers: int
    fine_tune_type: str = "lora"  # or "dora"; or "full": whole weights of those layers, no adapter
    rank: int = 8
    scale: float = 20.0
    dropout: float = 0.0
    keys: tuple[str, ...] | None = None
    input_embedding: bool = False
    base_model: str | None = None


def read_adapter_config(path: Path) -> AdapterSpec:
    """An `adapter_config.json` of this project or of mlx-lm. Raises one ConfigError listing every missing or bad key.

    Old files say `lora_layers` for `num_layers` and `use_dora` for the type.
    """
    raw = read_json_object(path)
    kind = raw.get("fine_tune_type", "dora" if raw.get("use_dora") else "lora")
    fields: dict[str, Any] = {
        "num_layers": raw.get("num_layers", raw.get("lora_layers")),
        "fine_tune_type": kind,
        "base_model": raw.get("model"),
    }
    faults = []
    if kind not in ("lora", "dora", "full"):
        faults.append(f"fine_tune_type must be lora, dora or full, got {short(kind)}")
    if type(fields["num_layers"]) is not int:
        faults.append(f"num_layers must be a whole number, got {short(fields['num_layers'])}")
    if kind != "full":
        parameters = raw.get("lora_parameters")
        if isinstance(parameters, dict):
            fields |= _lora_parameters(parameters, faults)
        else:
            faults.append(f"lora_parameters must be an object, got {short(parameters)}")
    if faults:
        raise ConfigError(f"{path}: {listing(faults)}")
    return AdapterSpec(**fields)


def write_adapter_config(path: Path, spec: AdapterSpec) -> None:
    """An `adapter_config.json` that `read_adapter_config` and mlx-lm read; nothing in it is left to a default."""
    raw: dict[str, Any] = {"fine_tune_type": spec.fine_tune_type, "num_layers": spec.num_layers}
    if spec.base_model is not None:
        raw["model"] = spec.base_model
    if spec.fine_tune_type != "full":
        parameters: dict[str, Any] = {"rank": spec.rank, "scale": spec.scale, "dropout": spec.dropout}
        if spec.keys is not None:
            parameters["keys"] = list(spec.keys)
        if spec.input_embedding:  # mlx-lm knows no such layer, and refuses the tensors
            parameters["input_embedding"] = True
        raw["lora_parameters"] = parameters
    path.write_text(json.dumps(raw, indent=2) + "\n", encoding="utf-8")


def _lora_parameters(parameters: Mapping[str, Any], faults: list[str]) -> dict[str, Any]:
    """The fields of `lora_parameters`; complaints are added to `faults`."""
    rank, keys = parameters.get("rank"), parameters.get("keys")
    scale, alpha, dropout = parameters.get("scale"), parameters.get("alpha"), parameters.get("dropout", 0.0)
    input_embedding = parameters.get("input_embedding", False)
    if type(rank) is not int or not 0 < rank < 2**16:
        faults.append(f"rank must be a whole number from 1 to 65535, got {short(rank)}")
    if scale is not None and alpha is not None:
        # mlx-lm multiplied the two in 2024 and ignores alpha today: which was meant cannot be told.
        faults.append(
            "scale and alpha exclude each other; mlx-lm of 2024 meant scale * alpha / rank: write that as scale"
        )
    elif not _is_number(scale if alpha is None else alpha):
        faults.append(f"scale must be a number, got {short(scale if alpha is None else alpha)}")
    elif alpha is not None and not faults:
        scale = alpha / rank
    if not (_is_number(dropout) and 0 <= dropout < 1):
        faults.append(f"dropout must be at least 0 and below 1, got {short(dropout)}")
    if keys is not None and not (isinstance(keys, list) and all(isinstance(key, str) for key in keys)):
        faults.append(f"keys must be a list of names, got {short(keys)}")
    elif keys is not None:
        keys = tuple(keys)
    if not isinstance(input_embedding, bool):
        faults.append(f"input_embedding must be true or false, got {short(input_embedding)}")
    return {"rank": rank, "scale": scale, "dropout": dropout, "keys": keys, "input_embedding": input_embedding}


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) < 2**31  # false for NaN
