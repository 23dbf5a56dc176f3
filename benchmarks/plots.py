"""PNG plots of a report: tokens/s by model and precision, decode speed against context, and the roofline.

matplotlib comes with `pip install 'openelm-mlx[plot]'`. Colours are precisions in the bars, models elsewhere.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import OutputError

if TYPE_CHECKING:
    from .report import Row

_WIDTH_IN, _DPI = 8.0, 150
_BAR_IN = 0.28
_COLOURS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#7f7f7f", "#b8a800")  # Okabe and Ito's
_MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
_DASHES = ("-", "--", ":", "-.")


def draw_all(rows: Sequence[Row], folder: Path) -> list[tuple[str, str]]:
    """Write what these rows give into `folder`; (file name, title) of each. Raises OutputError without matplotlib."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise OutputError("plots need matplotlib: pip install 'openelm-mlx[plot]'") from None
    timed = [row for row in rows if row.result["generation_tps"]]
    drawn = []
    for name, title, draw, chosen in (
        ("tokens_per_second.png", "Decode tokens/s by model and precision", draw_bars, _bars(timed)),
        ("context.png", "Decode speed against context", draw_context, [row for row in timed if _batch(row) == 1]),
        ("roofline.png", "Roofline", draw_roofline, [row for row in rows if row.share("prefill")]),
    ):
        if chosen:
            _save(draw(chosen), folder / name)
            drawn.append((name, title))
    return drawn


def draw_bars(rows: Sequence[Row]) -> Any:
    """One group for each machine and model, one bar for each precision, with its interval."""
    groups = list(dict.fromkeys((row.chip, row.label) for row in rows))
    precisions = list(dict.fromkeys(row.precision for row in rows))
    machines = len({row.chip for row in rows})
    figure, axes = _figure(1.3 + _BAR_IN * (len(rows) + len(groups)))
    position, ticks = 0.0, []
    for chip, label in groups:
        bars = [row for row in rows if (row.chip, row.label) == (chip, label)]
        ticks.append((position + (len(bars) - 1) / 2, f"{label}\n{chip}" if machines > 1 else label))
        for row in bars:
            colour = _COLOURS[precisions.index(row.precision) % len(_COLOURS)]
            value = row.result["generation_tps"]
            low, high = row.result.get("generation_tps_interval") or (value, value)
            error = [[max(0.0, value - low)], [max(0.0, high - value)]]
            axes.barh(position, value, height=0.85, color=colour, xerr=error, ecolor="#444444", capsize=2)
            axes.annotate(f" {value:,.0f}", (max(value, high), position), va="center", fontsize=8)
            position += 1
        position += 0.8
    axes.set_yticks([tick for tick, _ in ticks], [text for _, text in ticks], fontsize=8)
    axes.invert_yaxis()
    axes.margins(x=0.12)
    axes.set_xlim(left=0)
    axes.set_xlabel(f"decode, tokens/s ({_shape_text(rows)}; bars: 95 % interval)")
    axes.set_title(_title(rows, "Tokens/s by model and precision"))
    entries = [
        (name, {"color": _COLOURS[i % len(_COLOURS)], "marker": "s", "linestyle": ""})
        for i, name in enumerate(precisions)
    ]
    _legend(figure, axes, entries)
    return figure


def draw_context(rows: Sequence[Row]) -> Any:
    """A line for each machine, model and precision over the tokens in the cache, on average while decoding."""
    figure, axes = _figure(4.5)
    models = list(dict.fromkeys(row.label for row in rows))
    series = list(dict.fromkeys((row.chip, row.label, row.precision) for row in rows))
    precisions = list(dict.fromkeys(row.precision for row in rows))
    chips = list(dict.fromkeys(row.chip for row in rows))
    entries = []
    for key in series:
        chip, label, precision = key
        points = sorted(_context_points(rows, key))
        style = {
            "color": _COLOURS[models.index(label) % len(_COLOURS)],
            "linestyle": _DASHES[precisions.index(precision) % len(_DASHES)],
            "marker": _MARKERS[chips.index(chip) % len(_MARKERS)],
        }
        axes.plot([x for x, _ in points], [y for _, y in points], markersize=4, linewidth=1.4, **style)
        name = f"{label}, {precision}"
        entries.append((f"{name}, {chip}" if len(chips) > 1 else name, style))
    axes.set_xlabel("tokens in the cache (mean while decoding)")
    axes.set_ylabel("decode, tokens/s")
    axes.set_ylim(bottom=0)
    axes.set_xlim(left=0)
    axes.set_title(_title(rows, "Decode speed against context"))
    _legend(figure, axes, entries)
    return figure


