"""An answer streams into a terminal panel; accepted draft tokens are colored."""

from __future__ import annotations

from rich.live import Live
from rich.panel import Panel
from rich.text import Text

from examples.common import DRAFTED, load_pair, make_parser
from mlx_redrafter import Session


def main(argv: list[str] | None = None) -> None:
    """Runs the example."""
    args = make_parser(__doc__, "class Stack:\n").parse_args(argv)
    session = Session(*load_pair(args), **DRAFTED)
    text = Text()
    with Live(Panel(text), refresh_per_second=20) as live:
        for response in session.stream(args.prompt, max_tokens=args.max_tokens):
            text.append(response.text, "cyan" if response.from_draft else None)
            rounds = f"{response.tokens_per_round:.2f} tokens per round"
            speed = f"{rounds}, {response.generation_tps:.0f} a second"
            live.update(Panel(text, title=Text(args.prompt.strip()), subtitle=speed))


if __name__ == "__main__":
    main()
