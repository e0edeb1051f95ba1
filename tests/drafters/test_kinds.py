"""Every kind of head: plain decoding's text and cache, plans no deeper than the head, and the state
it reads.
"""

import functools
import warnings
from itertools import product
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx_lm.models.cache import make_prompt_cache

from helpers.assistants import ASSISTANT_KINDS, TARGETS, make_assistant, make_gemma4
from helpers.cached import BLOCK_KINDS, CACHED_KINDS, make_cached
from helpers.cost_curves import make_costs
from helpers.families import make_family
from helpers.heads import KINDS, make_head
from helpers.refusals import refusal
from helpers.small import partial_drafter, small_drafter
from helpers.toys import assert_same_cache, assert_same_steps, ids, make_model, make_prompt, run
from mlx_redrafter.decoding.options import get_default_depth
from mlx_redrafter.drafters.protocol import Drafter
from mlx_redrafter.engine.output import DecodedToken
from mlx_redrafter.errors import UnsupportedModelError
from mlx_redrafter.planning.acceptance import get_acceptance, scale_rates
from mlx_redrafter.planning.auto_planner import list_candidate_plans
from mlx_redrafter.target.model_parts import get_model_sizes, get_parts

pytestmark = pytest.mark.filterwarnings("ignore:the drafter has guessed no token right")

FEW = 8
"""Small enough that random drafters are often right."""

EVERY_KIND = (*CACHED_KINDS, *KINDS, "draft vocabulary")

FAMILIES = ("qwen3", "gemma3_text", "qwen3_next", "mamba2", "gpt_oss")

OF_HYBRIDS = {
    "qwen3_next": "mtp qwen3_next",
    "qwen3_5": "mtp qwen3_5",
    "falcon_h1": "dflash",
    "lfm2": "dflash 2",
}


def make_drafter(kind: str, model) -> Drafter:
    """A random head for a model."""
    if kind in ASSISTANT_KINDS:
        return make_assistant(kind, model)
    hidden, vocab = get_model_sizes(model)
    if kind == "draft vocabulary":
        whole = small_drafter(hidden=hidden, vocab=vocab, exit_dim=2 * hidden)
        return partial_drafter(whole, np.random.default_rng(1).permutation(vocab)[:5])
    if kind in KINDS:
        return make_head(kind, hidden, vocab)
    return make_cached(kind, hidden, vocab, layers=len(model.layers))


@functools.cache
def find_model(name: str):
    """A family's model, or one with few tokens."""
    family = name.removesuffix(" of few tokens")
    if family in TARGETS:
        return make_gemma4(family, None if family == name else FEW)
    if name == "few tokens":
        return make_model(vocab=FEW)
    return make_family(family, **({} if family == name else {"vocab_size": FEW}))


@functools.cache
def decode_plainly(
    name: str, size: int, temp: float
) -> tuple[list[int], dict[str, Any], list[DecodedToken], Any]:
    """(prompt, options, plain steps, the cache after them) of a model, the same for all heads."""
    model = find_model(name)
    prompt = make_prompt(size, vocab=min(50, get_model_sizes(model)[1]))
    expected = make_prompt_cache(model)
    count = 24 if name.endswith("few tokens") else 16
    options = {
        "max_tokens": count,
        "temp": temp,
        "top_p": 0.95,
        "seed": 3,
        "prefill_step_size": 8,
    }
    return prompt, options, run(model, prompt, prompt_cache=expected, **options), expected


