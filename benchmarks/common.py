"""What the benchmarks share: a pair of models, prompts, a clock, and the settings that go with a number."""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn

from mlx_redrafter.checkpoint import load, load_drafter
from mlx_redrafter.demo import demo_prompts, load_demo
from mlx_redrafter.drafter import Drafter
from mlx_redrafter.generation import encode
from mlx_redrafter.machine import about
from mlx_redrafter.training.data import load_prompts


class Bench(NamedTuple):
    """What is measured: prompts as token ids, and the models they go to."""

    model: nn.Module
    drafter: Drafter
    prompts: list[list[int]]


def make_parser(description: str | None) -> argparse.ArgumentParser:
    """The flags every benchmark has."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--model", help="the packaged demo when not given")
    parser.add_argument("--drafter", help="its drafter")
    parser.add_argument(
        "--prompts", type=Path, help="one prompt a line, or jsonl; the demo's held-out ones if not given"
    )
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--temp", type=float, default=0.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--shapes", type=shape, nargs="+", default=[(1, 2), (1, 3), (1, 4), (2, 3), (4, 3), (4, 5)])
    parser.add_argument("--json", action="store_true", help="one JSON object a line instead of a table")
    return parser


def shape(text: str) -> tuple[int, ...]:
    """`W,K` or `W,K,N`."""
    parts = text.split(",")
    if len(parts) not in (2, 3) or not all(part.isdecimal() and int(part) for part in parts):
        raise argparse.ArgumentTypeError(f"expected W,K or W,K,N, whole numbers above 0, got {text!r}")
    return tuple(int(part) for part in parts)


def positive(text: str) -> int:
    """A whole number above 0."""
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"expected a whole number above 0, got {text!r}")
    return int(text)


def seed(text: str) -> int:
    """A whole number that MLX takes for a seed."""
    if not text.isdecimal() or int(text) >= 1 << 64:
        raise argparse.ArgumentTypeError(f"expected a whole number from 0 to 2^64 - 1, got {text!r}")
    return int(text)


def minutes(text: str) -> float:
    """A time above 0."""
    try:
        found = float(text)
    except ValueError:
        found = math.nan
    if not 0 < found < math.inf:
        raise argparse.ArgumentTypeError(f"expected a number of minutes above 0, got {text!r}")
    return found


def beam(numbers: Sequence[int]) -> dict[str, Any]:
    """A shape as keywords of `generate_step`."""
    width, depth, *size = numbers
    return {"beam_width": width, "draft_depth": depth, "tree_size": size[0] if size else None}


def open_bench(args: argparse.Namespace) -> Bench:
    """The models and prompts of the flags; the demo's where there is none."""
    if args.model:
        if not args.drafter:
            raise SystemExit("error: --model needs the --drafter that was trained for it")
        model, tokenizer = load(args.model)
        drafter = load_drafter(args.drafter, model)
    else:
        model, tokenizer, drafter = load_demo()
        if args.drafter:
            drafter = load_drafter(args.drafter, model)
            drafter.set_dtype(mx.float32)  # as the demo decodes
    prompts = load_prompts(args.prompts, tokenizer) if args.prompts else [encode(tokenizer, t) for t in demo_prompts()]
    return Bench(model, drafter, prompts)


def milliseconds(work: Any, repeats: int) -> list[float]:
    """How long each call of `work` took."""
    times = []
    for _ in range(repeats):
        started = time.perf_counter()
        work()
        times.append((time.perf_counter() - started) * 1e3)
    return times


def show(args: argparse.Namespace, rows: list[dict[str, Any]]) -> None:
    """Prints rows of one table, and the settings they were measured under."""
    if args.json:
        for row in rows:
            print(json.dumps({**row, "settings": settings(args)}))
        return
    names = list(rows[0])
    print("  ".join(f"{name:>14}" for name in names))
    for row in rows:
        print("  ".join(f"{cell(row[name]):>14}" for name in names))
    print(json.dumps(settings(args)))


def cell(value: Any) -> str:
    """A table cell."""
    return f"{value:.3f}" if isinstance(value, float) else str(value)


def settings(args: argparse.Namespace) -> dict[str, Any]:
    """Everything a number depends on."""
    named = {name: str(value) if isinstance(value, Path) else value for name, value in vars(args).items()}
    return named | about()


__all__ = ["Bench", "beam", "make_parser", "median", "milliseconds", "open_bench", "shape", "show"]
