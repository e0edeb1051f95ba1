"""How a run divides its time."""

import pytest

from mlx_redrafter.drafters.recurrent import DrafterArgs
from mlx_redrafter.training.schedule import (
    MAX_MAKING_SHARE,
    VISITS,
    Clock,
    ExampleTimes,
    format_time,
    measure_learning,
    measure_making,
)

TIMES = ExampleTimes(make=2.0, learn=0.5)


def test_each_example_is_learned_equally_often():
    seconds_each = 2.0 + VISITS * 0.5
    count = TIMES.count_wanted(400.0, 0, 0)
    assert count > 0
    assert 400 - count * seconds_each == pytest.approx(0, abs=seconds_each)
    again = TIMES.count_wanted(400.0, count, VISITS * count)
    assert again == count, "a finished run with more time"
    half = VISITS * count // 2
    more = TIMES.count_wanted(half * 0.5, count, VISITS * count - half)
    assert more == 0, "an interrupted one only trains on"
    assert TIMES.count_wanted(0.0, 0, 0) == 0
    fast = TIMES._replace(learn=1e-9)
    most = int(MAX_MAKING_SHARE * 400 / 2.0)
    assert fast.count_wanted(400.0, 0, 0) == most, "some time is left to train"


@pytest.mark.parametrize("is_given", [False, True])
def test_times_are_measured(is_given, model):
    """With a draft vocabulary, and for given texts."""
    sizes = DrafterArgs(16, 23, exit_dim=12, num_draft_layers=1, draft_vocab_size=9)
    assert measure_making(model, 20, is_given=is_given) > 0
    assert measure_learning(model.model.embed_tokens, sizes, 20, depth=3, batch_size=4) > 0


def test_hours_are_named():
    found = [format_time(seconds) for seconds in (3.2, 99, 130, 3599, 40138)]
    assert found == ["3 s", "99 s", "2 min", "1 h 0 min", "11 h 9 min"]


def test_the_clock_keeps_time_for_the_comparison():
    said = []
    clock = Clock(1000.0, said.append)
    clock.reserve = 80.0
    clock.say("one")
    clock.show("texts: 3")
    assert said == ["one"]
    assert 0 < clock.left_to_train <= 920 < clock.left <= 1000
    clock.close()
    assert Clock(0.0, said.append).left_to_train == 0
