"""Wall-clock speed of drafted decoding against plain decoding, and of plain decoding against mlx-lm's.

    python -m benchmarks.speed

For each prompt the sides alternate: mlx-lm's `generate_step`, plain, each beam shape, `plan="auto"`, the same with a
drafter that knows nothing, and again, `--repeats` times.
A ratio is the median over prompts of (best time of plain) / (best time of the side). Every token of a drafted side
is held against plain decoding's.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import mlx.core as mx
from mlx_lm.generate import generate_step as mlx_lm_generate_step

from mlx_redrafter.drafter import Drafter
from mlx_redrafter.generation import generate_step, make_settings
from mlx_redrafter.loop import decode

from .common import Bench, beam, make_parser, median, open_bench, show, timed


def sides(
    bench: Bench, options: dict[str, Any], shapes: list[tuple[int, ...]]
) -> dict[str, Callable[[list[int]], Iterator[Any]]]:
    """name -> prompt -> the steps of that side."""
    named: dict[str, Callable[[list[int]], Iterator[Any]]] = {
        "plain": lambda prompt: generate_step(prompt, bench.model, **options)
    }
    if not options["temp"]:
        named["mlx-lm"] = lambda prompt: mlx_lm_generate_step(
            mx.array(prompt), bench.model, max_tokens=options["max_tokens"]
        )
    ignorant = Drafter(bench.drafter.args)
    ignorant.set_dtype(bench.drafter.dtype)
    mx.eval(ignorant.parameters())
    plans = {f"drafted {numbers}": (bench.drafter, beam(numbers)) for numbers in shapes}
    plans |= {"auto": (bench.drafter, {}), "auto, random drafter": (ignorant, {})}
    for name, (drafter, asked) in plans.items():
        settings = make_settings(drafter, **options, **asked)
        named[name] = partial(decode, model=bench.model, drafter=drafter, settings=settings)
    return named


def main() -> None:
    """Prints a row a side."""
    parser = make_parser(__doc__)
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    bench = open_bench(args)
    options = {"max_tokens": args.max_tokens, "temp": args.temp, "seed": args.seed}
    named = sides(bench, options, args.shapes)
    best: dict[str, list[float]] = defaultdict(list)
    identical: dict[str, int] = defaultdict(int)
    for side in named.values():
        timed(side(bench.prompts[0]))
    for prompt in bench.prompts:
        times: dict[str, list[float]] = defaultdict(list)
        tokens: dict[str, list[int]] = {}
        for _ in range(args.repeats):
            for name, side in named.items():
                items, seconds = timed(side(prompt))
                times[name].append(seconds)
                tokens[name] = [int(item[0]) for item in items]
        for name in named:
            best[name].append(min(times[name]))
            identical[name] += tokens[name] == tokens["plain"]
    rows = []
    for name in named:
        ratios = [plain / own for plain, own in zip(best["plain"], best[name], strict=True)]
        rows.append(
            {
                "side": name,
                "tokens/s": median((args.max_tokens - 1) / seconds for seconds in best[name]),
                "x plain": median(ratios),
                "least": min(ratios),
                "most": max(ratios),
                "same tokens": f"{identical[name]}/{len(bench.prompts)}",
            }
        )
    show(args, rows)


if __name__ == "__main__":
    main()