@pytest.mark.parametrize(
    ("name", "kind"),
    [*product(["few tokens"], EVERY_KIND)]
    + [(name, kind) for at, name in enumerate(FAMILIES) for kind in CACHED_KINDS[at % 3 :: 3]]
    + [(f"{name} of few tokens", kind) for name, kind in OF_HYBRIDS.items()]
    + [*zip(("qwen3", "mamba2", "gemma3n"), (*KINDS, "draft vocabulary"), strict=True)]
    + [(f"{name} of few tokens", kind) for name, kind in product(TARGETS, ASSISTANT_KINDS)]
    + [*zip(TARGETS, (*ASSISTANT_KINDS, ASSISTANT_KINDS[1]), strict=True)],
)
def test_text_and_cache_equal_plain_decoding(name, kind):
    model = find_model(name)
    accepted = 0
    drafter = make_drafter(kind, model)
    for size, plan, temp in ((5, (3, 3), 0.0), (19, (1, 4), 0.9), (7, (3, 4, 9), 0.9)):
        prompt, options, plain, expected = decode_plainly(name, size, temp)
        for context in (False, True) if name.endswith("few tokens") else (size == 19,):
            cache = make_prompt_cache(model)
            with warnings.catch_warnings(action="ignore"):  # some draft only chains
                steps = run(
                    model,
                    prompt,
                    drafter,
                    plan=plan,
                    prompt_cache=cache,
                    context=context,
                    **options,
                )
            assert_same_steps(steps, plain, tolerance=2e-3)
            assert_same_cache(cache, expected, tolerance=2e-3)
            assert steps[-1].stats.drafted
            accepted += steps[-1].stats.accepted
    assert accepted > 1 or not name.endswith("few tokens")


@pytest.mark.parametrize("kind", [*KINDS, *BLOCK_KINDS])
def test_plans_are_no_deeper_than_the_head(kind):
    model = find_model("few tokens")
    depths = [0]
    drafter = make_drafter(kind, model)
    prompt = make_prompt(9, vocab=FEW)
    most = drafter.args.max_depth
    on_round = {"on_round": lambda tree, path, chosen: depths.append(tree.depths.max().item())}
    steps = run(model, prompt, drafter, max_tokens=60, context=False, **on_round)
    assert ids(steps) == ids(run(model, prompt, max_tokens=60))
    costs = make_costs("flat")._replace(level=(1e-3,) * 3, first=(0.1,) * 3)
    table = tuple(scale_rates(row, 1.5) for row in get_acceptance(drafter))
    deepest = max(plan.depth for plan in list_candidate_plans(costs, table))
    assert get_default_depth(drafter) == min(3, most or 3)
    if most is None:
        assert deepest > 6
        return
    assert max(depths) <= most
    assert deepest == most
    run(model, prompt, drafter, max_tokens=8, plan=(1, most))
    with refusal(f"from 1 to {most} .*, got {most + 1}"):
        run(model, prompt, drafter, plan=(1, most + 1))


def medusa(model: nn.Module, hidden_state: str) -> Drafter:
    """Medusa heads that read this hidden state."""
    drafter = make_head("medusa", *get_model_sizes(model))
    drafter.args = type(drafter.args).from_dict(
        drafter.args.to_dict() | {"hidden_state": hidden_state}
    )
    return drafter


@pytest.mark.parametrize("plan", [(1, 3), (3, 2)], ids=str)
@pytest.mark.parametrize("name", ["llama", "gemma3n"])
def test_a_head_is_given_the_state_it_reads(name, plan, monkeypatch):
    model = find_model(name)
    prompt = make_prompt(6)
    given = {"after_norm": [], "before_norm": []}
    for where, states in given.items():
        drafter = medusa(model, where)
        real = type(drafter).begin

        def begin(self, hidden, embed, real=real, states=states):
            states.append(hidden)
            return real(self, hidden, embed)

        with monkeypatch.context() as patch:
            patch.setattr(type(drafter), "begin", begin)
            assert_same_steps(
                run(model, prompt, drafter, max_tokens=8, plan=plan),
                run(model, prompt, max_tokens=8),
            )
    parent, child = get_parts(model).final_norm
    norm = parent[child]
    assert len(given["before_norm"]) == len(given["after_norm"]) > 2
    for before, after in zip(given["before_norm"], given["after_norm"], strict=True):
        assert mx.allclose(norm(before), after, atol=1e-3)
        assert not mx.allclose(before, after, atol=1e-1)


def test_states_before_a_norm_without_module_are_refused():
    model = make_family("nanochat")
    with pytest.raises(UnsupportedModelError, match="before the final norm"):
        run(model, [1, 2, 3], medusa(model, "before_norm"), max_tokens=4)
