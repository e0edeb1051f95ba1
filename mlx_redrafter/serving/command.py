"""The command `server` and its flags, which need nothing of the `server` extra."""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path
from typing import Any

from .. import ranks
from ..answer_folder import ANSWERS_HELP
from ..checkpoints import DRAFTER_HELP, DTYPE_HELP, DTYPES, check_demo_flags
from ..errors import Parser, RedrafterError
from ..options import FLAGS, Options, add_options

LOOPBACK = ("127.0.0.1", "localhost", "::1")

UNITS = {"": 1, "KB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}
OF_REQUESTS = ("seed", "min_tokens_to_keep", "xtc_probability", "xtc_threshold", "max_kv_size")
"""Options without a flag here: only requests set them, or nothing does."""


def run() -> int:
    """Serves until a signal; returns the exit status."""
    args = check_args(make_parser().parse_args())
    from .process import serve  # which a --help does not need

    return serve(args)


def make_parser() -> Parser:
    """The parser: the flags and defaults of mlx-lm's server, and ours."""
    about = "Serve the OpenAI and Anthropic APIs, with speculative decoding; without --model the packaged demo."
    parser = Parser(prog="mlx_redrafter.server", description=about)
    add = parser.add_argument
    add("--model", help="local directory or Hugging Face repo of the target; the packaged demo if not given")
    drafters = parser.add_mutually_exclusive_group().add_argument
    drafters("--drafter", help=f"{DRAFTER_HELP}; without one the context drafts")
    drafters("--draft-model", help="a smaller model with the same tokenizer instead, as in mlx-lm")
    drafters("--no-drafter", action="store_true", help="no drafter, not even the demo's; the context still drafts")
    add("--adapter-path", help="path of trained adapter weights and config")
    add("--pipeline", action="store_true", help="on several ranks: some layers for each, not a part of every layer")
    add("--trust-remote-code", action="store_true", help="trust remote code for the tokenizer and the model")
    add("--dtype", dest="model_dtype", choices=DTYPES, help=DTYPE_HELP)
    add("--served-model-name", nargs="+", metavar="NAME",
        help="names of the model in requests, * for any; the first is in replies (default: its own)")  # fmt: skip
    add("--chat-template", help="a chat template instead of the tokenizer's")
    add("--use-default-chat-template", action="store_true", help="the tokenizer's default template where it has none")
    add("--chat-template-args", type=json_object, default={}, help="JSON object of more arguments for it")
    group = parser.add_argument_group("decoding, where a request says nothing else")
    add_options(group, without=(*OF_REQUESTS, "max_tokens"))
    group.add_argument("--max-tokens", "-m", type=int, default=-1,
        help="tokens of an answer (default: -1, as many as the prompt leaves of the context)")  # fmt: skip
    group.add_argument("--num-draft-tokens", type=int, dest="draft_depth", help="mlx-lm's name of --draft-depth")
    add = parser.add_argument_group("service").add_argument
    add("--host", default="127.0.0.1", help="where to listen; others than loopback need a key (default: %(default)s)")
    add("--port", type=int, default=8080, help="0 takes a free one (default: %(default)s)")
    add("--allowed-origins", type=lambda text: [each.strip() for each in text.split(",")], default=["*"],
        help="web pages that may ask, separated by commas (default: *, all; of a race only its own)")  # fmt: skip
    keys = parser.add_mutually_exclusive_group().add_argument
    keys("--api-key", help="clients must send it; others on this machine may see it in the list of processes")
    keys("--api-key-file", metavar="FILE", dest="api_key", type=read_key, help="a file that holds the key")
    add("--decode-concurrency", type=parse_count, default=32, help="most requests in a batch (default: %(default)s)")
    add("--prompt-cache-bytes", type=parse_size,
        help="memory for the prompts of earlier requests, as in 512MB or 2GB; 0 keeps none, else one is always kept "
             "(default: half of what the weights leave of the memory, at least 1GiB)")  # fmt: skip
    add("--prompt-cache-dir", metavar="DIR",
        help="keep as much of them in this folder, to find them after a restart; it holds conversations")  # fmt: skip
    add("--max-queue", type=parse_count, default=64, help="requests that may wait (default: %(default)s)")
    add("--max-per-client", type=parse_count, default=32, help="requests of one address at once (default: %(default)s)")
    add("--max-request-bytes", type=parse_size, default=32 << 20, help="length of a request's body (default: 32MiB)")
    add("--context-length", type=parse_count, metavar="TOKENS",
        help="of a prompt and its answer together (default: what the model's config says, or no limit)")  # fmt: skip
    add("--max-prompt-tokens", type=parse_count, help="length of a prompt (default: no limit)")
    add("--max-completion-tokens", type=parse_count, help="length of an answer (default: no limit)")
    add("--answers", metavar="DIR", help=f"{ANSWERS_HELP}; of one user: what is drafted shows in the timing")
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
    """A number of bytes, with or without a unit."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)", text.strip())
    unit = UNITS.get(found[2].upper()) if found else None
    if found is None or unit is None:
        raise argparse.ArgumentTypeError(f"expected a number of bytes, as in 512MB or 2GB, got {text!r}")
    return int(float(found[1]) * unit)


def json_object(text: str) -> dict[str, Any]:
    """A JSON object."""
    return dict(json.loads(text))


def read_key(name: str) -> str:
    """The key in a file, which only rank 0 needs."""
    if ranks.index():
        return "none"
    return Path(name).expanduser().read_text(encoding="utf-8")


def check_args(args: argparse.Namespace) -> argparse.Namespace:
    """Checks the flags before anything is loaded, and adds the decoding options as `options`.

    Raises:
        RedrafterError: flags that exclude each other, or out of range.
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
    if args.prompt_cache_dir is not None and ranks.count() > 1:
        raise RedrafterError(f"--prompt-cache-dir needs a process of its own, got {ranks.count()} ranks")
    if args.answers is not None and args.host not in LOOPBACK:
        raise RedrafterError(
            f"--answers is for one user, whose answers others could tell from how fast theirs come; expected a --host "
            f"of {', '.join(LOOPBACK)}, got {args.host}"
        )
    names = [name for name in FLAGS if name not in OF_REQUESTS]
    args.options = Options(**{name: getattr(args, name) for name in names})
    return args
