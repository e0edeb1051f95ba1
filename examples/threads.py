"""Draws docs/stills/threads.svg, the threads of the server: `python examples/threads.py`."""

from __future__ import annotations

from html import escape
from pathlib import Path

FILE = Path(__file__).parents[1] / "docs" / "stills" / "threads.svg"

WIDTH = 190
GAP = 34
ROW = 46
TOP = 70

THREADS = ("client", "event loop (uvicorn)", "thread 'prompts'", "thread 'worker' (MLX)")

STEPS = (
    (0, 1, "request"),
    (1, 1, "check, read, validate the body"),
    (1, 2, "messages"),
    (2, 2, "render the template, encode"),
    (2, 1, "token ids"),
    (1, 3, "submit: the queue"),
    (3, 3, "decide; a step of all requests"),
    (3, 1, "tokens of each round"),
    (1, 1, "make text, render events"),
    (1, 0, "server-sent events, or the reply"),
)
"""(from which thread, to which one, what it passes on or does)."""


def get_center(thread: int) -> int:
    """The x of a thread's line."""
    return GAP + thread * (WIDTH + GAP) + WIDTH // 2


def draw() -> str:
    """The picture as SVG."""
    width = GAP + len(THREADS) * (WIDTH + GAP)
    height = TOP + ROW * len(STEPS) + 20
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        'font-family="sans-serif" font-size="13">',
        '<rect width="100%" height="100%" fill="#ffffff"/>',
        '<defs><marker id="end" markerWidth="8" markerHeight="8" refX="7" refY="4" orient="auto">'
        '<path d="M0,0 L8,4 L0,8 z" fill="#1f6feb"/></marker></defs>',
    ]
    for thread, name in enumerate(THREADS):
        x = get_center(thread)
        parts.append(
            f'<rect x="{x - WIDTH // 2}" y="12" width="{WIDTH}" height="30" rx="6" '
            'fill="#eaeef2" stroke="#57606a"/>'
            f'<text x="{x}" y="32" text-anchor="middle" fill="#1f2328">{escape(name)}</text>'
            f'<line x1="{x}" y1="42" x2="{x}" y2="{height - 10}" stroke="#d0d7de"/>'
        )
    for row, (start, end, text) in enumerate(STEPS):
        y = TOP + row * ROW
        x = get_center(start)
        other = get_center(end)
        label = f'text-anchor="middle" fill="#1f2328">{escape(text)}</text>'
        if start == end:
            half = 4 * len(text) + 6
            parts.append(
                f'<rect x="{x - half}" y="{y - 4}" width="{2 * half}" height="24" rx="4" '
                'fill="#ddf4ff" stroke="#54aeff"/>'
                f'<text x="{x}" y="{y + 13}" {label}'
            )
            continue
        parts.append(
            f'<line x1="{x}" y1="{y + 8}" x2="{other}" y2="{y + 8}" stroke="#1f6feb" '
            'stroke-width="1.5" marker-end="url(#end)"/>'
            f'<text x="{(x + other) // 2}" y="{y + 2}" {label}'
        )
    return "\n".join([*parts, "</svg>", ""])


if __name__ == "__main__":
    FILE.write_text(draw(), encoding="utf-8")
