"""What can be typed in a chat beside messages: a slash and a name, or one of mlx_lm.chat's letters."""

import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import GenerationError, OutputError
from .file import export_markdown, load, resolved, save

if TYPE_CHECKING:
    from .session import Chat

LEAVE = "leave"  # what a command returns to end the chat

_COMMAND = re.compile(r"/([a-z]+)(?:\s+(.*))?", re.DOTALL)  # "/etc/hosts" is text
_LETTERS = {"q": "quit", "r": "reset", "h": "help"}


@dataclass(frozen=True)
class Command:
    """What `/name` does with the text after it, and how /help puts it."""

    run: "Callable[[Chat, str], str | None]"
    usage: str
    help: str


def parse(line: str) -> tuple[str | None, str]:
    """The command that a line names, and its argument; None when the line is a message."""
    if line in _LETTERS:
        return _LETTERS[line], ""
    found = _COMMAND.fullmatch(line)
    return (found[1], (found[2] or "").strip()) if found else (None, line)


def _help(chat: "Chat", argument: str) -> None:
    width = max(len(command.usage) for command in COMMANDS.values())
    lines = [f"{command.usage:<{width}}  {command.help}" for command in COMMANDS.values()]
    chat.view.show("\n".join([*lines, "", *KEYS]))


def _quit(chat: "Chat", argument: str) -> str:
    return LEAVE


def _system(chat: "Chat", argument: str) -> None:
    if argument:
        chat.conversation.set_system("" if argument == '""' else argument)
        chat.view.notice("system prompt set; it holds for the whole conversation")
    else:
        chat.view.show(chat.conversation.system or "no system prompt; /system TEXT sets one")


def _reset(chat: "Chat", argument: str) -> None:
    chat.conversation.reset()
    chat.view.notice("conversation forgotten; the system prompt stays")


def _undo(chat: "Chat", argument: str) -> None:
    chat.view.notice(f"taken back: {_excerpt(chat.conversation.undo().user)}")


def _regenerate(chat: "Chat", argument: str) -> None:
    if chat.settings.temp == 0:
        chat.view.notice("temp is 0, so the answer will be the same; /set temp 0.7 makes it another")
    chat.ask(_last_message(chat), replace=True)


def _edit(chat: "Chat", argument: str) -> None:
    text = argument or chat.view.edit(_last_message(chat))
    if text:
        chat.ask(text, replace=True)
    else:
        chat.view.notice("nothing changed; /edit TEXT replaces the last message")


def _save(chat: "Chat", argument: str) -> None:
    path = _writable(chat, argument, "/save FILE")
    save(chat.conversation, path, chat.model_name)
    chat.own_files.add(path)
    chat.view.notice(f"saved {_count(len(chat.conversation.turns))} to {path}")


def _load(chat: "Chat", argument: str) -> None:
    path = _path(argument, "/load FILE")
    load(chat.conversation, path)
    chat.own_files.add(path)
    turns = chat.conversation.turns
    last = f"; the last message: {_excerpt(turns[-1].user)}" if turns else ""
    chat.view.notice(f"loaded {_count(len(turns))} from {path}{last}")


def _export(chat: "Chat", argument: str) -> None:
    path = _writable(chat, argument, "/export FILE")
    export_markdown(chat.conversation, path, chat.model_name)
    chat.own_files.add(path)
    chat.view.notice(f"wrote {_count(len(chat.conversation.turns))} to {path}")


def _set(chat: "Chat", argument: str) -> None:
    name, _, value = argument.partition(" ")
    if name:
        chat.settings = chat.settings.changed(name, value.strip())
        chat.view.notice(f"{name} is now {value.strip()}")
    else:
        chat.view.show(str(chat.settings))


def _tokens(chat: "Chat", argument: str) -> None:
    conversation = chat.conversation
    seen = len(conversation.turns) - conversation.dropped
    lines = [
        f"{len(conversation.ids)} of {conversation.limit} tokens, in {_count(seen)}; "
        f"the cache takes {conversation.cache_bytes / 1e6:.1f} MB"
    ]
    if conversation.dropped:
        lines.append(f"the model no longer sees {_count(conversation.dropped)} before")
    chat.view.show("\n".join(lines))


