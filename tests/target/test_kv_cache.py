"""After a generation the cache is the one plain decoding leaves, and the model is unchanged."""

import functools
import gc

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.generate import generate_step as mlx_lm_generate_step
from mlx_lm.models.cache import make_prompt_cache

from helpers.families import make_family
from helpers.grids import pairs
from helpers.toys import (
    Scripted,
    assert_same_cache,
    ids,
    make_model,
    make_prompt,
    run,
    snapshot,
    with_plain,
)
from mlx_redrafter import RedrafterError, generate_step
from mlx_redrafter.decoding import recipe
from mlx_redrafter.target import kv_cache
from mlx_redrafter.target.model_parts import CapturePoint, capture, get_parts

PROMPT = make_prompt(9)
BITS = {"kv_bits": 8, "kv_group_size": 32, "quantized_kv_start": 14}
# (mlx-lm module, plan, max_kv_size, quantization): trimmable caches, ring buffers, states, and
# combinations.
CACHES = {
    "trimmable, chain": ("qwen2", (1, 4), None, {}),
    "trimmable": ("qwen2", (3, 2), None, {}),
    "trimmable, pruned": ("qwen2", (3, 4, 9), None, {}),
    "trimmable, 8 bits": ("qwen2", (3, 2), None, BITS),
    "trimmable, 8 bits at once": ("qwen2", (3, 2), None, BITS | {"quantized_kv_start": 0}),
    "rings": ("qwen2", (3, 2), 12, {}),
    "windows": ("gemma3_text", (3, 2), None, {}),
    "chunks": ("llama4", (3, 2), None, {}),
    "states": ("mamba", (1, 4), None, {}),
    "states, 8 bits": ("mamba", (1, 4), None, BITS),
    "hybrid, chain": ("qwen3_5", (1, 4), None, {}),
    "hybrid, 8 bits": ("qwen3_5", (3, 2), None, BITS),
    "hybrid, rings": ("recurrent_gemma", (3, 4, 9), None, {}),
    "hybrid, parallel": ("falcon_h1", (3, 2), None, {}),
}


def decode_with_mlx_lm(
    model: nn.Module, tokens: tuple[int, ...], cache: kv_cache.Cache, **options
) -> kv_cache.Cache:
    """The cache after mlx-lm itself has decoded these tokens one by one."""
    forced = iter([*tokens, 0])
    steps = mlx_lm_generate_step(
        mx.array(PROMPT), model, max_tokens=len(tokens), prompt_cache=cache,
        sampler=lambda logprobs: mx.array([next(forced)]), **options,
    )  # fmt: skip
    assert tuple(token for token, _ in steps) == tokens
    return cache


@functools.cache
def prepare(kind: str) -> tuple[nn.Module, tuple[int, ...], Scripted]:
    """Returns (model, its plain tokens, a drafter that is right half the time)."""
    name, plan, size, bits = CACHES[kind]
    model = make_family(name)
    plain, drafter = with_plain(
        model, PROMPT, 16, "mixed", width=plan[0], script_seed=0, max_kv_size=size, **bits
    )
    moved = []
    options = {"max_tokens": 16, "plan": plan, "max_kv_size": size} | bits
    options["on_round"] = lambda tree, path, chosen: moved.append(path != [*range(len(path))])
    run(model, PROMPT, drafter, **options)
    assert plan != (3, 2) or any(moved), "some accepted rows must move"
    return model, tuple(ids(plain)), drafter


@pytest.mark.parametrize("kind", CACHES)
def test_cache_holds_the_taken_tokens_after_closing_anywhere(kind):
    model, plain, drafter = prepare(kind)
    _, plan, size, bits = CACHES[kind]
    before = snapshot(model)
    inside = 0
    for count in (*range(1, 9), 12, 13):
        cache = make_prompt_cache(model, size)
        ends = count % 3 == 0  # ends at max_tokens; otherwise it is closed or abandoned
        limit = {"max_tokens": count} if ends else {}
        steps = generate_step(
            PROMPT, model, drafter, prompt_cache=cache, plan=plan, **bits, **limit
        )
        found = [next(steps) for _ in range(count)]
        if ends:
            assert list(steps) == []
        elif count == 5:
            del steps
            gc.collect()
        else:
            steps.close()
            inside += found[-1][2]  # the last token was drafted, so its round has more
        assert tuple(token for token, _, _ in found) == plain[:count]
        expected = decode_with_mlx_lm(model, plain[:count], make_prompt_cache(model, size), **bits)
        assert_same_cache(cache, expected, tolerance=2e-3)
        if count > 12:  # a second turn
            turn = run(model, [1, 2, 3], max_tokens=5, prompt_cache=cache, **bits)
            plain_turn = run(model, [1, 2, 3], max_tokens=5, prompt_cache=expected, **bits)
            assert ids(turn) == ids(plain_turn)
    assert inside > 1
    assert snapshot(model) == before


@pytest.mark.parametrize("exact", [False, True])
def test_without_tokens_the_cache_holds_the_prompt(monkeypatch, exact):
    # With `exact` the forward of the prompt's last token is padded.
    monkeypatch.setattr(recipe, "choose_row_counts", lambda *args, **how: (4,) if exact else None)
    model, _, drafter = prepare("trimmable")
    cache = make_prompt_cache(model)
    options = {"prompt_cache": cache, "plan": (3, 4), "exact": exact}
    generate_step(PROMPT, model, drafter, **options).close()
    assert cache[0].offset == 0, "a generator that was never started changes nothing"
    assert list(generate_step(PROMPT, model, drafter, max_tokens=0, **options)) == []
    assert_same_cache(cache, decode_with_mlx_lm(model, (), make_prompt_cache(model)))


def test_checks_detect_other_caches_and_wrapped_modules():
    # Negative control.
    model = make_model()
    cache = decode_with_mlx_lm(model, (1, 2, 3), make_prompt_cache(model))
    for tokens, options in (
        ((1, 2, 4), {}),
        ((1, 2), {}),
        ((1, 2, 3), BITS | {"quantized_kv_start": 0}),
    ):
        other = decode_with_mlx_lm(model, tokens, make_prompt_cache(model), **options)
        with pytest.raises(AssertionError):
            assert_same_cache(cache, other)
    before = snapshot(model)
    point = CapturePoint(get_parts(model).final_norm)
    during, _ = capture([point], lambda: snapshot(model))
    assert during != before == snapshot(model)


@pytest.mark.parametrize(
    ("count", "size", "plan"), pairs((1, 5), (8, 12), ((1, 6), (3, 4), (1, 10))), ids=str
)
def test_deep_drafts_after_short_prompts_in_rings(count, size, plan):
    """The first rows of a ring buffer stay visible to every node, the tree's first ones too."""
    model = make_family("qwen2")
    prompt = make_prompt(count)
    plain, drafter = with_plain(model, prompt, 30, "right", width=plan[0], max_kv_size=size)
    steps = run(model, prompt, drafter, max_tokens=30, max_kv_size=size, plan=plan)
    assert ids(steps) == ids(plain)


def test_history_must_match_the_cache():
    reason = "the prompt cache holds 0 tokens, its history is 3"
    for cache in (None, make_prompt_cache(make_model())):
        with pytest.raises(RedrafterError, match=reason):
            next(generate_step(PROMPT, make_model(), history=[1, 2, 3], prompt_cache=cache))
