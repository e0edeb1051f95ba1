"""Drafting from the context: which match is proposed, its estimated acceptance, and lossless
decoding.
"""

import random
from collections.abc import Sequence
from functools import partial
from itertools import pairwise

import mlx.core as mx
import pytest
from mlx_lm.models.cache import make_prompt_cache

from helpers.families import make_family
from helpers.grids import pairs
from helpers.toys import (
    ScriptedContext,
    assert_same_cache,
    assert_same_steps,
    decode_steps,
    ids,
    make_model,
    make_prompt,
    run,
    with_plain,
)
from mlx_redrafter.decoding import recipe
from mlx_redrafter.decoding.options import Options
from mlx_redrafter.drafters import context
from mlx_redrafter.drafters.context import MAX_MATCH, MAX_PROPOSAL, ContextSource
from mlx_redrafter.engine.plan import CONTEXT_ONLY
from mlx_redrafter.errors import UnsupportedModelError


def index(prompt: list[int], decoded: list[int] | None = None) -> ContextSource:
    made = ContextSource()
    made.read(prompt)
    made.confirm(decoded or [])
    return made


def propose(made: ContextSource) -> tuple[list[int], list[float]] | None:
    """Returns (proposed tokens, their cumulative acceptance), or None without a proposal."""
    forecast = made.forecast(0)
    if forecast is None:
        return None
    assert forecast.chance == 1
    plan = CONTEXT_ONLY._replace(n_context=len(forecast.cumulative_acceptance))
    tree = made.propose(mx.array(7), plan, None, in_level_order=False)
    tokens = tree.tokens.tolist()
    assert tokens[0] == 7
    return tokens[1:], forecast.cumulative_acceptance


def first_rate(prompt: list[int], decoded: list[int]) -> float:
    """Estimated acceptance of the first proposed token."""
    proposal = propose(index(prompt, decoded))
    return proposal[1][0]


def longest_earlier_match(tokens: list[int]) -> int:
    """Brute force: how many of the last tokens also occur earlier, overlaps included."""
    best = 0
    for end in range(len(tokens) - 1):
        match = 0
        while match <= end and tokens[end - match] == tokens[-1 - match]:
            match += 1
        best = max(best, match)
    return best


@pytest.mark.parametrize(
    ("text", "proposed"),
    [
        ([1, 2, 3, 4, 5, 6, 7, 8, 1, 2, 3, 4], [5, 6, 7, 8, 1, 2, 3, 4]),
        ([1, 2, 3, 4, 5, 6, 9, 1, 2], [3, 4, 5, 6]),  # at most twice the match
        ([1, 2, 3, 4, 2], [3, 4]),  # one matching token suffices
        (
            [1, 2, 3, 4, 50, 60, 9, 3, 4, 70, 80, 9, 1, 2, 3, 4],
            [50, 60, 9, 3, 4, 70, 80, 9],
        ),  # the longest match wins
        ([1, 2, 30, 8, 1, 2, 40, 7, 1, 2], [40, 7, 1, 2]),  # ties go to the latest match
        ([5, 1, 2, 3] + [1, 2, 3] * 4, [1, 2, 3] * 5),  # loops continue past their end
        ([7] * 40, [7] * MAX_PROPOSAL),
        ([1, 2, 3, 4, 5, 6], None),
        ([7], None),
        ([], None),
    ],
)
def test_proposes_what_followed_the_same_tokens(text, proposed):
    for made in (index(text), index([], text)):  # as prompt, or as decoded tokens
        proposal = propose(made)
        assert (proposal and proposal[0]) == proposed


@pytest.mark.parametrize("seed", range(10))
def test_proposals_continue_actual_matches(seed):
    generator = random.Random(seed)
    text = [generator.randrange(4) for _ in range(150)]
    made = ContextSource()
    cut = generator.randrange(100)
    for start in range(0, cut, 37):
        made.read(text[start : min(cut, start + 37)])
    whole = propose(index(text[:cut]))
    assert propose(made) == whole, "chunked reads give the same proposal"
    for length in range(cut, len(text)):
        made.confirm([text[length]])
        so_far = text[: length + 1]
        proposal = propose(made)
        match = made._matches.match
        assert match <= min(longest_earlier_match(so_far), MAX_MATCH)
        assert (proposal is None) is (match < 1)
        if proposal is not None:
            assert len(proposal[0]) == len(proposal[1]) == min(2 * match, MAX_PROPOSAL)
            assert all(1 > one >= other > 0 for one, other in pairwise(proposal[1]))


def test_rates_are_learned_from_decoded_tokens():
    copied = [0, 1] + [2, 3, 4, 5] * 20
    misled = [token for i in range(200) for token in (1, 2, 10 + i)] + [1, 2]
    assert first_rate([], copied) > 0.9
    assert first_rate([], misled) < 0.1
    # Prompts do not change the rates.
    assert first_rate(misled, []) == pytest.approx(context.PRIOR_RATES[1])
    made = index([1, 2, 3, 4, 5, 6, 7, 8, 9, 1, 2])
    forecast = made.forecast(2)
    proposal = propose(made)
    assert forecast.chance == pytest.approx(proposal[1][1])
    assert len(forecast.cumulative_acceptance) == 8
    assert index([1, 2, 3]).forecast(1) is None


