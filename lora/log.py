"""`training_log.jsonl` in the adapter folder: settings, then one report a line; and the loss curve drawn from it."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..atomic_file import check_file_target, new_file
from ..errors import ConfigError
from .callbacks import TrainingCallback

LOG_NAME = "training_log.jsonl"


class LogFile(TrainingCallback):
    """Appends every report as it comes, so that what a killed run has told is there."""

    def __init__(self, folder: Path, settings: Mapping[str, Any], iteration: int):
        """`iteration`: from which the run goes on; what an interrupted one had logged after it is taken back."""
        self._path = folder / LOG_NAME
        kept = [line for line in read_log(folder) if line.get("iteration", 0) <= iteration] if iteration else []
        entries = kept or [{"settings": dict(settings)}]
        with new_file(self._path) as partial:
            partial.write_text("".join(json.dumps(entry) + "\n" for entry in entries), encoding="utf-8")

    def on_train_loss_report(self, train_info: dict[str, Any]) -> None:
        self._append(train_info)

    def on_val_loss_report(self, val_info: dict[str, Any]) -> None:
        self._append(val_info)

    def _append(self, entry: Mapping[str, Any]) -> None:
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(entry) + "\n")


def read_log(folder: Path) -> list[dict[str, Any]]:
    """The log's entries; a last line that a kill cut short is left out."""
    path = folder / LOG_NAME
    entries = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines() if path.is_file() else []:
        try:
            entry = json.loads(line)
        except ValueError:
            continue
        if isinstance(entry, dict):
            entries.append(entry)
    return entries


def check_plot(file: Path) -> None:
    """Raise, before any work, unless a picture can be drawn into `file`."""
    check_file_target(file)
    _pyplot()
    if file.suffix.lower() not in (".png", ".svg", ".pdf"):
        raise ConfigError(f"{file} must end in .png, .svg or .pdf")


def plot_loss(folder: Path, file: Path) -> None:
    """Draw the folder's training and validation loss by iteration."""
    figure_class = _pyplot()
    entries = read_log(folder)
    figure = figure_class(figsize=(7, 4), layout="constrained")
    axes = figure.add_subplot()
    for key, label, marker in (("train_loss", "training", ""), ("val_loss", "validation", "o")):
        points = [(entry["iteration"], entry[key]) for entry in entries if key in entry]
        if points:
            axes.plot(*zip(*points, strict=True), label=label, marker=marker)
    axes.set_xlabel("iteration")
    axes.set_ylabel("loss per token (nats)")
    axes.grid(alpha=0.3)
    axes.legend()
    with new_file(file) as partial:
        figure.savefig(partial, dpi=150)


def _pyplot() -> Any:
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError(f"--plot needs matplotlib ({error}): pip install 'openelm-mlx[plot]'") from None
    return Figure
