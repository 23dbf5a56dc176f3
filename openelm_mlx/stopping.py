"""Stop strings in streamed text: nothing of one is ever shown, whatever the tokens it is split over."""

from collections.abc import Sequence

from .errors import GenerationError


class StopStrings:
    """Feed text as it comes; get back what may be shown. `stopped` tells that a stop string was completed."""

    def __init__(self, stops: Sequence[str]):
        if any(not stop for stop in stops):
            raise GenerationError("a stop string must not be empty")
        self.stops = tuple(stops)
        self.stopped = False
        self._held = ""

    def feed(self, text: str) -> str:
        """Text that can no longer be part of a stop string."""
        if self.stopped or not self.stops:
            return "" if self.stopped else text
        self._held += text
        found = [at for at in map(self._held.find, self.stops) if at >= 0]
        if found:
            self.stopped = True
            shown, self._held = self._held[: min(found)], ""
            return shown
        keep = max(map(self._partial, self.stops))
        cut = len(self._held) - keep
        shown, self._held = self._held[:cut], self._held[cut:]
        return shown

    def finish(self) -> str:
        """What was held back for a stop string that never came."""
        shown, self._held = self._held, ""
        return shown

    def _partial(self, stop: str) -> int:
        """Length of the longest end of the held text with which `stop` begins."""
        longest = min(len(stop) - 1, len(self._held))
        return next((n for n in range(longest, 0, -1) if self._held.endswith(stop[:n])), 0)
