"""Every kind of drafter on small targets: plain decoding's tokens, whatever it drafts; what it is given, how deep."""

from __future__ import annotations

import random
import warnings
from typing import Any

import mlx.core as mx
import pytest
from families import make_family
from heads import KINDS, make_head
from mlx_lm.models.cache import make_prompt_cache
from small import hypotheses, random_advance
from toys import assert_same_cache, assert_same_steps, make_model, make_prompt, run

from mlx_redrafter.drafters.protocol import Advance, Drafter, Embed
from mlx_redrafter.engine.beam_search import search
from mlx_redrafter.engine.supported_models import find_parts, model_sizes
from mlx_redrafter.errors import RedrafterError, UnsupportedModelError
from mlx_redrafter.options import default_depth
from mlx_redrafter.planning.planner import find_acceptance

pytestmark = pytest.mark.filterwarnings("ignore:the drafter has guessed no token right")

FEW = 8
"""A vocabulary so small that random drafters are often right."""

CHOICES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": {"temp": 0.9, "top_p": 0.95, "seed": 3},
}


@pytest.mark.parametrize("plan", [(1, 4), (3, 4, 9)], ids=str)
@pytest.mark.parametrize("choice", CHOICES)
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_gives_the_plain_tokens(kind: str, choice: str, plan: tuple[int, ...]) -> None:
    model, drafter, accepted = make_model(vocab=FEW), make_head(kind, vocab=FEW), 0
    for seed in range(2):
        prompt = make_prompt(7 + seed, vocab=FEW, seed=seed)
        plain = run(model, prompt, max_tokens=24, **CHOICES[choice])
        steps = run(model, prompt, drafter, max_tokens=24, plan=plan, **CHOICES[choice])
        assert_same_steps(steps, plain)
        accepted += steps[-1].stats.accepted
    assert accepted > 1


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["llama", "qwen3", "mamba2", "gemma3n"])
def test_text_and_cache_equal_plain_decoding(name: str, kind: str) -> None:
    model, generator = make_family(name), random.Random(1)
    drafter = make_head(kind, *model_sizes(model))
    for size, plan, temp in ((5, (3, 3), 0.0), (19, (1, 4), 0.9)):
        prompt = [generator.randrange(50) for _ in range(size)]
        options = {"max_tokens": 12, "temp": temp, "seed": 3}
        expected, cache = make_prompt_cache(model), make_prompt_cache(model)
        plain = run(model, prompt, prompt_cache=expected, **options)
        with warnings.catch_warnings(action="ignore"):  # mamba2 takes chains only
            steps = run(model, prompt, drafter, plan=plan, prompt_cache=cache, **options)
        assert_same_steps(steps, plain, tolerance=2e-3)
        assert_same_cache(cache, expected, tolerance=2e-3)
        assert steps[-1].stats.drafted


@pytest.mark.parametrize("kind", KINDS)
def test_planned_drafts_are_no_deeper_than_the_head(kind: str) -> None:
    model, drafter, plans = make_model(vocab=FEW), make_head(kind, vocab=FEW), []
    prompt, most = make_prompt(9, vocab=FEW), drafter.args.max_depth
    plain = run(model, prompt, max_tokens=60)
    on_round = {"on_round": lambda tree, path, chosen: plans.append(int(tree.depths.max().item()))}
    assert_same_steps(run(model, prompt, drafter, max_tokens=60, context=False, **on_round), plain)
    assert all(depth <= (most or depth) for depth in plans)
    rows = find_acceptance(drafter)
    assert (rows[-1] == (0.0,), len(rows)) == ((True, 5) if most else (False, 1))
    assert default_depth(drafter) == 3
    if most is not None:
        with pytest.raises(RedrafterError, match=f"draft_depth must be from 1 to {most} with this drafter, got 5"):
            run(model, prompt, drafter, plan=(1, 5))


def record_states(drafter: Drafter, patch: pytest.MonkeyPatch) -> list[mx.array]:
    """The hidden states that its drafts begin with."""
    given: list[mx.array] = []
    real = type(drafter).begin

    def begin(self: Drafter, hidden: mx.array, embed: Embed) -> Advance:
        given.append(hidden)
        return real(self, hidden, embed)

    patch.setattr(type(drafter), "begin", begin)
    return given


@pytest.mark.parametrize("plan", [(1, 3), (3, 2)], ids=str)
@pytest.mark.parametrize("name", ["llama", "gemma3n"])
def test_a_head_is_given_the_state_it_reads(name: str, plan: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    model, prompt, given = make_family(name), make_prompt(6), {}
    for where in ("after_norm", "before_norm"):
        drafter = make_head("medusa", *model_sizes(model))
        drafter.args = type(drafter.args).from_dict(drafter.args.to_dict() | {"hidden_state": where})
        with monkeypatch.context() as patch:
            given[where] = record_states(drafter, patch)
            assert_same_steps(run(model, prompt, drafter, max_tokens=8, plan=plan), run(model, prompt, max_tokens=8))
    parent, child = find_parts(model).final_norm
    norm = parent[child]
    assert len(given["before_norm"]) == len(given["after_norm"]) > 2
    for before, after in zip(given["before_norm"], given["after_norm"], strict=True):
        assert mx.allclose(norm(before), after, atol=1e-3) and not mx.allclose(before, after, atol=1e-1)


def test_states_before_a_norm_that_is_no_module_are_refused() -> None:
    model = make_family("nanochat")
    drafter = make_head("medusa", *model_sizes(model))
    drafter.args = type(drafter.args).from_dict(drafter.args.to_dict() | {"hidden_state": "before_norm"})
    with pytest.raises(UnsupportedModelError, match="reads the hidden state before the final norm"):
        run(model, [1, 2, 3], drafter, max_tokens=4)


def test_beams_carry_any_tree_of_states() -> None:
    flat = random_advance(0, 50)

    def nested(tokens: mx.array, state: Any) -> tuple[mx.array, Any]:
        before = None if state is None else state["last"][1]
        logits, after = flat(tokens, before)
        depth = 0 if state is None else state["depth"] + 1
        return logits, {"depth": depth, "last": (tokens, after)}

    assert hypotheses(search(nested, mx.array(5), 4, 5)) == hypotheses(search(flat, mx.array(5), 4, 5))
