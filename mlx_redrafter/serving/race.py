"""What `race` does: the server, and one page on it that shows plain and drafted decoding side by side."""

from __future__ import annotations

import base64
import hashlib
import html
import json
import os
import re
import sys
import webbrowser
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from ..demo import DIRECTORY
from ..options import AUTO
from .asking import beam_of
from .command import checked, serve
from .flags import Parser, make_parser, read_flags
from .handler import Handler
from .provider import local


def run() -> int:
    """Serves the page and what it asks, as `sys.argv` says, until it is told to end; the exit status."""
    args = checked(read_flags(parser=make_race_parser()))
    return serve(args, RaceHandler, None if args.no_browser else show)


def make_race_parser() -> Parser:
    """The server's parser, and a flag; only its own page may ask, if nothing else is said."""
    parser = make_parser()
    parser.changed = {"--allowed-origins": {"default": [], "help": "Other pages that may ask (default: none)"}}
    parser.prog = "mlx_redrafter.race"
    parser.description = (
        "A page that shows plain and drafted decoding side by side, served on this machine alone. "
        "Without --model it runs the packaged demo. The other flags are those of mlx_redrafter.server."
    )
    parser.add_argument("--no-browser", action="store_true", help="open no browser: the URL is told")
    return parser


def show(url: str) -> None:
    """Opens the page in a browser, or says where it is."""
    # Without a screen Python might start a browser in this very terminal.
    screen = sys.platform != "linux" or os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")
    if not (screen and webbrowser.open(url)):
        print(f"open {url} in a browser", file=sys.stderr, flush=True)


@cache
def source() -> str:
    """The page, which knows nothing of the models yet."""
    return Path(__file__).with_name("race.html").read_text(encoding="utf-8")


@cache
def policy() -> str:
    """The header that keeps the page to itself: its own script and style, by their digests, and this server."""
    own = {name: digest(re.findall(f"<{name}>(.*?)</{name}>", source(), re.DOTALL)) for name in ("script", "style")}
    return (
        f"default-src 'none'; script-src {own['script']}; style-src {own['style']}; img-src data:; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )


def digest(blocks: Sequence[str]) -> str:
    """The one block's SHA-256, as a Content-Security-Policy names it."""
    (block,) = blocks
    return f"'sha256-{base64.b64encode(hashlib.sha256(block.encode()).digest()).decode()}'"


def page(about: dict[str, Any]) -> str:
    """The page for these models; see `RaceHandler.about`."""
    return source().replace("@about@", html.escape(json.dumps(about)), 1)


class RaceHandler(Handler):
    """One request to the server of a race, which has a page besides."""

    def do_GET(self) -> None:
        """The page is open to all, as it says nothing but names; what it asks needs the key, if there is one."""
        if self.path.partition("?")[0] != "/":
            super().do_GET()
            return
        told = page(self.about()).encode()
        try:
            self.send_response(200)
            self.send_header("Content-Type", "text/html; charset=utf-8")
            self.send_header("Content-Length", str(len(told)))
            self.send_header("Content-Security-Policy", policy())
            self.send_header("X-Content-Type-Options", "nosniff")
            self.send_header("Referrer-Policy", "no-referrer")
            self.send_header("Cache-Control", "no-store")
            self.end_headers()
            self.wfile.write(told)
        except (ConnectionError, TimeoutError) as error:
            self.gone(error)

    def about(self) -> dict[str, Any]:
        """What the page has to know: names, whether the model chats, and what happens where no beam is chosen."""
        args, provider = self.response_generator.cli_args, self.response_generator.model_provider
        demo = args.model == local(DIRECTORY / "target")
        given = {name: value for name, value in beam_of(args).items() if name != "plan"}
        words = ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in given.items())
        return {
            "model": Path(args.model).name,
            "demo": demo,
            "drafters": list(provider.drafters),
            "chat": bool(provider.tokenizer.has_chat_template),
            "plan": f"as started: {words}" if given else f"as started: {args.plan}",
            "free": not given and args.plan == AUTO,
        }
