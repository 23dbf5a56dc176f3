"""The chat without a terminal: commands, transcripts, and one line for whatever goes wrong."""

import io
import json
import subprocess
import sys
from types import SimpleNamespace

import pytest
from chats import TINY, Recorder

from openelm_mlx import cli
from openelm_mlx.chat.commands import COMMANDS, parse
from openelm_mlx.chat.conversation import Conversation
from openelm_mlx.chat.format import InstructFormat
from openelm_mlx.chat.session import Chat
from openelm_mlx.chat.settings import ChatSettings
from openelm_mlx.chat.text import printable
from openelm_mlx.checkpoint import load
from openelm_mlx.errors import GenerationError

MODEL = ["--model", str(TINY), "--dtype", "float32"]

SCRIPT = """\
Once upon a time there was a king who

and he
/undo
but then
/tokens
r
The end of this
/quit
never
"""
TRANSCRIPT = """\
> Once upon a time there was a king who
 had a son, and he was so

> and he
 was to be married to the king.

> but then
 that he could not help him.


28 of 256 tokens, in 2 turns; the cache takes 0.7 MB
> The end of this
 book, and the Queen was so delighted

"""


@pytest.fixture(scope="module")
def tiny():
    return load(TINY, dtype="float32")


@pytest.fixture
def chat(tiny):
    model, tokenizer = tiny
    conversation = Conversation(model, tokenizer, InstructFormat(tokenizer))
    return Chat(conversation, ChatSettings(max_tokens=5), Recorder(), "tiny")


@pytest.fixture
def script(capsys, monkeypatch):
    """Run `openelm chat` on some lines of stdin: status, stdout, stderr."""

    def run(lines, *flags):
        data = lines if isinstance(lines, bytes) else lines.encode()
        monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(data), isatty=lambda: False))
        status = cli.main(["chat", *MODEL, *flags])
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return run


class TestScript:
    def test_a_golden_transcript(self):
        """The command as a pipe sees it: what was said on stdout, all else on stderr."""
        command = [sys.executable, "-m", "openelm_mlx", "chat", *MODEL, "-m", "8"]
        done = subprocess.run(command, input=SCRIPT, capture_output=True, text=True)
        assert (done.returncode, done.stdout) == (0, TRANSCRIPT)
        assert "is a base model" in done.stderr  # fault B14
        assert "stopped at 8 tokens (/set max_tokens 16)" in done.stderr  # fault D15
        assert "Traceback" not in done.stderr

    def test_the_last_line_needs_no_end(self, script):  # fault D8: the input ends in mid-line
        status, out, _ = script("hello", "-m", "2")
        assert status == 0
        assert out.startswith("> hello\n")
        assert out.count("> ") == 1

    def test_one_object_a_turn(self, script, tiny):
        status, out, err = script("hello\nand then?\n/tokens\n", "-m", "4", "--json", "--instruct")
        first, second = map(json.loads, out.splitlines())
        assert status == 0
        assert set(first) == {
            "prompt", "text", "tokens", "finish_reason", "prompt_tokens", "cached_tokens", "dropped_turns",
            "generation_tokens", "prompt_tps", "generation_tps", "ttft_s",
        }  # fmt: skip
        assert (first["prompt"], first["finish_reason"], first["cached_tokens"]) == ("hello", "length", 0)
        assert tiny[1].decode(first["tokens"], continuation=True) == first["text"]
        assert second["cached_tokens"] == first["prompt_tokens"] + 3  # the last token of an answer was never fed
        assert second["prompt_tokens"] > second["cached_tokens"]
        assert "of 256 tokens, in 2 turns" in err

    def test_a_failing_line_is_an_error_and_the_next_goes_on(self, script):
        lines = b"word " * 300 + b"\n/nonsense\n\xff\xfe\n/load missing\nhello\n"
        status, out, err = script(lines, "-m", "2")
        errors = [line for line in err.splitlines() if line.startswith("openelm: error: ")]
        assert status == 2
        assert out.startswith("> hello")
        assert len(errors) == 4
        for words, line in zip(["context is 256", "/nonsense", "UTF-8", "missing"], errors, strict=True):
            assert words in line
        status, out, _ = script(lines, "-m", "2", "--json")
        records = [json.loads(line) for line in out.splitlines()]
        assert status == 2
        assert ["error" in record for record in records] == [True, True, True, True, False]

    def test_no_control_bytes(self, script, monkeypatch):  # fault D7
        _, out, err = script("a \x1b[31mred\x01 line\n/\x1b\n", "-m", "3")
        assert not set(out + err) & {chr(i) for i in (*range(9), *range(11, 32), 127)}

    def test_instruct_models_get_apples_repetition_penalty(self, script):
        assert "repetition_penalty       1.2" in script("/set\n", "--instruct")[1]
        assert "repetition_penalty       off" in script("/set\n")[1]
        assert "repetition_penalty       1.5" in script("/set\n", "--instruct", "--repetition-penalty", "1.5")[1]

    def test_show_prompt(self, script, tiny):
        err = script("hello\n", "-m", "2", "--instruct", "--show-prompt", "--system-prompt", "Be kind.")[2]
        assert "<s><|system|>\nBe kind.</s>\n<|user|>\nhello</s>\n<|assistant|>\n" in err
        conversation = Conversation(*tiny, InstructFormat(tiny[1]), system="Be kind.")
        assert str(conversation.prepare("hello", max_tokens=2).ids) in err

    def test_a_template_of_ones_own(self, script):
        flags = ("-m", "2", "--show-prompt", "--chat-template", "{{ bos_token }}Q: {{ messages[-1].content }}\nA:")
        assert "<s>Q: hello\nA:\n" in script("hello\n", *flags)[2]

    def test_statistics_can_be_left_out(self, script):
        assert "/s, first" in script("x\n", "-m", "1")[2]
        err = script("x\n", "-m", "1", "--stats", "off")[2]
        assert "/s, first" not in err
        assert "stopped at 1 token " in err

    @pytest.mark.parametrize(
        ("flags", "words"),
        [
            (["--temp", "-1"], "temp"),
            (["-m", "0"], "max_tokens"),
            (["--stop", ""], "stop string"),
            (["--max-context", "257"], "257"),
            (["--system-prompt", "x"], "base model"),
            (["--chat-template", "nowhere.jinja"], "nowhere.jinja"),
            (["--chat-template", "{% if %}"], "--chat-template failed"),
            (["--chat-template", "{{ x }}", "--no-instruct"], "contradict"),
        ],
    )
    def test_bad_flags_are_one_line_and_status_2(self, script, flags, words):
        status, out, err = script("hello\n", *flags)
        line = err.splitlines()[-1]
        assert (status, out) == (2, "")
        assert line.startswith("openelm: error: ")
        assert words in line


