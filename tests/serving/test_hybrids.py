"""Texts of models with recurrent layers, drafted around other requests, stops and failures."""

import functools

import mlx.nn as nn
import pytest

from helpers.families import make_family
from helpers.grids import pairs
from helpers.toys import (
    Broken,
    Scripted,
    fail_at,
    ids,
    make_follower,
    make_prompt,
    make_tokenizer,
    record_hidden_states,
    run,
    with_plain,
)
from helpers.workers import ask, assert_plain, count, count_tokens, running
from mlx_redrafter import Session

HYBRIDS = ("qwen3_next", "mamba2", "falcon_h1", "lfm2")
PROMPTS = [make_prompt(length) for length in (9, 5)]
SAMPLED = {"temp": 0.9, "seed": 7}
PLANS = {"chain": (1, 4), "tree": (3, 3)}
COUNT = 24

pytestmark = pytest.mark.filterwarnings("ignore:the drafter has guessed no token right")

make_hybrid = functools.cache(make_family)


def follow_texts(model: nn.Module, **options) -> Scripted:
    """A drafter that knows the texts after all prompts."""
    tokens = []
    with record_hidden_states(model) as recorded:
        for prompt in PROMPTS:
            tokens += prompt + ids(run(model, prompt, max_tokens=COUNT + 8, **options))
    return make_follower(model, tokens, recorded, "mixed", 3)


@pytest.mark.parametrize(("name", "plan", "sampling"), pairs(HYBRIDS, PLANS, ({}, SAMPLED)))
def test_requests_in_joint_rounds_match_plain_decoding(name, plan, sampling):
    model = make_hybrid(name)
    drafter = follow_texts(model, **sampling)
    requests = [ask(prompt, COUNT, **sampling) for prompt in PROMPTS]
    with running(model, drafter, options={"plan": PLANS[plan]}) as worker:
        assert_plain(worker, model, *requests)
        assert count(worker, "round_requests") > count(worker, "rounds")
        rejected = count_tokens(worker, "drafted") - count_tokens(worker, "accepted")
        assert rejected > count_tokens(worker, "accepted") > 8


@pytest.mark.parametrize(("name", "plan", "sampling"), pairs(HYBRIDS, PLANS, ({}, SAMPLED)))
def test_a_turn_after_a_stop_within_a_round_matches_plain_decoding(name, plan, sampling):
    model = make_hybrid(name)
    tokenizer = make_tokenizer(vocab=64)
    prompt = PROMPTS[0]
    plain, drafter = with_plain(model, prompt, COUNT, "right", width=3, **sampling)
    text = tokenizer.decode(prompt)
    for end in range(2, 8):  # rounds have 4 or 5 tokens
        stop = tokenizer.decode(ids(plain[:end]))
        turns = []
        for shape in (PLANS[plan], "off"):
            session = Session(model, tokenizer, drafter, max_tokens=9, plan=shape, **sampling)
            turns.append([session.send(text, stop=stop).tokens, session.send("abc").tokens])
        assert turns[0] == turns[1]
        assert turns[0][0] == ids(plain[:end])


@pytest.mark.parametrize(("name", "plan", "calls"), pairs(HYBRIDS, PLANS, (9, 13)))
def test_a_failing_drafter_does_not_change_the_text(name, plan, calls):
    model = make_hybrid(name)
    width, _ = PLANS[plan]
    plain, drafter = with_plain(model, PROMPTS[0], COUNT, "mixed", width=width)
    errors = []
    how = {"max_tokens": COUNT, "plan": PLANS[plan], "context": True}
    steps = run(model, PROMPTS[0], fail_at(drafter, calls), on_drafter_failure=errors.append, **how)
    assert ids(steps) == ids(plain)
    assert [type(error) for error in errors] == [Broken]
    assert steps[-1].stats.drafted > steps[-1].stats.accepted > 0
