"""`chat`: mlx-lm's chat on top of `Session`. Ctrl-C stops an answer, not the chat.

In a pipe, stdout has the answers only; all else goes to stderr.
"""

from __future__ import annotations

import argparse
import re
import signal
import sys
from contextlib import suppress
from select import select

from mlx_lm.cli_ui import ChatUI, _make_theme, print_header_panel
from rich.console import Console
from rich.markup import escape

from ..decoding.responses import GenerationResponse
from ..errors import RedrafterError, join_lines
from ..session.session import Session
from .arguments import load_named, make_text_parser, read_once, read_options
from .generate import show_prompt_progress
from .parser import Parser

QUIT = ("q", "/quit", "/exit", "/bye")
RESET = ("r", "/reset", "/clear")
HELP = ("h", "/help", "/?")
"""Commands: mlx-lm's letters, and what other chats have."""

SOURCE_COLORS = {"drafter": "\x1b[36m", "context": "\x1b[33m"}
"""Escape sequences of accepted tokens, by what drafted them."""

DEFAULT_COLOR = "\x1b[39m"
"""The escape sequence after them."""

PASTE_SECONDS = 0.05
"""Lines that follow one another within this time were pasted together."""


def run() -> int:
    """Runs the command with `sys.argv`; returns the exit status."""
    args = make_parser().parse_args()
    options = read_options(args)
    loaded = load_named(args, verbose=True)
    if args.drafter:
        args.drafter = loaded.drafter_name  # which one "auto" found
    session = Session(*loaded[:3], chat_template_config=args.chat_template_config, **options)
    screen = Screen(args)
    if screen.is_interactive:
        screen.show_header(session)
    while True:
        try:
            query = screen.prompt()
        except (EOFError, KeyboardInterrupt) as ended:
            if screen.is_interactive:
                print()  # the cursor is on the line under the prompt
                if isinstance(ended, KeyboardInterrupt):
                    screen.say("to leave", "type /quit or press Ctrl-D")
                    continue
            screen.say_bye()
            return 0 if isinstance(ended, EOFError) else 130
        command = query.strip()
        if command in QUIT:
            screen.say_bye()
            return 0
        if command in RESET:
            session.reset()
            screen.say_reset()
        elif command in HELP:
            screen.say_help()
        elif re.fullmatch(r"/\w+", command):
            screen.say("unknown command", f"{command}; /help lists all")
        elif command:
            answer(session, screen, query, args.system_prompt)


def make_parser() -> Parser:
    """The argument parser: mlx-lm's chat flags and defaults, plus those shared by our commands."""
    about = "Chat with a model, with speculative decoding; with the packaged demo without --model."
    parser = make_text_parser("chat", about, without=("seed",))
    add = parser.add_argument
    add("--system-prompt", help="system prompt for the chat template")
    add(
        "--show-accepted",
        action="store_true",
        help="in a terminal, show the drafter's accepted tokens in cyan, the context's in yellow",
    )
    add("--seed", type=int, default=0, help="equal seeds give equal text (default: %(default)s)")
    return parser


def answer(session: Session, screen: Screen, query: str, system_prompt: str | None = None) -> None:
    """Prints an answer while it is generated.

    In a terminal an error ends the turn, not the conversation. Ctrl-C cancels the answer; pressed
    again, it raises as usual. With several ranks it ends them all.
    """
    messages = [{"role": "user", "content": query}]
    if system_prompt is not None and not session.messages:
        messages.insert(0, {"role": "system", "content": system_prompt})

    def cancel(*signalled: object) -> None:
        if session.cancel():  # False if no turn has started
            signal.signal(signal.SIGINT, signal.default_int_handler)

    before = signal.getsignal(signal.SIGINT)
    if before is not signal.SIG_DFL:  # which ends all of several ranks
        signal.signal(signal.SIGINT, cancel)
    try:
        with show_prompt_progress() as progress:
            made = session.send(
                messages, on_token=screen.show_token, prompt_progress_callback=progress
            )
    except (RedrafterError, RuntimeError, MemoryError) as error:  # for instance out of memory
        if not screen.is_interactive:
            raise RedrafterError(join_lines(error)) from error
        screen.say("error", str(error))
        return
    finally:
        signal.signal(signal.SIGINT, before)
    screen.end_turn(made.last)
    if made.finish_reason == "cancelled":
        screen.say("stopped", "the conversation continues")


