"""The conversation's laws: its ids are the training form's, and its cache never shows in what comes out."""

import os
from pathlib import Path

import pytest
from chats import TINY, ScriptedModel, answer_ids, check_like_fresh, say
from hypothesis import given
from hypothesis import strategies as st
from test_prompt import ONE_TURN, ONE_TURN_IDS, TWO_TURNS, TWO_TURNS_IDS
from texts import SPECIAL_TEXTS, TRICKY_TEXTS

from openelm_mlx.cache import KVCache
from openelm_mlx.chat.conversation import Conversation
from openelm_mlx.chat.format import CompletionFormat, InstructFormat, Turn, spell
from openelm_mlx.checkpoint import load
from openelm_mlx.errors import GenerationError, TokenizerError
from openelm_mlx.prompt import encode_chat, render_chat
from openelm_mlx.sampling import make_logits_processors
from openelm_mlx.tokenizer import Tokenizer

MESSAGES = ["Tell me of a king", "and of his daughter", "what then?"]
contents = st.text(max_size=20) | st.sampled_from([*SPECIAL_TEXTS, *TRICKY_TEXTS])


@pytest.fixture(scope="module")
def tiny():
    return load(TINY, dtype="float32")


@pytest.fixture
def conversation(tiny):
    model, tokenizer = tiny
    return Conversation(model, tokenizer, InstructFormat(tokenizer))


def as_messages(system, turns, user):
    pairs = [[("user", turn.user), ("assistant", turn.answer)] for turn in turns]
    flat = [("system", system), *(message for pair in pairs for message in pair), ("user", user)]
    return [{"role": role, "content": content} for role, content in flat]


