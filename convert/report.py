"""What a conversion did to a drafter: sizes, its outputs, and the tokens per round that are left."""

from __future__ import annotations

from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from ..drafters.recurrent import Drafter
from ..generate import decode_prompts, encode_chat
from ..options import Options

ROWS = 8
PROMPTS = (
    "Write a function that reverses a linked list.\n\ndef reverse(",
    "Explain in three sentences why the sky is blue.",
    "import os\nimport sys\n\n\nclass Reader:\n    def __init__(self, path):\n",
    "List the planets of the solar system, with one fact about each.",
)
NEW_TOKENS = 64


class Difference(NamedTuple):
    """How far the result's logits are from the source's.

    Attributes:
        largest: the largest absolute difference.
        scale: the source's largest absolute logit.
        same: the share of rows whose likeliest token is the same.
    """

    largest: float
    scale: float
    same: float


def outputs(drafter: Drafter) -> mx.array:
    """(ROWS, V') logits of what it can guess, after two steps from random inputs, always the same ones; evaluated."""
    dims = drafter.args.hidden_size
    draws = np.random.default_rng(0).normal(size=(3, ROWS, dims)).astype(np.float32)
    hidden, first, second = (mx.array(rows).astype(drafter.dtype) for rows in draws)
    logits = drafter.logits(hidden, drafter.advance(second, drafter.advance(first, None)))
    if "draft_ids" in drafter:
        logits = logits[:, drafter.draft_ids]
    mx.eval(logits)
    return logits


def finite(logits: mx.array) -> bool:
    """Whether they can be compared."""
    return bool(mx.isfinite(logits).all().item())


def difference(source: mx.array, result: mx.array) -> Difference:
    """How far `result` (ROWS, V) is from `source` (ROWS, V)."""
    same = mx.argmax(source, axis=-1) == mx.argmax(result, axis=-1)
    return Difference(mx.abs(source - result).max().item(), mx.abs(source).max().item(), same.mean().item())  # type: ignore[arg-type]


def tokens_per_round(model: nn.Module, tokenizer: Any, drafter: Drafter) -> float:
    """Greedy, drafting as deep as it says, pooled over a few prompts, through the chat template where there is one."""
    prompts = [encode_chat(tokenizer, text) for text in PROMPTS]
    settings = Options(max_tokens=NEW_TOKENS, beam_width=1)
    return decode_prompts(model, drafter, prompts, settings, set(tokenizer.eos_token_ids)).stats.tokens_per_round
