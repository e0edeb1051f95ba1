"""Generations that are driven from several threads, or run side by side over one model."""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from itertools import cycle
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.cache import BatchKVCache, make_prompt_cache
from mlx_lm.sample_utils import make_logits_processors
from toys import Scripted, assert_same_cache, ids, make_model, make_prompt, make_tokenizer, run, scripted, snapshot

from mlx_redrafter import generate_step, stream_generate
from mlx_redrafter.engine.supported_models import capture_output, find_parts
from mlx_redrafter.engine.tree_attention import Nodes

COUNT = 16
PROMPT = make_prompt(9)
TREE = {"beam_width": 3, "draft_depth": 3}
CHAIN = {"beam_width": 1, "draft_depth": 4}
QUANTIZED = {"kv_bits": 8, "kv_group_size": 32}
TOP_P = {"temp": 1.0, "top_p": 0.9, "seed": 4}
JOBS: dict[str, dict[str, Any]] = {
    "plain": {},
    "plain, top_p": TOP_P,
    "plain, processors": {"logits_processors": make_logits_processors(repetition_penalty=1.3)},
    "chain": CHAIN,
    "chain, top_p": CHAIN | TOP_P,
    "tree": TREE,
    "tree, pruned": TREE | {"tree_size": 7},
    "tree, top_p": TREE | TOP_P,
    "tree, xtc": TREE | {"temp": 1.0, "seed": 9, "xtc_probability": 0.5, "xtc_threshold": 0.1},
    "tree, processors": TREE | {"logits_processors": make_logits_processors(repetition_penalty=1.3)},
    "tree, 8 bits from the prompt on": TREE | QUANTIZED | {"quantized_kv_start": 9},
    "chain, 8 bits from the prompt on": CHAIN | QUANTIZED | {"quantized_kv_start": 9},
    "tree, 8 bits": TREE | QUANTIZED | {"quantized_kv_start": 0},
    "tree, 8 bits from 12 on": TREE | QUANTIZED | {"quantized_kv_start": 12},
    "plain, 8 bits from 12 on": QUANTIZED | {"quantized_kv_start": 12},
}


@functools.cache
def prepared(name: str) -> tuple[list[int], Scripted | None]:
    """(a job's tokens as one thread decodes them plainly, its drafter)."""
    model, options = make_model(), JOBS[name]
    rest = {key: value for key, value in options.items() if key not in ("beam_width", "draft_depth", "tree_size")}
    plain = ids(run(model, PROMPT, max_tokens=COUNT + 8, **rest))
    width = options.get("beam_width")
    return plain[:COUNT], width and scripted(model, PROMPT + plain, "mixed", width=width)


def job(name: str) -> tuple[list[int], Iterator[int], Any]:
    """(its tokens as one thread decodes them plainly, the same generation not yet started, its cache)."""
    model, (plain, drafter) = make_model(), prepared(name)
    cache = make_prompt_cache(model)
    steps = generate_step(PROMPT, model, drafter, max_tokens=COUNT, prompt_cache=cache, **JOBS[name])
    return plain, steps, cache


@contextmanager
def workers(count: int) -> Iterator[list[ThreadPoolExecutor]]:
    """Pools of one thread each. A thread that has used MLX clears its streams before it ends, or the process may
    abort when it exits (so in mlx-lm alone as well)."""
    with ExitStack() as stack:
        pools = [stack.enter_context(ThreadPoolExecutor(1)) for _ in range(count)]
        for pool in pools:
            stack.callback(lambda pool=pool: pool.submit(mx.clear_streams).result())
        yield pools


@pytest.mark.parametrize("name", JOBS)
def test_every_next_may_come_from_another_thread(name: str) -> None:
    expected, steps, cache = job(name)
    with workers(3) as pools:
        turn = cycle(pools)
        try:
            assert [next(turn).submit(next, steps).result()[0] for _ in range(COUNT)] == expected
            assert next(turn).submit(next, steps, None).result() is None
        finally:
            next(turn).submit(steps.close).result()
    expected, steps, other = job(name)
    assert [token for token, _, _ in steps] == expected
    assert_same_cache(cache, other)


