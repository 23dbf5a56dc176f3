"""What a terminal shows while an answer grows, on a small terminal of our own; and how messages are typed."""

import io
import re
import stat

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prompt_toolkit.application import create_app_session
from prompt_toolkit.input import create_pipe_input
from prompt_toolkit.output import DummyOutput
from rich.console import Console

from openelm_mlx.chat import markdown
from openelm_mlx.chat.block import is_open, message
from openelm_mlx.chat.line_editor import LineEditor, history_of
from openelm_mlx.chat.live import LiveLines
from openelm_mlx.chat.markdown import AnswerStream
from openelm_mlx.errors import OutputError

MARKDOWN = """# A title

Some **bold** text, `code`, and <s> or </s> as they are; long enough to be wrapped on a narrow terminal.
A line of its own, 日本語 🙂.

- one
- two

1. first

```python
def f(x):
    return x ** 2
```

| a | b |
|---|---|
| 1 | 2 |

[a link](https://example.org) and the end
"""
TEXTS = [
    MARKDOWN,
    "\n\n one line",
    "",
    "   \n ",
    "two\nlines\n\nand more\n\n\n",
    "word " * 60,
    "```\nnot closed",
    "a\n\n- b\n",
]


class Screen:
    """A terminal without end: what stands in each line after some output."""

    def __init__(self):
        self.lines, self.row, self.column = [""], 0, 0

    def write(self, output):
        for part in re.findall(r"\x1b\[[0-9;]*[A-Za-z]|[\r\n]|[^\x1b\r\n]+", output):
            self._take(part)

    def _take(self, part):
        line = self.lines[self.row]
        if part == "\r":
            self.column = 0
        elif part == "\n":
            self.row, self.column = self.row + 1, 0
            self.lines += [""] * (self.row + 1 - len(self.lines))
        elif part.endswith("A") and part.startswith("\x1b"):
            self.row -= int(part[2:-1])
            assert self.row >= 0
        elif part == "\x1b[K":
            self.lines[self.row] = line[: self.column]
        elif part == "\x1b[J":
            self.lines = [*self.lines[: self.row], line[: self.column]]
        elif not part.startswith("\x1b"):
            self.lines[self.row] = line[: self.column].ljust(self.column) + part + line[self.column + len(part) :]
            self.column += len(part)
        else:
            assert part.endswith("m"), part

    def text(self):
        return "\n".join(line.rstrip() for line in self.lines).rstrip("\n")


def console(width=40, height=1000):
    return Console(file=io.StringIO(), force_terminal=True, width=width, height=height, color_system="truecolor")


def shown(chunks, *, markdown, **size):
    terminal = console(**size)
    stream = AnswerStream(terminal, markdown=markdown)
    for chunk in chunks:
        stream.feed(chunk)
    stream.finish()
    screen = Screen()
    screen.write(terminal.file.getvalue())
    return screen


@pytest.fixture(autouse=True)
def _show_every_token(monkeypatch):
    monkeypatch.setattr(markdown, "_SECONDS_BETWEEN_SHOWS", 0)


class TestAnswers:
    @pytest.mark.parametrize("markdown", [True, False])
    @pytest.mark.parametrize(("size", "width"), [(4, 14), (17, 50)])
    @pytest.mark.parametrize("text", TEXTS, ids=range(len(TEXTS)))
    def test_however_it_comes_the_same_stands_there_in_the_end(self, markdown, text, size, width):
        chunks = [text[i : i + size] for i in range(0, len(text), size)]
        bit_by_bit, at_once = (shown(parts, markdown=markdown, width=width) for parts in (chunks, [text]))
        assert bit_by_bit.text() == at_once.text()
        assert bit_by_bit.column == 0
        assert max(map(len, bit_by_bit.lines)) <= width

    def test_markdown(self):
        text = shown([MARKDOWN], markdown=True, width=100).text()
        for line in ("A title", " • two", " 1 first", " def f(x):", " 1  2", "A line of its own, 日本語 🙂."):
            assert line in [each.rstrip() for each in text.split("\n")]
        assert "Some bold text, code, and <s> or </s> as they are" in text
        assert "a link (https://example.org)" in text
        assert "\n\n\n" not in text

    def test_plain_text_stays_as_it_is(self):
        assert shown(["# a **b**\n", "c\n\nd"], markdown=False).text() == "# a **b**\nc\n\nd"

    def test_a_steering_sequence_is_only_text(self):  # fault D7
        screen = shown(["\x1b[2J\x1b[31mred", "\x07"], markdown=True)
        assert screen.text() == "\ufffd[2J\ufffd[31mred\ufffd"

    def test_nothing_said_leaves_nothing(self):
        assert shown([], markdown=True).lines == [""]


