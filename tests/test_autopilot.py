"""Plans that change while a text is made leave every token as it is; what is measured is kept, or measured again."""

from __future__ import annotations

import json
import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from families import Follower, contents, make_family, overheard, script
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.sample_utils import make_logits_processors
from toys import make_model, make_tokenizer

from mlx_redrafter import generate as generation
from mlx_redrafter.drafters.recurrent import Drafter, DrafterArgs
from mlx_redrafter.engine import decode as loop
from mlx_redrafter.engine import kv_cache
from mlx_redrafter.engine import wired_limit as wiring
from mlx_redrafter.engine.plan import Plan
from mlx_redrafter.engine.supported_models import model_sizes
from mlx_redrafter.errors import RedrafterError
from mlx_redrafter.generate import Options, decode_tokens, generate_step, stream_generate
from mlx_redrafter.planning import autopilot, meter
from mlx_redrafter.planning.autopilot import flight_of, known
from mlx_redrafter.planning.costs import Costs
from mlx_redrafter.planning.meter import CONTEXTS, TURNS, Part, contexts_of, settled, shorter
from mlx_redrafter.planning.pilot import Pilot, make_flight
from mlx_redrafter.planning.planner import UNKNOWN

PROMPT = [(7 * i + 3) % 50 for i in range(9)]
CHEAP = Costs((64,), (1, 2, 3, 4, 5), ((1.0, 1.1, 1.1, 1.2, 1.2),), (1.0,), (1, 2), (0.01, 0.01), (0.0, 0.0))
PLANS = (Plan(1, 1, 2), Plan(1, 3, 4), Plan(2, 2, 5), Plan(2, 3, 5))


class Wild:
    """A pilot that takes any plan at any time."""

    def __init__(self, plans: tuple[Plan, ...], seed: int) -> None:
        self._plans, self._generator = plans, random.Random(seed)
        self.pause = 1
        self.seen: list[tuple[Plan | None, int]] = []

    def choose(self, length: int, replayed: int = 0) -> Plan | None:
        self.pause = self._generator.randrange(1, 4)
        return self._generator.choice([None, *self._plans])

    def saw(self, plan: Plan | None, tokens: int, length: int, *rest: Any, **more: Any) -> None:
        self.seen.append((plan, tokens))


