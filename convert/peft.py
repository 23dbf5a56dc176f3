"""Adapters as Hugging Face PEFT stores them: the one table of names, and the configuration, read and written.

PEFT keeps `lora_A.weight` (R, I) and `lora_B.weight` (O, R) where mlx-lm has `lora_a` (I, R) and `lora_b` (R, O):
every matrix is transposed, the square ones too. Its scale is lora_alpha / r, or lora_alpha / sqrt(r) with use_rslora.
Its embedding adapter changes the input alone, also where the output head is tied: that is our `input_embedding`.

Sources: huggingface/peft `tuners/lora/{config,layer,variants}.py`, `utils/save_and_load.py`.
"""

import math
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from ..adapter_config import EMBEDDING_PATH, AdapterSpec, resolved_scale
from ..config import read_json_object
from ..config_keys import listing, short
from ..errors import CheckpointError, ConfigError

CONFIG_NAME, WEIGHTS_NAMES = "adapter_config.json", ("adapter_model.safetensors", "adapter_model.bin")
MATRICES = {  # our parameter <-> PEFT's; transposed
    "lora_a": "lora_A.weight",
    "lora_b": "lora_B.weight",
    "input_lora_a": "lora_embedding_A",
    "input_lora_b": "lora_embedding_B",
}
MAGNITUDE = {"m": "lora_magnitude_vector"}  # the same vector on both sides
_OURS = {theirs: ours for ours, theirs in (MATRICES | MAGNITUDE).items()}
_PREFIX = "base_model.model."
# Some savers leave the adapter's name in: `lora_A.default.weight`.
_THEIR_NAME = re.compile(
    r"(?:base_model\.model\.)?(?P<path>.+)\.(?P<part>lora_[AB]|lora_embedding_[AB]|lora_magnitude_vector)"
    r"(?:\.(?!weight$)\w+)?(?P<weight>\.weight)?"
)
_LAYER = re.compile(r"transformer\.layers\.(\d+)\.(.+)")
_HARMLESS_STARTS = (True, False, "gaussian", "orthogonal", "eva", None)  # the others change the base's weights
# Settings that make PEFT compute or train something that no adapter folder of ours or of mlx-lm holds.
_REFUSED = (
    "alora_invocation_tokens", "arrow_config", "ensure_weight_tying", "kasa_config", "layer_replication", "lora_bias",
    "modules_to_save", "monteclora_config", "target_parameters", "trainable_token_indices", "use_bdlora", "use_qalora",
)  # fmt: skip


def is_peft(folder: Path) -> bool:
    """Whether a folder holds a PEFT adapter: its adapter_config.json says so, whatever the folder is called."""
    file = folder / CONFIG_NAME
    return file.is_file() and "peft_type" in read_json_object(file)


def their_name(path: str, part: str) -> str:
    """`transformer.layers.0.attn.qkv_proj`, `lora_a` -> the tensor's name in a PEFT file."""
    return f"{_PREFIX}{path}.{(MATRICES | MAGNITUDE)[part]}"


def our_name(name: str) -> tuple[str, str] | None:
    """The inverse: (path, part), or None for a tensor that belongs to no LoRA or DoRA layer."""
    found = _THEIR_NAME.fullmatch(name)
    if found is None:
        return None
    part = f"{found['part']}.weight" if found["part"] in ("lora_A", "lora_B") else found["part"]
    return found["path"], _OURS[part]


def read_scale(raw: Mapping[str, Any], rank: int, where: str) -> float:
    """The factor of B A in a PEFT configuration whose matrices all have this rank. Raises one ConfigError.

    What makes PEFT compute anything but LoRA or DoRA on unchanged base weights is refused here as well.
    """
    faults = [f"{key} is set, which has no equivalent here" for key in _REFUSED if raw.get(key)]
    if raw.get("peft_type") != "LORA":
        faults.append(f"peft_type is {short(raw.get('peft_type'))}, expected 'LORA'")
    start = raw.get("init_lora_weights", True)
    if start not in _HARMLESS_STARTS:
        faults.append(
            f"init_lora_weights {short(start)} changed the base model's weights too: "
            "save it with PEFT's path_initial_model_for_weight_conversion first"
        )
    if raw.get("bias", "none") != "none":
        faults.append(f"bias is {short(raw['bias'])}, but OpenELM has no biases")
    ranks = {raw.get("r"), *_pattern(raw, "rank_pattern", faults)}
    if rank not in ranks:
        faults.append(f"r is {short(raw.get('r'))}, but the tensors have rank {rank}")
    alpha = raw.get("lora_alpha")
    if not _is_number(alpha):
        faults.append(f"lora_alpha must be a number, got {short(alpha)}")
    elif any(other != alpha for other in _pattern(raw, "alpha_pattern", faults)):
        faults.append(f"alpha_pattern {short(raw['alpha_pattern'])} gives layers scales of their own; one is expected")
    if faults:
        raise ConfigError(f"{where}: {listing(faults)}; fuse it into its base model with PEFT, then convert that")
    return resolved_scale(rank, scale=None, alpha=alpha, rslora=bool(raw.get("use_rslora")))