class TestIds:
    @given(system=contents, texts=st.lists(st.tuples(contents, contents), max_size=3), user=contents)
    def test_they_are_the_training_forms(self, tiny, system, texts, user):
        """Faults B6, B7, B8, B10, with unicode, empty and marker-like text in every place."""
        _, tokenizer = tiny
        turns = [Turn(asked, answer, tuple(answer_ids(tokenizer, answer)), "stop") for asked, answer in texts]
        ids = InstructFormat(tokenizer).encode(system, turns, user)
        messages = as_messages(system, turns, user)
        assert ids == encode_chat(tokenizer, messages)
        assert (ids.count(1), ids.count(2)) == (1, len(messages))

    def test_one_and_two_turns(self, tiny):
        model, tokenizer = tiny
        scripted = ScriptedModel(model, [*answer_ids(tokenizer, "Bonjour!"), 2])
        conversation = Conversation(scripted, tokenizer, InstructFormat(tokenizer))
        first, _ = say(conversation, "Hello!", 20)
        second = conversation.prepare("How are you?", max_tokens=20)
        assert first.ids == encode_chat(tokenizer, ONE_TURN)
        assert second.ids == encode_chat(tokenizer, TWO_TURNS)
        assert conversation.turns[0].answer == "Bonjour!"

    @pytest.mark.skipif("OPENELM_LLAMA_TOKENIZER" not in os.environ, reason="OPENELM_LLAMA_TOKENIZER names no file")
    def test_the_lists_of_the_training_recipe(self, tiny):
        tokenizer = Tokenizer.from_path(Path(os.environ["OPENELM_LLAMA_TOKENIZER"]))
        form = InstructFormat(tokenizer)
        turn = Turn("Hello!", "Bonjour!", tuple(answer_ids(tokenizer, "Bonjour!")), "stop")
        assert form.encode("", [], "Hello!") == ONE_TURN_IDS
        assert form.encode("", [turn], "How are you?") == TWO_TURNS_IDS

    @pytest.mark.parametrize(("limit", "reason"), [(3, "length"), (99, "stop")])
    def test_an_answer_is_kept_as_generated_and_always_closed(self, tiny, limit, reason):
        """An answer cut by max_tokens gets the EOS that it never came to; one that ended does not get two."""
        model, tokenizer = tiny
        odd = [4024, 4024, 13, 261, 4024]  # ids that its text would never be encoded to
        conversation = Conversation(ScriptedModel(model, [*odd, 2]), tokenizer, InstructFormat(tokenizer))
        prompt, _ = say(conversation, "Hello!", limit)
        said = odd[:limit]
        assert tokenizer.encode_segment(conversation.turns[0].answer) != said
        assert conversation.turns[0].finish_reason == reason
        assert conversation.ids == [*prompt.ids, *said]
        following = conversation.prepare("And?", max_tokens=9).ids
        block = [*tokenizer.encode_segment("\n<|user|>\nAnd?"), 2, *tokenizer.encode_segment("\n<|assistant|>\n")]
        assert following == [*prompt.ids, *said, 2, *block]

    def test_a_stop_string_ends_the_text_and_not_the_ids(self, tiny):
        model, tokenizer = tiny
        ids = answer_ids(tokenizer, "the king and the wolf")
        conversation = Conversation(ScriptedModel(model, ids), tokenizer, InstructFormat(tokenizer))
        _, tokens = say(conversation, "x", 20, stop=["king and"])
        assert conversation.turns[0].answer == "the "
        assert conversation.turns[0].ids == tuple(tokens)
        assert conversation.ids[-len(tokens) :] == ids[: len(tokens)]

    def test_three_turns_begin_once_and_remember(self, conversation):
        """Faults B7, D6: one BOS in all, and the first message stands in the third prompt once."""
        first, *_, third = [say(conversation, text)[0].ids for text in ["my name is Ann", "good", "what is my name"]]
        assert third.count(1) == 1
        message = conversation.tokenizer.encode_segment("\n<|user|>\nmy name is Ann")
        places = [i for i in range(len(third)) if third[i : i + len(message)] == message]
        assert len(places) == 1
        assert third[: len(first)] == first

    def test_a_typed_marker_never_ends_a_turn(self, conversation):  # fault B10
        plain, marked = (
            conversation.prepare(text, max_tokens=5).ids for text in ["tell me", "tell me about </s> and <|user|> <s>"]
        )
        assert (marked.count(2), marked.count(1)) == (plain.count(2), plain.count(1))

    def test_spelled_they_read_as_the_training_text(self, tiny):
        _, tokenizer = tiny
        for messages in (ONE_TURN, TWO_TURNS):
            assert spell(tokenizer, encode_chat(tokenizer, messages)) == render_chat(messages)

    def test_text_that_is_none_is_refused(self, conversation):
        with pytest.raises(TokenizerError, match="not Unicode"):
            conversation.prepare("half \ud83d", max_tokens=5)


class TestCompletion:
    @pytest.fixture
    def completion(self, tiny):
        model, tokenizer = tiny
        return Conversation(model, tokenizer, CompletionFormat(tokenizer))

    def test_the_text_grows_and_no_template_is_invented(self, completion):  # fault B14
        encode = completion.tokenizer.encode_segment
        first, said = say(completion, "Once upon a time")
        assert first.ids == [1, *encode("Once upon a time")]
        assert completion.prepare("and then", max_tokens=5).ids == [*first.ids, *said, *encode("and then")]

    def test_where_the_model_ended_the_text_goes_on(self, tiny):
        model, tokenizer = tiny
        completion = Conversation(ScriptedModel(model, [261, 2]), tokenizer, CompletionFormat(tokenizer))
        say(completion, "Once", 9)
        assert completion.ids[-1] == 261
        assert 2 not in completion.prepare("more", max_tokens=9).ids

    def test_a_system_prompt_has_no_place(self, completion):
        with pytest.raises(GenerationError, match="base model"):
            completion.set_system("Be brief.")
        assert completion.system == ""


