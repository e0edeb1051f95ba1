"""Stateless drafters of every kind: plain decoding's text, the hidden state they read, and their depth."""

from __future__ import annotations

import warnings
from itertools import product

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from cost_curves import make_costs
from families import make_family
from heads import KINDS, make_head
from mlx_lm.models.cache import make_prompt_cache
from small import partial_drafter, small_drafter
from toys import assert_same_cache, assert_same_steps, make_model, make_prompt, run

from mlx_redrafter.drafters.protocol import Drafter, Embed
from mlx_redrafter.engine.beam_search import Advance
from mlx_redrafter.engine.model_parts import find_model_sizes, find_parts
from mlx_redrafter.errors import RedrafterError, UnsupportedModelError
from mlx_redrafter.options import find_default_depth
from mlx_redrafter.planning.acceptance import find_acceptance
from mlx_redrafter.planning.planner import list_candidate_plans

pytestmark = pytest.mark.filterwarnings("ignore:the drafter has guessed no token right")

FEW = 8
"""Small enough that random drafters are often right."""


EVERY_KIND = (*KINDS, "draft vocabulary")


@pytest.mark.parametrize(
    ("name", "kind"),
    [*product(["few tokens"], EVERY_KIND), *zip(("qwen3", "mamba2", "gemma3n") * 2, EVERY_KIND, strict=True)],
)
def test_text_and_cache_equal_plain_decoding(name: str, kind: str) -> None:
    model, accepted = make_model(vocab=FEW) if name == "few tokens" else make_family(name), 0
    hidden, vocab = find_model_sizes(model)
    if kind == "draft vocabulary":
        whole = small_drafter(hidden=hidden, vocab=vocab, exit_dim=2 * hidden)
        drafter = partial_drafter(whole, np.random.default_rng(1).permutation(vocab)[:5])
    else:
        drafter = make_head(kind, hidden, vocab)
    for size, plan, temp in ((5, (3, 3), 0.0), (19, (1, 4), 0.9), (7, (3, 4, 9), 0.9)):
        prompt = make_prompt(size, vocab=min(vocab, 50))
        options = {"max_tokens": 16, "temp": temp, "top_p": 0.95, "seed": 3}
        expected, cache = make_prompt_cache(model), make_prompt_cache(model)
        plain = run(model, prompt, prompt_cache=expected, **options)
        with warnings.catch_warnings(action="ignore"):  # mamba2 takes only chains
            steps = run(model, prompt, drafter, plan=plan, prompt_cache=cache, **options)
        assert_same_steps(steps, plain, tolerance=2e-3)
        assert_same_cache(cache, expected, tolerance=2e-3)
        assert steps[-1].stats.drafted
        accepted += steps[-1].stats.accepted
    assert accepted > 1 or name != "few tokens"


@pytest.mark.parametrize("kind", KINDS)
def test_plans_are_no_deeper_than_the_head(kind: str) -> None:
    model, drafter, depths = make_model(vocab=FEW), make_head(kind, vocab=FEW), []
    prompt, most = make_prompt(9, vocab=FEW), drafter.args.max_depth
    on_round = {"on_round": lambda tree, path, chosen: depths.append(tree.depths.max().item())}
    run(model, prompt, drafter, max_tokens=60, context=False, **on_round)
    assert all(depth <= (most or depth) for depth in depths)
    rows = find_acceptance(drafter)
    # As on a busy machine: six rows seem cheaper than five.
    costs = make_costs("gentle").chains_only()
    costs = costs._replace(verify=tuple((1.0, *[3.0] * 4, 1.01, *[3.0] * 10) for _ in costs.contexts))
    assert {plan.depth for plan in list_candidate_plans(costs, rows)} == ({4} if most else {5})
    assert (rows[-1] == (0.0,), len(rows)) == ((True, 5) if most else (False, 1))
    assert find_default_depth(drafter) == 3
    if most is not None:
        with pytest.raises(RedrafterError, match=f"draft_depth must be from 1 to {most} with this drafter, got 5"):
            run(model, prompt, drafter, plan=(1, 5))


def medusa(model: nn.Module, hidden_state: str) -> Drafter:
    """Medusa heads that read this hidden state."""
    drafter = make_head("medusa", *find_model_sizes(model))
    drafter.args = type(drafter.args).from_dict(drafter.args.to_dict() | {"hidden_state": hidden_state})
    return drafter


@pytest.mark.parametrize("plan", [(1, 3), (3, 2)], ids=str)
@pytest.mark.parametrize("name", ["llama", "gemma3n"])
def test_a_head_is_given_the_state_it_reads(name: str, plan: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    model, prompt = make_family(name), make_prompt(6)
    given: dict[str, list[mx.array]] = {"after_norm": [], "before_norm": []}
    for where, states in given.items():
        drafter = medusa(model, where)
        real = type(drafter).begin

        def begin(self: Drafter, hidden: mx.array, embed: Embed, real=real, states=states) -> Advance:
            states.append(hidden)
            return real(self, hidden, embed)

        with monkeypatch.context() as patch:
            patch.setattr(type(drafter), "begin", begin)
            assert_same_steps(run(model, prompt, drafter, max_tokens=8, plan=plan), run(model, prompt, max_tokens=8))
    parent, child = find_parts(model).final_norm
    norm = parent[child]
    assert len(given["before_norm"]) == len(given["after_norm"]) > 2
    for before, after in zip(given["before_norm"], given["after_norm"], strict=True):
        assert mx.allclose(norm(before), after, atol=1e-3) and not mx.allclose(before, after, atol=1e-1)


def test_states_before_a_norm_without_module_are_refused() -> None:
    model = make_family("nanochat")
    with pytest.raises(UnsupportedModelError, match="reads the hidden state before the final norm"):
        run(model, [1, 2, 3], medusa(model, "before_norm"), max_tokens=4)
