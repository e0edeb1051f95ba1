"""The flags of the server: all of mlx-lm's, and ours."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from types import MappingProxyType, SimpleNamespace
from typing import Any

from mlx_lm import server

from ..errors import RedrafterError
from ..options import OPTION_FLAGS, PLAN_OPTIONS, add_options

CONCURRENCY = 4
"""Answers in turns when --decode-concurrency is not given: turns share nothing but the device."""


class Parsed(Exception):
    """Carries the arguments out of mlx-lm's `main` before it does anything with them."""


class Parser(argparse.ArgumentParser):
    """What mlx-lm's `main` is given to put its flags in.

    Attributes:
        argv: what is parsed; None for `sys.argv`.
        changed: of flags that mlx-lm adds, by name, what is another here.
    """

    argv: Sequence[str] | None = None
    changed: Mapping[str, Mapping[str, Any]] = MappingProxyType({})

    def add_argument(self, *names: Any, **more: Any) -> argparse.Action:
        """Adds a flag; what its type cannot read is told in argparse's way, whatever the type raises."""
        more |= self.changed.get(names[0], {})
        if kind := more.get("type"):
            more["type"] = reader(kind)
        return super().add_argument(*names, **more)

    def parse_args(self, *args: Any, **more: Any) -> Any:
        """Parses, once mlx-lm has added its flags, and goes no further.

        Raises:
            Parsed: always.
        """
        self.set_defaults(decode_concurrency=CONCURRENCY, num_draft_tokens=None)
        raise Parsed(super().parse_args(self.argv))


def reader(kind: Callable[[str], Any]) -> Callable[[str], Any]:
    """A flag's type; of mlx-lm's, the one for sizes raises what argparse does not expect."""

    @wraps(kind)
    def read(text: str) -> Any:
        """What the type makes of a text."""
        try:
            return kind(text)
        except (ArithmeticError, LookupError) as error:
            raise argparse.ArgumentTypeError(f"expected a number of bytes, as in 512MB or 2GB, got {text!r}") from error

    return read


def make_parser() -> Parser:
    """The parser with our flags; mlx-lm adds its own."""
    parser = Parser(
        prog="mlx_redrafter.server",
        description="mlx_lm.server with recurrent drafters. Without --model it serves the packaged demo.",
    )
    group = parser.add_argument_group("drafting")
    add = group.add_argument
    add(
        "--drafter",
        action="append",
        metavar="[NAME=]PATH",
        help="a drafter for --model, by directory or hub id; several may be given, and a request names one in "
        "draft_model. The first is the default",
    )
    group.add_argument("--no-drafter", action="store_true", help="no drafter; the context still drafts")
    add_options(group, without={flag.name for flag in OPTION_FLAGS} - {*PLAN_OPTIONS, "context"})
    add = parser.add_argument_group("service").add_argument
    add("--api-key", help="clients must send it; others on this machine may see it in the list of processes")
    add("--api-key-file", metavar="FILE", help="a file that holds the key")
    add("--max-queue", type=int, default=64, help="requests that may wait (default: 64)")
    add("--max-request-bytes", type=int, default=8 << 20, help="length of a request's body (default: 8 MiB)")
    add("--max-prompt-tokens", type=int, help="length of a prompt (default: no limit)")
    add("--max-tree-size", type=int, default=64, help="nodes of a round that a request may ask for (default: 64)")
    add("--max-completion-tokens", type=int, help="length of an answer (default: no limit)")
    add(
        "--drain-timeout",
        type=int,
        default=120,
        help="seconds for what runs to be finished after a first SIGINT or SIGTERM; what is not is broken off, with "
        "128 + the signal as exit status (default: 120)",
    )
    add(
        "--allow-image-urls",
        action="store_true",
        help="fetch images from http and https URLs, not only data URLs. Whoever may ask this server may then make it "
        "ask any address that it can reach itself, this machine and its network included, for as much as they send",
    )
    return parser


def read_flags(argv: Sequence[str] | None = None, parser: Parser | None = None) -> argparse.Namespace:
    """What `sys.argv` or `argv` says, in mlx-lm's names and ours.

    mlx-lm makes its parser where it also serves. For this call alone it finds ours in place of `argparse`.

    Args:
        parser: with our flags; None for that of `make_parser`.

    Raises:
        RedrafterError: mlx-lm does something else.
    """
    parser = make_parser() if parser is None else parser
    parser.argv = argv
    before = server.argparse
    vars(server)["argparse"] = SimpleNamespace(ArgumentParser=lambda **_: parser)
    try:
        server.main()
    except Parsed as parsed:
        args: argparse.Namespace = parsed.args[0]
        return args
    finally:
        vars(server)["argparse"] = before
    raise RedrafterError("this mlx-lm reads its server's flags in another way: expected mlx-lm 0.32")
