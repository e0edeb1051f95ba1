"""The console script `mlx_redrafter COMMAND`. Errors in user input print one line on stderr."""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys
import threading
import warnings
from codecs import lookup
from importlib import import_module
from io import TextIOWrapper, UnsupportedOperation
from typing import NoReturn

from tqdm import tqdm

from .. import __version__
from ..errors import NO_BACKEND, RedrafterError, join_lines
from .parser import Parser

COMMANDS = {
    "generate": "generate text from a prompt",
    "chat": "hold a conversation in the terminal",
    "convert": "convert a PyTorch drafter checkpoint, and quantize it",
    "train": "train a drafter for a model",
    "doctor": "measure the cost and speedup of drafting on this machine",
    "server": "serve the OpenAI and Anthropic APIs over HTTP",
    "race": "serve a web page with plain and drafted decoding side by side",
    "stdio": "run sessions for another program, over JSON lines",
}
"""Name -> description; `run()` of the module of this name here is the command."""

LAUNCHABLE_MODULES = (
    "mlx_redrafter.cli.generate",
    "mlx_redrafter.cli.chat",
    "mlx_redrafter.cli.server",
)
"""Modules of the commands that `mlx.launch` may start; each also has a `make_parser()`."""

NO_SERVER = (
    "{name} is not installed, which server and race need; "
    'in a clone of the repository: pip install -e ".[server]"'
)


def main(command: str | None = None) -> None:
    """Runs a command with `sys.argv` and exits with its status.

    Args:
        command: one of `COMMANDS`; None to take it from the first argument.
    """
    if command is None:
        listed = "".join(f"\n  {name:10}{text}" for name, text in COMMANDS.items())
        epilog = f"commands:{listed}\n\n'mlx_redrafter COMMAND --help' lists a command's options."
        parser = Parser(
            "mlx_redrafter", epilog=epilog, formatter_class=argparse.RawDescriptionHelpFormatter
        )
        parser.add_argument("--version", action="version", version=__version__)
        parser.add_argument("command", choices=COMMANDS, metavar="COMMAND")
        command = parser.parse_args(sys.argv[1:2]).command
        del sys.argv[1]
    run_module(f"mlx_redrafter.cli.{command}")


def run_module(module: str) -> None:
    """Imports `module`, calls its `run()` and exits with the returned status.

    Errors print one line on stderr.
    """
    prepare_streams()
    prepare_messages()
    # Python's handler would print a traceback during imports, and is not called while waiting for
    # ranks.
    has_handler = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if has_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)

    try:
        import_module("mlx.core")
    except ImportError as error:
        exit_with_message(NO_BACKEND.format(error=join_lines(error)))
    from ..machine import ranks  # needs MLX

    try:
        size = ranks.count_ranks()
    except RuntimeError as error:
        exit_with_message(f"cannot find the other ranks: {join_lines(error)}")
    fail = exit_with_message if size == 1 else ranks.exit_with_error
    if size > 1:
        ranks.watch_connections()
        # A rank that waits for a message cannot handle it.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    elif has_handler:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if ranks.get_rank():
        sys.stdout = sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115

    try:
        if size > 1 and module not in LAUNCHABLE_MODULES:
            raise RedrafterError(
                f"this command needs a single process, got {size}: only generate, chat and server "
                "support ranks"
            )
        command = import_module(module)
        if size > 1:
            ranks.compare_flags(vars(command.make_parser().parse_args()))
        status = command.run()
        ranks.gather(None)  # if a rank ended earlier, the others would lose messages
        sys.stdout.flush()
    except ModuleNotFoundError as error:
        if module not in ("mlx_redrafter.cli.server", "mlx_redrafter.cli.race"):
            raise
        exit_with_message(NO_SERVER.format(name=error.name))
    except KeyboardInterrupt:
        status = 130
    except BrokenPipeError:
        # So that Python's final flush cannot fail.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        status = 1
    except UnsupportedOperation:
        fail("stdout is closed")
    except (ValueError, OSError) as error:
        fail(join_lines(error))
    except Exception as error:
        if size == 1:
            raise
        fail(f"{type(error).__name__}: {join_lines(error)}")
    if size > 1:
        os._exit(status)  # immediately, even while sending
    sys.exit(status)


def prepare_streams() -> None:
    """Replaces streams that the shell closed, and characters that stdout lacks."""
    # The next opened file would get the descriptor of a closed stream. Text that is printed to a
    # closed stdout would be lost, so that printing to it fails.
    for name, mode in (("stdin", "r"), ("stdout", "r"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115
    encoding = sys.stdout.encoding
    if isinstance(sys.stdout, TextIOWrapper) and lookup(encoding).name != "utf-8":
        sys.stdout.reconfigure(errors="replace")
        print(f"note: characters that {encoding} lacks are printed as ?", file=sys.stderr)


def prepare_messages() -> None:
    """Shows progress, warnings and log messages on stderr, each in one line."""
    tqdm.set_lock(threading.RLock())  # its own lock would start a process on macOS
    warnings.formatwarning = lambda message, *place, **more: f"warning: {join_lines(message)}\n"
    logging.getLogger("mlx_redrafter").setLevel(logging.INFO)
    if logging.lastResort is not None:  # handles log messages if the command sets up no handler
        logging.lastResort.setLevel(logging.INFO)


def exit_with_message(message: str) -> NoReturn:
    """Prints one line on stderr and exits with status 1."""
    print(f"error: {message}", file=sys.stderr)
    sys.exit(1)