class TestFormats:
    def chosen(self, script, folder, *flags):
        return script("/model\n", "--model", str(folder), *flags)[1].rsplit(", ", 1)[1]

    def test_who_decides(self, script, tmp_path):
        """Flags, then a template that the folder brings, then what the model was trained on."""
        folder = tmp_path / "OpenELM-tiny-Instruct"
        folder.mkdir()
        for file in TINY.iterdir():
            (folder / file.name).symlink_to(file)
        assert self.chosen(script, TINY) == "completion prompts\n"
        assert self.chosen(script, folder) == "instruct prompts\n"
        (folder / "chat_template.jinja").write_text("{{ messages[-1].content }}")
        assert self.chosen(script, folder) == "template prompts\n"
        assert self.chosen(script, folder, "--ignore-chat-template") == "instruct prompts\n"
        assert self.chosen(script, folder, "--instruct") == "instruct prompts\n"
        assert self.chosen(script, folder, "--no-instruct") == "completion prompts\n"


class TestCommands:
    def test_what_is_a_command(self):
        assert parse("/set  temp 1 ") == ("set", "temp 1")
        assert [parse(letter)[0] for letter in "qrh"] == ["quit", "reset", "help"]
        for text in ("/etc/hosts is a file", "quit", "q?", " /help", "/", "Q", "/Help", "what is /help"):
            assert parse(text) == (None, text)
        assert parse("/help\n") == ("help", "")

    def test_help_names_them_all(self, chat):
        chat.handle("h")
        assert all(f"/{name}" in chat.view.shown[0] for name in COMMANDS)
        assert "Alt-Enter" in chat.view.shown[0]

    def test_leaving(self, chat):
        assert [chat.handle(line) for line in ("/quit", "q", "/help", "hello", "/nonsense")] == [0, 0, 1, 1, 1]

    def test_undo_and_reset(self, chat):
        for line in ("one", "two", "/undo"):
            chat.handle(line)
        assert [turn.user for turn in chat.conversation.turns] == ["one"]
        chat.handle("r")
        assert chat.conversation.turns == ()
        chat.handle("/undo")
        assert "empty" in chat.view.errors[0]

    def test_regenerate_and_edit(self, chat):
        for line in ("/regenerate", "/edit", "one", "two", "/edit three", "/edit", "/regenerate"):
            chat.handle(line)
        assert len(chat.view.errors) == 2
        assert chat.view.edited == "three"
        assert [turn.user for turn in chat.conversation.turns] == ["one", "three!"]
        assert chat.view.answers[-1] == chat.view.answers[-2]  # greedy
        assert "temp is 0" in chat.view.notices[-2]

    def test_regenerating_with_a_temperature_is_another_answer(self, chat):
        for line in ("/set temp 1.5", "/set seed 1", "/set max_tokens 12", "one", "/regenerate"):
            chat.handle(line)
        assert chat.view.answers[0] != chat.view.answers[1]
        assert len(chat.conversation.turns) == 1

    def test_an_edit_that_is_refused_keeps_the_turn(self, chat):
        chat.handle("one")
        turns = chat.conversation.turns
        chat.handle("/edit " + "word " * 300)
        assert "context is 256" in chat.view.errors[0]
        assert chat.conversation.turns == turns

    def test_system(self, chat):
        for line in ("/system", "/system Be kind.", "/system", '/system ""', "/system"):
            chat.handle(line)
        assert [text.split(";")[0] for text in chat.view.shown] == ["no system prompt", "Be kind.", "no system prompt"]

    def test_settings(self, chat):
        for line in ("/set temp 0.5", "/set top-p 0.9", "/set seed 3", "/set seed off", "/set stop end of it"):
            chat.handle(line)
        assert chat.settings == ChatSettings(temp=0.5, top_p=0.9, stop=("end of it",), max_tokens=5)
        for line in ("/set warmth 1", "/set temp warm", "/set temp -1", "/set top_k 1.5", "/set temp", "/set top_p 2"):
            chat.handle(line)
        assert len(chat.view.errors) == 6
        assert chat.settings.temp == 0.5
        assert "warmth" in chat.view.errors[0]
        chat.handle("/set")
        assert "top_p                    0.9" in chat.view.shown[0]

    def test_save_load_and_export(self, chat, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        for line in (
            "one",
            "/save a.json",
            "two",
            "/reset",
            "/load a.json",
            "/save a.json",
            "/export a.md",
            "/export a.md",
        ):
            chat.handle(line)
        assert chat.view.errors == []
        assert [turn.user for turn in chat.conversation.turns] == ["one"]
        assert (tmp_path / "a.md").read_text().startswith("# Chat with tiny")
        chat.handle("/save")
        assert "/save FILE" in chat.view.errors[0]

    def test_a_file_of_someone_else_is_not_replaced(self, chat, tmp_path):
        (tmp_path / "thesis.md").write_text("precious")
        for line in ("one", f"/export {tmp_path / 'thesis.md'}", f"/save {tmp_path / 'thesis.md'}"):
            chat.handle(line)
        assert (tmp_path / "thesis.md").read_text() == "precious"
        assert all("choose another name" in error for error in chat.view.errors)
        assert len(chat.view.errors) == 2

    def test_tokens_prompt_model_and_stats(self, chat):
        for line in ("/prompt", "/stats"):
            chat.handle(line)
        assert len(chat.view.errors) == 2
        for line in ("one", "/tokens", "/prompt", "/prompt two", "/model", "/stats", "/stats off", "three"):
            chat.handle(line)
        tokens, sent, would, model, stats = chat.view.shown
        assert tokens.startswith(f"{len(chat.conversation.format.encode('', [], 'one')) + 5} of 256 tokens, in 1 turn;")
        assert sent.startswith("<s><|system|>\n</s>\n<|user|>\none</s>\n<|assistant|>\n\n[1, ")
        assert "<|user|>\ntwo</s>" in would
        assert "4.6 million parameters in 6 layers, float32, context 256, instruct prompts" in model
        assert "peak memory" in stats
        assert [turn.user for turn in chat.conversation.turns] == ["one", "three"]
        assert chat.view.notices[-1] == "stopped at 5 tokens (/set max_tokens 10)"

    def test_dropped_turns_are_told(self, chat):
        chat.conversation.limit = 120
        for _ in range(6):
            chat.handle("go on")
        assert [notice for notice in chat.view.notices if "no longer seen" in notice]
        chat.handle("/tokens")
        assert "no longer sees" in chat.view.shown[-1]

    def test_an_interrupted_answer(self, chat):
        chat.view.stop_after = 2
        chat.handle("one")
        assert chat.conversation.turns[0].finish_reason == "interrupted"
        assert "stopped after 2 tokens" in chat.view.notices[-1]

    def test_no_token_at_all(self, chat, monkeypatch):
        monkeypatch.setattr(chat.view, "answer", lambda prompt, responses: None)
        chat.handle("one")
        assert chat.conversation.turns == ()
        assert "not kept" in chat.view.notices[-1]

    @pytest.mark.parametrize("error", [MemoryError(), RuntimeError("[metal::malloc] out\nof memory")])
    def test_a_device_that_gives_up_ends_no_chat(self, chat, monkeypatch, error):
        def fail(*_, **__):
            raise error

        monkeypatch.setattr(chat.view, "answer", fail)
        assert chat.handle("one")
        assert "\n" not in chat.view.errors[0]
        assert "memory" in chat.view.errors[0]


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("a\tb\nc", "a\tb\nc"),
        ("\x1b[2J", "\ufffd[2J"),
        ("a\r\nb\rc", "a\nbc"),
        ("\x9b1m\u202e", "\ufffd1m\ufffd"),
        ("é🙂", "é🙂"),
    ],
)
def test_printable(text, shown):  # fault D7
    assert printable(text) == shown


@pytest.mark.parametrize("values", [{"max_tokens": 0}, {"temp": float("nan")}, {"top_p": 0}, {"repetition_penalty": 0}])
def test_settings_are_checked(values):
    with pytest.raises(GenerationError):
        ChatSettings(**values)
