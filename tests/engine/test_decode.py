"""The decoding loop: whole rounds, plans that change every round, and failing drafters."""

from __future__ import annotations

from itertools import pairwise, product
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.sample_utils import make_logits_processors

from helpers.families import make_family
from helpers.toys import (
    Broken,
    assert_same_cache,
    decode_steps,
    fail_at,
    ids,
    make_model,
    make_prompt,
    run,
    with_plain,
)
from mlx_redrafter.decoding.options import Options
from mlx_redrafter.engine.decode import CLEAR_EVERY, Decoder
from mlx_redrafter.engine.plan import Plan, chain_plan
from mlx_redrafter.engine.planner import ObservedRound, Planner
from mlx_redrafter.engine.round import TokenChooser
from mlx_redrafter.engine.sampling import Sampler, make_sampler
from mlx_redrafter.engine.source import Forecast
from mlx_redrafter.target.target import Target

PROMPT = make_prompt(9)
COUNT = 40
TREES = [None, chain_plan(4), Plan(3, 3, 10), Plan(3, 3, 6), None, Plan(2, 2, 4)]
CHAINS = [None, chain_plan(3), None, None, chain_plan(1), chain_plan(4)]
SAMPLED = {"temp": 0.9, "top_p": 0.9, "seed": 4}


class Changing(Planner):
    """Cycles through plans and records what it observes."""

    def __init__(self, plans: list[Plan | None]) -> None:
        super().__init__(None)
        self._plans = plans
        self.chosen: list[Plan | None] = []
        self.observed: list[ObservedRound] = []

    def next_plan(
        self, length: int, replayed: int = 0, forecast: Forecast | None = None
    ) -> Plan | None:
        self.chosen.append(self._plans[len(self.chosen) % len(self._plans)])
        return self.chosen[-1]

    def observe(self, observed: ObservedRound) -> None:
        self.observed.append(observed)


@pytest.mark.parametrize("options", [{}, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("name", ["llama", "mamba"])
def test_whole_rounds_flatten_to_plain_decoding(name: str, options: dict[str, Any]) -> None:
    """For any plans; the planner observes each round's tokens and replays."""
    if name == "llama":
        model = make_model()
        planner = Changing(TREES)
        plain, drafter = with_plain(
            model, PROMPT, COUNT, "mixed", width=3, script_seed=1, **options
        )
    else:
        model = make_family(name)
        planner = Changing(CHAINS)
        plain, drafter = with_plain(model, PROMPT, COUNT, "mixed", width=1, **options)
    sampler = make_sampler(**options) if options else Sampler()
    rounds = []
    tokens = []
    source = drafter.open(model)
    target = Target(model, capture=source.capture)
    how = (TokenChooser(sampler), planner, [source])
    steps = Decoder(mx.array(PROMPT), target, *how, prefill_step_size=3)
    while len(tokens) < COUNT:
        rounds.append(next(steps))
        tokens += rounds[-1].tokens
    steps.close()
    assert tokens[:COUNT] == ids(plain)
    assert [(each.tokens, each.is_prompt) for each in rounds[:3]] == [([], True)] * 3
    assert rounds[3].is_prompt
    assert len(rounds[3].tokens) == 1
    assert [each.plan for each in planner.observed] == planner.chosen[: len(planner.observed)]
    length = len(PROMPT)
    for (before, each), observed in zip(pairwise(rounds[3:]), planner.observed, strict=True):
        assert not each.is_prompt
        assert observed.n_tokens == len(each.tokens)
        assert observed.length == length
        assert observed.replayed == each.replayed
        assert observed.verified is (each.tree is not None)
        assert each.plan == (observed.plan if observed.verified else None)
        assert observed.milliseconds is None or observed.milliseconds > 0
        assert len(each.tokens) == len(each.logprobs) == len(each.path)
        for token, logprobs in zip(each.tokens, each.logprobs, strict=True):
            assert options or token == mx.argmax(logprobs).item()
        if each.tree is not None:
            drafted = [each.tree.tokens[node].item() for node in each.path]
            assert drafted == [before.tokens[-1], *each.tokens[:-1]]
        length += observed.n_tokens
    assert max(len(each.tokens) for each in rounds) > 1
    assert any(each.replayed for each in rounds) is (name == "mamba")


@pytest.mark.parametrize(
    ("name", "plan", "options"),
    [
        ("qwen2", (3, 3), {}),
        ("qwen2", (1, 4), SAMPLED),
        ("qwen2", (3, 3), {"logits_processors": make_logits_processors(repetition_penalty=1.3)}),
        ("qwen2", (1, 4), {"kv_bits": 8, "kv_group_size": 32, "quantized_kv_start": 12}),
        ("qwen3_5", (3, 2), {}),
        ("gemma3_text", (3, 3), {}),
        ("mamba", (1, 4), {}),
    ],
    ids=["tree", "sampled", "processors", "quantized", "states", "rings", "mamba"],
)
def test_decoding_continues_after_a_drafter_fails(
    name: str, plan: tuple[int, int], options: dict[str, Any]
) -> None:
    model = make_family(name)
    count = 20
    plain, drafter = with_plain(model, PROMPT, count, "mixed", width=plan[0], **options)
    expected = make_prompt_cache(model)
    run(model, PROMPT, max_tokens=count, prompt_cache=expected, **options)
    for calls, context in product((0, 1, 5, 9), (False, True)):
        errors: list[Exception] = []
        fail_at(drafter, calls)
        cache = make_prompt_cache(model)
        more = {"on_drafter_failure": errors.append, "plan": plan, "context": context} | options
        steps = run(model, PROMPT, drafter, max_tokens=count, prompt_cache=cache, **more)
        assert ids(steps) == ids(plain), calls
        assert_same_cache(cache, expected, tolerance=2e-3)
        assert [str(error) for error in errors] == [f"call {calls}"], "reported once"
        last = steps[-1].stats
        assert 1 + last.rounds + last.accepted == count
    fail_at(drafter, 3)
    with pytest.raises(Broken):
        run(model, PROMPT, drafter, max_tokens=count, plan=plan, **options)


@pytest.mark.parametrize("name", ["llama", "mamba2"])
def test_without_running_ahead_the_cache_ends_early(name: str) -> None:
    model = make_model() if name == "llama" else make_family(name)
    target = Target(model)
    chooser = TokenChooser(Sampler())
    # Not asked after the prompt, whose next token is already there.
    asked = iter([True] * 3 + [False] * 3)
    how = (target, chooser, Planner(None))
    rounds = Decoder(mx.array(PROMPT), *how, may_run_ahead=lambda: next(asked))
    tokens = []
    for count in range(1, 8):
        tokens += next(iter(each.tokens for each in rounds if each.tokens))
        assert target.length == len(PROMPT) + count - (count not in (2, 3, 4))
    assert tokens == ids(run(model, PROMPT, max_tokens=7))


@pytest.mark.parametrize("depth", [0, 15])
def test_freed_buffers_are_released_as_often_as_in_plain_decoding(
    depth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_model()
    count = 800
    plain, drafter = with_plain(model, PROMPT, count, "right", width=1)
    made = list[int]()
    releases = [0]
    monkeypatch.setattr(mx, "clear_cache", lambda: releases.append(len(made)))
    options = Options(context=False, max_tokens=count, plan=(1, depth) if depth else "off")
    for step in decode_steps(PROMPT, model, drafter if depth else None, options):
        made.append(step.token)
    assert made == ids(plain)
    assert round(step.stats.tokens_per_round) == depth + 1
    assert max(after - before for before, after in pairwise([*releases, count])) <= CLEAR_EVERY + 16
