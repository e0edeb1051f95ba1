"""Recurrent layers: after a rejection their states are those of plain reading."""

from __future__ import annotations

import gc
import random
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.models.cache import make_prompt_cache

from helpers.families import make_family, quantize_linears
from helpers.grids import pairs
from helpers.small import make_tree
from helpers.toys import assert_same_cache
from mlx_redrafter.target import recurrence
from mlx_redrafter.target import target as target_module
from mlx_redrafter.target.recurrence import Call, Paths, make_paths
from mlx_redrafter.target.rollback_check import explain_replay
from mlx_redrafter.target.supported_models import REPLAYED
from mlx_redrafter.target.target import Target
from mlx_redrafter.target.tree_attention import Nodes

HOOKS = {
    "qwen3_next": "the gated delta rule",
    "kimi_linear": "the same, with three convolutions",
    "nemotron_h": "Mamba 2",
    "falcon_h1": "Mamba 2, in a list of caches",
    "lfm2": "convolutions only",
    "bailing_moe_linear": "linear attention",
    "recurrent_gemma": "a scan, and rings",
}
CLOSE = 2e-3


def read_rounds(model: nn.Module, is_tree: bool, size: int, exact: bool = False) -> None:
    """Asserts the cache and the logits of plain reading after rounds of random trees or chains.

    Args:
        size: tokens of the prompt; 0 for an empty cache.
        exact: whether recurrences read chains row by row, padded to 7 rows.
    """
    generator = random.Random(size)
    target = Target(model, rolls_back=True, row_counts=(7,) if exact else None)
    tokens = [generator.randrange(50) for _ in range(size)]
    if size:
        target.forward(mx.array(tokens))
    expected = []
    for turn in range(4):
        parents = [0] + [
            generator.randrange(max(0, node - 3), node) if is_tree else node - 1
            for node in range(1, 6)
        ]
        tree = make_tree([generator.randrange(50) for _ in parents], parents)
        logits = target.verify(tree, is_tree=is_tree).logits
        node = 5 if turn == 1 else generator.randrange(6)
        path = [each for each in range(6) if tree.ancestors[node, each].item()]
        accepted = [tree.tokens.tolist()[each] for each in path]  # type: ignore[index]
        target.keep_path(path, accepted)
        if turn == 2 and len(path) > 1:
            target.rewind(1)
            path.pop()
            accepted.pop()
        assert not target.replayed
        tokens += accepted
        expected.append(logits[mx.array(path)])
    target.finish(len(tokens), 0)
    cache = make_prompt_cache(model)
    plain = model(mx.array([tokens]), cache=cache)[0, size:]
    far = mx.abs(mx.concatenate(expected) - plain).max()
    assert far.item() < CLOSE  # type: ignore[operator]
    assert_same_cache(target.cache, cache, tolerance=CLOSE)


@pytest.mark.parametrize(
    ("name", "kind", "size"), pairs(HOOKS, ("chain", "exact", "tree", "tree, 4 bits"), (0, 1, 9))
)
def test_rounds_leave_the_states_of_plain_reading(name: str, kind: str, size: int) -> None:
    model = make_family(name)
    if "4 bits" in kind:
        quantize_linears(model)
    read_rounds(model, "tree" in kind, size, kind == "exact")


def keep_one_row_less(compute: Any, call: Call, path: list[int], **how: Any) -> Any:
    return compute(call, path[:-1], **how)


def keep_convolutions_one_row_later(compute: Any, call: Call, path: list[int], **how: Any) -> Any:
    is_convolution = len(call.rows) == 1
    return compute(call, [*path, path[-1]] if is_convolution else path, **how)


def keep_a_sibling(compute: Any, call: Call, path: list[int], **how: Any) -> Any:
    others = [node for node in range(4) if node not in path]
    return compute(call, [*path[:-1], *others[:1]], **how)


