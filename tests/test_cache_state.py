"""What a generation leaves behind: a cache that plain decoding would have left, and the model as it was."""

from __future__ import annotations

import functools
import gc
from collections.abc import Iterator
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.generate import generate_step as mlx_lm_generate_step
from mlx_lm.models.cache import KVCache, QuantizedKVCache, make_prompt_cache
from toys import (
    Scripted,
    assert_same_cache,
    ids,
    make_model,
    make_prompt,
    make_tokenizer,
    run,
    scripted,
    snapshot,
    with_plain,
)

from mlx_redrafter import generate_step, stream_generate
from mlx_redrafter.engine import kv_cache
from mlx_redrafter.engine.supported_models import capture_output, find_parts

PROMPT = make_prompt(9)
BEAMS = {
    "chain": {"beam_width": 1, "draft_depth": 4},
    "tree": {"beam_width": 3, "draft_depth": 4},
    "pruned tree": {"beam_width": 3, "draft_depth": 4, "tree_size": 9},
}
EIGHT_BITS = {"kv_bits": 8, "kv_group_size": 32}
QUANTIZED = {
    "float": {},
    "8 bits": EIGHT_BITS | {"quantized_kv_start": 0},
    "8 bits from 14 on": EIGHT_BITS | {"quantized_kv_start": 14},
}


@functools.cache
def drafter_of(width: int) -> Scripted:
    return with_plain(make_model(), PROMPT, 24, "mixed", width=width, luck=1)[1]


@functools.cache
def plain_cache(tokens: tuple[int, ...], quantized: str = "float") -> kv_cache.Cache:
    """The cache behind the prompt and these tokens, as mlx-lm itself decodes them one by one."""
    forced, cache = iter([*tokens, 0]), make_prompt_cache(make_model())
    steps = mlx_lm_generate_step(
        mx.array(PROMPT), make_model(), max_tokens=len(tokens), prompt_cache=cache,
        sampler=lambda logprobs: mx.array([next(forced)]), **QUANTIZED[quantized],
    )  # fmt: skip
    assert tuple(token for token, _ in steps) == tokens
    return cache


def started(cache: kv_cache.Cache, beam: str | None, **options: Any) -> Iterator[tuple[int, mx.array, bool]]:
    """A generation into `cache`, drafted unless `beam` is None."""
    more: dict[str, Any] = {"max_tokens": 24, "prompt_cache": cache} | options
    if beam is None:
        return generate_step(PROMPT, make_model(), **more)
    return generate_step(PROMPT, make_model(), drafter_of(BEAMS[beam]["beam_width"]), **BEAMS[beam], **more)


@pytest.mark.parametrize("quantized", QUANTIZED)
@pytest.mark.parametrize("beam", BEAMS)
@pytest.mark.parametrize("end", ["max_tokens", "close", "abandon"])
def test_the_cache_holds_the_prompt_and_every_yielded_token_wherever_it_ends(
    end: str, beam: str, quantized: str
) -> None:
    before = snapshot(make_model())
    for count in range(1, 13) if end != "abandon" else (2, 5, 12):
        cache = make_prompt_cache(make_model())
        options = QUANTIZED[quantized] | ({"max_tokens": count} if end == "max_tokens" else {})
        steps = started(cache, beam, **options)
        tokens = tuple(next(steps)[0] for _ in range(count))
        if end == "max_tokens":
            assert list(steps) == []
        elif end == "close":
            steps.close()
        else:
            del steps
            gc.collect()
        assert_same_cache(cache, plain_cache(tokens, quantized))
        late = options.get("quantized_kv_start", 99) > len(PROMPT) + count
        assert isinstance(cache[0], KVCache if late else QuantizedKVCache)
    assert snapshot(make_model()) == before


@pytest.mark.parametrize("beam", BEAMS)
def test_no_tokens_at_all_leave_the_prompt_or_nothing(beam: str) -> None:
    cache = make_prompt_cache(make_model())
    started(cache, beam).close()
    assert cache[0].offset == 0, "a generator that was never started has done nothing"
    assert list(started(cache, beam, max_tokens=0)) == []
    assert_same_cache(cache, plain_cache(()))


@pytest.mark.parametrize("quantized", QUANTIZED)
@pytest.mark.parametrize("beam", BEAMS)
def test_text_that_ends_early_leaves_the_end_of_text_token_in_the_cache(beam: str, quantized: str) -> None:
    plain = ids(run(make_model(), PROMPT, max_tokens=14, **QUANTIZED[quantized]))
    for eos in set(plain):
        cache, tokenizer = make_prompt_cache(make_model()), make_tokenizer([eos])
        drafter = drafter_of(BEAMS[beam]["beam_width"])
        options = BEAMS[beam] | QUANTIZED[quantized] | {"max_tokens": 14, "prompt_cache": cache}
        tokens = [r.token for r in stream_generate(make_model(), tokenizer, PROMPT, drafter=drafter, **options)]
        assert tokens == plain[: plain.index(eos) + 1]
        assert_same_cache(cache, plain_cache(tuple(tokens), quantized))


@pytest.mark.parametrize("sampled", [False, True])
@pytest.mark.parametrize("quantized", QUANTIZED)
@pytest.mark.parametrize("beam", BEAMS)
def test_three_turns_on_one_cache_are_three_turns_of_plain_decoding(beam: str, quantized: str, sampled: bool) -> None:
    model, width = make_model(), BEAMS[beam]["beam_width"]
    options = QUANTIZED[quantized] | ({"temp": 1.0, "seed": 3} if sampled else {})
    cache, other, text = make_prompt_cache(model), make_prompt_cache(model), []
    for turn, (length, count) in enumerate([(5, 7), (1, 10), (4, 12)]):
        prompt = make_prompt(length, seed=turn)
        plain = ids(run(model, prompt, prompt_cache=other, max_tokens=count, **options))
        text += prompt + plain
        drafter = scripted(model, text, "mixed", width=width, luck=turn)
        steps = run(model, prompt, drafter, prompt_cache=cache, max_tokens=count, **BEAMS[beam], **options)
        assert ids(steps) == plain
        assert steps[-1].stats.accepted > 0
        assert cache[0].offset == len(text)
        assert_same_cache(cache, other)


def test_other_rows_are_seen_in_a_cache() -> None:
    cache, other = plain_cache((1, 2, 3)), plain_cache((1, 2, 4))
    assert_same_cache(cache, plain_cache((1, 2, 3)))
    for wrong in (other, plain_cache((1, 2)), plain_cache((1, 2, 3), "8 bits")):
        with pytest.raises(AssertionError):
            assert_same_cache(cache, wrong)


def test_a_wrapped_module_is_seen_in_a_snapshot() -> None:
    model = make_model()
    before = snapshot(model)
    assert capture_output(find_parts(model).final_norm, lambda: snapshot(model))[0] != before
    assert snapshot(model) == before