def draw_roofline(rows: Sequence[Row]) -> Any:
    """Operations/s over operations per byte: what each phase reached, under what the device can do."""
    figure, axes = _figure(5.0)
    models = list(dict.fromkeys((row.label, row.precision) for row in rows))
    chips = list(dict.fromkeys(row.chip for row in rows))
    points = [(row, phase, *point) for row in rows for phase in ("prefill", "decode") if (point := _point(row, phase))]
    left, right = min(x for *_, x, _ in points) / 3, max(x for *_, x, _ in points) * 3
    for chip in chips:
        bandwidth, compute = _ceilings([row for row in rows if row.chip == chip])
        right = max(right, 3 * compute / bandwidth)
        xs = [left, compute / bandwidth, right]
        axes.plot(
            xs, [min(bandwidth * x, compute) for x in xs], color="#444444", linestyle=_DASHES[chips.index(chip) % 4]
        )
        text = f"{chip}: {bandwidth / 1e9:,.0f} GB/s, {compute / 1e9:,.0f} GFLOP/s"
        axes.annotate(text, (right, compute), ha="right", va="bottom", fontsize=7, color="#444444")
    for row, phase, x, y in points:
        colour = _COLOURS[models.index((row.label, row.precision)) % len(_COLOURS)]
        style = {"markerfacecolor": colour if phase == "decode" else "white", "color": colour}
        axes.plot(x, y, marker=_MARKERS[chips.index(row.chip) % len(_MARKERS)], markersize=6, linestyle="", **style)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("operations per byte (filled: decode, hollow: prefill)")
    axes.set_ylabel("operations/s")
    axes.set_title(_title(rows, "Roofline: what was reached, below what this device can do", len(chips) == 1))
    entries = [
        (f"{label}, {precision}", {"color": _COLOURS[i % len(_COLOURS)], "marker": "o", "linestyle": ""})
        for i, (label, precision) in enumerate(models)
    ]
    _legend(figure, axes, entries)
    return figure


def _bars(rows: Sequence[Row]) -> list[Row]:
    """One row for each machine, model and precision: at the shape that most of them have, else at their first."""
    if not rows:
        return []
    (common, _), *_ = Counter(_shape(row) for row in rows).most_common(1)
    chosen: dict[tuple[str, str, str], Row] = {}
    for row in rows:
        key = (row.chip, row.label, row.precision)
        if key not in chosen or (_shape(row) == common and _shape(chosen[key]) != common):
            chosen[key] = row
    return list(chosen.values())


def _context_points(rows: Sequence[Row], key: tuple[str, str, str]) -> Iterator[tuple[float, float]]:
    for row in rows:
        if (row.chip, row.label, row.precision) == key:
            held = row.result["prompt_tokens"] + row.result["generation_tokens"] / 2
            yield held, row.result["generation_tps"]


def _point(row: Row, phase: str) -> tuple[float, float] | None:
    """(operations per byte, operations/s) of a phase."""
    part = row.result["limits"][phase]
    return (part["flops"] / part["bytes"], part["flops"] / part["seconds"]) if part["seconds"] else None


def _ceilings(rows: Sequence[Row]) -> tuple[float, float]:
    """The best bandwidth and the best throughput that any run on this machine found."""
    devices = [row.result["limits"]["device"] for row in rows]
    return max(device["bandwidth_bytes_s"] for device in devices), max(device["matmul_flops_s"] for device in devices)


def _shape(row: Row) -> tuple[int, int, int]:
    return row.result["prompt_tokens"], row.result["generation_tokens"], _batch(row)


def _batch(row: Row) -> int:
    return int(row.result.get("batch_size", 1))


def _shape_text(rows: Sequence[Row]) -> str:
    shapes = {_shape(row) for row in rows}
    if len(shapes) > 1:
        return "prompts of several lengths"
    ((prompt, generated, batch),) = shapes
    return f"{prompt} prompt tokens, {generated} generated" + (f", {batch} texts at once" if batch > 1 else "")


def _title(rows: Sequence[Row], text: str, with_chip: bool = True) -> str:
    chips = {row.chip for row in rows}
    return f"{text}\n{next(iter(chips))}" if len(chips) == 1 and with_chip else text


def _figure(height_in: float) -> tuple[Any, Any]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(_WIDTH_IN, height_in), dpi=_DPI, layout="constrained")
    axes = figure.add_subplot()
    axes.grid(alpha=0.3)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    return figure, axes


def _legend(figure: Any, axes: Any, entries: Sequence[tuple[str, dict[str, Any]]]) -> None:
    """Below the plot, where nothing is hidden by it."""
    from matplotlib.lines import Line2D

    handles = [Line2D([], [], label=name, **style) for name, style in entries]
    columns = 1 if max(len(name) for name, _ in entries) > 45 else 2 if len(entries) > 3 else len(entries)
    figure.legend(handles=handles, loc="outside lower center", ncols=columns, fontsize=8, frameon=False)


def _save(figure: Any, path: Path) -> None:
    figure.savefig(path)