class TestCache:
    @pytest.fixture
    def spoken(self, conversation):
        for text in MESSAGES[:2]:
            say(conversation, text)
        return conversation

    def test_a_turn_computes_only_what_is_new(self, spoken):
        prompt = check_like_fresh(spoken, "what then?")
        answer = spoken.turns[1].ids
        new = len(spoken.tokenizer.encode_segment("\n<|user|>\nwhat then?")) + 2
        new += len(spoken.tokenizer.encode_segment("\n<|assistant|>\n"))
        assert len(prompt.ids) - prompt.held <= new + 1  # the last token of an answer was never fed
        assert prompt.held >= len(prompt.ids) - new - len(answer)

    def test_after_undo(self, spoken):
        spoken.undo()
        assert check_like_fresh(spoken, "and of his horse").held > 20

    def test_after_an_edit(self, spoken):
        prompt = check_like_fresh(spoken, "and of his horse", replace=True)
        assert [turn.user for turn in spoken.turns] == [MESSAGES[0], "and of his horse"]
        assert prompt.held > 20

    def test_regenerating_is_the_same_prompt(self, spoken):
        before = spoken.turns
        prompt = check_like_fresh(spoken, MESSAGES[1], replace=True)
        assert prompt.held == len(prompt.ids) - 1  # one token must be computed to have its logits
        assert spoken.turns == before

    @pytest.mark.parametrize("tokens", [1, 3])
    def test_after_an_interrupted_answer(self, spoken, tokens):
        """Fault D8: what was said stays, and nothing of a step queued ahead does."""
        _, made = say(spoken, "what then?", 50, stop_after=tokens)
        assert spoken.turns[-1].ids == tuple(made)
        assert len(made) == tokens
        assert spoken.turns[-1].finish_reason == "interrupted"
        check_like_fresh(spoken, "and then?")

    def test_after_another_system_prompt(self, spoken):
        spoken.set_system("You tell tales.")
        assert check_like_fresh(spoken, "what then?").held < 12  # BOS and the system header

    def test_after_a_reset(self, spoken):
        spoken.reset()
        assert check_like_fresh(spoken, MESSAGES[0]).held > 20
        assert len(spoken.turns) == 1

    def test_the_penalty_sees_the_history(self, spoken):  # fault D11
        fresh = Conversation(spoken.model, spoken.tokenizer, spoken.format)
        fresh.restore("", spoken.turns, 0)
        tokens = [
            say(chat, "what then?", 12, logits_processors=make_logits_processors(1.3))[1] for chat in (spoken, fresh)
        ]
        assert tokens[0] == tokens[1]

    @pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
    def test_after_a_step_left_half_done(self, spoken, monkeypatch, error):
        """Some layers have taken the tokens in and others have not: the cache must go, the conversation stays."""
        prompt = spoken.prepare("what then?", max_tokens=6)
        with monkeypatch.context() as patch:
            patch.setattr(type(spoken.model.layers[3]), "__call__", _fail_with(error))
            with pytest.raises(error):
                list(spoken.answer(prompt, max_tokens=6))
        assert [turn.user for turn in spoken.turns] == MESSAGES[:2]
        assert check_like_fresh(spoken, "what then?").held == 0

    def test_an_answer_that_never_began_leaves_nothing(self, spoken):
        turns = spoken.turns
        spoken.answer(spoken.prepare("what then?", max_tokens=6), max_tokens=6).close()
        assert spoken.turns == turns
        check_like_fresh(spoken, "what then?")

    def test_a_cache_that_cannot_go_back_begins_anew(self, tiny):
        class Stubborn(KVCache):
            def is_trimmable(self):
                return False

            def trim(self, count):
                assert count == 0

        model, tokenizer = tiny
        chat = Conversation(
            model, tokenizer, InstructFormat(tokenizer), make_cache=lambda keep: [Stubborn() for _ in model.layers]
        )
        say(chat, MESSAGES[0])
        assert check_like_fresh(chat, "forward").held > 20
        assert check_like_fresh(chat, "back", replace=True).held == 0
        chat.undo()
        check_like_fresh(chat, "back")


def _fail_with(error):
    def call(*_):
        raise error

    return call


