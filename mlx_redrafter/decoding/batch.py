"""`batch_generate`: several prompts, decoded in one forward if the model can do that."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import islice
from time import perf_counter
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.generate import BatchResponse, BatchStats

from ..drafters.protocol import Drafter
from ..engine.round import Round
from ..errors import RedrafterError
from ..machine.wired_limit import wired_limit
from ..measuring.pair import get_pair
from ..target.kv_cache import Cache
from ..target.model_checks import make_cache
from ..target.request_checks import check_tokens
from ..text.encoding import Prompt, encode, wrap_tokenizer
from ..text.stop_strings import StopStrings
from .generation import next_rounds, share_prompt_rows
from .options import OPTION_NAMES, check_names, check_number
from .responses import Responder, parse_arguments


def batch_generate(
    model: nn.Module,
    tokenizer: Any,
    prompts: Sequence[Prompt],
    prompt_caches: Sequence[Cache | None] | None = None,
    max_tokens: int | Sequence[int] = 128,
    verbose: bool = False,
    return_prompt_caches: bool = False,
    return_token_ids: bool = False,
    return_logprobs: bool = False,
    *,
    drafter: Drafter | None = None,
    draft_model: nn.Module | None = None,
    num_draft_tokens: int | None = None,
    stop: str | Sequence[str] | None = None,
    completion_batch_size: int = 8,
    prefill_batch_size: int | None = None,
    stream: Any = None,
    **options: Any,
) -> BatchResponse:
    """The texts of several prompts, as mlx-lm's `batch_generate`: those of `generate` alone.

    If the model can do that, a round of all texts is one forward, each with its own draft. If not,
    they are decoded one after another.

    Args:
        model, tokenizer, drafter, draft_model, num_draft_tokens, stop: see `stream_generate`.
        prompts: texts, or token ids of each.
        prompt_caches: one for each prompt, or None. They are not changed.
        max_tokens: of all texts, or of each.
        verbose: print a summary.
        return_prompt_caches: return caches that hold the prompt and all generated tokens.
        return_token_ids: return the generated tokens, without the last one of a text that ended
            with "stop".
        return_logprobs: return the log-probabilities of these tokens.
        completion_batch_size: the most texts that are decoded together. The next prompt is read
            when one has ended.
        prefill_batch_size, stream: not used.
        options: of all texts, the seed included; see `Options`.

    Raises:
        RedrafterError: see `stream_generate`. An error of one text ends all.
    """
    check_names("batch_generate", options, OPTION_NAMES - {"prompt_cache"})
    check_number("completion_batch_size", completion_batch_size, int)
    if completion_batch_size < 1:
        got = completion_batch_size
        raise RedrafterError(f"completion_batch_size must be at least 1, got {got}")
    if isinstance(prompts, str) or not isinstance(prompts, Sequence):
        raise RedrafterError(f"prompts must be a list of prompts, got {prompts!r:.100}")
    wrapped = wrap_tokenizer(tokenizer)
    given, shared = parse_arguments(drafter, draft_model, num_draft_tokens, None, options)
    pair, _ = get_pair(model, given)
    encoded = [encode(wrapped, prompt) for prompt in prompts]
    for tokens in encoded:
        check_tokens(mx.array(tokens), pair.vocab_size)
    count = len(encoded)
    columns = []
    for name, values in (("prompt_caches", prompt_caches), ("max_tokens", max_tokens)):
        column = values if isinstance(values, (list, tuple)) else [values] * count
        if len(column) != count:
            got = len(column)
            raise RedrafterError(f"{name} must be one for each of {count} prompts, got {got}")
        columns.append(column)
    each_options = [
        replace(shared, prompt_cache=cache, max_tokens=most).require_tokens()
        for cache, most in zip(*columns, strict=True)
    ]

    size = min(completion_batch_size, count)
    separate = pair.explain_separate() if size > 1 else None
    if separate is not None:
        size = 1
        if verbose:
            print(f"[batch_generate] One text after another: {separate}")
    texts = [""] * count
    token_ids: list[list[int]] = [[] for _ in encoded]
    logprobs: list[list[float]] = [[] for _ in encoded]
    caches: list[Cache] = []
    stats = BatchStats()
    waiting = iter(range(count))
    running: dict[int, Responder] = {}
    started = perf_counter()
    with wired_limit(model), _closing(running):
        while True:
            for index in islice(waiting, size - len(running)):
                own = each_options[index]
                cache = copy.deepcopy(own.prompt_cache)
                if return_prompt_caches:
                    cache = cache or make_cache(model, own.max_kv_size)
                    caches.append(cache)
                own = replace(own, prompt_cache=cache)
                how = (own, pair.open_source(), StopStrings(stop))
                running[index] = Responder(pair, wrapped, encoded[index], *how, is_joint=size > 1)
            if not running:
                break
            began = perf_counter()
            rounds = _decode_round(running, shared.prefill_step_size)
            for index, decoded in rounds.items():
                responder = running[index]
                for each in responder.generation.take_tokens() if decoded.tokens else ():
                    response = responder.respond(each)
                    texts[index] += response.text
                    if response.finish_reason != "stop":
                        token_ids[index].append(response.token)
                        if return_logprobs:
                            logprobs[index].append(float(response.logprobs[response.token]))
                    if response.finish_reason is not None:
                        del running[index]
                        responder.generation.close()
                        stats.prompt_tokens += response.prompt_tokens
                        stats.generation_tokens += response.generation_tokens
                        break
            stats.generation_steps += any(decoded.tokens for decoded in rounds.values())
            if any(decoded.is_prompt for decoded in rounds.values()):
                stats.prompt_time += perf_counter() - began
    stats.wall_time = perf_counter() - started
    stats.decode_time = stats.wall_time - stats.prompt_time
    stats.peak_memory = mx.get_peak_memory() / 1e9
    if verbose:
        print(
            f"[batch_generate] Prompt: {stats.prompt_tokens} tokens, "
            f"{stats.prompt_tps:.3f} tokens-per-sec\n"
            f"[batch_generate] Generation: {stats.generation_tokens} tokens, "
            f"{stats.generation_tps:.3f} tokens-per-sec\n"
            f"[batch_generate] Peak memory: {stats.peak_memory:.3f} GB"
        )
    return BatchResponse(
        texts,
        stats,
        caches if return_prompt_caches else None,
        token_ids if return_token_ids else None,
        logprobs if return_logprobs else None,
    )


@contextmanager
def _closing(running: Mapping[int, Responder]) -> Iterator[None]:
    try:
        yield
    finally:
        for each in running.values():
            each.generation.close()


def _decode_round(running: Mapping[int, Responder], n_rows: int) -> dict[int, Round]:
    """A round of each text that takes part in it; `n_rows`: see `share_prompt_rows`."""
    generations = {index: each.generation for index, each in running.items()}
    unread = [each for each in generations.values() if each.n_unread]
    reading = share_prompt_rows(unread, n_rows)
    chosen = {i: each for i, each in generations.items() if each in reading or not each.n_unread}
    rounds = {}
    for index, decoded in zip(chosen, next_rounds([*chosen.values()]), strict=True):
        if isinstance(decoded, Exception):
            raise decoded
        rounds[index] = decoded
    return rounds
