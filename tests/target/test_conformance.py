"""Text and cache are the same with and without a drafter, for each supported mlx-lm module."""

import copy
import random
import warnings
from functools import partial
from importlib import import_module

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.models.cache import KVCache, RotatingKVCache, make_prompt_cache
from supported import METAL_ONLY, PAGE, SEPARATE, insert_table, rows

from helpers.families import CONFIGS, WIDE_STREAMS, make_family, modules
from helpers.grids import pairs
from helpers.small import make_tree
from helpers.toys import (
    CachingDrafter,
    ScriptedContext,
    assert_same_cache,
    assert_same_steps,
    decode_steps,
    ids,
    make_follower,
    record_hidden_states,
    run,
)
from mlx_redrafter.decoding import recipe
from mlx_redrafter.decoding.options import Options
from mlx_redrafter.drafters.recurrent import Drafter, DrafterArgs
from mlx_redrafter.engine.output import DecodedToken
from mlx_redrafter.engine.plan import MAX_REPLAY
from mlx_redrafter.errors import UnsupportedModelError
from mlx_redrafter.measuring.pair import Pair
from mlx_redrafter.target import kv_cache
from mlx_redrafter.target.model_checks import check_draftable, make_cache
from mlx_redrafter.target.model_parts import get_model_sizes
from mlx_redrafter.target.supported_models import (
    CHAINS,
    NO_RINGS,
    REFUSED,
    REPLAYED,
    TREES,
)
from mlx_redrafter.target.target import Target

RUNNING = sorted({*TREES, *REPLAYED, *CHAINS})
CLOSE = 2e-3
"""Tolerance of log-probabilities and cache rows in float32, with logits that span about ten."""

pytestmark = pytest.mark.filterwarnings("ignore:the drafter has guessed no token right")


def decode_recorded(
    model: nn.Module, prompt: list[int], count: int, more: int, **options
) -> tuple[list[DecodedToken], list[int], list[mx.array], kv_cache.Cache]:
    """Decodes plainly.

    Returns:
        (`count` steps, all tokens with `more` further ones, their hidden states, the cache after
        `count` steps).
    """
    cache = options.pop("prompt_cache", None) or make_prompt_cache(model)
    steps = []
    with record_hidden_states(model) as recorded:
        plain = Options(prompt_cache=cache, max_tokens=count + more, context=False, **options)
        for step in decode_steps(prompt, model, None, plain):
            steps.append(step)
            if len(steps) == count:
                after = copy.deepcopy(cache)
                mx.eval([c.state for c in after])
    return steps[:count], prompt + ids(steps), recorded, after


def test_every_module_is_in_exactly_one_list():
    """Modules of newer mlx-lm versions are in no list; docs/models.md shows them as untested."""
    lists = [*TREES, *REPLAYED, *CHAINS, *REFUSED, *METAL_ONLY]
    assert len(lists) == len(set(lists))
    assert set(lists) == set(CONFIGS)
    assert set(lists) <= set(modules())
    assert len(RUNNING) >= 110
    assert len(TREES) >= 85


def test_docs_list_every_module():
    text = PAGE.read_text(encoding="utf-8")
    assert insert_table(text) == text, "run python tests/supported.py"
    assert {name for name, mode, _ in rows() if mode == "trees"} == set(TREES)


