"""Writes the table of published drafters in docs/checkpoints.md from `published.json`:

`python tests/drafter_table.py`.
"""

from pathlib import Path

from helpers.tables import replace_between
from mlx_redrafter.loading.published import read_table

PAGE = Path(__file__).parent.parent / "docs" / "checkpoints.md"
BEGIN = "<!-- published: made by tests/drafter_table.py -->\n"
END = "<!-- published: end -->\n"


def make_table() -> str:
    """The Markdown table; one row for the targets with the same kinds of drafters."""
    targets = {}
    for name, drafters in read_table().items():
        kinds = ", ".join(dict.fromkeys(each.kind for each in drafters))
        targets.setdefault(kinds, []).append(name)
    lines = ["| drafters, in the order in which they are tried | models |", "|---|---|"]
    lines += [f"| {kinds} | {', '.join(targets[kinds])} |" for kinds in sorted(targets)]
    return "\n".join([*lines, ""])


def insert_table(text: str) -> str:
    """The page's text with the table in its place."""
    return replace_between(text, BEGIN, END, make_table())


if __name__ == "__main__":
    PAGE.write_text(insert_table(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
