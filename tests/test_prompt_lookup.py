"""Prompt lookup: what it finds, and that it stops where it loses; the flags of speculation."""

import argparse
import json
import shutil

import mlx.core as mx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx.utils import tree_flatten

from openelm_mlx import drafts, speculation_arguments
from openelm_mlx.benchmarks import lookup_decoding
from openelm_mlx.benchmarks.comparison import Comparison
from openelm_mlx.checkpoint import load
from openelm_mlx.cli import Parser
from openelm_mlx.common_prefix import common_prefix
from openelm_mlx.config import OpenELMConfig
from openelm_mlx.drafts import ModelDrafter
from openelm_mlx.errors import GenerationError
from openelm_mlx.hub import BUNDLED_MODEL
from openelm_mlx.model import Model
from openelm_mlx.prompt_lookup import PromptLookup
from openelm_mlx.speculation_arguments import add_speculation_arguments, drafter_from_arguments


def lookup(text, num_draft_tokens=8) -> PromptLookup:
    """One that has seen `text`, the last three tokens of it as plain steps of a second each."""
    drafter = PromptLookup(num_draft_tokens)
    drafter.begin(0, text[:-3])
    for token in text[-3:]:
        drafter.learn([token], 0, 1.0)
    return drafter


def proposed(drafter: PromptLookup, limit=100) -> list[int]:
    draft = drafter.propose(limit, None, [])
    return [] if draft is None else draft.tokens.tolist()


class TestFinding:
    TEXT = tuple(range(10, 20))

    def test_what_followed_before(self):
        assert proposed(lookup([*self.TEXT, 50, 51, 10, 11, 12, 13])) == [14, 15, 16, 17]

    def test_no_more_than_has_just_come_true_or_is_allowed(self):
        repeated = [*self.TEXT, 50]
        assert [len(proposed(lookup([*repeated, *self.TEXT[:n]], 5))) for n in range(1, 8)] == [0, 2, 3, 4, 5, 5, 5]
        assert proposed(lookup([*repeated, *self.TEXT[:4]]), limit=1) == [14]

    def test_the_latest_occurrence_counts(self):
        assert proposed(lookup([1, 2, 3, 4, 9, 1, 2, 5, 6, 9, 8, 7, 1, 2])) == [5, 6]

    def test_a_loop_goes_round(self):
        assert proposed(lookup([1, *[5, 6, 7] * 3])) == [5, 6, 7, 5, 6, 7]
        assert proposed(lookup([4] * 9, 6)) == [4] * 6

    def test_nothing_new_is_found_in_new_text(self):
        drafter = lookup(list(range(30)))
        assert proposed(drafter) == []
        assert not drafter.expects()

    def test_an_answer_cut_short_is_forgotten(self):
        drafter = lookup([1, 2, 3, 4, 5, 6, 7])
        drafter.begin(3, [20, 21, 1, 2])
        assert drafter.text == [1, 2, 3, 20, 21, 1, 2]
        assert proposed(drafter) == [3, 20]
        drafter.begin(50, [8, 9])  # a cache from elsewhere
        assert drafter.text == [8, 9]

    @given(st.lists(st.integers(0, 3), min_size=4, max_size=60))
    def test_it_is_the_continuation_of_an_earlier_occurrence(self, text):
        """Against a search of the whole text: found if and only if the last two tokens occurred before."""
        found = proposed(lookup(text, 2))
        earlier = [i for i in range(2, len(text)) if text[i - 2 : i] == text[-2:]]
        continued = [(text + text[i:] * 3)[i : i + 2] for i in earlier]
        assert bool(found) == bool(earlier)
        assert not found or found in continued


COSTS = {"nearly free": (1.05, 0.02), "as on a CPU": (1.0, 0.14), "dear": (1.0, 0.6), "a step for each": (1.0, 1.0)}


