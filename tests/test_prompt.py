"""The Instruct prompt: its text, its ids, and what may never get into either."""

import os
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from texts import SPECIAL_TEXTS, TRICKY_TEXTS

from openelm_mlx.errors import GenerationError
from openelm_mlx.prompt import CHAT_TEMPLATE, encode_chat, render_chat
from openelm_mlx.tokenizer import Tokenizer
from openelm_mlx.tokenizer_files import write_tokenizer_files

TINY = Path(__file__).parents[1] / "openelm_mlx" / "data" / "tiny"

ONE_TURN = [{"role": "user", "content": "Hello!"}]
TWO_TURNS = [*ONE_TURN, {"role": "assistant", "content": "Bonjour!"}, {"role": "user", "content": "How are you?"}]
SYSTEM = {"role": "system", "content": "Be brief."}
CHATS = {"one turn": ONE_TURN, "two turns": TWO_TURNS, "system": [SYSTEM, *TWO_TURNS], "system only": [SYSTEM]}

# With LLaMA's tokenizer, as the instruction recipe's own code gives them.
ONE_TURN_IDS = [1, 529, 29989, 5205, 29989, 29958, 13, 2, 29871, 13, 29966, 29989, 1792, 29989, 29958, 13, 10994, 29991]
ONE_TURN_IDS += [2, 29871, 13, 29966, 29989, 465, 22137, 29989, 29958, 13]
TWO_TURNS_IDS = [*ONE_TURN_IDS, 29933, 265, 29926, 473, 29991, 2, 29871, 13, 29966, 29989, 1792, 29989, 29958, 13, 5328]
TWO_TURNS_IDS += [526, 366, 29973, 2, 29871, 13, 29966, 29989, 465, 22137, 29989, 29958, 13]

contents = st.text(max_size=20) | st.sampled_from([*SPECIAL_TEXTS, *TRICKY_TEXTS])
chats = st.lists(
    st.fixed_dictionaries({"role": st.sampled_from(["user", "assistant"]), "content": contents}), min_size=1, max_size=5
)


@pytest.fixture(scope="module", params=["sentencepiece", "tokenizers"])
def tokenizer(request, tmp_path_factory) -> Tokenizer:
    if request.param == "sentencepiece":
        return Tokenizer.from_path(TINY)
    folder = tmp_path_factory.mktemp("json")
    write_tokenizer_files(TINY / "tokenizer.model", folder, instruct=True, max_length=256)
    return Tokenizer.from_path(folder / "tokenizer.json")


def test_the_text_is_the_training_recipes():
    """Fault B4, B5: every newline counts."""
    assert render_chat(ONE_TURN) == "<s><|system|>\n</s>\n<|user|>\nHello!</s>\n<|assistant|>\n"
    assert render_chat(TWO_TURNS) == (
        "<s><|system|>\n</s>\n<|user|>\nHello!</s>\n<|assistant|>\nBonjour!</s>\n"
        "<|user|>\nHow are you?</s>\n<|assistant|>\n"
    )
    assert render_chat([SYSTEM, *ONE_TURN]) == ("<s><|system|>\nBe brief.</s>\n<|user|>\nHello!</s>\n<|assistant|>\n")
    assert render_chat(ONE_TURN, add_generation_prompt=False) == "<s><|system|>\n</s>\n<|user|>\nHello!</s>\n"


@pytest.mark.parametrize("add_generation_prompt", [True, False])
@pytest.mark.parametrize("name", CHATS)
def test_the_ids_are_those_of_each_text_between_special_ids(tokenizer, name, add_generation_prompt):
    text = render_chat(CHATS[name], add_generation_prompt=add_generation_prompt)
    expected = []
    for part in re.split("(</?s>)", text):
        expected += {"<s>": [1], "</s>": [2]}.get(part) or tokenizer.encode_segment(part)
    assert encode_chat(tokenizer, CHATS[name], add_generation_prompt=add_generation_prompt) == expected


@given(messages=chats)
def test_control_ids_come_from_the_prompt_alone(tokenizer, messages):
    """Faults B6, B7, B10: BOS once, one EOS for each turn and the empty system turn, whatever the contents spell."""
    ids = encode_chat(tokenizer, messages)
    assert ids[0] == 1
    assert ids.count(1) == 1
    assert ids.count(2) == len(messages) + 1
    assert ids.count(0) == 0


@given(messages=chats, kept=st.integers(1, 5))
def test_a_longer_chat_continues_the_ids_of_a_shorter_one(tokenizer, messages, kept):
    """Fault B8: up to its last EOS, the history is a prefix: a cache of it stays valid."""
    shorter = encode_chat(tokenizer, messages[:kept])
    end = len(shorter) - shorter[::-1].index(2)
    assert encode_chat(tokenizer, messages)[:end] == shorter[:end]


@pytest.mark.parametrize(
    ("messages", "complaint"),
    [
        ([], "no messages"),
        ([{"role": "tool", "content": "X"}], r"messages\[0\] has role 'tool'; OpenELM-Instruct knows system, user"),
        ([*ONE_TURN, {"role": "User", "content": "X"}], r"messages\[1\] has role 'User'"),
        ([*ONE_TURN, {"content": "X"}], r"messages\[1\] has role None"),
        ([*ONE_TURN, SYSTEM], r"messages\[1\] is a system message; only the first"),
        ([{"role": "user"}], r"messages\[0\] has no text"),
        ([{"role": "user", "content": [{"type": "text", "text": "X"}]}], r"messages\[0\] has no text"),
        (["Hello!"], r"messages\[0\] is no object"),
        ([{"role": ["user"], "content": "X"}], r"messages\[0\] has role \['user'\]"),
    ],
)
def test_what_the_prompt_has_no_place_for_is_refused(tokenizer, messages, complaint):
    """Fault B9: no message vanishes."""
    for refuse in (lambda: encode_chat(tokenizer, messages), lambda: render_chat(messages)):
        with pytest.raises(GenerationError, match=complaint):
            refuse()


@pytest.mark.needs_mlx_lm  # which brings jinja2
@pytest.mark.parametrize("trim", [True, False])
@given(messages=chats, system=st.booleans(), add_generation_prompt=st.booleans())
def test_the_jinja_template_gives_the_same_text(trim, messages, system, add_generation_prompt):
    """Fault B5: whether or not the reader trims blocks (transformers does)."""
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    template = ImmutableSandboxedEnvironment(trim_blocks=trim, lstrip_blocks=trim).from_string(CHAT_TEMPLATE)
    messages = [SYSTEM, *messages] if system else messages
    rendered = template.render(
        messages=messages, bos_token="<s>", eos_token="</s>", add_generation_prompt=add_generation_prompt
    )
    assert rendered == render_chat(messages, add_generation_prompt=add_generation_prompt)


@pytest.mark.skipif("OPENELM_LLAMA_TOKENIZER" not in os.environ, reason="OPENELM_LLAMA_TOKENIZER names no file")
def test_the_ids_of_the_training_recipe(tmp_path):
    model_file = Path(os.environ["OPENELM_LLAMA_TOKENIZER"])
    write_tokenizer_files(model_file, tmp_path, instruct=True, max_length=2048)
    for file in (model_file, tmp_path / "tokenizer.json"):
        tokenizer = Tokenizer.from_path(file)
        assert encode_chat(tokenizer, ONE_TURN) == ONE_TURN_IDS
        assert encode_chat(tokenizer, TWO_TURNS) == TWO_TURNS_IDS
