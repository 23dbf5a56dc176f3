"""Drafts from the text itself: where its last tokens have occurred before, what followed them then may follow again.

Answers that quote, code that is edited and texts that loop repeat themselves; most prose does not. A draft that is
wrong costs the time of its check, so drafting keeps an account, in units of plain decode steps: what a draft won or
lost is booked from its measured time, and while there is a debt there are no drafts. Decoding then runs ahead as if
there were no lookup, and each plain token pays off a little: the total loss is that share of plain decoding's time.
The lookup goes on meanwhile, and a plain token it would have foreseen pays off more.
"""

from collections import deque
from collections.abc import Sequence
from statistics import median

import mlx.core as mx

from .drafts import Draft, Drafter
from .sampling import LogitsProcessor, Sampler

NGRAM = 2  # tokens that must have occurred before; the draft's length answers for chance matches
_TIMINGS = 9  # of plain steps: their median ignores the odd slow one
_FEWEST_TIMINGS = 3

# The account, in plain steps. Replays of prose, code and adversarial texts, with checks of n drafts that cost 1.05 to
# n + 1 steps, took at most 1.07 times plain decoding's time.
_START = 1.0
_MOST = 4.0  # so that a text that turns from repetition to prose is noticed soon
_PER_TOKEN = 0.03
_PER_FORESEEN_TOKEN = 0.06


class PromptLookup(Drafter):
    """Proposes up to `num_draft_tokens` tokens; a token costs one look into a dictionary, however long the text."""

    def __init__(self, num_draft_tokens: int) -> None:
        super().__init__(num_draft_tokens)
        self._index: dict[tuple[int, ...], int] = {}  # n-gram -> where the text went on after it, last time
        self._source: int | None = None  # where the text would go on if it repeats itself
        self._run = 0  # how many tokens in a row have been as they were there
        self._balance = _START
        self._plain_s: deque[float] = deque(maxlen=_TIMINGS)

    def begin(self, held: int, prompt: Sequence[int]) -> None:
        self._index, self._source, self._run = {}, None, 0  # the text may be an earlier one, cut short
        super().begin(held, prompt)

    def expects(self) -> bool:
        return self._source is not None and self._balance > 0 and len(self._plain_s) >= _FEWEST_TIMINGS

    def propose(
        self, limit: int, sampler: Sampler | None, logits_processors: Sequence[LogitsProcessor]
    ) -> Draft | None:
        """At most as many tokens as have just come true, so that a chance match costs little."""
        if self._source is None or not self.expects():
            return None
        count = min(limit, self.num_draft_tokens, self._run)
        period = len(self.text) - self._source  # a loop shorter than the draft goes on round and round
        return Draft(mx.array([self.text[self._source + i % period] for i in range(count)], mx.uint32))

    def learn(self, tokens: Sequence[int], proposed: int, seconds: float) -> None:
        foreseen = self._source is not None and self.text[self._source] == tokens[0]
        if proposed:
            # Checking n drafts takes less than n steps, unless something else happened: a kernel was compiled.
            gain = max(len(tokens) - seconds / median(self._plain_s), -proposed)
        else:
            self._plain_s.append(seconds)
            gain = _PER_FORESEEN_TOKEN if foreseen else _PER_TOKEN
        self._balance = min(self._balance + gain, _MOST)
        super().learn(tokens, proposed, seconds)

    def _add(self, token: int) -> None:
        source, self._source = self._source, None
        if source is not None and self.text[source] == token:
            self._source = source + 1
            self._run += 1
        self.text.append(token)
        ngram = tuple(self.text[-NGRAM:])
        if self._source is None:
            self._source = self._index.get(ngram)
            self._run = NGRAM
        self._index[ngram] = len(self.text)