@pytest.mark.parametrize("name", RUNNING)
def test_text_and_cache_equal_plain_decoding(name, monkeypatch):
    model = make_family(name)
    is_hybrid = bool(kv_cache.list_unknown_types(make_prompt_cache(model), kv_cache.TRIMMABLE))
    vocab = min(64, model(mx.zeros((1, 1), mx.int32)).shape[-1])
    generator = random.Random(1)
    # (prompt, tokens, options, [(script, W, K)]): prompts shorter and longer than windows and
    # chunks of 8.
    scripts_of_long = [("right", 2, 3), ("wrong", 1, 4), ("caching", 2, 3)]
    cases = [
        (3, 11, {"temp": 0.9}, [("mixed", 2, 3)]),
        (19, 12, {"temp": 0.0, "prefill_step_size": 7}, scripts_of_long),
        (7, 8, {"temp": 0.7}, [("random", 2, 3)]),
    ]
    if is_hybrid:
        cases.append((5, 8, {"temp": 0.9}, [("mixed", 1, 3)]))
    for size, count, options, scripts in cases:
        prompt = [generator.randrange(vocab) for _ in range(size)]
        options["seed"] = 3
        plain, tokens, recorded, expected = decode_recorded(model, prompt, count, 4, **options)
        for script, width, depth in scripts:
            case = (name, size, script, width, options)
            if script == "caching":
                captured = () if name in WIDE_STREAMS else (0,)
                own_width = width if name in TREES else 1
                drafter = CachingDrafter(model, tokens, own_width, layers=captured)
            elif script == "random":
                sizes = get_model_sizes(model)
                drafter = Drafter(DrafterArgs(*sizes, exit_dim=16, num_draft_layers=1))
            else:
                drafter = make_follower(model, tokens, recorded, script, width)
            decode = partial(run, model, prompt, max_tokens=count, plan=(width, depth), **options)
            cache = make_prompt_cache(model)
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                steps = decode(drafter, prompt_cache=cache)
            assert_same_steps(steps, plain, tolerance=CLOSE)
            assert_same_cache(cache, expected, tolerance=CLOSE)
            messages = [str(each.message) for each in caught]
            assert bool(messages) is (width > 1 and name not in TREES), (case, messages)
            stats = steps[-1].stats
            assert 1 + stats.rounds + stats.accepted == count, case
            # A cache without states that takes trees does not depend on the kind of drafter.
            for alone in [True, False] if is_hybrid or script == "mixed" else []:
                monkeypatch.setattr(recipe, "ContextSource", partial(ScriptedContext, tokens))
                cache = make_prompt_cache(model)
                with warnings.catch_warnings(action="ignore"):
                    steps = decode(None if alone else drafter, prompt_cache=cache, context=True)
                assert_same_steps(steps, plain, tolerance=CLOSE)
                assert_same_cache(cache, expected, tolerance=CLOSE)
                assert steps[-1].stats.context_drafted
                assert steps[-1].stats.context_accepted or not alone
                assert not steps[-1].stats.replayed or name in REPLAYED
            if script == "caching":
                assert stats.accepted > 2, (case, "its rows did not match the text")
            if script == "right":
                assert stats.tokens_per_round > 3 and not stats.replayed, case
            if script == "wrong":
                assert stats.accepted == 0, case
                assert bool(stats.replayed) is bool(stats.plain_steps) is (name in REPLAYED), case
                assert stats.replayed <= stats.rounds * (MAX_REPLAY + 1)
            assert not stats.replayed or name in REPLAYED, case


@pytest.mark.parametrize("name", RUNNING)
def test_texts_share_a_forward_or_a_reason_says_why(name):
    reason = Pair(make_family(name)).explain_separate()
    assert bool(reason) is (name in SEPARATE), reason


@pytest.mark.parametrize("name", sorted(set(REFUSED) & {"phi3small"}))
def test_refused_by_name_and_reason(name):
    with pytest.raises(UnsupportedModelError, match=f"cannot draft for {name}: .*"):
        check_draftable(make_family(name), tree=False)


@pytest.mark.parametrize(("size", "width", "keep"), pairs((3, 15, 40), (1, 2), (0, 4)))
def test_ring_buffers_work_as_a_prompt_cache(keep, width, size):
    """Ring buffers of 12 rows; with `max_kv_size` they keep the first 4."""
    model = make_family("qwen2")
    prompt = [(7 * i + 3) % 50 for i in range(size)]

    def rings() -> list[RotatingKVCache]:
        return [RotatingKVCache(12, keep=keep) for _ in model.layers]

    plain, tokens, recorded, expected = decode_recorded(model, prompt, 30, 6, prompt_cache=rings())
    drafter = make_follower(model, tokens, recorded, "mixed", width)
    cache = rings()
    steps = run(model, prompt, drafter, max_tokens=30, prompt_cache=cache, plan=(width, 4))
    assert_same_steps(steps, plain, tolerance=CLOSE)
    assert_same_cache(cache, expected, tolerance=CLOSE)
    assert steps[-1].stats.accepted > 5


def makes_caches(name: str) -> bool:
    """Whether a module's models make their own prompt caches."""
    return hasattr(import_module(f"mlx_lm.models.{name}").Model, "make_cache")


