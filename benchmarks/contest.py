"""Contestants that decode the same prompts in turns, in one process, and the record of each.

Before anything counts every contestant decodes a little of the first prompt. Then, prompt by prompt, all of them decode
`repeats` times, each time beginning with another one. The time is that from the first token to the last. A ratio is
that of plain decoding's time and the contestant's in the same turn.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import median, quantiles
from time import perf_counter
from typing import Any, NamedTuple

import mlx.core as mx
from mlx_lm.generate import generate_step, speculative_generate_step
from mlx_lm.sample_utils import make_sampler

from mlx_redrafter.comparing import first_difference
from mlx_redrafter.drafter import Drafter
from mlx_redrafter.generation import make_settings
from mlx_redrafter.loop import Settings, decode
from mlx_redrafter.plan import Plan
from mlx_redrafter.stats import Stats

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

WARM_UP = 8
"""Tokens that every contestant decodes before anything counts."""


@dataclass(frozen=True)
class Options:
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
        seconds: from the first token to the last.
        stats: of the rounds; None where there is nothing to tell.
        peak: bytes that were in use at most.
    """

    tokens: list[int]
    seconds: float
    stats: Stats | None
    peak: int


@dataclass(frozen=True)
class Contestant:
    """Somebody who decodes.

    Attributes:
        kind: one of the names above.
        plan: "off", "auto", or [W, K, N]; None for mlx-lm's own.
        steps: (prompt ids, max_tokens) -> items that begin with the token, and may have `stats`.
    """

    kind: str
    plan: str | list[int] | None
    steps: Callable[[list[int], int], Iterator[Any]]

    @property
    def label(self) -> str:
        """Its name in tables."""
        return label(self.kind, self.plan)

    def run(self, prompt: Prompt, max_tokens: int) -> Run:
        """Decodes a prompt."""
        mx.reset_peak_memory()
        steps = self.steps(prompt.ids, max_tokens)
        last = next(steps)
        tokens, started = [int(last[0])], perf_counter()
        for last in steps:
            tokens.append(int(last[0]))
        return Run(tokens, perf_counter() - started, getattr(last, "stats", None), mx.get_peak_memory())


def label(kind: str, plan: Any) -> str:
    """A contestant's name in tables: `1 x 3`, `4 x 3, 9 nodes`, `auto`, `plain`, ..."""
    if isinstance(plan, list):
        width, depth, size = plan
        told = f"{width} x {depth}" + ("" if size == 1 + width * depth else f", {size} nodes")
    else:
        told = "auto" if plan == "auto" else kind
    return f"{told}, random drafter" if kind == RANDOM else told


def contestants(
    subject: Subject, plans: Sequence[Any], options: Options, *, mlx_lm: bool = True, random: bool = False
) -> list[Contestant]:
    """Plain decoding first, then mlx-lm's, then each plan.

    Args:
        plans: "auto", (W, K) or (W, K, N).
        mlx_lm: whether mlx-lm's own are among them.
        random: whether a drafter that knows nothing is, with plan "auto".
    """
    found = [ours(subject, None, "off", options, PLAIN)]
    if mlx_lm:
        found.append(Contestant(MLX_LM, None, theirs(subject, options)))
        if subject.draft_model is not None:
            found.append(Contestant(MLX_LM_DRAFT, None, theirs(subject, options, speculative=True)))
    if subject.drafter is not None:
        found += [ours(subject, subject.drafter, plan, options, DRAFTED) for plan in plans]
        if random:
            found.append(ours(subject, ignorant(subject.drafter), "auto", options, RANDOM))
    return found


def ours(subject: Subject, drafter: Drafter | None, plan: Any, options: Options, kind: str) -> Contestant:
    """Our loop, with a plan."""
    settings: Settings = make_settings(drafter, temp=options.temp, seed=options.seed, plan=plan)
    if subject.chooser is not None:
        settings = replace(settings, chooser=subject.chooser)
    told = list(settings.plan) if isinstance(settings.plan, Plan) else plan

    def steps(prompt: list[int], max_tokens: int) -> Iterator[Any]:
        return decode(prompt, subject.model, drafter, replace(settings, max_tokens=max_tokens))

    return Contestant(kind, told, steps)


def theirs(
    subject: Subject, options: Options, *, speculative: bool = False
) -> Callable[[list[int], int], Iterator[Any]]:
    """mlx-lm's plain loop, or its speculation with the draft model."""

    def steps(prompt: list[int], max_tokens: int) -> Iterator[Any]:
        mx.random.seed(options.seed)
        sampler = make_sampler(options.temp) if options.temp else None
        if not speculative:
            return generate_step(mx.array(prompt), subject.model, max_tokens=max_tokens, sampler=sampler)
        assert subject.draft_model is not None
        return speculative_generate_step(
            mx.array(prompt),
            subject.model,
            subject.draft_model,
            num_draft_tokens=options.num_draft_tokens,
            max_tokens=max_tokens,
            sampler=sampler,
        )

    return steps


def ignorant(drafter: Drafter) -> Drafter:
    """A drafter of the same size that has learned nothing."""
    mx.random.seed(0)
    found = Drafter(drafter.args)
    found.set_dtype(drafter.dtype)
    mx.eval(found.parameters())
    return found


def hold(subject: Subject, sides: Sequence[Contestant], options: Options) -> Iterator[list[dict[str, Any]]]:
    """The records of one prompt after another, a record for each contestant; the first one is plain decoding."""
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
    for side in sides:
        side.run(subject.prompts[0], WARM_UP)
    for prompt in subject.prompts:
        runs: dict[str, list[Run]] = defaultdict(list)
        for repeat in range(options.repeats):
            turn = repeat % len(sides)
            for side in [*sides[turn:], *sides[:turn]]:
                runs[side.label].append(side.run(prompt, options.max_tokens))
        about = {"prompt": prompt.name, "category": prompt.category, "prompt_tokens": len(prompt.ids)}
        plain = runs[sides[0].label]
        yield [shared | about | told(side, runs[side.label], plain, read, options) for side in sides]


def told(side: Contestant, runs: list[Run], plain: list[Run], read: int | None, options: Options) -> dict[str, Any]:
    """What a record says of a contestant on a prompt.

    Args:
        read: bytes of weights that a forward reads.
    """
    seconds = [run.seconds for run in runs]
    ratios = [other.seconds / run.seconds for other, run in zip(plain, runs, strict=True)]
    tokens, stats = runs[-1].tokens, runs[-1].stats
    made = len(tokens) - 1
    compared = side.kind not in (MLX_LM, MLX_LM_DRAFT) or not options.temp
    differs = first_difference(plain[-1].tokens, tokens) if compared else None
    forwards = None if side.kind == MLX_LM_DRAFT else (stats.rounds if stats else 0) or made
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
        "plain_steps": None if stats is None else stats.skipped if stats.rounds else made,
        "acceptance_per_depth": None if stats is None or not stats.reached else list(stats.acceptance_per_depth),
        "peak_memory_gb": max(run.peak for run in runs) / 1e9,
        "bandwidth_gb_s": None if forwards is None or read is None else read * forwards / median(seconds) / 1e9,
        "same_tokens": None if side.kind == PLAIN or not compared else differs is None,
        "first_difference": differs,
    }


def spread(values: Sequence[float]) -> list[float]:
    """The lower and the upper quartile; of fewer than four values the least and the largest."""
    if len(values) < 4:
        return [min(values), max(values)]
    low, _, high = quantiles(values, n=4)
    return [low, high]
