"""Contestants take turns on the same prompts, on one clock, and a token that differs is told."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.models.cache import RotatingKVCache
from mlx_lm.models.switch_layers import SwitchLinear

from benchmarks import contest, opponents
from benchmarks.contest import (
    DRAFTED,
    MLX_LM,
    MLX_LM_DRAFT,
    PLAIN,
    RANDOM,
    Contestant,
    Run,
    RunOptions,
    contestants,
    hold,
    ignorant,
    label,
    spread,
    told,
)
from benchmarks.costing import costs_record
from benchmarks.prompts import Prompt
from benchmarks.record import problem
from benchmarks.subject import Subject, bytes_per_forward, n_bytes
from mlx_redrafter.engine.plan import Plan
from mlx_redrafter.engine.stats import Stats
from mlx_redrafter.errors import RedrafterError
from mlx_redrafter.planning.costs import CostTable, parse_costs
from mlx_redrafter.planning.planner import UNKNOWN_ACCEPTANCE, AutoPlanner
from tests.small import small_drafter, small_llama

CHEAP = CostTable((64,), (1, 2, 3), ((1.0, 1.01, 1.02),), (1.0,), (1,), (0.01,), (0.0, 0.0))
"""Drafting costs next to nothing."""

PROMPTS = [Prompt("code/one", "code", [1, 2, 3]), Prompt("chat/two", "chat", [4, 5, 6, 7])]


def subject(*, drafter: bool = True, draft_model: nn.Module | None = None, model: nn.Module | None = None) -> Subject:
    return Subject(
        name="small",
        model=small_llama() if model is None else model,
        drafter=small_drafter() if drafter else None,
        drafter_name="random" if drafter else None,
        draft_model=draft_model,
        draft_model_name=None if draft_model is None else "itself",
        prompts=PROMPTS,
    )


def records(found: Subject, options: RunOptions, plans: Any = ((1, 2), (2, 2)), **more: Any) -> list[dict[str, Any]]:
    held = hold(found, contestants(found, plans, options, **more), options)
    return [record for each in held for record in each]


class Clock:
    """Time that passes only when it is told to."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.now, self.turns = 0.0, []
        patch.setattr(contest, "perf_counter", lambda: self.now)

    def side(self, kind: str, plan: Any, paces: list[float], tokens: tuple[int, ...] = (1, 2, 3)) -> Contestant:
        """Somebody whose n-th run takes `paces[n]` seconds a token; the first one is the warm-up's."""
        left = iter(paces)

        def steps(prompt: list[int], max_tokens: int) -> Iterator[Any]:
            self.turns.append(label(kind, plan))
            pace = next(left)
            self.now += 100.0  # reading the prompt
            for token in tokens:
                yield (token,)
                self.now += pace

        return Contestant(kind, plan, steps)


