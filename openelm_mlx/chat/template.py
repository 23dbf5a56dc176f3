"""A model folder's own chat template, where it is not ours: rendered in jinja2's sandbox, read as text and control ids.

The settings are transformers' (blocks trimmed), so a template gives the text it was written for. Control ids come from
the template's own `<s>` and `</s>`: in what people type these are broken up before rendering and mended after the
text has been cut at the real ones. An answer is rendered as a placeholder, which its ids then replace.
"""

import re
import secrets
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from ..config import read_json_object
from ..errors import GenerationError
from ..home import expand_home
from ..prompt import CHAT_TEMPLATE
from ..tokenizer import BOS, EOS, UNKNOWN, Tokenizer
from .format import Turn


class TemplateFormat:
    """A conversation as a jinja2 template writes it."""

    name = "template"

    def __init__(self, tokenizer: Tokenizer, template: str, where: str) -> None:
        """`where` names the template in errors. Raises GenerationError when it is no template."""
        self._tokenizer = tokenizer
        self._render = _compiled(template, where)
        mark = f"\ue000{secrets.token_hex(8)}"  # private use: nobody can have typed it
        self._guard, self._answer = f"{mark}\ue001", f"{mark}:{{}}\ue001"
        self._special = re.compile(f"({re.escape(BOS)}|{re.escape(EOS)}|{self._answer.format('[0-9]+')})")

    def encode(self, system: str, turns: Sequence[Turn], user: str) -> list[int]:
        messages = [("system", self._guarded(system))] if system else []
        for i, turn in enumerate(turns):
            messages += [("user", self._guarded(turn.user)), ("assistant", self._answer.format(i))]
        text = self._render([*messages, ("user", self._guarded(user))])
        ids = self._ids(text, [turn.ids for turn in turns])
        bos = self._tokenizer.bos_token_id
        return ids if ids[:1] == [bos] else [bos, *ids]  # OpenELM never saw a text without

    def _guarded(self, text: str) -> str:
        """The text with every control id's name broken up, and none to be made with what the template puts beside it.

        Outer whitespace stays outside, for templates that trim.
        """
        for name in (BOS, EOS):
            text = text.replace(name, name[0] + self._guard + name[1:])
        core = text.strip()
        return text.replace(core, f"{self._guard}{core}{self._guard}", 1) if core else text

    def _ids(self, text: str, answers: Sequence[Sequence[int]]) -> list[int]:
        control = {BOS: self._tokenizer.bos_token_id, EOS: self._tokenizer.eos_token_id}
        first, *rest = self._special.split(text)
        ids = self._tokenizer.encode_segment(first.replace(self._guard, ""))
        for special, part in zip(rest[::2], rest[1::2], strict=True):
            plain = part.replace(self._guard, "")
            if special in control:
                ids += [control[special], *self._tokenizer.encode_segment(plain)]
            else:
                answer = answers[int(special.rpartition(":")[2][:-1])]
                ids += [*answer, *self._continued(plain)]
        return ids

    def _continued(self, text: str) -> list[int]:
        """The ids of text in the middle of a segment: without the space that SentencePiece puts before a whole one."""
        newline = self._tokenizer.encode_segment("\n")  # bytes, which merge with nothing
        return self._tokenizer.encode_segment("\n" + text)[len(newline) :]


def folder_template(folder: Path) -> str | None:
    """The chat template of a model folder; None where there is none, or only the one that we write ourselves."""
    file = folder / "chat_template.jinja"
    settings = folder / "tokenizer_config.json"
    template: Any = None
    if file.is_file():
        template = _read(file)
    elif settings.is_file():
        template = read_json_object(settings).get("chat_template")
    if isinstance(template, list):  # several, by name
        named = [entry for entry in template if isinstance(entry, dict)]
        template = next((entry.get("template") for entry in named if entry.get("name") == "default"), None)
    if template is not None and not isinstance(template, str):
        raise GenerationError(f"{settings}: chat_template is no text; --ignore-chat-template does without it")
    return template if template and template.strip() != CHAT_TEMPLATE.strip() else None


def named_template(text: str) -> str:
    """The template that --chat-template means: a file's content, or the text itself. Raises GenerationError."""
    if "{{" in text or "{%" in text:
        return text
    return _read(expand_home(text))


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except OSError as error:
        raise GenerationError(f"the chat template {file} cannot be read: {error.strerror}") from None
    except ValueError:
        raise GenerationError(f"the chat template {file} is not UTF-8 text") from None


def _compiled(template: str, where: str) -> Callable[[Sequence[tuple[str, str]]], str]:
    """The template as a function of (role, content) pairs."""
    try:
        from jinja2.sandbox import ImmutableSandboxedEnvironment
    except ImportError:
        raise GenerationError(f"{where} needs the jinja2 package; pip install jinja2") from None
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.globals["raise_exception"] = _raise_exception

    def run(make: Callable[[], Any]) -> Any:
        try:
            return make()
        except Exception as error:  # a template can fail in any way that an expression can
            detail = " ".join(str(error).split()) or type(error).__name__
            raise GenerationError(f"{where} failed: {detail}; --ignore-chat-template does without it") from None

    compiled = run(lambda: environment.from_string(template))

    def render(messages: Sequence[tuple[str, str]]) -> str:
        as_objects = [{"role": role, "content": content} for role, content in messages]
        special = {"bos_token": BOS, "eos_token": EOS, "unk_token": UNKNOWN}
        return str(run(lambda: compiled.render(messages=as_objects, add_generation_prompt=True, **special)))

    return render


def _raise_exception(message: str) -> NoReturn:
    from jinja2 import TemplateError

    raise TemplateError(message)
