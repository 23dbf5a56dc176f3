"""Rows as token ids: one BOS, EOS where an answer ends and nowhere else, and exactly the answers counted if masked."""

import json
from itertools import pairwise

import numpy as np
import pytest
from chats import TINY, answer_ids
from hypothesis import given
from hypothesis import strategies as st
from texts import SPECIAL_TEXTS, TRICKY_TEXTS

from openelm_mlx.chat.format import InstructFormat, Turn
from openelm_mlx.chat.template import TemplateFormat
from openelm_mlx.errors import DataError
from openelm_mlx.instruction_prompt import instruction_prompt
from openelm_mlx.lora.chat_form import folder_format
from openelm_mlx.lora.formats import Chat, Completion, Text
from openelm_mlx.lora.long_rows import Fitting, split
from openelm_mlx.lora.sequences import Encoder, Sequence
from openelm_mlx.prompt import CHAT_TEMPLATE, encode_chat
from openelm_mlx.tokenizer import Tokenizer

TOKENIZER = Tokenizer.from_path(TINY)
BOS, EOS = TOKENIZER.bos_token_id, TOKENIZER.eos_token_id
texts = st.text(max_size=20) | st.sampled_from([*SPECIAL_TEXTS, *TRICKY_TEXTS])
ENDLESS = "{% for m in messages %}{{ 'bot' if m.role == 'assistant' else 'me' }}: {{ m.content }}\n{% endfor %}bot: "


def encode(example, *, mask=False, **options):
    return Encoder(TOKENIZER, mask_prompt=mask, **options).encode(example, "rows:1")


def ids(sequence):
    return sequence.tokens.tolist()


def chat(*contents, system=None):
    roles = ["user", "assistant"] * len(contents)
    turns = [{"role": role, "content": text} for role, text in zip(roles, contents, strict=False)]
    return Chat(tuple([{"role": "system", "content": system}] * (system is not None) + turns))