def replay(text, prompt_tokens, num_draft_tokens, costs) -> float:
    """How much faster than plain decoding a given text is written, where checking n drafts takes a + b*n steps."""
    drafter, at, took = PromptLookup(num_draft_tokens), prompt_tokens, 0.0
    drafter.begin(0, text[:at])
    while at < len(text):
        draft = proposed(drafter, len(text) - at - 1) if len(text) - at > 1 else []
        seconds = costs[0] + costs[1] * len(draft) if draft else 1.0
        agreed = common_prefix(draft, text[at:])
        drafter.learn(text[at : at + agreed + 1], len(draft), seconds)
        at, took = at + agreed + 1, took + seconds
    return (len(text) - prompt_tokens) / took


class TestAccount:
    @pytest.mark.parametrize("costs", COSTS.values(), ids=COSTS)
    @settings(max_examples=25)
    @given(data=st.data())
    def test_never_much_slower_than_plain(self, costs, data):
        """Whatever the text: copies of earlier pieces of any length, among tokens that mislead."""
        chance = data.draw(st.randoms(use_true_random=False))
        size, longest = data.draw(st.sampled_from([2, 3, 5, 10, 1000])), data.draw(st.integers(1, 16))
        text = [chance.randrange(size) for _ in range(40)]
        while len(text) < 400:
            start = chance.randrange(len(text))
            text += text[start : start + chance.randint(1, longest)]
        assert replay(text, 20, data.draw(st.integers(1, 12)), costs) >= 0.9

    @pytest.mark.parametrize(("costs", "gain"), [("nearly free", 3), ("as on a CPU", 2)])
    def test_repetition_pays(self, costs, gain):
        assert replay(list(range(50)) * 6, 50, 10, COSTS[costs]) > gain

    def test_off_when_it_loses_and_on_again_later(self):
        drafter = lookup([1, 2, 3, 4, 5, 6, 7, 8, 9, 1, 2, 3, 4, 5])
        assert drafter.expects()
        assert len(proposed(drafter)) == 5
        drafter.learn([1], 5, 3.0)  # three steps' time for one token
        drafter.learn([2], 0, 1.0)
        assert not drafter.expects()
        assert proposed(drafter) == []
        expected = []
        for token in [3, 4, 5, 6, 7, 8, 9] * 4:  # foreseen, all of them
            drafter.learn([token], 0, 1.0)
            expected.append(drafter.expects())
        assert not any(expected[:10])
        assert all(expected[20:])  # tokens that could not have been foreseen would take twice as many
        assert proposed(drafter)

    def test_one_slow_pass_is_not_held_against_it_for_long(self):
        """A kernel is compiled at its first use: that says nothing about the next pass."""
        drafter = lookup([*range(9), *range(7)])
        drafter.learn([7, 8], 4, 1000.0)
        for token in range(9, 129):
            drafter.learn([token], 0, 1.0)
        drafter.learn([0], 0, 1.0)
        drafter.learn([1], 0, 1.0)
        assert proposed(drafter) == [2, 3]

    def test_no_draft_before_there_is_a_time_to_compare_with(self):
        drafter = PromptLookup(4)
        drafter.begin(0, [1, 2, 3, 4, 1, 2])
        assert not drafter.expects()
        assert drafter.propose(4, None, []) is None


@pytest.fixture(scope="module")
def tiny():
    return load("tiny")


