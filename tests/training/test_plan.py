"""How a run divides its time."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from mlx_redrafter.drafters.recurrent import DrafterArgs
from mlx_redrafter.training.plan import (
    MAX_TEXT_SHARE,
    VISITS,
    Clock,
    Speed,
    format_time,
    measure_speed,
)
from mlx_redrafter.training.settings import TrainingArgs

SPEED = Speed(text=2.0, visit=0.5)


def test_each_text_is_learned_equally_often() -> None:
    texts = SPEED.count_wanted(400.0, 0, 0)
    assert texts > 0 and 400 - texts * (2.0 + VISITS * 0.5) == pytest.approx(
        0, abs=2.0 + VISITS * 0.5
    )
    assert SPEED.count_wanted(400.0, texts, VISITS * texts) == texts, (
        "a finished run with more time"
    )
    half = VISITS * texts // 2
    assert SPEED.count_wanted(half * 0.5, texts, VISITS * texts - half) == 0, (
        "an interrupted one only trains on"
    )
    assert SPEED.count_wanted(0.0, 0, 0) == 0
    slow = replace_visit(1e-9)
    assert slow.count_wanted(400.0, 0, 0) == int(MAX_TEXT_SHARE * 400 / 2.0), (
        "some time is left to train"
    )


def replace_visit(visit: float) -> Speed:
    return SPEED._replace(visit=visit)


@pytest.mark.parametrize("changes", [{}, {"data": "somewhere"}])
def test_the_speed_is_measured(changes: dict[str, Any], model: Any) -> None:
    """With a draft vocabulary, and for given texts."""
    sizes = DrafterArgs(16, 23, exit_dim=12, num_draft_layers=1, draft_vocab_size=9)
    speed = measure_speed(model, sizes, replace(TrainingArgs(draft_depth=3), **changes), 20)
    assert speed.text > 0 and speed.visit > 0


def test_hours_are_named() -> None:
    found = [format_time(seconds) for seconds in (3.2, 99, 130, 3599, 40138)]
    assert found == ["3 s", "99 s", "2 min", "1 h 0 min", "11 h 9 min"]


def test_the_clock_keeps_time_for_the_comparison() -> None:
    said: list[str] = []
    clock = Clock(1000.0, said.append)
    clock.reserve = 80.0
    clock.say("one")
    clock.show("texts: 3")
    assert said == ["one"] and 0 < clock.left_to_train <= 920 < clock.left <= 1000
    clock.close()
    assert Clock(0.0, said.append).left_to_train == 0
