"""Text that can be shown on a terminal without steering it."""

import re

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")  # all but tab and newline


def printable(text: str) -> str:
    """The same text with what would move a cursor, change a colour or turn the reading direction shown as U+FFFD.

    Carriage returns are dropped: beside a newline they mean nothing, alone they overwrite.
    """
    return _CONTROL.sub("\ufffd", text.replace("\r", ""))
