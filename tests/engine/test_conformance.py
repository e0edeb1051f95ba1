"""Every module of mlx-lm, as `served.py` says: with a drafter a text is what it is without one, and so is the cache."""

from __future__ import annotations

import copy
import random
import warnings
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from families import CONFIGS, Follower, contents, make_family, modules, overheard, planted, read_again, script
from mlx_lm.generate import generate_step as mlx_lm_generate_step
from mlx_lm.models.cache import KVCache, RotatingKVCache, make_prompt_cache
from supported import README, placed, rows

from mlx_redrafter.drafters.recurrent import Drafter, DrafterArgs
from mlx_redrafter.engine.plan import MAX_REPLAY
from mlx_redrafter.engine.supported_models import (
    CHAINS,
    METAL_ONLY,
    REFUSED,
    REPLAYED,
    TREES,
    check_draftable,
    model_sizes,
)
from mlx_redrafter.engine.target import Target
from mlx_redrafter.errors import RedrafterError, UnsupportedModelError
from mlx_redrafter.generate import Step, decode_tokens
from mlx_redrafter.options import Options

RUNNING = sorted(TREES | REPLAYED | set(CHAINS))
CLOSE = 2e-3
"""How far log-probabilities and cache rows may be apart in float32: logits spread over about ten."""

pytestmark = pytest.mark.filterwarnings("ignore:the drafter has guessed no token right")


def run(model: nn.Module, prompt: list[int], drafter: Any = None, **options: Any) -> tuple[list[Step], list[str], Any]:
    """(steps, warnings, the cache afterwards)."""
    cache = options.pop("prompt_cache", None) or make_prompt_cache(model)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        steps = list(decode_tokens(prompt, model, drafter, Options(prompt_cache=cache, **options)))
    return steps, [str(each.message) for each in said if "guessed no token" not in str(each.message)], cache


def run_on(
    model: nn.Module, prompt: list[int], count: int, more: int, **options: Any
) -> tuple[list[Step], list[int], list[mx.array], list[mx.array]]:
    """Plain decoding: (`count` steps, the text with `more` tokens behind them, its hidden states, the cache then)."""
    cache = make_prompt_cache(model)
    steps, held = [], []
    with overheard(model) as heard:
        for step in decode_tokens(prompt, model, None, Options(prompt_cache=cache, max_tokens=count + more, **options)):
            steps.append(step)
            if len(steps) == count:
                held = [mx.array(x) for x in contents(cache)]  # handles of their own: some caches write in place
                mx.eval(held)
    return steps[:count], prompt + [step.token for step in steps], heard, held


def test_every_module_of_mlx_lm_is_in_exactly_one_list() -> None:
    """A module of a newer mlx-lm is in none, and stands in the README as untested."""
    lists = [*TREES, *REPLAYED, *CHAINS, *REFUSED, *METAL_ONLY]
    assert len(lists) == len(set(lists))
    assert set(lists) == set(CONFIGS)
    assert set(lists) <= set(modules())


def test_the_readme_lists_every_module_as_it_is_served() -> None:
    text = README.read_text(encoding="utf-8")
    assert placed(text) == text, "python tests/supported.py writes it anew"
    assert {name for name, mode, _ in rows() if mode == "trees"} == TREES


def test_most_modules_are_served_and_most_of_them_with_trees() -> None:
    assert len(RUNNING) >= 110 and len(TREES) >= 85


@pytest.mark.parametrize("name", RUNNING)
def test_a_text_and_its_cache_are_what_they_are_without_a_drafter(name: str) -> None:
    model = make_family(name)
    spread = min(64, model(mx.zeros((1, 1), mx.int32)).shape[-1])
    generator = random.Random(1)
    # (prompt, script, W, K, temperature, tokens, options): prompts shorter and longer than windows and chunks of 8.
    cases: list[tuple[int, str, int, int, float, int, dict[str, Any]]] = [
        (3, "half", 2, 3, 0.9, 18, {}),
        (19, "right", 2, 3, 0.0, 12, {"prefill_step_size": 7}),
        (11, "wrong", 1, 4, 0.0, 14, {}),
        (7, "random", 2, 3, 0.7, 8, {}),
    ]
    for size, kind, width, depth, temp, count, more in cases:
        prompt = [generator.randrange(spread) for _ in range(size)]
        options = {"temp": temp, "seed": 3, **more}
        plain, text, heard, held = run_on(model, prompt, count, 0 if kind == "random" else depth + 2, **options)
        if kind == "random":
            drafter: Any = Drafter(DrafterArgs(*model_sizes(model), exit_dim=16, num_draft_layers=1))
        else:
            drafter = Follower(model, text, heard, script(kind, len(text), width), width)
        beam = {"beam_width": width, "draft_depth": depth}
        drafted, said, after = run(model, prompt, drafter, max_tokens=count, **beam, **options)
        case = (name, size, kind, width, temp)
        assert [step.token for step in drafted] == [step.token for step in plain], case
        for one, other in zip(drafted, plain, strict=True):
            assert mx.abs(one.logprobs - other.logprobs).max().item() < CLOSE, case  # type: ignore[operator]
        for one, other in zip(contents(after), held, strict=True):
            assert one.shape == other.shape and mx.allclose(one, other, atol=CLOSE, rtol=CLOSE), case
        stats = drafted[-1].stats
        assert bool(said) is (width > 1 and name not in TREES), said
        if kind == "right":
            assert stats.tokens_per_round > 3 and not stats.replayed, case
        if kind == "wrong":
            assert stats.accepted == 0 and bool(stats.replayed) is bool(stats.plain_steps) is (name in REPLAYED), case
            assert stats.replayed <= stats.rounds * (MAX_REPLAY + 1)


