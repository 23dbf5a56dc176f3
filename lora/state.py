"""Where a run stands, and the file from which it goes on as if it had never stopped.

`training_state.safetensors` holds the trained weights, the optimizer's arrays and a JSON record, together: it appears
whole or not at all, so whatever ends a run leaves a state that loads. Data order and dropout are functions of the
seed and the iteration; the record holds these, and the schedule's length.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten, tree_unflatten

from ..atomic_file import new_file
from ..config_keys import listing
from ..errors import CheckpointError, OutputError
from ..model import Model
from ..safetensors_file import read_header

STATE_NAME = "training_state.safetensors"
FORMAT_VERSION = 1
_RECORD = "openelm_lora"  # the metadata entry that holds the JSON
_WEIGHTS, _OPTIMIZER = "weights.", "optimizer."


@dataclass
class Progress:
    """Where a run stands."""

    iteration: int = 0  # batches done
    update: int = 0  # optimizer steps done
    trained_tokens: int = 0  # targets seen
    best_loss: float | None = None  # the lowest on the validation data
    best_iteration: int | None = None
    untrained_loss: float | None = None  # on the validation data, before the first update
    without_gain: int = 0  # validations since then
    seconds: float = 0.0  # spent in updates

    def note_validation(self, loss: float) -> bool:
        """Whether this validation is the best so far; a loss that is no number never is."""
        if loss == loss and (self.best_loss is None or loss < self.best_loss):
            self.best_loss, self.best_iteration, self.without_gain = loss, self.iteration, 0
            return True
        self.without_gain += 1
        return False


def save_state(folder: Path, model: Model, optimizer: Any, progress: Progress, record: Mapping[str, Any]) -> None:
    """Replace the folder's state. `record`: what the run was asked for, ready for JSON. Raises OutputError."""
    arrays = _arrays(model, optimizer)
    mx.eval(arrays)
    text = json.dumps({"format_version": FORMAT_VERSION, "progress": asdict(progress), **record})
    with new_file(folder / STATE_NAME) as partial:
        try:
            mx.save_safetensors(str(partial), arrays, {_RECORD: text})
        except RuntimeError:
            raise OutputError(f"cannot write {folder / STATE_NAME}: is the disk full? the old state is kept") from None


def read_record(folder: Path) -> dict[str, Any]:
    """The record of a folder's state, without its arrays. Raises CheckpointError where there is none to go on from."""
    path = folder / STATE_NAME
    if not path.is_file():
        raise CheckpointError(f"nothing to resume: {folder} has no {STATE_NAME}; start without --resume")
    try:
        read_header(path)
    except CheckpointError:
        raise CheckpointError(
            f"{path} is damaged: begin a new run with --resume-adapter-file and the newest numbered adapters there"
        ) from None
    loaded: Any = mx.load(str(path), return_metadata=True)
    try:
        record = json.loads(loaded[1].get(_RECORD, ""))
        version = record["format_version"]
        Progress(**record["progress"])
    except (ValueError, KeyError, TypeError):
        raise CheckpointError(f"{path} is no training state of openelm lora") from None
    if version != FORMAT_VERSION:
        raise CheckpointError(f"{path} has format version {version}, expected {FORMAT_VERSION}: update openelm-mlx")
    return record


def restore(folder: Path, model: Model, optimizer: Any) -> Progress:
    """Put a state's arrays into the model and the optimizer; return where the run stood.

    Raises CheckpointError unless names, shapes and dtypes agree exactly with what is trained.
    """
    record = read_record(folder)
    path = folder / STATE_NAME
    stored: Any = mx.load(str(path))
    optimizer.init(model.trainable_parameters())
    expected = _arrays(model, optimizer)
    faults = [f"missing {name}" for name in expected if name not in stored]
    for name, array in stored.items():
        if name not in expected:
            faults.append(f"unexpected {name}")
        elif (array.shape, array.dtype) != (expected[name].shape, expected[name].dtype):
            faults.append(
                f"{name} is {array.dtype} {array.shape}, expected {expected[name].dtype} {expected[name].shape}"
            )
    if faults:
        raise CheckpointError(f"{path} is not of this run: {listing(faults)}")
    weights = [(name.removeprefix(_WEIGHTS), array) for name, array in stored.items() if name.startswith(_WEIGHTS)]
    state = [(name.removeprefix(_OPTIMIZER), array) for name, array in stored.items() if name.startswith(_OPTIMIZER)]
    model.load_weights(weights, strict=False)  # the base's weights are not in it
    optimizer.state = tree_unflatten(state)
    mx.eval(stored)
    return Progress(**record["progress"])


def _arrays(model: Model, optimizer: Any) -> dict[str, mx.array]:
    weights: Any = tree_flatten(model.trainable_parameters())
    state: Any = tree_flatten(optimizer.state)
    return {f"{_WEIGHTS}{name}": array for name, array in weights} | {
        f"{_OPTIMIZER}{name}": array for name, array in state
    }
