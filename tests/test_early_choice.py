"""A tree's choice is made before its rows are normalised, and normalising may move it: what is kept is never wrong."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from small import random_beams

from mlx_redrafter.engine.accept import accept, confirmed
from mlx_redrafter.engine.plan import Plan
from mlx_redrafter.engine.round import Chooser, Draft, normalised, verify
from mlx_redrafter.engine.sampling import Greedy
from mlx_redrafter.engine.target import Forward
from mlx_redrafter.engine.tree import grow

VOCAB = 4096
"""Enough that rows near 0 lose their last bits when they are normalised."""


class Late(Greedy):
    """Chooses by log-probabilities."""

    wants_logprobs = True


class Said:
    """A target that says these rows."""

    def __init__(self, logits: mx.array) -> None:
        self._forward = Forward(logits, mx.arange(logits.shape[0])[:, None].astype(mx.float32))

    def verify(self, tree: Any, *, branched: bool) -> Forward:
        return self._forward


def test_a_verdict_is_cut_where_the_choice_proper_differs() -> None:
    guessed = mx.array([4, 6, 8, 9])
    for kept, chosen, count in (
        (3, [4, 6, 8, 9], 3),
        (3, [4, 6, 8, 1], 3),
        (3, [4, 1, 8, 9], 1),
        (3, [1, 6, 8, 9], 0),
        (1, [4, 6, 1, 1], 1),
        (0, [1, 1, 1, 1], 0),
    ):
        assert confirmed(mx.array(kept), guessed, mx.array(chosen)).item() == count


@pytest.mark.parametrize("seed", range(12))
def test_what_a_round_says_is_what_log_probabilities_say(seed: int) -> None:
    rng = np.random.default_rng(seed)
    width, depth = int(rng.integers(2, 5)), int(rng.integers(1, 5))
    plan = Plan(width, depth, 1 + width * depth)
    tree = grow(mx.array(1), random_beams(rng, width, depth))
    logits = rng.normal(0, 1e-4, (plan.size, VOCAB)).astype(np.float32)
    parents, tokens = tree.parents.tolist(), tree.tokens.tolist()
    for node in range(plan.size):  # what is likeliest differs from others by less than normalising leaves of it
        logits[node, rng.integers(VOCAB, size=3)] = np.float32(0.01) + np.float32(2e-9) * np.arange(3)
    for node in range(1, plan.size):
        logits[parents[node], tokens[node]] = np.float32(0.01) + np.float32(2e-9 * rng.integers(0, 3))
    rows, draft = mx.array(logits), Draft(tree, None)
    outcomes = [
        verify(Said(rows), draft, Chooser(each, ()), None, plan, depth)  # type: ignore[arg-type]
        for each in (Greedy(), Late())
    ]
    (early, *early_told), (late, *late_told) = (outcome.report.tolist() for outcome in outcomes)
    moved = (mx.argmax(rows, axis=1) != mx.argmax(normalised(rows), axis=1)).sum().item()
    assert moved > 0, "or nothing is tried here"
    assert early <= late
    assert early_told[: early + 1] == late_told[: early + 1], "the path"
    said = early_told[depth + 1 :], late_told[depth + 1 :]
    assert said[0][: early + 1] == said[1][: early + 1]
    assert all(
        mx.array_equal(one, two)
        for one, two in zip(outcomes[0].logprobs[: early + 1], outcomes[1].logprobs, strict=False)
    )
    tip = outcomes[0].tip
    assert tip is not None
    assert (tip.token.item(), tip.hidden.item()) == (said[0][early], early_told[early])


def test_where_nothing_ties_as_much_is_kept() -> None:
    rng = np.random.default_rng(5)
    plan = Plan(3, 3, 10)
    for _ in range(20):
        tree = grow(mx.array(1), random_beams(rng, 3, 3))
        rows = mx.array(rng.normal(0, 1, (10, VOCAB)).astype(np.float32))
        for node in range(1, 10):
            rows[tree.parents[node], tree.tokens[node]] = 9 + float(rng.random())
        outcome = verify(Said(rows), Draft(tree, None), Chooser(Greedy(), ()), None, plan, 3)  # type: ignore[arg-type]
        expected = accept(tree, mx.argmax(rows, axis=1), 3, 3)
        assert outcome.report[0].item() == expected.n_accepted.item() > 0
        assert outcome.report[1:5].tolist() == expected.path.tolist()