@pytest.mark.parametrize("is_tree", [False, True])
@pytest.mark.parametrize(
    "wrong", [keep_one_row_less, keep_convolutions_one_row_later, keep_a_sibling]
)
@pytest.mark.parametrize("name", ["qwen3_next", "nemotron_h"])
def test_wrong_states_are_found(
    name: str, wrong: Callable[..., Any], is_tree: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also by the check of a model, whose tokens are replayed then."""
    model = make_family(name)
    assert explain_replay(model, tree=is_tree) is None
    compute = Call.compute_state
    replacement = lambda call, path, **how: wrong(compute, call, path, **how)  # noqa: E731
    monkeypatch.setattr(Call, "compute_state", replacement)
    assert "gave other logits" in str(explain_replay(model, tree=is_tree))
    with pytest.raises(AssertionError):
        read_rounds(model, is_tree, 9)


@pytest.mark.parametrize("name", ["qwen3_next", "mamba2", "lfm2"])
def test_outputs_of_a_siblings_path_are_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def mix_paths(nodes: Nodes, *bounds: int) -> Paths:
        paths = make_paths(nodes, *bounds)
        return paths._replace(path=mx.zeros_like(paths.path))

    model = make_family(name)
    monkeypatch.setattr(target_module, "make_paths", mix_paths)
    assert "gave other logits" in str(explain_replay(model, tree=True))
    assert explain_replay(model) is None


@pytest.mark.parametrize("name", REPLAYED)
def test_models_whose_states_are_not_recorded_replay(name: str) -> None:
    assert explain_replay(make_family(name))


def test_a_recurrence_that_is_not_found_replays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(recurrence.RECURRENCES, "ssm_update")
    assert "known functions" in str(explain_replay(make_family("mamba2")))


@pytest.mark.parametrize("bounded", [False, True])
def test_every_node_is_on_a_path(bounded: bool) -> None:
    generator = random.Random(0)
    for _ in range(20):
        parents = [0] + [generator.randrange(node) for node in range(1, 9)]
        tree = make_tree(parents, parents)
        nodes = Nodes(0, tree.depths, tree.ancestors, is_tree=True)
        depth: Any = tree.depths.max().item()
        n_leaves = len(set(range(9)) - set(parents[1:]))
        paths = make_paths(nodes, n_leaves, depth) if bounded else make_paths(nodes)
        assert paths.nodes.shape == ((n_leaves, depth + 1) if bounded else (9, 9))
        rows: Any = paths.nodes.tolist()
        for node in range(9):
            place: int = tree.depths[node].item()  # type: ignore[assignment]
            own = rows[paths.path[node].item()][: place + 1]
            assert own == [each for each in range(9) if tree.ancestors[node, each].item()]


def test_a_tree_is_refused_where_accepted_tokens_are_replayed() -> None:
    target = Target(make_family("mamba2"))
    with pytest.raises(AssertionError, match="several paths"):
        target.verify(make_tree([1, 2, 3], [0, 0, 0]), is_tree=True)


def test_inputs_are_held_until_the_next_forward() -> None:
    target = Target(make_family("qwen3_next"), rolls_back=True)
    target.forward(mx.arange(3))

    def count_calls() -> int:
        gc.collect()
        return sum(type(each) is Call for each in gc.get_objects())

    before = count_calls()
    target.verify(make_tree([1, 2, 3], [0, 0, 1]), is_tree=False)
    target.keep_path([0, 1], [1, 2])
    assert count_calls() > before
    target.forward(mx.arange(1))
    assert count_calls() == before


def test_a_recording_may_be_made_while_another_thread_builds_a_forward() -> None:
    model = make_family("mamba2")
    slots = recurrence.list_recurrences(model)
    cache = make_prompt_cache(model)
    recording = recurrence.Recording(cache, 2)
    with recurrence.Recording(make_prompt_cache(model), 2).replace(slots):
        context = recording.replace(slots)
    with context:
        model(mx.array([[1, 2]]), cache=cache)
    assert recording.is_complete
