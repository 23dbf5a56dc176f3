"""The chat on a terminal, driven through a pseudo-terminal by pexpect as a person would."""

import os
import re
import stat
import sys

import pytest
from chats import TINY

pexpect = pytest.importorskip("pexpect")

READY = "\x1b\\[\\?2004h"  # prompt_toolkit accepts input: it has switched bracketed paste on
# The command itself, at a pace that a person's Ctrl-C can meet on any machine.
CHAT = """
import sys, time
from openelm_mlx import cli
from openelm_mlx.chat import conversation

def slowly(*arguments, _fast=conversation.stream_generate, **settings):
    for response in _fast(*arguments, **settings):
        time.sleep(0.02)
        yield response

conversation.stream_generate = slowly
sys.exit(cli.main(["chat", *sys.argv[1:]]))
"""
UP, CTRL_C, CTRL_D, ALT_ENTER = "\x1b[A", "\x03", "\x04", "\x1b\r"
DONE = r"context (\d+)/\d+"  # the end of an answer's statistics


class Terminal:
    """A running chat; `say` types a line and waits for what should come of it."""

    def __init__(self, folder, *flags, **environment):
        env = {**os.environ, "TERM": "xterm-256color", "XDG_CACHE_HOME": str(folder), **environment}
        for name in set(env) & {"NO_COLOR", "COLUMNS", "LINES"} - set(environment):
            del env[name]
        command = ["-c", CHAT, "--model", "tiny", "--dtype", "float32", "--instruct", *flags]
        self.child = pexpect.spawn(
            sys.executable, command, env=env, encoding="utf-8", timeout=120, dimensions=(30, 100), cwd=os.getcwd()
        )
        self.child.delaybeforesend = None
        self.seen = ""
        self.ready()

    def expect(self, pattern):
        self.child.expect(pattern)
        self.seen += self.child.before + (self.child.after if isinstance(self.child.after, str) else "")
        return self.child.match

    def ready(self):
        self.expect(READY if self.child.env["TERM"] != "dumb" else "> ")

    def say(self, text, expected):
        self.child.send(text + "\r")
        match = self.expect(expected)
        self.ready()
        return match

    def leave(self, keys=CTRL_D):
        self.child.send(keys)
        self.expect(pexpect.EOF)
        self.child.close()
        return self.child.exitstatus


@pytest.fixture
def terminal(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(TINY.parents[2]))
    running = []

    def start(*flags, **environment):
        running.append(Terminal(tmp_path, *flags, **environment))
        return running[-1]

    yield start
    for one in running:
        one.child.close(force=True)


def test_a_whole_chat(terminal, tmp_path):
    """Faults D7, D8, D9: editing and history, Ctrl-C at a token, undo, save, load, overflow, and the ways out."""
    chat = terminal("--max-context", "150", "-m", "8")
    first = int(chat.say("Tell me of a king", DONE)[1])
    assert "<s>" not in chat.seen
    chat.say("/set max_tokens 100", "max_tokens is now 100")
    interrupt_at_a_token(chat, "Tell me more and more")
    chat.say("/tokens", r"in 2 turns")
    chat.say("/undo", "taken back: Tell me more and more")
    assert int(chat.say("/tokens", r"(\d+) of 150 tokens, in 1 turn")[1]) == first
    chat.say("/set max_tokens 8", "is now 8")
    chat.say("/save chat.json", "saved 1 turn to .*chat.json")
    chat.say("/reset", "forgotten")
    chat.say("/load chat.json", "loaded 1 turn .*Tell me of a king")
    assert int(chat.say("/tokens", r"(\d+) of 150")[1]) == first
    for _ in range(4):
        chat.say("and then", DONE)
    assert "no longer seen by the model" in " ".join(chat.seen.split())
    chat.say("word " * 200, r"error: .*context is 150")
    chat.say(UP + UP, DONE)  # "and then" once more
    chat.child.send("/edit\r")
    chat.ready()
    chat.say("?", DONE)  # at the end of the text to change
    chat.say("/export chat.md", "wrote 6 turns")
    assert (tmp_path / "chat.md").read_text().count("and then?") == 1
    assert chat.leave() == 0
    assert not re.search("[\x01\x02]|Traceback", chat.seen)
    check_history(tmp_path / "openelm" / "chat_history")


def interrupt_at_a_token(chat, text):
    chat.child.send(text + "\r")
    chat.expect(r"[a-z]{2,} [a-z]+ [a-z]+ [A-Za-z]*\x1b\[K")
    chat.child.send(CTRL_C)
    chat.expect(r"stopped after \d+ token")
    chat.ready()


def check_history(file):
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert "+Tell me of a king\n" in file.read_text()


def test_the_ways_out_and_the_next_session(terminal, tmp_path):
    """Fault D8: Ctrl-C at the prompt warns first; what was typed is there the next time."""
    chat = terminal("-m", "3")
    chat.child.send("one" + ALT_ENTER + "two\r")
    chat.expect(DONE)
    chat.ready()
    chat.child.send("half a line" + CTRL_C)
    chat.expect("Ctrl-C once more leaves")
    chat.ready()
    chat.say("/help", "Alt-Enter")  # which takes the warning back
    chat.child.send(CTRL_C)
    chat.expect("Ctrl-C once more leaves")
    chat.ready()
    assert chat.leave(CTRL_C) == 130
    again = terminal("-m", "3")
    again.child.send(UP + UP + "\r")
    again.expect(DONE)
    again.ready()
    again.say("/save x.json", "saved 1 turn")
    assert r'"content": "one\ntwo"' in (tmp_path / "x.json").read_text()
    assert again.leave("/quit\r") == 0


def test_a_terminal_that_only_prints(terminal):
    """TERM=dumb: not one escape sequence."""
    chat = terminal("-m", "3", TERM="dumb")
    chat.child.send('"""hello\rthere"""\r')
    chat.expect(DONE)
    chat.ready()
    assert chat.leave() == 0
    assert "\x1b" not in chat.seen


def test_no_colour(terminal):
    chat = terminal("-m", "3", NO_COLOR="1")
    chat.say("/nonsense", "no command /nonsense")
    assert chat.leave() == 0
    assert not re.search(r"\x1b\[[0-9;]*(3[0-8]|9[0-7])[;m]", chat.seen)
