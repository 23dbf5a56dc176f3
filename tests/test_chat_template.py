"""Chat templates that a folder brings: their text is transformers', and control ids come from nowhere but them."""

import json

import pytest
from chats import TINY, answer_ids
from hypothesis import given
from hypothesis import strategies as st
from texts import SPECIAL_TEXTS, TRICKY_TEXTS

from openelm_mlx.chat.format import InstructFormat, Turn, spell
from openelm_mlx.chat.template import TemplateFormat, folder_template, named_template
from openelm_mlx.errors import GenerationError
from openelm_mlx.prompt import CHAT_TEMPLATE
from openelm_mlx.tokenizer import Tokenizer

pytest.importorskip("jinja2")

# The layout of the recipe's own template: block tags on lines of their own, so all depends on trimming; no BOS.
ROLES = """{% for message in messages %}
{% if message['role'] == 'user' %}
{{ '<|user|>\n' + message['content'] + eos_token }}
{% elif message['role'] == 'system' %}
{{ '<|system|>\n' + message['content'] + eos_token }}
{% elif message['role'] == 'assistant' %}
{{ '<|assistant|>\n'  + message['content'] + eos_token }}
{% endif %}
{% if loop.last and add_generation_prompt %}
{{ '<|assistant|>' }}
{% endif %}
{% endfor %}"""
INLINE = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}USER: {{ m.content | trim }}\n"
    "{% else %}BOT: {{ m.content }}\n{% endif %}{% endfor %}BOT:"
)
contents = st.text(max_size=20) | st.sampled_from([*SPECIAL_TEXTS, *TRICKY_TEXTS])


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.from_path(TINY)


def form(tokenizer, template):
    return TemplateFormat(tokenizer, template, "the template")


def turn(tokenizer, user, answer):
    return Turn(user, answer, tuple(answer_ids(tokenizer, answer)), "stop")


def test_blocks_are_trimmed_as_transformers_does(tokenizer):
    """Faults B5, B6: one newline between turns, and BOS once though the template has none."""
    ids = form(tokenizer, ROLES).encode("Be kind.", [turn(tokenizer, "Hello!", "Bonjour!")], "And?")
    assert spell(tokenizer, ids) == (
        "<s><|system|>\nBe kind.</s>\n<|user|>\nHello!</s>\n<|assistant|>\nBonjour!</s>\n"
        "<|user|>\nAnd?</s>\n<|assistant|>\n"
    )


def test_as_transformers_renders_it(tokenizer):
    rendering = pytest.importorskip("transformers.utils.chat_template_utils")
    messages = [{"role": "user", "content": "Hello!"}, {"role": "assistant", "content": "Bonjour!"}]
    messages.append({"role": "user", "content": "And?"})
    for template in (ROLES, INLINE, CHAT_TEMPLATE):
        theirs, _ = rendering.render_jinja_template(
            [messages], chat_template=template, add_generation_prompt=True, bos_token="<s>", eos_token="</s>"
        )
        ids = form(tokenizer, template).encode("", [turn(tokenizer, "Hello!", "Bonjour!")], "And?")
        assert spell(tokenizer, ids).removeprefix("<s>") == theirs[0].removeprefix("<s>")


@given(system=contents, texts=st.lists(st.tuples(contents, contents), max_size=3), user=contents)
def test_our_own_template_gives_our_own_ids(tokenizer, system, texts, user):
    """Fault B10: whatever the messages spell, through jinja2 as without it."""
    turns = [turn(tokenizer, *pair) for pair in texts]
    template = form(tokenizer, CHAT_TEMPLATE)
    assert template.encode(system, turns, user) == InstructFormat(tokenizer).encode(system, turns, user)