class TestFlags:
    def parse(self, *flags) -> argparse.Namespace:
        parser = Parser(prog="openelm generate")
        add_speculation_arguments(parser)
        common = {"dtype": "auto", "offline": True, "keep_quantized": False}
        return argparse.Namespace(**vars(parser.parse_args(flags)), **common)

    def test_none_is_plain_decoding(self, tiny):
        assert drafter_from_arguments(self.parse(), *tiny) is None

    def test_prompt_lookup(self, tiny):
        drafter = drafter_from_arguments(self.parse("--prompt-lookup", "7"), *tiny)
        assert isinstance(drafter, PromptLookup)
        assert drafter.num_draft_tokens == 7

    def test_draft_model(self, tiny):
        drafter = drafter_from_arguments(self.parse("--draft-model", "tiny"), *tiny)
        assert isinstance(drafter, ModelDrafter)
        assert drafter.num_draft_tokens == drafts.DEFAULT_NUM_DRAFT_TOKENS == speculation_arguments._NUM_DRAFT_TOKENS
        assert drafter.model.config == tiny[0].config
        drafter = drafter_from_arguments(self.parse("--draft-model", "tiny", "--num-draft-tokens", "5"), *tiny)
        assert drafter.num_draft_tokens == 5

    @pytest.mark.parametrize(
        ("flags", "message"),
        [
            (["--draft-model", "tiny", "--prompt-lookup", "3"], "not allowed with argument --draft-model"),
            (["--prompt-lookup", "0"], "--prompt-lookup: expected a whole number of 1 or more, got '0'"),
            (["--draft-model", "tiny", "--num-draft-tokens", "x"], "--num-draft-tokens: expected a whole number"),
        ],
    )
    def test_what_cannot_be_is_said_in_one_line(self, flags, message, capsys):
        with pytest.raises(SystemExit) as stop:
            self.parse(*flags)
        assert stop.value.code == 2
        printed = capsys.readouterr().err
        assert message in printed
        assert printed.count("\n") == 1

    def test_another_vocabulary_is_refused(self, tiny, tmp_path):
        config = OpenELMConfig.from_name("270M", model_dim=64, num_transformer_layers=2, vocab_size=4100)
        (tmp_path / "config.json").write_text(json.dumps(config.to_dict()))
        mx.save_safetensors(str(tmp_path / "model.safetensors"), dict(tree_flatten(Model(config).parameters())))
        with pytest.raises(GenerationError, match=r"a vocabulary of 4100 tokens, the model one of 4096") as error:
            drafter_from_arguments(self.parse("--draft-model", str(tmp_path)), *tiny)
        assert "\n" not in str(error.value)

    def test_another_tokenizer_of_the_same_size_is_refused(self, tiny, tmp_path):
        from sentencepiece import sentencepiece_model_pb2

        folder = tmp_path / "draft"
        shutil.copytree(BUNDLED_MODEL, folder)
        model = sentencepiece_model_pb2.ModelProto.FromString((folder / "tokenizer.model").read_bytes())
        model.pieces[3000].piece, model.pieces[3001].piece = model.pieces[3001].piece, model.pieces[3000].piece
        (folder / "tokenizer.model").write_bytes(model.SerializeToString())
        with pytest.raises(GenerationError, match="another tokenizer"):
            drafter_from_arguments(self.parse("--draft-model", str(folder)), *tiny)

    def test_a_draft_model_without_a_tokenizer_is_taken(self, tiny, tmp_path):  # fault B1: Apple's have none
        folder = tmp_path / "draft"
        folder.mkdir()
        for name in ("config.json", "model.safetensors"):
            shutil.copy(BUNDLED_MODEL / name, folder)
        assert drafter_from_arguments(self.parse("--draft-model", str(folder)), *tiny) is not None


class TestBenchmark:
    def test_both_sides_write_the_given_text(self, capsys, monkeypatch):
        monkeypatch.setattr(Comparison, "passed", property(lambda self: self.job == "prose"))
        assert lookup_decoding.main(["--tokens", "8", "--trials", "1"]) == 1  # one promise broken
        lines = capsys.readouterr().out.splitlines()
        assert [line.split(" | ")[0] for line in lines[2:]] == ["repetitive", "prose"]

    def test_the_retold_story_is_another_at_every_twentieth_place(self):
        told, retold = list(range(100)), lookup_decoding.changed(list(range(100)))
        assert [i for i in told if retold[i] != told[i]] == [19, 39, 59, 79, 99]
