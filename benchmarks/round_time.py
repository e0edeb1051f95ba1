"""Where a round's time goes: a verify forward of N nodes, a draft, and a whole round, each measured alone.

    python -m benchmarks round
    python -m benchmarks round --synthetic 2048,4 --shapes 1,1 1,4 4,4 --repeats 20

A whole round is what the loop does: verify, choose, accept, the next draft enqueued, the one read. All parts
alternate; medians of `--repeats`. The last columns are round / (verify + draft) of each turn, its median and quartiles.
`--synthetic D,LAYERS` measures a llama of that size and its drafter, both of random float32 weights: what a round costs
does not depend on what they say.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Callable, Sequence
from statistics import median
from time import perf_counter
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn

from mlx_redrafter.drafters.recurrent import Drafter, DrafterArgs
from mlx_redrafter.engine.plan import Plan
from mlx_redrafter.engine.round import Chooser, Draft, make_draft, verify
from mlx_redrafter.engine.target import Target
from mlx_redrafter.engine.types import Tip
from mlx_redrafter.options import Options

from .building import make_target
from .common import positive
from .contest import spread
from .shapes import add_shapes, show
from .subject import drafter_of, open_subject
from .targets import TargetShape

HEAD_SIZE = 64
VOCAB_SIZE = 32000
"""Of synthetic models."""


class Pair(NamedTuple):
    """A target, its drafter, and the token ids that rounds stand behind."""

    model: nn.Module
    drafter: Drafter
    prompt: list[int]


def measure(pair: Pair, shape: Sequence[int], *, repeats: int, temp: float = 0.0, seed: int = 0) -> dict[str, Any]:
    """One row: the parts of a round of this shape, W, K and perhaps N, each of them so many times."""
    options = Options(temp=temp, seed=seed, plan=shape)
    plan, chooser = options.resolve_plan(pair.drafter), Chooser(options.make_sampler(seed))
    assert isinstance(plan, Plan)
    prompt = mx.array(pair.prompt)
    target = Target(pair.model)
    hidden = target.forward(prompt, want_hidden=True).hidden
    assert hidden is not None
    start = Tip(hidden[-1], prompt[-1])
    behind = mx.array(target.length + 1)

    def draft(tip: Tip) -> Draft:
        return make_draft(pair.drafter, target, chooser.sampler, tip, behind, plan, ordered=False)

    ahead = draft(start)
    mx.eval(start, behind, ahead)

    def plain_step() -> None:
        mx.eval(target.forward(start.token.reshape(1), want_hidden=False).logits)
        target.keep_path([], [])

    def verify_alone() -> None:
        tree = ahead.tree
        mx.eval(target.verify(tree, branched=plan.width > 1))
        target.keep_path([], [])

    def draft_alone() -> None:
        mx.eval(draft(start))

    def whole_round() -> None:
        outcome = verify(target, ahead, chooser, None, plan, plan.depth)
        mx.async_eval(outcome)
        assert outcome.tip is not None
        following = draft(outcome.tip)
        mx.async_eval(following)
        outcome.report.tolist()
        mx.eval(following)
        target.keep_path([], [])

    parts = {"plain": plain_step, "verify": verify_alone, "draft": draft_alone, "round": whole_round}
    times: dict[str, list[float]] = defaultdict(list)
    for _ in range(repeats + 3):
        for name, part in parts.items():
            times[name].append(milliseconds(part))
    alone = {name: median(values[3:]) for name, values in times.items()}
    return {
        "W": plan.width,
        "K": plan.depth,
        "N": plan.size,
        **{f"{name} ms": value for name, value in alone.items()},
        "draft step %": 100 * alone["draft"] / plan.depth / alone["plain"],
        **excess(*(times[name][3:] for name in ("round", "verify", "draft"))),
    }


def milliseconds(work: Callable[[], None]) -> float:
    """How long a call of `work` takes."""
    started = perf_counter()
    work()
    return (perf_counter() - started) * 1e3


def excess(rounds: list[float], verifies: list[float], drafts: list[float]) -> dict[str, float]:
    """A round in terms of its parts, turn by turn: the median and the quartiles, of few turns the ends."""
    ratios = [whole / (verify + draft) for whole, verify, draft in zip(rounds, verifies, drafts, strict=True)]
    low, high = spread(ratios)
    return {"x sum": median(ratios), "lower": low, "upper": high}


def dimensions(text: str) -> tuple[int, int]:
    """`D,LAYERS` of a synthetic target."""
    try:
        hidden, layers = (int(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected D,LAYERS, got {text!r}") from None
    if hidden < HEAD_SIZE or hidden % HEAD_SIZE or layers < 1:
        raise argparse.ArgumentTypeError(f"expected D a multiple of {HEAD_SIZE} and LAYERS at least 1, got {text!r}")
    return hidden, layers


def synthetic(hidden: int, layers: int) -> Pair:
    """A llama in the proportions of the small ones of that family, and a drafter whose `exit_dim` is D / 4."""
    heads = hidden // HEAD_SIZE
    shape = TargetShape(
        name="synthetic",
        model_type="llama",
        hidden_size=hidden,
        num_hidden_layers=layers,
        intermediate_size=11 * hidden // 4,
        num_attention_heads=heads,
        num_key_value_heads=heads // 4 if heads % 4 == 0 else heads,
        head_dim=HEAD_SIZE,
        vocab_size=VOCAB_SIZE,
        tie_word_embeddings=True,
    )
    drafter = Drafter(DrafterArgs(hidden, VOCAB_SIZE, hidden // 4, 1))
    mx.eval(drafter.parameters())
    return Pair(make_target(shape, 32, mx.float32), drafter, list(range(100, 164)))


def opened(args: argparse.Namespace) -> Pair:
    """The pair of the flags, and its first prompt.

    Raises:
        RedrafterError: a model, drafter or prompt that is not to be had.
    """
    subject = open_subject(args)
    return Pair(subject.model, drafter_of(subject, "a round"), subject.prompts[0].ids)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags."""
    add_shapes(parser)
    parser.add_argument("--repeats", type=positive, default=200, help="turns of all parts (default: %(default)s)")
    parser.add_argument("--synthetic", type=dimensions, metavar="D,LAYERS", help="a target of this size, at random")


def run(args: argparse.Namespace) -> int:
    """Prints a row a shape; the exit status."""
    pair = synthetic(*args.synthetic) if args.synthetic else opened(args)
    rows = [measure(pair, shape, repeats=args.repeats, temp=args.temp, seed=args.seed) for shape in args.shapes]
    show(args, rows)
    return 0