def spec_of(raw: Mapping[str, Any], rank: int, paths: Collection[str], where: str) -> AdapterSpec:
    """Our configuration for a PEFT configuration whose tensors sit at these paths of the model."""
    scale = read_scale(raw, rank, where)
    dropout, base = raw.get("lora_dropout", 0.0), raw.get("base_model_name_or_path")
    if not (_is_number(dropout) and 0 <= dropout < 1):
        raise ConfigError(f"{where}: lora_dropout must be at least 0 and below 1, got {short(dropout)}")
    linear = [path for path in paths if path != EMBEDDING_PATH]
    count, keys = _keys(linear, everywhere=_is_everywhere(raw))
    return AdapterSpec(
        num_layers=count,
        fine_tune_type="dora" if raw.get("use_dora") else "lora",
        rank=rank,
        scale=scale,
        dropout=dropout,
        keys=keys,
        input_embedding=EMBEDDING_PATH in paths,
        rslora=bool(raw.get("use_rslora")),
        base_model=base if isinstance(base, str) else None,
    )


def config_of(spec: AdapterSpec, paths: Collection[str]) -> dict[str, Any]:
    """The adapter_config.json that PEFT reads, for a LoRA or DoRA whose tensors sit at these paths."""
    alpha = spec.scale * (math.sqrt(spec.rank) if spec.rslora else spec.rank)
    nearest = round(alpha)
    named = any(_LAYER.fullmatch(key) for key in spec.keys or ())
    everywhere = not named and _keys([path for path in paths if path != EMBEDDING_PATH], everywhere=True)[0] > 0
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": spec.base_model,
        "r": spec.rank,
        "lora_alpha": nearest if math.isclose(alpha, nearest, rel_tol=1e-12) else alpha,
        "lora_dropout": spec.dropout,
        "target_modules": sorted({path.rpartition(".")[2] if everywhere else path for path in paths}),
        "use_dora": spec.fine_tune_type == "dora",
        "use_rslora": spec.rslora,
        "bias": "none",
        "fan_in_fan_out": False,
        "init_lora_weights": True,
        "inference_mode": True,
        "modules_to_save": None,
    }


def check_complete(parts: Mapping[str, Collection[str]], *, dora: bool, where: str) -> None:
    """Raise CheckpointError unless every module (path -> its parameters) has all that its kind of adapter has."""
    faults = []
    for path, found in parts.items():
        embedding = "input_lora_a" in found or "input_lora_b" in found
        if embedding and path != EMBEDDING_PATH:
            faults.append(f"{path} has an embedding adapter; OpenELM's embedding is {EMBEDDING_PATH}")
        if embedding and dora:
            faults.append("DoRA with an adapter on the embedding: PEFT and this project mean different things by it")
        wanted = {"input_lora_a", "input_lora_b"} if embedding else {"lora_a", "lora_b"} | ({"m"} if dora else set())
        faults += [f"{path} has no {part}" for part in sorted(wanted - set(found))]
        faults += [f"{path} has an unexpected {part}" for part in sorted(set(found) - wanted)]
    if faults or not parts:
        raise CheckpointError(f"{where}: {listing(faults) or 'no LoRA tensors'}")


def _keys(paths: list[str], *, everywhere: bool) -> tuple[int, tuple[str, ...]]:
    """(num_layers, keys) for these linear layers: short names where every layer has the same ones, else full paths.

    How many layers the model has, an adapter does not say; `everywhere` is whether its makers left none out.
    """
    found = [match.groups() for match in map(_LAYER.fullmatch, paths) if match]
    layers: dict[int, set[str]] = {}
    for number, key in found:
        layers.setdefault(int(number), set()).add(key)
    regular = (
        everywhere and sorted(layers) == list(range(len(layers))) and len(set(map(frozenset, layers.values()))) == 1
    )
    if not regular:
        return -1, tuple(sorted(paths))
    others = [path for path in paths if not _LAYER.fullmatch(path)]  # the output head
    return len(layers), tuple(sorted({*layers[0], *others}))


def _is_everywhere(raw: Mapping[str, Any]) -> bool:
    """Whether a PEFT configuration means every transformer layer: it lists names that hold no layer's number."""
    targets = raw.get("target_modules")
    names_only = isinstance(targets, list) and not any(re.search(r"\d+\.", str(target)) for target in targets)
    some = raw.get("layers_to_transform") is not None or bool(raw.get("exclude_modules"))
    return (names_only or targets == "all-linear") and not some


def _pattern(raw: Mapping[str, Any], key: str, faults: list[str]) -> list[Any]:
    pattern = raw.get(key) or {}
    if not isinstance(pattern, dict):
        faults.append(f"{key} must be an object, got {short(pattern)}")
        return []
    return list(pattern.values())


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) < 2**31  # false for NaN
