"""How often a drafted text parts from the plain one because two logits tie, by the type of the weights.

    python -m benchmarks.ties --shapes 1,3 4,5 --max-tokens 256

Every prompt is decoded plainly and with the drafter at each shape. Where the texts part, the log-probabilities of both
sides there are compared: rounding explains the difference (a tie), or it does not (an error). `float32` to `4 bits`
name what the target is turned into; `as it is` leaves it alone.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlx_redrafter.comparing import Difference, distance, first_difference
from mlx_redrafter.drafter import Drafter
from mlx_redrafter.generation import generate_step, make_settings
from mlx_redrafter.trial import try_out

from .common import Bench, beam, make_parser, open_bench, show

KINDS = {
    "as it is": (None, None),
    "float32": (mx.float32, None),
    "float16": (mx.float16, None),
    "bfloat16": (mx.bfloat16, None),
    "8 bits": (mx.float16, 8),
    "4 bits": (mx.float16, 4),
}
"""name -> (dtype, bits of the quantised weights)."""


def turned(model: nn.Module, kind: str) -> None:
    """Gives the weights of `model` the type of that name."""
    dtype, bits = KINDS[kind]
    if dtype is not None:
        model.set_dtype(dtype)
    if bits is not None:
        nn.quantize(model, group_size=64, bits=bits)
    mx.eval(model.parameters())


def last_row(model: nn.Module, drafter: Drafter | None, prompt: list[int], count: int, options: Any) -> mx.array:
    """(V,) log-probabilities at the last of `count` tokens."""
    rows = [row for _, row, *_ in generate_step(prompt, model, drafter=drafter, max_tokens=count, **options)]
    return rows[-1]


def measure(bench: Bench, numbers: tuple[int, ...], *, max_tokens: int, temp: float, seed: int) -> dict[str, Any]:
    """One row: how many texts part, and how far the two sides are apart where they do."""
    plain_settings = make_settings(None, max_tokens=max_tokens, temp=temp, seed=seed)
    drafted_settings = make_settings(bench.drafter, max_tokens=max_tokens, temp=temp, seed=seed, **beam(numbers))
    plain = try_out(bench.model, None, bench.prompts, plain_settings)
    drafted = try_out(bench.model, bench.drafter, bench.prompts, drafted_settings)
    options = {"temp": temp, "seed": seed}
    found = []
    for prompt, one, other in zip(bench.prompts, plain.texts, drafted.texts, strict=True):
        if (at := first_difference(one, other)) is not None:
            rows = [
                last_row(bench.model, None, prompt, at + 1, options),
                last_row(bench.model, bench.drafter, prompt, at + 1, options | beam(numbers)),
            ]
            found.append(Difference(at, *distance(*rows)))
    return {
        "shape": "x".join(str(number) for number in numbers),
        "texts": len(bench.prompts),
        "tokens": sum(len(text) for text in plain.texts),
        "parted": len(found),
        "errors": sum(not difference.rounding for difference in found),
        "largest gap": max((difference.distance for difference in found), default=0.0),
        "tokens/round": drafted.stats.tokens_per_round,
        "x plain": drafted.tokens_per_second / plain.tokens_per_second,
    }


def main() -> None:
    """Prints a row for each kind of weights and shape."""
    parser = make_parser(__doc__)
    parser.add_argument(
        "--kinds", nargs="+", choices=KINDS, default=["float32", "float16", "bfloat16", "8 bits", "4 bits"]
    )
    args = parser.parse_args()
    rows = []
    for kind in args.kinds:
        bench = open_bench(args)
        turned(bench.model, kind)
        rows += [
            {"weights": kind} | measure(bench, numbers, max_tokens=args.max_tokens, temp=args.temp, seed=args.seed)
            for numbers in args.shapes
        ]
    show(args, rows)


if __name__ == "__main__":
    main()
