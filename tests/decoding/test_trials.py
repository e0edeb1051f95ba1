"""Speedups that the counted tokens cannot give are not reported."""

import pytest

from mlx_redrafter.decoding.trials import PromptRuns, check_speedup, join_runs
from mlx_redrafter.engine.stats import Stats


@pytest.mark.parametrize(
    ("measured", "tokens_per_round", "expected"),
    [
        (0.8, 1.0, 0.8),
        (1.5, 2.0, 1.5),
        (1.02, 1.0, 1.0),
        (1.22, 1.17, None),
        (1.66, 1.05, None),
        (12.3, 10.5, None),
    ],
)
def test_a_speedup_is_at_most_the_tokens_per_round(measured, tokens_per_round, expected):
    assert check_speedup(measured, tokens_per_round) == expected


def test_joined_runs_have_the_sums():
    runs = [
        PromptRuns(Stats(rounds=2, accepted=1), ((1, 2, 3, 4),), 2.0),
        PromptRuns(Stats(rounds=1), ((5, 6),), 3.0),
    ]
    both = join_runs(runs)
    assert both == (Stats(rounds=3, accepted=1), ((1, 2, 3, 4), (5, 6)), 5.0)
    assert both.tokens_per_second == 4 / 5.0
