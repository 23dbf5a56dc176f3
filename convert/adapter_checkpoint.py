"""Apple's LoRA and DoRA files: the whole model with the adapter beside every adapted matrix, in one flat state dict.

    layers.0.attn.qkv_proj.base_layer.weight               (O, I)
    layers.0.attn.qkv_proj.lora_A.lora.weight              (R, I), and lora_B.lora.weight (O, R)
    layers.0.attn.qkv_proj.lora_magnitude_vector.lora      (O,), DoRA only
    token_embeddings.lora_embedding_A.lora                 (R, V), and lora_embedding_B.lora (E, R)

A linear layer computes W + s B A, DoRA scales each row of that to its magnitude. The embedding's adapter changes what
goes in: E + s (B A)'; a tied output head keeps E. The factor s = alpha / R is in no file but the training YAML.
Sources: apple/corenet `lora.py`, `peft_configs/*.yaml`.

Axes: I input width, O output width, R rank, V vocabulary, E model_dim.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..adapter_config import EMBEDDING_PATH, AdapterSpec, resolved_scale
from ..config import OpenELMConfig, read_yaml
from ..config_keys import listing, short
from ..errors import CheckpointError, ConfigError
from ..tensors import FLOATING, StoredTensor

APPLE_ALPHA = 32  # apple/corenet peft_configs: alpha 32 at rank 32
_NAME = re.compile(
    r"(?P<module>.+)\.(?:(?P<base>base_layer\.weight)"
    r"|lora_(?P<embedding>embedding_)?(?P<side>[AB])\.(?P<adapter>\w+)(?:\.weight)?"
    r"|lora_(?P<magnitude>magnitude)_vector\.(?P<adapter_m>\w+)(?:\.weight)?)"
)


Shaped = dict[str, tuple[StoredTensor, tuple[int, ...]]]


@dataclass(frozen=True)
class AdapterPart:
    """The adapter of one matrix; `magnitude` with DoRA."""

    a: StoredTensor  # (R, I), of an embedding (R, V)
    b: StoredTensor  # (O, R), of an embedding (E, R)
    magnitude: StoredTensor | None  # (O,)


@dataclass(frozen=True)
class CheckpointAdapter:
    """The adapters of a whole-model file, by the path of the matrix they belong to (the Hub's names)."""

    parts: Mapping[str, AdapterPart]
    rank: int
    scale: float
    dropout: float = 0.0
    rslora: bool = False
    alpha_is_known: bool = True  # from the training YAML; else Apple's was taken
    head_follows: bool = False  # mlx-lm's embedding adapter, never Apple's: a tied output head changes too

    @property
    def kind(self) -> str:
        return "dora" if any(part.magnitude is not None for part in self.parts.values()) else "lora"

    @property
    def embedding(self) -> AdapterPart | None:
        return self.parts.get(EMBEDDING_PATH)

    @property
    def num_parameters(self) -> int:
        return sum(_size(tensor) for part in self.parts.values() for tensor in (part.a, part.b, part.magnitude))

    def without_embedding(self) -> "CheckpointAdapter":
        return replace(self, parts={path: part for path, part in self.parts.items() if path != EMBEDDING_PATH})

    def describe(self) -> dict[str, Any]:
        """The facts, ready for JSON."""
        return {
            "kind": self.kind,
            "rank": self.rank,
            "scale": self.scale,
            "modules": len(self.parts),
            "parameters": self.num_parameters,
            "input_embedding": self.embedding is not None,
        }

    def spec(self, config: OpenELMConfig, where: str) -> AdapterSpec:
        """What an adapter folder says of it. Raises CheckpointError where such a folder cannot."""
        layers: dict[int, set[str]] = {}
        for path, part in self.parts.items():
            if path == EMBEDDING_PATH:
                continue
            match = re.fullmatch(r"transformer\.layers\.(\d+)\.(.+)", path)
            if match is None or (part.magnitude is None) != (self.kind == "lora"):
                raise CheckpointError(f"{where} adapts {path} in a way that no adapter folder can say; use --fuse")
            layers.setdefault(int(match[1]), set()).add(match[2])
        total = config.num_transformer_layers
        keys = layers[max(layers)] if layers else set()
        if sorted(layers) != list(range(total - len(layers), total)) or any(found != keys for found in layers.values()):
            raise CheckpointError(f"{where} adapts not all layers alike, which no adapter folder can say; use --fuse")
        return AdapterSpec(
            num_layers=len(layers) or total,
            fine_tune_type=self.kind,
            rank=self.rank,
            scale=self.scale,
            dropout=self.dropout,
            keys=tuple(sorted(keys)),
            input_embedding=self.embedding is not None,
            rslora=self.rslora,
        )


def split_adapter(
    tensors: Mapping[str, StoredTensor], where: str, yaml: Path | None
) -> tuple[dict[str, StoredTensor], CheckpointAdapter | None]:
    """The base model's tensors under their plain names, and the adapter (None where these are no such file's).

    `tensors` have Hub names. `yaml` is the training configuration, for the factor. Raises one CheckpointError that
    lists what is missing, misshapen or double, or a ConfigError for a YAML of another training.
    """
    base: dict[str, StoredTensor] = {}
    found: dict[str, dict[str, StoredTensor]] = {}
    names: set[str] = set()
    for name, tensor in tensors.items():
        match = _NAME.fullmatch(name)
        if match is None or match["base"]:
            plain = name if match is None else f"{match['module']}.weight"
            if plain in base:
                raise CheckpointError(f"{where} holds {plain} twice, plain and under an adapter; save one model")
            base[plain] = tensor.renamed(plain)
            continue
        names.add(match["adapter"] or match["adapter_m"])
        found.setdefault(match["module"], {})["magnitude" if match["magnitude"] else match["side"]] = tensor
    if not found:
        return base, None
    if len(names) > 1:
        raise CheckpointError(f"{where} holds {len(names)} adapters ({', '.join(sorted(names)):.80}); save one")
    parts, rank = _parts(found, base, where)
    training = _training(yaml, rank)
    alpha, dropout, rslora = training or (APPLE_ALPHA, 0.0, False)
    scale = resolved_scale(rank, scale=None, alpha=alpha, rslora=rslora)
    return base, CheckpointAdapter(parts, rank, scale, dropout, rslora, alpha_is_known=training is not None)


def _parts(
    found: Mapping[str, Mapping[str, StoredTensor]], base: Mapping[str, StoredTensor], where: str
) -> tuple[dict[str, AdapterPart], int]:
    """The parts, and their one rank, with every complaint in one error."""
    faults: list[str] = []
    parts: dict[str, AdapterPart] = {}
    ranks = {sides["A"].shape[0] for sides in found.values() if "A" in sides and sides["A"].shape}
    for path, sides in found.items():
        weight = base.get(f"{path}.weight")
        missing = [name for name in ("A", "B") if name not in sides]
        if weight is None or len(weight.shape) != 2:
            faults.append(f"{path} has an adapter and no matrix")
        elif missing:
            faults.append(f"{path} lacks lora_{missing[0]}")
        else:
            parts[path] = AdapterPart(sides["A"], sides["B"], sides.get("magnitude"))
            faults += _misshapen(path, parts[path], weight.shape, sides["A"].shape[0] if sides["A"].shape else 0)
    if len(ranks) > 1:
        faults.append(f"ranks differ: {', '.join(map(str, sorted(ranks)))}")
    if faults:
        raise CheckpointError(f"{where} is no whole LoRA or DoRA checkpoint: {listing(faults)}")
    return parts, ranks.pop()


def _misshapen(path: str, part: AdapterPart, shape: tuple[int, ...], rank: int) -> list[str]:
    rows, columns = shape
    inputs, outputs = (rows, columns) if path == EMBEDDING_PATH else (columns, rows)
    wanted: Shaped = {"lora_A": (part.a, (rank, inputs)), "lora_B": (part.b, (outputs, rank))}
    if part.magnitude is not None:
        if path == EMBEDDING_PATH:
            return [f"{path} has a DoRA magnitude, which no embedding of CoreNet's can have"]
        wanted["magnitude"] = (part.magnitude, (outputs,))
    return [
        f"{path}.{name} is {tensor.dtype} {tensor.shape}, expected floats {expected}"
        for name, (tensor, expected) in wanted.items()
        if tensor.shape != expected or tensor.dtype not in FLOATING
    ]


def _training(yaml: Path | None, rank: int) -> tuple[float, float, bool] | None:
    """(alpha, dropout, rslora) of the YAML's model.lora block, or None without one."""
    entries = [] if yaml is None else _lora_entries(yaml)
    said = {(entry.get("r"), entry.get("lora_alpha"), entry.get("use_rslora", False)) for entry in entries}
    if not said:
        return None
    ((r, alpha, rslora), *others) = said
    if others:
        raise ConfigError(f"{yaml}: its layers have different r, lora_alpha or use_rslora, which is not read")
    if r != rank or not isinstance(alpha, int | float) or type(rslora) is not bool:
        raise ConfigError(
            f"{yaml} has r {short(r)}, lora_alpha {short(alpha)}, use_rslora {short(rslora)}; the adapter's rank is "
            f"{rank}: name the YAML of its own training"
        )
    dropout = entries[0].get("lora_dropout", 0.0)
    return float(alpha), dropout if type(dropout) in (int, float) and 0 <= dropout < 1 else 0.0, rslora


def _lora_entries(yaml: Path) -> list[Mapping[str, Any]]:
    """The `params` of each entry of model.lora.config that has an alpha; [] for a YAML without that block."""
    value: Any = read_yaml(yaml)
    for key in ("model", "lora", "config"):
        value = value.get(key) if isinstance(value, Mapping) else None
    blocks = [entry.get("params") for entry in value if isinstance(entry, Mapping)] if isinstance(value, list) else []
    return [params for params in blocks if isinstance(params, Mapping) and _hashable(params)]


def _hashable(params: Mapping[str, Any]) -> bool:
    return all(not isinstance(params.get(key), list | dict) for key in ("r", "lora_alpha", "use_rslora"))


def _size(tensor: StoredTensor | None) -> int:
    return 0 if tensor is None else math.prod(tensor.shape)
