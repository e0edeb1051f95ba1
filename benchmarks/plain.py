"""Plain decoding against mlx-lm's own `generate_step`.

    python -m benchmarks.plain

The two alternate on every prompt, `--repeats` times; the order changes each time. Reported: the median over all pairs
of (time of mlx-lm) / (time of plain), and its quartiles; 1.00 is the same speed.
"""

from __future__ import annotations

from statistics import quantiles

import mlx.core as mx
from mlx_lm.generate import generate_step as mlx_lm_generate_step

from mlx_redrafter.generation import generate_step

from .common import make_parser, open_bench, show, timed


def main() -> None:
    """Prints one row."""
    parser = make_parser(__doc__)
    parser.add_argument("--repeats", type=int, default=8)
    args = parser.parse_args()
    bench = open_bench(args)

    def seconds(ours: bool, prompt: list[int]) -> float:
        if ours:
            return timed(generate_step(prompt, bench.model, max_tokens=args.max_tokens))[1]
        return timed(mlx_lm_generate_step(mx.array(prompt), bench.model, max_tokens=args.max_tokens))[1]

    for ours in (False, True):
        seconds(ours, bench.prompts[0])
    ratios = []
    for repeat in range(args.repeats):
        for at, prompt in enumerate(bench.prompts):
            first = bool((repeat + at) % 2)
            times = {side: seconds(side, prompt) for side in (first, not first)}
            ratios.append(times[False] / times[True])
    low, middle, high = quantiles(ratios, n=4)
    show(args, [{"pairs": len(ratios), "x mlx-lm": middle, "lower quartile": low, "upper quartile": high}])


if __name__ == "__main__":
    main()
