"""Contestants that decode the same prompts in turns, in one process, and the record of each.

Before anything counts every contestant decodes a little of the first prompt. Then, prompt by prompt, all of them decode
`repeats` times. Each time another one begins, the first time on a prompt as well. The time is that from the first token
to the last: for everybody the prompt is read and the first token made before. A ratio is that of plain decoding's time
and the contestant's in the same turn. Bandwidth counts the target's weights alone, once a forward. Memory is the whole
process's, in which the models of all contestants are.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import median, quantiles
from time import perf_counter
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn

from mlx_redrafter.cli.doctor import describe_plan
from mlx_redrafter.cli.generate import first_difference
from mlx_redrafter.drafters.recurrent import Drafter
from mlx_redrafter.engine.plan import Plan
from mlx_redrafter.engine.stats import Stats
from mlx_redrafter.engine.wired_limit import wired_limit
from mlx_redrafter.generate import decode_tokens, fit_plan
from mlx_redrafter.options import Options

from .opponents import Steps, draft_model_steps, plain_steps
from .prompts import Prompt
from .record import SCHEMA
from .subject import Subject, bytes_per_forward

PLAIN, MLX_LM, MLX_LM_DRAFT, DRAFTED, RANDOM = (
    "plain",
    "mlx-lm",
    "mlx-lm draft model",
    "drafted",
    "drafted, random drafter",
)

WARM_UP = 16
"""Tokens that every contestant decodes before anything counts."""


@dataclass(frozen=True)
class RunOptions:
    """How everybody decodes."""

    max_tokens: int = 128
    temp: float = 0.0
    seed: int = 0
    repeats: int = 3
    num_draft_tokens: int = 3


class Run(NamedTuple):
    """One contestant's text.

    Attributes:
        tokens: their ids.
        reading: seconds until the first token.
        seconds: from the first token to the last.
        stats: of the rounds; None where there is nothing to tell.
        peak: bytes that were in use at most.
    """

    tokens: list[int]
    reading: float
    seconds: float
    stats: Stats | None
    peak: int


@dataclass(frozen=True)
class Contestant:
    """Somebody who decodes.

    Attributes:
        kind: one of the names above.
        plan: "off", "auto", or [W, K, N]; None for mlx-lm's own.
        steps: how it decodes.
    """

    kind: str
    plan: str | list[int] | None
    steps: Steps

    @property
    def label(self) -> str:
        """Its name in tables."""
        return label(self.kind, self.plan)

    def run(self, prompt: Prompt, max_tokens: int) -> Run:
        """Decodes a prompt."""
        mx.reset_peak_memory()
        asked = perf_counter()
        steps = self.steps(prompt.ids, max_tokens)
        last = next(steps)
        tokens, started = [int(last[0])], perf_counter()
        for last in steps:
            tokens.append(int(last[0]))
        stats = getattr(last, "stats", None)
        return Run(tokens, started - asked, perf_counter() - started, stats, mx.get_peak_memory())


def label(kind: str, plan: Any) -> str:
    """A contestant's name in tables: `1 x 3`, `4 x 3, 9 nodes`, `auto`, `plain`, ..."""
    unplanned = "auto" if plan == "auto" else kind
    told = describe_plan(Plan(*plan)) if isinstance(plan, list) else unplanned
    return f"{told}, random drafter" if kind == RANDOM else told


def contestants(
    subject: Subject, plans: Sequence[Any], options: RunOptions, *, mlx_lm: bool = True, random: bool = False
) -> list[Contestant]:
    """Plain decoding first, then mlx-lm's, then each plan, none of them twice.

    Args:
        plans: "auto", (W, K) or (W, K, N).
        mlx_lm: whether mlx-lm's own are among them.
        random: whether a drafter that knows nothing is, with plan "auto" and the costs of the subject's own.
    """
    found = [ours(subject, None, "off", options, PLAIN)]
    if mlx_lm:
        how: dict[str, Any] = {"temp": options.temp, "seed": options.seed}
        found.append(Contestant(MLX_LM, None, plain_steps(subject, **how)))
        if subject.draft_model is not None:
            how["num_draft_tokens"] = options.num_draft_tokens
            found.append(Contestant(MLX_LM_DRAFT, None, draft_model_steps(subject, **how)))
    if subject.drafter is not None:
        found += [ours(subject, subject.drafter, plan, options, DRAFTED) for plan in plans]
        if random:
            found.append(ours(subject, ignorant(subject.drafter), "auto", options, RANDOM))
    return list({side.label: side for side in found}.values())


