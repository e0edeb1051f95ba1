"""The simulated drafter is accepted at the requested rate and leaves the text unchanged."""

import math

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten

from benchmarks import contest, synthetic
from benchmarks.models import Workload
from benchmarks.records import read_records
from benchmarks.synthetic import (
    EXPERT_SIZES,
    PUBLISHED_HEADS,
    RECURRENT_SIZES,
    SHAPES,
    Oracle,
    build_workload,
    make_config,
    make_target,
)
from benchmarks.tables import get_label
from helpers.bench_records import make_costs, parse_flags
from helpers.refusals import refusal
from helpers.small import small_drafter, small_llama
from helpers.toys import decode_steps
from mlx_redrafter.decoding.options import Options
from mlx_redrafter.engine.plan import Plan
from mlx_redrafter.engine.stats import Stats
from mlx_redrafter.planning.acceptance import compute_cumulative

V = 512
SIZES = (64, 2, 128, 4, 2, 16, V)
SMALL = {
    "dense": make_config("llama", SIZES),
    "untied": make_config("llama", SIZES, tied=False),
    "qwen3": make_config("qwen3", SIZES),
    "gemma3_text": make_config("gemma3_text", SIZES),
    "hybrid": make_config(
        "qwen3_5",
        SIZES,
        **RECURRENT_SIZES | {"linear_num_key_heads": 2, "linear_num_value_heads": 2},
    ),
    "mixture": make_config(
        "qwen3_moe",
        SIZES,
        tied=False,
        **EXPERT_SIZES | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64},
    ),
}
BILLIONS = {
    "llama-2-7b": 6.738,
    "llama-3.2-1b": 1.236,
    "llama-3.2-3b": 3.213,
    "llama-3.1-8b": 8.030,
    "gemma-3-27b": 27.009,
    "qwen3-30b-a3b": 30.532,
    "qwen3.5-9b": 8.954,
    "qwen3.5-35b-a3b": 34.661,
}
"""Parameters in billions, from the models' cards and index files."""


def decode(found: Workload, plan, count: int) -> tuple[list[int], Stats]:
    """Decodes the workload's first prompt, plainly if `plan` is None.

    Returns (tokens, statistics).
    """
    drafter = None if plan is None else found.drafter
    options = Options(plan="off" if plan is None else plan, max_tokens=count, sampler=found.sampler)
    steps = list(decode_steps(found.prompts[0].ids, found.model, drafter, options))
    return [step.token for step in steps], steps[-1].stats


def count_rounds(oracle: Oracle, plan: tuple[int, ...], count: int) -> Stats:
    model = small_llama(vocab=V, layers=1)
    drafter = small_drafter(vocab=V)
    *_, last = decode_steps(
        [1, 2, 3], model, drafter, Options(plan=plan, max_tokens=count, sampler=oracle)
    )
    return last.stats


@pytest.mark.parametrize(
    ("acceptance", "plan"),
    [
        ([[0.7]], (1, 3)),
        ([[0.9], [0.5], [0.2]], (1, 4)),
        ([[0.6, 0.2, 0.1]], (2, 3)),
        ([[0.6, 0.2, 0.1]], (3, 3, 6)),
    ],
)
def test_tokens_per_round_match_the_expectation(acceptance, plan):
    width, depth, *size = plan
    whole = Plan(width, depth, size[0] if size else 1 + width * depth)
    expected = sum(compute_cumulative(acceptance, whole))
    stats = count_rounds(Oracle(acceptance), plan, 400)
    # A round accepts 0 to K drafted tokens, so its standard deviation is at most K / 2. Allow three
    # standard errors.
    allowed = 3 * depth / 2 / math.sqrt(stats.rounds)
    assert abs(stats.tokens_per_round - expected) < min(allowed, 0.25), (
        stats.tokens_per_round,
        expected,
    )


