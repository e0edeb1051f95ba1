"""Contestants decode the same prompts in rotation on one clock; differing tokens are reported."""

from dataclasses import replace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest

from benchmarks import contest, contestants, run
from benchmarks.contest import compare_contestants
from benchmarks.contestants import Contestant, Settings, make_contestants, make_random_drafter
from benchmarks.models import NamedPrompt, Workload
from benchmarks.records import explain_invalid, read_records
from benchmarks.tables import CONTEXT, DRAFT_MODEL, DRAFTED, MLX_LM, MLX_LM_DRAFT, PLAIN
from helpers.bench_records import MACHINE, make_costs, make_speed, parse_flags
from helpers.refusals import refusal
from helpers.small import small_drafter, small_llama
from mlx_redrafter.drafters.checkpoint import count_bytes

PROMPTS = [
    NamedPrompt("code/one", "code", [1, 2, 3]),
    NamedPrompt("chat/two", "chat", [4, 5, 6, 7]),
]
QUICKLY = ("--plans", "1,2", "--max-tokens", "4", "--repeats", "1")


def make_workload(
    *, drafter: bool = True, draft_model: nn.Module | None = None, model=None
) -> Workload:
    return Workload(
        name="small",
        model=small_llama() if model is None else model,
        drafter=small_drafter() if drafter else None,
        drafter_name="random" if drafter else None,
        draft_model=draft_model,
        draft_model_name=None if draft_model is None else "itself",
        prompts=PROMPTS,
    )


def hold(workload: Workload, settings: Settings) -> list[dict[str, Any]]:
    sides = make_contestants(workload, [(1, 2), (2, 2)], settings)
    by_prompt = compare_contestants(workload, sides, settings)
    return [record for records in by_prompt for record in records]


class Clock:
    """A clock that only contestants advance."""

    def __init__(self, patch: pytest.MonkeyPatch):
        self.now = 0.0
        self.turns = []
        patch.setattr(contestants, "perf_counter", lambda: self.now)

    def make_side(
        self, kind: str, paces: list[float], texts: list[tuple[int, ...]] | None = None
    ) -> Contestant:
        """A contestant whose n-th run takes `paces[n]` seconds per token."""
        left = iter(paces)
        said = iter(texts or [(1, 2, 3)] * len(paces))

        def decode(prompt, max_tokens):
            self.turns.append(kind)
            pace = next(left)
            self.now += 100.0  # prefill
            for token in next(said):
                yield token, None
                self.now += pace

        plans = {PLAIN: "off", DRAFTED: [1, 2, 3]}
        return Contestant(kind, plans.get(kind), decode)


def test_every_contestant_stops_at_the_end_token():
    free = make_contestants(make_workload(), ["auto"], Settings(), context=True)
    assert len(free) > 2
    tokens = free[0].run(PROMPTS[0], 12).tokens
    end = next(i for i in range(2, 12) if tokens[i] not in tokens[1:i])
    prompt = PROMPTS[0]._replace(eos_token_ids=frozenset({tokens[end]}))
    for side in free:
        assert side.run(prompt, 12).tokens == tokens[: end + 1]


@pytest.mark.parametrize("repeats", [1, 2, 4])
def test_each_turn_begins_with_another_contestant(repeats, monkeypatch):
    clock = Clock(monkeypatch)
    kinds = [PLAIN, MLX_LM, MLX_LM_DRAFT]
    sides = [clock.make_side(kind, [1.0] * 9) for kind in kinds]
    list(compare_contestants(make_workload(), sides, Settings(max_tokens=3, repeats=repeats)))
    turns = [clock.turns[i : i + 3] for i in range(0, len(clock.turns), 3)]
    assert turns == [[*kinds[i % 3 :], *kinds[: i % 3]] for i in range(2 * repeats)]


def test_ratios_compare_runs_of_the_same_turn(monkeypatch):
    # The machine slows down tenfold after every turn; within a turn drafting is always twice as
    # fast.
    clock = Clock(monkeypatch)
    sides = [clock.make_side(PLAIN, [1.0, 10.0, 100.0]), clock.make_side(DRAFTED, [0.5, 5.0, 50.0])]
    workload = replace(make_workload(), prompts=PROMPTS[:1])
    ((first, second),) = compare_contestants(workload, sides, Settings(max_tokens=3, repeats=3))
    assert first["seconds"] == [3.0, 30.0, 300.0]
    assert second["seconds"] == [1.5, 15.0, 150.0]
    assert second["ratio"] == 2.0
    assert second["ratio_quartiles"] == [2.0, 2.0]
    assert first["ratio"] == 1.0
    assert second["tokens_per_second"] == 2 / 15.0


@pytest.mark.parametrize("turn", [0, 1, 2])
def test_a_wrong_token_in_any_turn_is_reported(turn, monkeypatch):
    clock = Clock(monkeypatch)
    texts = [(1, 2, 3)] * 3
    texts[turn] = (1, 2, 9)
    sides = [clock.make_side(PLAIN, [1.0] * 3), clock.make_side(DRAFTED, [1.0] * 3, texts)]
    workload = replace(make_workload(), prompts=PROMPTS[:1])
    ((first, second),) = compare_contestants(workload, sides, Settings(max_tokens=3, repeats=3))
    assert second["same_tokens"] is False
    assert second["first_difference"] == 2
    assert first["same_tokens"] is None
    assert first["first_difference"] is None


