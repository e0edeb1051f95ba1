"""What a chat shows: mlx-lm's own interface, rounds and tints beside it, and plain text where no terminal is."""

from __future__ import annotations

import argparse
import sys
from typing import Self

from mlx_lm.cli_ui import ChatUI, _make_theme, print_chat_help, print_header_panel
from rich.console import Console
from rich.markup import escape

from ..generate import GenerationResponse

TINT, UNTINT = "\x1b[36m", "\x1b[39m"
"""Around a token that was drafted and accepted: cyan, then the terminal's own colour."""


class Screen(ChatUI):
    """The terminal of a chat, or a pipe.

    Args:
        args: the flags of `chat`.
        told: more rows for the head: (name, text).
    """

    def __init__(self, args: argparse.Namespace, told: list[tuple[str, str]]) -> None:
        super().__init__(args)
        # mlx-lm's console writes colours into pipes, too.
        self._console = Console(theme=_make_theme(), highlight=False)
        self._told = told
        self.interactive = bool(self._console.is_terminal and sys.stdin and sys.stdin.isatty())
        self._tints = args.show_accepted and self._console.color_system is not None and not self._console.no_color

    def __enter__(self) -> Self:
        if self.interactive:
            rows = [(name, escape(text)) for name, text in self._told]
            print_header_panel(self._console, "mlx_redrafter.chat", rows)
            print_chat_help(self._console)
        return self

    def prompt(self) -> str:
        """A line of the user's.

        Raises:
            EOFError: there will be no more.
        """
        if sys.stdin is None:
            raise EOFError
        text: str = super().prompt() if self.interactive else input()
        return text

    def stream_token(self, text: str, accepted: bool = False) -> None:
        """Shows a token's text at once; tinted if it was drafted, and if that is asked for and can be seen."""
        super().stream_token(f"{TINT}{text}{UNTINT}" if text and accepted and self._tints else text)

    def end_turn(self, response: GenerationResponse | None) -> None:
        """mlx-lm's line of counts and speeds, and one of the rounds if there were any."""
        super().end_turn(response)
        if response is not None and response.rounds:
            self._console.print(
                f"  [ui.muted]{response.tokens_per_round:.2f} tokens per round · {response.rounds} rounds · "
                f"{response.accepted} of {response.drafted} drafted accepted[/ui.muted]"
            )

    def say_stopped(self) -> None:
        """The answer was stopped by the user."""
        self._console.print("  [ui.warn]stopped[/ui.warn] [ui.muted]the conversation goes on[/ui.muted]")

    def say_error(self, error: Exception) -> None:
        """A turn came to nothing."""
        self._console.print(f"  [ui.warn]error[/ui.warn] [ui.muted]{escape(str(error))}[/ui.muted]")