class TestLines:
    def test_only_what_changed_is_written(self):
        terminal = console()
        live = LiveLines(terminal)
        live.show(["one", "two", "three"])
        before = len(terminal.file.getvalue())
        live.show(["one", "two", "three four"])
        assert terminal.file.getvalue()[before:] == "\rthree four\x1b[K"
        before = len(terminal.file.getvalue())
        live.show(["one", "two", "three four"])
        assert len(terminal.file.getvalue()) == before

    @given(versions=st.lists(st.lists(st.sampled_from("abc"), max_size=4), max_size=6), settled=st.integers(0, 2))
    def test_the_last_version_stands_there(self, versions, settled):
        terminal = console()
        live = LiveLines(terminal)
        kept = []
        for version in versions:
            live.show(version)
            kept += version[:settled]
            live.settle(min(settled, len(version)))
        rest = versions[-1][settled:] if versions else []
        screen = Screen()
        screen.write(terminal.file.getvalue())
        assert screen.text() == "\n".join([*kept, *rest])

    def test_lines_that_scrolled_away_are_left_alone(self):
        terminal = console(height=4)
        live = LiveLines(terminal)
        live.show(list("abcdef"))
        before = len(terminal.file.getvalue())
        live.show([*"Abcde", "F"])
        assert terminal.file.getvalue()[before:].startswith("\x1b[2A\rd")

    def test_a_terminal_that_changes_its_width(self):
        terminal = console()
        live = LiveLines(terminal)
        live.show(["one", "two"])
        terminal.width = 20
        live.show(["one two"])
        assert terminal.file.getvalue().endswith("two\x1b[K\n\rone two\x1b[K")


@pytest.mark.parametrize(
    ("typed", "open_", "sent"),
    [
        ("hello  ", False, "hello"),
        ('"""', True, '"""'),
        ('"""one\n\ntwo', True, '"""one\n\ntwo'),
        ('"""\n one\n\ntwo\n"""', False, " one\n\ntwo"),
        ('"""one"""', False, "one"),
        ('he said """', False, 'he said """'),
        ('""""', True, '""""'),
    ],
)
def test_blocks(typed, open_, sent):
    assert (is_open(typed), message(typed)) == (open_, sent)


class TestEditor:
    def typed(self, keys, history=None, default=""):
        with create_pipe_input() as pipe, create_app_session(input=pipe, output=DummyOutput()):
            pipe.send_text(keys)
            return LineEditor(history or history_of("off"), ["save", "set", "edit"]).read(default)

    @pytest.mark.parametrize(
        ("keys", "sent"),
        [
            ("hello\r", "hello"),
            ("one\x1b\rtwo\r", "one\ntwo"),  # Alt-Enter
            ('"""\rone\r\rtwo\r"""\r', "one\n\ntwo"),
            ("/ed\t\r", "/edit"),
            ("\x1b[200~one\ntwo\x1b[201~\r", "one\ntwo"),  # pasted
            ("hallo\x1b[D\x1b[D\x1b[D\x7fe\r", "hello"),
        ],
    )
    def test_what_is_typed(self, keys, sent):
        assert self.typed(keys) == sent

    def test_a_text_to_change(self):
        assert self.typed("!\r", default="hello") == "hello!"

    @pytest.mark.parametrize(("keys", "error"), [("\x04", EOFError), ("half a line\x03", KeyboardInterrupt)])
    def test_leaving(self, keys, error):  # fault D8
        with pytest.raises(error):
            self.typed(keys)

    def test_history_is_for_the_next_session_and_its_owner(self, tmp_path):  # fault D7
        file = tmp_path / "folder" / "history"
        self.typed("first\x1b\rmessage\r", history_of(str(file)))
        assert list(history_of(str(file)).load_history_strings()) == ["first\nmessage"]
        assert stat.S_IMODE(file.stat().st_mode) == 0o600

    def test_the_default_history_file(self, tmp_path, monkeypatch):
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
        self.typed("hello\r", history_of(None))
        assert "+hello" in (tmp_path / "openelm" / "chat_history").read_text()

    def test_a_history_that_cannot_be_written(self, tmp_path, monkeypatch):
        (tmp_path / "file").write_text("")
        with pytest.raises(OutputError, match="--history-file"):
            history_of(str(tmp_path / "file" / "history"))
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
        assert self.typed("hello\r", history_of(None)) == "hello"
