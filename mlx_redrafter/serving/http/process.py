"""The server process: socket, models, shutdown."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import sys
from collections.abc import Callable
from inspect import getfullargspec
from types import FrameType

import uvicorn
from starlette.types import ASGIApp

from ...engine.plan import OFF
from ...errors import RedrafterError, join_lines
from ...loading.checkpoints import strip_folders
from ...loading.named_models import load_models
from ..formats.completion import Service
from ..scheduling.worker import Worker, takes_requests
from ..server_args import ServerArgs
from .app import make_app

CANCEL_DELAY_SECONDS = 5
"""Seconds after the drain timeout in which errors can reach clients, before uvicorn cancels the
rest.
"""

KEEP_ALIVE_SECONDS = 120
"""How long an idle connection stays open: agents pause between requests, and do not send the next
one again if it is lost because the connection is just being closed."""


def bind(host: str, port: int) -> socket.socket:
    """A listening socket.

    Clients that connect before the models are loaded have to wait.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family)
    except (OSError, OverflowError) as error:
        raise RedrafterError(
            f"cannot listen on {host}, port {port}: {join_lines(error)}"
        ) from error


def load_service(args: ServerArgs) -> Service:
    """Loads the models, and starts a worker."""
    template = {"chat_template": args.chat_template} if args.chat_template else {}
    hints = args.log_level in ("DEBUG", "INFO") and args.options.plan != OFF
    loaded = load_models(args.models, template, hints=hints)
    names = getfullargspec(Worker).kwonlyargs
    worker = Worker(*loaded[:3], **{name: getattr(args, name) for name in names})
    worker.start()
    drafter_name = loaded.drafter_name and strip_folders(loaded.drafter_name)
    name = strip_folders(args.models.model or "demo")
    return Service(worker, loaded.tokenizer, args, name, drafter_name)


class GracefulServer(uvicorn.Server):
    """uvicorn's server.

    It finishes answers after the first signal; a second one ends the process at once.
    """

    def __init__(self, app: ASGIApp, service: Service) -> None:
        self._worker = service.worker
        self._drain_timeout = service.args.drain_timeout
        config = uvicorn.Config(
            app,
            log_config=None,
            ws="none",
            lifespan="off",
            server_header=False,
            timeout_keep_alive=KEEP_ALIVE_SECONDS,
            timeout_graceful_shutdown=self._drain_timeout + CANCEL_DELAY_SECONDS,
        )
        super().__init__(config)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Finishes answers, for at most the drain timeout, then closes the worker.

        Clients of the rest get an error.
        """
        loop = asyncio.get_running_loop()
        loop.call_later(self._drain_timeout, loop.run_in_executor, None, self._worker.close, 0.0)
        await super().shutdown(sockets)
        # It saves prompt caches and ends other ranks. After this the signal ends the process.
        await loop.run_in_executor(None, self._worker.close, CANCEL_DELAY_SECONDS)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Stops accepting requests."""
        logging.info(
            "Shutting down after open requests are finished; a second signal exits at once"
        )
        if not self._worker.is_shared:
            super().handle_exit(sig, frame)
        self.should_exit = True  # several ranks end together, without the signal
        for each in (signal.SIGINT, signal.SIGTERM):
            signal.signal(each, signal.SIG_DFL)


def serve(
    args: ServerArgs,
    make: Callable[[Service], ASGIApp] = make_app,
    on_listening: Callable[[str], None] | None = None,
) -> int:
    """Serves until a signal, and returns the exit status. Of several ranks only rank 0 listens.

    Args:
        make: makes the application.
        on_listening: called with the URL once the models are loaded.
    """
    if not takes_requests():
        worker = load_service(args).worker
        # Ctrl-C reaches all ranks of a machine; rank 0 stops the others.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        worker.join()
        return 0
    # Python's own handler raises, and exiting the interpreter while the worker's thread is inside
    # MLX aborts.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    level = getattr(logging, args.log_level)
    logging.basicConfig(level=level, format="%(asctime)s - %(levelname)s - %(message)s")
    logging.captureWarnings(True)
    logging.getLogger("mlx_redrafter").setLevel(logging.NOTSET)  # leave it to --log-level
    # Without uvicorn's start and shutdown messages, and the requests to the hub.
    for name in ("uvicorn.error", "httpx", "httpx2"):
        logging.getLogger(name).setLevel(max(level, logging.WARNING))
    with bind(args.host, args.port) as bound:
        service = load_service(args)
        server = GracefulServer(make(service), service)
        print(f"serving on {format_url(bound)}", file=sys.stderr, flush=True)
        if on_listening is not None:
            on_listening(format_url(bound))
        server.run([bound])
    return 0


def format_url(bound: socket.socket) -> str:
    """The URL of a listening socket."""
    host, port = bound.getsockname()[:2]
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"
