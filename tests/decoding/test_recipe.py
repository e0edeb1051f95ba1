"""Decisions about a target and a drafter, and the reason for anything that does not draft."""

import re

import pytest
from mlx_lm.models.cache import make_prompt_cache

from helpers.families import make_family
from helpers.sessions import make_drafter
from helpers.small import small_drafter, small_llama
from mlx_redrafter.decoding.generation import open_generation
from mlx_redrafter.decoding.options import Options
from mlx_redrafter.decoding.recipe import prepare_cache, resolve_recipe
from mlx_redrafter.measuring.pair import Pair
from mlx_redrafter.planning.costs import CostTable

COSTS = CostTable((64,), (1, 2, 4), ((1.0, 3.0, 5.0),), (1.0,), (1,), (1.0,), (0.0, 0.0))


@pytest.mark.parametrize(
    ("options", "notes"),
    [
        ({"plan": "off"}, ["plan is off"]),
        ({"plan": (1, 3)}, ["the context does not draft: a plan is fixed"]),
        ({"plan": (1, 3), "context": True}, []),
        (
            {"context": False},
            ["the context does not draft: it is off", "the drafter does not draft: by its costs"],
        ),
        ({}, ["the drafter does not draft: by its costs"]),
    ],
    ids=str,
)
def test_notes_give_the_reason_for_not_drafting(options, notes, monkeypatch):
    monkeypatch.setattr(Pair, "get_or_measure_costs", lambda self, **_: COSTS)
    pair = Pair(small_llama(), small_drafter())
    found = resolve_recipe(pair, Options(**options), pair.open_source()).notes
    assert len(found) == len(notes)
    assert all(map(str.startswith, found, notes))


def test_notes_name_models_without_trees_or_drafts(monkeypatch):
    cheap = COSTS._replace(verify=((1.0, 1.0, 1.0),), level=(0.01,))
    monkeypatch.setattr(Pair, "get_or_measure_costs", lambda self, **_: cheap)
    chains = make_family("jamba")
    pair = Pair(chains, make_drafter(chains))
    replay, note = resolve_recipe(pair, Options(), pair.open_source()).notes
    assert replay.startswith("accepted tokens are replayed after a rejection: its recurrent layers")
    assert note.startswith(
        "chains, not trees: its cache (ArraysCache) takes tokens one after the other"
    )
    (note,) = resolve_recipe(Pair(make_family("phi3small")), Options()).notes
    assert note.startswith(
        "the context does not draft: cannot draft for phi3small: its block-sparse layers"
    )


@pytest.mark.filterwarnings("ignore:max_kv_size, which mlx-lm ignores")
@pytest.mark.parametrize(
    ("size", "classes", "note"),
    [
        (
            64,
            ((1,),),
            "nothing drafts: no number of rows is known .* in the cache's ring of 64 rows",
        ),
        (200, ((1, 2, 3),), "drafting with --exact ends when the cache's ring of 200 rows"),
    ],
)
def test_notes_name_the_ring_that_limits_exact_drafts(size, classes, note, monkeypatch):
    monkeypatch.setattr(Pair, "get_row_classes", lambda *args, **_: classes)
    pair = Pair(small_llama())
    options = Options(exact=True, max_kv_size=size)
    given = Options(exact=True, prompt_cache=prepare_cache(pair, options))
    assert re.match(note, resolve_recipe(pair, options).notes[0])
    assert re.match(note, resolve_recipe(pair, given).notes[0])


def decode(name: str, **options):
    """Decodes three tokens."""
    own = Options(max_tokens=3, plan="off", **options)
    list(open_generation(Pair(make_family(name)), [1, 2, 3], own))


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("llama", "rings of 16 rows"),
        ("qwen3_5", "rings of 16 rows"),
        ("falcon_h1", r"is ignored: .* \(ArraysCache, KVCache\)"),
        ("mamba2", r"is ignored: .* \(ArraysCache\)"),
    ],
)
def test_max_kv_size_is_never_ignored_in_silence(name, said):
    with pytest.warns(UserWarning, match=said):
        decode(name, max_kv_size=16)
    decode("qwen2", max_kv_size=16)  # as in mlx-lm: warnings are errors here
    decode(name)


def test_max_kv_size_does_not_change_a_given_cache():
    with pytest.warns(UserWarning, match="is ignored"):
        decode("qwen2", max_kv_size=16, prompt_cache=make_prompt_cache(make_family("qwen2")))
