"""Simulated texts: the decoding loop without its model."""

from __future__ import annotations

import pytest
from cost_curves import ACCEPTANCE, CURVES, make_costs
from families import make_family
from toys import ids, make_prompt, run

from mlx_redrafter.engine.decode import Planner
from mlx_redrafter.planning.costs import CostTable
from mlx_redrafter.planning.planner import MAX_LOSS
from mlx_redrafter.planning.simulation import predict_speeds, simulate

FREE = CostTable((1,), tuple(range(1, 17)), ((1.0,) * 16,), (1.0,), (1,), (1e-9,), (0.0, 0.0))
"""Every forward takes as long as a plain step."""


@pytest.mark.parametrize("family", ["llama", "rwkv7"])
@pytest.mark.parametrize("seed", range(3))
def test_rounds_match_decoding(family: str, seed: int) -> None:
    model, prompt = make_family(family), 3 * make_prompt(12, vocab=4, seed=seed)
    steps = run(model, prompt, max_tokens=80, context=True, plan=(1, 1))
    stats = steps[-1].stats
    assert stats.context_accepted > 20 and bool(stats.replayed) is (family == "rwkv7")
    costs = FREE._replace(replay_row_ms=1e-9 * bool(stats.replayed))
    assert simulate(costs, Planner(None), prompt, ids(steps)) == pytest.approx(79 / stats.rounds)


@pytest.mark.parametrize("replay", [0.0, 0.05])
@pytest.mark.parametrize("curve", CURVES)
def test_predictions_by_text_and_drafter(curve: str, replay: float) -> None:
    costs, trees = make_costs(curve, replay=replay), not replay
    alone, good = predict_speeds(costs, None, trees=trees), predict_speeds(costs, ACCEPTANCE, trees=trees)
    bad = predict_speeds(costs, [[0.01]], trees=trees)
    assert alone["fresh"] == 1, "nothing is proposed"
    assert good["fresh"] > bad["fresh"] > 1 - MAX_LOSS or curve in ("every row", "half of every row")
    assert min(bad.values()) > 0.97 and good["copied"] > good["fresh"] - 0.02
    assert (alone["copied"] > 2.4) is (bad["copied"] > 2.4) is (curve not in ("every row", "half of every row"))
