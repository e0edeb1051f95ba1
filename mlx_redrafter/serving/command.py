"""What `server` does: flags, models, a socket, and an orderly end."""

from __future__ import annotations

import argparse
import logging
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import ThreadingHTTPServer
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

import mlx.core as mx
from mlx_lm.server import get_system_fingerprint
from mlx_lm.utils import maybe_set_recommended_wired_limit

from ..checkpoints import check_demo_flags
from ..demo import DIRECTORY
from ..engine.plan import MAX_DRAFT_DEPTH
from ..errors import RedrafterError, one_line
from .answers import Responder
from .asking import check_flags
from .flags import read_flags
from .handler import Handler
from .jobs import DEFAULT
from .prompts import Prompts
from .provider import PLAIN, Provider, local

LOOPBACK = ("127.0.0.1", "localhost", "::1")
ENDS = (signal.SIGINT, signal.SIGTERM)
"""What tells the server to end."""

WATCH = 1.0
"""Seconds between looks at whether the generation thread lives."""


class Server(ThreadingHTTPServer):
    """Python's, which knows how many requests it is busy with.

    Args:
        host, port: where to listen; port 0 takes a free one.
        responder: answers.
        kind: of handler.

    Raises:
        RedrafterError: nobody can listen there.
    """

    request_queue_size = 128
    daemon_threads = True

    def __init__(self, host: str, port: int, responder: Responder, kind: type[Handler] = Handler) -> None:
        fingerprint = get_system_fingerprint()

        def handler(*args: Any, **more: Any) -> Handler:
            """A request's handler, told of the responder."""
            return kind(responder, *args, system_fingerprint=fingerprint, **more)

        self.responder = responder
        self._busy = 0
        self._idle = threading.Condition()
        try:
            found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
            self.address_family, _, _, _, address = found[0]
            super().__init__(address[:2], handler)  # type: ignore[arg-type]
        except (OSError, OverflowError) as error:
            raise RedrafterError(f"cannot listen on {host}, port {port}: {one_line(error)}") from error

    @contextmanager
    def busy(self) -> Iterator[None]:
        """Counts a request that has been read, for as long as it is being answered."""
        with self._idle:
            self._busy += 1
        try:
            yield
        finally:
            with self._idle:
                self._busy -= 1
                self._idle.notify_all()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Into the log; that a client has gone is no error."""
        error = sys.exc_info()[1]
        if isinstance(error, (ConnectionError, TimeoutError)):
            logging.info(f"A client has gone: {error}")
        else:
            logging.exception("A request has failed")

    def wait_idle(self, timeout: float) -> bool:
        """Whether nothing is being answered, after waiting for that."""
        with self._idle:
            return self._idle.wait_for(lambda: not self._busy, timeout)

    @property
    def url(self) -> str:
        """Where it listens."""
        host, port = self.server_address[:2]
        name = host.decode() if isinstance(host, bytes) else str(host)
        return f"http://{f'[{name}]' if ':' in name else name}:{port}"


def run() -> int:
    """Serves as `sys.argv` says until it is told to end; the exit status."""
    return serve(checked(read_flags()))


def serve(
    args: argparse.Namespace, kind: type[Handler] = Handler, listening: Callable[[str], None] | None = None
) -> int:
    """Serves until it is told to end; the exit status.

    Args:
        args: see `checked`.
        kind: of handler.
        listening: called with the URL once requests are answered.
    """
    logging.basicConfig(
        level=getattr(logging, args.log_level.upper(), None), format="%(asctime)s - %(levelname)s - %(message)s"
    )
    logging.captureWarnings(True)
    logging.getLogger("mlx_redrafter").setLevel(logging.NOTSET)  # as --log-level says
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # while models are loaded there is nothing to finish
    # Once for all: of answers in turns, the first to end would else set back what the others rely on.
    maybe_set_recommended_wired_limit()
    signals: SimpleQueue[int] = SimpleQueue()
    with serving(args, kind) as server:
        for number in ENDS:
            signal.signal(number, lambda number, frame: heard(number, signals))
        print(f"serving on {server.url}", file=sys.stderr, flush=True)
        if listening is not None:
            listening(server.url)
        return attend(server, signals)


def heard(number: int, signals: SimpleQueue[int]) -> None:
    """Passes the first signal on; a second one ends the process at once, whatever its threads are doing."""
    for each in ENDS:
        signal.signal(each, signal.SIG_DFL)
    signals.put(number)


@contextmanager
def serving(args: argparse.Namespace, kind: type[Handler] = Handler) -> Iterator[Server]:
    """A server that answers, in threads of its own, once its models are loaded; it is gone at the end.

    Args:
        args: see `checked`.
        kind: of handler.

    Raises:
        RedrafterError: a model cannot be loaded, or nobody can listen there.
    """
    most = {} if args.prompt_cache_bytes is None else {"max_bytes": args.prompt_cache_bytes}
    provider = Provider(args)
    responder = Responder(provider, Prompts(args.prompt_cache_size, **most))
    try:
        try:
            provider.loaded.result()
        except RedrafterError:
            raise
        except Exception as error:  # whatever a damaged directory makes mlx-lm say
            raise RedrafterError(f"cannot load {args.model}: {one_line(error)}") from error
        with Server(args.host, args.port, responder, kind) as server:
            thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
            thread.start()
            try:
                yield server
            finally:
                server.shutdown()
                thread.join()
    finally:
        responder.stop_and_join()


def attend(server: Server, signals: SimpleQueue[int]) -> int:
    """Waits for a signal, lets what runs end, and gives the exit status; where that takes longer than it may, clients
    are told.

    Raises:
        RedrafterError: there is nothing that could answer any more.
    """
    responder = server.responder
    while not (first := received(signals)):
        if not responder.generation_available():
            raise RedrafterError("the thread that generates has died; see the log")
    logging.info("Ending: what runs is finished, what waits is refused; a second signal ends it at once")
    responder.drain()
    until = time.monotonic() + responder.cli_args.drain_timeout
    while not server.wait_idle(WATCH / 4):
        if time.monotonic() > until:
            logging.warning("Ending before all is finished: --drain-timeout is over")
            responder.break_off()
            server.wait_idle(WATCH)
            return 128 + first
    return 0


def received(signals: SimpleQueue[int]) -> int:
    """A signal's number, or 0 if none came in a while."""
    try:
        return signals.get(timeout=WATCH)
    except Empty:
        return 0


