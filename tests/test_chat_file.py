"""Conversations on disk: what comes back is what was saved, and a file that was tampered with is one line of error."""

import json

import pytest
from chats import TINY, check_like_fresh, say

from openelm_mlx.chat.conversation import Conversation
from openelm_mlx.chat.file import export_markdown, load, save, write_text
from openelm_mlx.chat.format import CompletionFormat, InstructFormat
from openelm_mlx.checkpoint import load as load_model
from openelm_mlx.errors import GenerationError, OpenELMError, OutputError


@pytest.fixture(scope="module")
def tiny():
    return load_model(TINY, dtype="float32")


@pytest.fixture
def new(tiny):
    model, tokenizer = tiny
    return lambda form=InstructFormat, **options: Conversation(model, tokenizer, form(tokenizer), **options)


@pytest.fixture
def spoken(new):
    chat = new(system="Be kind. Ünïcödé 🙂")
    say(chat, "Tell me </s> of a king")
    say(chat, "and of 日本語", 20, stop_after=4)
    return chat


@pytest.fixture
def saved(spoken, tmp_path):
    save(spoken, tmp_path / "chat.json", "tiny")
    return tmp_path / "chat.json"


def test_a_chat_comes_back_and_goes_on(spoken, saved, new):
    """The next answer's logits are those of a fresh run on the same ids."""
    chat = new()
    say(chat, "something else")
    load(chat, saved)
    assert (chat.system, chat.turns, chat.dropped, chat.ids) == (spoken.system, spoken.turns, 0, spoken.ids)
    assert check_like_fresh(chat, "what then?").ids == spoken.prepare("what then?", max_tokens=6).ids


def test_the_file_has_messages_as_others_write_them_and_all_ids(spoken, saved):
    record = json.loads(saved.read_text())
    assert [message["role"] for message in record["messages"]] == ["system", *["user", "assistant"] * 2]
    assert record["messages"][1]["content"] == "Tell me </s> of a king"
    assert record["messages"][4]["finish_reason"] == "interrupted"
    assert record["ids"] == spoken.ids
    assert (record["format"], record["mode"], record["model"]) == ("openelm-chat/1", "instruct", "tiny")


def test_dropped_turns_stay_dropped(new, tmp_path):
    chat, again = new(max_context=100), new(max_context=100)
    for _ in range(5):
        say(chat, "go on", 3)
    save(chat, tmp_path / "c.json", "tiny")
    load(again, tmp_path / "c.json")
    assert again.dropped == chat.dropped > 0
    assert again.ids == chat.ids


def test_an_empty_chat(new, tmp_path):
    save(new(), tmp_path / "c.json", "tiny")
    chat = new()
    load(chat, tmp_path / "c.json")
    assert (chat.turns, chat.ids) == ((), [])


def change(path, *keys, to):
    """Put a value into the saved record at `keys`."""
    record = json.loads(path.read_text())
    *way, last = keys
    place = record
    for key in way:
        place = place[key]
    place[last] = to
    path.write_text(json.dumps(record))


ANSWER = ("messages", 2)


