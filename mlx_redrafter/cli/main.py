"""The console script `mlx_redrafter COMMAND`, and what every command has in common: one clear line on bad input."""

from __future__ import annotations

import logging
import os
import sys
import warnings
from importlib import import_module

from .. import __version__
from ..errors import one_line

PARENT = os.getppid()
"""Who started this process, before it can go: stdio ends with it, and importing MLX takes a second."""

COMMANDS = {
    "generate": ("mlx_redrafter.cli.generate", "generate text from a prompt"),
    "chat": ("mlx_redrafter.cli.chat", "hold a conversation in the terminal"),
    "convert": ("mlx_redrafter.convert.command", "convert a PyTorch drafter checkpoint, and quantize it"),
    "train": ("mlx_redrafter.training.command", "train a drafter for a model"),
    "doctor": ("mlx_redrafter.cli.doctor", "measure what drafting costs and brings on this machine"),
    "server": ("mlx_redrafter.serving.command", "serve the OpenAI API over HTTP"),
    "race": ("mlx_redrafter.serving.race", "a page that decodes with and without drafting, side by side"),
    "stdio": ("mlx_redrafter.cli.stdio", "sessions for another program, over lines of JSON"),
}
"""Name -> (the module whose `run()` is the command, what it does)."""

NO_BACKEND = (
    "MLX cannot run here: {error}. On Linux install a backend: pip install 'mlx_redrafter[cpu]' or "
    "pip install 'mlx_redrafter[cuda]' (in a clone of the repository: pip install -e '.[cpu]' or '.[cuda]')"
)


def main(command: str | None = None) -> None:
    """Runs a command on `sys.argv`, and exits with its status.

    Args:
        command: one of `COMMANDS`; None takes it from the first argument.
    """
    if command is None:
        command = sys.argv.pop(1) if len(sys.argv) > 1 else ""
    if command in ("-h", "--help"):
        listed = "\n".join(f"  {name:10}{text}" for name, (_, text) in COMMANDS.items())
        print(f"usage: mlx_redrafter COMMAND ...\n       mlx_redrafter --version\n\ncommands:\n{listed}\n")
        print("'mlx_redrafter COMMAND --help' lists a command's options.")
    elif command == "--version":
        print(__version__)
    elif command in COMMANDS:
        run_module(COMMANDS[command][0])
    else:
        wrong = f"expected a command, got {command!r}" if command else "expected a command"
        print(f"mlx_redrafter: error: {wrong}; see --help", file=sys.stderr)
        sys.exit(2)


def run_module(module: str) -> None:
    """Imports `module`, calls its `run()`, and exits with what that returns; errors become one line on stderr."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:  # closed by the parent process
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_RDWR), mode, encoding="utf-8"))
    warnings.formatwarning = lambda message, *place, **more: f"warning: {one_line(message)}\n"
    logging.getLogger("mlx_redrafter").setLevel(logging.INFO)
    if logging.lastResort is not None:  # what shows a log that a command has not set up
        logging.lastResort.setLevel(logging.INFO)
    try:
        import_module("mlx.core")
    except ImportError as error:
        exit_with_error(NO_BACKEND.format(error=one_line(error)))
    try:
        status = import_module(module).run()
        sys.stdout.flush()
    except KeyboardInterrupt:
        status = 130
    except BrokenPipeError:
        discard_stdout()
        status = 1
    except (ValueError, OSError) as error:
        discard_stdout()
        exit_with_error(one_line(error))
    sys.exit(status)


def discard_stdout() -> None:
    """Sends what is still buffered for stdout to the null device, so that Python's last flush cannot fail."""
    try:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (OSError, ValueError):
        return  # stdout is closed, or not a file


def exit_with_error(message: str) -> None:
    """Prints one line on stderr and exits with 1."""
    print(f"error: {message}", file=sys.stderr)
    sys.exit(1)
