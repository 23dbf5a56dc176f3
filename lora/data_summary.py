"""What became of the rows, in lines for people: how many were read, lost, left out, or are in training already."""

from collections.abc import Iterable
from collections.abc import Sequence as Several

from .long_rows import Fitting
from .sequences import Sequence


def count_of(number: int, noun: str) -> str:
    """ "1 row", "2 rows"."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def account(
    num_examples: int, formats: Iterable[str], left_out: Several[str], fitting: Fitting, sequences: Several[Sequence]
) -> list[str]:
    """One line for each thing to tell about a split; `left_out` are rows that teach nothing, with the reason."""
    if not num_examples and not left_out:
        return []
    tokens, targets = sum(map(len, sequences)), sum(sequence.targets for sequence in sequences)
    lines = [
        f"{count_of(num_examples, 'row')} ({', '.join(formats)}), {count_of(len(sequences), 'sequence')}, "
        f"{count_of(tokens, 'token')}, of which {targets} count"
    ]
    long_rows = fitting.summary()
    if long_rows:
        lines.append(long_rows)
    if fitting.untaught:
        without = count_of(len(fitting.untaught), "row")
        lines.append(f"{without} without a token that counts left out; the first is {fitting.untaught[0]}")
    if left_out:
        lines.append(f"{count_of(len(left_out), 'row')} left out, nothing to learn; the first: {left_out[0]}")
    return lines


def overlap(train: Iterable[Sequence], held_out: Iterable[Sequence]) -> str | None:
    """A warning where the same sequence is in both."""
    seen = {sequence.tokens.tobytes() for sequence in train}
    common = sum(sequence.tokens.tobytes() in seen for sequence in held_out)
    return f"{count_of(common, 'sequence')} also in train: the loss there will look too good" if common else None
