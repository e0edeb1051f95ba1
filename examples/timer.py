"""A timer cancels an answer from another thread.

The partial answer stays in the conversation, which continues.
"""

from __future__ import annotations

import threading

from examples.common import DRAFTED, load_pair, make_parser
from mlx_redrafter import Answer, Session


def send_within(session: Session, text: str, seconds: float) -> Answer:
    """The answer, cancelled after `seconds`."""
    timer = threading.Timer(seconds, session.cancel)
    timer.start()
    try:
        return session.send(text, on_text=lambda piece: print(piece, end="", flush=True))
    finally:
        timer.cancel()


def main(argv: list[str] | None = None) -> None:
    """Runs the example."""
    parser = make_parser(__doc__, "def main(", max_tokens=-1)
    parser.add_argument("--seconds", type=float, default=1.0)
    args = parser.parse_args(argv)
    session = Session(*load_pair(args), max_tokens=args.max_tokens, **DRAFTED)
    for text in (args.prompt, "\nclass Stack:\n"):
        print(text, end="")
        answer = send_within(session, text, args.seconds)
        how = f"{answer.finish_reason} after {len(answer.tokens)} tokens"
        print(f"\n-- {how}; {len(session.tokens)} in the cache")


if __name__ == "__main__":
    main()
