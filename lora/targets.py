"""What a run trains, said in a few lines: names, counts and shares."""

import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import mlx.nn as nn
from mlx.utils import tree_flatten

from ..adapter_config import LINEAR_KEYS, AdapterSpec
from ..adapters import adapter_weights
from ..model import Model

_LAYER = re.compile(r"transformer\.layers\.(\d+)\.?(.*)")


@dataclass(frozen=True)
class Targets:
    """The trained parts of a model. `names` has one entry for each kind of layer, with the numbers it has."""

    trainable: int  # parameters
    total: int  # parameters, the adapters' included, a quantised matrix counted by its elements
    names: tuple[str, ...]  # "transformer.layers.0-15.attn.qkv_proj"
    adapted: str  # "64 of 64 linear layers"

    @property
    def lines(self) -> tuple[str, ...]:
        share = 100 * self.trainable / self.total
        return (
            f"training {self.trainable:,} of {self.total:,} parameters ({share:.2f} %): {self.adapted}",
            *self.names,
        )


def describe_targets(model: Model, spec: AdapterSpec, trained: Mapping[str, nn.Module]) -> Targets:
    """`trained`: what `add_adapters` returned."""
    numbers: dict[str, list[int]] = defaultdict(list)
    others = []
    for path in trained:
        found = _LAYER.fullmatch(path)
        if found:
            numbers[found[2]].append(int(found[1]))
        else:
            others.append(path)
    names = [f"transformer.layers.{_ranges(each)}{'.' if key else ''}{key}" for key, each in numbers.items()]
    count = sum(map(len, numbers.values()))
    if spec.fine_tune_type == "full":
        adapted = f"{count} of {len(model.layers)} layers, whole"
    else:
        adapted = f"{count} of {len(model.layers) * len(LINEAR_KEYS)} linear layers"
    trainable = sum(array.size for array in adapter_weights(model).values())
    base = model.config.num_parameters()
    total = base if spec.fine_tune_type == "full" else base + trainable
    return Targets(trainable, total, (*names, *(_embedding_name(path, trained[path]) for path in others)), adapted)


def trainable_names(model: Model) -> list[str]:
    """Every trained array by name."""
    flat: Any = tree_flatten(model.trainable_parameters())
    return [name for name, _ in flat]


def _embedding_name(path: str, module: nn.Module) -> str:
    return f"{path} (input only)" if type(module).__name__ == "InputLoRAEmbedding" else path


def _ranges(numbers: list[int]) -> str:
    """`0-3,7` for 0, 1, 2, 3, 7."""
    parts: list[list[int]] = []
    for number in sorted(numbers):
        if parts and number == parts[-1][1] + 1:
            parts[-1][1] = number
        else:
            parts.append([number, number])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in parts)
