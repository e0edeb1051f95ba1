"""What `server` does: flags, a port, models, and an orderly end."""

from __future__ import annotations

import argparse
import json
import logging
import re
import signal
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import NoReturn

import uvicorn
from starlette.types import ASGIApp

from ..checkpoints import check_demo_flags, load_pair
from ..errors import RedrafterError, one_line
from ..options import OPTION_FLAGS, Options, add_options
from .answer import Service
from .app import make_app
from .engine import Engine
from .metrics import Metrics

LOOPBACK = ("127.0.0.1", "localhost", "::1")
UNITS = {"": 1, "KB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}
OF_REQUESTS = ("seed", "min_tokens_to_keep", "xtc_probability", "xtc_threshold", "max_kv_size")
"""Options that are no flags here: a request has them, or nobody."""


class Parser(argparse.ArgumentParser):
    """A parser that reports a usage error in one line."""

    def error(self, message: str) -> NoReturn:
        """Exits with 2."""
        self.exit(2, f"{self.prog}: error: {message}; see --help\n")


def run() -> int:
    """Serves as `sys.argv` says until a signal; the exit status."""
    return serve(check_args(make_parser().parse_args()))


def make_parser() -> Parser:
    """The parser: flags and defaults of mlx-lm's server, and ours."""
    about = "Serve the OpenAI and Anthropic APIs, with speculative decoding; without --model the packaged demo."
    parser = Parser(prog="mlx_redrafter.server", description=about)
    add = parser.add_argument
    add("--model", help="local directory or Hugging Face repo of the target; the packaged demo if not given")
    add("--drafter", help="local directory or Hugging Face repo of its drafter; without one the context drafts")
    add("--no-drafter", action="store_true", help="no drafter, not even the demo's; the context still drafts")
    add("--adapter-path", help="path of trained adapter weights and config")
    add("--trust-remote-code", action="store_true", help="trust remote code for the tokenizer and the model")
    add("--chat-template", default="", help="a chat template instead of the tokenizer's")
    add("--chat-template-args", type=json.loads, default={}, help="JSON object of more arguments for it")
    group = parser.add_argument_group("decoding, where a request says nothing else")
    add_options(group, without=OF_REQUESTS)
    group.add_argument("--num-draft-tokens", type=int, dest="draft_depth", help="mlx-lm's name of --draft-depth")
    parser.set_defaults(max_tokens=512)  # as mlx-lm's server
    add = parser.add_argument_group("service").add_argument
    add("--host", default="127.0.0.1", help="where to listen; others than loopback need a key (default: %(default)s)")
    add("--port", type=int, default=8080, help="0 takes a free one (default: %(default)s)")
    add("--allowed-origins", type=lambda text: text.split(","), default=["*"],
        help="web pages that may ask, separated by commas (default: *, all)")  # fmt: skip
    add("--api-key", help="clients must send it; others on this machine may see it in the list of processes")
    add("--api-key-file", metavar="FILE", help="a file that holds the key")
    add("--decode-concurrency", type=int, default=32, help="most requests in a batch (default: %(default)s)")
    add("--prompt-cache-bytes", type=parse_size, default=1 << 30,
        help="memory for the prompts of earlier requests, as in 512MB or 2GB (default: 1GiB)")  # fmt: skip
    add("--max-queue", type=int, default=64, help="requests that may wait (default: %(default)s)")
    add("--max-per-client", type=int, default=32, help="requests of one address at once (default: %(default)s)")
    add("--max-request-bytes", type=int, default=8 << 20, help="length of a request's body (default: 8 MiB)")
    add("--max-prompt-tokens", type=int, help="length of a prompt (default: no limit)")
    add("--max-completion-tokens", type=int, help="length of an answer (default: no limit)")
    add("--drain-timeout", type=int, default=120,
        help="seconds for what runs to be finished after a first SIGINT or SIGTERM; what is not is broken off, with "
        "128 + the signal as exit status (default: %(default)s)")  # fmt: skip
    levels = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")
    add("--log-level", default="INFO", choices=levels, help="how much is logged (default: %(default)s)")
    return parser


def parse_size(text: str) -> int:
    """A number of bytes, with a unit or without."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)", text.strip())
    unit = UNITS.get(found[2].upper()) if found else None
    if found is None or unit is None:
        raise argparse.ArgumentTypeError(f"expected a number of bytes, as in 512MB or 2GB, got {text!r}")
    return int(float(found[1]) * unit)


def check_args(args: argparse.Namespace) -> argparse.Namespace:
    """The flags, checked before anything is loaded, with the decoding options in `options` and the key in `api_key`.

    Raises:
        RedrafterError: flags that do not go together, or out of their range.
    """
    if args.no_drafter and args.drafter is not None:
        raise RedrafterError("give either --drafter or --no-drafter, got both")
    check_demo_flags(args.model, args)
    if args.chat_template and args.model is None:
        raise RedrafterError("--chat-template needs --model: the packaged demo is taken as it is")
    for name in ("max_queue", "max_per_client", "max_request_bytes", "max_prompt_tokens", "max_completion_tokens",
                 "decode_concurrency", "drain_timeout", "max_tokens"):  # fmt: skip
        if (value := getattr(args, name)) is not None and value < 1:
            raise RedrafterError(f"--{name.replace('_', '-')} must be at least 1, got {value}")
    if not isinstance(args.chat_template_args, dict):
        raise RedrafterError(f"--chat-template-args must be a JSON object, got {args.chat_template_args!r:.50}")
    if not 0 <= args.port < 1 << 16:
        raise RedrafterError(f"--port must be from 0 to 65535, got {args.port}")
    args.api_key = read_key(args)
    if args.api_key is None and args.host not in LOOPBACK:
        raise RedrafterError(f"--host {args.host} lets others in: expected --api-key-file or --api-key, got none")
    names = [flag.name for flag in OPTION_FLAGS if flag.name not in OF_REQUESTS]
    args.options = Options(**{name: getattr(args, name) for name in names})
    args.options.plan_shape()
    return args


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


def bind(host: str, port: int) -> socket.socket:
    """A socket that holds the port; nobody is answered before the models are loaded.

    Raises:
        RedrafterError: nobody can listen there.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]  # fmt: skip
        bound = socket.socket(family, kind, protocol)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            bound.bind(address)
        except OSError:
            bound.close()
            raise
    except (OSError, OverflowError) as error:
        raise RedrafterError(f"cannot listen on {host}, port {port}: {one_line(error)}") from error
    return bound


