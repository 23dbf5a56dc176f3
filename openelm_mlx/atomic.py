"""A folder appears whole or not at all: built in a hidden sibling, synced, then renamed into place.

Whatever ends a run (an error, Ctrl-C, SIGKILL, a full disk, a power cut), the target holds the old state or the new.
The sibling `.NAME.partial` is locked while its process lives; the next run into the same target removes what a
killed one left.

    with new_folder(Path("mlx_model"), force=False) as folder:
        ...write into folder...
"""

import ctypes
import errno
import fcntl
import os
import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from .atomic_file import sync
from .errors import OutputError
from .home import expand_home

_DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS)
_NO_LOCKS_HERE = (errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK, errno.ENOSYS)  # some network volumes
_LOCK, _NEW, _OLD = "lock", "new", "old"  # inside the sibling


@contextmanager
def new_folder(target: Path, *, force: bool) -> Iterator[Path]:
    """Yield an empty folder that becomes `target` when the block ends without an error, and vanishes otherwise.

    With `force` an existing model folder is replaced. Raises OutputError before any work when the target cannot be
    written, or another process is writing it; and in place of an OSError when the disk is full.
    """
    with new_folders([target], force=force) as (folder,):
        yield folder


@contextmanager
def new_folders(targets: Sequence[Path], *, force: bool) -> Iterator[list[Path]]:
    """The same for several: all get their names, or none (short of a kill between two renames)."""
    try:
        with ExitStack() as stack:
            begun = [stack.enter_context(_begun(target, force=force)) for target in targets]
            yield [one.new for one in begun]
            for one in begun:
                _sync(one.new)
            _install_all(begun)
    except OSError as error:
        if error.errno in _DISK_ERRORS:
            names = " and ".join(map(str, targets))
            raise OutputError(f"cannot write {names}: {error.strerror}; nothing was changed") from None
        raise


@dataclass(frozen=True)
class _Begun:
    """A folder on its way to its name."""

    target: Path
    new: Path  # the folder to be written
    old: Path  # where the target's old state is for an instant, on volumes that cannot swap names


@contextmanager
def _begun(target: Path, *, force: bool) -> Iterator[_Begun]:
    """An empty folder beside `target`, locked; gone when the block ends, and with it all ancestors made in vain."""
    check_target(target, force=force)
    target = _absolute(target)
    made = _make_parents(target.parent)
    partial = target.parent / f".{target.name}.partial"
    try:
        with _locked(partial, target):
            _restore(partial / _OLD, target)
            shutil.rmtree(partial / _NEW, ignore_errors=True)
            check_target(target, force=force)  # the lock's last owner may have finished in the meantime
            (partial / _NEW).mkdir()
            yield _Begun(target, partial / _NEW, partial / _OLD)
    finally:
        _remove_empty(target.parent, made)


def check_target(target: Path, *, force: bool) -> None:
    """Raise OutputError unless `target` can be made, or (with `force`) replaced."""
    target = _absolute(target)
    if target.is_symlink():
        raise OutputError(f"{target} is a symbolic link; name the folder it points to ({os.readlink(target)})")
    if target.exists() and not target.is_dir():
        raise OutputError(f"{target} is a file; a folder is to be made: choose another name")
    if target.exists() and not force:
        raise OutputError(f"{target} already exists; choose another folder, or replace it with --force")
    if target.exists():
        _check_replaceable(target)
    parent = next(folder for folder in target.parents if folder.exists())
    if not parent.is_dir():
        raise OutputError(f"{parent} is a file, so {target} cannot be made in it")
    if not os.access(parent, os.W_OK | os.X_OK):
        raise OutputError(f"{parent} is not writable; choose another place")


def check_apart(target: Path, source: Path, *, what: str = "the source", flag: str = "-o") -> None:
    """Raise OutputError where writing `target` would lose the file or folder that is being read."""
    if expand_home(source).resolve().is_relative_to(expand_home(target).resolve()):
        raise OutputError(f"{target} is (or holds) {what} itself; choose another folder with {flag}")


def check_space(target: Path, needed_bytes: int) -> None:
    """Raise OutputError when the volume of `target` has less than `needed_bytes` free."""
    parent = next(folder for folder in _absolute(target).parents if folder.exists())
    free = shutil.disk_usage(parent).free
    if free < needed_bytes:
        raise OutputError(
            f"{target} needs {needed_bytes / 1e9:.2f} GB, {parent} has {free / 1e9:.2f} GB free; "
            "make room or choose another place"
        )


