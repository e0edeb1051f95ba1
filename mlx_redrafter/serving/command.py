"""What `server` does: flags, a port, models, and an orderly end."""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import re
import signal
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import uvicorn
from starlette.types import ASGIApp

from ..checkpoints import check_demo_flags, load_pair
from ..errors import Parser, RedrafterError, one_line
from ..options import OPTION_FLAGS, Options, add_options
from .answer import Service
from .app import LOOPBACK, make_app
from .engine import Engine
from .metrics import Metrics

UNITS = {"": 1, "KB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}
GRACE = 5
"""Seconds after the drain timeout for errors to reach the clients, before uvicorn cancels what is left."""

OF_REQUESTS = ("seed", "min_tokens_to_keep", "xtc_probability", "xtc_threshold", "max_kv_size")
"""Options that are no flags here: a request has them, or nobody."""


def run() -> int:
    """Serves as `sys.argv` says until a signal; the exit status."""
    return serve(check_args(make_parser().parse_args()))


def make_parser() -> Parser:
    """The parser: flags and defaults of mlx-lm's server, and ours."""
    about = "Serve the OpenAI and Anthropic APIs, with speculative decoding; without --model the packaged demo."
    parser = Parser(prog="mlx_redrafter.server", description=about)
    add = parser.add_argument
    add("--model", help="local directory or Hugging Face repo of the target; the packaged demo if not given")
    drafters = parser.add_mutually_exclusive_group().add_argument
    drafters("--drafter", help="local directory or Hugging Face repo of its drafter; without one the context drafts")
    drafters("--no-drafter", action="store_true", help="no drafter, not even the demo's; the context still drafts")
    add("--adapter-path", help="path of trained adapter weights and config")
    add("--trust-remote-code", action="store_true", help="trust remote code for the tokenizer and the model")
    add("--chat-template", help="a chat template instead of the tokenizer's")
    add("--chat-template-args", type=json_object, default={}, help="JSON object of more arguments for it")
    group = parser.add_argument_group("decoding, where a request says nothing else")
    add_options(group, without=OF_REQUESTS)
    group.add_argument("--num-draft-tokens", type=int, dest="draft_depth", help="mlx-lm's name of --draft-depth")
    parser.set_defaults(max_tokens=512)  # as mlx-lm's server
    add = parser.add_argument_group("service").add_argument
    add("--host", default="127.0.0.1", help="where to listen; others than loopback need a key (default: %(default)s)")
    add("--port", type=int, default=8080, help="0 takes a free one (default: %(default)s)")
    add("--allowed-origins", type=lambda text: [each.strip() for each in text.split(",")], default=["*"],
        help="web pages that may ask, separated by commas (default: *, all; of a race only its own)")  # fmt: skip
    keys = parser.add_mutually_exclusive_group().add_argument
    keys("--api-key", help="clients must send it; others on this machine may see it in the list of processes")
    keys("--api-key-file", metavar="FILE", dest="api_key", type=read_key, help="a file that holds the key")
    add("--decode-concurrency", type=parse_count, default=32, help="most requests in a batch (default: %(default)s)")
    add("--prompt-cache-bytes", type=parse_size, default=1 << 30,
        help="memory for the prompts of earlier requests, as in 512MB or 2GB (default: 1GiB)")  # fmt: skip
    add("--max-queue", type=parse_count, default=64, help="requests that may wait (default: %(default)s)")
    add("--max-per-client", type=parse_count, default=32, help="requests of one address at once (default: %(default)s)")
    add("--max-request-bytes", type=parse_size, default=8 << 20, help="length of a request's body (default: 8MiB)")
    add("--max-prompt-tokens", type=parse_count, help="length of a prompt (default: no limit)")
    add("--max-completion-tokens", type=parse_count, help="length of an answer (default: no limit)")
    add("--drain-timeout", type=parse_count, default=120,
        help="seconds for what runs to be finished after a first SIGINT or SIGTERM (default: %(default)s)")  # fmt: skip
    levels = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")
    add("--log-level", default="INFO", choices=levels, help="how much is logged (default: %(default)s)")
    return parser


def parse_count(text: str) -> int:
    """An integer of at least 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be an integer of at least 1, got {text!r}")
    return int(text)


def parse_size(text: str) -> int:
    """A number of bytes, with a unit or without."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)", text.strip())
    unit = UNITS.get(found[2].upper()) if found else None
    if found is None or unit is None:
        raise argparse.ArgumentTypeError(f"expected a number of bytes, as in 512MB or 2GB, got {text!r}")
    return int(float(found[1]) * unit)


def json_object(text: str) -> dict[str, Any]:
    """What the text says."""
    return dict(json.loads(text))


def read_key(name: str) -> str:
    """The key in a file."""
    return Path(name).expanduser().read_text(encoding="utf-8")


def check_args(args: argparse.Namespace) -> argparse.Namespace:
    """The flags, checked before anything is loaded, with the decoding options in `options`.

    Raises:
        RedrafterError: flags that do not go together, or out of their range.
    """
    check_demo_flags(args.model, args)
    if args.chat_template and args.model is None:
        raise RedrafterError("--chat-template needs --model: the packaged demo is taken as it is")
    if args.max_tokens == 0:
        raise RedrafterError("--max-tokens must be -1 (no limit) or at least 1, got 0")
    if args.api_key is not None:
        args.api_key = args.api_key.strip()  # as what a client sends is
        if not (args.api_key and args.api_key.isascii() and args.api_key.isprintable()):
            raise RedrafterError("the key must be printable ASCII, and not empty")
    elif args.host not in LOOPBACK:
        raise RedrafterError(f"--host {args.host} lets others in: expected --api-key-file or --api-key, got none")
    names = [flag.name for flag in OPTION_FLAGS if flag.name not in OF_REQUESTS]
    args.options = Options(**{name: getattr(args, name) for name in names})
    args.options.plan_shape()
    return args


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
    drafter_name = None if drafter is None else show_name(args.drafter)
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
        super().handle_exit(sig, frame)
        for each in (signal.SIGINT, signal.SIGTERM):
            signal.signal(each, signal.SIG_DFL)


def serve(
    args: argparse.Namespace,
    make: Callable[[Service], ASGIApp] = make_app,
    on_listening: Callable[[str], None] | None = None,
) -> int:
    """Serves until a signal, which ends the process where answers are finished.

    Args:
        args: see `check_args`.
        make: makes the application.
        on_listening: called with the URL once connections are accepted.

    Raises:
        RedrafterError: the port is taken, or the models cannot be loaded.
    """
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
    return 0


def url_of(bound: socket.socket) -> str:
    """Where it listens."""
    host, port = bound.getsockname()[:2]
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"
