"""A file appears whole or not at all: written beside its target, synced, then renamed over it. Folders: `atomic`."""

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from .errors import OutputError


@contextmanager
def new_file(path: Path) -> Iterator[Path]:
    """Yield a name that is `path`'s when the block ends without an error, and is gone otherwise.

    It ends as `path` does, for writers that go by a suffix. An older file is replaced, behind a link too. Raises
    OutputError in place of an OSError.
    """
    target = Path(os.path.realpath(path))
    partial = target.with_name(f".{target.stem}.{os.getpid()}.partial{target.suffix}")
    try:
        yield partial
        sync(partial)
        partial.replace(target)
        sync(target.parent)
    except OSError as error:
        raise OutputError(f"cannot write {path}: {error.strerror or error}") from None
    finally:
        with suppress(OSError):  # it has its new name, or was never made
            partial.unlink()


def check_file_target(path: Path) -> None:
    """Raise OutputError, before the work, when a file of this name cannot be written."""
    target = Path(os.path.realpath(path))
    if target.is_dir():
        raise OutputError(f"{path} is a folder; name a file")
    if not target.parent.is_dir():
        raise OutputError(f"{target.parent} is no folder; make it, or choose another place")
    if not os.access(target.parent, os.W_OK | os.X_OK):
        raise OutputError(f"{target.parent} is not writable; choose another place")


def sync(path: Path) -> None:
    """See a file, or a folder's list of names, onto the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
