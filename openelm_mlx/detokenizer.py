"""Token ids in, text out, one at a time: the stream joined is exactly the text of all ids decoded at once.

A tokenizer's vocabulary is seen here as a list, one entry per id:

    str      a piece of text, "▁" standing for a space ("" for control ids such as BOS and EOS, which print nothing)
    bytes    one byte of a character that has no piece of its own

Half a character is held back until the rest arrives or can no longer come. Each id costs the same however long the
text has become. What counts as text is SentencePiece's answer, whichever library made the ids.
"""

import codecs
from collections.abc import Sequence

from .errors import TokenizerError

SPACE = "▁"
Piece = str | bytes


def _each_byte_replaced(error: UnicodeError) -> tuple[str, int]:
    """One U+FFFD for every byte that is no UTF-8: SentencePiece's way. Python's "replace" merges some."""
    assert isinstance(error, UnicodeDecodeError)  # the codec machinery calls this, for decoding only
    return "\ufffd" * (error.end - error.start), error.end


_ERRORS = "openelm_mlx.each_byte_replaced"
codecs.register_error(_ERRORS, _each_byte_replaced)


class StreamingDetokenizer:
    """`add(id)` gives the text that became certain, `finish()` what was still held back.

    SentencePiece puts a space before every text it encodes and takes it off again when it decodes. With
    `continuation`, the ids follow a prompt, so a leading space is a real one and stays: after "Once upon a time"
    comes " there was".
    """

    def __init__(self, pieces: Sequence[Piece], *, continuation: bool) -> None:
        self._pieces = pieces
        self._utf8 = codecs.getincrementaldecoder("utf-8")(_ERRORS)
        self._prefix_due = not continuation

    def add(self, token: int) -> str:
        """The text that `token` completes; "" while a character is incomplete. TokenizerError for an unknown id."""
        if not 0 <= token < len(self._pieces):  # a negative id would pick a piece from the end
            raise TokenizerError(f"token id {token} is outside the tokenizer's vocabulary 0..{len(self._pieces) - 1}")
        piece = self._pieces[token]
        if isinstance(piece, bytes):
            self._prefix_due = False
            return self._utf8.decode(piece)
        if piece and self._prefix_due:
            piece = piece.removeprefix(SPACE)
            self._prefix_due = False
        return self.finish() + piece.replace(SPACE, " ")

    def finish(self) -> str:
        """What is held back: the bytes of a character that never became whole, as U+FFFD each."""
        return self._utf8.decode(b"", final=True)