@pytest.mark.parametrize("text", [*SPECIAL_TEXTS, "/s> after the template's <", "ends with <", "s>"])
def test_typed_markers_stay_text(tokenizer, text):  # fault B10
    for template in (ROLES, INLINE, "{{ messages[-1].content }}", "<{{ messages[-1].content }}</s><{{ 's' }}"):
        ids, plain = (form(tokenizer, template).encode("", [], content) for content in (text, "x"))
        assert (ids.count(1), ids.count(2)) == (plain.count(1), plain.count(2))


def test_the_text_around_an_answer_is_encoded_as_one_with_it(tokenizer):
    """No space comes between an answer and what follows, and the answer's ids stay what was generated."""
    odd = (4024, 4024, 13, 261)
    ids = form(tokenizer, INLINE).encode("", [Turn("Hello", "?", odd, "stop")], "  And?  ")
    head = tokenizer.encode("USER: Hello\nBOT: ")
    assert ids[: len(head) + 4] == [*head, *odd]
    assert (
        ids[len(head) + 4 :] == tokenizer.encode_segment("\n\nUSER: And?\nBOT:")[len(tokenizer.encode_segment("\n")) :]
    )


def test_a_longer_chat_continues_a_shorter_one(tokenizer):  # fault B8
    one = turn(tokenizer, "Hello!", "Bonjour!")
    for template in (ROLES, INLINE):
        first = form(tokenizer, template).encode("", [], "Hello!")
        assert form(tokenizer, template).encode("", [one], "And?")[: len(first)] == first


@pytest.mark.parametrize(
    ("template", "complaint"),
    [
        ("{% for m in messages %}", "end of template"),
        ("{{ raise_exception('no system prompts here') }}", "no system prompts here"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe|not safely"),
        ("{{ 1 / 0 }}", "division"),
        ("{{ messages[9].role.upper() }}", "undefined|no element"),
        ("{% for i in range(999999999) %}x{% endfor %}", "(?i)range"),
        ("{{ strange_function() }}", "undefined"),
    ],
)
def test_a_template_that_fails_is_one_line(tokenizer, template, complaint):
    with pytest.raises(GenerationError, match=complaint) as raised:
        form(tokenizer, template).encode("", [], "Hello!")
    assert "\n" not in str(raised.value)
    assert "--ignore-chat-template" in str(raised.value)


class TestFolders:
    def write(self, folder, template):
        (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))

    def test_ours_is_not_foreign(self, tmp_path):
        assert folder_template(tmp_path) is None
        self.write(tmp_path, CHAT_TEMPLATE)
        assert folder_template(tmp_path) is None
        (tmp_path / "chat_template.jinja").write_text(CHAT_TEMPLATE + "\n")
        assert folder_template(tmp_path) is None

    def test_a_file_of_its_own_wins(self, tmp_path):
        self.write(tmp_path, ROLES)
        assert folder_template(tmp_path) == ROLES
        (tmp_path / "chat_template.jinja").write_text(INLINE)
        assert folder_template(tmp_path) == INLINE

    def test_several_by_name(self, tmp_path):
        self.write(tmp_path, [{"name": "tool_use", "template": "x"}, {"name": "default", "template": ROLES}])
        assert folder_template(tmp_path) == ROLES
        self.write(tmp_path, [{"name": "tool_use", "template": "x"}])
        assert folder_template(tmp_path) is None

    @pytest.mark.parametrize("template", [3, {"default": "x"}, [{"name": "default", "template": 3}]])
    def test_no_text(self, tmp_path, template):
        self.write(tmp_path, template)
        with pytest.raises(GenerationError, match="is no text"):
            folder_template(tmp_path)


def test_a_template_by_file_or_as_text(tmp_path):
    (tmp_path / "mine.jinja").write_text(ROLES)
    (tmp_path / "bad.jinja").write_bytes(b"\xff")
    assert named_template(str(tmp_path / "mine.jinja")) == ROLES
    assert named_template(INLINE) == INLINE
    with pytest.raises(GenerationError, match="cannot be read: No such file"):
        named_template("mine.jinja")
    with pytest.raises(GenerationError, match="not UTF-8"):
        named_template(str(tmp_path / "bad.jinja"))
