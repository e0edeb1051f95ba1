"""Beam search, and top-W selection without a full sort."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from helpers.small import hypotheses, random_advance
from mlx_redrafter.engine.beam_search import BLOCK, draft_chain, run_alone, search, top_w


def draw_scores(kind: str, size: int, rng: np.random.Generator) -> np.ndarray:
    values = rng.normal(size=size).astype(np.float32)
    if kind == "ties":
        values = np.round(values)
    if kind == "constant":
        values[:] = -1.5
    if kind == "mostly impossible":
        values[rng.random(size) < 0.98] = -np.inf
    return values


def check_top(values: np.ndarray, chosen: np.ndarray) -> None:
    """Asserts that `chosen` are distinct indices of the largest values, in order."""
    assert chosen.min() >= 0
    assert chosen.max() < len(values)
    assert len(set(chosen.tolist())) == len(chosen)
    assert values[chosen].tolist() == (-np.sort(-values))[: len(chosen)].tolist()


@pytest.mark.parametrize("kind", ["distinct", "ties", "constant", "mostly impossible"])
@pytest.mark.parametrize(
    "size", [1, 7, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK, 5 * BLOCK + 1, 4097]
)
def test_top_w_matches_a_full_sort(size: int, kind: str):
    for width in (1, 2, 4, 7):
        for seed in range(3):
            values = draw_scores(kind, size, np.random.default_rng(seed))
            check_top(values, np.array(top_w(mx.array(values), min(width, size))))


def test_the_check_rejects_wrong_indices():
    # Negative control.
    values = draw_scores("distinct", 1000, np.random.default_rng(0))
    best = np.argsort(-values)
    for wrong in (best[1:4], best[[1, 0]], best[[0, 0]]):
        with pytest.raises(AssertionError):
            check_top(values, wrong)


@pytest.mark.parametrize("seed", range(4))
def test_a_beam_of_one_is_greedy(seed: int):
    advance = random_advance(seed, 200)
    beams = run_alone(search(mx.array(5), 1, 6), advance)
    token = mx.array([5])
    state = None
    score = 0.0
    for level in range(6):
        logits, state = advance(token, state)
        token = mx.argmax(logits, axis=-1)
        score += (logits - mx.logsumexp(logits)).max().item()
        assert beams.tokens[level].tolist() == token.tolist()
        assert beams.scores[level].item() == pytest.approx(score, abs=1e-5)
    assert run_alone(draft_chain(mx.array(5), 6), advance).tolist() == beams.tokens[:, 0].tolist()


def test_logits_are_adjusted_before_they_are_ranked():
    advance = random_advance(0, 50)
    forced = [3, 1, 4, 1]

    def adjust(logits, level, paths):
        assert paths.shape[1] == level + 1
        assert paths[0].tolist() == [5, *forced[:level]]
        return mx.where(mx.arange(50) == forced[level], 100.0, logits)

    assert hypotheses(run_alone(search(mx.array(5), 3, 4, adjust=adjust), advance))[0] == forced
    assert hypotheses(run_alone(search(mx.array(5), 3, 4), advance))[0] != forced
    assert run_alone(draft_chain(mx.array(5), 4, adjust=adjust), advance).tolist() == forced


def test_beams_carry_nested_states():
    flat = random_advance(0, 50)

    def nested(tokens, state):
        before = None if state is None else state["last"][1]
        logits, after = flat(tokens, before)
        depth = 0 if state is None else state["depth"] + 1
        return logits, {"depth": depth, "last": (tokens, after)}

    assert hypotheses(run_alone(search(mx.array(5), 4, 5), nested)) == hypotheses(
        run_alone(search(mx.array(5), 4, 5), flat)
    )
