"""Checks whether one forward can compute the rows of several texts, each with its own cache."""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.generate import generation_stream
from mlx_lm.models.cache import make_prompt_cache

from ..engine.tree import chain
from ..errors import join_lines
from . import kv_cache
from .model_checks import get_exact_length
from .model_parts import get_vocab_size
from .target import Target

MAX_ERROR = 0.005
"""The largest mean square of differences between logits, as a share of their variance.

Rounding makes less than 0.001.
"""

PROMPT_LENGTHS = (3, 9, 14)
"""Of the texts that are compared."""

READ: list[int] = []

ROUNDS = (([0], [0, 1, 2], READ), ([0, 1, 2, 3], [0], [0, 1]), ([0], [0], [0]))
"""For each round the nodes of each text that are accepted, of a chain of 4.

[0] is a step. `READ` reads the end of a prompt; all others are read before the rounds.
"""


def explain_separate(model: nn.Module) -> str | None:
    """Why texts are not decoded in one forward; None if they can be.

    Three rounds of three texts, with rejections and a prompt, must give the logits of each text
    alone.
    """
    if types := kv_cache.list_unknown_types(make_prompt_cache(model), kv_cache.KNOWN):
        return f"its cache ({', '.join(types)}) is not known"
    if get_exact_length(model) is not None:
        return "its positions depend on the length of the text"
    try:
        with mx.stream(generation_stream):
            alone = _decode(model, is_joint=False)
            joint = _decode(model, is_joint=True)
            difference = mx.where(mx.isfinite(alone), joint - alone, 0)
            variance = mx.var(mx.where(mx.isfinite(alone), alone, 0))
            error = float(mx.mean(difference**2) / variance)
    except Exception as caught:  # model code may raise anything
        return f"its layers do not take the rows of several texts: {join_lines(caught)}"
    return None if error < MAX_ERROR else "several texts in one forward gave other logits"


def _decode(model: nn.Module, *, is_joint: bool) -> mx.array:
    """(R, V) float32 logits of all rounds, of the three texts in one forward or of each alone."""
    vocab_size = get_vocab_size(model)
    targets = [Target(model, rolls_back=True) for _ in PROMPT_LENGTHS]
    prompts = [mx.array([(7919 * i + 1) % vocab_size for i in range(n)]) for n in PROMPT_LENGTHS]
    for target, prompt, first in zip(targets, prompts, ROUNDS[0], strict=True):
        target.forward(prompt[:4] if first == READ else prompt)
        target.evaluate()
    logits = []
    for turn, paths in enumerate(ROUNDS):
        rows = []
        for number, (target, path) in enumerate(zip(targets, paths, strict=True)):
            seed = 31 * turn + 17 * number + 2
            tokens = mx.array([(104729 * i + seed) % vocab_size for i in range(4)], mx.int32)
            if path == READ:
                rows.append(target.prepare(prompts[number][4:], want_logits=False))
            elif path == [0]:
                rows.append(target.prepare(tokens[:1]))
            else:
                rows.append(target.prepare_verify(chain(tokens[0], tokens[1:]), is_tree=False))
        groups = [rows] if is_joint else [[each] for each in rows]
        for group in groups:
            for each, own in zip(targets[0].run(group), group, strict=True):
                mx.eval(each.logits)  # all ranks must send their messages in the same order
                if own.part.want_logits:
                    logits.append(each.logits.astype(mx.float32))
        for target, path in zip(targets, paths, strict=True):
            target.evaluate()
            mx.eval(target.list_pending_arrays())
            if len(path) > 1:
                target.keep_path(path, path)  # the ids of accepted tokens are only replayed
    return mx.concatenate(logits)