@pytest.mark.parametrize("name", sorted(set(REFUSED) & {"phi3small"}))
def test_what_would_be_wrong_is_refused_by_name_and_reason(name: str) -> None:
    model = make_family(name)
    with pytest.raises(UnsupportedModelError, match=f"cannot draft for {name}: .*"):
        check_draftable(model, tree=False)


@pytest.mark.parametrize("keep", [0, 4])
@pytest.mark.parametrize("width", [1, 2])
@pytest.mark.parametrize("size", [3, 15, 40])
def test_rings_may_be_given_as_a_prompt_cache(keep: int, width: int, size: int) -> None:
    """What `--max-kv-size` makes: rings of 12 rows, of which they keep the first 4 for good."""
    model, prompt = make_family("qwen2"), [(7 * i + 3) % 50 for i in range(size)]

    def rings() -> list[RotatingKVCache]:
        return [RotatingKVCache(12, keep=keep) for _ in model.layers]

    with overheard(model) as heard:
        ahead, _, _ = run(model, prompt, max_tokens=36, prompt_cache=rings())
    plain, _, cache = run(model, prompt, max_tokens=30, prompt_cache=rings())
    text = prompt + [step.token for step in ahead]
    follower = Follower(model, text, heard, script("half", len(text), width), width)
    beam = {"beam_width": width, "draft_depth": 4}
    drafted, _, after = run(model, prompt, follower, max_tokens=30, prompt_cache=rings(), **beam)
    assert [step.token for step in drafted] == [step.token for step in plain]
    assert drafted[-1].stats.accepted > 5
    for one, other in zip(contents(after), contents(cache), strict=True):
        assert one.shape == other.shape and mx.allclose(one, other, atol=CLOSE, rtol=CLOSE)


@pytest.mark.parametrize("width", [1, 2])
def test_max_kv_size_means_what_it_means_in_mlx_lm(width: int) -> None:
    model, prompt = make_family("qwen2"), [(7 * i + 3) % 50 for i in range(9)]
    theirs = [token for token, _ in mlx_lm_generate_step(mx.array(prompt), model, max_tokens=40, max_kv_size=12)]
    rings = make_prompt_cache(model, 12)
    heard = read_again(model, prompt + theirs, 9, rings)
    follower = Follower(model, prompt + theirs, heard, script("half", 49, width), width)
    settings = Options(max_tokens=34, max_kv_size=12, beam_width=width, draft_depth=3)
    ours = list(decode_tokens(prompt, model, follower, settings))
    assert [step.token for step in ours] == theirs[:34] and ours[-1].stats.accepted > 5
    with pytest.raises(RedrafterError, match="mlx-lm cannot quantise a RotatingKVCache"):
        list(decode_tokens(prompt, model, None, Options(max_kv_size=12, kv_bits=8)))
    whole = [token for token, _ in mlx_lm_generate_step(mx.array(prompt), model, max_tokens=40)]
    assert whole != theirs, "the window matters"


@pytest.mark.parametrize("name", RUNNING)
def test_a_quantised_cache_gives_the_text_it_gives_without_a_drafter(name: str) -> None:
    """From the 14th token on, in the middle of a round."""
    model, size, count = make_family(name), 9, 14
    options: dict[str, Any] = {"kv_bits": 8, "kv_group_size": 32, "quantized_kv_start": 14, "seed": 3}
    prompt = [(5 * i + 2) % 50 for i in range(size)]
    try:
        with overheard(model) as heard:
            ahead, _, _ = run(model, prompt, max_tokens=count + 5, **options)
    except Exception as error:  # whatever mlx-lm's models say of a quantised cache
        pytest.skip(f"mlx-lm cannot quantise this model's cache: {type(error).__name__}")
    text = prompt + [step.token for step in ahead]
    width = 2 if name in TREES else 1
    follower = Follower(model, text, heard, script("half", len(text), width), width)
    drafted, _, after = run(model, prompt, follower, max_tokens=count, beam_width=width, draft_depth=3, **options)
    assert [step.token for step in drafted] == text[size : size + count]
    plain = [c for c in after if type(c) is KVCache and c.keys is not None]
    assert not plain, "every cache that can be is quantised by then"


@pytest.mark.parametrize("name", sorted(TREES))
def test_every_node_of_a_tree_is_read_as_plain_decoding_reads_its_path(name: str) -> None:
    """Behind prefixes within and beyond windows and chunks of 8, trees across their edges, all nodes, kept or not."""
    model = make_family(name)
    spread = min(64, model(mx.zeros((1, 1), mx.int32)).shape[-1])
    generator = random.Random(2)
    for size in (1, 6, 13, 29, 46):
        parents = [0] + [generator.randrange(max(0, node - 4), node) for node in range(1, 14)]
        tree = planted([generator.randrange(spread) for _ in parents], parents)
        target = Target(model)
        target.forward(mx.array([generator.randrange(spread) for _ in range(size)]), want_hidden=False)
        target.evaluate()
        caches, expected = [target.cache], []  # the prefix's, then that behind each node
        for node, token in enumerate(tree.tokens.tolist()):
            caches.append(copy.deepcopy(caches[parents[node] + 1 if node else 0]))
            expected.append(model(mx.array([[token]]), cache=caches[-1])[0, -1])
        together = target.verify(tree, branched=True).logits
        far = mx.abs(together - mx.stack(expected)).max(axis=1)
        assert far.max().item() < CLOSE, (name, size, far)  # type: ignore[operator]
