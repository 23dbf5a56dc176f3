"""A batch token by token: what the model reads, and which losses count. A table, or lines with tabs in a pipe.

With packing, a position is counted from the beginning of its own sequence.
"""

import sys
from collections.abc import Iterator

from ..chat.text import printable
from ..tokenizer import Tokenizer
from .batches import Batch

TITLES = ("position", "id", "piece", "counted")


def show_batch(batch: Batch, tokenizer: Tokenizer) -> None:
    """Print every row of the batch to stdout, its padding as one line."""
    if sys.stdout.isatty():
        _print_tables(batch, tokenizer)
        return
    for b, name in enumerate(batch.rows):
        print(f"# row {b + 1}: {printable(name)}")
        print(*TITLES, sep="\t")
        for line in lines(batch, b, tokenizer):
            print(*line, sep="\t")


def lines(batch: Batch, b: int, tokenizer: Tokenizer) -> Iterator[tuple[str, str, str, str]]:
    """Position, id, piece and "yes" or "" for each token of row `b`, then one line for its padding."""
    tokens: list[int] = batch.tokens[b].tolist()  # type: ignore[assignment]
    counted: list[bool] = batch.counted[b].tolist()  # type: ignore[assignment]
    length = batch.lengths[b]
    segments: list[int] = batch.segments[b].tolist() if batch.segments is not None else [0] * length  # type: ignore[assignment]
    for i in range(length):
        yield (
            str(i - segments.index(segments[i])),
            str(tokens[i]),
            printable(tokenizer.piece(tokens[i])),
            "yes" if counted[i] else "",
        )
    if length < len(tokens):
        yield f"{length}-{len(tokens) - 1}", "", "(padding)", ""


def _print_tables(batch: Batch, tokenizer: Tokenizer) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    console = Console(highlight=False)
    for b, name in enumerate(batch.rows):
        table = Table(title=escape(printable(name)), title_justify="left", box=None, pad_edge=False)
        for title in TITLES:
            table.add_column(title, justify="right" if title in TITLES[:2] else "left")
        for position, token, piece, counted in lines(batch, b, tokenizer):
            table.add_row(position, token, escape(piece), counted, style="bold" if counted else "dim")
        console.print(table)
