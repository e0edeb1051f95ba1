"""Checks whether mlx-lm decodes requests in a batch as it decodes each alone.

For some architectures it does not: their masks ignore the padding of shorter texts, or assume that
all requests are at the same position.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_map
from mlx_lm.generate import BatchGenerator
from mlx_lm.models.cache import make_prompt_cache

from ...decoding.options import Options
from ...engine.round import log_softmax
from ...measuring.pair import Pair
from ...target import kv_cache
from ...target.model_checks import make_cache
from ...target.model_parts import get_module_name

TEST_PROMPTS = ([1, 2, 3, 0, 2], [3, 1, 0, 2, 1, 3, 2, 0, 1, 1, 2, 3, 0, 2])
FOLLOWING = [1, 1, 1]
# A batch may differ by BATCH_TOLERANCE standard deviations, plus PREFILL_FACTOR times what
# prefilling in one piece changes.
BATCH_TOLERANCE = 1e-3
PREFILL_FACTOR = 3.0


def can_batch(pair: Pair, options: Options) -> bool:
    """Whether mlx-lm can decode requests in a batch whose prompts were read alone.

    Two short texts in a batch are compared with each alone, in float32: in 16 bits, forwards of
    different shapes differ by as much as some wrong batches do. In the model's own dtype a batch
    only has to run without NaN.
    """
    model = pair.model
    cache = make_cache(model, options.max_kv_size)
    # mlx-lm's batches support neither quantized caches nor ring caches that keep their first rows.
    if options.exact or options.kv_bits is not None or kv_cache.keeps_first_rows(cache):
        return False
    exact = cast(nn.Module, _InFloat32(model))
    alone = [_decode_alone(exact, prompt, len(prompt) - 1) for prompt in TEST_PROMPTS]
    whole = [_decode_alone(exact, prompt, len(prompt) + len(FOLLOWING)) for prompt in TEST_PROMPTS]
    most = BATCH_TOLERANCE + PREFILL_FACTOR * _compare(pair, alone, whole)
    try:
        if _compare(pair, alone, _decode_together(exact)) <= most:
            own = mx.concatenate(_decode_together(model))
            if not mx.isnan(own).any().item():
                return True
    except Exception as error:  # model code may raise anything
        logging.debug(f"mlx-lm failed to batch {get_module_name(model)}", exc_info=error)
    logging.warning(
        f"mlx-lm cannot batch {get_module_name(model)} correctly: requests take turns instead"
    )
    return False


class _InFloat32:
    """A model whose weights, scales and biases are cast to float32.

    The casts are part of each forward's graph and are freed with it: there is never a second copy
    of the model.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def __call__(self, *args: Any, **keywords: Any) -> mx.array:
        model: Any = self._model
        own = model.parameters()
        model.update(tree_map(_cast, own))
        try:
            logits: mx.array = model(*args, **keywords)
        finally:
            model.update(own)
        return logits


def _cast(x: mx.array) -> mx.array:
    return x.astype(mx.float32) if mx.issubdtype(x.dtype, mx.floating) else x


def _decode_alone(model: nn.Module, prompt: list[int], size: int) -> mx.array:
    """(1 + F, V) log-probabilities after the prompt and after each of `FOLLOWING`.

    Args:
        size: tokens in the first forward; all others have one.
    """
    tokens = mx.array([prompt + FOLLOWING])
    cache = make_prompt_cache(model)
    pieces = [tokens[:, :size], *(tokens[:, i : i + 1] for i in range(size, tokens.shape[1]))]
    logits = []
    for piece in pieces:
        logits.append(model(piece, cache=cache)[0])
        mx.eval(logits)  # all ranks must send their messages in the same order
    return log_softmax(mx.concatenate(logits)[len(prompt) - 1 :].astype(mx.float32))


def _decode_together(model: nn.Module) -> list[mx.array]:
    """The same for all `TEST_PROMPTS`, decoded in one batch after each was read alone."""
    caches = [make_prompt_cache(model) for _ in TEST_PROMPTS]
    for prompt, cache in zip(TEST_PROMPTS, caches, strict=True):
        model(mx.array([prompt[:-1]]), cache=cache)
        mx.eval([c.state for c in cache])
    generator = BatchGenerator(
        model,
        sampler=lambda logprobs: mx.full((logprobs.shape[0],), FOLLOWING[0], mx.uint32),
    )
    try:
        n_tokens = 1 + len(FOLLOWING)
        uids = generator.insert(
            [prompt[-1:] for prompt in TEST_PROMPTS],
            [n_tokens] * len(TEST_PROMPTS),
            caches=caches,
            all_tokens=[prompt[:-1] for prompt in TEST_PROMPTS],
        )
        made: dict[int, list[mx.array]] = {uid: [] for uid in uids}
        while any(len(logprobs) < n_tokens for logprobs in made.values()):
            for each in generator.next()[1]:
                made[each.uid].append(each.logprobs.astype(mx.float32))
        return [mx.stack(logprobs) for logprobs in made.values()]
    finally:
        generator.close()
        # Wait for its last step: messages are ordered within one stream only.
        mx.synchronize(generator.stream)


def _compare(pair: Pair, expected: Sequence[mx.array], found: Sequence[mx.array]) -> float:
    """The largest mean difference on any rank, in standard deviations of the log-probabilities."""
    pairs = zip(expected, found, strict=True)
    differences = [mx.abs(x - y).mean() / mx.sqrt(mx.var(x)) for x, y in pairs]
    return max(pair.gather(float(mx.stack(differences).max())))
