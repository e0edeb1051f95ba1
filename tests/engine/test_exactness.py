"""Tokens are the same with and without a drafter, whatever it drafts.

This includes sampled tokens: a draw depends only on (seed, position), so only candidates that tie within float32
noise could differ. The toys' logits span about ten, with noise below 1e-5.
"""

from __future__ import annotations

from collections.abc import Callable
from math import inf, nan
from typing import Any

import mlx.core as mx
import pytest
from grids import pairs
from mlx_lm.generate import generate_step as mlx_lm_generate_step
from small import small_drafter
from toys import SCRIPTS, assert_same_steps, ids, make_model, make_prompt, run, with_plain

from mlx_redrafter.engine import kv_cache
from mlx_redrafter.engine import round as rounds
from mlx_redrafter.engine.types import Accepted, Tree

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


@pytest.mark.parametrize(("width", "depth", "script"), pairs((1, 2, 4), (1, 2, 5), SCRIPTS))
def test_every_shape_gives_the_plain_tokens(width: int, depth: int, script: str) -> None:
    model, prompt, size = make_model(), make_prompt(11, seed=width), 1 + width * depth
    plain, drafter = with_plain(model, prompt, 15, script, width=width, script_seed=depth)
    for pruned in range(2, 1 + size) if script == "mixed" and width > 1 else [size]:
        steps = run(model, prompt, drafter, max_tokens=15, plan=(width, depth, pruned))
        assert_same_steps(steps, plain)
        stats = steps[-1].stats
        assert stats.accepted == sum(step.from_draft for step in steps)
        if script == "right":
            assert stats.rounds == -(-14 // (depth + 1)), "every round but the last accepts the whole draft"
        if script == "wrong":
            assert stats.accepted == 0 and stats.rounds == 14


@pytest.mark.parametrize(
    ("sampling", "shape", "script"), pairs(SAMPLING, ((1, 4), (2, 3, 5), (3, 4)), SCRIPTS), ids=str
)
def test_sampled_tokens_equal_plain_ones(sampling: str, shape: tuple[int, ...], script: str) -> None:
    model, seed = make_model(), len(shape) + shape[0]
    prompt, options = make_prompt(seed, seed=seed), SAMPLING[sampling] | {"seed": seed}
    plain, drafter = with_plain(model, prompt, 20, script, width=shape[0], script_seed=seed, **options)
    steps = run(model, prompt, drafter, max_tokens=20, plan=shape, **options)
    assert_same_steps(steps, plain)
    assert (steps[-1].stats.accepted > 0) is (script != "wrong")


def test_length_dependent_ropes_stop_drafting() -> None:
    model, prompt = make_model("llama-dynamic"), make_prompt(10)
    plain, drafter = with_plain(model, prompt, 20, "right", width=1)
    steps = run(model, prompt, drafter, max_tokens=20, plan=(1, 4))
    assert_same_steps(steps, plain)
    assert steps[-1].stats.plain_steps == 19


@pytest.mark.parametrize(
    ("length", "chunk"),
    [*((length, chunk) for length in (1, 2, 3, 4, 7) for chunk in (1, 3, 64)),
     *((length, 64) for length in (63, 64, 65, 66, 128, 129)), *((length, 2048) for length in (250, 255, 256, 257))],
)  # fmt: skip
def test_any_prompt_length_and_prefill_step_size(length: int, chunk: int) -> None:
    model, prompt = make_model(), make_prompt(length)
    plain, drafter = with_plain(model, prompt, 10, "mixed", width=2, script_seed=length, prefill_step_size=chunk)
    progress, theirs = [], []
    options: dict[str, Any] = {"max_tokens": 10, "prefill_step_size": chunk}
    mine = options | {"prompt_progress_callback": lambda *done: progress.append(done)}
    assert_same_steps(run(model, mx.array(prompt), drafter, plan=(2, 3), **mine), plain)
    options["prompt_progress_callback"] = lambda *done: theirs.append(done)
    assert [token for token, _ in mlx_lm_generate_step(mx.array(prompt), model, **options)] == ids(plain)
    assert progress == theirs


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("late", [-3, 0, 1, 2, 5, 10])
def test_kv_cache_is_quantized_at_mlx_lms_token(late: int, bits: int) -> None:
    model, prompt = make_model(), make_prompt(8, seed=1)
    options = {"kv_bits": bits, "kv_group_size": 32, "quantized_kv_start": 8 + late}
    for width in (1, 3):
        plain, drafter = with_plain(model, prompt, 16, "right", width=width, **options)
        assert_same_steps(run(model, prompt, drafter, max_tokens=16, plan=(width, 4), **options), plain)
    theirs = mlx_lm_generate_step(mx.array(prompt), model, max_tokens=16, **options)
    assert [token for token, _ in theirs] == ids(plain)
    assert plain[-1].logprobs.tolist() != run(model, prompt, max_tokens=16)[-1].logprobs.tolist(), "bits matter"


def test_scripts_reach_every_depth_and_branch() -> None:
    model, width, depth = make_model(), 3, 3
    paths: list[list[int]] = []
    reached = set()
    for script_seed in range(4):
        prompt = make_prompt(10, seed=script_seed)
        plain, drafter = with_plain(model, prompt, 60, "mixed", width=width, script_seed=script_seed)
        on_round = {"on_round": lambda tree, path, chosen: paths.append(path)}
        steps = run(model, prompt, drafter, max_tokens=60, plan=(width, depth), **on_round)
        assert_same_steps(steps, plain)
        deep = 0
        for step, rank in zip(steps, drafter.ranks[len(prompt) :], strict=False):
            deep = deep + 1 if step.from_draft else 0
            reached.add((deep, rank if deep else None))
    assert {len(path) - 1 for path in paths} == set(range(depth + 1))
    assert reached == {(0, None)} | {(d + 1, rank) for d in range(depth) for rank in range(width)}
    assert any(path != list(range(len(path))) for path in paths), "some accepted rows must move"


real_keep_rows = kv_cache.keep_rows


def broken_accept(tree: Tree, tokens: mx.array, depth: int, limit: int) -> Accepted:
    """Accepts the first path whatever the target chose."""
    count = min(depth, limit)
    return Accepted(mx.array(count), mx.array([min(level, count) for level in range(depth + 1)]))


def broken_keep_rows(cache: kv_cache.Cache, count: int, path: list[int]) -> None:
    """Does not move the accepted rows."""
    real_keep_rows(cache, count, list(range(len(path))))


@pytest.mark.parametrize(
    ("module", "name", "broken"), [(rounds, "accept", broken_accept), (kv_cache, "keep_rows", broken_keep_rows)]
)
def test_a_broken_engine_gives_other_tokens(
    module: Any, name: str, broken: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, prompt = make_model(), make_prompt(10)
    plain, drafter = with_plain(model, prompt, 30, "mixed", width=3)
    assert ids(run(model, prompt, drafter, max_tokens=30, plan=(3, 3))) == ids(plain)
    monkeypatch.setattr(module, name, broken)
    assert ids(run(model, prompt, drafter, max_tokens=30, plan=(3, 3))) != ids(plain)


@pytest.mark.parametrize("score", [-inf, nan, inf])
@pytest.mark.parametrize("threshold", [-100.0, 2.0])
def test_infinite_or_nan_scores_change_no_tokens(score: float, threshold: float) -> None:
    model, prompt = make_model(vocab=300), make_prompt(6)
    drafter = small_drafter(hidden=64, vocab=300)
    real = drafter.logits

    def logits(*given: Any) -> mx.array:
        scores = real(*given)
        return mx.where(scores > threshold, score, scores)

    drafter.logits = logits
    for options in ({}, {"temp": 1.0, "seed": 1, "top_k": 2}):
        plain = run(model, prompt, max_tokens=16, **options)
        for plan in ((2, 4, 5), (2, 4)):
            assert_same_steps(run(model, prompt, drafter, max_tokens=16, plan=plan, **options), plain)