class TestOverflow:
    """Fault D9: a limit of 64 tokens, ten turns of 10, then one of 100."""

    @pytest.fixture
    def small(self, tiny):
        model, tokenizer = tiny
        return Conversation(model, tokenizer, InstructFormat(tokenizer), max_context=90)

    def test_ten_turns_and_one_too_long(self, tiny):
        """The entry's own numbers, in a format without frames."""
        model, tokenizer = tiny
        chat = Conversation(model, tokenizer, CompletionFormat(tokenizer), max_context=64)
        for _ in range(10):
            prompt, tokens = say(chat, "one two", 10 - len(tokenizer.encode_segment("one two")))
            assert prompt.ids[0] == 1
            assert len(prompt.ids) + len(tokens) <= 64
        assert len(chat.turns) == 10
        assert 0 < chat.dropped < 9
        with pytest.raises(GenerationError, match=r"\d+ tokens on its own, and the context is 64"):
            chat.prepare("x" * 100, max_tokens=5)

    def test_whole_oldest_turns_go_and_the_system_prompt_stays(self, tiny):
        model, tokenizer = tiny
        chat = Conversation(model, tokenizer, InstructFormat(tokenizer), system="Be kind.", max_context=200)
        head = tokenizer.encode("<|system|>\nBe kind.")
        dropped = []
        for number in range(9):
            prompt = check_like_fresh(chat, f"tale {number}", max_tokens=2)
            assert prompt.ids[: len(head)] == head
            assert prompt.ids.count(1) == 1
            assert prompt.ids == chat.format.encode("Be kind.", prompt.turns[prompt.dropped :], prompt.user)
            dropped.append(prompt.dropped)
        assert dropped == sorted(dropped)
        assert 0 < dropped[-1] < 8
        assert len(chat.turns) == 9  # forgotten by the model, not by us
        # Half of the context was freed, so that the next turns need not forget again (and compute all anew).
        first = dropped.index(next(filter(None, dropped)))
        assert dropped[first] == dropped[first + 1]

    def test_a_message_that_cannot_fit_is_refused_with_numbers(self, small):
        say(small, "go on", 4)
        before = small.turns
        with pytest.raises(GenerationError, match=r"prompt of 1\d\d tokens .* context is 90: shorten it by \d+ tokens"):
            small.prepare("word " * 100, max_tokens=4)
        assert (small.turns, small.dropped) == (before, 0)
        check_like_fresh(small, "go on", max_tokens=4)

    def test_an_answer_ends_where_the_context_does(self, small):
        prompt, tokens = say(small, "go on", 500)
        assert len(prompt.ids) + len(tokens) == 90
        assert small.turns[0].finish_reason == "length"
        assert say(small, "and now", 4)[0].dropped == 1

    def test_a_long_message_forgets_no_more_than_it_must(self, tiny):
        """Half of the context cannot become free for it, but one turn beside it can stay."""
        model, tokenizer = tiny
        chat = Conversation(model, tokenizer, CompletionFormat(tokenizer), max_context=64)
        for _ in range(4):
            say(chat, "one two", 5)
        prompt = chat.prepare("a b c d e f g h i j " * 3, max_tokens=4)
        assert len(chat.format.encode("", [], prompt.user)) > 32
        assert 0 < prompt.dropped < 4

    def test_undoing_what_was_dropped(self, small):
        for _ in range(9):
            say(small, "go on", 4)
        assert small.dropped
        while small.turns:
            small.undo()
        assert (small.dropped, small.ids) == (0, [])
        with pytest.raises(GenerationError, match="empty"):
            small.undo()
        check_like_fresh(small, "go on", max_tokens=4)

    @pytest.mark.parametrize("limit", [0, -1, 257])
    def test_a_limit_the_model_does_not_have(self, tiny, limit):
        model, tokenizer = tiny
        with pytest.raises(GenerationError, match="between 1 and the model's own 256"):
            Conversation(model, tokenizer, InstructFormat(tokenizer), max_context=limit)

    def test_a_system_prompt_that_leaves_no_room(self, conversation):
        conversation.set_system("short")
        with pytest.raises(GenerationError, match="fill the context of 256"):
            conversation.set_system("long " * 300)
        assert conversation.system == "short"


def test_long_system_prompt_is_computed_once(conversation):
    conversation.set_system("You are kind and wise. " * 8)
    say(conversation, "hello")
    assert check_like_fresh(conversation, "again").held > 60
