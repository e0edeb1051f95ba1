"""What a generation leaves: a cache that plain decoding would have left, and the model as it was."""

from __future__ import annotations

import copy
import functools
import gc
from collections.abc import Iterator
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from families import follow_plain, make_family
from mlx_lm.generate import generate_step as mlx_lm_generate_step
from mlx_lm.models.cache import KVCache, QuantizedKVCache, make_prompt_cache
from toys import (
    BEAMS,
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

from mlx_redrafter import RedrafterError, generate_step, stream_generate
from mlx_redrafter.engine import kv_cache
from mlx_redrafter.engine.supported_models import capture_output, find_parts

PROMPT = make_prompt(9)
EIGHT_BITS = {"kv_bits": 8, "kv_group_size": 32}
QUANTIZED = {
    "float": {},
    "8 bits": EIGHT_BITS | {"quantized_kv_start": 0},
    "8 bits from 14 on": EIGHT_BITS | {"quantized_kv_start": 14},
}


@functools.cache
def drafter_of(width: int) -> Scripted:
    return with_plain(make_model(), PROMPT, 24, "mixed", width=width, luck=1)[1]


def decode_with_mlx_lm(
    model: nn.Module, tokens: tuple[int, ...], cache: kv_cache.Cache, **options: Any
) -> kv_cache.Cache:
    """The cache after the prompt and these tokens, as mlx-lm itself decodes them one by one."""
    forced = iter([*tokens, 0])
    steps = mlx_lm_generate_step(
        mx.array(PROMPT), model, max_tokens=len(tokens), prompt_cache=cache,
        sampler=lambda logprobs: mx.array([next(forced)]), **options,
    )  # fmt: skip
    assert tuple(token for token, _ in steps) == tokens
    return cache


@functools.cache
def plain_cache(tokens: tuple[int, ...], quantized: str = "float") -> kv_cache.Cache:
    return decode_with_mlx_lm(make_model(), tokens, make_prompt_cache(make_model()), **QUANTIZED[quantized])


def start(cache: kv_cache.Cache, beam: str, **options: Any) -> Iterator[tuple[int, mx.array, bool]]:
    """A drafted generation into `cache`."""
    options = {"max_tokens": 24, "prompt_cache": cache} | BEAMS[beam] | options
    return generate_step(PROMPT, make_model(), drafter_of(BEAMS[beam]["beam_width"]), **options)


@pytest.mark.parametrize("quantized", QUANTIZED)
@pytest.mark.parametrize("beam", BEAMS)
@pytest.mark.parametrize("end", ["max_tokens", "close", "abandon"])
def test_cache_holds_every_yielded_token_wherever_it_ends(end: str, beam: str, quantized: str) -> None:
    before = snapshot(make_model())
    for count in {"max_tokens": (1, 2, 5, 6, 7, 12), "close": (1, 2, 3, 5, 6, 9, 12), "abandon": (5,)}[end]:
        cache = make_prompt_cache(make_model())
        options = QUANTIZED[quantized] | ({"max_tokens": count} if end == "max_tokens" else {})
        steps = start(cache, beam, **options)
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
def test_without_tokens_the_cache_holds_the_prompt(beam: str) -> None:
    cache = make_prompt_cache(make_model())
    start(cache, beam).close()
    assert cache[0].offset == 0, "a generator that was never started has done nothing"
    assert list(start(cache, beam, max_tokens=0)) == []
    assert_same_cache(cache, plain_cache(()))


@pytest.mark.parametrize("beam", BEAMS)
def test_end_tokens_are_in_the_cache(beam: str) -> None:
    plain = ids(run(make_model(), PROMPT, max_tokens=14))
    for eos in set(plain):
        cache, tokenizer = make_prompt_cache(make_model()), make_tokenizer([eos])
        drafter = drafter_of(BEAMS[beam]["beam_width"])
        options = BEAMS[beam] | {"max_tokens": 14, "prompt_cache": cache}
        tokens = [r.token for r in stream_generate(make_model(), tokenizer, PROMPT, drafter=drafter, **options)]
        assert tokens == plain[: plain.index(eos) + 1]
        assert_same_cache(cache, plain_cache(tuple(tokens)))


@pytest.mark.parametrize("sampling", [{}, {"temp": 1.0, "seed": 3}], ids=["greedy", "sampled"])
@pytest.mark.parametrize("quantized", QUANTIZED)
@pytest.mark.parametrize("beam", BEAMS)
def test_three_turns_on_one_cache(beam: str, quantized: str, sampling: dict[str, Any]) -> None:
    model, width = make_model(), BEAMS[beam]["beam_width"]
    options = QUANTIZED[quantized] | sampling
    cache, other, text = make_prompt_cache(model), make_prompt_cache(model), []
    for turn, (length, count) in enumerate([(5, 7), (1, 10), (4, 12)]):
        prompt = make_prompt(length, seed=turn)
        plain = ids(run(model, prompt, prompt_cache=other, max_tokens=count, **options))
        text += prompt + plain
        drafter = scripted(model, text, "mixed", width=width, seed=turn)
        steps = run(model, prompt, drafter, prompt_cache=cache, max_tokens=count, **BEAMS[beam], **options)
        assert ids(steps) == plain
        assert steps[-1].stats.accepted > 0
        assert cache[0].offset == len(text)
        assert_same_cache(cache, other)


# (module of mlx-lm, W, max_kv_size, kv_bits): caches that can be trimmed, rings, states, and KV caches beside states.
CACHES: dict[str, tuple[str, int, int | None, int | None]] = {
    "trimmable": ("qwen2", 3, None, None),
    "trimmable, 8 bits": ("qwen2", 3, None, 8),
    "rings": ("qwen2", 3, 12, None),
    "windows": ("gemma3_text", 3, None, None),
    "chunks": ("llama4", 3, None, None),
    "states": ("mamba", 1, None, None),
    "states, 8 bits": ("mamba", 1, None, 8),
    "hybrid": ("qwen3_5", 1, None, None),
    "hybrid, 8 bits": ("qwen3_5", 1, None, 8),
}


@functools.cache
def family(kind: str) -> tuple[nn.Module, tuple[int, ...], Scripted, dict[str, Any], dict[str, Any]]:
    """(model, plain tokens, a drafter that is right at half of them, options, the plan)."""
    name, width, max_kv_size, bits = CACHES[kind]
    options: dict[str, Any] = {"max_kv_size": max_kv_size}
    if bits is not None:
        options |= {"kv_bits": bits, "kv_group_size": 32, "quantized_kv_start": 14}
    model = make_family(name)
    plain, drafter = follow_plain(model, PROMPT, 16, "mixed", width=width, **options)
    return model, tuple(ids(plain)), drafter, options, {"plan": (width, 4)}


@functools.cache
def family_cache(kind: str, count: int) -> kv_cache.Cache:
    """The cache after the prompt and `count` tokens of plain decoding."""
    model, plain, _, options, _ = family(kind)
    cache = make_prompt_cache(model, options["max_kv_size"])
    quantized = {name: value for name, value in options.items() if name != "max_kv_size"}
    return decode_with_mlx_lm(model, plain[:count], cache, **quantized)


@pytest.mark.parametrize("kind", CACHES)
def test_closing_inside_a_round_leaves_the_plain_cache(kind: str) -> None:
    model, plain, drafter, options, plan = family(kind)
    quantized = {name: value for name, value in options.items() if name != "max_kv_size"}
    inside = 0
    for count in range(1, 16):
        cache = make_prompt_cache(model, options["max_kv_size"])
        steps = generate_step(PROMPT, model, drafter, prompt_cache=cache, **quantized, **plan)
        found = [next(steps) for _ in range(count)]
        steps.close()
        assert tuple(token for token, _, _ in found) == plain[:count]
        inside += found[-1][2]  # its last token was drafted: the round has more
        expected = copy.deepcopy(family_cache(kind, count))
        assert_same_cache(cache, expected, tolerance=2e-3)
        if count > 12:  # another turn
            turns = [run(model, [1, 2, 3], max_tokens=5, prompt_cache=each, **quantized) for each in (cache, expected)]
            assert ids(turns[0]) == ids(turns[1])
    assert inside > 2


def test_other_caches_are_distinguished() -> None:
    # Negative control.
    cache = plain_cache((1, 2, 3))
    assert_same_cache(cache, plain_cache((1, 2, 3)))
    for wrong in (plain_cache((1, 2, 4)), plain_cache((1, 2)), plain_cache((1, 2, 3), "8 bits")):
        with pytest.raises(AssertionError):
            assert_same_cache(cache, wrong)


def test_a_wrapped_module_shows_in_a_snapshot() -> None:
    model = make_model()
    before = snapshot(model)
    assert capture_output(find_parts(model).final_norm, lambda: snapshot(model))[0] != before
    assert snapshot(model) == before


@pytest.mark.parametrize("plan", [(1, 6), (3, 4), (1, 10)], ids=str)
@pytest.mark.parametrize("size", [8, 12])
@pytest.mark.parametrize("count", [1, 5])
def test_deep_drafts_after_short_prompts_in_small_rings(count: int, size: int, plan: tuple[int, int]) -> None:
    """The first rows of a ring stay visible to every node, those of the tree's own first nodes too."""
    model, prompt = make_family("qwen2"), make_prompt(count)
    plain, drafter = follow_plain(model, prompt, 30, "right", width=plan[0], max_kv_size=size)
    assert ids(run(model, prompt, drafter, max_tokens=30, max_kv_size=size, plan=plan)) == ids(plain)


def test_history_must_be_what_the_cache_holds() -> None:
    for cache in (None, make_prompt_cache(make_model())):
        with pytest.raises(RedrafterError, match="the prompt cache holds 0 tokens, its history is 3"):
            next(generate_step(PROMPT, make_model(), history=[1, 2, 3], prompt_cache=cache))
    with pytest.raises(RedrafterError, match="history must be token ids"):
        next(generate_step(PROMPT, make_model(), history=["a"]))
