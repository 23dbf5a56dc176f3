"""Stop strings: found wherever they are split, never shown, never swallowing what is not one (fault D4)."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from openelm_mlx.errors import GenerationError
from openelm_mlx.stopping import StopStrings

texts = st.text(alphabet="ab ", max_size=30)
stops = st.lists(st.text(alphabet="ab ", min_size=1, max_size=5), max_size=3)


def run(pieces, stop_strings):
    stream = StopStrings(stop_strings)
    shown = "".join(stream.feed(piece) for piece in pieces)
    return shown + ("" if stream.stopped else stream.finish()), stream.stopped


@given(st.lists(texts, max_size=8), stops)
def test_whatever_the_pieces(pieces, stop_strings):
    whole = "".join(pieces)
    shown, stopped = run(pieces, stop_strings)
    assert stopped == any(stop in whole for stop in stop_strings)
    assert whole.startswith(shown)
    assert not any(stop in shown for stop in stop_strings)
    if not stopped:
        assert shown == whole


@given(texts, stops)
def test_letter_by_letter_stops_at_the_first_completed(text, stop_strings):
    shown, stopped = run(list(text), stop_strings)
    ends = [text.find(stop) + len(stop) for stop in stop_strings if stop in text]
    if stopped:
        first = min(ends)
        begins = [first - len(stop) for stop in stop_strings if text[:first].endswith(stop)]
        assert shown == text[: min(begins)]


@pytest.mark.parametrize(
    ("pieces", "stop_strings", "expected"),
    [
        (["alpha be", "ta gam", "ma delta"], ["beta gamma"], "alpha "),  # split over tokens
        (["one STOP two"], ["STOP"], "one "),  # inside a token
        (["xx a", "b", "c"], ["abc", "b"], "xx a"),  # two lengths: the first to be complete wins
        (["alpha be", "ta"], ["beta gamma"], "alpha beta"),  # never completed: flushed
    ],
)
def test_examples(pieces, stop_strings, expected):
    assert run(pieces, stop_strings)[0] == expected


def test_an_empty_stop_string_is_refused():
    with pytest.raises(GenerationError, match="empty"):
        StopStrings(["ok", ""])