@pytest.mark.parametrize("name", SMALL)
@pytest.mark.parametrize("bits", [32, 4])
def test_built_pairs_decode_the_same_with_drafts(name, bits, monkeypatch):
    monkeypatch.setitem(SHAPES, name, SMALL[name])
    found = build_workload(name, bits, layers=2, acceptance=[[0.6, 0.1]])
    plain, _ = decode(found, None, 14)
    assert len(set(plain)) == 14, "the text is not a repeating one"
    for plan in ((1, 3), (2, 2)):
        tokens, stats = decode(found, plan, 14)
        assert tokens == plain
        assert stats.accepted > 0
    assert found.drafter.args.acceptance == [[0.6, 0.1]]


@pytest.mark.parametrize("drafter_type", PUBLISHED_HEADS)
def test_heads_of_published_sizes_decode_the_same(drafter_type, monkeypatch):
    monkeypatch.setitem(SHAPES, "dense", SMALL["dense"])
    found = build_workload(
        "dense", 32, layers=2, acceptance=[[0.6, 0.1]], drafter_type=drafter_type
    )
    plain, _ = decode(found, None, 14)
    tokens, stats = decode(found, (2, 2), 14)
    assert tokens == plain
    assert stats.accepted > 0
    assert found.drafter_name == f"{drafter_type}, acceptance 0.6,0.1"


@pytest.mark.parametrize("name", SHAPES)
def test_published_shapes_have_their_published_size(name):
    shape = SHAPES[name]
    model = make_target(shape, 16, mx.bfloat16)  # lazy: nothing is computed, no memory is allocated
    arrays = tree_flatten(model.parameters())
    assert sum(array.size for _, array in arrays) / 1e9 == pytest.approx(BILLIONS[name], rel=2e-3)
    assert len(model.layers) == shape["num_hidden_layers"]


def test_a_shape_that_exceeds_memory_is_refused(monkeypatch):
    monkeypatch.setattr(synthetic, "get_usable_bytes", lambda: 5_000_000_000)
    message = (
        "llama-3.1-8b of 32 layers at 16 bits takes about 20.1 GB, "
        "more than the 5.0 GB that MLX should use on this machine"
    )
    with refusal(message):
        build_workload("llama-3.1-8b", 16, layers=32, acceptance=[[0.7]])
    with refusal(r"llama-3.2-1b has 16 layers, got --layers 17"):
        synthetic.run(parse_flags(synthetic, "--layers", "17"))


def test_synthetic_measures_without_any_download(monkeypatch, tmp_path):
    monkeypatch.setitem(SHAPES, "llama-3.2-1b", SMALL["dense"])
    monkeypatch.setattr(contest, "measure_costs_record", lambda workload: make_costs())
    path = tmp_path / "tiny.jsonl"
    words = "--plans 1,3 --bits 8 --max-tokens 12 --repeats 2 --acceptance 0.8 --output"
    assert synthetic.run(parse_flags(synthetic, *words.split(), str(path))) == 0
    found = [each for each in read_records(path) if each["kind"] == "speed"]
    assert [each["contestant"] for each in found] == ["plain", "mlx-lm", "drafted"]
    assert [each["same_tokens"] for each in found] == [None, True, True]
    assert found[2]["tokens_per_round"] > 1
    assert found[0]["model"] == "llama-3.2-1b, random weights"


def test_synthetic_compares_rollback_with_replay(monkeypatch, tmp_path):
    monkeypatch.setitem(SHAPES, "qwen3.5-9b", SMALL["hybrid"])
    monkeypatch.setattr(contest, "measure_costs_record", lambda workload: make_costs())
    path = tmp_path / "tiny.jsonl"
    words = "--shape qwen3.5-9b --plans 1,3 --acceptance 0.3 --max-tokens 40 --repeats 1 --replay"
    assert synthetic.run(parse_flags(synthetic, *words.split(), "--output", str(path))) == 0
    found = [each for each in read_records(path) if each["kind"] == "speed"]
    labels = [get_label(each) for each in found]
    assert labels == ["plain", "mlx-lm", "1 x 3", "1 x 3, replayed"]
    assert found[2]["plain_steps"] == 0 < found[3]["plain_steps"]  # too many to replay