def checked(args: argparse.Namespace) -> argparse.Namespace:
    """The flags, with the demo where there is no model, the drafters by name, and the key.

    Raises:
        RedrafterError: flags that do not go together, or out of their range.
    """
    if args.draft_model is not None:
        raise RedrafterError("--draft-model is not served: expected --drafter, or mlx_lm.server for two whole models")
    if args.pipeline or mx.distributed.init().size() > 1:
        raise RedrafterError("several processes are not served: expected one, without --pipeline")
    if args.no_drafter and args.drafter:
        raise RedrafterError("give either --drafter or --no-drafter, got both")
    check_demo_flags(args.model, args)
    low = ("max_queue", "max_request_bytes", "max_prompt_tokens", "max_completion_tokens", "max_tree_size",
           "decode_concurrency", "prompt_cache_size", "prefill_step_size", "max_tokens", "beam_width",
           "drain_timeout")  # fmt: skip
    for name in low:
        if (value := getattr(args, name)) is not None and value < 1:
            raise RedrafterError(f"--{name.replace('_', '-')} must be at least 1, got {value}")
    if not 0 <= args.port < 1 << 16:
        raise RedrafterError(f"--port must be from 0 to 65535, got {args.port}")
    args.api_key = read_key(args)
    if args.api_key is None and args.host not in LOOPBACK:
        raise RedrafterError(f"--host {args.host} lets others in: expected --api-key-file or --api-key, got none")
    if args.max_completion_tokens is not None:
        args.max_tokens = min(args.max_tokens, args.max_completion_tokens)
    if not isinstance(args.chat_template_args, dict):
        raise RedrafterError(f"--chat-template-args must be a JSON object, got {args.chat_template_args!r:.50}")
    args.drafters = read_drafters(args)
    depth, args.num_draft_tokens = args.num_draft_tokens, 0
    if depth is not None and not 0 <= depth <= MAX_DRAFT_DEPTH:
        raise RedrafterError(f"--num-draft-tokens must be from 0 to {MAX_DRAFT_DEPTH}, got {depth}")
    if depth is not None and args.draft_depth is None:
        args.draft_depth, args.drafters = (depth, args.drafters) if depth else (None, {})
    check_flags(args)
    args.model = local(DIRECTORY / "target" if args.model is None else args.model)
    return args


def read_drafters(args: argparse.Namespace) -> dict[str, str]:
    """Paths by name, of `[NAME=]PATH`; the demo's where there is no model.

    Raises:
        RedrafterError: two have one name, or one has none.
    """
    if args.no_drafter:
        return {}
    if args.model is None and not args.drafter:
        return {"demo": str(DIRECTORY / "drafter")}
    found: dict[str, str] = {}
    for given in args.drafter or ():
        name, equals, path = given.partition("=")
        if not equals:
            name, path = Path(given).name or given, given
        if not name or not path or name in found or name in (PLAIN, DEFAULT):
            raise RedrafterError(f"--drafter must be [NAME=]PATH with a name of its own, got {given!r}")
        found[name] = path
    return found


def read_key(args: argparse.Namespace) -> str | None:
    """The key that clients must send, if any.

    Raises:
        RedrafterError: it cannot be read, or is empty.
    """
    key: str | None = args.api_key
    if args.api_key_file is not None:
        if key is not None:
            raise RedrafterError("give either --api-key or --api-key-file, got both")
        try:
            key = Path(args.api_key_file).expanduser().read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError, RuntimeError) as error:
            raise RedrafterError(f"cannot read the key in {args.api_key_file}: {one_line(error)}") from error
    key = None if key is None else key.strip()  # as what a client sends is
    if key is not None and not (key and key.isascii() and key.isprintable()):
        raise RedrafterError("the key must be printable ASCII, and not empty")
    return key