class Screen(ChatUI):
    """mlx-lm's terminal interface with round statistics and colored tokens.

    Args:
        args: the command's flags.
        is_interactive: whether stdin and stdout are a terminal; None to ask the system.
    """

    def __init__(self, args: argparse.Namespace, *, is_interactive: bool | None = None) -> None:
        super().__init__(args)
        # mlx-lm's console writes colors into pipes, too.
        console = Console(theme=_make_theme(), highlight=False)
        with suppress(ImportError):  # lets arrow keys edit a line and recall earlier ones
            import readline  # noqa: F401
        if is_interactive is None:
            is_interactive = read_once(lambda: console.is_terminal and sys.stdin.isatty())
        self.is_interactive = bool(is_interactive)
        has_colors = console.color_system is not None and not console.no_color
        self._uses_colors = args.show_accepted and has_colors
        self._is_plain = console.is_dumb_terminal or not console.encoding.startswith("utf")
        self._is_at_end = False
        if not self.is_interactive:
            console = Console(theme=_make_theme(), highlight=False, stderr=True, soft_wrap=True)
        self._console = console

    def show_header(self, session: Session) -> None:
        """Prints the loaded models, settings and commands."""
        args = self._args
        demo = "the packaged demo"
        name = args.drafter or args.draft_model or f"{demo}'s"
        drafter = "none" if session.drafter is None else name
        limit = f"{args.max_tokens:,}" if args.max_tokens > 0 else "no limit"
        lines = [("model", args.model or demo), ("drafter", drafter), ("max tokens", limit)]
        if args.system_prompt:
            lines.append(("system", args.system_prompt))
        escaped = [(name, escape(text)) for name, text in lines]
        print_header_panel(self._console, "mlx_redrafter.chat", escaped)
        self.say_help()

    def prompt(self) -> str:
        """Reads a line, or lines that were pasted together, on rank 0."""
        text = read_once(self._read)
        if text is None:
            raise EOFError
        return text

    def _read(self) -> str | None:
        """A line or pasted lines; None at the end of the input."""
        with suppress(EOFError):
            return self._read_typed() if self.is_interactive else input()
        return None

    def _read_typed(self) -> str:
        if self._is_at_end:
            raise EOFError
        # mlx-lm's prompt moves the cursor between two lines that are not ASCII.
        text = input("> ") if self._is_plain else str(super().prompt())
        is_command = text.strip() in (*QUIT, *RESET, *HELP)
        while not is_command and select([sys.stdin], [], [], PASTE_SECONDS)[0]:
            try:
                text += "\n" + input()
            except EOFError:
                self._is_at_end = True
                break
        return text

    def say_help(self) -> None:
        """Prints the commands."""
        commands = {
            "exit": (*QUIT, "Ctrl-D"),
            "reset": RESET,
            "help": HELP,
            "stop": ("Ctrl-C",),
        }
        for what, keys in commands.items():
            typed = " ".join(keys)
            self._console.print(f"  [ui.label]{what:12}[/ui.label][ui.strong]{typed}[/ui.strong]")

    def show_token(self, response: GenerationResponse) -> None:
        """Prints a token's text at once, in color if it was drafted and colors are on."""
        text = response.text
        source = response.draft_source
        if source and self._uses_colors and text:
            text = SOURCE_COLORS[source] + text + DEFAULT_COLOR
        self.stream_token(text)

    def end_turn(self, response: GenerationResponse | None) -> None:
        """Prints mlx-lm's line of counts and speeds, and one about rounds if any drafted."""
        super().end_turn(response)
        if response is not None and response.drafted:
            self._console.print(
                f"  [ui.muted]{response.tokens_per_round:.2f} tokens per round · "
                f"{response.rounds} rounds · {response.accepted} of {response.drafted} drafted "
                f"accepted, {response.context_accepted} of them from the context[/ui.muted]"
            )

    def say(self, what: str, text: str) -> None:
        """Prints a line for the user."""
        self._console.print(f"  [ui.warn]{what}[/ui.warn] [ui.muted]{escape(text)}[/ui.muted]")
