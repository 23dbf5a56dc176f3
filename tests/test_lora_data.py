"""From what the user names to sequences: files, formats, splits, and a message for everything that is wrong."""

import argparse
import itertools
import json
from contextlib import contextmanager

import numpy as np
import pytest
from chats import TINY
from hypothesis import given
from hypothesis import strategies as st

from openelm_mlx.errors import ConfigError, DataError
from openelm_mlx.instruction_prompt import instruction_prompt
from openelm_mlx.lora import datasets as module
from openelm_mlx.lora.data_arguments import add_data_arguments
from openelm_mlx.lora.data_settings import DataSettings
from openelm_mlx.lora.datasets import load_datasets
from openelm_mlx.lora.rows import read_rows
from openelm_mlx.tokenizer import Tokenizer

TOKENIZER = Tokenizer.from_path(TINY)
EOS = TOKENIZER.eos_token_id
TEXT = {"text": "Once upon a time there was a cat."}
ASKED = {"prompt": "What is it?", "completion": " A cat."}
TALK = {"messages": [{"role": "user", "content": "Hello!"}, {"role": "assistant", "content": "Bonjour!"}]}
TASK = {"instruction": "Please choose: which is a colour?", "input": "", "output": "the correct answer is answer2"}


def write(path, *rows):
    """A .jsonl file of rows, which may be objects or lines as they are."""
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def numbered(count):
    return [{"text": f"Row {i} of many."} for i in range(count)]


def load(data=None, splits=("train", "valid"), max_context=None, chat_format=None, **settings):
    settings = DataSettings(data=None if data is None else str(data), **settings)
    return load_datasets(
        settings, TOKENIZER, splits=splits, max_context=max_context, chat_format=chat_format, notify=lambda line: None
    )


def texts(sequences):
    return [TOKENIZER.decode(sequence.tokens.tolist()) for sequence in sequences]


class TestReading:
    @given(rows=st.lists(st.dictionaries(st.text(max_size=5), st.text(max_size=9), max_size=3), min_size=1, max_size=5))
    def test_lines_and_an_array_hold_the_same(self, rows, tmp_path_factory):
        # fault E1: every character that JSON may hold, separators of Unicode unescaped
        folder = tmp_path_factory.mktemp("rows")
        made = {
            "lines.jsonl": "\n".join(json.dumps(row, ensure_ascii=False) for row in rows),
            "array.jsonl": json.dumps(rows, ensure_ascii=False, indent=1),
            "odd.jsonl": "\ufeff\r\n" + "\r\n\n".join(json.dumps(row) for row in rows),
        }
        for name, text in made.items():
            (folder / name).write_bytes(text.encode())
            assert [row.value for row in read_rows(folder / name)] == rows

    def test_rows_are_named_by_their_line(self, tmp_path):
        file = write(tmp_path / "a.jsonl", TEXT, "", TEXT)
        assert [row.where for row in read_rows(file)] == ["a.jsonl:1", "a.jsonl:3"]
        file = write(tmp_path / "b.json", json.dumps([TEXT, TEXT], indent=2))
        assert [row.where for row in read_rows(file)] == ["b.json, row 1", "b.json, row 2"]

    @pytest.mark.parametrize(
        ("rows", "told"),
        [
            ([TEXT, '{"text": "a"'], "a.jsonl:2, column 13: expected a JSON object on each line"),
            (["[1, 2"], "a.jsonl:1, column 6: expected"),
            ([TEXT, "5"], 'a.jsonl:2: expected a JSON object such as {"text": "..."}, got 5'),
            (['["a"]'], "a.jsonl, row 1: expected a JSON object"),
            (["[" * 100000], "a.jsonl:1"),
            ([TEXT, {"text": 5}], "a.jsonl:2: 'text' must be a string, got int: {\"text\": 5}"),
            ([{"txt": "a"}], "a.jsonl:1: no known format: expected columns prompt+completion, messages, text"),
            ([TEXT, ASKED], "a.jsonl:2: expected text as in the file's first row, but 'text' is missing"),
            ([ASKED, TEXT], "a.jsonl:2: expected prompt+completion"),
            ([TASK, {**TASK, "input": 3}], "a.jsonl:2: 'input' must be a string"),
            ([{"text": "x" * 500}, {"text": None}], "'text' must be a string, got NoneType"),
            ([{"messages": "hi"}], "a.jsonl:1: 'messages' must be a list of messages"),
            ([{"messages": []}], "must be a list of messages"),
            ([{**TALK, "tools": [1]}], "OpenELM knows no tools"),
            ([{"messages": [{"role": "user", "content": ["x"]}]}], "message 1 must have a role and a text"),
            ([TALK, {"messages": [{"role": "tool", "content": "X"}]}], "a.jsonl:2: message 1 has role 'tool'"),
            ([{"messages": [*TALK["messages"], {"role": "system", "content": ""}]}], "message 3 is a system message"),
        ],
    )
    def test_what_is_wrong_is_told_with_file_line_and_beginning(self, rows, told, tmp_path):
        # faults E1, B9
        with pytest.raises(DataError) as caught:
            load(write(tmp_path / "a.jsonl", *rows))
        assert told in str(caught.value)
        assert len(str(caught.value)) < 260

    def test_no_more_than_sixty_characters_are_shown(self, tmp_path):
        with pytest.raises(DataError) as caught:
            load(write(tmp_path / "a.jsonl", {"b\x1b": "y" * 500}))
        assert str(caught.value).endswith('{"b\\u001b": "' + "y" * 47)

    @pytest.mark.parametrize("data", [b'{"text": "a"}\n{"text": "\xff"}', b'[{"text": "a"},\n{"text": "\xff"}]'])
    def test_other_encodings(self, data, tmp_path):
        (tmp_path / "a.jsonl").write_bytes(data)
        with pytest.raises(DataError, match="a.jsonl:2 is not UTF-8"):
            load(tmp_path / "a.jsonl")


