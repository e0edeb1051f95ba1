"""Simulated texts: the decoding loop without its model."""

import pytest

from helpers.cost_curves import simulate_text
from helpers.families import make_family
from helpers.toys import ids, make_prompt, run
from mlx_redrafter.engine.planner import Planner
from mlx_redrafter.planning.costs import CostTable

FREE = CostTable((1,), tuple(range(1, 17)), ((1.0,) * 16,), (1.0,), (1,), (1e-9,), (0.0, 0.0))
"""Every forward takes as long as a plain step."""


@pytest.mark.parametrize("family", ["llama", "rwkv7"])
@pytest.mark.parametrize("seed", range(3))
def test_rounds_match_decoding(family, seed):
    model = make_family(family)
    prompt = 3 * make_prompt(12, vocab=4, seed=seed)
    steps = run(model, prompt, max_tokens=80, context=True, plan=(1, 1))
    stats = steps[-1].stats
    assert stats.context_accepted > 20
    assert bool(stats.replayed) is (family == "rwkv7")
    costs = FREE._replace(replay_row_ms=1e-9 * bool(stats.replayed))
    speed = simulate_text(costs, Planner(None), prompt, ids(steps))
    assert speed == pytest.approx(79 / stats.rounds)
