"""The `openelm` command: finds the subcommand, imports it, and turns errors into one line and an exit status.

The composition root: the only module that names the rooms, each imported when its command runs. Status 0 done, 1 a run
failed, 2 the user must change something, 130 interrupted, 143 terminated. Results go to stdout, everything else to
stderr.
"""

import argparse
import contextlib
import io
import logging
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import NoReturn

from . import __version__
from .errors import OpenELMError, OutputError
from .termination import EXIT_STATUS, Terminated, sigterm_raises

# command -> (module with add_arguments(parser) and run(args), one line of help)
COMMANDS = {
    "demo": (".demo", "the bundled checkpoint, offline: PyTorch -> MLX, a story, tokens/s"),
    "convert": (".convert.command", "any OpenELM checkpoint -> an MLX model folder"),
    "export": (".convert.export_command", "a model back out: Hugging Face, PyTorch, CoreNet, GGUF; adapters to PEFT"),
    "info": (".convert.info", "what a checkpoint is: format, size, dtype, per-layer widths"),
    "fuse": (".convert.fuse_command", "merge an adapter into its base model"),
    "generate": (".generate_command", "text from a prompt"),
    "chat": (".chat.command", "a conversation in the terminal, or a script of messages"),
    "cache-prompt": (".cache_prompt_command", "compute a prompt's beginning once, for generate to continue"),
    "lora": (".lora.command", "fine-tune on your own texts: LoRA, DoRA, or whole weights"),
    "bench": (".benchmarks.command", "tokens/s, memory and limits; compare, profile, report"),
    "doctor": (".doctor", "what this machine can do, and what to fix"),
}


class Parser(argparse.ArgumentParser):
    """argparse whose errors are one line."""

    def error(self, message: str) -> NoReturn:
        print(f"openelm: error: {message}; see '{self.prog} --help'", file=sys.stderr)
        raise SystemExit(2)


def main(argv: Sequence[str] | None = None) -> int:
    """Run `openelm` with these arguments (the process's own by default); return the exit status."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        _prepare_streams()
        with sigterm_raises():
            status = _run(arguments)
        sys.stdout.flush()  # here, where a full disk is still an error that can be told
        return status
    except OpenELMError as error:
        print(f"openelm: error: {' '.join(str(error).split())}", file=sys.stderr)
        return error.exit_status
    except KeyboardInterrupt:
        print("openelm: interrupted", file=sys.stderr)
        return 130
    except Terminated:
        print("openelm: terminated", file=sys.stderr)
        return EXIT_STATUS
    except BrokenPipeError:  # the reader of our output (`| head`) has gone: nothing more to say, and nowhere to say it
        _silence_stdout()
        return 0
    except OSError as error:  # a full disk, a name too long: the machine's answer, and the user's to change
        print(
            f"openelm: error: {': '.join(filter(None, (error.filename, error.strerror or str(error))))}",
            file=sys.stderr,
        )
        _silence_stdout()
        return 2


def _prepare_streams() -> None:
    """Make stdin, stdout and stderr usable, however the command was started. Raises OutputError without a stdout."""
    if sys.stdin is None:  # closed: an empty input, and the next file opened must not become file 0
        sys.stdin = open(os.devnull)  # noqa: SIM115
    if sys.stdout is None:
        raise OutputError("standard output is closed, so nothing could be printed: leave it open, or name a file")
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal that lacks a character shows another


def _silence_stdout() -> None:
    """What is still buffered goes nowhere: Python would try once more at its end."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _run(arguments: list[str]) -> int:
    parser = _overview()
    if not arguments:
        parser.print_help()
        return 0
    name = parser.parse_args(arguments[:1]).command
    module = import_module(COMMANDS[name][0], __package__)
    command = Parser(prog=f"openelm {name}", description=module.__doc__, formatter_class=_HelpFormatter)
    module.add_arguments(command)
    logging.basicConfig(format="openelm: %(message)s", level=logging.INFO, stream=sys.stderr)
    logging.getLogger("httpx").setLevel(logging.WARNING)
    return module.run(command.parse_args(arguments[1:])) or 0


def _overview() -> Parser:
    """The top level: what `openelm --help` prints, and the check of a command's name."""
    width = max(map(len, COMMANDS))
    listing = "\n".join(f"  {name:<{width}}  {text}" for name, (_, text) in COMMANDS.items())
    parser = Parser(
        prog="openelm",
        usage="openelm COMMAND [options]",
        description="Apple's OpenELM language models on Apple silicon.",
        epilog=f"commands:\n{listing}\n\n'openelm COMMAND --help' lists a command's options.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"openelm-mlx {__version__}")
    parser.add_argument("command", choices=COMMANDS, metavar="COMMAND", help=argparse.SUPPRESS)
    return parser


class _HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """The module's docstring as written, and a flag's default where it has one worth telling."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        if action.default in (None, False, argparse.SUPPRESS) or action.default == [] or not action.option_strings:
            return action.help
        return f"{action.help} (default: {str(action.default).replace('%', '%%')})"