class TestFormats:
    def test_each_file_has_its_own(self, tmp_path):
        write(tmp_path / "train.jsonl", TEXT)
        write(tmp_path / "valid.jsonl", TALK)
        write(tmp_path / "test.json", json.dumps([TASK, {**TASK, "input": "red, blue"}]))
        data = load(tmp_path, ("train", "valid", "test"))
        assert texts(data.train) == [TEXT["text"]]
        assert texts(data.valid) == ["<|system|>\n \n<|user|>\nHello! \n<|assistant|>\nBonjour!"]
        assert texts(data.test) == [
            instruction_prompt(TASK["instruction"], context) + TASK["output"] for context in ("", "red, blue")
        ]
        assert any("(instruction)" in line for line in data.summary)
        assert any("needs --instruct" in line for line in data.summary)

    def test_masked_instructions_count_the_answer(self, tmp_path):
        data = load(write(tmp_path / "a.json", json.dumps([TASK])), mask_prompt=True)
        (sequence,) = data.train
        counted = sequence.tokens[sequence.counted].tolist()
        assert TOKENIZER.decode(counted).strip() == TASK["output"]
        assert counted[-1] == EOS
        assert "prompts are masked: only answers count" in data.summary

    def test_a_text_has_no_prompt_to_mask(self, tmp_path):
        with pytest.raises(DataError, match="a.jsonl:1: a text row has no prompt to mask"):
            load(write(tmp_path / "a.jsonl", TEXT), mask_prompt=True)

    def test_columns_of_other_names(self, tmp_path):
        file = write(tmp_path / "a.jsonl", {"q": "What?", "a": " That.", "text": "ignored"})
        data = load(file, prompt_feature="q", completion_feature="a")
        assert texts(data.train) == ["What? That."]

    @pytest.mark.parametrize(
        ("row", "reason"),
        [
            ({"text": " \n"}, "an empty text"),
            ({"prompt": "a", "completion": ""}, "an empty completion"),
            ({**TASK, "output": " "}, "an empty completion"),
            (
                {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": ""}]},
                "an empty message",
            ),
            ({"messages": [{"role": "user", "content": "a"}]}, "no answer of the assistant"),
        ],
    )
    @pytest.mark.parametrize("mask", [False, True])
    def test_what_teaches_nothing_is_left_out_and_told(self, row, reason, mask, tmp_path):
        # faults A2, F2
        if mask and "text" in row:
            return
        good = {"text": TEXT, "prompt": ASKED, "instruction": TASK, "messages": TALK}[next(iter(row))]
        data = load(write(tmp_path / "a.jsonl", good, row), mask_prompt=mask)
        assert [sequence.row for sequence in data.train] == ["a.jsonl:1"]
        assert any(f"1 row left out, nothing to learn; the first: a.jsonl:2 has {reason}" in x for x in data.summary)
        with pytest.raises(DataError, match=f"no row of train has anything to learn: a.jsonl:1 has {reason}"):
            load(write(tmp_path / "a.jsonl", row), mask_prompt=mask)

    def test_nothing_left_within_the_limit(self, tmp_path):
        # faults E5, F2
        file = write(tmp_path / "a.jsonl", {"prompt": "long " * 70, "completion": "b"})
        with pytest.raises(DataError, match="within 64 tokens: raise --max-seq-length"):
            load(file, mask_prompt=True, max_seq_length=64)

    def test_rows_of_10_50_and_5000_tokens(self, tmp_path):
        # fault E5
        ids = len(TOKENIZER.encode("a")) - 1
        rows = [{"text": " ".join("a" * (count // ids))} for count in (10, 50, 5000)]
        data = load(write(tmp_path / "a.jsonl", *rows), max_seq_length=64, val_split=0)
        assert [sequence.tokens[-1] == EOS for sequence in data.train] == [True, True, False]
        assert sum("longer than 64 tokens" in line for line in data.summary) == 1

    def test_the_models_context_is_the_limit(self, tmp_path):
        data = load(write(tmp_path / "a.jsonl", {"text": "a cat " * 100}), max_context=32)
        assert [len(sequence) for sequence in data.train] == [32]
        assert "sequences are limited to the model's context of 32 tokens" in data.summary


class TestSplits:
    @given(count=st.integers(2, 40), share=st.floats(0.01, 0.99), seed=st.integers(0, 3))
    def test_a_single_file_is_divided(self, count, share, seed):
        made = module._Split("train", [(object(), f"r{i}") for i in range(count)], module.Counter(), [])
        train, valid = module._divided(made, share, seed)
        names = [[name for _, name in split.examples] for split in (train, valid)]
        assert sorted(itertools.chain(*names)) == sorted(f"r{i}" for i in range(count))
        assert abs(len(names[1]) - count * share) <= 1
        assert all(names)
        again = module._divided(made, share, seed)
        assert [split.examples for split in again] == [train.examples, valid.examples]

    def test_by_default_a_tenth_and_by_seed(self, tmp_path):
        file = write(tmp_path / "a.jsonl", *numbered(40))
        held = {tuple(texts(load(file, seed=seed).valid)) for seed in range(3)}
        assert {len(rows) for rows in held} == {4}
        assert len(held) == 3

    @pytest.mark.parametrize("rows", [None, []])
    def test_no_validation(self, rows, tmp_path):
        # fault E4
        write(tmp_path / "train.jsonl", *numbered(3))
        if rows is not None:
            write(tmp_path / "valid.jsonl", *rows)
        data = load(tmp_path)
        assert (len(data.train), data.valid) == (3, [])
        assert sum(line.startswith("no validation") for line in data.summary) == 1

    def test_a_folder_is_divided_when_asked(self, tmp_path):
        write(tmp_path / "train.jsonl", *numbered(10))
        data = load(tmp_path, val_split=0.3)
        assert (len(data.train), len(data.valid)) == (7, 3)

    def test_one_row_is_trained_on(self, tmp_path):
        # faults E2, E4
        data = load(write(tmp_path / "a.jsonl", TEXT))
        assert (len(data.train), len(data.valid)) == (1, 0)

    @pytest.mark.parametrize(
        ("files", "splits", "told"),
        [
            ({"train.jsonl": []}, ["train"], "the train data has no rows"),
            ({"valid.jsonl": [TEXT]}, ["train", "valid"], "there is no train data: expected a file train.jsonl"),
            ({"train.jsonl": [TEXT]}, ["train", "test"], "there is no test data"),
            ({"data.jsonl": [TEXT]}, ["train", "valid"], "has no train.jsonl or valid.jsonl"),
            ({"train.jsonl": [TEXT], "train.json": [TEXT]}, ["train"], "has both train.jsonl and train.json"),
        ],
    )
    def test_what_is_missing_or_twice(self, files, splits, told, tmp_path):
        # fault E2
        for name, rows in files.items():
            write(tmp_path / name, *rows)
        with pytest.raises(DataError, match=told):
            load(tmp_path, splits)

    def test_a_file_alone_can_be_the_test(self, tmp_path):
        data = load(write(tmp_path / "a.jsonl", TEXT), ["test"])
        assert (len(data.test), data.train) == (1, [])

    def test_rows_that_are_in_training_too_are_told(self, tmp_path):
        write(tmp_path / "train.jsonl", *numbered(3))
        write(tmp_path / "validation.jsonl", *numbered(2), TEXT)
        data = load(tmp_path)
        assert "valid: 2 sequences also in train: the loss there will look too good" in data.summary

    def test_a_limit_of_rows_is_all_that_is_read(self, tmp_path):
        # fault E8: what is behind the limit is not even looked at
        data = load(write(tmp_path / "a.jsonl", *numbered(2), "no JSON"), max_rows=2, val_split=0)
        assert len(data.train) == 2

    @pytest.mark.parametrize("name", ["nothing.jsonl", "./nowhere", "no such", "a/b/c"])
    def test_a_name_of_nothing(self, name):
        with pytest.raises(DataError, match="no such file or folder, and no name of a Hub dataset"):
            load(name)

    def test_progress_counts_every_row(self, tmp_path, monkeypatch):
        # fault E9
        ticks = []

        @contextmanager
        def spy(label, total):
            yield lambda count: ticks.append((label, total, count))

        monkeypatch.setattr(module, "counting", spy)
        load(write(tmp_path / "a.jsonl", *numbered(450)), val_split=0)
        assert ticks == [("tokenizing train", 450, 200)] * 2


class TestSettings:
    def parsed(self, *flags):
        parser = argparse.ArgumentParser()
        add_data_arguments(parser)
        return vars(parser.parse_args(flags))

    def test_flags_win_over_yaml_and_absent_ones_say_nothing(self):
        yaml = {"data": "folder", "mask_prompt": True, "max_seq_length": 512, "learning_rate": 1e-5, "val_split": None}
        flags = self.parsed("--max-seq-length", "64", "--no-mask-prompt", "--long-rows", "split", "--pack")
        merged = yaml | {key: value for key, value in flags.items() if value is not None}
        assert DataSettings.from_values(merged) == DataSettings(
            data="folder", max_seq_length=64, long_rows="split", pack=True
        )
        assert {key for key, value in self.parsed().items() if value is not None} == set()

    @pytest.mark.parametrize(
        ("values", "told"),
        [
            ({}, "--data"),
            ({"data": "a", "hf_dataset": {"path": "b"}}, "drop one"),
            ({"data": "a", "val_split": 1.0}, "below 1, got 1.0"),
            ({"data": "a", "val_split": float("nan")}, "val_split"),
            ({"data": "a", "max_seq_length": 1}, "2 tokens or more"),
            ({"data": "a", "max_seq_length": "2048"}, "max_seq_length must be int, got '2048'"),
            ({"data": "a", "max_seq_length": True}, "max_seq_length must be int"),
            ({"data": "a", "max_rows": 0}, "max_rows"),
            ({"data": "a", "long_rows": "drop"}, "one of cut, split, skip"),
            ({"data": "a", "seed": -1}, "seed"),
            ({"data": 5}, "data must be str"),
            ({"data": "a", "mask_prompt": "yes"}, "mask_prompt must be bool"),
            ({"hf_dataset": "name"}, "hf_dataset must be dict or list"),
        ],
    )
    def test_what_cannot_be(self, values, told):
        with pytest.raises(ConfigError, match=told):
            DataSettings.from_values(values)


def test_ids_are_of_the_models_vocabulary(tmp_path):
    data = load(write(tmp_path / "a.jsonl", {"text": "🙂 Ελλάδα </s> <s>"}))
    tokens = np.concatenate([sequence.tokens for sequence in data.train])
    assert tokens.dtype == np.int32
    assert tokens.max() < TOKENIZER.vocab_size
    assert tokens.min() >= 0
