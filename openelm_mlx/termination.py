"""SIGTERM as an exception: what a command was writing is taken back, as after Ctrl-C."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

EXIT_STATUS = 128 + signal.SIGTERM


class Terminated(BaseException):
    """The system asked this process to end. Not an Exception: nothing that handles errors may hold it up."""


@contextmanager
def sigterm_raises() -> Iterator[None]:
    """Raise Terminated in the main thread when SIGTERM comes, while the block runs."""
    if threading.current_thread() is not threading.main_thread():  # Python lets no other thread handle signals
        yield
        return
    before = signal.signal(signal.SIGTERM, _raise)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _raise(*_: object) -> None:
    raise Terminated
