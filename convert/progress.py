"""A progress bar with bytes and time left, on stderr and only where that is a terminal."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from .streaming import Tick


@contextmanager
def progress(label: str, total_bytes: int) -> Iterator[Tick]:
    """Yield a function to be told of every few bytes done."""
    if not sys.stderr.isatty():
        yield lambda count: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = (
        TextColumn("{task.description:<10}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bars:
        task = bars.add_task(label, total=total_bytes)
        yield lambda count: bars.advance(task, count)
