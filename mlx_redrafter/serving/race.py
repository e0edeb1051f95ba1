"""The `race` command: the server with a page that shows plain and drafted decoding side by side."""

from __future__ import annotations

import argparse
import html
import json
import os
import sys
import webbrowser
from pathlib import Path
from typing import TYPE_CHECKING

from ..cli.server import check_args, make_parser
from ..decoding.options import PLAN_OPTIONS
from ..demo import demo_prompts

if TYPE_CHECKING:
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import Response

    from .formats.completion import Service

PAGE = Path(__file__).with_name("race.html").read_text(encoding="utf-8")
PORT = 8090


def run() -> int:
    """Serves the page and the APIs until a signal; returns the exit status."""
    args = check_args(make_race_parser().parse_args())
    from .http.process import serve  # not needed for --help

    return serve(args, make_race_app, None if args.no_browser else show_page)


def make_race_parser() -> argparse.ArgumentParser:
    """The server's parser with `--no-browser`."""
    parser = make_parser()
    parser.prog = "mlx_redrafter.race"
    parser.description = (
        "Serve a page that shows plain and drafted decoding side by side; without --model, with "
        "the packaged demo. All other flags are those of mlx_redrafter.server."
    )
    parser.add_argument(
        "--no-browser", action="store_true", help="print the URL without opening a browser"
    )
    parser.set_defaults(port=PORT)
    return parser


def show_page(url: str) -> None:
    """Opens the page in a browser, or prints its URL."""
    # Without a display Python might start a text browser in this terminal.
    screen = (
        sys.platform != "linux" or os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")
    )
    if not (screen and webbrowser.open(url)):
        print(f"open {url} in a browser", file=sys.stderr, flush=True)


def make_race_app(service: Service) -> Starlette:
    """The server's application with the page.

    The page needs no key; its requests do if there is one.
    """
    from starlette.responses import HTMLResponse

    from .http.app import make_app

    args = service.args
    service.shows_drafts = True
    shape = [
        f"{name.replace('_', ' ')} {getattr(args, name)}"
        for name in PLAN_OPTIONS[1:]
        if getattr(args, name)
    ]
    about = {
        "model": service.model_name,
        "demo": args.model is None,
        "example": None if args.model else demo_prompts("edits")[0],
        "drafter": service.drafter_name,
        "chat": bool(service.tokenizer.has_chat_template),
        "plan": ", ".join(shape) or f"plan {args.plan}",
    }
    page = PAGE.replace("@about@", html.escape(json.dumps(about)), 1)

    async def show(request: Request) -> Response:
        return HTMLResponse(page, headers={"Cache-Control": "no-store"})

    return make_app(service, show)
