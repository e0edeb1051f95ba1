"""`mlx_redrafter COMMAND`: the console script, in the manner of `mlx_lm`."""

from __future__ import annotations

import sys
from importlib import import_module

from . import __version__

COMMANDS = ("generate", "chat", "convert", "train", "doctor", "server", "race", "stdio")


def main() -> None:
    """Hands over to the command named first."""
    usage = f"usage: mlx_redrafter {{{','.join(COMMANDS)}}} ...\n       mlx_redrafter --version"
    name = sys.argv[1] if len(sys.argv) > 1 else ""
    if name in ("-h", "--help"):
        print(f"{usage}\n\n'mlx_redrafter COMMAND --help' lists a command's options.")
    elif name == "--version":
        print(__version__)
    elif name in COMMANDS:
        del sys.argv[1]
        import_module(f"{__package__}.{name}").main()
    else:
        print(f"{usage}\nerror: expected a command, got {name!r}", file=sys.stderr)
        sys.exit(2)
