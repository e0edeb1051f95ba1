"""Tokens with a drafter are the tokens without one, whatever the drafter says.

Sampled tokens are compared as tokens too: a draw is a function of (seed, position), so it may differ only where two
candidates tie to within float32 noise. The toy targets spread their logits over about ten, and float32 noise on them
is below 1e-5.
"""

from __future__ import annotations

from collections.abc import Callable
from math import inf, nan
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.generate import generate_step as mlx_lm_generate_step
from toys import (
    KINDS,
    SCRIPTS,
    Echo,
    Unsound,
    ids,
    make_model,
    make_prompt,
    run,
    with_plain,
)

from mlx_redrafter import UnsupportedModelError
from mlx_redrafter.engine import kv_cache
from mlx_redrafter.engine import round as rounds
from mlx_redrafter.engine.types import Tree, Verdict
from mlx_redrafter.generate import Step

SAMPLING: dict[str, dict[str, Any]] = {
    "temp 0.7": {"temp": 0.7},
    "temp 1": {"temp": 1.0},
    "top_p": {"temp": 1.0, "top_p": 0.85},
    "min_p": {"temp": 0.7, "min_p": 0.05, "min_tokens_to_keep": 2},
    "top_k": {"temp": 1.0, "top_k": 4},
    "top_k 1": {"temp": 1.0, "top_k": 1},
    "xtc": {"temp": 1.0, "xtc_probability": 0.5, "xtc_threshold": 0.1, "xtc_special_tokens": [3]},
    "all": {"temp": 0.9, "top_p": 0.95, "min_p": 0.02, "top_k": 8, "xtc_probability": 0.3, "xtc_threshold": 0.2},
}


def assert_same(steps: list[Step], plain: list[Step]) -> None:
    """The same tokens, with the same log-probabilities."""
    assert ids(steps) == ids(plain)
    for mine, theirs in zip(steps, plain, strict=True):
        assert mx.allclose(mine.logprobs, theirs.logprobs, rtol=0, atol=1e-3)


