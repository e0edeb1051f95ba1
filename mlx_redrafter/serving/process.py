"""The server's process: a port, models, and an orderly end."""

from __future__ import annotations

import argparse
import asyncio
import logging
import signal
import socket
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any

import uvicorn
from starlette.types import ASGIApp

from .. import ranks
from ..answer_folder import open_answers
from ..checkpoints import find_drafter_name, load_pair
from ..errors import RedrafterError, one_line
from .app import make_app
from .completion import Service
from .engine import Engine
from .metrics import Metrics

LIMITS = ("max_queue", "max_per_client", "max_prompt_tokens", "context_length", "decode_concurrency",
          "prompt_cache_bytes")  # fmt: skip
"""Flags that an engine takes as they are."""

GRACE = 5
"""Seconds after the drain timeout for errors to reach the clients, before uvicorn cancels what is left."""


def bind(host: str, port: int) -> socket.socket:
    """A socket that listens; who connects while the models are loaded waits.

    Raises:
        RedrafterError: nobody can listen there.
    """
    try:
        return socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except (OSError, OverflowError) as error:
        raise RedrafterError(f"cannot listen on {host}, port {port}: {one_line(error)}") from error


def load_service(args: argparse.Namespace) -> Service:
    """What serves the models of the flags, with an engine that has started.

    Raises:
        RedrafterError: a model cannot be loaded, or they do not fit together.
    """
    template = {"chat_template": args.chat_template} if args.chat_template else {}
    model, tokenizer, drafter = load_pair(args, args.model, args.drafter, template)
    options = replace(args.options, answers=open_answers(args.answers, tokenizer))
    limits = {name: getattr(args, name) for name in LIMITS}
    engine = Engine(model, tokenizer, drafter, options=options, **limits)
    engine.start()
    drafter_name = None if drafter is None else show_name(find_drafter_name(args))
    return Service(engine, tokenizer, args, show_name(args.model), drafter_name, Metrics(engine))


def show_name(name: str | None) -> str:
    """What a model is shown as: of a directory its last name, and not where it is."""
    if name is None:
        return "demo"
    path = Path(name).expanduser()
    return path.resolve().name if path.exists() else name


class Server(uvicorn.Server):
    """uvicorn's, which lets answers be finished after the first signal; the second ends the process at once."""

    def __init__(self, app: ASGIApp, service: Service) -> None:
        self._engine, self._drain_timeout = service.engine, service.args.drain_timeout
        options: dict[str, Any] = {"log_config": None, "ws": "none", "lifespan": "off", "server_header": False}
        super().__init__(uvicorn.Config(app, timeout_graceful_shutdown=self._drain_timeout + GRACE, **options))

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Lets answers end; once the time for that is over, the engine's end is what clients are told."""
        loop = asyncio.get_running_loop()
        loop.call_later(self._drain_timeout, loop.run_in_executor, None, self._engine.close, 0.0)
        await super().shutdown(sockets)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Takes no more requests."""
        logging.info("ending: what runs is finished; a second signal ends it at once")
        if ranks.count() == 1:
            super().handle_exit(sig, frame)
        self.should_exit = True  # of several ranks none ends by the signal, but with the others
        for each in (signal.SIGINT, signal.SIGTERM):
            signal.signal(each, signal.SIG_DFL)


def serve(
    args: argparse.Namespace,
    make: Callable[[Service], ASGIApp] = make_app,
    on_listening: Callable[[str], None] | None = None,
) -> int:
    """Serves until a signal, which ends the process where answers are finished; of several ranks the first one does.

    Args:
        args: see `command.check_args`.
        make: makes the application.
        on_listening: called with the URL once connections are accepted.

    Raises:
        RedrafterError: the port is taken, or the models cannot be loaded.
    """
    if ranks.index():
        engine = load_service(args).engine
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all on a machine, and rank 0 ends the others
        engine.join()
        return 0
    # Python's own handler raises, and an interpreter that ends while the engine's thread is inside MLX aborts.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    level = getattr(logging, args.log_level)
    logging.basicConfig(level=level, format="%(asctime)s - %(levelname)s - %(message)s")
    logging.captureWarnings(True)
    logging.getLogger("mlx_redrafter").setLevel(logging.NOTSET)  # as --log-level says
    logging.getLogger("uvicorn.error").setLevel(max(level, logging.WARNING))  # without its account of start and end
    with bind(args.host, args.port) as bound:
        service = load_service(args)
        server = Server(make(service), service)
        print(f"serving on {url_of(bound)}", file=sys.stderr, flush=True)
        if on_listening is not None:
            on_listening(url_of(bound))
        server.run([bound])
        if ranks.count() > 1:
            service.engine.close(0.0)
    return 0


def url_of(bound: socket.socket) -> str:
    """Where it listens."""
    host, port = bound.getsockname()[:2]
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"
