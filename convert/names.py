"""Tensor names. The Hub's are CoreNet's behind a prefix, but for the untied output head; the table runs both ways.

Training puts wrappers around modules (data parallel, sharded, recomputed, compiled), each a part of its own in the
names; a state dict that was saved without taking them off is read all the same.
"""

from collections.abc import Iterable, Mapping
from typing import TypeVar

from ..errors import CheckpointError

_PREFIX = "transformer."
_RENAMED = {"classifier.weight": "lm_head.weight"}  # CoreNet -> Hub
_RENAMED_BACK = {hub: corenet for corenet, hub in _RENAMED.items()}

# Buffers that follow from the configuration. Current releases do not save them, older exports did.
_DROPPED = ("causal_mask", "inv_freq")

_WRAPPERS = frozenset({"module", "_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_orig_mod"})

T = TypeVar("T")


def without_wrappers(tensors: Mapping[str, T], where: str) -> dict[str, T]:
    """`module.layers.0._checkpoint_wrapped_module.norm` -> `layers.0.norm`. Raises CheckpointError when two collide."""
    bare = {".".join(part for part in name.split(".") if part not in _WRAPPERS): name for name in tensors}
    if len(bare) != len(tensors):
        twice = next(name for name in tensors if name not in bare.values())
        raise CheckpointError(f"{where} holds {twice:.100} twice, with and without a training wrapper; save one model")
    return {short: tensors[name] for short, name in bare.items()}


def to_hub(name: str) -> str:
    """`layers.0.ffn.proj_1.weight` -> `transformer.layers.0.ffn.proj_1.weight`."""
    return _RENAMED.get(name, _PREFIX + name)


def to_corenet(name: str) -> str:
    """The inverse of `to_hub`."""
    return _RENAMED_BACK.get(name, name.removeprefix(_PREFIX))


def is_corenet(names: Iterable[str]) -> bool:
    """Whether these are CoreNet's names: no tensor has the Hub's prefix."""
    return not any(name.startswith(_PREFIX) for name in names)


def with_hub_names(tensors: Mapping[str, T], where: str) -> dict[str, T]:
    """The tensors under Hub names, without the buffers that nobody needs. Raises CheckpointError when none is left."""
    rename = to_hub if is_corenet(tensors) else str
    kept = {rename(name): tensor for name, tensor in tensors.items() if name.rpartition(".")[2] not in _DROPPED}
    if not kept:
        raise CheckpointError(f"{where} holds no tensors; expected an OpenELM's weights")
    return kept
