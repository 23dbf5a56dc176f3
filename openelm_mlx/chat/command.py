"""Talk to a model in the terminal, or run a script of messages through it: one turn for every line of stdin.

An Instruct model is asked in the form it was trained on, a base model continues what you type. /help lists the
commands. Without a terminal the transcript goes to stdout, with --json one object for every turn: prompt, text,
tokens, finish_reason, prompt_tokens (cached_tokens of them held from the turn before), dropped_turns,
generation_tokens, prompt_tps, generation_tps and ttft_s, or prompt and error.
"""

import argparse
import os
import sys
from typing import TYPE_CHECKING

from ..cache_arguments import add_cache_kind_arguments
from ..errors import GenerationError
from ..hub import resolve_model
from ..model_arguments import add_model_arguments, load_from_arguments
from ..sampling_arguments import add_sampling_arguments
from ..speculation_arguments import add_speculation_arguments, drafter_from_arguments

if TYPE_CHECKING:
    from ..drafts import Drafter
    from ..tokenizer import Tokenizer
    from .conversation import Conversation
    from .format import ChatFormat
    from .settings import ChatSettings
    from .terminal import Editor


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags of `openelm chat`."""
    add_model_arguments(parser)
    parser.add_argument("--system-prompt", default="", metavar="TEXT", help="what the model is told first")
    parser.add_argument("-m", "--max-tokens", type=int, default=256, metavar="N", help="how long an answer may become")
    parser.add_argument("--max-context", type=int, metavar="N", help="use fewer tokens of context than the model has")
    parser.add_argument("--stop", action="append", default=[], metavar="TEXT", help="end before this text; repeatable")
    add_sampling_arguments(parser)
    add_cache_kind_arguments(parser)
    add_speculation_arguments(parser)
    form = parser.add_argument_group("how messages become a prompt")
    form.add_argument(
        "--instruct", action=argparse.BooleanOptionalAction, help="use the Instruct form (told from the model)"
    )
    form.add_argument("--chat-template", metavar="FILE|TEXT", help="use this jinja2 template instead")
    form.add_argument("--ignore-chat-template", action="store_true", help="do without the model folder's own template")
    form.add_argument("--show-prompt", action="store_true", help="print text and ids of all that is sent")
    look = parser.add_argument_group("the chat itself")
    look.add_argument("--history-file", metavar="FILE|off", help="where typed messages are kept for the next time")
    look.add_argument("--stats", choices=("on", "off"), default="on", help="figures after each answer")
    look.add_argument("--json", action="store_true", help="one JSON object for every turn")


def run(args: argparse.Namespace) -> int:
    """Load, then chat until the input ends."""
    from .settings import ChatSettings

    ChatSettings.from_arguments(args, instruct=False)  # a bad value is told before a model is loaded
    model, tokenizer = load_from_arguments(args)
    from ..caches import make_cache
    from .conversation import Conversation

    form = choose_format(args, tokenizer)
    if form.name == "completion" and args.instruct is None:
        print(
            f"openelm: {args.model} is a base model: it continues your text, as it was not trained to answer "
            "(--instruct asks it nevertheless)",
            file=sys.stderr,
        )
    conversation = Conversation(
        model,
        tokenizer,
        form,
        system=args.system_prompt,
        max_context=args.max_context,
        make_cache=lambda keep: make_cache(model, max_kv_size=args.max_kv_size, keep=keep, kv_bits=args.kv_bits),
    )
    settings = ChatSettings.from_arguments(args, instruct=form.name == "instruct")
    drafter = drafter_from_arguments(args, model, tokenizer)
    if sys.stdin.isatty() and sys.stdout.isatty() and not args.json:
        return _on_terminal(args, conversation, settings, drafter)
    return _as_script(args, conversation, settings, drafter)


def choose_format(args: argparse.Namespace, tokenizer: "Tokenizer") -> "ChatFormat":
    """What the flags ask for; else the folder's own template; else what the model was trained on."""
    from .format import CompletionFormat, InstructFormat
    from .template import TemplateFormat, folder_template, named_template

    if args.chat_template:
        if args.instruct is not None:
            raise GenerationError("--chat-template and --instruct or --no-instruct contradict each other: drop one")
        return TemplateFormat(tokenizer, named_template(args.chat_template), "--chat-template")
    if args.instruct is None and not args.ignore_chat_template:
        folder = resolve_model(args.model, revision=args.revision, offline=args.offline)
        template = folder_template(folder)
        if template is not None:
            return TemplateFormat(tokenizer, template, f"the chat template of {args.model}")
    instruct = tokenizer.is_instruct if args.instruct is None else args.instruct
    return InstructFormat(tokenizer) if instruct else CompletionFormat(tokenizer)


def _on_terminal(
    args: argparse.Namespace, conversation: "Conversation", settings: "ChatSettings", drafter: "Drafter | None"
) -> int:
    from .session import Chat
    from .terminal import TerminalView, run_terminal

    view = TerminalView(_editor(args.history_file), markdown=conversation.format.name != "completion")
    chat = Chat(conversation, settings, view, args.model, args.show_prompt, args.stats == "on", drafter)
    view.notice(f"{args.model}, context of {conversation.limit} tokens; /help lists what can be typed, Ctrl-D leaves")
    return run_terminal(chat, view)


def _editor(history_file: str | None) -> "Editor":
    from .commands import COMMANDS
    from .terminal import PlainEditor

    if os.environ.get("TERM", "dumb").lower() in ("dumb", "unknown"):
        return PlainEditor()
    from .line_editor import LineEditor, history_of

    return LineEditor(history_of(history_file), COMMANDS)


def _as_script(
    args: argparse.Namespace, conversation: "Conversation", settings: "ChatSettings", drafter: "Drafter | None"
) -> int:
    from .script import JsonView, ScriptView, run_script
    from .session import Chat

    view = JsonView() if args.json else ScriptView()
    statistics = args.stats == "on" and not args.json  # the objects have them
    return run_script(Chat(conversation, settings, view, args.model, args.show_prompt, statistics, drafter), view)
