"""What a run tells while it trains: lines on stderr, a progress bar in a terminal, and services such as wandb."""

import sys
from collections.abc import Mapping
from contextlib import ExitStack
from importlib import import_module
from pathlib import Path
from typing import Any

from ..errors import ConfigError
from .callbacks import TrainingCallback
from .parallel import rank
from .state import Progress

SERVICES = ("wandb", "swanlab")


def tell(line: str) -> None:
    """One line on stderr, from the first of several ranks."""
    if rank() == 0:
        print(f"openelm: {line}", file=sys.stderr, flush=True)


class Lines(TrainingCallback):
    """The two reports as lines, and above them, in a terminal, a bar that moves with every update."""

    def __init__(self, iterations: int, progress: Progress):
        self._iterations, self._bar, self._stack = iterations, None, ExitStack()
        if sys.stderr.isatty():
            self._bar = self._started_bar(progress.iteration)

    def close(self) -> None:
        """Take the bar away."""
        self._stack.close()

    def on_update(self, progress: Progress) -> None:
        if self._bar is not None:
            bars, task = self._bar
            bars.update(task, completed=progress.iteration)

    def on_train_loss_report(self, train_info: dict[str, Any]) -> None:
        tell(
            f"iteration {train_info['iteration']}/{self._iterations}: loss {train_info['train_loss']:.4f}, "
            f"learning rate {train_info['learning_rate']:.3g}, gradient {train_info['grad_norm']:.3g}, "
            f"{train_info['tokens_per_second']:.0f} tokens/s, peak {train_info['peak_memory']:.2f} GB, "
            f"{duration(train_info['eta_s'])} left"
        )

    def on_val_loss_report(self, val_info: dict[str, Any]) -> None:
        best = " (best)" if val_info["best_iteration"] == val_info["iteration"] else ""
        tell(
            f"iteration {val_info['iteration']}: validation loss {val_info['val_loss']:.4f}{best}, "
            f"{val_info['val_time']:.1f} s"
        )

    def _started_bar(self, done: int) -> Any:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        columns = (TextColumn("training"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        bars = Progress(*columns, console=Console(stderr=True), transient=True)
        self._stack.enter_context(bars)
        return bars, bars.add_task("training", total=self._iterations, completed=done)


class Service(TrainingCallback):
    """wandb or swanlab, which log alike: the two reports, as mlx-lm sends them."""

    def __init__(self, module: Any):
        self._module = module

    def on_train_loss_report(self, train_info: dict[str, Any]) -> None:
        self._module.log(train_info, step=train_info["iteration"])

    def on_val_loss_report(self, val_info: dict[str, Any]) -> None:
        self._module.log({key: value for key, value in val_info.items() if value is not None},
                         step=val_info["iteration"])  # fmt: skip


def service_modules(report_to: str | None) -> dict[str, Any]:
    """The packages of the services named, no run begun. Raises ConfigError for what is unknown or not installed."""
    names = [name.strip().lower() for name in (report_to or "").split(",") if name.strip()]
    for name in names:
        if name not in SERVICES:
            raise ConfigError(f"--report-to knows {', '.join(SERVICES)}, got {name}")
    return {name: _imported(name) for name in names}


def services(report_to: str | None, project: str | None, folder: Path, settings: Mapping[str, Any]) -> list[Service]:
    """The services named, separated by commas, each with its run begun. Raises ConfigError for unknown ones."""
    modules = service_modules(report_to)
    for name, module in modules.items():
        if name == "wandb":
            module.init(project=project, name=folder.name, dir=str(folder), config=dict(settings))
        else:
            module.init(project=project, experiment_name=folder.name, logdir=str(folder / "swanlog"),
                        config=dict(settings))  # fmt: skip
    return [Service(module) for module in modules.values()]


def duration(seconds: float) -> str:
    """`1 h 02 min`, `3 min 05 s` or `7 s`."""
    whole = round(seconds)
    if whole >= 3600:
        return f"{whole // 3600} h {whole % 3600 // 60:02} min"
    return f"{whole // 60} min {whole % 60:02} s" if whole >= 60 else f"{whole} s"


def _imported(name: str) -> Any:
    try:
        return import_module(name)
    except ImportError as error:
        raise ConfigError(f"--report-to {name} needs it installed ({error}): pip install {name}") from None