def ours(subject: Subject, drafter: Drafter | None, plan: Any, options: RunOptions, kind: str) -> Contestant:
    """Our loop, with a plan; the chain of it where the model takes no trees.

    Raises:
        RedrafterError: there is no such plan, or options out of range.
    """
    keywords: dict[str, Any] = {"seed": options.seed, "plan": plan}
    keywords |= {"temp": options.temp} if subject.sampler is None else {"sampler": subject.sampler}
    asked = Options(**keywords)
    made = asked.resolve_plan(drafter)
    if isinstance(made, Plan):
        plan = list(fit_plan(subject.model, made))

    def steps(prompt: list[int], max_tokens: int) -> Iterator[Any]:
        return decode_tokens(prompt, subject.model, drafter, replace(asked, max_tokens=max_tokens))

    return Contestant(kind, plan, steps)


def ignorant(drafter: Drafter) -> Drafter:
    """A drafter of the same size and bits that has learned nothing."""
    mx.random.seed(0)
    found = Drafter(drafter.args)
    found.set_dtype(drafter.dtype)
    layers = dict(drafter.named_modules())

    def as_there(path: str, _: nn.Module) -> bool | dict[str, Any]:
        layer = layers[path]
        if not isinstance(layer, nn.QuantizedLinear):
            return False
        return {"group_size": layer.group_size, "bits": layer.bits, "mode": layer.mode}

    nn.quantize(found, class_predicate=as_there)
    mx.eval(found.parameters())
    return found


def warmed(subject: Subject, side: Contestant) -> Run:
    """A contestant's first tokens of the first prompt, which do not count."""
    with wired_limit(subject.model):
        return side.run(subject.prompts[0], WARM_UP)


def hold(
    subject: Subject, sides: Sequence[Contestant], options: RunOptions, *, warm: bool = False
) -> Iterator[list[dict[str, Any]]]:
    """The records of one prompt after another, a record for each contestant; the first one is plain decoding.

    Args:
        warm: whether everybody was warmed up already.
    """
    shared = subject.described | {
        "schema": SCHEMA,
        "kind": "speed",
        "draft_model": subject.draft_model_name,
        "temp": options.temp,
        "seed": options.seed,
        "max_tokens": options.max_tokens,
        "repeats": options.repeats,
    }
    read = bytes_per_forward(subject.model)
    for side in () if warm else sides:
        warmed(subject, side)
    with wired_limit(subject.model):
        for number, prompt in enumerate(subject.prompts):
            runs: dict[str, list[Run]] = defaultdict(list)
            for repeat in range(options.repeats):
                turn = (number * options.repeats + repeat) % len(sides)
                for side in [*sides[turn:], *sides[:turn]]:
                    runs[side.label].append(side.run(prompt, options.max_tokens))
            about = {"prompt": prompt.name, "category": prompt.category, "prompt_tokens": len(prompt.ids)}
            plain = runs[sides[0].label]
            yield [shared | about | told(side, runs[side.label], plain, read, options) for side in sides]


def told(side: Contestant, runs: list[Run], plain: list[Run], read: int | None, options: RunOptions) -> dict[str, Any]:
    """What a record says of a contestant on a prompt; of the rounds, those of the turn that took the median's time.

    Args:
        read: bytes of weights that a forward reads.
    """
    seconds = [run.seconds for run in runs]
    ratios = [other.seconds / run.seconds for other, run in zip(plain, runs, strict=True)]
    middle = sorted(runs, key=lambda run: run.seconds)[len(runs) // 2]
    tokens, stats = middle.tokens, middle.stats
    made = len(tokens) - 1
    compared = side.kind not in (MLX_LM, MLX_LM_DRAFT) or not options.temp
    places = [first_difference(plain[0].tokens, run.tokens) for run in runs] if compared else []
    differs = min((place for place in places if place is not None), default=None)
    forwards = stats.rounds if stats else made
    return {
        "contestant": side.kind,
        "plan": side.plan,
        "num_draft_tokens": options.num_draft_tokens if side.kind == MLX_LM_DRAFT else None,
        "tokens": len(tokens),
        "seconds": seconds,
        "tokens_per_second": made / median(seconds),
        "tokens_per_second_quartiles": [made / second for second in spread(seconds)[::-1]],
        "ratio": median(ratios),
        "ratio_quartiles": spread(ratios),
        "rounds": forwards,
        "tokens_per_round": None if stats is None else stats.tokens_per_round,
        "plain_steps": None if stats is None else stats.plain_steps,
        "acceptance_per_depth": None if stats is None or not stats.reached else list(stats.acceptance_per_depth),
        "peak_memory_gb": max(run.peak for run in runs) / 1e9,
        "bandwidth_gb_s": None if read is None else read * forwards / middle.seconds / 1e9,
        "same_tokens": None if side.kind == PLAIN or not compared else differs is None,
        "first_difference": differs,
    }


def spread(values: Sequence[float]) -> list[float]:
    """The lower and the upper quartile; of fewer than four values the least and the largest."""
    if len(values) < 4:
        return [min(values), max(values)]
    low, _, high = quantiles(values, n=4)
    return [low, high]
