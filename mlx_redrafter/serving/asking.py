"""What a request asks of the engine: checked token ids, and keywords of `stream_generate`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from mlx_lm.server import GenerationArguments, _make_logits_processors

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


def options(args: GenerationArguments, flags: argparse.Namespace) -> dict[str, Any]:
    """The keywords for a request's sampling and the command line's cache."""
    sampling = args.sampling
    return {
        "max_tokens": args.max_tokens,
        "temp": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": sampling.min_p,
        "xtc_probability": sampling.xtc_probability,
        "xtc_threshold": sampling.xtc_threshold,
        "seed": args.seed,
        "logits_processors": _make_logits_processors(args) or None,
        "prefill_step_size": flags.prefill_step_size,
        "kv_bits": flags.kv_bits,
        "kv_group_size": flags.kv_group_size,
        "quantized_kv_start": flags.quantized_kv_start,
    }
