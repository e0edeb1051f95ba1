"""Simulated texts take the same rounds as decoding."""

from __future__ import annotations

import json

import pytest
from bench_records import parse_flags

from benchmarks import planning
from benchmarks.planning import count_right, make_costs, simulate_chains
from mlx_redrafter import load_demo, stream_generate
from mlx_redrafter.demo import demo_prompts
from mlx_redrafter.engine.decode import Planner
from mlx_redrafter.engine.plan import chain_plan

PROMPTS = [f"demo-code/{number:02d}" for number in (1, 2, 7, 9, 13)]


@pytest.mark.parametrize("depth", [1, 3])
def test_simulated_rounds_match_decoding(depth: int) -> None:
    model, tokenizer, drafter = load_demo()
    costs = make_costs(1.1, 0.015, 0.087)
    for text in demo_prompts()[:1]:
        ids = tokenizer.encode(text)
        *_, last = stream_generate(model, tokenizer, ids, drafter=drafter, draft_depth=depth, max_tokens=40)
        right = count_right(model, drafter, ids, 40)
        speed = simulate_chains(costs, Planner(chain_plan(depth)), len(ids), right)
        assert speed == pytest.approx(last.tokens_per_round / costs.round_ms(chain_plan(depth), 64), rel=0.1)


def test_auto_is_near_the_best_chain(capsys: pytest.CaptureFixture[str]) -> None:
    assert planning.run(parse_flags(planning, "--json", "--max-tokens", "64", "--prompts", *PROMPTS)) == 0
    rows = {row["text"]: row for row in map(json.loads, capsys.readouterr().out.splitlines())}
    mean = rows["geometric mean"]
    best = max(mean[f"1 x {depth}"] for depth in range(1, 6))
    assert mean["auto x"] > 0.95 * best > 1.1, "independent of timing"