def test_contestants_alternate_and_each_turn_begins_with_another(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    sides = [clock.side(kind, None, [1.0] * 9) for kind in (PLAIN, MLX_LM, MLX_LM_DRAFT)]
    list(hold(replace(subject(), prompts=PROMPTS[:1]), sides, RunOptions(max_tokens=3, repeats=4)))
    one, two, three = PLAIN, MLX_LM, MLX_LM_DRAFT
    turns = [clock.turns[i : i + 3] for i in range(0, len(clock.turns), 3)]
    assert turns == [[one, two, three], [one, two, three], [two, three, one], [three, one, two], [one, two, three]]


@pytest.mark.parametrize("repeats", [1, 2])
def test_a_prompt_goes_on_with_the_contestant_whose_turn_it_is_to_begin(
    monkeypatch: pytest.MonkeyPatch, repeats: int
) -> None:
    clock = Clock(monkeypatch)
    kinds = [PLAIN, MLX_LM, MLX_LM_DRAFT]
    sides = [clock.side(kind, None, [1.0] * 9) for kind in kinds]
    list(hold(replace(subject(), prompts=PROMPTS * 2), sides, RunOptions(max_tokens=3, repeats=repeats)))
    first = clock.turns[len(kinds) :: len(kinds)]
    assert first == [kinds[turn % 3] for turn in range(4 * repeats)]


def test_the_first_tokens_tell_what_reading_takes_and_a_contest_of_the_warm_has_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = Clock(monkeypatch)
    found, side = replace(subject(), prompts=PROMPTS[:1]), clock.side(PLAIN, "off", [2.0, 1.0])
    assert contest.warmed(found, side)[:3] == ([1, 2, 3], 100.0, 6.0)
    ((record,),) = hold(found, [side], RunOptions(max_tokens=3, repeats=1), warm=True)
    assert record["seconds"] == [3.0] and len(clock.turns) == 2


def test_auto_is_warm_only_when_it_has_drafted(monkeypatch: pytest.MonkeyPatch) -> None:
    planner = partial(AutoPlanner, CHEAP, UNKNOWN_ACCEPTANCE, [Plan(1, 2, 3)])
    monkeypatch.setattr("mlx_redrafter.generate.make_planner", lambda *models, **more: planner())
    found, runs, run = subject(), [], Contestant.run

    def heard(side: Contestant, *rest: Any) -> contest.Run:
        runs.append(run(side, *rest))
        return runs[-1]

    monkeypatch.setattr(Contestant, "run", heard)
    options = RunOptions(max_tokens=2, repeats=1)
    next(hold(found, contestants(found, ["auto"], options, mlx_lm=False), options))
    warm = runs[1]
    assert warm.stats is not None and warm.stats.drafted > 0


def test_a_ratio_is_of_the_same_turn_and_leaves_the_prompt_out(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    # The machine slows down tenfold from turn to turn: of the same turn it is always twice as fast.
    plain = clock.side(PLAIN, "off", [1.0, 1.0, 10.0, 100.0])
    drafted = clock.side(DRAFTED, [1, 2, 3], [1.0, 0.5, 5.0, 50.0])
    one = replace(subject(), prompts=PROMPTS[:1])
    ((first, second),) = hold(one, [plain, drafted], RunOptions(max_tokens=3, repeats=3))
    assert first["seconds"] == [3.0, 30.0, 300.0] and second["seconds"] == [1.5, 15.0, 150.0]
    assert second["ratio"] == 2.0 and second["ratio_quartiles"] == [2.0, 2.0] and first["ratio"] == 1.0
    assert second["tokens_per_second"] == 2 / 15.0
    assert second["tokens_per_second_quartiles"] == [2 / 150.0, 2 / 1.5]
    assert second["bandwidth_gb_s"] == pytest.approx(bytes_per_forward(one.model) * 2 / 15.0 / 1e9)  # type: ignore[operator]


@pytest.mark.parametrize("order", [(0, 1, 2), (1, 2, 0), (2, 0, 1)])
def test_what_is_said_of_rounds_is_of_the_turn_in_the_middle(order: tuple[int, ...]) -> None:
    runs = [
        Run([1, 2, 3, 4, 5], 9.0, 1.0, Stats().add_round(3, 3, 3), 1),
        Run([1, 2, 3, 4, 5], 9.0, 2.0, Stats().add_round(3, 1, 3).add_round(3, 1, 3), 1),
        Run([1, 2, 3, 4, 5], 9.0, 4.0, Stats(4, plain_steps=4), 1),
    ]
    side = Contestant(DRAFTED, "auto", lambda prompt, max_tokens: iter(()))
    plain = [Run([1, 2, 3, 4, 5], 9.0, 4.0, Stats(), 1)] * 3
    found = told(side, [runs[i] for i in order], plain, 6_000_000_000, RunOptions())
    assert (found["rounds"], found["tokens_per_round"], found["plain_steps"]) == (2, 2.0, 0)
    assert found["acceptance_per_depth"] == [1.0, 0.0, 0.0]
    assert found["tokens_per_second"] == 4 / 2.0 and found["bandwidth_gb_s"] == 6 * 2 / 2.0


def test_quartiles_are_the_ends_where_there_are_few() -> None:
    assert spread([3.0, 1.0, 2.0]) == [1.0, 3.0]
    assert spread([1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0]) == [2.0, 6.0]


@pytest.mark.parametrize("turn", [0, 1, 2])
def test_a_lie_in_any_turn_is_reported(monkeypatch: pytest.MonkeyPatch, turn: int) -> None:
    clock = Clock(monkeypatch)
    texts = [(1, 2, 3)] * 4
    texts[1 + turn] = (1, 2, 9)
    said = iter(texts)

    def steps(prompt: list[int], max_tokens: int) -> Iterator[Any]:
        for token in next(said):
            yield (token,)
            clock.now += 1.0

    sides = [clock.side(PLAIN, "off", [1.0] * 4), Contestant(DRAFTED, [1, 2, 3], steps)]
    ((first, second),) = hold(replace(subject(), prompts=PROMPTS[:1]), sides, RunOptions(max_tokens=3, repeats=3))
    assert second["same_tokens"] is False and second["first_difference"] == 2
    assert first["same_tokens"] is None and first["first_difference"] is None


def test_all_that_are_held_to_plain_decoding_say_the_same_and_keep_the_schema() -> None:
    model = small_llama()
    found = subject(model=model, draft_model=model)
    made = records(found, RunOptions(max_tokens=10, repeats=1, num_draft_tokens=2))
    assert [(each["contestant"], each["prompt"]) for each in made[:5]] == [
        (PLAIN, "code/one"),
        (MLX_LM, "code/one"),
        (MLX_LM_DRAFT, "code/one"),
        (DRAFTED, "code/one"),
        (DRAFTED, "code/one"),
    ]
    assert [each["plan"] for each in made[:5]] == ["off", None, None, [1, 2, 3], [2, 2, 5]]
    assert [each["same_tokens"] for each in made] == [None, True, True, True, True] * 2
    assert {problem(each) for each in made} == {None}
    assert all(each["tokens"] == 10 and each["prompt_tokens"] in (3, 4) for each in made)


def test_mlx_lms_speculation_with_the_target_itself_keeps_all_it_drafts() -> None:
    model = small_llama()
    found = subject(model=model, draft_model=model, drafter=False)
    options = RunOptions(max_tokens=1 + 19, repeats=1, num_draft_tokens=4)
    third = records(found, options)[2]
    # 19 tokens behind the first: three rounds of 5, and one that may draft no more than the 4 that are left.
    assert third["rounds"] == 4 and third["tokens_per_round"] == pytest.approx(1 + (4 * 4) / 4)
    assert third["num_draft_tokens"] == 4 and third["acceptance_per_depth"] == [1.0] * 4


def test_mlx_lms_first_round_is_on_the_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    began = []

    def speculative(prompt: mx.array, *rest: Any, **more: Any) -> Iterator[Any]:
        began.append((prompt.tolist(), more["max_tokens"], [each.offset for each in more["prompt_cache"]]))
        yield from [(5, None, True), (6, None, False)]

    monkeypatch.setattr(opponents, "speculative_generate_step", speculative)
    model = small_llama()
    steps = opponents.draft_model_steps(subject(draft_model=model, model=model), temp=0.0, seed=0, num_draft_tokens=1)
    made = steps([1, 2, 3], 3)
    first = next(made)
    assert began == [] and first.stats == Stats(), "the first token is there before any round begins"
    assert [item.token for item in made] == [5, 6]
    assert began == [([first.token], 2, [3, 3, 3, 3])], "both caches hold the prompt and nothing else"


def test_a_cache_that_layers_share_is_refused_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(opponents, "make_prompt_cache", lambda model: [object()])
    model = small_llama()
    steps = opponents.draft_model_steps(subject(draft_model=model, model=model), temp=0.0, seed=0, num_draft_tokens=1)
    with pytest.raises(RedrafterError, match="leave out the draft model"):
        next(steps([1, 2, 3], 3))


@pytest.mark.parametrize("side", [0, 1])
def test_a_cache_that_cannot_be_trimmed_is_refused_in_one_line(side: int, monkeypatch: pytest.MonkeyPatch) -> None:
    models = [small_llama(), small_llama()]
    rings = [RotatingKVCache(max_size=2) for _ in models[side].layers]  # full behind the prompt
    make = opponents.make_prompt_cache
    monkeypatch.setattr(opponents, "make_prompt_cache", lambda model: rings if model is models[side] else make(model))
    found = subject(model=models[0], draft_model=models[1])
    steps = opponents.draft_model_steps(found, temp=0.0, seed=0, num_draft_tokens=1)
    with pytest.raises(RedrafterError, match="caches that can be trimmed: leave out the draft model"):
        next(steps([1, 2, 3], 3))


def test_rounds_of_mlx_lm_are_counted_by_the_tokens_that_it_did_not_draft() -> None:
    said = [(1, None, True), (2, None, False), (3, None, False), (4, None, True), (5, None, True)]
    stats = [item.stats for item in opponents.counted(iter(said), 2, 5)]
    assert [(each.rounds, each.accepted) for each in stats] == [(1, 1), (1, 1), (2, 1), (3, 2), (3, 3)]
    assert stats[-1].drafted == 2 + 2 + 2 and stats[-1].acceptance_per_depth == (2 / 3, 1 / 3)


def test_sampled_texts_are_ours_alone_to_compare() -> None:
    options = RunOptions(max_tokens=8, temp=0.8, seed=3, repeats=1)
    model = small_llama()
    made = records(subject(model=model, draft_model=model), options)[:5]
    assert [each["same_tokens"] for each in made] == [None, None, None, True, True]
    assert {problem(each) for each in made} == {None} and made[0]["temp"] == 0.8


def test_without_a_drafter_mlx_lm_and_plain_decoding_are_left() -> None:
    found = subject(drafter=False)
    made = records(found, RunOptions(max_tokens=4, repeats=1))
    assert [each["contestant"] for each in made] == [PLAIN, MLX_LM] * 2
    assert made[0]["drafter_gb"] is None and {problem(each) for each in made} == {None}
    assert found.described["model_gb"] == n_bytes(found.model) / 1e9


def test_a_plan_stands_once_however_often_it_is_named() -> None:
    sides = contestants(subject(), [(1, 3), (1, 3, 4), (2, 2), (2, 2, 5), (2, 2, 4)], RunOptions(), mlx_lm=False)
    assert [side.label for side in sides] == [PLAIN, "1 x 3", "2 x 2", "2 x 2, 4 nodes"]


def test_a_plan_is_told_as_it_is_served(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "mlx_redrafter.generate.check_draftable", lambda model, *, tree, cache=None: "it takes none" if tree else None
    )
    with pytest.warns(UserWarning, match="drafting chains, not trees"):
        sides = contestants(subject(), [(2, 3)], RunOptions(), mlx_lm=False)
    assert sides[1].plan == [1, 3, 4]


@pytest.mark.parametrize("plan", [(0, 3), (1, 0), (2, 2, 9), (65, 1)])
def test_a_plan_that_cannot_be_is_refused_before_anybody_decodes(plan: Any) -> None:
    with pytest.raises(RedrafterError):
        contestants(subject(), [plan], RunOptions())


def test_a_random_drafter_is_of_the_same_size_and_bits() -> None:
    drafter = small_drafter(hidden=64, exit_dim=64)
    nn.quantize(drafter, 32, 4, class_predicate=lambda path, each: path != "rnn_u" and hasattr(each, "to_quantized"))
    other = ignorant(drafter)
    assert n_bytes(other) == n_bytes(drafter) and other.dtype == drafter.dtype
    assert isinstance(other.lm_head[-1], nn.QuantizedLinear) and isinstance(other.rnn_u, nn.Linear)
    assert not mx.array_equal(other.lm_head[-1].weight, drafter.lm_head[-1].weight)
    sides = contestants(subject(), ["auto"], RunOptions(), random=True)
    assert [side.label for side in sides] == [PLAIN, MLX_LM, "auto", "auto, random drafter"]
    assert sides[-1].kind == RANDOM


def test_a_random_drafter_goes_by_the_costs_of_the_subjects(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    measured: list[CostTable] = []

    def measure(*models: Any, trees: bool) -> CostTable:
        measured.append(CHEAP)
        return CHEAP

    monkeypatch.setattr("mlx_redrafter.planning.costs.measure_costs", measure)
    found = subject()
    options = RunOptions(max_tokens=12, repeats=1)
    sides = contestants(found, ["auto"], options, mlx_lm=False, random=True)  # before anything is measured, as `run`
    recorded = costs_record(found)
    held = list(hold(found, sides, options))
    assert [side.label for side in sides[1:]] == ["auto", "auto, random drafter"]
    assert all(each["same_tokens"] for records in held for each in records[1:])
    assert len(measured) == 1 and parse_costs(json.loads(json.dumps(recorded["costs"]))) == CHEAP


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("bits", [None, 4])
def test_a_forward_reads_a_table_only_where_it_is_the_head(tied: bool, bits: int | None) -> None:
    model = small_llama(hidden=64, vocab=96, tie_word_embeddings=tied)
    if bits:
        nn.quantize(model, 32, bits)
    table = 96 * 64 * 4 if bits is None else 96 * (64 * bits // 8 + 2 * 4 * 64 // 32)
    assert bytes_per_forward(model) == n_bytes(model) - (0 if tied else table)


def test_a_layer_whose_name_ends_as_a_heads_does_is_no_head() -> None:
    model = small_llama(tie_word_embeddings=True)
    model.layers[0].self_attn.unembed_out = nn.Linear(8, 8)
    assert bytes_per_forward(model) == n_bytes(model)


def test_of_a_mixture_only_some_weights_are_read_and_no_bandwidth_is_told() -> None:
    mixture = SimpleNamespace(named_modules=lambda: [("", nn.Module()), ("experts", SwitchLinear(8, 8, 2))])
    assert bytes_per_forward(mixture) is None  # type: ignore[arg-type]
