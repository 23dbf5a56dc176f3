"""What lies around a model's weights in a `.pt`: a training checkpoint, or a dictionary with the model under one key.

CoreNet's trainer saves {iterations, epoch, model_state_dict, optim_state_dict, best_metric, is_interval_ckpt,
gradient_scaler_state_dict[, ema_state_dict]} (apple/corenet `checkpoint_utils.py`): three times the model, of which
only the model's own numbers are ever read. Others save {"model": ...} or {"state_dict": ...}.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from ..errors import CheckpointError
from ..tensors import StoredTensor
from .torch_file import tensors_of

_MODEL, _EMA, _OPTIMIZER = "model_state_dict", "ema_state_dict", "optim_state_dict"
_OTHER_MODEL_KEYS = ("model", "state_dict")
_COUNTERS = {"iterations": int, "epoch": int, "best_metric": float, "is_interval_ckpt": bool}


def model_state(obj: Any, where: str, *, use_ema: bool = False) -> tuple[dict[str, StoredTensor], dict[str, Any]]:
    """The named tensors of the model in what torch.save was given, and the facts of its training ({} where none are).

    use_ema: the moving average of the weights in place of the weights. Raises CheckpointError when there is none, or
    when it cannot be told which of several entries is the model.
    """
    keys = [key for key in (_MODEL, *_OTHER_MODEL_KEYS) if isinstance(obj, Mapping) and _is_state(obj.get(key))]
    if len(keys) > 1:
        raise CheckpointError(f"{where} holds several models ({', '.join(keys)}); save one state dict and convert that")
    facts = _facts(obj) if keys == [_MODEL] else {}
    if use_ema:
        if not keys or not _is_state(obj.get(_EMA)):
            raise CheckpointError(
                f"{where} holds no moving average of the weights ({_EMA}); leave out --use-ema to take the weights"
            )
        return tensors_of(obj[_EMA], f"{where} ({_EMA})"), facts
    if not keys:
        return tensors_of(obj, where), {}
    return tensors_of(obj[keys[0]], f"{where} ({keys[0]})"), facts


def _is_state(value: Any) -> bool:
    return isinstance(value, Mapping) and any(isinstance(entry, StoredTensor) for entry in value.values())


def _facts(obj: Mapping[str, Any]) -> dict[str, Any]:
    """Counters, whether there is a moving average, and the size of the optimiser's state. JSON values only."""
    counters = {key: obj[key] for key, kind in _COUNTERS.items() if type(obj.get(key)) is kind}
    return counters | {
        "has_ema": _is_state(obj.get(_EMA)),
        "optimizer_bytes": sum(tensor.nbytes for tensor in _tensors_in(obj.get(_OPTIMIZER))),
    }


def _tensors_in(value: Any) -> Iterator[StoredTensor]:
    """Every tensor in nested containers (the reader has bounded how deeply they nest)."""
    if isinstance(value, StoredTensor):
        yield value
    elif isinstance(value, Mapping):
        for entry in value.values():
            yield from _tensors_in(entry)
    elif isinstance(value, list | tuple):
        for entry in value:
            yield from _tensors_in(entry)
