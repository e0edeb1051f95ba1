"""Which way two or three requests are decoded, by what both have taken."""

from __future__ import annotations

import pytest

from mlx_redrafter.serving.pace import MAX_ROWS, TRIAL_EVERY, WINDOW, Pace


def run_steps(pace: Pace, seconds: float, rows: int = 2) -> int:
    """How many steps a batch makes before turns are tried."""
    return next(at for at in range(1, 10_000) if pace.observe_step(rows, seconds))


def run_window(pace: Pace, tokens: int, seconds: float, rows: int = 2) -> bool:
    """Whether turns go on after as many rounds as a speed is measured over."""
    return [pace.observe_rounds(rows, tokens, seconds) for _ in range(WINDOW)][-1]


def test_turns_are_kept_while_they_are_faster() -> None:
    pace = Pace()
    assert not pace.prefers_turns(2) and run_steps(pace, 0.01) == TRIAL_EVERY
    for tokens, pays in ((6, True), (6, True), (2, False)):  # in 0.02 s, where a batch makes 4
        assert run_window(pace, tokens, 0.02) is pays
        assert pace.prefers_turns(2) is pays
    assert run_steps(pace, 0.01) == 2 * TRIAL_EVERY, "a trial that does not pay doubles the pause"
    assert not run_window(pace, 2, 0.02) and run_steps(pace, 0.01) == 4 * TRIAL_EVERY
    assert run_window(pace, 6, 0.02) and not run_window(pace, 2, 0.02) and run_steps(pace, 0.01) == 4 * TRIAL_EVERY


def test_a_number_of_rows_that_was_never_measured_is_a_batch() -> None:
    pace = Pace()
    run_steps(pace, 0.01)
    assert run_window(pace, 100, 0.01) and pace.prefers_turns(2) and not pace.prefers_turns(3)


@pytest.mark.parametrize("rows", [MAX_ROWS + 1, 16])
def test_many_rows_never_leave_a_batch(rows: int) -> None:
    pace = Pace()
    assert not any(pace.observe_step(rows, 0.01) for _ in range(1000))
    run_window(pace, 10_000, 0.01)
    assert not pace.prefers_turns(rows)