@pytest.mark.parametrize("name", ["plain", "chain, top_p", "tree, pruned", "tree, 8 bits"])
def test_a_generation_may_be_closed_by_another_thread(name: str) -> None:
    for count in (1, 2, 3, 5, 8, 13):
        expected, steps, cache = job(name)
        with workers(2) as (one, other):
            assert [one.submit(next, steps).result()[0] for _ in range(count)] == expected[:count]
            other.submit(steps.close).result()
        _, steps, plain = job(name)
        assert [token for _, (token, _, _) in zip(range(count), steps, strict=False)] == expected[:count]
        steps.close()
        assert_same_cache(cache, plain)


def test_generations_that_take_turns_on_one_model_do_not_meet() -> None:
    before = snapshot(make_model())
    jobs = [job(name) for name in JOBS]
    for position in range(COUNT):
        for name, (expected, steps, _) in zip(JOBS, jobs, strict=True):
            assert next(steps)[0] == expected[position], name
    assert all(next(steps, None) is None for _, steps, _ in jobs)
    assert snapshot(make_model()) == before


@pytest.mark.parametrize(
    "names",
    [
        ("tree", "plain"),
        ("tree, top_p", "plain, top_p"),
        ("tree", "chain"),
        ("tree, top_p", "tree, top_p"),
        ("tree, xtc", "chain, top_p"),
        ("tree, processors", "tree, 8 bits"),
    ],
)
def test_two_threads_decode_with_one_model_at_the_same_time(names: tuple[str, str]) -> None:
    before = snapshot(make_model())
    start = threading.Barrier(2)

    def together(name: str) -> tuple[list[int], list[int]]:
        expected, steps, _ = job(name)
        start.wait()
        return [token for token, _, _ in steps], expected

    with workers(2) as pools:
        for _ in range(4):
            runs = [pool.submit(together, name) for pool, name in zip(pools, names, strict=True)]
            for tokens, expected in [run.result() for run in runs]:
                assert tokens == expected
    assert snapshot(make_model()) == before


def test_another_thread_may_run_a_batch_while_a_tree_is_being_built() -> None:
    model = make_model()

    def batch() -> list[float]:
        cache = [BatchKVCache([0, 2]) for _ in model.layers]
        model(mx.array([[1, 2, 3], [0, 0, 3]]), cache=cache)
        return model(mx.array([[4], [5]]), cache=cache).tolist()

    expected = batch()
    nodes = Nodes(0, mx.array([0, 1, 1]), mx.array([[1, 0, 0], [1, 1, 0], [1, 0, 1]]) > 0, branched=True)
    with workers(1) as (other,):
        built, kept = capture_output(
            find_parts(model).final_norm, lambda: build_with_nodes([], nodes, lambda _: other.submit(batch).result())
        )
    assert (built.result, built.calls, kept) == (expected, [], [])


@pytest.mark.parametrize("width", [0, 1, 3])
def test_closing_cancels(width: int) -> None:
    calls, model = 0, make_model()

    def processor(history: mx.array, logits: mx.array) -> mx.array:
        nonlocal calls
        calls += 1
        return logits

    plain = ids(run(model, PROMPT, max_tokens=COUNT))
    drafter = scripted(model, PROMPT + plain, "mixed", width=width) if width else None
    options = {"beam_width": width, "draft_depth": 3} if width else {}
    steps = generate_step(PROMPT, model, drafter, max_tokens=-1, logits_processors=[processor], **options)
    assert [next(steps)[0] for _ in range(5)] == plain[:5]
    steps.close()
    done = calls
    assert next(steps, None) is None
    assert calls == done > 0


def test_closing_a_stream_of_responses_closes_what_is_below_it() -> None:
    model, cache = make_model(), make_prompt_cache(make_model())
    plain = ids(run(model, PROMPT, max_tokens=COUNT))
    drafter = scripted(model, PROMPT + plain, "right", width=2)
    responses = stream_generate(
        model, make_tokenizer(), PROMPT, drafter=drafter, prompt_cache=cache, max_tokens=-1, beam_width=2, draft_depth=4
    )
    assert [next(responses).token for _ in range(4)] == plain[:4]
    responses.close()
    assert next(responses, None) is None
    assert cache[0].offset == len(PROMPT) + 4
