"""Two sessions over one model: a forked conversation continues with two seeds, alternately."""

from __future__ import annotations

from itertools import zip_longest

from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from examples.common import DRAFTED, load_pair, make_parser
from mlx_redrafter import Session

SEEDS = (1, 2)


def main(argv: list[str] | None = None) -> None:
    """Runs the example."""
    args = make_parser(__doc__, "class Stack:\n").parse_args(argv)
    session = Session(*load_pair(args), max_tokens=args.max_tokens, temp=0.8, **DRAFTED)
    beginning = session.send(args.prompt, max_tokens=20, seed=0)
    sessions = (session, session.fork())  # from here on they share only the models
    streams = [one.stream("\n", seed=seed) for one, seed in zip(sessions, SEEDS, strict=True)]
    texts = [args.prompt + beginning.text] * 2
    with Live(refresh_per_second=20) as live:
        for responses in zip_longest(*streams):  # in one thread, as they share one device
            columns = Table.grid(expand=True)
            panels = []
            for index, response in enumerate(responses):
                if response is not None:
                    texts[index] += response.text
                panels.append(Panel(Text(texts[index]), title=f"seed {SEEDS[index]}"))
                columns.add_column(ratio=1)
            columns.add_row(*panels)
            live.update(columns)


if __name__ == "__main__":
    main()
