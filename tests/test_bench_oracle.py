"""Drafts are right as often as is asked for, and what is measured with them is the engine's own text."""

from __future__ import annotations

import argparse
import math
from typing import Any, cast

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten

from benchmarks import building
from benchmarks.building import build, check_memory, make_target, weight_bytes
from benchmarks.oracle import Oracle, acceptance_of
from benchmarks.subject import Subject
from benchmarks.synthetic import add_arguments, asked
from benchmarks.targets import TARGETS, Experts, TargetShape, target_of
from mlx_redrafter.engine.plan import Plan
from mlx_redrafter.engine.stats import Stats
from mlx_redrafter.errors import RedrafterError
from mlx_redrafter.generate import decode_tokens
from mlx_redrafter.options import Options
from mlx_redrafter.planning.planner import Acceptance, expected_tokens
from tests.small import small_drafter, small_llama

V = 512


def decoded(found: Subject, plan: Any, count: int) -> tuple[list[int], Stats]:
    """The tokens of a subject's first prompt, and its rounds; without a plan, of plain decoding."""
    drafter = None if plan is None else found.drafter
    options = Options(plan="off" if plan is None else plan, max_tokens=count, sampler=found.sampler)
    steps = list(decode_tokens(found.prompts[0].ids, found.model, drafter, options))
    return [step.token for step in steps], steps[-1].stats


def rounds_of(acceptance: Acceptance, plan: tuple[int, ...], count: int) -> Stats:
    model, drafter = small_llama(vocab=V, layers=1), small_drafter(vocab=V)
    options = Options(plan=plan, max_tokens=count, sampler=Oracle(acceptance))
    *_, last = decode_tokens([1, 2, 3], model, drafter, options)
    return last.stats


@pytest.mark.parametrize(
    ("acceptance", "plan"),
    [
        ([[0.7]], (1, 3)),
        ([[0.9], [0.5], [0.2]], (1, 4)),
        ([[0.6, 0.2, 0.1]], (2, 3)),
        ([[0.5, 0.25, 0.1]], (4, 2)),
        ([[0.6, 0.2, 0.1]], (3, 3, 6)),
    ],
)
def test_tokens_per_round_are_those_that_the_planner_expects(acceptance: Acceptance, plan: tuple[int, ...]) -> None:
    width, depth, *size = plan
    expected = expected_tokens(acceptance, Plan(width, depth, size[0] if size else 1 + width * depth))
    stats = rounds_of(acceptance, plan, 400)
    # A round keeps 0 to K drafted tokens, so its deviation is K / 2 at most; three standard errors are allowed.
    allowed = 3 * depth / 2 / math.sqrt(stats.rounds)
    assert abs(stats.tokens_per_round - expected) < min(allowed, 0.25), (stats.tokens_per_round, expected)


def test_a_drafter_that_is_always_right_or_never_is_so() -> None:
    always, never = rounds_of([[1.0]], (1, 3), 41), rounds_of([[0.0]], (2, 2), 41)
    assert always.tokens_per_round == 4.0 and always.acceptance_per_depth == (1.0, 1.0, 1.0)
    assert never.tokens_per_round == 1.0 and never.accepted == 0


def test_another_seed_draws_anew_and_the_same_seed_does_not() -> None:
    model, drafter = small_llama(vocab=V, layers=1), small_drafter(vocab=V)
    kept = []
    for seed in (0, 0, 1):
        options = Options(plan=(1, 3), max_tokens=30, sampler=Oracle([[0.5]], seed))
        kept.append([step.from_draft for step in decode_tokens([1, 2], model, drafter, options)])
    assert kept[0] == kept[1] != kept[2]


@pytest.mark.parametrize(
    ("text", "chances"), [("1", [1, 0, 0, 0]), ("0", [0, 0, 0, 0]), ("0.5,0.3", [0.5, 0.3]), ("0.6,0.3,0.1", None)]
)
def test_an_acceptance_is_read(text: str, chances: list[float] | None) -> None:
    found = acceptance_of(text)
    Oracle(found)
    if chances is not None:
        assert list(found[0]) == chances


def test_one_chance_alone_brings_the_others_as_often_of_its_misses() -> None:
    for chance in (0.4, 0.7, 0.95):
        ((first, *others),) = acceptance_of(str(chance))
        assert first == chance
        assert others == pytest.approx([(1 - chance) * other / 0.4 for other in (0.1, 0.05, 0.03)])
    ((first, second, *_),) = acceptance_of("0.1")
    assert second == first, "no other guess is right more often"


@pytest.mark.parametrize("text", ["nan", "1.2", "-0.1", "inf", "0.7,0.4", "0.5,nan"])
def test_what_are_no_chances_is_refused(text: str) -> None:
    with pytest.raises(RedrafterError, match="chances of ranks that add up to 1 at most, got"):
        Oracle(acceptance_of(text))


@pytest.mark.parametrize("text", ["", "a", "0.5;0.2", "0.5,"])
def test_what_are_no_numbers_is_refused(text: str) -> None:
    with pytest.raises(RedrafterError, match="a chance, or one for each rank"):
        acceptance_of(text)


