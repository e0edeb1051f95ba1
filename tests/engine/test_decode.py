"""The loop: whole rounds, plans that change from round to round, and drafters that fail."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from families import follow_plain, make_family
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.sample_utils import make_logits_processors
from toys import (
    BEAMS,
    Scripted,
    assert_same_cache,
    ids,
    make_model,
    make_prompt,
    run,
    with_plain,
)

from mlx_redrafter.drafters.context import Forecast
from mlx_redrafter.engine.decode import Planner, Round, decode
from mlx_redrafter.engine.plan import Plan, chain_plan
from mlx_redrafter.engine.round import Chooser
from mlx_redrafter.engine.sampling import Sampler, make_sampler
from mlx_redrafter.engine.target import Target

PROMPT = make_prompt(9)
COUNT = 20
PLANS = {"plain": None, "chain": chain_plan(4), "tree": Plan(3, 3, 10), "pruned tree": Plan(3, 3, 6)}
OPTIONS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": {"temp": 0.9, "top_p": 0.9, "seed": 4},
    "processors": {"logits_processors": make_logits_processors(repetition_penalty=1.3)},
    "8 bits": {"kv_bits": 8, "kv_group_size": 32, "quantized_kv_start": 12},
}


def take(
    model: nn.Module, drafter: Any, planner: Planner, count: int, sampler: Any = None, **more: Any
) -> tuple[list[Round], list[int]]:
    """(rounds until there are `count` tokens, their tokens)."""
    rounds, tokens = [], []
    with_rounds = decode(Target(model), drafter, Chooser(sampler or Sampler()), planner, mx.array(PROMPT), **more)
    for each in with_rounds:
        rounds.append(each)
        tokens += each.tokens
        if len(tokens) >= count:
            break
    with_rounds.close()
    return rounds, tokens


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("options", [{}, OPTIONS["sampled"]], ids=["greedy", "sampled"])
def test_whole_rounds_flatten_to_plain_decoding(options: dict[str, Any], plan: str) -> None:
    model = make_model()
    plain, drafter = with_plain(model, PROMPT, COUNT, "mixed", width=3, luck=1, **options)
    sampler = make_sampler(**options) if options else None
    rounds, tokens = take(model, drafter, Planner(PLANS[plan]), COUNT, sampler, prefill_step_size=3)
    assert tokens[:COUNT] == ids(plain)
    assert [(r.tokens, r.is_prompt) for r in rounds[:3]] == [([], True)] * 3
    assert rounds[3].is_prompt and len(rounds[3].tokens) == 1
    for before, each in pairwise(rounds[3:]):
        assert not each.is_prompt and each.plan == PLANS[plan]
        assert len(each.tokens) == len(each.logprobs) == len(each.path)
        for token, logprobs in zip(each.tokens, each.logprobs, strict=True):
            assert options or token == mx.argmax(logprobs).item()
        if each.tree is not None:
            drafted = [each.tree.tokens[node].item() for node in each.path]
            assert drafted == [before.tokens[-1], *each.tokens[:-1]]
    assert max(len(each.tokens) for each in rounds) > 1 or plan == "plain"


class Changing(Planner):
    """Takes one plan after the other, over and over, and records what it observes."""

    def __init__(self, plans: list[Plan | None]) -> None:
        super().__init__(None)
        self._plans = plans
        self.chosen: list[Plan | None] = []
        self.observed: list[tuple[Any, ...]] = []

    def next_plan(self, length: int, replayed: int = 0, forecast: Forecast | None = None) -> Plan | None:
        """The next one."""
        self.chosen.append(self._plans[len(self.chosen) % len(self._plans)])
        return self.chosen[-1]

    def observe(self, *args: Any, verified: bool = True, from_context: bool = False) -> None:
        """Records it."""
        self.observed.append((*args, verified))


@pytest.mark.parametrize("name", ["llama", "mamba"])
def test_plans_may_change_every_round(name: str) -> None:
    chains = [None, chain_plan(3), None, None, chain_plan(1), chain_plan(4)]
    if name == "llama":
        model, planner = make_model(), Changing([*PLANS.values(), None, Plan(2, 2, 4)])
        plain, drafter = with_plain(model, PROMPT, 40, "mixed", width=3, luck=1)
    else:
        model, planner = make_family(name), Changing(chains)
        plain, drafter = follow_plain(model, PROMPT, 40, "mixed", width=1)
    rounds, tokens = take(model, drafter, planner, 40)
    assert tokens[:40] == ids(plain)
    generated = [each for each in rounds if not each.is_prompt]
    assert [plan for plan, *_ in planner.observed] == planner.chosen[: len(planner.observed)]
    assert len(planner.observed) == len(generated)
    length = len(PROMPT)
    for each, (plan, count, before, replayed, milliseconds, verified) in zip(generated, planner.observed, strict=True):
        assert (count, before, replayed) == (len(each.tokens), length, each.replayed)
        assert verified is (each.tree is not None) and each.plan == (plan if verified else None)
        assert milliseconds is None or milliseconds > 0
        length += count
    if name == "llama":
        assert not any(each.replayed for each in generated)
        assert all(verified is (plan is not None) for plan, *_, verified in planner.observed)
    else:
        assert any(each.replayed for each in generated)


class Broken(Exception):
    """What a drafter fails with."""


def fail_at(drafter: Scripted, calls: int, patch: pytest.MonkeyPatch) -> None:
    """Makes a drafter raise from this call on."""
    left, real = iter(range(calls)), type(drafter).logits

    def logits(hidden: mx.array, state: mx.array, left: Iterator[int] = left) -> mx.array:
        if next(left, None) is None:
            raise Broken(f"call {calls}")
        return real(drafter, hidden, state)

    patch.setattr(drafter, "logits", logits)


@pytest.mark.parametrize("beam", ["chain", "tree"])
@pytest.mark.parametrize("choice", OPTIONS)
def test_decoding_goes_on_where_a_drafter_fails(choice: str, beam: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, options = make_model(), OPTIONS[choice]
    plain, drafter = with_plain(model, PROMPT, COUNT, "mixed", width=BEAMS[beam]["beam_width"], luck=1, **options)
    expected = make_prompt_cache(model)
    run(model, PROMPT, max_tokens=COUNT, prompt_cache=expected, **options)
    for calls in (0, 1, 5, 9, 14):
        errors: list[Exception] = []
        fail_at(drafter, calls, monkeypatch)
        cache = make_prompt_cache(model)
        more = {"prompt_cache": cache, "on_drafter_failure": errors.append} | BEAMS[beam] | options
        steps = run(model, PROMPT, drafter, max_tokens=COUNT, **more)
        assert ids(steps) == ids(plain), calls
        assert_same_cache(cache, expected)
        assert [str(error) for error in errors] == [f"call {calls}"], "once, and then never again"
        last = steps[-1].stats
        assert 1 + last.rounds + last.accepted == COUNT
    with pytest.raises(Broken):
        fail_at(drafter, 3, monkeypatch)
        run(model, PROMPT, drafter, max_tokens=COUNT, **BEAMS[beam], **options)


@pytest.mark.parametrize("name", ["qwen3_5", "gemma3_text", "mamba"])
def test_states_and_rings_survive_a_failing_drafter(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model: nn.Module = make_family(name)
    plain, drafter = follow_plain(model, PROMPT, COUNT, "mixed", width=1)
    for calls in (0, 1, 9):
        errors: list[Exception] = []
        fail_at(drafter, calls, monkeypatch)
        steps = run(model, PROMPT, drafter, max_tokens=COUNT, on_drafter_failure=errors.append, plan=(1, 4))
        assert ids(steps) == ids(plain) and len(errors) == 1


@pytest.mark.parametrize("name", ["llama", "mamba2"])
def test_without_running_ahead_the_cache_ends_early(name: str) -> None:
    model = make_model() if name == "llama" else make_family(name)
    target = Target(model)
    asked = iter([True] * 4 + [False] * 3)
    rounds = decode(
        target, None, Chooser(Sampler()), Planner(None), mx.array(PROMPT), may_run_ahead=lambda: next(asked)
    )
    tokens = []
    for count in range(1, 8):
        tokens += next(iter(each.tokens for each in rounds if each.tokens))
        assert target.length == len(PROMPT) + count - (count > 4)
    assert tokens == ids(run(model, PROMPT, max_tokens=7))
