"""What every command has in common: one clear line on bad input, and a clear line when MLX cannot run."""

from __future__ import annotations

import logging
import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from importlib import import_module
from pathlib import Path

from .errors import one_line

NO_BACKEND = (
    "MLX cannot run here: {error}. On Linux install a backend: "
    "pip install 'mlx_redrafter[cpu]' or pip install 'mlx_redrafter[cuda]'"
)


def guarded(module: str) -> None:
    """Imports `module` and calls its `run()`, whose result is the exit status; errors become one line on stderr."""
    with open_streams():
        try:
            with_backend()
            with plain_warnings(), own_log():
                status = import_module(module).run()
            sys.stdout.flush()
        except KeyboardInterrupt:
            sys.exit(130)
        except BrokenPipeError:
            silence()
            sys.exit(1)
        except (ValueError, OSError) as error:
            silence()
            fail(one_line(error))
        sys.exit(status)


@contextmanager
def open_streams() -> Iterator[None]:
    """Has the standard streams that the parent closed be nothing meanwhile: read as ended, and written to no end."""
    with ExitStack() as stack:
        for number, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
            try:
                os.fstat(number)
            except OSError:
                os.open(os.devnull, os.O_RDWR)  # takes the lowest number that is free, lest a file does
            if getattr(sys, name) is None:
                setattr(sys, name, stack.enter_context(Path(os.devnull).open(mode, encoding="utf-8")))
                stack.callback(setattr, sys, name, None)
        yield


def with_backend() -> None:
    """Fails where MLX cannot be imported."""
    try:
        import_module("mlx.core")
    except ImportError as error:
        fail(NO_BACKEND.format(error=one_line(error)))


@contextmanager
def plain_warnings() -> Iterator[None]:
    """Shows a warning as one line, without the place in the source that a user does not ask for."""
    before = warnings.formatwarning
    warnings.formatwarning = lambda message, *place, **more: f"warning: {one_line(message)}\n"
    try:
        yield
    finally:
        warnings.formatwarning = before


@contextmanager
def own_log() -> Iterator[None]:
    """Shows on stderr what the package logs, unless the command has set up a log of its own."""
    logger, handler = logging.getLogger(__package__), logging.StreamHandler()
    handler.addFilter(lambda record: not logging.root.handlers)
    before = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before)


def silence() -> None:
    """Sends what is still buffered for stdout nowhere, so that Python's own last flush cannot fail."""
    try:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (AttributeError, OSError, ValueError):
        return  # stdout is closed, or no file


def fail(message: str) -> None:
    """Says why on stderr and exits with 1."""
    print(f"error: {message}", file=sys.stderr)
    sys.exit(1)
