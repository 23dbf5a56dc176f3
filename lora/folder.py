"""The adapter folder of a run: what is in it, whether a new run may take it, and when each file is written.

adapters.safetensors       what generate, chat and fuse load: the newest saved, and after the run the best
adapter_config.json        which layers, how, of which base model
best_adapters.safetensors  the best on the validation data so far
0000100_adapters.safetensors, ...  as they were, under mlx-lm's names
training_state.safetensors what --resume goes on from
training_log.jsonl         every report
"""

import os
import shutil
from pathlib import Path
from typing import Any

from ..adapter_config import AdapterSpec
from ..adapter_folder import save_adapter_weights, save_adapters
from ..adapters import CONFIG_NAME, WEIGHTS_NAME
from ..atomic_file import new_file
from ..errors import OutputError
from ..model import Model
from .log import LOG_NAME
from .state import STATE_NAME, Progress, save_state

BEST_NAME, LAST_NAME = "best_adapters.safetensors", "last_adapters.safetensors"
_NUMBERED = "[0-9]" * 7 + "_adapters.safetensors"
_OURS = (STATE_NAME, WEIGHTS_NAME, CONFIG_NAME, BEST_NAME, LAST_NAME, LOG_NAME)


def check_folder(folder: Path, *, force: bool) -> None:
    """Raise OutputError unless a new run may write here: earlier adapters are replaced with `force` alone."""
    if folder.exists() and not folder.is_dir():
        raise OutputError(f"{folder} is a file; an adapter folder is to be made: choose another --adapter-path")
    if folder.is_dir() and any(folder.iterdir()) and not force:
        how = "go on with --resume, " if (folder / STATE_NAME).is_file() else ""
        raise OutputError(
            f"{folder} is not empty: {how}choose another --adapter-path, or replace its adapters with --force"
        )
    parent = next(each for each in (folder, *folder.absolute().parents) if each.is_dir())
    if not os.access(parent, os.W_OK | os.X_OK):
        raise OutputError(f"{parent} is not writable; choose another --adapter-path")


class AdapterFolder:
    """Writes a run's files. Nothing is written before `begin`."""

    def __init__(self, path: Path, model: Model, optimizer: Any, spec: AdapterSpec, record: dict[str, Any]):
        self.path, self._model, self._optimizer = path, model, optimizer
        self._spec, self._record = spec, record

    def begin(self) -> None:
        """Make the folder, or take away what an earlier run wrote: its state first, so that no mixture is resumed."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise OutputError(f"cannot make {self.path}: {error.strerror or error}") from None
        for name in _OURS:
            (self.path / name).unlink(missing_ok=True)
        for path in self.path.glob(_NUMBERED):
            path.unlink()

    def save(self, progress: Progress) -> None:
        """The state, and from the first update on the adapters, under their own number too."""
        save_state(self.path, self._model, self._optimizer, progress, self._record)
        if progress.iteration:
            save_adapters(self.path, self._model, self._spec, extra_config={"training": self._record["settings"]})
            _duplicate(self.path / WEIGHTS_NAME, self.path / f"{progress.iteration:07d}_adapters.safetensors")

    def save_best(self) -> None:
        save_adapter_weights(self.path / BEST_NAME, self._model)

    def finish(self, progress: Progress) -> bool:
        """Let `adapters.safetensors` be the best; returns whether that is another than the last."""
        best = self.path / BEST_NAME
        if progress.best_iteration in (None, progress.iteration) or not best.is_file():
            return False
        save_adapter_weights(self.path / LAST_NAME, self._model)
        _duplicate(best, self.path / WEIGHTS_NAME)
        return True


def _duplicate(source: Path, target: Path) -> None:
    """A second name for a file's content, as it is now: our files are replaced, never written into."""
    with new_file(target) as partial:
        try:
            os.link(source, partial)
        except OSError:  # a volume without links
            shutil.copyfile(source, partial)
