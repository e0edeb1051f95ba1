"""The console script `mlx_redrafter COMMAND`, and what every command has in common: one clear line on bad input."""

from __future__ import annotations

import logging
import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from importlib import import_module
from pathlib import Path

from .. import __version__
from ..errors import one_line

COMMANDS = {
    "generate": ("mlx_redrafter.cli.generate", "generate text from a prompt"),
    "chat": ("mlx_redrafter.cli.chat", "hold a conversation in the terminal"),
    "convert": ("mlx_redrafter.convert.command", "convert a PyTorch drafter checkpoint, and quantise it"),
    "train": ("mlx_redrafter.training.command", "train a drafter for a model"),
    "doctor": ("mlx_redrafter.cli.doctor", "measure what drafting costs and brings on this machine"),
    "server": ("mlx_redrafter.serving.command", "serve the OpenAI API over HTTP"),
    "race": ("mlx_redrafter.serving.race", "a page that decodes with and without drafting, side by side"),
    "stdio": ("mlx_redrafter.cli.stdio", "sessions for another program, over lines of JSON"),
}
"""Name -> (the module whose `run()` is the command, what it does)."""

NO_BACKEND = (
    "MLX cannot run here: {error}. On Linux install a backend: "
    "pip install 'mlx_redrafter[cpu]' or pip install 'mlx_redrafter[cuda]'"
)


def main(command: str | None = None) -> None:
    """Runs a command on `sys.argv`, and exits with its status.

    Args:
        command: one of `COMMANDS`; None takes it from the first argument.
    """
    if command is None:
        command = sys.argv.pop(1) if len(sys.argv) > 1 else ""
    usage = "usage: mlx_redrafter COMMAND ...\n       mlx_redrafter --version"
    if command in ("-h", "--help"):
        listed = "\n".join(f"  {name:10}{text}" for name, (_, text) in COMMANDS.items())
        print(f"{usage}\n\ncommands:\n{listed}\n\n'mlx_redrafter COMMAND --help' lists a command's options.")
    elif command == "--version":
        print(__version__)
    elif command in COMMANDS:
        run_module(COMMANDS[command][0])
    else:
        print(f"{usage}\nerror: expected a command, got {command!r}", file=sys.stderr)
        sys.exit(2)


def run_module(module: str) -> None:
    """Imports `module`, calls its `run()`, and exits with what that returns; errors become one line on stderr."""
    with open_streams():
        try:
            check_backend()
            with show_warnings_plainly(), show_log():
                status = import_module(module).run()
            sys.stdout.flush()
        except KeyboardInterrupt:
            sys.exit(130)
        except BrokenPipeError:
            discard_stdout()
            sys.exit(1)
        except (ValueError, OSError) as error:
            discard_stdout()
            exit_with_error(one_line(error))
        sys.exit(status)


@contextmanager
def open_streams() -> Iterator[None]:
    """Replaces standard streams that the parent process closed with the null device."""
    with ExitStack() as stack:
        for number, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
            try:
                os.fstat(number)
            except OSError:
                os.open(os.devnull, os.O_RDWR)  # takes the lowest free number, which a file would take otherwise
            if getattr(sys, name) is None:
                setattr(sys, name, stack.enter_context(Path(os.devnull).open(mode, encoding="utf-8")))
                stack.callback(setattr, sys, name, None)
        yield


def check_backend() -> None:
    """Exits with what to install when MLX cannot be imported."""
    try:
        import_module("mlx.core")
    except ImportError as error:
        exit_with_error(NO_BACKEND.format(error=one_line(error)))


@contextmanager
def show_warnings_plainly() -> Iterator[None]:
    """Shows a warning as one line, without the place in the source."""
    before = warnings.formatwarning
    warnings.formatwarning = lambda message, *place, **more: f"warning: {one_line(message)}\n"
    try:
        yield
    finally:
        warnings.formatwarning = before


@contextmanager
def show_log() -> Iterator[None]:
    """Shows what the package logs on stderr, unless the command has set up a log of its own."""
    logger, handler = logging.getLogger("mlx_redrafter"), logging.StreamHandler()
    handler.addFilter(lambda record: not logging.root.handlers)
    before = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before)


def discard_stdout() -> None:
    """Sends what is still buffered for stdout to the null device, so that Python's last flush cannot fail."""
    try:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (AttributeError, OSError, ValueError):
        return  # stdout is closed, or not a file


def exit_with_error(message: str) -> None:
    """Prints one line on stderr and exits with 1."""
    print(f"error: {message}", file=sys.stderr)
    sys.exit(1)
