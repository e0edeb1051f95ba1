"""Sampled texts have the law that the target's probabilities give them, cell by cell over a tiny vocabulary."""

from __future__ import annotations

from collections import Counter
from itertools import product
from math import inf, sqrt
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.sample_utils import make_sampler
from toys import Unsound, ids, make_model, run

from mlx_redrafter.engine import round as rounds
from mlx_redrafter.engine.types import Tree, Verdict

VOCAB, DEEP, DRAWS = 5, 3, 600
PROMPT = [1, 3, 0, 2]
BEAMS = {"chain": {"beam_width": 1, "draft_depth": 2}, "tree": {"beam_width": 2, "draft_depth": 2},
         "pruned tree": {"beam_width": 3, "draft_depth": 2, "tree_size": 4}}  # fmt: skip
TEMP = 1.3
LIMIT = 3.7
"""One text in ten thousand would be rarer, if all is well."""
Text = tuple[int, ...]


def law(top_p: float = 1.0) -> dict[Text, float]:
    """The probability of every text of `DEEP` tokens, from plain forwards; nucleus and temperature written out."""
    texts = list(product(range(VOCAB), repeat=DEEP))
    model = make_model(vocab=VOCAB, layers=1, spread=1.0)
    logits = model(mx.array([[*PROMPT, *text] for text in texts]))[:, len(PROMPT) - 1 : -1]
    found = {}
    for text, rows in zip(texts, mx.softmax(logits, axis=-1).tolist(), strict=True):
        probability = 1.0
        for token, row in zip(text, rows, strict=True):
            above = {t: sum(p for p in row if p > row[t]) for t in range(VOCAB)}
            weights = [p ** (1 / TEMP) if above[t] < top_p else 0.0 for t, p in enumerate(row)]
            probability *= weights[token] / sum(weights)
        found[text] = probability
    return found


def deviation(counts: Counter[Text], expected: dict[Text, float]) -> float:
    """How many standard deviations the chi-square statistic lies above its mean (Wilson and Hilferty's cube root)."""
    if any(expected[text] == 0 for text in counts):
        return inf
    total, small = sum(counts.values()), [0.0, 0.0]
    cells = []
    for text, probability in expected.items():
        if total * probability < 5:
            small = [small[0] + counts[text], small[1] + total * probability]
        else:
            cells.append((counts[text], total * probability))
    cells += [(small[0], small[1])] if small[1] else []
    freedom = len(cells) - 1
    assert freedom > 20
    statistic = sum((seen - mean) ** 2 / mean for seen, mean in cells)
    spread = 2 / (9 * freedom)
    return ((statistic / freedom) ** (1 / 3) - (1 - spread)) / sqrt(spread)


def drawn(beam: str, first_seed: int, **options: Any) -> tuple[Counter[Text], float]:
    """(how often each text was drawn, the share of texts in which a drafted token was kept)."""
    model, counts, kept = make_model(vocab=VOCAB, layers=1, spread=1.0), Counter[Text](), 0
    drafter = Unsound(model, 0.0, 1e9)
    for seed in range(first_seed, first_seed + DRAWS):
        steps = run(model, PROMPT, drafter, seed=seed, max_tokens=DEEP + 1, **BEAMS[beam], **options)
        counts[tuple(ids(steps)[:DEEP])] += 1
        kept += steps[-1].stats.accepted > 0
    return counts, kept / DRAWS


@pytest.mark.parametrize("beam", BEAMS)
def test_sampled_texts_have_the_targets_law(beam: str) -> None:
    counts, kept = drawn(beam, 1000 * len(beam), temp=TEMP)
    assert kept > 0.2
    assert deviation(counts, law()) < LIMIT
    assert deviation(counts, law(0.8)) > 2 * LIMIT


def test_texts_of_a_nucleus_have_its_law() -> None:
    counts, kept = drawn("tree", 0, temp=TEMP, top_p=0.8)
    assert kept > 0.2
    assert deviation(counts, law(0.8)) < LIMIT
    assert deviation(counts, law()) > 2 * LIMIT


@pytest.mark.parametrize("beam", ["chain", "pruned tree"])
def test_texts_of_a_callers_own_sampler_have_its_law(beam: str) -> None:
    counts, kept = drawn(beam, 0, sampler=make_sampler(temp=TEMP, top_p=0.8))
    assert kept > 0.2
    assert deviation(counts, law(0.8)) < LIMIT


@pytest.mark.parametrize("own", [False, True])
def test_a_rule_that_always_accepts_breaks_the_law(own: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def accept_chain(tree: Tree, target_tokens: mx.array, limit: int) -> Verdict:
        count = min(tree.tokens.shape[0] - 1, limit)
        return Verdict(mx.array(count), mx.minimum(tree.depths, count))

    monkeypatch.setattr(rounds, "accept_chain", accept_chain)
    options: dict[str, Any] = {"sampler": make_sampler(temp=TEMP)} if own else {"temp": TEMP}
    counts, kept = drawn("chain", 0, **options)
    assert kept == 1
    assert deviation(counts, law()) > 2 * LIMIT