@pytest.mark.parametrize("name", filter(makes_caches, RUNNING))
def test_max_kv_size_makes_rings_of_layers_that_keep_every_row(name):
    """mlx-lm ignores it for these models.

    Other layers keep their own caches, and drafts stay exact.
    """
    model = make_family(name)
    prompt = [(7 * i + 3) % 50 for i in range(15)]
    width = 2 if name in TREES else 1
    own = make_prompt_cache(model)
    cache = make_cache(model, 12)
    kept = [type(c) is KVCache and name not in NO_RINGS for c in own]
    for c, other, is_ring in zip(cache, own, kept, strict=True):
        assert is_ring is (isinstance(c, RotatingKVCache) and (c.max_size, c.keep) == (12, 4))
        assert is_ring or type(c) is type(other)
    if not any(kept):
        return
    rings = make_cache(model, 12)
    plain, tokens, recorded, expected = decode_recorded(model, prompt, 20, 6, prompt_cache=rings)
    drafter = make_follower(model, tokens, recorded, "mixed", width)
    steps = run(model, prompt, drafter, max_tokens=20, prompt_cache=cache, plan=(width, 4))
    assert_same_steps(steps, plain, tolerance=CLOSE)
    assert_same_cache(cache, expected, tolerance=CLOSE)
    assert steps[-1].stats.accepted > 3
    used = [c for c, is_ring in zip(cache, kept, strict=True) if is_ring and c.keys is not None]
    # Only the rows of the last forward may exceed the ring.
    assert used
    assert max(c.keys.shape[-2] for c in used) < 12 + len(prompt)


@pytest.mark.parametrize("name", RUNNING)
def test_a_quantized_cache_gives_the_plain_text(name):
    """Quantized from the 14th token on, in the middle of a round."""
    model = make_family(name)
    count = 14
    options = {"kv_bits": 8, "kv_group_size": 32, "quantized_kv_start": 14}
    prompt = [(5 * i + 2) % 50 for i in range(9)]
    try:
        plain, tokens, recorded, _ = decode_recorded(model, prompt, count, 5, seed=3, **options)
    except Exception as error:  # mlx-lm's models raise various errors for a quantized cache
        pytest.skip(f"mlx-lm cannot quantize this model's cache: {type(error).__name__}")
    width = 2 if name in TREES else 1
    drafter = make_follower(model, tokens, recorded, "mixed", width)
    cache = make_prompt_cache(model)
    options |= {
        "max_tokens": count,
        "prompt_cache": cache,
        "plan": (width, 3),
        "seed": 3,
    }
    assert ids(run(model, prompt, drafter, **options)) == ids(plain)
    # Every quantizable layer is quantized.
    assert not [c for c in cache if type(c) is KVCache and c.keys is not None]


@pytest.mark.parametrize("name", sorted(TREES))
def test_every_node_sees_only_its_path(name, monkeypatch):
    """After prefixes within and beyond windows and chunks of 8.

    Trees across their edges; kept and rejected nodes.
    """
    # It rounds keys and values to 8 bits: a difference of 1e-6 may become one of 0.1.
    monkeypatch.setattr("mlx_lm.models.afm7.fake_8bit_quant", lambda x, scale: x)
    model = make_family(name)
    vocab = min(64, model(mx.zeros((1, 1), mx.int32)).shape[-1])
    generator = random.Random(2)
    for size in (1, 6, 13, 46):
        parents = [0] + [generator.randrange(max(0, node - 4), node) for node in range(1, 10)]
        tree = make_tree([generator.randrange(vocab) for _ in parents], parents)
        target = Target(model, rolls_back=True)
        prompt = mx.array([generator.randrange(vocab) for _ in range(size)])
        target.forward(prompt, want_hidden=False)
        target.evaluate()
        # the cache of the prefix, then the cache after each node
        caches = [target.cache]
        expected = []
        for node, token in enumerate(tree.tokens.tolist()):
            caches.append(copy.deepcopy(caches[parents[node] + 1 if node else 0]))
            expected.append(model(mx.array([[token]]), cache=caches[-1])[0, -1])
        together = target.verify(tree, is_tree=True).logits
        far = mx.abs(together - mx.stack(expected)).max(axis=1)
        assert far.max().item() < CLOSE, (name, size, far)
