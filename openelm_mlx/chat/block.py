'''Messages of several lines: a block that """ opens and closes.'''

MARK = '"""'


def is_open(text: str) -> bool:
    """Whether a block was begun and is not closed yet."""
    text = text.strip()
    return text.startswith(MARK) and not _is_closed(text)


def message(text: str) -> str:
    """What was typed, without the marks around it."""
    stripped = text.strip()
    if stripped.startswith(MARK) and _is_closed(stripped):
        return stripped.removeprefix(MARK).removesuffix(MARK).strip("\n")
    return text.rstrip()


def _is_closed(text: str) -> bool:
    return text.endswith(MARK) and len(text) >= 2 * len(MARK)
