"""What a request asks of the engine: checked token ids, and keywords of `stream_generate`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from mlx_lm.server import GenerationArguments, _make_logits_processors

from ..plan import AUTO, make_plan, read_plan
from .bodies import Refusal


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


def check_beam(asked: dict[str, Any], own_depth: int, most: int, vocab_size: int) -> None:
    """Bounds what a round may draft for one client, while others wait.

    Args:
        asked: the request's plan, beam_width, draft_depth and tree_size; some or none of them.
        own_depth: K, where it names none.
        most: nodes of a tree, the root included, before any are left out.

    Raises:
        Refusal: more than that.
        RedrafterError: no plan at all; see `make_plan`.
    """
    shape = read_plan(
        asked.get("plan", AUTO), *(asked.get(name) for name in ("beam_width", "draft_depth", "tree_size"))
    )
    if not isinstance(shape, tuple):
        return
    width, depth, size = shape
    plan = make_plan(width, own_depth if depth is None else depth, size, vocab_size)
    if (nodes := 1 + plan.width * plan.depth) > most:
        raise Refusal(
            f"1 + beam_width * draft_depth must be at most {most} here, got {nodes} for {plan.width} * {plan.depth}"
        )


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
        "prefill_step_size": flags.prefill_step_size,
        "kv_bits": flags.kv_bits,
        "kv_group_size": flags.kv_group_size,
        "quantized_kv_start": flags.quantized_kv_start,
    }
