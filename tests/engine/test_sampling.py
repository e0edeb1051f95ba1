"""Sampled texts are distributed as the target's probabilities say: a chi-square test over a tiny vocabulary."""

from __future__ import annotations

from collections import Counter
from itertools import product
from math import inf, sqrt
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.sample_utils import make_sampler
from toys import RandomDrafter, ids, make_model, run

from mlx_redrafter.engine import round as rounds
from mlx_redrafter.engine.types import Tree, Verdict

VOCAB, LENGTH, DRAWS = 5, 3, 600
PROMPT = [1, 3, 0, 2]
PLANS = {"chain": (1, 2), "tree": (2, 2), "pruned tree": (3, 2, 4)}
TEMP = 1.3
LIMIT = 3.7
"""Standard deviations: one of ten thousand correct samplers would exceed them."""
Text = tuple[int, ...]


def distribution(top_p: float = 1.0) -> dict[Text, float]:
    """The probability of every text of `LENGTH` tokens, from plain forwards; nucleus and temperature written out."""
    texts = list(product(range(VOCAB), repeat=LENGTH))
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
    statistic = sum((count - mean) ** 2 / mean for count, mean in cells)
    spread = 2 / (9 * freedom)
    return ((statistic / freedom) ** (1 / 3) - (1 - spread)) / sqrt(spread)


def draw_texts(plan: str, first_seed: int = 0, **options: Any) -> tuple[Counter[Text], float]:
    """(how often each text was drawn, the share of texts in which a drafted token was accepted)."""
    model, counts, accepted = make_model(vocab=VOCAB, layers=1, spread=1.0), Counter[Text](), 0
    drafter = RandomDrafter(VOCAB)
    for seed in range(first_seed, first_seed + DRAWS):
        steps = run(model, PROMPT, drafter, seed=seed, max_tokens=LENGTH + 1, plan=PLANS[plan], **options)
        counts[tuple(ids(steps)[:LENGTH])] += 1
        accepted += steps[-1].stats.accepted > 0
    return counts, accepted / DRAWS


@pytest.mark.parametrize(
    ("plan", "top_p", "options"),
    [
        ("chain", 1.0, {"temp": TEMP}),
        ("pruned tree", 1.0, {"temp": TEMP}),
        ("tree", 0.8, {"temp": TEMP, "top_p": 0.8}),
        ("pruned tree", 0.8, {"sampler": make_sampler(temp=TEMP, top_p=0.8)}),
    ],
)
def test_texts_have_the_targets_distribution(plan: str, top_p: float, options: dict[str, Any]) -> None:
    counts, accepted = draw_texts(plan, 1000 * len(plan), **options)
    assert accepted > 0.2
    assert deviation(counts, distribution(top_p)) < LIMIT
    # Negative control: it is not the other distribution.
    assert deviation(counts, distribution(1.8 - top_p)) > 2 * LIMIT


def test_accepting_always_breaks_the_distribution(monkeypatch: pytest.MonkeyPatch) -> None:
    def accept_chain(tree: Tree, target_tokens: mx.array, limit: int) -> Verdict:
        count = min(tree.tokens.shape[0] - 1, limit)
        return Verdict(mx.array(count), mx.minimum(tree.depths, count))

    monkeypatch.setattr(rounds, "accept_chain", accept_chain)
    counts, accepted = draw_texts("chain", temp=TEMP)
    assert accepted == 1
    assert deviation(counts, distribution()) > 2 * LIMIT
