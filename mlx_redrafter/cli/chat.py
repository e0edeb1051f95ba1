"""What `chat` does: mlx-lm's chat over a `Session`, which reads nothing twice."""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from textwrap import shorten
from types import FrameType

import mlx.core as mx
from mlx_lm.chat import setup_arg_parser

from ..errors import RedrafterError, one_line
from ..flags import OPTIONS, add_drafter, add_options, add_template, template_config
from ..flags import make_parser as generate_parser
from ..generate import Options
from ..session.chat_template import Message
from ..session.session import Session
from .generate import check, progress, read_models
from .screen import Screen


def run() -> int:
    """Chats as `sys.argv` says; the exit status."""
    args = read_flags()
    options: Options = {name: getattr(args, name) for name, _, _ in OPTIONS}  # type: ignore[assignment]
    Options(**options)  # what is wrong with them is said before anything is loaded
    model, tokenizer, drafter = read_models(args, {})
    session = Session(model, tokenizer, drafter, chat_template_config=template_config(args), **options)
    if sys.stdin is not None and hasattr(sys.stdin, "reconfigure"):
        sys.stdin.reconfigure(errors="surrogateescape")  # the session refuses such a message, and goes on
    with Screen(args, head(args, session)) as screen:
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
                answer(session, screen, asked(args, session, query))


def make_parser() -> argparse.ArgumentParser:
    """mlx-lm's parser of a chat, and the flags of `generate` that it lacks."""
    parser: argparse.ArgumentParser = setup_arg_parser()
    parser.prog = "mlx_redrafter.chat"
    parser.description = "Chat with a model that is drafted for; with the packaged demo where no --model is given."
    parser.set_defaults(model=None)
    add_drafter(parser, "plain decoding")
    parser.add_argument(
        "--show-accepted", action="store_true", help="tint what was drafted and accepted, in a terminal with colours"
    )
    add_template(parser)
    add_options(parser, without=vars(parser.parse_args([])))
    return parser


def read_flags() -> argparse.Namespace:
    """The flags, checked, and those of `generate` that a chat does not have as they are by default.

    Raises:
        RedrafterError: they do not go together.
    """
    args = generate_parser().parse_args([], namespace=make_parser().parse_args())
    check(args)
    if args.max_tokens == 0:
        raise RedrafterError("max_tokens must not be 0 (use -1 for no limit)")
    if (size := mx.distributed.init().size()) > 1:
        raise RedrafterError(f"chat runs in one process, got {size}")
    return args


def head(args: argparse.Namespace, session: Session) -> list[tuple[str, str]]:
    """(name, text) of what the user should know at the start."""
    rows = [("model", args.model or "the packaged demo")]
    if args.adapter_path:
        rows.append(("adapter", args.adapter_path))
    rows.append(("drafter", "none" if session.drafter is None else args.drafter or "the packaged demo's"))
    rows.append(("max tokens", f"{args.max_tokens:,}" if args.max_tokens > 0 else "no limit"))
    if args.system_prompt:
        rows.append(("system", shorten(args.system_prompt, 60, placeholder="...")))
    if not session.tokenizer.has_chat_template:
        rows.append(("template", "none: it goes on with your text"))
    return rows


def asked(args: argparse.Namespace, session: Session, query: str) -> list[Message]:
    """The messages of a turn; the system's stands in front of the first."""
    system = [{"role": "system", "content": args.system_prompt}] if args.system_prompt is not None else []
    return [*([] if session.messages else system), {"role": "user", "content": query}]


def answer(session: Session, screen: Screen, messages: list[Message]) -> None:
    """Shows an answer as it is made. In a terminal an error ends the turn, not the conversation.

    Raises:
        RedrafterError: the turn was refused, or memory ran out, and nobody is there to ask another.
        KeyboardInterrupt: Ctrl-C was pressed twice.
    """
    try:
        with stoppable(session), progress() as callback:
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
def stoppable(session: Session) -> Iterator[None]:
    """Ctrl-C cancels the answer; pressed again it raises, as it does elsewhere."""

    def stop(number: int, frame: FrameType | None) -> None:
        """The first one; one that comes before the turn has begun ends nothing."""
        if session.cancel():
            signal.signal(signal.SIGINT, signal.default_int_handler)

    before = signal.signal(signal.SIGINT, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