def _absolute(path: Path) -> Path:
    """Without `..` and links above the last part: that one may be a link, and is then refused."""
    path = Path(os.path.abspath(expand_home(path)))
    return path.parent.resolve() / path.name


def _check_replaceable(target: Path) -> None:
    """--force replaces what a command like ours has made, never a home directory."""
    if Path.cwd().is_relative_to(target):
        raise OutputError(f"{target} is where you are working; --force replaces only a model folder")
    if not any(target.glob("*config.json")) and any(target.iterdir()):
        raise OutputError(f"{target} holds no config.json, so it is no model folder; --force does not replace it")


@contextmanager
def _locked(partial: Path, target: Path) -> Iterator[None]:
    """Own `partial` until the block ends, then remove it. A lock dies with its process, a file's existence does not."""
    lock = _take_lock(partial, target)
    try:
        yield
    finally:
        _restore(partial / _OLD, target)
        shutil.rmtree(partial / _NEW, ignore_errors=True)
        shutil.rmtree(partial / _OLD, ignore_errors=True)
        (partial / _LOCK).unlink(missing_ok=True)
        os.close(lock)
        with suppress(OSError):  # gone, or another process has just put its lock there
            partial.rmdir()


def _take_lock(partial: Path, target: Path) -> int:
    path = partial / _LOCK
    while True:
        try:
            partial.mkdir(exist_ok=True)
            file = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        except FileNotFoundError:  # its last owner removed the folder between the two calls
            continue
        except OSError as error:
            raise OutputError(f"cannot write {partial}: {error.strerror}") from None
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in _NO_LOCKS_HERE:
                os.close(file)
                raise OutputError(
                    f"another process is writing {target}; wait for it, or choose another folder"
                ) from None
        if path.exists() and os.path.samestat(os.fstat(file), path.stat()):
            return file
        os.close(file)  # locked a file that its last owner had just removed


def _install(new: Path, target: Path, old: Path) -> None:
    """Put `new` in the place of `target`."""
    if not target.exists():
        new.rename(target)
    elif not _exchange(new, target):
        # This volume cannot swap two names: for an instant only `old` exists, and `_restore` knows.
        target.rename(old)
        new.rename(target)
    sync(target.parent)


def _install_all(begun: Sequence[_Begun]) -> None:
    """Each in its place, or all places as they were."""
    identities = [one.new.stat() for one in begun]
    try:
        for one in begun:
            _install(one.new, one.target, one.old)
    except BaseException:
        for one, identity in zip(begun, identities, strict=True):
            if one.target.exists() and os.path.samestat(one.target.stat(), identity):
                _take_back(one)
        raise


def _take_back(one: _Begun) -> None:
    """Undo `_install`: whatever had the name has it again."""
    if one.new.exists():  # they were swapped
        _exchange(one.new, one.target)
    else:
        one.target.rename(one.new)
        _restore(one.old, one.target)


def _restore(old: Path, target: Path) -> None:
    """Put back what a run killed between two renames had moved away."""
    if old.exists() and not target.exists():
        old.rename(target)


def _exchange(one: Path, other: Path) -> bool:
    """Swap two names in one step, so that neither is ever missing; False where the system cannot."""
    library = ctypes.CDLL(None, use_errno=True)
    first, second = os.fsencode(one), os.fsencode(other)
    try:
        if sys.platform == "darwin":
            return library.renamex_np(first, second, 2) == 0  # RENAME_SWAP
        at_cwd, exchange = -100, 2  # AT_FDCWD, RENAME_EXCHANGE
        return library.renameat2(at_cwd, first, at_cwd, second, exchange) == 0
    except AttributeError:
        return False


def _sync(folder: Path) -> None:
    """Everything below a folder on the disk, before its name says that it is whole."""
    for directory, _, files in os.walk(folder):
        for name in files:
            sync(Path(directory, name))
        sync(Path(directory))


def _make_parents(folder: Path) -> Path | None:
    """Make a folder's missing ancestors and itself; return the topmost one made."""
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OutputError(f"cannot make {folder}: {error.strerror}") from None
    return missing[-1] if missing else None


def _remove_empty(folder: Path, topmost: Path | None) -> None:
    """Take back the ancestors that a failed run had made."""
    while topmost is not None and folder.is_relative_to(topmost) and not any(folder.iterdir()):
        folder.rmdir()
        folder = folder.parent
