"""Which decode step a generation takes, the eager one (built anew for every token) or the compiled one: the faster.

What is faster is measured in real work on the present device: a trial makes some tokens with either step, and the
medians of three trials decide from then on (`decoder_trials`). On Metal a long enough generation makes the trials by
itself. On a CPU it does not unless asked (`measure`), because MLX calls the C++ compiler there, which takes seconds; a
choice once measured counts there too. The tokens are the same whichever step makes them: both fill the same caches.
"""

import os
import time
from collections.abc import Callable, Generator, Iterator
from itertools import pairwise, repeat
from statistics import median

import mlx.core as mx

from .cache import KVCache
from .compiled import CompiledDecoder, can_compile
from .decoder_trials import ENOUGH_TRIALS, Trial, TrialRecord, typical
from .device import is_metal
from .errors import GenerationError
from .model import Model

MODES = ("auto", "eager", "compiled", "measure")
ENVIRONMENT = "OPENELM_DECODER"  # the mode where none is given
_TURNS, _STEPS = 4, 5  # a trial: each kind's turns, and the steps of one; short, so that other work meets both alike
_TRIAL_STEPS = 2 * _TURNS * _STEPS


class Decoder:
    """The steps of one generation: `decoder(tokens)` gives the logits of what follows them.

    mode: `auto`, `measure` (like `auto`, with a trial now), or `eager` and `compiled` whatever was measured.
    max_tokens: how many tokens will be asked for at most. Raises GenerationError for another mode.
    """

    def __init__(
        self,
        model: Model,
        cache: list[KVCache],
        max_tokens: int,
        mode: str | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._mode = mode or os.environ.get(ENVIRONMENT) or "auto"
        if self._mode not in MODES:
            raise GenerationError(f"the decoder must be one of {', '.join(MODES)}; got {self._mode!r}")
        self._model, self._cache, self._left, self._clock = model, cache, max_tokens, clock
        self._compiled: CompiledDecoder | None = None
        self._is_compiled = False  # of the newest step
        self._figures: Trial | None = None
        self._kinds: Iterator[bool]
        if self._mode == "eager" or not can_compile(model, cache):
            self._kinds = repeat(False)
        elif self._mode == "compiled":
            self._kinds = repeat(True)
        else:
            self._kinds = self._schedule()

    def __call__(self, tokens: mx.array) -> mx.array:
        """tokens: int (L,), the newest -> logits (1, V), unevaluated; the cache holds the tokens afterwards.

        The choice is about single tokens; the last ones of a prompt go the eager way.
        """
        if tokens.size == 1:
            self._is_compiled = next(self._kinds)
            self._left -= 1
        if tokens.size > 1 or not self._is_compiled:
            return self._model(tokens[None], self._cache, last_only=True)[:, -1]
        if self._compiled is None:
            self._compiled = CompiledDecoder(self._model, self._cache)
        return self._compiled.step(tokens)

    def __str__(self) -> str:
        """What made the newest token, and why: `compiled (9.60 ms a token eager; 8.91 ms compiled, after 12 ms)`."""
        name = "compiled" if self._is_compiled else "eager"
        if self._figures is None:
            return name
        eager_ms, compiled_ms, compile_ms = (1e3 * seconds for seconds in self._figures)
        return f"{name} ({eager_ms:.2f} ms a token eager; {compiled_ms:.2f} ms compiled, after {compile_ms:.0f} ms)"

    def _schedule(self) -> Iterator[bool]:
        """Whether the next step is compiled, asked for right before each."""
        yield False  # nothing is looked up before the first token is out
        record = TrialRecord(self._model)
        while True:
            keys = self._cache[0].keys
            capacity = 0 if keys is None else keys.shape[2]
            yield from self._block(record, capacity, min(self._left, capacity - self._cache[0].offset))
            yield False  # this step enlarges the cache

    def _block(self, record: TrialRecord, capacity: int, steps: int) -> Iterator[bool]:
        """The next `steps` steps, for which the cache has room."""
        trials = record.trials(capacity)
        wants_trial = self._mode == "measure" or (is_metal() and len(trials) < ENOUGH_TRIALS)
        has_trial = wants_trial and steps >= _TRIAL_STEPS
        if has_trial:
            trial = yield from self._trial()
            trials = record.add(capacity, trial)
            steps -= _TRIAL_STEPS
        self._figures = typical(trials) if trials else None
        yield from repeat(_pays(self._figures, steps, is_paid=has_trial), steps)

    def _trial(self) -> Generator[bool, None, Trial]:
        """Both kinds in turn. A step's time is that up to the next step: all that goes into a token."""
        eager: list[float] = []
        compiled: list[float] = []
        for _ in range(_TURNS):
            eager += yield from self._timed(False)
            compiled += yield from self._timed(True)
        compiled_s = median(compiled)
        return Trial(median(eager), compiled_s, max(0.0, compiled[0] - compiled_s))  # the first step compiles

    def _timed(self, is_compiled: bool) -> Generator[bool, None, list[float]]:
        """A few steps of one kind, and the seconds that each took."""
        ticks = [self._clock()]
        for _ in range(_STEPS):
            yield is_compiled
            ticks.append(self._clock())
        return [end - start for start, end in pairwise(ticks)]


def _pays(figures: Trial | None, steps: int, is_paid: bool) -> bool:
    """Whether so many compiled steps save more time than compiling takes."""
    if figures is None:
        return False
    return steps * (figures.eager_s - figures.compiled_s) > (0 if is_paid else figures.compile_s)
