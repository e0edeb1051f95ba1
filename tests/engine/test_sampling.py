"""Tokens are drawn from the filtered probabilities, with noise that depends only on the position.

test_row_classes.py shows that drafted tokens are exactly those that plain decoding samples.
"""

from __future__ import annotations

from math import sqrt
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.sample_utils import apply_min_p, apply_top_k, apply_top_p, apply_xtc

from helpers.families import make_family
from helpers.toys import ids, make_model, make_prompt, run, with_plain
from mlx_redrafter.engine.sampling import Sampler, make_sampler

VOCAB = 6
DRAWS = 4000
LIMIT = 3.7
"""In standard deviations: one in ten thousand correct samplers would exceed it."""
LOGPROBS = mx.log(mx.array([[0.4, 0.04, 0.25, 0.11, 0.02, 0.18]]))
FILTERS = {
    "none": ({}, lambda x: x),
    "top_p": ({"top_p": 0.8}, lambda x: apply_top_p(x, 0.8)),
    "min_p": ({"min_p": 0.3}, lambda x: apply_min_p(x, 0.3)),
    "top_k": ({"top_k": 3}, lambda x: apply_top_k(x, 3)),
    "xtc": (
        {"xtc_probability": 1.0, "xtc_threshold": 0.15},
        lambda x: apply_xtc(x, 1.0, 0.15, []),
    ),
}

RECURRENT = ("qwen3_next", "mamba2", "lfm2", "bailing_moe_linear", "recurrent_gemma")
"""A family for each function by which recurrent layers read rows."""


def choose(sampler: Sampler, positions: int) -> np.ndarray:
    """(positions,) tokens chosen at each position from the same log-probabilities."""
    draws = sampler.draw(mx.array(100), positions, VOCAB)
    logprobs = mx.repeat(LOGPROBS, positions, axis=0)
    return np.array(sampler.choose(logprobs, draws, mx.arange(positions)))


def expected(temp: float, apply: Any) -> np.ndarray:
    """(V,) probabilities after mlx-lm's own filters."""
    return np.array(mx.softmax(apply(LOGPROBS)[0] / temp))


def deviation(counts: np.ndarray, probabilities: np.ndarray) -> float:
    """Standard deviations of the chi-square statistic above its mean.

    Source: Wilson and Hilferty's cube root.
    """
    possible = probabilities > 0
    if counts[~possible].any():
        return np.inf
    means = probabilities[possible] * counts.sum()
    freedom = possible.sum() - 1
    spread = 2 / (9 * freedom)
    statistic = ((counts[possible] - means) ** 2 / means).sum()
    return ((statistic / freedom) ** (1 / 3) - (1 - spread)) / sqrt(spread)


@pytest.mark.parametrize("temp", [0.7, 1.3])
@pytest.mark.parametrize("name", FILTERS)
def test_tokens_have_the_filtered_distribution(name: str, temp: float):
    options, apply = FILTERS[name]
    one = expected(temp, apply)
    other = expected(2 * temp, apply)
    samplers = [make_sampler(seed=seed, temp=temp, **options) for seed in range(4)]
    tokens = np.concatenate([choose(sampler, DRAWS // 4) for sampler in samplers])
    # Neighbouring positions are independent: pairs have the product distribution.
    pairs = np.bincount(tokens[:-1] * VOCAB + tokens[1:], minlength=VOCAB**2)
    assert deviation(np.bincount(tokens, minlength=VOCAB), one) < LIMIT
    assert deviation(pairs, np.outer(one, one).reshape(-1)) < LIMIT
    # Negative control: the distribution of another temperature.
    assert deviation(pairs, np.outer(other, other).reshape(-1)) > 2 * LIMIT


def test_xtc_is_applied_as_often_as_asked():
    sampler = make_sampler(seed=0, temp=1.0, xtc_probability=0.3, xtc_threshold=0.15)
    always = expected(1.0, FILTERS["xtc"][1])
    never = expected(1.0, FILTERS["none"][1])
    counts = np.bincount(choose(sampler, DRAWS), minlength=VOCAB)
    assert deviation(counts, 0.3 * always + 0.7 * never) < LIMIT < deviation(counts, never)


@pytest.mark.parametrize("seed", [0, 7, -1])
def test_each_position_is_drawn_with_its_own_noise(seed: int):
    model = make_model()
    prompt = make_prompt(5)
    sampler = make_sampler(seed=seed, temp=1.3)
    together = sampler.draw(mx.array(len(prompt)), 20, model.args.vocab_size)
    for index, step in enumerate(run(model, prompt, max_tokens=20, temp=1.3, seed=seed)):
        alone = sampler.draw(mx.array(len(prompt) + index), 1, model.args.vocab_size)
        assert mx.array_equal(alone.gumbel[0], together.gumbel[index])
        assert sampler.choose(step.logprobs[None], alone, mx.array([0])).tolist() == [step.token]
    assert len({tuple(noise) for noise in together.gumbel.tolist()}) == 20


@pytest.mark.parametrize("name", RECURRENT)
def test_drafted_tokens_have_the_models_distribution(name: str) -> None:
    """Each token's place among its model's probabilities is uniform."""
    model = make_family(name)
    prompt = make_prompt(9)
    how: dict[str, Any] = {"temp": 1.3, "seed": 7}
    _, drafter = with_plain(model, prompt, 200, "mixed", width=2, **how)
    steps = run(model, prompt, drafter, max_tokens=200, plan=(2, 3), **how)
    stats = steps[-1].stats
    assert stats.drafted > 2 * stats.accepted > stats.rounds
    assert not stats.replayed
    tokens = np.array(ids(steps))
    logits = model(mx.array([prompt + ids(steps)]))[0, len(prompt) - 1 : -1]

    def measure_deviation(temp: float) -> float:
        chances = np.array(mx.softmax(logits / temp, axis=-1))
        own = chances[np.arange(len(tokens)), tokens]
        likelier = np.where(chances > own[:, None], chances, 0).sum(axis=1)
        places = likelier + own * np.random.default_rng(0).random(len(tokens))
        return deviation(np.histogram(places, 10, (0, 1))[0], np.full(10, 0.1))

    assert measure_deviation(1.3) < LIMIT
    # Negative control: the distribution of another temperature.
    assert measure_deviation(0.65) > 1.5 * LIMIT
