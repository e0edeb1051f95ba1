"""What becomes of a prompt cache when a round is broken off, driven from several threads, or refused."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from families import Follower, contents, make_family, overheard, script
from mlx_lm.models.cache import ArraysCache, KVCache, RotatingKVCache, make_prompt_cache
from test_round_cost import nodes
from test_threads import workers

from mlx_redrafter.engine import kv_cache as kv
from mlx_redrafter.engine import decode as loop
from mlx_redrafter.errors import UnsupportedModelError
from mlx_redrafter.generate import make_settings
from mlx_redrafter.engine.decode import decode
from mlx_redrafter.engine.plan import Plan
from mlx_redrafter.engine.target import MARGIN, Target, check_draftable

PROMPT = [(7 * i + 3) % 50 for i in range(20)]
CLOSE = 2e-3


def new_cache(model: nn.Module, keep: int | None = None) -> kv.Cache:
    """The model's own, or rings of 12 rows that keep the first `keep`."""
    own = make_prompt_cache(model)
    return own if keep is None else [RotatingKVCache(12, keep) for _ in own]


def plainly(model: nn.Module, prompt: list[int], cache: kv.Cache, count: int) -> list[int]:
    """`count` tokens of plain decoding."""
    return [step.token for step in decode(prompt, model, None, make_settings(prompt_cache=cache, max_tokens=count))]


def follower(model: nn.Module, width: int, keep: int | None = None) -> Follower:
    """A drafter that is right half of the time behind `PROMPT`."""
    with overheard(model) as heard:
        text = PROMPT + plainly(model, PROMPT, new_cache(model, keep), 60)
    return Follower(model, text, heard, script("half", len(text), width), width)