def test_an_empty_acceptance_and_a_vocabulary_without_wrong_guesses_are_refused() -> None:
    with pytest.raises(RedrafterError, match="got \\[\\]"):
        Oracle([[]])
    with pytest.raises(RedrafterError, match="at least 5 tokens, got 4"):
        Oracle([[0.5, 0.2, 0.1]]).check(4)


DENSE = TargetShape("dense", "llama", 64, 2, 128, 4, 2, 16, V, True)
SHAPES = {
    "dense": DENSE,
    "untied": DENSE._replace(tie_word_embeddings=False),
    "qwen3": DENSE._replace(model_type="qwen3"),
    "gemma3_text": DENSE._replace(model_type="gemma3_text"),
    "mixture": DENSE._replace(model_type="qwen3_moe", tie_word_embeddings=False, experts=Experts(4, 2, 64)),
}


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("bits", [32, 8, 4])
def test_a_built_pair_says_the_same_with_and_without_drafts(name: str, bits: int) -> None:
    found = build(SHAPES[name], bits, "float32", layers=2, acceptance="0.6", drafter_bits=8 if bits == 4 else None)
    plain, _ = decoded(found, None, 14)
    assert len(set(plain)) == 14, "the text goes through the vocabulary"
    for plan in ((1, 3), (2, 2)):
        tokens, stats = decoded(found, plan, 14)
        assert tokens == plain and stats.accepted > 0
    assert found.drafter is not None and found.drafter.args.acceptance is not None
    assert all(mx.isfinite(x).all() for _, x in arrays(found.model) if mx.issubdtype(x.dtype, mx.floating))


def arrays(model: Any) -> list[tuple[str, mx.array]]:
    return cast(list[tuple[str, mx.array]], tree_flatten(model.parameters()))


def test_the_layers_that_are_left_out_are_named() -> None:
    found = build(DENSE, 32, "float32", layers=1)
    assert found.name == "dense, random weights, 1 of 2 layers" and len(found.model.layers) == 1
    assert found.drafter_name == "oracle, acceptance 0.7,0.075,0.0375,0.0225"
    assert build(DENSE, 32, "float32", layers=2).name == "dense, random weights"


@pytest.mark.parametrize("shape", TARGETS, ids=[each.name for each in TARGETS])
def test_mlx_lm_takes_every_published_shape_and_its_size_is_right(
    shape: TargetShape, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(building.mx, "eval", lambda *arrays: None)  # nothing is computed, and no memory taken
    model = make_target(shape, 16, mx.bfloat16)
    total = sum(x.size for _, x in arrays(model))
    matrices = sum(x.size for _, x in arrays(model) if x.ndim > 1)
    assert matrices == shape.n_weights, "it has a head of its own only where the published one has"
    assert total < 1.001 * shape.n_weights
    assert len(model.layers) == shape.num_hidden_layers


def test_a_mixtures_gate_keeps_the_bits_that_mlx_lm_gives_it() -> None:
    model = make_target(SHAPES["mixture"], 4, mx.float32)
    bits = {name.rpartition(".")[2]: each.bits for name, each in model.named_modules() if hasattr(each, "bits")}
    assert bits["gate"] == 8 and bits["q_proj"] == 4 and bits["embed_tokens"] == 4


def test_what_does_not_fit_is_refused_with_both_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = target_of("llama-3.1-8b")
    assert weight_bytes(shape, 4, 32) == pytest.approx(8.03e9 * 4.5 / 8, rel=0.01)
    monkeypatch.setattr(building, "describe_machine", lambda: {"memory_gb": 5.0})
    with pytest.raises(RedrafterError, match=r"llama-3.1-8b of 32 layers at 4 bits takes about 5.6 GB.* has 5.0 GB"):
        check_memory(shape, 4, 32)
    check_memory(shape, 4, 16)
    monkeypatch.setattr(building, "describe_machine", lambda: {"memory_gb": None})
    check_memory(shape, 32, 32)


@pytest.mark.parametrize(
    ("flags", "found"),
    [
        ("--quick", (2, 32, "float32")),
        ("--layers 3 --bits 4", (3, 4, "float32")),
        ("--bits 16", (16, 16, "bfloat16")),
        ("--dtype float16 --bits 16", (16, 16, "float16")),
    ],
)
def test_on_a_cpu_float32_is_what_is_not_asked_for(flags: str, found: tuple[int, int, str]) -> None:
    if mx.default_device().type != mx.cpu:
        pytest.skip("a GPU has other defaults")
    assert asked(flagged(flags))[1:] == found


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--shape nope", "no shape is called 'nope': there are llama-3.2-1b"),
        ("--layers 17", "llama-3.2-1b has 16 layers, got --layers 17"),
        ("--bits 32 --dtype float16", "32 bits that are not quantized need another --dtype than float16"),
    ],
)
def test_flags_that_contradict_each_other_are_refused(flags: str, message: str) -> None:
    with pytest.raises(RedrafterError, match=message):
        asked(flagged(flags))


def flagged(flags: str) -> Any:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return parser.parse_args(flags.split())
