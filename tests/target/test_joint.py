"""Several texts in one forward: what the check of a model finds, and what padding leaves alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import mlx.core as mx
import pytest
from mlx_lm.models.cache import ArraysCache, RotatingKVCache

from helpers.families import make_family
from helpers.toys import assert_same_cache, make_model
from mlx_redrafter.target import target as target_module
from mlx_redrafter.target.forward import Part, Run
from mlx_redrafter.target.joint_check import explain_separate
from mlx_redrafter.target.target import Target

Change = tuple[Callable[[Part, Part], Part], Callable[[Run], Run]]
"""(a text's part, given the next text's; what its forward leaves)."""


def keep(run: Run) -> Run:
    return run


def exchange_states(part: Part, other: Part) -> Part:
    """The recurrent states of the other text."""
    pairs = zip(part.cache, other.cache, strict=True)
    cache = [theirs if isinstance(own, ArraysCache) else own for own, theirs in pairs]
    return part._replace(cache=cache)


CHANGES: dict[str, Change] = {
    "rows in another text's cache": (lambda part, other: part._replace(cache=other.cache), keep),
    "another text's positions": (lambda part, other: part._replace(start=other.start), keep),
    "another text's states": (exchange_states, keep),
    "a rejected row stays": (lambda part, other: part, lambda run: run._replace(n_padding=-1)),
}


@pytest.mark.parametrize("change", CHANGES)
def test_the_check_finds_wrong_rows(change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative controls."""
    model = make_family("qwen3_next") if "states" in change else make_model()
    assert explain_separate(model) is None
    change_part, change_run = CHANGES[change]
    joint = target_module.run_jointly

    def run_jointly(model, parts: Sequence[Part]) -> list[Run]:
        others = [*parts[1:], parts[0]]
        changed = [change_part(*both) for both in zip(parts, others, strict=True)]
        runs = joint(model, changed)
        is_draft = [part.is_draft for part in parts]
        return [change_run(run) if d else run for run, d in zip(runs, is_draft, strict=True)]

    monkeypatch.setattr(target_module, "run_jointly", run_jointly)
    assert explain_separate(model) == "several texts in one forward gave other logits"


def test_padding_leaves_full_rings_as_they_are() -> None:
    """Rows of no text, so that a ring drops no row for them."""
    model = make_model("qwen3")
    caches = []
    for is_joint in (False, True):
        targets = []
        for length in (30, 5):
            cache = [RotatingKVCache(12, keep=4) for _ in model.layers]
            target = Target(model, cache, row_counts=(1, 4))
            target.forward(mx.arange(length))
            targets.append(target)
        for token in range(9):
            rows = [target.prepare(mx.array([token])) for target in targets]
            for group in [rows] if is_joint else [[each] for each in rows]:
                targets[0].run(group)
        caches.append([layer for target in targets for layer in target.cache])
    assert_same_cache(*caches)
    places = [[(layer.keys.shape, layer._idx) for layer in each] for each in caches]
    assert places[0] == places[1]
