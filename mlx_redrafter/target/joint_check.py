"""Checks whether one forward can compute the rows of several texts, each with its own cache."""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.generate import generation_stream
from mlx_lm.models.cache import ArraysCache, make_prompt_cache

from ..engine.tree import chain
from ..errors import join_lines
from . import kv_cache
from .model_checks import get_exact_length
from .model_parts import get_vocab_size
from .rollback_check import MAX_ERROR
from .target import Target, TextRows

PROMPT_LENGTHS = (3, 9, 14)
"""Of the texts that are compared."""

ROUNDS = (([0], [0, 1, 2], [0]), ([0, 1, 2, 3], [0], [0, 1]))
"""For each round the nodes of each text that are accepted, of a chain of 4; [0] is a step."""


def explain_separate(model: nn.Module) -> str | None:
    """Why texts are not decoded in one forward; None if they can be.

    Two rounds of three texts with rejections must give the logits of plain reading.
    """
    cache = make_prompt_cache(model)
    known = (*kv_cache.TRIMMABLE, ArraysCache)
    if types := kv_cache.list_unknown_types(cache, known):
        return f"its cache ({', '.join(types)}) is not known"
    if get_exact_length(model) is not None:
        return "its positions depend on the length of the text"
    vocab_size = get_vocab_size(model)
    try:
        with mx.stream(generation_stream):
            error = _compare(model, vocab_size)
    except Exception as error:  # model code may raise anything
        return f"its layers do not take the rows of several texts: {join_lines(error)}"
    return None if error < MAX_ERROR else "several texts in one forward gave other logits"


def _compare(model: nn.Module, vocab_size: int) -> float:
    """The mean square of differences to plain reading, as a share of the logits' variance."""
    texts = [[(7919 * i + 1) % vocab_size for i in range(length)] for length in PROMPT_LENGTHS]
    targets = [Target(model, rolls_back=True) for _ in texts]
    found = []
    for target, text in zip(targets, texts, strict=True):
        found.append([target.forward(mx.array(text)).logits])
    for turn, paths in enumerate(ROUNDS):
        drafts = []
        rows: list[TextRows] = []
        for number, (target, path) in enumerate(zip(targets, paths, strict=True)):
            seed = 31 * turn + 17 * number + 2
            tokens = [(104729 * i + seed) % vocab_size for i in range(4)]
            drafts.append(tokens)
            if path == [0]:
                rows.append(target.prepare(mx.array(tokens[:1])))
            else:
                draft = chain(mx.array(tokens[0]), mx.array(tokens[1:], mx.int32))
                rows.append(target.prepare_verify(draft, is_tree=False))
        forwards = targets[0].run(rows)
        columns = zip(targets, paths, drafts, forwards, texts, found, strict=True)
        for target, path, draft, forward, text, logits in columns:
            mx.eval(forward.logits, target.list_pending_arrays())
            accepted = [draft[node] for node in path]
            if path != [0]:
                target.keep_path(path, accepted)
            logits.append(forward.logits[mx.array(path)])
            text += accepted

    errors = []
    for text, logits in zip(texts, found, strict=True):
        plain = model(mx.array([text]), cache=make_prompt_cache(model))[0]
        is_finite = mx.isfinite(plain)
        joint = mx.where(is_finite, mx.concatenate(logits).astype(mx.float32), 0)
        plain = mx.where(is_finite, plain.astype(mx.float32), 0)
        errors.append(mx.mean((joint - plain) ** 2) / mx.var(plain))
    return float(mx.stack(errors).max())
