"""`chat`: mlx-lm's chat over a `Session`, which reads no token twice. Ctrl-C stops an answer, not the conversation."""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from textwrap import shorten
from types import FrameType

import mlx.core as mx
from mlx_lm.cli_ui import ChatUI, _make_theme, print_chat_help, print_header_panel
from rich.console import Console
from rich.markup import escape

from ..errors import RedrafterError, one_line
from ..generate import GenerationResponse
from ..options import add_options
from ..session.session import Session
from .arguments import Parser, add_model_flags, add_template_flag, load_models, read_options, read_template_config
from .generate import show_prompt_progress

TINT, UNTINT = "\x1b[36m", "\x1b[39m"
"""Around a token that was drafted and accepted: cyan, then the terminal's own colour."""


def run() -> int:
    """Chats as `sys.argv` says; the exit status."""
    args = make_parser().parse_args()
    options, template = read_options(args), read_template_config(args)
    if (size := mx.distributed.init().size()) > 1:
        raise RedrafterError(f"chat runs in one process, got {size}")
    model, tokenizer, drafter = load_models(args)
    session = Session(model, tokenizer, drafter, chat_template_config=template, **options)
    if sys.stdin is not None and hasattr(sys.stdin, "reconfigure"):
        sys.stdin.reconfigure(errors="surrogateescape")  # the session refuses such a message, and goes on
    screen = Screen(args)
    screen.show_header(session)
    while True:
        try:
            query = screen.prompt()
        except EOFError:
            query = "q"
        except KeyboardInterrupt:
            screen.say_bye()
            raise
        if query == "q":
            screen.say_bye()
            return 0
        if query == "r":
            session.reset()
            screen.say_reset()
        elif query == "h":
            screen.say_help()
        elif query.strip():
            answer(session, screen, query, args.system_prompt)


def make_parser() -> Parser:
    """The parser: flags and defaults of mlx-lm's chat, and what drafting and other commands add."""
    description = "Chat with a model, with speculative decoding; with the packaged demo where no --model is given."
    parser = Parser(prog="mlx_redrafter.chat", description=description)
    add_model_flags(parser)
    add_template_flag(parser)
    parser.add_argument("--system-prompt", help="system prompt for the chat template")
    parser.add_argument(
        "--show-accepted", action="store_true", help="tint what was drafted and accepted, in a terminal with colours"
    )
    parser.add_argument("--pipeline", action="store_true", help="as mlx-lm's; nothing changes in one process")
    parser.add_argument("--seed", type=int, default=0, help="equal seeds give equal text (default: %(default)s)")
    add_options(parser, without=("seed",))
    return parser


def answer(session: Session, screen: Screen, query: str, system_prompt: str | None = None) -> None:
    """Shows an answer as it is made. In a terminal an error ends the turn, not the conversation.

    Raises:
        RedrafterError: the turn was refused, or memory ran out, and nobody is there to ask another.
        KeyboardInterrupt: Ctrl-C was pressed twice.
    """
    messages = [{"role": "user", "content": query}]
    if system_prompt is not None and not session.messages:
        messages.insert(0, {"role": "system", "content": system_prompt})
    try:
        with cancel_on_interrupt(session), show_prompt_progress() as callback:
            made = session.send(
                messages,
                on_token=lambda response: screen.stream_token(response.text, response.from_draft),
                prompt_progress_callback=callback,
            )
    except (RedrafterError, RuntimeError, MemoryError) as error:  # as when memory runs out
        if not screen.interactive:
            raise RedrafterError(one_line(error)) from error
        screen.say_error(error)
        return
    screen.end_turn(made.last)
    if made.finish_reason == "cancelled":
        screen.say_stopped()


@contextmanager
def cancel_on_interrupt(session: Session) -> Iterator[None]:
    """Ctrl-C cancels the answer; pressed again it raises, as it does elsewhere."""

    def cancel(number: int, frame: FrameType | None) -> None:
        if session.cancel():  # else no turn has begun, and nothing ends
            signal.signal(signal.SIGINT, signal.default_int_handler)

    before = signal.signal(signal.SIGINT, cancel)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


class Screen(ChatUI):
    """mlx-lm's terminal interface with rounds and tints; plain text where there is no terminal.

    Args:
        args: the flags of `chat`.
    """

    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__(args)
        self._console = Console(theme=_make_theme(), highlight=False)  # mlx-lm's writes colours into pipes, too
        self.interactive = bool(self._console.is_terminal and sys.stdin and sys.stdin.isatty())
        self._tints = args.show_accepted and self._console.color_system is not None and not self._console.no_color

    def show_header(self, session: Session) -> None:
        """What is loaded, and the commands; in a terminal."""
        if not self.interactive:
            return
        args, demo = self._args, "the packaged demo"
        rows = [("model", args.model or demo), ("adapter", args.adapter_path)]
        rows.append(("drafter", "none" if session.drafter is None else args.drafter or f"{demo}'s"))
        rows.append(("max tokens", f"{args.max_tokens:,}" if args.max_tokens > 0 else "no limit"))
        rows.append(("system", args.system_prompt and shorten(args.system_prompt, 60, placeholder="...")))
        rows.append(("template", None if session.tokenizer.has_chat_template else "none: it goes on with your text"))
        print_header_panel(self._console, "mlx_redrafter.chat", [(name, escape(text)) for name, text in rows if text])
        print_chat_help(self._console)

    def prompt(self) -> str:
        """A line of the user's.

        Raises:
            EOFError: there will be no more.
        """
        if sys.stdin is None:
            raise EOFError
        if not self.interactive:
            return input()
        try:
            text: str = super().prompt()
        except (EOFError, KeyboardInterrupt):
            print()  # the cursor is on the line under the prompt
            raise
        return text

    def stream_token(self, text: str, accepted: bool = False) -> None:
        """Shows a token's text at once; tinted if it was drafted, and if that is asked for and can be seen."""
        super().stream_token(f"{TINT}{text}{UNTINT}" if text and accepted and self._tints else text)

    def end_turn(self, response: GenerationResponse | None) -> None:
        """mlx-lm's line of counts and speeds, and one of the rounds if any drafted."""
        super().end_turn(response)
        if response is not None and response.drafted:
            self._console.print(
                f"  [ui.muted]{response.tokens_per_round:.2f} tokens per round · {response.rounds} rounds · "
                f"{response.accepted} of {response.drafted} drafted accepted[/ui.muted]"
            )

    def say_stopped(self) -> None:
        """The answer was stopped by the user."""
        self._console.print("  [ui.warn]stopped[/ui.warn] [ui.muted]the conversation goes on[/ui.muted]")

    def say_error(self, error: Exception) -> None:
        """The turn failed."""
        self._console.print(f"  [ui.warn]error[/ui.warn] [ui.muted]{escape(str(error))}[/ui.muted]")
