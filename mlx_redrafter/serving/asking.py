"""What a request asks of the engine: checked token ids, and keywords of `stream_generate`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from mlx_lm.server import GenerationArguments, _make_logits_processors

from ..drafters.protocol import Drafter
from ..engine.plan import MAX_DRAFT_DEPTH, MAX_NODES, Plan, make_plan
from ..options import PLAN_OPTIONS, Options
from .bodies import LARGEST, Refusal

CACHE = ("prefill_step_size", "kv_bits", "kv_group_size", "quantized_kv_start")
"""Flags of mlx-lm's server that are keywords of `Options`; no request has them."""


def check(prompt: Sequence[int], args: GenerationArguments, most: int | None, vocab_size: int) -> None:
    """What can be said only once there is a prompt and a model.

    Args:
        most: tokens that a prompt may have.

    Raises:
        Refusal: an empty prompt, a longer one, or token ids that the model does not have.
    """
    if not prompt:
        raise Refusal("the prompt is empty: expected at least one token")
    if most is not None and len(prompt) > most:
        raise Refusal(f"the prompt must have at most {most} tokens, got {len(prompt)}")
    if odd := [token for token in args.logits.logit_bias or () if token >= vocab_size]:
        raise Refusal(f"logit_bias must be of token ids from 0 to {vocab_size - 1}, got {odd[0]}")
    if args.top_logprobs > vocab_size:
        raise Refusal(f"top_logprobs must be at most the vocabulary's {vocab_size}, got {args.top_logprobs}")


def fixed_plan(asked: dict[str, Any], default_depth: int, vocab_size: int) -> Plan | None:
    """The plan of every round, where one is asked for.

    Args:
        asked: some of `PLAN_OPTIONS`, or none.
        default_depth: K, where it names none.

    Raises:
        RedrafterError: no plan at all; see `Options` and `make_plan`.
    """
    given = {name: asked[name] for name in PLAN_OPTIONS if asked.get(name) is not None}
    shape = Options(**given).plan_shape()
    if not isinstance(shape, tuple):
        return None
    width, depth, size = shape
    return make_plan(width, default_depth if depth is None else depth, size, vocab_size)


def check_beam(asked: dict[str, Any], default_depth: int, most: int, vocab_size: int) -> None:
    """Bounds what a round may draft for one client, while others wait.

    Args:
        asked, default_depth: see `fixed_plan`.
        most: nodes of a tree, the root included, before any are left out.

    Raises:
        Refusal: more than that.
        RedrafterError: see `fixed_plan`.
    """
    plan = fixed_plan(asked, default_depth, vocab_size)
    if plan is not None and (nodes := 1 + plan.width * plan.depth) > most:
        raise Refusal(
            f"1 + beam_width * draft_depth must be at most {most} here, got {nodes} for {plan.width} * {plan.depth}"
        )


def beam_of(flags: argparse.Namespace) -> dict[str, Any]:
    """The command line's beam: those of `PLAN_OPTIONS` that it gives."""
    return {name: value for name in PLAN_OPTIONS if (value := getattr(flags, name)) is not None}


def check_flags(flags: argparse.Namespace, vocab_size: int = LARGEST, drafter: Drafter | None = None) -> Options:
    """What a request gets that says nothing: no client shall be blamed for it.

    Args:
        vocab_size, drafter: of the models, once they are loaded; until then only what fits none is refused.

    Raises:
        RedrafterError: see `Options`.
    """
    beam = beam_of(flags)
    given = {name: getattr(flags, name) for name in (*CACHE, "max_tokens", "temp", "top_p", "top_k", "min_p")}
    options = Options(**given, **beam)
    options.make_sampler(seed=0).check(vocab_size)
    if drafter is None:
        deepest = min(MAX_DRAFT_DEPTH, max(1, MAX_NODES // beam.get("beam_width", 1)))
        fixed_plan(beam, deepest, vocab_size)
    else:
        options.resolve_plan(drafter)
    return options


def options(args: GenerationArguments, flags: argparse.Namespace) -> dict[str, Any]:
    """The keywords for a request's sampling and the command line's cache."""
    sampling = args.sampling
    xtc = {"xtc_probability": sampling.xtc_probability, "xtc_threshold": sampling.xtc_threshold}
    if not (sampling.temperature and sampling.xtc_probability):
        xtc = {}  # mlx-lm looks at the threshold only where it matters
    return {
        "max_tokens": args.max_tokens,
        "temp": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": sampling.min_p,
        **xtc,
        "seed": args.seed,
        "logits_processors": _make_logits_processors(args) or None,
        **{name: getattr(flags, name) for name in CACHE},
    }