def answers(sequence):
    """The counted stretches, as lists of ids."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], sequence.counted, [0]]).astype(int)))
    return [ids(sequence)[a:b] for a, b in zip(edges[::2], edges[1::2], strict=True)]


class TestTexts:
    @given(text=texts)
    def test_begin_with_bos_and_end_in_eos(self, text):
        # faults B6, B10, E6
        sequence = encode(Text(text))
        assert ids(sequence) == [*TOKENIZER.encode(text), EOS]
        assert (ids(sequence).count(BOS), ids(sequence).count(EOS)) == (1, 1)
        assert sequence.counted.tolist() == [False] + [True] * (len(sequence) - 1)

    def test_may_go_on(self):
        assert ids(encode(Text("Once upon"), text_eos=False)) == TOKENIZER.encode("Once upon")

    def test_what_is_no_unicode_is_told_with_its_row(self):
        with pytest.raises(DataError, match="rows:1: the text is not Unicode"):
            encode(Text("a\ud800"))


class TestCompletions:
    @given(prompt=texts, completion=texts)
    def test_the_prompt_is_what_both_encodings_begin_with(self, prompt, completion):
        # faults F3, B8
        whole, masked = encode(Completion(prompt, completion)), encode(Completion(prompt, completion), mask=True)
        assert ids(whole) == ids(masked) == [*TOKENIZER.encode(prompt + completion), EOS]
        start = len(masked) - masked.targets
        alone = TOKENIZER.encode(prompt)
        assert masked.counted.tolist() == [False] * start + [True] * (len(masked) - start)
        assert ids(masked)[:start] == alone[:start]
        assert start == len(alone) or alone[start] != ids(masked)[start]

    def test_the_end_is_learned(self):
        # fault E6
        for mask in (False, True):
            sequence = encode(Completion("a", "b"), mask=mask)
            assert (ids(sequence)[-1], bool(sequence.counted[-1])) == (EOS, True)

    def test_the_papers_prompt(self):
        # as CoreNet's commonsense_170k writes it, white space and all
        pad = " " * 16
        assert instruction_prompt("Which?") == (
            "Below is an instruction that describes a task. Write a response that appropriately completes the "
            f"request.  \n\n{pad}### Instruction:\n{pad}Which?\n{pad}\n{pad}### Response:\n{pad}"
        )
        assert instruction_prompt("Which?", "a, b") == (
            "Below is an instruction that describes a task, paired with an input that provides further context. "
            f"Write a response that appropriately completes the request. \n\n{pad}### Instruction:\n{pad}Which?\n"
            f"{pad}\n{pad}### Input:\n{pad}a, b\n{pad}\n{pad}### Response:\n{pad}"
        )


class TestChats:
    @given(contents=st.lists(texts, min_size=2, max_size=6), system=st.none() | texts)
    def test_ids_are_what_the_chat_sends_and_answers(self, contents, system):
        # faults B7, E7: each prompt of a chat, with the answer's ids, is the beginning of the row
        contents = contents[: len(contents) // 2 * 2]
        sequence = encode(chat(*contents, system=system))
        turns: list[Turn] = []
        for user, answer in zip(contents[::2], contents[1::2], strict=True):
            said = answer_ids(TOKENIZER, answer)
            seen = [*InstructFormat(TOKENIZER).encode(system or "", turns, user), *said, EOS]
            assert ids(sequence)[: len(seen)] == seen
            turns.append(Turn(user, answer, tuple(said), "stop"))
        assert ids(sequence) == seen
        assert ids(sequence).count(BOS) == 1
        assert ids(sequence).count(EOS) == len(contents) + 1

    @given(contents=st.lists(texts, min_size=2, max_size=6), system=st.none() | texts)
    def test_masked_counts_the_answers_and_their_ends(self, contents, system):
        # fault F3
        sequence = encode(chat(*contents, system=system), mask=True)
        assert answers(sequence) == [[*answer_ids(TOKENIZER, answer), EOS] for answer in contents[1::2]]

    def test_ends_with_the_last_turn(self):
        # fault E7
        messages = chat("Hello!", "Bonjour!").messages
        sequence = encode(Chat(messages))
        newline = TOKENIZER.encode_segment("\n")
        assert [*ids(sequence), *newline] == encode_chat(TOKENIZER, messages, add_generation_prompt=False)

    @given(contents=st.lists(texts, min_size=2, max_size=6), system=st.none() | texts, mask=st.booleans())
    def test_our_form_as_a_template_gives_the_same(self, contents, system, mask):
        contents = contents[: len(contents) // 2 * 2]
        form = TemplateFormat(TOKENIZER, CHAT_TEMPLATE, "it")
        example = chat(*contents, system=system)
        ours, rendered = encode(example, mask=mask), encode(example, mask=mask, chat_format=form)
        assert ids(rendered) == ids(ours)
        assert rendered.counted.tolist() == ours.counted.tolist()

    def test_the_folder_decides_as_in_the_chat(self, tmp_path):
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": CHAT_TEMPLATE}))
        assert folder_format(str(tmp_path), TOKENIZER, revision=None, offline=True) is None
        (tmp_path / "chat_template.jinja").write_text(ENDLESS)
        form = folder_format(str(tmp_path), TOKENIZER, revision=None, offline=True)
        assert form is not None
        assert encode(chat("a", "b"), chat_format=form).tokens[0] == BOS

    def test_a_template_that_ends_turns_without_eos(self):
        form = TemplateFormat(TOKENIZER, ENDLESS, "it")
        one, two = (encode(chat(*texts), mask=True, chat_format=form) for texts in (["a", "b"], ["a", "b", "c", "d"]))
        assert answers(two)[0] == answers(one)[0][:-1]
        assert ids(two).count(EOS) == 1

    def test_a_template_needs_turns(self):
        form = TemplateFormat(TOKENIZER, ENDLESS, "it")
        with pytest.raises(DataError, match="take turns"):
            encode(chat("only a question"), chat_format=form)

    def test_a_template_that_rewrites_the_past_is_refused(self):
        form = TemplateFormat(
            TOKENIZER, "{{ messages | length }} {% for m in messages %}{{ m.content }} {% endfor %}", "it"
        )
        with pytest.raises(DataError, match="changes earlier turns"):
            encode(chat("a", "b", "c", "d"), chat_format=form)


def sequence_of(length, counted=None):
    tokens = np.arange(1, length + 1, dtype=np.int32)
    return Sequence(tokens, np.arange(length) > 0 if counted is None else np.array(counted), "rows:1")


class TestLongRows:
    def test_a_cut_row_has_no_false_end(self):
        # faults E5, E6
        sequence = encode(Completion("Once upon a time", " there was a cat. " * 30))
        (cut,) = Fitting(64, "cut").fit(sequence)
        assert ids(cut) == ids(sequence)[:64]
        assert EOS not in ids(cut)

    @given(length=st.integers(1, 60), limit=st.integers(2, 20), seed=st.integers(0, 9))
    def test_split_loses_nothing(self, length, limit, seed):
        # fault E5
        marks = np.random.default_rng(seed).random(length) < 0.5
        marks[0] = False
        whole = sequence_of(length, marks)
        pieces = list(split(whole, limit))
        assert all(2 <= len(piece) <= limit and piece.tokens[0] == 1 and not piece.counted[0] for piece in pieces)
        assert [token for piece in pieces for token in ids(piece)[1:]] == ids(whole)[1:]
        assert [mark for piece in pieces for mark in piece.counted[1:]] == whole.counted[1:].tolist()

    @pytest.mark.parametrize(
        ("choice", "lengths"), [("cut", [10, 50, 64]), ("split", [10, 50, 64, 64, 3]), ("skip", [10, 50])]
    )
    def test_one_summary_with_what_it_cost(self, choice, lengths):
        # fault E5
        fitting = Fitting(64, choice)
        kept = [piece for length in (10, 50, 129) for piece in fitting.fit(sequence_of(length))]
        assert [len(piece) for piece in kept] == lengths
        assert "1 row is longer than 64 tokens (the longest has 129)" in fitting.summary()
        lost = {"cut": "65 of 189 tokens (34.4%) are lost", "split": "no token is lost", "skip": "129 of 189"}[choice]
        assert lost in fitting.summary()

    def test_nothing_long_nothing_told(self):
        fitting = Fitting(64, "cut")
        fitting.fit(sequence_of(64))
        assert fitting.summary() is None

    @pytest.mark.parametrize("choice", ["cut", "split"])
    def test_a_prompt_that_fills_the_limit_leaves_nothing_to_count(self, choice):
        # fault F2
        fitting = Fitting(64, choice)
        sequence = sequence_of(75, [False] * 70 + [True] * 5)
        kept = fitting.fit(sequence)
        assert all(piece.counted.any() for piece in kept)
        assert (len(kept), fitting.untaught) == ((0, ["rows:1"]) if choice == "cut" else (1, []))


def test_neighbours_never_share_a_target():
    pieces = list(split(sequence_of(100), 30))
    assert all(not set(ids(a)[1:]) & set(ids(b)[1:]) for a, b in pairwise(pieces))