def _prompt(chat: "Chat", argument: str) -> None:
    if argument:
        chat.view.show(chat.spelled(chat.conversation.prepare(argument, max_tokens=chat.settings.max_tokens).ids))
    elif chat.last_prompt is not None:
        chat.view.show(chat.spelled(chat.last_prompt.ids))
    else:
        raise GenerationError("nothing was sent yet; /prompt TEXT shows what would be sent for a text")


def _model(chat: "Chat", argument: str) -> None:
    model, config = chat.conversation.model, chat.conversation.model.config
    dtype = str(model.transformer.norm.weight.dtype).removeprefix("mlx.core.")
    chat.view.show(
        f"{chat.model_name}: {config.num_parameters() / 1e6:.1f} million parameters in "
        f"{config.num_transformer_layers} layers, {dtype}, context {config.max_context_length}, "
        f"{chat.conversation.format.name} prompts"
    )


def _stats(chat: "Chat", argument: str) -> None:
    if argument in ("on", "off"):
        chat.show_statistics = argument == "on"
        chat.view.notice(f"statistics after each answer are {argument}")
    elif chat.last is not None and chat.last_prompt is not None:
        last, prompt = chat.last, chat.last_prompt
        chat.view.show(
            f"prompt      {len(prompt.ids)} tokens, {prompt.held} of them held from before; the others at "
            f"{last.prompt_tps:.1f} tokens/s, first token after {last.ttft_s:.3f} s\n"
            f"generation  {last.generation_tokens} tokens, {last.generation_tps:.1f} tokens/s\n"
            f"peak memory {last.peak_memory_bytes / 1e6:.0f} MB (MLX allocator)"
        )
    else:
        raise GenerationError("there was no answer yet; /stats on|off shows or hides the line after each")


def _last_message(chat: "Chat") -> str:
    if not chat.conversation.turns:
        raise GenerationError("the conversation is empty: there is no message to change or answer again")
    return chat.conversation.turns[-1].user


def _path(argument: str, usage: str) -> Path:
    if not argument:
        raise GenerationError(f"a file name is needed: {usage}")
    return resolved(Path(argument))


def _writable(chat: "Chat", argument: str, usage: str) -> Path:
    path = _path(argument, usage)
    if path not in chat.own_files and os.path.exists(path):
        raise OutputError(f"{path} exists and is not of this chat; choose another name")
    return path


def _count(turns: int) -> str:
    return "1 turn" if turns == 1 else f"{turns} turns"


def _excerpt(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= 60 else line[:57] + "..."


COMMANDS = {
    "help": Command(_help, "/help, h", "this list"),
    "system": Command(_system, "/system [TEXT]", 'show or set the system prompt; /system "" removes it'),
    "reset": Command(_reset, "/reset, r", "forget the conversation"),
    "undo": Command(_undo, "/undo", "take the last message and its answer back"),
    "regenerate": Command(_regenerate, "/regenerate", "another answer to the last message"),
    "edit": Command(_edit, "/edit [TEXT]", "change the last message and answer it again"),
    "save": Command(_save, "/save FILE", "the conversation as JSON, with every token id"),
    "load": Command(_load, "/load FILE", "go on with a saved conversation"),
    "export": Command(_export, "/export FILE", "the conversation as Markdown"),
    "set": Command(_set, "/set [NAME VALUE]", "show or change temp, top_p, max_tokens and the like"),
    "tokens": Command(_tokens, "/tokens", "how much of the context is used"),
    "prompt": Command(_prompt, "/prompt [TEXT]", "text and ids of what was sent, or would be for TEXT"),
    "model": Command(_model, "/model", "what is answering"),
    "stats": Command(_stats, "/stats [on|off]", "figures of the last answer; the line after each"),
    "quit": Command(_quit, "/quit, q", "leave"),
}
KEYS = (
    "Enter sends; Alt-Enter (or Esc, then Enter) begins a new line, as does Enter after a line that opens with"
    ' """ until """ closes it.',
    "Ctrl-C stops an answer and keeps what was said; Ctrl-D leaves. Up and Down recall earlier messages.",
)