@pytest.mark.parametrize("temp", [0.0, 0.8])
def test_contestants_match_plain_decoding(temp):
    model = small_llama()
    settings = Settings(max_tokens=10, temp=temp, seed=3, repeats=1)
    found = hold(make_workload(model=model, draft_model=model), settings)
    assert [each["contestant"] for each in found] == [
        PLAIN,
        MLX_LM,
        MLX_LM_DRAFT,
        DRAFT_MODEL,
        DRAFTED,
        DRAFTED,
    ] * 2
    assert [each["plan"] for each in found[:6]] == [
        "off",
        None,
        None,
        [1, 3, 4],
        [1, 2, 3],
        [2, 2, 5],
    ]
    theirs = None if temp else True  # mlx-lm draws different samples
    assert [each["same_tokens"] for each in found] == [None, theirs, theirs, True, True, True] * 2
    assert {explain_invalid(each) for each in found} == {None}
    assert all(each["tokens"] == 10 and each["prompt_tokens"] in (3, 4) for each in found)


def test_a_target_drafting_for_itself_accepts_everything():
    model = small_llama()
    settings = Settings(max_tokens=1 + 19, repeats=1)
    third, ours = hold(make_workload(model=model, draft_model=model, drafter=False), settings)[2:4]
    # 19 tokens after the first: four rounds of 4 and one of 3.
    assert third["rounds"] == ours["rounds"] == 5
    tokens_per_round = 1 + (4 * 3 + 3) / 5
    assert third["tokens_per_round"] == pytest.approx(tokens_per_round)
    assert third["tokens_per_round"] == ours["tokens_per_round"] + 0.2
    assert third["num_draft_tokens"] == 3
    assert third["same_tokens"] is ours["same_tokens"] is True


def test_random_drafters_have_equal_size_and_bits():
    drafter = small_drafter(hidden=64, exit_dim=64)

    def is_quantized(path, module):
        return path != "rnn_u" and hasattr(module, "to_quantized")

    nn.quantize(drafter, 32, 4, class_predicate=is_quantized)
    other = make_random_drafter(drafter)
    assert count_bytes(other) == count_bytes(drafter)
    assert other.dtype == drafter.dtype
    assert isinstance(other.lm_head[-1], nn.QuantizedLinear)
    assert isinstance(other.rnn_u, nn.Linear)
    assert not mx.array_equal(other.lm_head[-1].weight, drafter.lm_head[-1].weight)


# What `run` prints and saves.


@pytest.fixture
def two(monkeypatch) -> Workload:
    """Replaces the loaded models with a small pair; measures no costs."""
    found = make_workload(model=small_llama(layers=1))
    monkeypatch.setattr(run, "open_workload", lambda args: found)
    monkeypatch.setattr(contest, "stamp", lambda: MACHINE)
    monkeypatch.setattr(contest, "measure_costs_record", lambda workload: make_costs())
    return found


def test_run_prints_a_table_and_keeps_records(two, tmp_path, capsys):
    path = tmp_path / "new" / "records.jsonl"
    assert run.run(parse_flags(run, *QUICKLY, "--output", str(path))) == 0
    said = capsys.readouterr().out
    assert "contestant" in said
    assert "mlx-lm" in said
    assert "1 x 2" in said
    # No raw JSON.
    assert said.splitlines()[-1].startswith("Some Chip, 4 cores, Some-OS-1.0, mlx 0.32.4")
    assert [(each["kind"], each.get("contestant")) for each in read_records(path)] == [
        ("costs", None),
        *[("speed", name) for name in (PLAIN, MLX_LM, CONTEXT, DRAFTED)] * 2,
    ]


@pytest.mark.parametrize(("liar", "status"), [(DRAFTED, 1), (MLX_LM, 1), (MLX_LM_DRAFT, 0)])
def test_differing_tokens_show_in_the_status(liar, status, two, monkeypatch, capsys):
    found = replace(two, draft_model=two.model, draft_model_name="itself")
    monkeypatch.setattr(run, "open_workload", lambda args: found)

    def lie(*rest):
        for records in compare_contestants(*rest):
            wrong = {"same_tokens": False, "first_difference": 2}
            yield [each | wrong if each["contestant"] == liar else each for each in records]

    monkeypatch.setattr(contest, "compare_contestants", lie)
    assert run.run(parse_flags(run, *QUICKLY)) == status
    assert "0 of 2" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("records", "status", "said"),
    [
        ([make_speed("plain", "off", 1.0), make_speed()], 0, ""),
        (
            [make_speed("plain", "off", 1.0), make_speed(plain_steps=64)],
            1,
            "1 x 3: nothing was drafted, so its tokens show nothing\n"
            "nothing was compared with plain decoding\n",
        ),
        (
            [make_speed("mlx-lm", None, 1.0), make_speed(plain_steps=64)],
            0,
            "1 x 3: nothing was drafted, so its tokens show nothing\n",
        ),
        ([make_speed("plain", "off", 1.0)], 1, "nothing was compared with plain decoding\n"),
        ([make_speed(), make_speed(same_tokens=False)], 1, ""),
    ],
)
def test_contestants_that_draft_nothing_prove_nothing(records, status, said, capsys):
    assert contest.compute_status(records) == status
    assert capsys.readouterr().err == said


def test_bad_options_are_refused_before_measuring(two, monkeypatch):
    monkeypatch.setattr(contest, "measure_costs_record", lambda workload: pytest.fail("it went on"))
    for words, message in (
        ("--max-tokens 1", "--max-tokens must be at least 2"),
        ("--plans 65,1", "beam_width must be"),
    ):
        with refusal(message):
            run.run(parse_flags(run, *words.split()))
