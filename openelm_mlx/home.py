"""`~` in a name that was typed, for whoever reads or writes it."""

from pathlib import Path

from .errors import OpenELMError


def expand_home(path: str | Path) -> Path:
    """The path with `~` and `~name` replaced. Raises OpenELMError for the home of a user that is not here."""
    try:
        return Path(path).expanduser()
    except RuntimeError:
        raise OpenELMError(f"{path}: no user of that name has a home folder here; write the path out") from None