@pytest.mark.parametrize("script", SCRIPTS)
@pytest.mark.parametrize("depth", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("width", [1, 2, 3, 4])
def test_drafted_tokens_equal_plain_tokens_on_every_beam_shape(width: int, depth: int, script: str) -> None:
    model, prompt = make_model(), make_prompt(11, seed=width)
    plain, drafter = with_plain(model, prompt, 15, script, width=width, luck=depth)
    steps = run(model, prompt, drafter, max_tokens=15, beam_width=width, draft_depth=depth)
    assert_same(steps, plain)
    stats = steps[-1].stats
    if script == "right":
        assert stats.rounds == -(-14 // (depth + 1)), "every round but the last keeps the whole draft"
    if script == "wrong":
        assert stats.accepted == 0 and stats.rounds == 14
    assert stats.accepted == sum(step.from_draft for step in steps)


@pytest.mark.parametrize(("width", "depth"), [(2, 3), (3, 3), (4, 2), (1, 4)])
def test_drafted_tokens_equal_plain_tokens_at_every_tree_size(width: int, depth: int) -> None:
    model, prompt = make_model("qwen3"), make_prompt(9)
    plain, drafter = with_plain(model, prompt, 16, "mixed", width=width, luck=3)
    for size in range(2, 2 + width * depth):
        options = {"beam_width": width, "draft_depth": depth, "tree_size": size}
        assert_same(run(model, prompt, drafter, max_tokens=16, **options), plain)


@pytest.mark.parametrize("sampling", SAMPLING)
@pytest.mark.parametrize("shape", [(1, 4, None), (2, 3, 5), (3, 4, None)])
def test_sampled_tokens_equal_plain_ones_on_many_seeds(sampling: str, shape: tuple[int, int, int | None]) -> None:
    model, accepted = make_model(), 0
    for seed in range(3):
        prompt = make_prompt(4 + seed, seed=seed)
        options = SAMPLING[sampling] | {"seed": seed}
        plain, drafter = with_plain(model, prompt, 20, SCRIPTS[(seed + 1) % 3], width=shape[0], luck=seed, **options)
        beam = dict(zip(("beam_width", "draft_depth", "tree_size"), shape, strict=True))
        steps = run(model, prompt, drafter, max_tokens=20, **beam, **options)
        assert_same(steps, plain)
        accepted += steps[-1].stats.accepted
    assert accepted > 7


def test_another_seed_gives_other_tokens() -> None:
    model, prompt = make_model(), make_prompt(5)
    assert len({tuple(ids(run(model, prompt, temp=1.0, seed=seed, max_tokens=12))) for seed in range(10)}) == 10


@pytest.mark.parametrize("sampled", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_drafted_tokens_equal_plain_tokens_for_every_model_type(kind: str, sampled: bool) -> None:
    model, prompt = make_model(kind), make_prompt(13)
    options: dict[str, Any] = {"temp": 0.8, "top_p": 0.9, "seed": 5} if sampled else {}
    plain, drafter = with_plain(model, prompt, 24, "mixed", width=3, **options)
    steps = run(model, prompt, drafter, max_tokens=24, beam_width=3, draft_depth=4, tree_size=9, **options)
    assert_same(steps, plain)
    assert steps[-1].stats.accepted > 0


def test_a_rope_that_depends_on_the_length_of_a_forward_is_refused_or_gives_the_plain_tokens() -> None:
    model, prompt = make_model("llama-dynamic"), make_prompt(10)
    plain, drafter = with_plain(model, prompt, 20, "right", width=1)
    try:
        steps = run(model, prompt, drafter, max_tokens=20, beam_width=1, draft_depth=4)
    except UnsupportedModelError:
        return
    assert ids(steps) == ids(plain)


@pytest.mark.parametrize("chunk", [1, 3, 64, 2048])
@pytest.mark.parametrize("length", [1, 2, 3, 4, 7, 63, 64, 65, 66, 250, 255, 256, 257, 300])
def test_any_prompt_length_and_prefill_step_size_gives_the_plain_tokens(length: int, chunk: int) -> None:
    model, prompt = make_model(), make_prompt(length)
    if length > 70 and chunk < 64:
        chunk = 100 + chunk
    plain, drafter = with_plain(model, prompt, 10, "mixed", width=2, luck=length, prefill_step_size=chunk)
    read: list[tuple[int, int]] = []
    options = {"prefill_step_size": chunk, "prompt_progress_callback": lambda *done: read.append(done)}
    steps = run(model, mx.array(prompt), drafter, max_tokens=10, beam_width=2, draft_depth=3, **options)
    assert_same(steps, plain)
    theirs: list[tuple[int, int]] = []
    stepped = mlx_lm_generate_step(
        mx.array(prompt), model, max_tokens=10, prefill_step_size=chunk,
        prompt_progress_callback=lambda *done: theirs.append(done),
    )  # fmt: skip
    assert [token for token, _ in stepped] == ids(plain)
    assert read == theirs


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("width", [1, 3])
@pytest.mark.parametrize("late", range(-3, 11))
def test_the_kv_cache_is_quantised_at_the_same_token_as_in_mlx_lm(late: int, width: int, bits: int) -> None:
    model, prompt = make_model(), make_prompt(8, seed=1)
    options = {"kv_bits": bits, "kv_group_size": 32, "quantized_kv_start": 8 + late}
    plain, drafter = with_plain(model, prompt, 16, "right", width=width, **options)
    assert_same(run(model, prompt, drafter, max_tokens=16, beam_width=width, draft_depth=4, **options), plain)
    if width == 1:
        theirs = mlx_lm_generate_step(mx.array(prompt), model, max_tokens=16, **options)
        assert [token for token, _ in theirs] == ids(plain), "plain decoding knows of no width"


def test_where_quantisation_starts_matters_to_the_tokens() -> None:
    model, prompt = make_model(), make_prompt(8, seed=1)
    texts = [run(model, prompt, max_tokens=40, kv_bits=4, kv_group_size=32, quantized_kv_start=s) for s in (8, 14, 999)]
    assert len({tuple(ids(text)) for text in texts}) == 3


def test_the_scripts_reach_every_depth_and_every_branch(monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[list[int]] = []
    real = kv_cache.keep_rows

    def compact_(cache: kv_cache.Cache, count: int, path: list[int]) -> None:
        kept.append(path)
        real(cache, count, path)

    monkeypatch.setattr(kv_cache, "keep_rows", compact_)
    model, width, depth, reached = make_model(), 3, 3, set()
    for luck in range(4):
        prompt = make_prompt(10, seed=luck)
        plain, drafter = with_plain(model, prompt, 60, "mixed", width=width, luck=luck)
        steps = run(model, prompt, drafter, max_tokens=60, beam_width=width, draft_depth=depth)
        assert_same(steps, plain)
        deep = 0
        for step, rank in zip(steps, drafter.ranks[len(prompt) :], strict=False):
            deep = deep + 1 if step.from_draft else 0
            reached.add((deep, rank if deep else None))
    assert {len(path) - 1 for path in kept} == set(range(depth + 1))
    assert reached == {(0, None)} | {(d + 1, rank) for d in range(depth) for rank in range(width)}
    assert any(path != list(range(len(path))) for path in kept), "rows that have to move"


real_compact_ = kv_cache.keep_rows


def broken_accept(tree: Tree, tokens: mx.array, depth: int, limit: int) -> Verdict:
    """Accepts the leading path, whatever the target says."""
    count = min(depth, limit)
    return Verdict(mx.array(count), mx.array([min(level, count) for level in range(depth + 1)]))


def broken_keep_rows(cache: kv_cache.Cache, count: int, path: list[int]) -> None:
    """Leaves the rows where they are."""
    real_compact_(cache, count, list(range(len(path))))


@pytest.mark.parametrize("broken", [broken_accept, broken_keep_rows])
def test_a_broken_engine_gives_other_tokens(broken: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    model, prompt = make_model(), make_prompt(10)
    plain, drafter = with_plain(model, prompt, 30, "mixed", width=3)
    options = {"max_tokens": 30, "beam_width": 3, "draft_depth": 3}
    assert ids(run(model, prompt, drafter, **options)) == ids(plain)
    module = rounds if broken is broken_accept else kv_cache
    monkeypatch.setattr(module, broken.__name__.removeprefix("broken_"), broken)
    assert ids(run(model, prompt, drafter, **options)) != ids(plain)


@pytest.mark.parametrize("width", [2, 3])
def test_a_drafter_that_is_sure_of_itself_leaves_the_tokens_as_they_are(width: int) -> None:
    model = make_model()
    for seed in range(5):
        prompt = make_prompt(8, seed=seed)
        plain = ids(run(model, prompt, max_tokens=28))
        drafter = Echo(model, prompt + plain, [0] * 36, width)
        for size in (2, 3, 4):
            steps = run(model, prompt, drafter, max_tokens=20, beam_width=width, draft_depth=3, tree_size=size)
            assert ids(steps) == plain[:20], (seed, size)


@pytest.mark.parametrize(
    ("score", "threshold"),
    [
        *((score, threshold) for score in (0.0, -inf) for threshold in (-100.0, 0.0, 2.0)),
        *((score, threshold) for score in (nan, inf) for threshold in (-100.0, 2.0)),
    ],
)
def test_scores_that_are_no_numbers_leave_the_tokens_as_they_are(score: float, threshold: float) -> None:
    model, prompt = make_model(vocab=300), make_prompt(6)
    drafter = Unsound(model, score, threshold)
    for options in ({}, {"temp": 1.0, "seed": 1, "top_k": 2}):
        plain = run(model, prompt, max_tokens=16, **options)
        for size in (5, None):
            beam = {"beam_width": 2, "draft_depth": 4, "tree_size": size}
            assert_same(run(model, prompt, drafter, max_tokens=16, **beam, **options), plain)