def load_service(args: argparse.Namespace) -> Service:
    """The models of the flags, in an engine that has started.

    Raises:
        RedrafterError: a model cannot be loaded, or they do not fit together.
    """
    template = {"chat_template": args.chat_template} if args.chat_template else {}
    model, tokenizer, drafter = load_pair(args, args.model, args.drafter, template)
    engine = Engine(
        model,
        tokenizer,
        drafter,
        options=args.options,
        max_queue=args.max_queue,
        max_per_client=args.max_per_client,
        max_prompt_tokens=args.max_prompt_tokens,
        decode_concurrency=args.decode_concurrency,
        prompt_cache_bytes=args.prompt_cache_bytes,
    )
    engine.start()
    drafters = [] if drafter is None else names_of(args.drafter)
    return Service(engine, tokenizer, args, names_of(args.model), drafters, Metrics(engine))


def names_of(name: str | None) -> list[str]:
    """What clients may call a model: of a directory first its last name, and not where it is."""
    if name is None:
        return ["demo"]
    path = Path(name).expanduser()
    return [path.resolve().name, name, str(path.resolve())] if path.exists() else [name]


class Server(uvicorn.Server):
    """uvicorn's, which ends in order at the first signal, at once at the second, and when the engine is gone.

    Attributes:
        signal_number: the first signal, once there was one.
        end: when what runs is broken off, by `time.monotonic`.
    """

    signal_number = 0
    end = float("inf")

    def __init__(self, app: ASGIApp, service: Service) -> None:
        self._service = service
        config = uvicorn.Config(
            app,
            log_config=None,
            ws="none",
            lifespan="off",
            server_header=False,
            timeout_graceful_shutdown=service.args.drain_timeout,
            callback_notify=self._watch,
            timeout_notify=1,
        )
        super().__init__(config)

    async def _watch(self) -> None:
        self.should_exit |= not self._service.engine.alive

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Takes no more requests, and lets those that run or wait be finished."""
        logging.info("ending: what runs is finished; a second signal ends it at once")
        self.signal_number, self.should_exit = sig, True
        self.end = time.monotonic() + self._service.args.drain_timeout
        for each in (signal.SIGINT, signal.SIGTERM):
            signal.signal(each, signal.SIG_DFL)


def serve(
    args: argparse.Namespace,
    make: Callable[[Service], ASGIApp] = make_app,
    on_listening: Callable[[str], None] | None = None,
) -> int:
    """Serves until a signal; the exit status.

    Args:
        args: see `check_args`.
        make: makes the application.
        on_listening: called with the URL once connections are accepted.

    Raises:
        RedrafterError: the port is taken, the models cannot be loaded, or the engine died.
    """
    level = getattr(logging, args.log_level)
    logging.basicConfig(level=level, format="%(asctime)s - %(levelname)s - %(message)s")
    logging.captureWarnings(True)
    logging.getLogger("mlx_redrafter").setLevel(logging.NOTSET)  # as --log-level says
    logging.getLogger("uvicorn.error").setLevel(max(level, logging.WARNING))  # without its account of start and end
    with bind(args.host, args.port) as bound:
        service = load_service(args)
        server = Server(make(service), service)
        bound.listen(128)
        print(f"serving on {url_of(bound)}", file=sys.stderr, flush=True)
        if on_listening is not None:
            on_listening(url_of(bound))
        try:
            server.run([bound])
        finally:
            alive = service.engine.alive
            service.close(timeout=1.0)
    if not alive:
        raise RedrafterError("the thread that generates has died; see the log")
    return 128 + server.signal_number if time.monotonic() > server.end else 0


def url_of(bound: socket.socket) -> str:
    """Where it listens."""
    host, port = bound.getsockname()[:2]
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"
