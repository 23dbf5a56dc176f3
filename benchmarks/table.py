"""What `openelm bench` prints for people, 80 columns wide."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from typing import Any

from . import layer_profile
from .compare import THEIRS
from .layer_profile import LayerProfile
from .results import BenchResult

Measured = Sequence[tuple[BenchResult, dict[str, Any]]]


def print_results(measured: Measured) -> None:
    """One table for each model and precision, and what the numbers mean."""
    from rich.console import Console

    console = Console(highlight=False, markup=False)
    for _, group in groupby(measured, key=lambda item: (item[0].model, item[0].precision, item[0].variant == THEIRS)):
        results = list(group)
        first = results[0][0]
        title = f"{first.model}, {first.precision} weights, {megabytes(first.weight_bytes)}"
        console.print(f"{title}{f', by {THEIRS}' if first.variant == THEIRS else ''}", soft_wrap=True)
        if len(results) == 1:
            _print_one(console, *results[0])
        else:
            print_table(_shapes([result for result, _ in results]))
    for line in _footnotes(measured):
        console.print(line, soft_wrap=True)


def print_profile(name: str, profile: LayerProfile) -> None:
    """Where a decode step's time goes."""
    from rich.console import Console

    console = Console(highlight=False, markup=False)
    console.print(f"\n{name}, ms of one token with {profile.held_tokens} in the cache", soft_wrap=True)
    print_table(columns(layer_profile.HEADINGS, layer_profile.rows(profile, width=20)))
    sums = ", ".join(f"{part} {1e3 * seconds:.2f}" for part, seconds in profile.part_sums().items())
    console.print(f"all layers: {sums}; sum {1e3 * profile.sum_s:.2f} ms, a whole step {1e3 * profile.step_s:.2f} ms")


def print_comparisons(entries: Sequence[dict[str, Any]]) -> None:
    """How many times as fast as the other program."""
    several = len({entry["model"] for entry in entries}) > 1
    for entry in entries:
        shape = f"{entry['prompt_tokens']}+{entry['generation_tokens']} tokens"
        shape += f", {entry['model']}" if several else ""
        rates = ", ".join(
            f"{word} {_ratio(entry[f'{name}_ratio'], entry[f'{name}_ratio_range'])}"
            for word, name in (("prefill", "prompt_tps"), ("decode", "generation_tps"))
        )
        print(f"against {THEIRS}, {shape}: {rates} (above 1: openelm is faster)")


def print_norms(results: Sequence[BenchResult], count: int) -> None:
    """What each kernel makes of the model's speed at a shape, against the first."""
    first = results[0]
    print(f"{first.model}, {first.precision}, {first.prompt_tokens}+{first.generation_tokens} tokens:")
    usual = results[0].generation_tps
    for result in results[1:]:
        if usual and result.generation_tps:
            change = 100 * (result.generation_tps / usual - 1)
            print(
                f"  decode with {result.variant}: {change:+.1f} % against {results[0].variant} ({count} norms a token)"
            )


_LEAST_WIDTH = 200
_HEADINGS = ("tokens", "batch", "prefill/s", "decode/s", "min - max", "first s", "total s", "peak*")


def _shapes(results: Sequence[BenchResult]) -> Any:
    """A row for each shape; where several variants are told apart, their names instead of what single texts have."""
    if all(result.variant in ("", THEIRS) for result in results):
        return columns(_HEADINGS, map(_row, results))
    left_out = [_HEADINGS.index(heading) for heading in ("batch", "total s")]
    keep = [i for i in range(len(_HEADINGS)) if i not in left_out]
    rows = ([result.variant, *(_row(result)[i] for i in keep)] for result in results)
    return columns(["", *(_HEADINGS[i] for i in keep)], rows)


def _row(result: BenchResult) -> tuple[str, ...]:
    return (
        f"{result.prompt_tokens}+{result.generation_tokens}",
        str(result.batch_size),
        number(result.prompt_tps),
        number(result.generation_tps),
        spread(result.values("generation_tps"), decimals_below=1000),
        f"{result.ttft_s:.3f}",
        f"{result.total_s:.2f}",
        megabytes(result.peak_memory_bytes),
    )


def _print_one(console: Any, result: BenchResult, more: dict[str, Any]) -> None:
    headings = ("", "tokens", "tokens/s", "95 % interval", "min - max", "seconds", "peak*")
    print_table(columns(headings, _phases(result)))
    end_to_end = "" if result.end_to_end_tps is None else f" ({number(result.end_to_end_tps)} generated tokens/s)"
    console.print(f"first token after {result.ttft_s:.3f} s; all after {result.total_s:.3f} s{end_to_end}")
    footprint = result.process_footprint_bytes
    process = "" if footprint is None else f"; process footprint {megabytes(footprint)}"
    console.print(
        f"memory: weights {megabytes(result.weight_bytes)}, keys and values {megabytes(result.kv_cache_bytes)}{process}"
    )