@pytest.mark.parametrize(
    ("keys", "to", "complaint"),
    [
        (["format"], "openelm-chat/9", "not a conversation that /save wrote"),
        (["format"], ["x" * 1000], "format"),
        (["mode"], "completion", "saved in 'completion' mode, and this chat is in instruct mode"),
        (["messages"], {}, "messages must be a list"),
        (["messages"], [{"role": "user", "content": "x"}], "no answer"),
        (["messages"], ["x", "y"], "message 0 must be the user's"),
        (["messages", 1, "role"], "tool", "message 0 must be the user's, got 'tool'"),
        (["messages", 3, "role"], "system", "message 2 must be the user's, got 'system'"),
        (["messages", 1, "content"], None, "message 0 has no text"),
        (["messages", 1, "content"], "half \ud83d", "surrogate"),
        (["messages", 1, "content"], "something else", "its ids are not those of its messages"),
        (["messages", 0, "content"], "", "its ids are not those of its messages"),
        ([*ANSWER, "content"], "something else", "the ids of message 1 are not its text"),
        ([*ANSWER, "ids"], None, "message 1 has no ids"),
        ([*ANSWER, "ids"], [5, "6"], "message 1 has no ids"),
        ([*ANSWER, "ids"], [5, True], "message 1 has no ids"),
        ([*ANSWER, "ids"], [5, 4096], "outside the vocabulary of 4096"),
        ([*ANSWER, "ids"], [-1], "outside the vocabulary of 4096"),
        ([*ANSWER, "ids"], [10**30], "outside the vocabulary of 4096"),
        ([*ANSWER, "ids"], [5, 2, 5], "ends an answer in its middle"),
        ([*ANSWER, "finish_reason"], "because", "finish_reason 'because'"),
        ([*ANSWER, "finish_reason"], [], "finish_reason"),
        (["dropped_turns"], 3, "dropped_turns must be between 0 and the 2 turns, got 3"),
        (["dropped_turns"], -1, "dropped_turns"),
        (["dropped_turns"], True, "dropped_turns"),
        (["ids"], [1, 2, 3], "its ids are not those of its messages"),
        (["ids"], None, "its ids are not those of its messages"),
    ],
)
def test_a_changed_file_is_refused_and_changes_nothing(spoken, saved, keys, to, complaint):
    change(saved, *keys, to=to)
    before = (spoken.system, spoken.turns, spoken.dropped)
    with pytest.raises(GenerationError, match=complaint) as raised:
        load(spoken, saved)
    assert (spoken.system, spoken.turns, spoken.dropped) == before
    assert "\n" not in str(raised.value)
    assert len(str(raised.value)) < 500


@pytest.mark.parametrize("kept", [0, 1, 100, -1])
def test_a_truncated_file(spoken, saved, kept):
    saved.write_bytes(saved.read_bytes()[: kept if kept >= 0 else -20])
    with pytest.raises(GenerationError, match="not valid JSON"):
        load(spoken, saved)


@pytest.mark.parametrize("content", [b"\xff\xfe", b"[" * 100_000, b"[]", b"null", b'{"format": 1e999}'])
def test_a_file_of_something_else(spoken, tmp_path, content):
    (tmp_path / "x").write_bytes(content)
    with pytest.raises(GenerationError):
        load(spoken, tmp_path / "x")


@pytest.mark.parametrize("name", ["missing.json", ".", "/dev/zero", "a\0b", "~nobody-of-that-name/x"])
def test_no_file(spoken, tmp_path, name):
    with pytest.raises(OpenELMError):
        load(spoken, tmp_path / name if name[0] != "~" else type(tmp_path)(name))


def test_a_file_far_too_large_is_not_read(spoken, tmp_path):
    with open(tmp_path / "big", "wb") as file:
        file.truncate(2**40)
    with pytest.raises(GenerationError, match="far more than a conversation"):
        load(spoken, tmp_path / "big")


def test_another_mode_or_tokenizer(new, saved, tmp_path):
    with pytest.raises(GenerationError, match="completion mode"):
        load(new(CompletionFormat), saved)


def test_markdown(spoken, tmp_path):
    export_markdown(spoken, tmp_path / "chat.md", "tiny")
    text = (tmp_path / "chat.md").read_text()
    assert text.startswith(
        "# Chat with tiny\n\n## System\n\nBe kind. Ünïcödé 🙂\n\n## User\n\nTell me </s> of a king\n"
    )
    assert text.count("## OpenELM") == 2
    assert "*(cut at the token limit)*" in text
    assert text.endswith("*(interrupted)*\n")


def test_a_failed_write_leaves_the_old_file_and_nothing_beside_it(tmp_path, monkeypatch):
    target = tmp_path / "chat.md"
    write_text(target, "old")

    def full(_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OutputError, match="No space left"):
        write_text(target, "new")
    assert target.read_text() == "old"
    assert list(tmp_path.iterdir()) == [target]


@pytest.mark.parametrize("name", [".", "no/such/folder/x", "file/x"])
def test_where_nothing_can_be_written(tmp_path, name):
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError):
        write_text(tmp_path / name, "text")


def test_a_link_is_followed(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "target")
    write_text(tmp_path / "link", "text")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "target").read_text() == "text"
