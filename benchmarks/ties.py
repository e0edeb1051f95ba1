"""How often a drafted text parts from the plain one because two logits tie, by the type of the weights.

    python -m benchmarks ties --shapes 1,3 4,5 --max-tokens 256

Every prompt is decoded plainly and with the drafter at each shape. Where the texts part, the log-probabilities of both
sides there are compared: rounding explains the difference (a tie), or it does not (an error). `float32` to `4 bits`
name what the target is turned into; `as it is` leaves it alone, as a quantized one must be.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlx_redrafter.cli.generate import first_difference, judge_difference
from mlx_redrafter.drafters.recurrent import Drafter
from mlx_redrafter.errors import RedrafterError
from mlx_redrafter.generate import decode_prompts, generate_step
from mlx_redrafter.options import Options

from .building import quantize
from .common import positive
from .shapes import add_shapes, show
from .subject import arrays, drafter_of, open_subject

AS_IT_IS = "as it is"

KINDS = {
    AS_IT_IS: (None, None),
    "float32": (mx.float32, None),
    "float16": (mx.float16, None),
    "bfloat16": (mx.bfloat16, None),
    "8 bits": (mx.float16, 8),
    "4 bits": (mx.float16, 4),
}
"""name -> (dtype, bits of the quantized weights)."""


def turned(model: nn.Module, kind: str) -> None:
    """Gives the weights of `model` the type of that name.

    Raises:
        RedrafterError: they are quantized, and should become something else.
    """
    dtype, bits = KINDS[kind]
    if kind != AS_IT_IS and any(name.endswith(".scales") for name, _ in arrays(model)):
        raise RedrafterError(
            f"expected weights that can be turned into {kind}, got quantized ones: give --kinds '{AS_IT_IS}'"
        )
    if dtype is not None:
        model.set_dtype(dtype)
    if bits is not None:
        quantize(model, bits)
    mx.eval(model.parameters())


def last_row(model: nn.Module, drafter: Drafter | None, prompt: list[int], count: int, options: Any) -> mx.array:
    """(V,) log-probabilities at the last of `count` tokens."""
    rows = [row for _, row, *_ in generate_step(prompt, model, drafter=drafter, max_tokens=count, **options)]
    return rows[-1]


def measure(
    model: nn.Module,
    drafter: Drafter,
    prompts: Sequence[list[int]],
    plan: Sequence[int],
    *,
    max_tokens: int,
    temp: float,
    seed: int,
) -> dict[str, Any]:
    """One row: how many texts part, and how far the two sides are apart where they do.

    Args:
        prompts: token ids.
        plan: W, K and, where not all nodes are verified, N.
    """
    options: dict[str, Any] = {"temp": temp, "seed": seed}
    drafted_options = options | {"plan": plan}
    plain = decode_prompts(model, None, prompts, Options(max_tokens=max_tokens, **options))
    drafted = decode_prompts(model, drafter, prompts, Options(max_tokens=max_tokens, **drafted_options))
    found = []
    for prompt, one, other in zip(prompts, plain.texts, drafted.texts, strict=True):
        if (at := first_difference(one, other)) is not None:
            rows = [
                last_row(model, None, prompt, at + 1, options),
                last_row(model, drafter, prompt, at + 1, drafted_options),
            ]
            sampler = Options(**options).make_sampler(seed)
            found.append(judge_difference(at, (rows[0], rows[1]), (one[at], other[at]), sampler, len(prompt) + at))
    return {
        "shape": "x".join(str(number) for number in plan),
        "texts": len(prompts),
        "tokens": sum(len(text) for text in plain.texts),
        "parted": len(found),
        "errors": sum(not difference.rounding for difference in found),
        "largest gap": max((difference.distance for difference in found), default=0.0),
        "tokens/round": drafted.stats.tokens_per_round,
    }


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags."""
    add_shapes(parser)
    parser.add_argument("--max-tokens", type=positive, default=128, help="of a text (default: %(default)s)")
    default = [kind for kind in KINDS if kind != AS_IT_IS]
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=default, help=f"default: all but '{AS_IT_IS}'")


def run(args: argparse.Namespace) -> int:
    """Prints a row for each kind of weights and shape; the exit status."""
    rows = []
    # A quantized target is refused before anything is decoded.
    for kind in sorted(dict.fromkeys(args.kinds), key=lambda kind: kind == AS_IT_IS):
        subject = open_subject(args)
        drafter = drafter_of(subject, "counting ties")
        turned(subject.model, kind)
        prompts = [prompt.ids for prompt in subject.prompts]
        rows += [
            {"weights": kind}
            | measure(subject.model, drafter, prompts, plan, max_tokens=args.max_tokens, temp=args.temp, seed=args.seed)
            for plan in args.shapes
        ]
    show(args, rows)
    return 0
