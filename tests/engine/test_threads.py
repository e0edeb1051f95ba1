"""Generations driven from several threads, or running side by side on one model."""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Iterator
from itertools import cycle
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.models.cache import BatchKVCache, make_prompt_cache
from mlx_lm.sample_utils import make_logits_processors

from helpers.cached import make_cached
from helpers.families import make_family
from helpers.threads import workers
from helpers.toys import (
    VOCAB,
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
from mlx_redrafter import Session, generate_step
from mlx_redrafter.loading.checkpoints import evaluate
from mlx_redrafter.target.model_parts import CapturePoint, capture, get_parts
from mlx_redrafter.target.patches import Wrapper
from mlx_redrafter.target.tree_attention import Nodes, build_with_nodes

COUNT = 16
PROMPT = make_prompt(9)
TREE = {"plan": (3, 3)}
TOP_P = {"temp": 1.0, "top_p": 0.9, "seed": 4}
JOBS = {
    "plain": {},
    "plain, top_p": TOP_P,
    "chain, top_p": {"plan": (1, 4)} | TOP_P,
    "tree, pruned": {"plan": (3, 3, 7)},
    "tree, xtc": TREE | {"temp": 1.0, "seed": 9, "xtc_probability": 0.5, "xtc_threshold": 0.1},
    "tree, processors": TREE
    | {"logits_processors": make_logits_processors(repetition_penalty=1.3)},
    "tree, 8 bits": TREE | {"kv_bits": 8, "kv_group_size": 32, "quantized_kv_start": 12},
}


@functools.cache
def prepare(name: str) -> tuple[list[int], Scripted | None]:
    """Returns (the job's plain tokens from one thread, its drafter)."""
    model = make_model()
    options = dict(JOBS[name])
    width = options.pop("plan", (0,))[0]
    plain = ids(run(model, PROMPT, max_tokens=COUNT + 8, **options))
    return plain[:COUNT], scripted(model, PROMPT + plain, "mixed", width=width) if width else None


def make_job(name: str, **more: Any) -> tuple[list[int], Iterator[Any], Any]:
    """Returns (the job's plain tokens, the same generation not yet started, its cache)."""
    model = make_model()
    plain, drafter = prepare(name)
    options = {"max_tokens": COUNT, "prompt_cache": make_prompt_cache(model)} | JOBS[name] | more
    return plain, generate_step(PROMPT, model, drafter, **options), options["prompt_cache"]


@pytest.mark.parametrize(
    ("name", "count"),
    [*((name, COUNT) for name in JOBS), *zip(JOBS, cycle((1, 5, 8)), strict=False)],
)
def test_next_and_close_may_change_threads(name: str, count: int):
    expected, steps, cache = make_job(name)
    with workers(3) as pools:
        turn = cycle(pools)
        tokens = [next(turn).submit(next, steps).result()[0] for _ in range(count)]
        assert tokens == expected[:count]
        if count == COUNT:
            assert next(turn).submit(next, steps, None).result() is None
        next(turn).submit(steps.close).result()
    _, steps, other = make_job(name, max_tokens=count)
    assert [token for token, _, _ in steps] == expected[:count]
    assert_same_cache(cache, other)


@pytest.mark.parametrize(("name", "plan"), [("qwen3_5", (3, 3)), ("nemotron_h", (1, 4))])
def test_rollbacks_may_change_threads(name: str, plan: tuple[int, int]) -> None:
    model = make_family(name)
    plain, drafter = with_plain(model, PROMPT, COUNT, "mixed", width=plan[0])
    steps = generate_step(PROMPT, model, drafter, max_tokens=COUNT, plan=plan)
    with workers(3) as pools:
        turn = cycle(pools)
        assert [next(turn).submit(next, steps).result()[0] for _ in plain] == ids(plain)
        next(turn).submit(steps.close).result()


@pytest.mark.parametrize(
    "names",
    [
        ("tree, pruned", "plain"),
        ("tree, xtc", "chain, top_p"),
        ("tree, processors", "tree, 8 bits"),
    ],
    ids=" and ".join,
)
def test_two_threads_decode_with_one_model(names: tuple[str, str]):
    before = snapshot(make_model())
    interval = sys.getswitchinterval()
    barrier = threading.Barrier(2)

    def decode(name):
        expected, steps, _ = make_job(name)
        barrier.wait()
        return [token for token, _, _ in steps], expected

    sys.setswitchinterval(1e-5)  # switch often, so that threads meet within a forward
    try:
        with workers(2) as pools:
            runs = [pool.submit(decode, name) for pool, name in zip(pools, names, strict=True)]
            for tokens, expected in [run.result() for run in runs]:
                assert tokens == expected
    finally:
        sys.setswitchinterval(interval)
    assert snapshot(make_model()) == before


def test_another_thread_may_run_a_batch_meanwhile():
    """During the construction of a tree forward."""
    model = make_model()

    def run_batch():
        cache = [BatchKVCache([0, 2]) for _ in model.layers]
        model(mx.array([[1, 2, 3], [0, 0, 3]]), cache=cache)
        return model(mx.array([[4], [5]]), cache=cache).tolist()

    expected = run_batch()
    ancestors = mx.array([[1, 0, 0], [1, 1, 0], [1, 0, 1]]) > 0
    nodes = Nodes(0, mx.array([0, 1, 1]), ancestors, is_tree=True)
    point = CapturePoint(get_parts(model).final_norm)
    with workers(1) as (other,):
        built, (recorded,) = capture(
            [point], lambda: build_with_nodes([], nodes, lambda _: other.submit(run_batch).result())
        )
    assert (built.result, built.calls, recorded) == (expected, [], None)


class Waiting(nn.Module):
    """A model's last layer that waits in another thread's forward.

    It waits once, in a forward that captures the first layer's output.
    """

    def __init__(self, layers: list[nn.Module]) -> None:
        super().__init__()
        self["layer"] = layers[-1]
        self._is_captured = lambda: type(layers[0]) is Wrapper
        self._owner = threading.get_ident()
        self.entered = threading.Event()
        self._left = threading.Event()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        is_other = threading.get_ident() != self._owner
        if is_other and self._is_captured() and not self.entered.is_set():
            self.entered.set()
            self._left.wait(0.5)
        return self["layer"](*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return self[name] if name in self else getattr(self["layer"], name)


@pytest.mark.parametrize("task", ["new session", "end of a turn"])
def test_a_model_is_not_looked_at_while_another_thread_builds_a_forward(task: str):
    model = make_model(layers=4)
    tokenizer = make_tokenizer()
    drafter = make_cached("eagle 3", 64, VOCAB, layers=4)
    evaluate(model, drafter)
    turn = Session(model, tokenizer, plan="off", max_tokens=4).stream("ab")
    next(turn)
    model.model.layers[3] = waiting = Waiting(model.model.layers)
    tasks = {
        "new session": lambda: Session(model, tokenizer, plan="off", max_tokens=4),
        "end of a turn": turn.close,
    }

    def decode():
        return list(generate_step(PROMPT, model, drafter, plan=(1, 3), max_tokens=8))

    with workers(1) as (pool,):
        other = pool.submit(decode)
        assert waiting.entered.wait(30)
        tasks[task]()
        assert len(other.result(30)) == 8
