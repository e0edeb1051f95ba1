"""Tokens per round of the drafters that `compare_losses.py` trained, as a table."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

TEMPERATURES = (0.0, 0.7)
PLANS = ((1, 4), (4, 5))
RESAMPLES = 1000


def print_report(path: Path) -> None:
    """Prints a table for each set of examples in a file of results.

    The change against `today` of the same seed has its standard error over examples, from 1,000
    resamples.
    """
    records = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    counts = dict[tuple[Any, ...], np.ndarray]()
    for record in records:
        each = np.array(record["each"], float)
        temps = np.array(record["temps"])
        for temp in TEMPERATURES:
            key = (record["name"], record["texts"], record["plan"], temp)
            counts[key] = each[np.abs(temps - temp) < 0.01]
    names = list(dict.fromkeys(record["name"] for record in records))
    columns = [(plan, temp) for temp in TEMPERATURES for plan in PLANS]
    rng = np.random.default_rng(0)
    for texts in dict.fromkeys(record["texts"] for record in records):
        print(f"\n{texts}: tokens per round (change against `today` of the same seed, %)\n")
        print("| drafter | " + " | ".join(f"{plan} T {temp}" for plan, temp in columns) + " |")
        print("|---|" + "---|" * len(columns))
        for name in names:
            base_name = "-".join(["today", *name.split("-")[1:]])
            cells = []
            for plan, temp in columns:
                own = counts.get((name, texts, str(plan), temp))
                base = counts.get((base_name, texts, str(plan), temp))
                if name == base_name:
                    base = None
                cells.append(format_cell(own, base, rng))
            print(f"| {name} | " + " | ".join(cells) + " |")


def format_cell(own: np.ndarray | None, base: np.ndarray | None, rng: np.random.Generator) -> str:
    """Tokens per round, and the change against another drafter with its standard error.

    Args:
        own: (N, 2) tokens and rounds of each example; None if not measured.
        base: (N, 2) the other's; None for no comparison.
    """
    if own is None or not len(own):
        return ""
    tokens, rounds = own.sum(0)
    if base is None:
        return f"{tokens / rounds:.3f}"
    picked = rng.integers(len(own), size=(RESAMPLES, len(own)))
    changes = 100 * (base[picked, 1].sum(1) / own[picked, 1].sum(1) - 1)
    change = 100 * (base[:, 1].sum() / rounds - 1)
    return f"{tokens / rounds:.3f} ({change:+.1f} ± {changes.std():.1f})"
