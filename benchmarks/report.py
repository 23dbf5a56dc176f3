"""`openelm bench report *.json`: files of several runs and machines as one Markdown or CSV table, and plots."""

import argparse
import csv
import io
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import OutputError
from .record import read_record

_GIB = 2**30
HEADINGS = (
    "machine",
    "model",
    "precision",
    "tokens",
    "batch",
    "prefill tokens/s",
    "decode tokens/s",
    "first token, s",
    "peak memory, GB",
    "of the limit",
)
CSV_COLUMNS = (
    "machine", "memory_gb", "os", "mlx", "power_source", "date", "model", "precision", "variant", "prompt_tokens",
    "generation_tokens", "batch_size", "trials", "prompt_tps", "prompt_tps_low", "prompt_tps_high", "generation_tps",
    "generation_tps_low", "generation_tps_high", "ttft_s", "total_s", "end_to_end_tps", "weight_bytes",
    "kv_cache_bytes", "peak_memory_bytes", "decode_share", "prefill_share", "drift", "file",
)  # fmt: skip


@dataclass(frozen=True)
class Row:
    """One result, with the machine it was measured on."""

    machine: Mapping[str, Any]
    result: Mapping[str, Any]
    record: Mapping[str, Any]
    file: str

    @property
    def chip(self) -> str:
        """`Apple M2 Max (38 GPU cores, 64 GiB)`; a chip's name alone leaves out what decides."""
        cores = self.machine.get("gpu_cores")
        count = f"{cores} GPU cores" if cores else f"{self.machine['cpu_cores']} cores"
        return f"{self.machine['chip']} ({count}, {round(self.machine['memory_bytes'] / _GIB)} GiB)"

    @property
    def precision(self) -> str:
        return str(self.result.get("precision", "unknown"))

    @property
    def label(self) -> str:
        """The model, and whose or which side this is where there were several."""
        variant = self.result.get("variant")
        return f"{self.result['model']}, {variant}" if variant else str(self.result["model"])

    def share(self, phase: str) -> float | None:
        """Of the device's limit, where it was measured."""
        return self.result.get("limits", {}).get(phase, {}).get("share")


def run_report(args: argparse.Namespace) -> int:
    """Print the table; with a folder, write it, the CSV and the plots there."""
    rows = read_rows(args.files)
    for note in dict.fromkeys(f"{row.file}: {note}" for row in rows for note in _notes(row)):
        print(f"openelm: {note}", file=sys.stderr)
    if not rows:
        raise OutputError("the files hold no tokens/s of a prefill and decode: name files of runs that were finished")
    if args.output_dir is not None:
        write_report(rows, args.output_dir)
    print(to_csv(rows) if args.csv else to_markdown(rows), end="")
    return 0


def read_rows(files: Sequence[Path]) -> list[Row]:
    """All results, best decode speed of a machine's model first within its shape. Raises RecordError for a bad file."""
    rows = []
    for file in files:
        record = read_record(file)
        rows += [Row(record["machine"], result, record, file.name) for result in record["results"]]
    return sorted(rows, key=_order)


def to_markdown(rows: Sequence[Row]) -> str:
    """A table that GitHub renders, and what its numbers mean."""
    table = [HEADINGS, tuple("---" if i < 3 else "---:" for i in range(len(HEADINGS))), *map(_cells, rows)]
    lines = [f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |" for cells in table]
    return "\n".join([*lines, "", *_legend(rows), ""])


def to_csv(rows: Sequence[Row]) -> str:
    """Every figure, for a spreadsheet."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(CSV_COLUMNS)
    writer.writerows(_csv_cells(row) for row in rows)
    return text.getvalue()


def write_report(rows: Sequence[Row], folder: Path) -> None:
    """report.md, report.csv and the plots in a new folder, all or nothing. Raises OutputError where it exists."""
    from ..atomic import new_folder
    from .plots import draw_all

    if folder.is_dir():
        raise OutputError(f"{folder} already exists; choose a new folder")
    with new_folder(folder, force=False) as partial:
        images = draw_all(rows, partial)
        pictures = "\n\n".join(f"![{title}]({name})" for name, title in images)
        (partial / "report.md").write_text(f"{to_markdown(rows)}\n{pictures}\n", encoding="utf-8")
        (partial / "report.csv").write_text(to_csv(rows), encoding="utf-8")


def _order(row: Row) -> tuple[Any, ...]:
    result = row.result
    parameters = result.get("parameters", 0)
    return (row.chip, parameters, row.label, row.precision, result.get("batch_size", 1), result["prompt_tokens"])


def _cells(row: Row) -> tuple[str, ...]:
    result, share = row.result, row.share("decode")
    return (
        row.chip,
        row.label,
        row.precision,
        f"{result['prompt_tokens']}+{result['generation_tokens']}",
        str(result.get("batch_size", 1)),
        _with_interval(result, "prompt_tps"),
        _with_interval(result, "generation_tps"),
        f"{result['ttft_s']:.3f}",
        f"{result['peak_memory_bytes'] / 1e9:.2f}",
        "-" if share is None else f"{100 * share:.0f} %",
    )


def _with_interval(result: Mapping[str, Any], name: str) -> str:
    value, interval = result[name], result.get(f"{name}_interval")
    if value is None:
        return "-"
    return f"{value:,.1f}" if interval is None else f"{value:,.1f} ({interval[0]:,.1f}-{interval[1]:,.1f})"


def _legend(rows: Sequence[Row]) -> Iterator[str]:
    yield (
        "Medians of trials after a warm-up, with 95 % bootstrap intervals; greedy, EOS ignored. Decode leaves the "
        "first token out. Peak memory is the MLX allocator's, weights included. The limit is this device's measured "
        "memory bandwidth or matrix throughput for a decode step."
    )
    systems = {
        f"{row.chip}: {row.machine['os']}, MLX {row.machine['mlx']}, {row.record.get('date', 'no date')}"
        for row in rows
    }
    yield ""
    yield from (f"- {system}" for system in sorted(systems))


def _notes(row: Row) -> Iterator[str]:
    """What makes a result less than it seems."""
    batch = row.result.get("batch_size", 1)
    shape = f"{row.label}, {row.precision}, {row.result['prompt_tokens']}+{row.result['generation_tokens']}"
    shape += f" x {batch}" if batch > 1 else ""
    for name, change in row.result.get("drift", {}).items():
        yield f"{shape}: {name} drifted by {100 * change:+.0f} % over the trials"
    if row.record.get("interrupted"):
        yield "the run was interrupted"
    if row.machine.get("low_power_mode") or row.machine.get("power_source") == "battery":
        yield "measured on battery or in low-power mode"


def _csv_cells(row: Row) -> list[Any]:
    result, machine = row.result, row.machine
    known = {
        **result,
        "machine": row.chip,
        "memory_gb": round(machine["memory_bytes"] / _GIB),
        **{key: machine.get(key) for key in ("os", "mlx", "power_source")},
        "date": row.record.get("date"),
        "trials": len(result["trials"]),
        "decode_share": row.share("decode"),
        "prefill_share": row.share("prefill"),
        "drift": max(result.get("drift", {}).values(), key=abs, default=None),
        "file": row.file,
    }
    for name in ("prompt_tps", "generation_tps"):
        known[f"{name}_low"], known[f"{name}_high"] = result.get(f"{name}_interval") or (None, None)
    return ["" if known.get(column) is None else known[column] for column in CSV_COLUMNS]