def _phases(result: BenchResult) -> Iterator[tuple[str, ...]]:
    batch = result.batch_size
    for phase, tokens, name, time_s, peak in (
        ("prefill", batch * result.prompt_tokens, "prompt_tps", result.ttft_s, result.prefill_peak_memory_bytes),
        (
            "decode",
            batch * (result.generation_tokens - 1),
            "generation_tps",
            result.decode_s,
            result.decode_peak_memory_bytes,
        ),
    ):
        interval = result.interval(name)
        yield (
            phase,
            str(tokens),
            number(getattr(result, name)),
            "-" if interval is None else spread(interval, decimals_below=10_000),
            spread(result.values(name), decimals_below=10_000),
            f"{time_s:.3f}" if tokens else "-",
            megabytes(peak) if tokens else "-",
        )


def _footnotes(measured: Measured) -> Iterator[str]:
    results = [result for result, _ in measured]
    trials = _counted([len(result.trials) for result in results], "trial")
    warm_ups = _counted([result.warm_ups for result in results], "warm-up")
    yield f"median of {trials} after {warm_ups} of the same shape; greedy, EOS ignored"
    yield "* peak memory of the MLX allocator in that phase, weights included"
    if any(not result.warm_up_stable and result.warm_ups > 1 for result in results):  # of a dry run nothing is known
        yield "warm-up: the runs were still getting faster when the trials began"
    for result in results:
        for name, change in result.drift().items():
            phase = "prefill" if name == "prompt_tps" else "decode"
            hint = "heat or another program? try --delay" if change < 0 else "still warming up?"
            yield (
                f"drift: {phase} at {_label(result, results)} changed by {100 * change:+.0f} % over the trials ({hint})"
            )
    yield from _limit_lines(measured)
    yield from _paper_lines(measured)


def _counted(counts: Sequence[int], word: str) -> str:
    """`1 trial`, `5 trials`, `2-5 warm-ups`."""
    least, most = min(counts), max(counts)
    return f"{least if least == most else f'{least}-{most}'} {word}{'s' if most != 1 else ''}"


def _label(result: BenchResult, results: Sequence[BenchResult]) -> str:
    """The shape, and what else it takes to tell a result from the others of its run."""
    batch = f" x {result.batch_size}" if result.batch_size > 1 else ""
    parts = [f"{result.prompt_tokens}+{result.generation_tokens}{batch}"]
    for name in ("model", "precision", "variant"):
        if len({getattr(other, name) for other in results}) > 1 and getattr(result, name):
            parts.append(getattr(result, name))
    return ", ".join(parts)


def _limit_lines(measured: Measured) -> Iterator[str]:
    limited = [(result, more["limits"]) for result, more in measured if "limits" in more]
    for result, limits in limited:
        device = limits["device"]
        if result is limited[0][0] or device != limited[0][1]["device"]:
            memory = f"{device['bandwidth_bytes_s'] / 1e9:.1f} GB/s over {megabytes(device['probe_bytes'])}"
            yield f"this device now: {memory}, {device['matmul_flops_s'] / 1e9:,.0f} GFLOP/s in {device['dtype']}"
        shares = ", ".join(
            f"{phase} {100 * part['share']:.0f} % of its {part['bound']} limit"
            for phase in ("prefill", "decode")
            if (part := limits[phase])["share"] is not None
        )
        yield f"reached, {_label(result, [result for result, _ in measured])}: {shares}"


def _paper_lines(measured: Measured) -> Iterator[str]:
    for result, more in measured:
        entry = more.get("paper")
        if entry is None:
            continue
        yield f"as the paper counts (mean of {len(result.trials)}): {_rates(entry['as_the_paper_counts'])}"
        if entry["recalled"] is not None:
            yield f"the paper, {entry['recalled']['machine']}: {_rates(entry['recalled'])}"
            yield f"  ({entry['recalled']['standing']})"


def _rates(rates: dict[str, Any]) -> str:
    return ", ".join(f"{name} {number(rates[name])}" for name in ("prompt", "generation", "total")) + " tokens/s"


def print_table(table: Any) -> None:
    """To stdout, whole: a terminal too narrow for a row breaks it, and no digit is cut away."""
    from rich.console import Console

    console = Console(highlight=False, markup=False)
    console.width = max(console.width, _LEAST_WIDTH)
    console.print(table)


def columns(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> Any:
    """A bare table: the first column flush left, numbers flush right."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for i, heading in enumerate(headings):
        table.add_column(heading, justify="left" if i == 0 or not heading else "right", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    return table


def number(value: float | None) -> str:
    """A rate with one decimal and commas; a dash where there is none."""
    return "-" if value is None else f"{value:,.1f}"


def megabytes(count: float) -> str:
    """Bytes in MB of 10⁶."""
    return f"{count / 1e6:,.0f} MB"


def spread(values: Sequence[float], decimals_below: float = float("inf")) -> str:
    """The least and the greatest of some rates."""
    return (
        "-"
        if not values
        else " - ".join(
            number(value) if value < decimals_below else f"{value:,.0f}" for value in (min(values), max(values))
        )
    )


def _ratio(value: float | None, bounds: Sequence[float] | None) -> str:
    return "-" if value is None or bounds is None else f"{value:.2f}x ({bounds[0]:.2f}-{bounds[1]:.2f})"
