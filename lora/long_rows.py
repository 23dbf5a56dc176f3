"""What becomes of sequences longer than the limit: cut (the default), split into pieces, or skipped; told once for all.

A cut sequence loses its end, EOS included: an EOS where the text was cut would teach to stop in the middle. Pieces of
a split one begin with BOS each, as OpenELM never saw a text without, and lose nothing: every token but BOS is in
exactly one of them, and counts there if it counted before.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from .sequences import Sequence


@dataclass
class Fitting:
    """Makes sequences fit, and keeps account of what that cost."""

    limit: int  # tokens, BOS and EOS included
    choice: str  # cut, split or skip
    num_rows: int = 0
    longest: int = 0
    lost_tokens: int = 0
    seen_tokens: int = 0
    untaught: list[str] = field(default_factory=list)  # rows of which nothing counted is left

    def fit(self, sequence: Sequence) -> list[Sequence]:
        """The sequence, what is left of it, its pieces, or nothing; never one without a counted target."""
        self.seen_tokens += len(sequence)
        self.longest = max(self.longest, len(sequence))
        pieces = [sequence] if len(sequence) <= self.limit else self._shortened(sequence)
        taught = [piece for piece in pieces if piece.counted.any()]
        if pieces and not taught:
            self.untaught.append(sequence.row)
        return taught

    def _shortened(self, sequence: Sequence) -> list[Sequence]:
        self.num_rows += 1
        if self.choice == "split":
            return list(split(sequence, self.limit))
        kept = self.limit if self.choice == "cut" else 0
        self.lost_tokens += len(sequence) - kept
        return [Sequence(sequence.tokens[:kept], sequence.counted[:kept], sequence.row)] if kept else []

    def summary(self) -> str | None:
        """One line, or None where every row fitted."""
        if not self.num_rows:
            return None
        rows = "1 row is" if self.num_rows == 1 else f"{self.num_rows} rows are"
        done = {
            "cut": f"cut: {self._lost()} are lost; --long-rows split keeps them",
            "split": "split into pieces; no token is lost",
            "skip": f"skipped: {self._lost()} are lost; --long-rows split keeps them",
        }[self.choice]
        return f"{rows} longer than {self.limit} tokens (the longest has {self.longest}) and {done}"

    def _lost(self) -> str:
        return f"{self.lost_tokens} of {self.seen_tokens} tokens ({self.lost_tokens / self.seen_tokens:.1%})"


def split(sequence: Sequence, limit: int) -> Iterable[Sequence]:
    """Pieces of at most `limit` (2 or more) tokens, each with the sequence's first token, BOS, in front."""
    bos, not_counted = sequence.tokens[:1], np.zeros(1, dtype=bool)
    for start in range(1, len(sequence), limit - 1):
        piece = slice(start, start + limit - 1)
        tokens = np.concatenate([bos, sequence.tokens[piece]])
        yield Sequence(tokens, np.concatenate([not_counted, sequence.counted[piece]]), sequence.row)
