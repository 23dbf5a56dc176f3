"""Ctrl-C asks a run to stop after the update at hand; a second one stops it at once."""

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


@contextmanager
def asked_to_stop(on_first: Callable[[], None]) -> Iterator[Callable[[], bool]]:
    """Yield a function that tells whether a stop was asked for; `on_first` is called when it is."""
    asked = False

    def note(number: int, frame: Any) -> None:
        nonlocal asked
        if asked:
            raise KeyboardInterrupt
        asked = True
        on_first()

    try:
        before = {number: signal.signal(number, note) for number in _SIGNALS}
    except ValueError:  # not the main thread, which alone may ask for signals
        yield lambda: False
        return
    try:
        yield lambda: asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