@pytest.mark.parametrize("close", [None, 1, 7, 20])
@pytest.mark.parametrize("name", ["qwen2", "gemma3_text", "falcon_h1", "llama4"])
@pytest.mark.parametrize("processed", [False, True])
def test_plans_that_change_in_mid_generation_change_no_token(
    name: str, processed: bool, close: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_family(name)
    options: dict[str, Any] = {"temp": 0.8, "seed": 5, "max_tokens": 40}
    if processed:
        options["logits_processors"] = make_logits_processors(repetition_penalty=1.2)
    count, expected = 40 if close is None else close, make_prompt_cache(model)
    with overheard(model) as heard:
        ahead = [s.token for s in decode_tokens(PROMPT, model, None, Options(**options | {"max_tokens": 60}))]
    list(decode_tokens(PROMPT, model, None, Options(prompt_cache=expected, **options | {"max_tokens": count})))
    text = PROMPT + ahead
    drafter = Follower(model, text, heard, script("half", len(text), 2), 2)
    trees = name != "falcon_h1" and not processed
    plans = PLANS if trees else PLANS[:2]
    for seed in range(3):
        pilot = Wild(plans, seed)
        monkeypatch.setattr(loop, "Pilot", lambda flight, pilot=pilot: pilot)
        cache = make_prompt_cache(model)
        settings = Options(prompt_cache=cache, **options)
        settings = replace(settings, plan=make_flight(CHEAP, UNKNOWN, plans))
        steps = decode_tokens(PROMPT, model, drafter, settings)
        assert [next(steps).token for _ in range(count)] == ahead[:count]
        steps.close()
        assert kv_cache.length(cache) == kv_cache.length(expected)
        for one, other in zip(contents(cache), contents(expected), strict=True):
            if name != "llama4":  # chunks are trimmed by the next forward
                assert one.shape == other.shape and mx.allclose(one, other, atol=2e-3, rtol=2e-3)
        if close is None:
            flown = {plan for plan, _ in pilot.seen}
            assert flown & set(plans) and None in flown


def pair(acceptance: list[list[float]] | None = None) -> tuple[Any, Drafter]:
    """A model, and a drafter that knows nothing."""
    model = make_model()
    return model, Drafter(DrafterArgs(*model_sizes(model), exit_dim=16, num_draft_layers=1, acceptance=acceptance))


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[int]:
    """How often something was measured, with an empty folder to keep it in; a busy machine is none of its business."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "caches"))
    monkeypatch.setattr(autopilot, "_measured", [])
    monkeypatch.setattr(autopilot, "is_disturbed", lambda costs: False)
    calls: list[int] = []
    measure = autopilot.measure
    monkeypatch.setattr(autopilot, "measure", lambda *a, **k: calls.append(1) or measure(*a, **k))
    return calls


def test_costs_are_measured_with_the_weights_wired_as_when_decoding(monkeypatch: pytest.MonkeyPatch) -> None:
    wired: list[str] = []

    def taken(*args: Any, **more: Any) -> Any:
        wired.append("taken")
        return real(*args, **more)

    real = meter.taken
    monkeypatch.setattr(wiring, "raise_limit", lambda *of: wired.append("begins"))
    monkeypatch.setattr(wiring, "give_back", lambda *of: wired.append("ends"))
    monkeypatch.setattr(meter, "taken", taken)
    monkeypatch.setattr(meter, "SECONDS", 0.0)
    model = make_model()
    meter.measure(model, Drafter(DrafterArgs(*model_sizes(model), exit_dim=16, num_draft_layers=1)), trees=True)
    assert wired == ["begins", "taken", "ends", "ends"], "once more, lest a Ctrl-C has come into the first"


def test_a_pair_is_measured_once_and_remembered_by_the_machine(counted: list[int], tmp_path: Path) -> None:
    model, drafter = pair()
    first = flight_of(model, drafter, trees=True)
    assert flight_of(model, drafter, trees=True) is first and len(counted) == 1
    autopilot._measured.clear()
    assert flight_of(model, drafter, trees=True).costs == first.costs and len(counted) == 1, "read from the file"
    flight_of(model, drafter, trees=False)
    assert len(counted) == 2, "another question"
    anew = flight_of(model, drafter, trees=True, refresh=True)
    assert len(counted) == 3 and flight_of(model, drafter, trees=True) is anew
    assert first.costs.counts[:4] == (1, 2, 3, 4) and first.costs.widths == (1, 2, 4)
    assert len(list((tmp_path / "caches").rglob("*.json"))) == 2 and not list((tmp_path / "caches").rglob("*partial*"))


@pytest.mark.parametrize("first", [False, True])
def test_costs_with_trees_serve_texts_whose_rounds_are_lines(counted: list[int], first: bool) -> None:
    model, drafter = pair([[0.9, 0.05]])
    for lines in (first, not first, first):
        flight = flight_of(model, drafter, trees=True, lines=lines)
        assert flight.costs.widths == ((1,) if lines else (1, 2, 4)) and len(flight.costs.level) == (1 if lines else 3)
        assert not lines or all(plan.width == 1 for plan in flight.plans)
    assert len(counted) == 1, "whichever is asked for first"
    old = flight_of(model, drafter, trees=True, lines=True)
    flight_of(model, drafter, trees=True, refresh=True)
    anew = flight_of(model, drafter, trees=True, lines=True)
    assert anew is not old and anew.costs != old.costs and len(counted) == 2, "nothing of the old ones stays"


def test_the_first_text_with_a_processor_measures_nothing_again(counted: list[int]) -> None:
    model, drafter = pair([[0.9, 0.05]])
    for processors in ([], make_logits_processors(repetition_penalty=1.2)):
        list(generate_step(PROMPT[:3], model, drafter, logits_processors=processors, max_tokens=4))
    assert len(counted) == 1


def test_what_is_measured_first_is_no_time_of_the_prompt(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    now = [0.0]

    def clock() -> float:
        now[0] += 0.25
        return now[0]

    def measure(*args: Any, **options: Any) -> Costs:
        now[0] += 1000.0
        return CHEAP

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "caches"))
    monkeypatch.setattr(autopilot, "measure", measure)
    monkeypatch.setattr(generation.time, "perf_counter", clock)
    model, drafter = pair()
    seen: list[tuple[int, int]] = []
    options: Options = {"max_tokens": 1, "prompt_progress_callback": lambda *of: seen.append(of)}
    (response,) = stream_generate(model, make_tokenizer(), [1, 2, 3], drafter=drafter, **options)
    assert seen[0] == (0, 3) and seen[-1] == (3, 3) and now[0] > 1000
    assert response.prompt_tps > 0.1


@pytest.mark.parametrize("sound_from", [1, 2, 9])
def test_a_measurement_that_contradicts_itself_is_made_again_the_next_time_and_the_shorter_times_taken(
    tmp_path: Path, sound_from: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Costs] = []

    def measure(*args: Any, **options: Any) -> Costs:
        plain = 1.0 if len(made) + 1 >= sound_from else 5.0 - len(made)
        made.append(CHEAP._replace(plain=(plain,)))
        return made[-1]

    monkeypatch.setattr(autopilot, "measure", measure)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "caches"))
    model, drafter = pair()
    found = [known(model, drafter, trees=True).plain[0] for _ in range(6)]
    assert len(made) == min(sound_from, autopilot.TIMES)
    assert found == {1: [1, 1, 1, 1, 1, 1], 2: [5, 1, 1, 1, 1, 1], 9: [5, 4, 3, 3, 3, 3]}[sound_from]
    known(model, drafter, trees=True, refresh=True)
    assert len(made) == min(sound_from, autopilot.TIMES) + 1, "anew is anew"


def test_of_two_measurements_the_shorter_times_are_taken_and_whole_rounds_compared() -> None:
    one = CHEAP._replace(rest=(0.5, 0.1))
    slow = CHEAP._replace(verify=((2.0, 1.0, 3.0, 3.0, 3.0),), plain=(0.9,), level=(0.5, 0.005), rest=(-2.0, -1.8))
    both = shorter(one, slow)
    assert both.verify == ((1.0, 1.0, 1.1, 1.2, 1.2),) and both.plain == (0.9,) and both.level == (0.01, 0.005)
    rounds = min(1.1 + 2 * 0.01 + 0.5, 3.0 + 2 * 0.5 - 2.0), min(1.2 + 2 * 0.01 + 0.1, 3.0 + 2 * 0.005 - 1.8)
    assert both.rest == pytest.approx((rounds[0] - 1.1 - 0.02, rounds[1] - 1.2 - 0.01))
    fewer = slow._replace(counts=slow.counts[:4], verify=(slow.verify[0][:4],))
    assert shorter(one, fewer).verify == shorter(fewer, one).verify == (both.verify[0][:4],)
    assert shorter(one, slow._replace(contexts=(99,))).contexts == (99,), "of other texts: the later one"


@pytest.mark.parametrize("damage", ["nothing", "half", "another machine", "negative", "no costs", "no times", "a list"])
def test_a_file_that_is_damaged_or_of_something_else_is_measured_anew(
    tmp_path: Path, damage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted: list[int] = []

    def measure(*args: Any, **options: Any) -> Costs:
        counted.append(1)
        return CHEAP._replace(plain=(float(len(counted)),))

    monkeypatch.setattr(autopilot, "measure", measure)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "caches"))
    model, drafter = pair()
    costs = known(model, drafter, trees=False)
    (file,) = (tmp_path / "caches").rglob("*.json")
    text, found = file.read_text(), json.loads(file.read_text())
    if damage == "half":
        text = text[: len(text) // 2]
    elif damage == "nothing":
        text = ""
    elif damage == "another machine":
        found["of"]["machine"]["chip"] = "M9"
        text = json.dumps(found)
    elif damage == "negative":
        found["costs"]["plain"][0] = -1
        text = json.dumps(found)
    elif damage == "no times":
        found["times"] = None
        text = json.dumps(found)
    elif damage == "no costs":
        del found["costs"]["level"]
        text = json.dumps(found)
    else:
        text = "[1]"
    file.write_text(text)
    again = known(model, drafter, trees=False)
    assert len(counted) == 2 and again.contexts == costs.contexts
    assert json.loads(file.read_text())["costs"]["plain"] == list(again.plain), "and kept"


def test_a_folder_that_cannot_be_written_is_one_warning(
    counted: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.warns(UserWarning, match="what was measured cannot be kept"):
        known(*pair(), trees=False)


def test_what_was_measured_anew_and_cannot_be_kept_is_said_though_older_costs_are(
    counted: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path, text: str) -> None:
        raise OSError("No space left on device")

    model, drafter = pair()
    known(model, drafter, trees=False)
    monkeypatch.setattr(autopilot, "write_text", full)
    with pytest.warns(UserWarning, match="what was measured cannot be kept: .*No space left"):
        known(model, drafter, trees=False, refresh=True)


def test_two_threads_measure_a_pair_once_between_them(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(autopilot, "_measured", [])
    measuring, counted = threading.Event(), []

    def measure(*args: Any, **options: Any) -> Costs:
        counted.append(1)
        measuring.set()
        time.sleep(0.3)
        return CHEAP

    monkeypatch.setattr(autopilot, "measure", measure)
    model, drafter = pair()
    with ThreadPoolExecutor() as threads:
        first = threads.submit(flight_of, model, drafter, trees=True)
        assert measuring.wait(60)
        second = threads.submit(flight_of, model, drafter, trees=True)
        assert first.result(60) is second.result(60) and len(counted) == 1


@pytest.mark.parametrize(
    ("options", "same"),
    [({}, "auto"), ({"plan": "off"}, "off"), ({"plan": (1, 2)}, (1, 2, 3)), ({"plan": (2, 3, 5)}, (2, 3, 5)),
     ({"beam_width": 2}, (2, 3, 7)), ({"draft_depth": 2}, (1, 2, 3)), ({"beam_width": 2, "tree_size": 4}, (2, 3, 4))],
)  # fmt: skip
def test_a_plan_is_what_the_caller_asks_for(options: dict[str, Any], same: Any) -> None:
    plan = Options(pair()[1], **options).plan
    assert plan == (None if same == "off" else same)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"plan": "on"}, "plan must be 'auto', 'off', .* got 'on'"),
        ({"plan": (1,)}, "plan must be"),
        ({"plan": (1, 2.5)}, "plan must be"),
        ({"plan": "off", "beam_width": 2}, "give either plan or beam_width, got plan 'off' and beam_width 2"),
        ({"plan": (1, 2), "draft_depth": 2}, "give either plan or draft_depth"),
        ({"plan": (0, 2)}, "beam_width must be from 1"),
        ({"plan": (2, 2, 9)}, "tree_size counts the root"),
    ],
)
def test_a_plan_that_is_none_is_refused(options: dict[str, Any], reason: str) -> None:
    with pytest.raises(RedrafterError, match=reason):
        Options(pair()[1], **options)


@pytest.mark.parametrize("plan", ["auto", "off"])
def test_the_text_is_that_of_plain_decoding_whatever_the_plan(counted: list[int], plan: str) -> None:
    model, drafter = pair([[0.9, 0.05]])
    options: dict[str, Any] = {"temp": 0.9, "seed": 2, "max_tokens": 60}
    plain = [token for token, _, _ in generate_step(PROMPT[:3], model, None, **options)]
    assert [token for token, _, _ in generate_step(PROMPT[:3], model, drafter, plan=plan, **options)] == plain
    assert len(counted) == (plan == "auto")


def test_a_pilot_without_a_plan_that_pays_coasts() -> None:
    pilot = Pilot(make_flight(CHEAP, UNKNOWN, ()))
    assert pilot.choose(10) is None and pilot.pause > 0


@pytest.mark.parametrize("positions", [1024, 200, 30])
def test_nothing_is_measured_behind_the_end_of_a_table_of_positions(positions: int) -> None:
    model = make_family("gpt2")
    model.args.n_positions = positions
    contexts = contexts_of(model)
    assert contexts == {1024: (64,), 200: (64,), 30: (14,)}[positions]
    assert contexts_of(make_family("qwen2")) == CONTEXTS


def test_where_nobody_is_at_home_nothing_is_kept(counted: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    def nobody() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(autopilot, "cache_directory", nobody)
    assert known(*pair(), trees=False).counts and len(counted) == 1


def test_measuring_ends_when_times_repeat_themselves_or_time_is_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mlx_redrafter.planning.meter.SECONDS", 10.0)
    calm: dict[Part, list[float]] = {("plain", 0, 1): [1.0] * TURNS, ("verify", 0, 2): [2.0, 2.01, 2.02, 2.05, 9.0]}
    assert settled(calm, 2.0, 1.0)
    assert not settled(calm, 1.0, 2.0), "so many plain steps are not over"
    few: dict[Part, list[float]] = {("plain", 0, 1): [1.0] * (TURNS - 1)}
    restless: dict[Part, list[float]] = calm | {("level", 0, 1): [1.0, 1.2, 1.3, 1.4, 1.5]}
    for times in (few, restless):
        assert not settled(times, 5.0, 1.0) and settled(times, 10.1, 1.0)
