"""The `race` command, the server with a page: its flags are the server's."""

from __future__ import annotations

import argparse
import os
import sys
import webbrowser

from .server import make_parser, read_server_args

PORT = 8090


def run() -> int:
    """Serves the page and the APIs until a signal; returns the exit status."""
    flags = make_race_parser().parse_args()
    args = read_server_args(flags)
    from ..serving.http.process import serve  # not needed for --help
    from ..serving.race import make_race_app

    return serve(args, make_race_app, None if flags.no_browser else show_page)


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
