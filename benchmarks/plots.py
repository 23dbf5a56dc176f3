"""PNG plots of a report: tokens/s by model and precision, decode speed against context, and the roofline.

matplotlib comes with `pip install 'openelm-mlx[plot]'`. Colours are precisions in the bars, models elsewhere.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import OutputError

if TYPE_CHECKING:
    from .report import Row

_WIDTH_IN, _DPI = 8.0, 150
_BAR_IN = 0.28
_COLOURS = (  # Okabe and Ito's first
    "#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#7f7f7f", "#b8a800",
    "#332288", "#882255", "#000000", "#8c564b",
)  # fmt: skip
_MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
_DASHES = ("-", "--", ":", "-.")
_GREY = "#444444"
_WIDE = 6  # from the slowest to the fastest: more, and the axis is logarithmic


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
    groups = _distinct((row.chip, row.label) for row in rows)
    precisions = _distinct(row.precision for row in rows)
    entries = [
        (name, {"color": _of(_COLOURS, precisions, name), "marker": "s", "linestyle": ""}) for name in precisions
    ]
    figure, (axes,) = _figure([_BAR_IN * (len(rows) + len(groups))], entries)
    several = len({row.chip for row in rows}) > 1
    position, ticks = 0.0, []
    for chip, label in groups:
        bars = [row for row in rows if (row.chip, row.label) == (chip, label)]
        ticks.append((position + (len(bars) - 1) / 2, f"{label}\n{chip}" if several else label))
        for row in bars:
            value = row.result["generation_tps"]
            low, high = row.result.get("generation_tps_interval") or (value, value)
            error = [[max(0.0, value - low)], [max(0.0, high - value)]]
            colour = _of(_COLOURS, precisions, row.precision)
            axes.barh(position, value, height=0.85, color=colour, xerr=error, ecolor="#444444", capsize=2)
            axes.annotate(f" {value:,.0f}", (max(value, high), position), va="center", fontsize=8)
            position += 1
        position += 0.8
    axes.set_yticks([tick for tick, _ in ticks], [text for _, text in ticks], fontsize=8)
    axes.set_ylim(position - 0.8, -1)
    axes.margins(x=0.12)
    axes.set_xlim(left=0)
    axes.set_xlabel(f"decode, tokens/s ({_shape_text(rows)}; lines: 95 % interval)")
    axes.set_title(_title(rows, "Tokens/s by model and precision"))
    return figure


def draw_context(rows: Sequence[Row]) -> Any:
    """A line for each machine, model and precision over the tokens in the cache, on average while decoding."""
    models, precisions, chips = (
        _distinct(getattr(row, name) for row in rows) for name in ("label", "precision", "chip")
    )
    entries = [(name, {"color": _of(_COLOURS, models, name)}) for name in models]
    entries += [(name, {"color": _GREY, "linestyle": _of(_DASHES, precisions, name)}) for name in precisions]
    if len(chips) > 1:
        entries += [(n, {"color": _GREY, "linestyle": "", "marker": _of(_MARKERS, chips, n)}) for n in chips]
    figure, (axes,) = _figure([4.0], entries)
    for key in _distinct((row.chip, row.label, row.precision) for row in rows):
        chip, label, precision = key
        points = sorted(_context_points(rows, key))
        axes.plot(
            [x for x, _ in points],
            [y for _, y in points],
            color=_of(_COLOURS, models, label),
            linestyle=_of(_DASHES, precisions, precision),
            marker=_of(_MARKERS, chips, chip),
            markersize=4,
            linewidth=1.4,
        )
    speeds = [row.result["generation_tps"] for row in rows]
    if max(speeds) > _WIDE * min(speeds):
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter("{x:,g}")
        axes.yaxis.set_minor_formatter("{x:,g}")
    else:
        axes.set_ylim(0, 1.08 * max(speeds))
    axes.set_xlim(left=0)
    axes.set_xlabel("tokens in the cache (mean while decoding)")
    axes.set_ylabel("decode, tokens/s")
    axes.set_title(_title(rows, "Decode speed against context"))
    return figure


def draw_roofline(rows: Sequence[Row]) -> Any:
    """Operations/s over operations per byte, a panel for each machine: what was reached, below what it can do."""
    models, precisions, chips = (
        _distinct(getattr(row, name) for row in rows) for name in ("label", "precision", "chip")
    )
    entries = [(name, {"color": _of(_COLOURS, models, name), "linestyle": "", "marker": "o"}) for name in models]
    entries += [
        (name, {"color": _GREY, "linestyle": "", "marker": _of(_MARKERS, precisions, name)}) for name in precisions
    ]
    figure, panels = _figure([3.6] * len(chips), entries)
    for axes, chip in zip(panels, chips, strict=True):
        _draw_machine(axes, [row for row in rows if row.chip == chip], models, precisions)
        axes.set_title(f"{chip}: what was reached, below what the device can do", fontsize=10)
        axes.set_ylabel("operations/s")
    panels[-1].set_xlabel("operations per byte (filled: decode, hollow: prefill)")
    return figure


def _draw_machine(axes: Any, rows: Sequence[Row], models: Sequence[str], precisions: Sequence[str]) -> None:
    points = [(row, phase, *point) for row in rows for phase in ("prefill", "decode") if (point := _point(row, phase))]
    bandwidth, compute = _ceilings(rows)
    ridge = compute / bandwidth
    left = min(ridge, *(x for *_, x, _ in points)) / 3
    right = max(ridge, *(x for *_, x, _ in points)) * 3
    axes.plot([left, ridge, right], [left * bandwidth, compute, compute], color=_GREY)
    label = {"fontsize": 8, "color": _GREY, "textcoords": "offset points"}
    axes.annotate(f"{compute / 1e9:,.0f} GFLOP/s", (right, compute), (0, 3), ha="right", va="bottom", **label)
    middle = (left * ridge) ** 0.5
    axes.annotate(
        f"{bandwidth / 1e9:,.0f} GB/s", (middle, middle * bandwidth), (-4, 3), ha="right", va="bottom", **label
    )
    for row, phase, x, y in points:
        colour = _of(_COLOURS, models, row.label)
        marker = _of(_MARKERS, precisions, row.precision)
        face = colour if phase == "decode" else "white"
        axes.plot(x, y, marker=marker, markersize=6, linestyle="", color=colour, markerfacecolor=face)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_ylim(top=3 * compute)


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


def _title(rows: Sequence[Row], text: str) -> str:
    chips = {row.chip for row in rows}
    return f"{text}\n{next(iter(chips))}" if len(chips) == 1 else text


def _figure(heights_in: Sequence[float], entries: Sequence[tuple[str, dict[str, Any]]]) -> tuple[Any, list[Any]]:
    """A figure with a panel of each height, and room for the legend below, where it hides nothing."""
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    columns = 2 if max(len(name) for name, _ in entries) > 30 else min(3, len(entries))
    legend_in = 0.2 * -(-len(entries) // columns) + 0.2
    figure = Figure(figsize=(_WIDTH_IN, sum(heights_in) + 1.1 + legend_in), dpi=_DPI, layout="constrained")
    panels = figure.subplots(len(heights_in), squeeze=False)[:, 0]
    for axes in panels:
        axes.grid(alpha=0.3)
        axes.set_axisbelow(True)
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
    handles = [Line2D([], [], label=name, **style) for name, style in entries]
    figure.legend(handles=handles, loc="outside lower center", ncols=columns, fontsize=8, frameon=False)
    return figure, list(panels)


def _distinct(values: Iterable[Any]) -> list[Any]:
    """Each once, in order."""
    return list(dict.fromkeys(values))


def _of(styles: Sequence[str], names: Sequence[str], name: str) -> str:
    """The style of one of several names; more names than styles begin again."""
    return styles[names.index(name) % len(styles)]


def _save(figure: Any, path: Path) -> None:
    figure.savefig(path)