@pytest.mark.parametrize("width", [1, 2])
@pytest.mark.parametrize(
    ("name", "keep"),
    [("qwen2", None), ("qwen2", 0), ("qwen2", 4), ("gemma3_text", None), ("gpt_oss", None), ("falcon_h1", None)],
)
@pytest.mark.filterwarnings("ignore:drafting chains, not trees")
def test_a_round_that_is_broken_off_leaves_the_cache_with_what_was_yielded(
    name: str, keep: int | None, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_family(name)
    drafter, cache = follower(model, width, keep), new_cache(model, keep)
    tokens: list[int] = []
    read = loop.read

    def interrupted(report: mx.array) -> list[int]:
        if len(tokens) > 8:
            raise KeyboardInterrupt
        return read(report)

    monkeypatch.setattr(loop, "read", interrupted)
    settings = make_settings(drafter, prompt_cache=cache, max_tokens=40, beam_width=width, draft_depth=3)
    with pytest.raises(KeyboardInterrupt):
        for step in decode(PROMPT, model, drafter, settings):
            tokens.append(step.token)
    monkeypatch.undo()
    expected = new_cache(model, keep)
    assert tokens == plainly(model, PROMPT, expected, len(tokens)) and len(tokens) < 40
    hold_the_same(cache, expected)
    assert plainly(model, [5], cache, 8) == plainly(model, [5], expected, 8)


class Changeable:
    """Instead of a pilot: two rounds, then three plain steps, over and over.

    Args:
        plan: of the rounds.
    """

    pause = 3

    def __init__(self, plan: Plan) -> None:
        self._plan, self._asked = plan, 0

    def choose(self, length: int, replayed: int = 0) -> Plan | None:
        self._asked += 1
        return self._plan if self._asked % 3 else None

    def saw(self, plan: Plan | None, tokens: int, length: int, *rest: Any, **more: Any) -> None:
        pass


def failing_at(place: int, work: Callable[..., Any]) -> Callable[..., Any]:
    """`work`, whose call of that number is broken off; the first is 1."""
    calls = itertools.count(1)

    def call(*args: Any, **more: Any) -> Any:
        if next(calls) == place:
            raise KeyboardInterrupt
        return work(*args, **more)

    return call


def hold_the_same(cache: kv.Cache, expected: kv.Cache) -> None:
    """Asserts that two caches have read the same tokens."""
    for one, other in zip(contents(cache), contents(expected), strict=True):
        assert one.shape == other.shape and mx.allclose(one, other, atol=CLOSE, rtol=CLOSE)


@pytest.mark.parametrize("drafted", [False, True])
@pytest.mark.parametrize(
    ("name", "keep"), [("qwen2", None), ("qwen2", 0), ("qwen2", 4), ("gemma3_text", None), ("falcon_h1", None)]
)
def test_whichever_read_is_broken_off_the_cache_has_what_was_yielded(
    name: str, keep: int | None, drafted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_family(name)
    drafter = follower(model, 1, keep) if drafted else None
    monkeypatch.setattr(loop, "Fixed", Changeable)
    read = loop.read
    for place in range(1, 13):
        monkeypatch.setattr(loop, "read", failing_at(place, read))
        cache, expected = new_cache(model, keep), new_cache(model, keep)
        beam = {"beam_width": 1, "draft_depth": 3} if drafted else {}
        tokens = []
        with pytest.raises(KeyboardInterrupt):
            for step in decode(PROMPT, model, drafter, make_settings(drafter, prompt_cache=cache, **beam)):
                tokens.append(step.token)
        monkeypatch.setattr(loop, "read", read)
        assert len(tokens) >= place - 1
        if tokens:
            assert tokens == plainly(model, PROMPT, expected, len(tokens))
        else:
            next(decode(PROMPT, model, None, make_settings(prompt_cache=expected, max_tokens=0)), None)
        hold_the_same(cache, expected)
        assert plainly(model, [5], cache, 8) == plainly(model, [5], expected, 8)


@pytest.mark.parametrize("what", ["forward", "verify", "keep_", "advance_", "_quantize_"])
@pytest.mark.parametrize(
    ("name", "keep"), [("qwen2", None), ("qwen2", 0), ("qwen2", 4), ("gemma3_text", None), ("falcon_h1", None)]
)
def test_whatever_is_not_begun_any_more_the_cache_has_what_was_yielded(
    name: str, keep: int | None, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_family(name)
    drafter = follower(model, 1, keep)
    monkeypatch.setattr(loop, "Fixed", Changeable)
    work = getattr(Target, what)
    for place in range(2, 16):
        monkeypatch.setattr(Target, what, failing_at(place, work))
        cache, expected = new_cache(model, keep), new_cache(model, keep)
        settings = make_settings(drafter, prompt_cache=cache, beam_width=1, draft_depth=3)
        tokens = []
        with pytest.raises(KeyboardInterrupt):
            for step in decode(PROMPT, model, drafter, settings):
                tokens.append(step.token)
        monkeypatch.setattr(Target, what, work)
        if tokens:
            assert tokens == plainly(model, PROMPT, expected, len(tokens))
            hold_the_same(cache, expected)
            assert plainly(model, [5], cache, 8) == plainly(model, [5], expected, 8)


@pytest.mark.parametrize(("name", "keep"), [("qwen2", None), ("qwen2", 0), ("qwen2", 4), ("falcon_h1", None)])
def test_whichever_call_of_a_processor_fails_the_cache_has_what_was_yielded(
    name: str, keep: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rounds, the plain step that closes them and those behind it: a ring read its root twice."""
    model = make_family(name)
    drafter = follower(model, 1, keep)
    monkeypatch.setattr(loop, "Fixed", Changeable)
    for place in range(2, 20):
        cache, expected = new_cache(model, keep), new_cache(model, keep)
        processor = failing_at(place, lambda history, logits: logits)
        settings = make_settings(
            drafter, prompt_cache=cache, logits_processors=[processor], beam_width=1, draft_depth=3
        )
        tokens = []
        with pytest.raises(KeyboardInterrupt):
            for step in decode(PROMPT, model, drafter, settings):
                tokens.append(step.token)
        if tokens:
            assert tokens == plainly(model, PROMPT, expected, len(tokens))
        else:
            next(decode(PROMPT, model, None, make_settings(prompt_cache=expected, max_tokens=0)), None)
        hold_the_same(cache, expected)


@pytest.mark.parametrize("width", [None, 1, 2])
@pytest.mark.parametrize("name", ["deepseek_v32", "falcon_h1", "baichuan_m1", "qwen3_next"])
@pytest.mark.filterwarnings("ignore:drafting chains, not trees")
def test_every_next_may_come_from_another_thread_whatever_the_cache(name: str, width: int | None) -> None:
    """States that only the next forward reads must not stay unevaluated: a stream belongs to its thread."""
    model = make_family(name)
    drafter = None if width is None else follower(model, width)
    beam = {} if width is None else {"beam_width": width, "draft_depth": 3}
    expected = plainly(model, PROMPT, new_cache(model), 24)
    steps = decode(PROMPT, model, drafter, make_settings(drafter, max_tokens=24, **beam))
    with workers(3) as pools:
        try:
            assert [pools[i % 3].submit(next, steps).result().token for i in range(24)] == expected
        finally:
            pools[0].submit(steps.close).result()


@pytest.mark.parametrize("topk", [8, 2048])
def test_what_a_model_writes_to_its_cache_itself_reaches_the_cache(topk: int, tmp_path: Path) -> None:
    """deepseek_v32 does so lest the graph behind its keys grow with the text."""
    model = make_family("deepseek_v32")
    for layer in model.layers:
        layer.self_attn.indexer.index_topk = topk
    cache = new_cache(model)
    drafter = follower(model, 2)
    settings = make_settings(drafter, prompt_cache=cache, max_tokens=50, beam_width=2, draft_depth=3)
    sizes = []
    for _ in decode(PROMPT, model, drafter, settings):
        arrays = [array for c in kv.leaves(cache) for array in (c.keys, c.values)]
        sizes.append(nodes(arrays, tmp_path / "graph"))
    assert max(sizes[40:]) <= max(sizes[:20])


@pytest.mark.parametrize("name", ["olmo3", "muse_glimmer"])
def test_rings_that_no_round_can_use_are_refused_before_the_prompt_is_read(name: str) -> None:
    model = make_family(name)
    cache = [RotatingKVCache(20, 4) if isinstance(c, RotatingKVCache) else KVCache() for c in make_prompt_cache(model)]
    drafter = follower(model, 1)
    with pytest.raises(UnsupportedModelError, match="a cache of 20 rows that keeps its first 4"):
        next(decode(PROMPT, model, drafter, make_settings(drafter, prompt_cache=cache)))
    assert [c.offset for c in cache] == [0] * len(cache)


def test_a_rope_that_turns_with_the_length_of_the_text_is_said_to_be_the_reason() -> None:
    assert check_draftable(make_family("internlm2"), tree=True) == "its rope turns with the length of the text"


@pytest.mark.parametrize("plan", [(1, 1), (1, 3)])
def test_where_a_rope_begins_to_turn_drafting_ends(plan: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_family("internlm2")
    bound = len(PROMPT) + 12
    for _, module in model.named_modules():
        if hasattr(module, "max_position_embeddings"):
            module.max_position_embeddings = bound + MARGIN
    drafter = follower(model, 1)
    expected = plainly(model, PROMPT, new_cache(model), 40)
    lengths: list[int] = []
    original = loop.make_draft

    def make_draft(drafter: Any, target: Any, *rest: Any, **options: Any) -> Any:
        lengths.append(target.length)
        return original(drafter, target, *rest, **options)

    monkeypatch.setattr(loop, "make_draft", make_draft)
    steps = list(decode(PROMPT, model, drafter, make_settings(drafter, max_tokens=40, plan=plan)))
    assert [step.token for step in steps] == expected and steps[-1].stats.accepted > 0
    assert len(lengths) > 3 and max(lengths) <= bound - 2, "a draft of one token needs two rows"


LAYERS = (KVCache, RotatingKVCache, ArraysCache)


@contextmanager
def broken_off_at(place: int) -> Iterator[None]:
    """Ctrl-C as the layer of that number in all forwards turns to its cache."""
    calls = itertools.count(1)
    with pytest.MonkeyPatch.context() as patch:
        for kind in LAYERS:
            name = "update_and_fetch" if hasattr(kind, "update_and_fetch") else "__setitem__"
            real = getattr(kind, name)

            def broken(*of: Any, real: Any = real, **more: Any) -> Any:
                if next(calls) == place:
                    raise KeyboardInterrupt
                return real(*of, **more)

            patch.setattr(kind, name, broken)
        yield


@pytest.mark.parametrize("width", [None, 1, 2])
@pytest.mark.parametrize(
    ("name", "keep"), [("qwen2", None), ("qwen2", 0), ("qwen2", 4), ("gemma3_text", None), ("falcon_h1", None)]
)
@pytest.mark.filterwarnings("ignore:drafting chains, not trees")
def test_between_whichever_layers_a_forward_is_broken_off_all_hold_the_same_tokens(
    name: str, keep: int | None, width: int | None
) -> None:
    model = make_family(name)
    drafter = None if width is None else follower(model, width, keep)
    beam = {} if width is None else {"beam_width": width, "draft_depth": 3}
    seen = set()
    for place in itertools.chain(range(1, 30), range(30, 80, 7)):
        cache, tokens = new_cache(model, keep), []
        settings = make_settings(drafter, prompt_cache=cache, max_tokens=12, prefill_step_size=7, **beam)
        try:
            with broken_off_at(place):
                for step in decode(PROMPT, model, drafter, settings):
                    tokens.append(step.token)
        except KeyboardInterrupt:
            held = {c.offset for c in kv.leaves(cache) if hasattr(c, "offset")}
            assert len(held) == 1, (place, held)
            (count,) = held
            seen.add(count)
            assert count <= len(PROMPT) + len(tokens), "no more than was yielded"
            expected, text = new_cache(model, keep), [*PROMPT, *tokens]
            for start in range(0, min(count, len(PROMPT) - 1), 7):
                model(mx.array([text[start : min(start + 7, count, len(PROMPT) - 1)]]), cache=expected)
            for token in text[len(PROMPT) - 1 : count]:
                model(mx.array([[token]]), cache=expected)
            if count:
                hold_the_same(cache, expected)
        else:
            break
    assert len(seen) > 4


@pytest.mark.parametrize("width", [1, 2])
@pytest.mark.parametrize(
    ("name", "keep"), [("qwen2", None), ("qwen2", 0), ("qwen2", 4), ("gemma3_text", None), ("llama4_text", None)]
)
def test_a_round_whose_rows_are_half_dropped_leaves_the_cache_with_what_was_yielded(
    name: str, keep: int | None, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_family(name)
    drafter, compact_ = follower(model, width, keep), kv.compact_
    settings = make_settings(drafter, max_tokens=12, beam_width=width, draft_depth=3)
    for place in (2, 4, 6):
        count = itertools.count(1)

        def half(cache: kv.Cache, rows: int, path: list[int], place: int = place, count: Any = count) -> None:
            if next(count) != place:
                return compact_(cache, rows, path)
            compact_(list(kv.leaves(cache))[:1], rows, path)
            raise KeyboardInterrupt

        monkeypatch.setattr(kv, "compact_", half)
        cache, expected, tokens = new_cache(model, keep), new_cache(model, keep), []
        with pytest.raises(KeyboardInterrupt):
            for step in decode(PROMPT, model, drafter, replace(settings, prompt_cache=cache)):
                tokens.append(step.token)
        monkeypatch.setattr(kv, "compact_", compact_)
        assert tokens == plainly(model, PROMPT, expected, len(tokens)) and tokens
        hold_the_same(cache, expected)
        assert plainly(model, [5], cache, 8) == plainly(model, [5], expected, 8)


@pytest.mark.parametrize("right", ["half", "wrong", "right"])
@pytest.mark.parametrize("size", [12, 24])
@pytest.mark.parametrize("keep", [0, 4])
def test_a_hybrid_whose_rings_keep_their_first_rows_reads_again_what_it_read(
    keep: int, size: int, right: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_family("qwen3_5")

    def made() -> kv.Cache:
        own = make_prompt_cache(model)
        return [RotatingKVCache(size, keep) if isinstance(c, KVCache) else c for c in own]

    with overheard(model) as heard:
        text = PROMPT + plainly(model, PROMPT, made(), 60)
    drafter = Follower(model, text, heard, script(right, len(text), 1), 1)
    monkeypatch.setattr(loop, "Fixed", Changeable)
    cache, expected = made(), made()
    settings = make_settings(drafter, prompt_cache=cache, max_tokens=40, beam_width=1, draft_depth=3)
    assert [step.token for step in decode(PROMPT, model, drafter, settings)] == plainly(model, PROMPT, expected, 40)
    hold_the_same(cache, expected)


@pytest.mark.parametrize("work", ["mark", "restore_"])
@pytest.mark.parametrize("drafted", [False, True])
@pytest.mark.parametrize("name", ["mamba", "falcon_h1", "qwen3_5"])
def test_states_hold_what_was_yielded_where_a_mark_is_broken_off(
    name: str, drafted: bool, work: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if (drafted and name == "mamba") or (not drafted and work == "restore_"):
        pytest.skip("plain decoding restores nothing; one model with states alone is enough")
    model = make_family(name)
    drafter, whole = follower(model, 1) if drafted else None, getattr(kv, work)
    beam = {"beam_width": 1, "draft_depth": 3} if drafted else {}
    for place in (3, 4, 6):
        monkeypatch.setattr(kv, work, failing_at(place, whole))
        cache, expected, tokens = new_cache(model), new_cache(model), []
        with pytest.raises(KeyboardInterrupt):
            for step in decode(
                PROMPT, model, drafter, make_settings(drafter, prompt_cache=cache, max_tokens=12, **beam)
            ):
                tokens.append(step.token)
        monkeypatch.setattr(kv, work, whole)
        model(mx.array([PROMPT[:-1]]), cache=expected)
        model(mx.array([PROMPT[-1:]]), cache=expected)
        for token in tokens:
            model(mx.array([[token]]), cache=expected)
        hold_the_same(cache, expected)


@pytest.mark.parametrize("place", [2, 3, 4, 5])
def test_a_step_broken_off_where_the_cache_is_quantised_leaves_what_was_yielded(
    place: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_family("qwen3_5")
    cache, tokens = new_cache(model), []
    settings = make_settings(
        prompt_cache=cache, max_tokens=12, kv_bits=4, kv_group_size=32, quantized_kv_start=len(PROMPT) + 3
    )
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(loop, "read", failing_at(place, loop.read))
        for step in decode(PROMPT, model, None, settings):
            tokens.append(step.token)
    held = {c.offset for c in kv.leaves(cache) if hasattr(c, "offset")}
    assert len(tokens) == place - 1 and held == {len(PROMPT) + len(tokens)}
    assert [step.token for step in decode([5], model, None, replace(settings, max_tokens=4))]
