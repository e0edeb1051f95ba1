"""The `server` command and its flags, which need no package of the `server` extra."""

from __future__ import annotations

import argparse
import re
from dataclasses import fields
from pathlib import Path

from ..decoding.options import Options
from ..errors import RedrafterError
from ..serving.server_args import ServerArgs
from .arguments import (
    get_flags,
    is_first_rank,
    make_text_parser,
    read_model_args,
    read_options,
    require_single_process,
)
from .parser import Parser

LOOPBACK = ("127.0.0.1", "localhost", "::1")

REQUEST_OPTIONS = ("seed", "min_tokens_to_keep", "xtc_probability", "xtc_threshold", "max_kv_size")
"""Options without a flag here: requests set them, or they keep their defaults."""

PREFILL_STEP_SIZE = 512
"""Prompt tokens between two rounds of the running answers; a prompt that arrives waits for as many.
"""


def run() -> int:
    """Serves until a signal; returns the exit status."""
    args = read_server_args(make_parser().parse_args())
    from ..serving.http.process import serve  # not needed for --help

    return serve(args)


def make_parser() -> Parser:
    """The parser, with the flags and defaults of mlx-lm's server and more."""
    about = (
        "Serve the OpenAI and Anthropic APIs with speculative decoding; without --model, serve the "
        "packaged demo."
    )
    parser = make_text_parser("server", about, without=REQUEST_OPTIONS)
    parser.set_defaults(max_tokens=-1, prefill_step_size=PREFILL_STEP_SIZE)
    add = parser.add_argument
    add(
        "--served-model-name",
        nargs="+",
        metavar="NAME",
        help="names that requests may use, * for any; replies use the first (default: the model's "
        "own)",
    )
    add("--chat-template", help="chat template to use instead of the tokenizer's")
    add(
        "--use-default-chat-template",
        action="store_true",
        help="the tokenizer's default template if it has no other",
    )
    add(
        "--host",
        default="127.0.0.1",
        help="address to listen on; needs a key unless loopback (default: %(default)s)",
    )
    add(
        "--port",
        type=int,
        default=8080,
        help="port to listen on; 0 picks a free one (default: %(default)s)",
    )
    add(
        "--allowed-origins",
        type=lambda text: [each.strip() for each in text.split(",")],
        default=[],
        help="comma-separated origins of pages that may send requests, or * (default: local ones, "
        "apps)",
    )
    keys = parser.add_mutually_exclusive_group().add_argument
    keys(
        "--api-key",
        help="key that clients must send; other users may see it in the list of processes",
    )
    keys(
        "--api-key-file",
        metavar="FILE",
        dest="api_key",
        type=read_key,
        help="file that holds the key",
    )
    add(
        "--decode-concurrency",
        type=int,
        default=32,
        help="maximum requests in a batch (default: %(default)s)",
    )
    add(
        "--prompt-cache-bytes",
        type=parse_size,
        help="memory for the KV caches of earlier requests, such as 512MB or 2GB; 0 keeps none, "
        "otherwise the newest is always kept (default: half of the memory that the weights leave, "
        "at least 1GiB)",
    )
    add(
        "--prompt-cache-dir",
        metavar="DIR",
        help="folder for saving these caches until the next start, up to as many bytes; they "
        "contain conversations",
    )
    add(
        "--context-length",
        type=int,
        metavar="TOKENS",
        help="maximum tokens of prompt plus answer (default: from the model's config, or no limit)",
    )
    add(
        "--drain-timeout",
        type=int,
        default=120,
        help="seconds to finish requests after the first SIGINT or SIGTERM (default: %(default)s)",
    )
    levels = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")
    add("--log-level", default="INFO", choices=levels, help="logging level (default: %(default)s)")
    return parser


def parse_size(text: str) -> int:
    """A number of bytes from a text with an optional unit."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(?:([KMGT])(I?)B)?", text.strip().upper())
    if match is None:
        raise argparse.ArgumentTypeError(
            f"expected a number of bytes, such as 512MB or 2GB, got {text!r}"
        )
    base = 1024 if match[3] else 1000
    power = " KMGT".index(match[2]) if match[2] else 0
    return int(float(match[1]) * base**power)


def read_key(name: str) -> str:
    """The key in a file; on ranks other than 0, which do not need it, a placeholder."""
    if not is_first_rank():
        return "none"
    return Path(name).expanduser().read_text(encoding="utf-8")


def read_server_args(args: argparse.Namespace) -> ServerArgs:
    """The settings that flags give, checked before anything is loaded."""
    if args.chat_template and args.model is None:
        raise RedrafterError("--chat-template needs --model: the packaged demo takes no template")
    if args.api_key is not None:
        args.api_key = args.api_key.strip()  # as it is in clients' headers
        if not args.api_key:
            raise RedrafterError("the key must not be empty")
    elif args.host not in LOOPBACK:
        raise RedrafterError(
            f"--host {args.host} needs a key: expected --api-key-file or --api-key, got neither"
        )
    require_single_process(args, "prompt_cache_dir")
    options = Options(**read_options(args))
    flags = get_flags(args, [each.name for each in fields(ServerArgs)])
    return ServerArgs(models=read_model_args(args), options=options, **flags)