def test_memory_is_bounded(monkeypatch):
    generator = random.Random(3)
    tokens = [generator.randrange(100_000) for _ in range(20_000)]
    monkeypatch.setattr(context, "MAX_TOKENS", 1000)
    made = index(tokens)
    for token in tokens[:3000]:
        made.confirm([token])
        assert len(made) <= 1000
    made.confirm([1, 2, 3, 4, 5, 6, 1, 2, 3, 4])
    proposal = propose(made)
    assert proposal[0][:2] == [5, 6]


# Decoding with an index.

PLANS = {
    "context alone": {"plan": (1, 1)},
    "with a chain": {"plan": (1, 3)},
    "with a tree": {"plan": (3, 3)},
    "with a pruned tree": {"plan": (3, 4, 9)},
}
SAMPLED = {"temp": 0.9, "top_p": 0.95, "seed": 5}


@pytest.fixture
def use_index(monkeypatch):
    """Replaces the ContextSource that decoding uses."""
    return lambda make: monkeypatch.setattr(recipe, "ContextSource", make)


@pytest.mark.parametrize(("plan", "right", "options"), pairs(PLANS, (0.0, 0.7, 1.0), ({}, SAMPLED)))
def test_text_matches_plain_decoding(plan, right, options, use_index):
    model = make_model()
    prompt = make_prompt(9)
    plain, drafter = with_plain(model, prompt, 60, "mixed", width=PLANS[plan]["plan"][0], **options)
    text = [*prompt, *ids(run(model, prompt, max_tokens=80, **options))]
    use_index(partial(ScriptedContext, text, right))
    alone = plan == "context alone"
    steps = run(
        model,
        prompt,
        None if alone else drafter,
        max_tokens=60,
        context=True,
        **PLANS[plan],
        **options,
    )
    assert_same_steps(steps, plain)
    stats = steps[-1].stats
    sources = [step.draft_source for step in steps]
    assert 1 + stats.rounds + stats.accepted == 60
    assert sources.count("context") == stats.context_accepted > (20 if right == 1 else -1)
    assert sources.count("drafter") == stats.accepted - stats.context_accepted
    assert (stats.context_accepted == 0) is (right == 0)
    assert stats.context_drafted > 20
    assert ("drafter" in sources) is not alone


def test_a_processor_sees_its_own_path(use_index):
    model = make_model()
    prompt = make_prompt(9)
    options = {"logits_processors": [lambda history, logits: logits + 3.0 * (history[-1] % 2)]}
    plain = run(model, prompt, max_tokens=60, **options)
    use_index(partial(ScriptedContext, [*prompt, *ids(plain)], 0.8))
    steps = run(model, prompt, max_tokens=50, context=True, plan=(1, 1), **options)
    assert_same_steps(steps, plain[:50])
    assert steps[-1].stats.context_accepted > 10


@pytest.mark.parametrize("taken", [1, 6, 8, 20])
def test_closing_early_leaves_the_cache_exact(taken, use_index):
    model = make_model()
    prompt = make_prompt(9)
    plain = run(model, prompt, max_tokens=60)
    use_index(partial(ScriptedContext, [*prompt, *ids(plain)], 0.9))
    cache = make_prompt_cache(model)
    other = make_prompt_cache(model)
    steps = decode_steps(
        prompt, model, None, Options(prompt_cache=cache, context=True, plan=(1, 1))
    )
    assert [next(steps).token for _ in range(taken)] == ids(plain[:taken])
    steps.close()
    run(model, [*prompt, *ids(plain[:taken])], max_tokens=0, prompt_cache=other)
    assert_same_cache(cache, other)


def test_a_continued_cache_is_drafted_from_its_history(use_index):
    model = make_model()
    cache = make_prompt_cache(make_model())
    read = []

    class Recorder(ContextSource):
        def read(self, tokens: Sequence[int]):
            read.extend(tokens)
            super().read(tokens)

    history = make_prompt(30) * 2
    run(model, history, max_tokens=0, prompt_cache=cache)
    plain = run(model, [*history, 3, 4], max_tokens=40)
    use_index(Recorder)
    given = {
        "prompt_cache": cache,
        "history": history,
        "context": True,
        "plan": (1, 1),
    }
    assert ids(run(model, [3, 4], max_tokens=40, **given)) == ids(plain)
    assert read == [*history, 3, 4]


def test_context_is_on_by_default():
    model = make_model()
    prompt = make_prompt(9)

    def drafted(**options):
        return list(decode_steps(prompt, model, None, Options(max_tokens=120, **options)))[
            -1
        ].stats.context_drafted

    assert drafted() > 0, "this greedy text repeats itself"
    assert drafted(plan=(1, 3)) > 0, "a plan sets the drafter's part only, and there is no drafter"
    assert drafted(context=False) == drafted(plan="off") == 0


def test_a_model_that_cannot_verify_decodes_plainly():
    model = make_family("phi3small")
    assert run(model, [1, 2, 3], max_tokens=8, context=None)[-1].stats.drafted == 0
    with pytest.raises(UnsupportedModelError, match="phi3small"):
        run(model, [1, 2, 3], max_tokens=8, context=True)
