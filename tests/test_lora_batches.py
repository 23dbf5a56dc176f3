"""Batches: each row once an epoch, an order that is a function of seed and epoch, padding that never counts."""

from types import SimpleNamespace

import mlx.core as mx
import numpy as np
import pytest
from chats import TINY
from hypothesis import given
from hypothesis import strategies as st
from tuning import settings

from openelm_mlx.lora.batches import Batches
from openelm_mlx.lora.job import make_batches
from openelm_mlx.lora.packing import pack
from openelm_mlx.lora.sequences import Sequence
from openelm_mlx.lora.show_batch import show_batch
from openelm_mlx.tokenizer import Tokenizer

LIMIT = 100
lengths_of_rows = st.lists(st.integers(2, LIMIT), min_size=1, max_size=40)


def rows_of(lengths):
    """Sequences whose ids tell row and place; 0 and 2, which fill and end elsewhere, are ids like others."""
    return [
        Sequence(np.arange(length, dtype=np.int32) * 1000 + i, np.arange(length) > length // 2, f"r{i}")
        for i, length in enumerate(lengths)
    ]


def batches_of(lengths, size=4, *, seed=0, **options):
    return Batches(rows_of(lengths), batch_size=size, seed=seed, max_seq_length=LIMIT, **options)


def epoch_of(batches, epoch=0):
    return [batches.batch(epoch * len(batches) + i) for i in range(len(batches))]


def names(batches):
    return [name for batch in batches for row in batch.rows for name in row.split(" + ")]


def sequences_in(batch):
    """Name -> (ids, marks) of every sequence in a batch, read through lengths and segments as the trainer does."""
    tokens, counted = np.array(batch.tokens), np.array(batch.counted)
    found = {}
    for b, row in enumerate(batch.rows):
        for number, name in enumerate(row.split(" + ")):
            if batch.segments is None:
                place = np.arange(tokens.shape[1]) < batch.lengths[b]
            else:
                place = np.array(batch.segments[b]) == number
            found[name] = (tokens[b, place].tolist(), counted[b, place].tolist())
    return found


@given(lengths=lengths_of_rows, size=st.integers(1, 9), seed=st.integers(0, 5), packed=st.booleans())
def test_no_row_is_lost_doubled_or_changed(lengths, size, seed, packed):
    # faults E2, B12
    batches = batches_of(lengths, size, seed=seed, pack=packed)
    for epoch in (0, 1):
        made = epoch_of(batches, epoch)
        assert sorted(names(made)) == sorted(f"r{i}" for i in range(len(lengths)))
        stored = {name: content for batch in made for name, content in sequences_in(batch).items()}
        assert stored == {row.row: (row.tokens.tolist(), row.counted.tolist()) for row in rows_of(lengths)}
        assert sum(int(mx.sum(batch.counted).item()) for batch in made) == batches.epoch_tokens
        assert all(len(batch.rows) == size for batch in made[:-1])


@given(lengths=lengths_of_rows, size=st.integers(1, 9), packed=st.booleans())
def test_a_batch_depends_on_its_number_alone(lengths, size, packed):
    asked, fresh = batches_of(lengths, size, pack=packed), batches_of(lengths, size, pack=packed)
    forward = [asked.batch(i) for i in range(2 * len(asked))]
    for index in reversed(range(2 * len(asked))):
        batch = fresh.batch(index)
        assert batch.rows == forward[index].rows
        assert mx.array_equal(batch.tokens, forward[index].tokens).item()


def test_seed_and_epoch_change_the_order():
    lengths = [10 + i % 7 for i in range(60)]
    orders = {tuple(names(epoch_of(batches_of(lengths, seed=seed), epoch))) for seed in (0, 1) for epoch in (0, 1)}
    assert len(orders) == 4


def test_the_order_is_the_same_everywhere():
    # a resumed run may meet another numpy
    assert names(epoch_of(batches_of([5] * 8, 3, seed=7), 1)) == ["r1", "r3", "r2", "r7", "r4", "r5", "r0", "r6"]


@given(lengths=lengths_of_rows, size=st.integers(1, 9), packed=st.booleans())
def test_lengths_are_few_and_the_longest_comes_first(lengths, size, packed):
    # fault H1: the peak of all epochs is the first batch's
    batches = batches_of(lengths, size, pack=packed)
    shapes = [batch.tokens.shape for epoch in (0, 1) for batch in epoch_of(batches, epoch)]
    assert all(shape[1] % 32 == 0 or shape[1] == LIMIT for shape in shapes)
    assert shapes[0] == max(shapes)
    assert shapes[0][1] == max(shape[1] for shape in shapes)


def test_rows_of_a_batch_have_nearly_one_length():
    lengths = np.random.default_rng(0).integers(2, LIMIT, 200).tolist()
    batches = epoch_of(batches_of(lengths, 4), 1)
    cells, filled = sum(batch.tokens.size for batch in batches), sum(lengths)
    assert filled / cells > 0.7


def test_an_evaluation_of_some_batches_is_drawn_from_all_rows_and_not_from_the_seed():
    model = SimpleNamespace(config=SimpleNamespace(max_context_length=LIMIT))
    sequences = rows_of([3 + i // 10 for i in range(100)])
    drawn = []
    for seed in (0, 7):
        chosen = settings(batch_size=4, seed=seed, max_seq_length=LIMIT)
        batches = make_batches(sequences, chosen, model, training=False)
        drawn.append([name for i in range(5) for name in batches.batch(i).rows])
    assert drawn[0] == drawn[1]
    numbers = [int(name[1:]) for name in drawn[0]]
    assert 30 < np.mean(numbers) < 70  # the first rows of the file alone: 10


def test_padding_is_known_by_its_place():
    """Faults F1, B12: rows of 3 and 9 tokens that end in the same id, together: 2 + 8 targets, both ends among them."""
    rows = [Sequence(np.array([1] * (n - 1) + [2], np.int32), np.arange(n) > 0, f"r{n}") for n in (3, 9)]
    batch = Batches(rows, batch_size=2, seed=0, max_seq_length=LIMIT).batch(0)
    marks = np.array(batch.counted)
    assert sorted(marks.sum(axis=1).tolist()) == [2, 8]
    assert all(marks[b, length - 1] for b, length in enumerate(batch.lengths))
    assert not any(marks[b, length:].any() for b, length in enumerate(batch.lengths))


@pytest.mark.parametrize("packed", [False, True])
def test_one_row_and_none(packed):
    # faults E2, E4
    assert len(batches_of([5], pack=packed)) == 1
    assert batches_of([5], pack=packed).batch(9).rows == ("r0",)
    empty = batches_of([], pack=packed)
    assert (len(empty), empty.epoch_tokens) == (0, 0)
    with pytest.raises(IndexError, match="no batch 0"):
        empty.batch(0)


def test_what_does_not_fit_is_refused():
    with pytest.raises(ValueError, match="more than max_seq_length"):
        batches_of([LIMIT + 1])
    with pytest.raises(ValueError, match="batch_size"):
        batches_of([5], 0)


@given(lengths=st.lists(st.integers(1, 50), max_size=60))
def test_packing_is_a_partition_that_fits(lengths):
    rows = pack(lengths, 50)
    assert sorted(i for row in rows for i in row) == list(range(len(lengths)))
    assert all(sum(lengths[i] for i in row) <= 50 for row in rows)
    assert len(rows) <= max(1, 2 * -(-sum(lengths) // 50))  # two rows that are each half empty would have been one


def test_packing_wastes_little():
    lengths = np.random.default_rng(0).integers(10, 400, 2000).tolist()
    rows = pack(lengths, 2048)
    assert sum(lengths) / (len(rows) * 2048) > 0.98


@given(lengths=lengths_of_rows)
def test_segments_tell_the_sequences_of_a_row_apart(lengths):
    for batch in epoch_of(batches_of(lengths, 3, pack=True)):
        segments, counted = np.array(batch.segments), np.array(batch.counted)
        for row, marks, length in zip(segments, counted, batch.lengths, strict=True):
            assert (row[:length] >= 0).all()
            assert (row[length:] == -1).all()
            starts = np.flatnonzero(np.diff(row[:length], prepend=-1))
            assert (np.diff(row[:length], prepend=-1)[starts] == 1).all()
            assert not marks[starts].any()


class TestShowBatch:
    ROW = Sequence(np.array([1, 13, 40, 2], np.int32), np.array([False, False, True, True]), "t.jsonl:1 \x1b[2J")

    def shown(self, capsys, *, packed=False):
        batch = Batches([self.ROW, self.ROW], batch_size=1, seed=0, max_seq_length=40, pack=packed).batch(0)
        show_batch(batch, Tokenizer.from_path(TINY))
        return capsys.readouterr().out

    def test_lines_for_a_pipe(self, capsys):
        # fault F3
        tokenizer = Tokenizer.from_path(TINY)
        head, titles, *lines = self.shown(capsys).splitlines()
        assert "\x1b" not in head
        assert titles == "position\tid\tpiece\tcounted"
        assert lines[0] == "0\t1\t<s>\t"
        assert lines[1] == f"1\t13\t{tokenizer.piece(13)}\t"
        assert lines[3] == "3\t2\t</s>\tyes"
        assert lines[4:] == ["4-31\t\t(padding)\t"]

    def test_packed_positions_begin_again(self, capsys):
        lines = self.shown(capsys, packed=True).splitlines()[2:]
        assert [line.split("\t")[0] for line in lines] == ["0", "1", "2", "3", "0", "1", "2", "3", "8-31"]

    def test_a_table_for_a_terminal(self, capsys, monkeypatch):
        monkeypatch.setattr("sys.stdout.isatty", lambda: True)
        out = self.shown(capsys)
        assert "position" in out
        assert "</s>" in out
        assert "\t" not in out
        assert "\x1b[2J" not in out
