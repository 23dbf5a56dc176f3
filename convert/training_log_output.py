"""A training log shown: a few lines, one JSON object, or a plot of loss and learning rate."""

import json
import logging
from pathlib import Path

from ..atomic_file import check_file_target, new_file
from ..config_keys import counted
from ..errors import ConfigError, OutputError
from ..home import expand_home
from .training_log import TrainingLog, read_log

_BLUE, _GREY, _RED = "#1f5fa8", "#8a8a8a", "#c0392b"


def print_log(path: Path, *, as_json: bool, plot: str | None) -> int:
    """Print the summary; with `plot`, draw it there first. Raises OpenELMError."""
    target = None if plot is None else expand_home(plot)
    if target is not None:
        check_file_target(target)
    log = read_log(path)
    if target is not None:
        draw(log, target, title=path.name)
    print(json.dumps(log.describe()) if as_json else sentence(log, str(path)))
    return 0


def sentence(log: TrainingLog, name: str) -> str:
    """The summary for people."""
    facts = log.describe()
    lines = [
        f"{name} (CoreNet training log)",
        f"{facts['iterations']:,} of {facts['planned_iterations']:,} iterations in "
        f"{counted(facts['epochs'], 'epoch')}, {facts['points']} logged"
        + (f", {counted(facts['restarts'], 'restart')}" if facts["restarts"] else ""),
        f"loss: first {_number(facts['first_loss'])}, last {_number(facts['last_loss'])}, best "
        f"{_number(facts['best_loss'])} at iteration {_number(facts['best_iteration'])}"
        + (f"; {facts['not_finite']} not finite" if facts["not_finite"] else ""),
        f"learning rate: at most {facts['max_learning_rate']:g}, last {facts['last_learning_rate']:g}",
        *(f"validation after epoch {epoch}: loss {loss:.4f}" for epoch, loss in log.validation[-3:]),
        f"{facts['seconds'] / 3600:.2f} hours of training, {facts['started']} to {facts['ended']}",
    ]
    return "\n".join(lines)


def draw(log: TrainingLog, target: Path, *, title: str) -> None:
    """Loss (left axis) and learning rate (right axis) by iteration, in the format that the name ends in.

    Raises ConfigError without matplotlib, OutputError for a format it does not write.
    """
    logging.getLogger("matplotlib").setLevel(logging.WARNING)  # it tells of its font cache
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise ConfigError("--plot needs matplotlib: pip install 'openelm-mlx[plot]'") from None
    figure = Figure(figsize=(8, 4.5), dpi=120, layout="constrained")
    canvas = FigureCanvasAgg(figure)
    formats = canvas.get_supported_filetypes()
    if target.suffix.removeprefix(".").lower() not in formats:
        raise OutputError(f"{target}: expected a name that ends in .{', .'.join(sorted(formats))}")
    iterations = [point.iteration for point in log.points]
    loss = figure.add_subplot()
    rate = loss.twinx()
    rate.plot(iterations, [point.learning_rate for point in log.points], color=_GREY, linewidth=1, linestyle="--")
    loss.plot(iterations, [point.loss for point in log.points], color=_BLUE, linewidth=1.6)
    ends = {point.epoch: point.iteration for point in log.points}  # the last of each epoch
    validated = [(ends[epoch], value) for epoch, value in log.validation if epoch in ends]
    if validated:
        loss.plot(*zip(*validated, strict=True), color=_RED, marker="o", linestyle="", label="validation loss")
        loss.legend(loc="upper center", frameon=False)
    loss.set_zorder(rate.get_zorder() + 1)
    loss.patch.set_visible(False)
    loss.set_title(title)
    loss.set_xlabel("iteration")
    loss.set_ylabel("loss (nats a token)", color=_BLUE)
    rate.set_ylabel("learning rate", color=_GREY)
    rate.set_ylim(bottom=0)
    rate.ticklabel_format(axis="y", style="sci", scilimits=(-3, 3))
    loss.grid(alpha=0.25)
    with new_file(target) as partial:
        figure.savefig(partial)


def _number(value: float | int | None) -> str:
    if value is None:
        return "none"
    return f"{value:,}" if isinstance(value, int) else f"{value:.4f}"
