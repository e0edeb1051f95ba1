"""Choosing between batching and alternating for two or three requests, by measured speed."""

from __future__ import annotations

import pytest

from mlx_redrafter.serving.scheduling.pace import MAX_TAKING_TURNS, SPEED_WINDOW, TRIAL_EVERY, Pace


def run_steps(pace: Pace, seconds: float, count: int = 2) -> int:
    """Number of batch steps before alternating is tried."""
    return next(at for at in range(1, 10_000) if pace.observe_step(count, seconds))


def run_window(pace: Pace, tokens: int, seconds: float, count: int = 2) -> bool:
    """Whether alternating continues after one measuring window."""
    return [pace.observe_rounds(count, tokens, seconds) for _ in range(SPEED_WINDOW)][-1]


def test_alternating_continues_while_it_is_faster():
    pace = Pace()
    assert not pace.prefers_turns(2)
    assert run_steps(pace, 0.01) == TRIAL_EVERY
    for tokens, pays in (
        (6, True),
        (6, True),
        (2, False),
    ):  # in 0.02 s, in which a batch makes 4 tokens
        assert run_window(pace, tokens, 0.02) is pays
        assert pace.prefers_turns(2) is pays
    assert run_steps(pace, 0.01) == 2 * TRIAL_EVERY, "a failed trial doubles the pause"
    assert not run_window(pace, 2, 0.02)
    assert run_steps(pace, 0.01) == 4 * TRIAL_EVERY
    assert run_window(pace, 6, 0.02)
    assert not run_window(pace, 2, 0.02)
    assert run_steps(pace, 0.01) == 4 * TRIAL_EVERY


def test_an_unmeasured_number_of_requests_is_batched():
    pace = Pace()
    run_steps(pace, 0.01)
    assert run_window(pace, 100, 0.01)
    assert pace.prefers_turns(2)
    assert not pace.prefers_turns(3)


@pytest.mark.parametrize("count", [MAX_TAKING_TURNS + 1, 16])
def test_many_requests_are_always_batched(count: int):
    pace = Pace()
    assert not any(pace.observe_step(count, 0.01) for _ in range(1000))
    run_window(pace, 10_000, 0.01)
    assert not pace.prefers_turns(count)
