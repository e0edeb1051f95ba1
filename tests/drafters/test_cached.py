"""Heads with a KV cache: plain decoding's tokens, and drafts that do not depend on how the text was read."""

from __future__ import annotations

import functools
import warnings
from itertools import product
from typing import Any

import mlx.core as mx
import pytest
from cached import CACHED_KINDS, Reading, make_cached
from families import make_family
from mlx_lm.models.cache import make_prompt_cache
from toys import assert_same_cache, assert_same_steps, ids, make_model, make_prompt, run

from mlx_redrafter.drafters.cached import MAX_EXCESS
from mlx_redrafter.drafters.protocol import Drafter
from mlx_redrafter.engine.model_parts import find_model_sizes
from mlx_redrafter.engine.plan import Plan
from mlx_redrafter.engine.source import Source
from mlx_redrafter.engine.types import Kept
from mlx_redrafter.generate import Step

pytestmark = pytest.mark.filterwarnings("ignore:the drafter has guessed no token right")

FEW = 8
"""Small enough that random drafters are often right."""


def fit(kind: str, model: Any) -> Drafter:
    """A random head for a model."""
    return make_cached(kind, *find_model_sizes(model), layers=len(model.layers))


FAMILIES = ("qwen3", "gemma3_text", "qwen3_next", "mamba2", "gpt_oss")


@functools.cache
def find_model(name: str) -> Any:
    """A family's model, or one with few tokens."""
    return make_model(vocab=FEW) if name == "few tokens" else make_family(name)


@functools.cache
def decode_plainly(name: str, size: int, temp: float) -> tuple[list[int], dict[str, Any], list[Step], Any]:
    """(prompt, options, plain steps, the cache after them) of a model, the same for all heads."""
    model = find_model(name)
    prompt, expected = make_prompt(size, vocab=min(50, find_model_sizes(model)[1])), make_prompt_cache(model)
    count = 24 if name == "few tokens" else 16
    options = {"max_tokens": count, "temp": temp, "top_p": 0.95, "seed": 3, "prefill_step_size": 8}
    return prompt, options, run(model, prompt, prompt_cache=expected, **options), expected


@pytest.mark.parametrize(
    ("name", "kind"),
    [*product(["few tokens"], CACHED_KINDS)]
    + [(name, kind) for at, name in enumerate(FAMILIES) for kind in CACHED_KINDS[at % 3 :: 3]],
)
def test_text_and_cache_equal_plain_decoding(name: str, kind: str) -> None:
    model, accepted = find_model(name), 0
    drafter = fit(kind, model)
    for size, plan, temp in ((5, (3, 3), 0.0), (19, (1, 4), 0.9), (7, (3, 4, 9), 0.9)):
        prompt, options, plain, expected = decode_plainly(name, size, temp)
        for context in (False, True):
            cache = make_prompt_cache(model)
            with warnings.catch_warnings(action="ignore"):  # some draft only chains
                steps = run(model, prompt, drafter, plan=plan, prompt_cache=cache, context=context, **options)
            assert_same_steps(steps, plain, tolerance=2e-3)
            assert_same_cache(cache, expected, tolerance=2e-3)
            assert steps[-1].stats.drafted
            accepted += steps[-1].stats.accepted
    assert accepted > 1 or name != "few tokens"


class Watched:
    """A drafter whose sources record each draft and the text length before it."""

    def __init__(self, drafter: Drafter) -> None:
        self._drafter, self.drafts = drafter, list[tuple[int, Plan, mx.array]]()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._drafter, name)

    def open(self, model: Any) -> Source:
        """A source of the drafter's own class that records its drafts."""
        source: Any = self._drafter.open(model)
        propose, end = source.propose, 0

        def keep_end(kept: Kept) -> None:
            nonlocal end
            type(source).keep(source, kept)
            end = kept.position + mx.array(kept.n_kept)

        def note(root: mx.array, plan: Plan, adjust: Any, *, in_level_order: bool) -> Any:
            tree = propose(root, plan, adjust, in_level_order=in_level_order)
            self.drafts.append((end, plan, tree.tokens))
            return tree

        source.keep, source.propose = keep_end, note
        return source


def draft(source: Source, root: int, plan: Plan) -> list[int]:
    """The tokens of a draft."""
    return source.propose(mx.array(root), plan, None, in_level_order=False).tokens.tolist()  # type: ignore[return-value]


def draft_afresh(drafter: Drafter, model: Any, text: list[int], plan: Plan) -> list[int]:
    """Tokens drafted by a new source that reads all of `text` at once; its last token is the root."""
    source = drafter.open(model)
    Reading(source, model, text[:-1]).feed(source)
    return draft(source, text[-1], plan)


@pytest.mark.parametrize("kind", CACHED_KINDS)
@pytest.mark.parametrize("plan", [(1, 4), (3, 3, 6)], ids=str)
def test_drafts_do_not_depend_on_how_the_text_was_read(plan: tuple[int, ...], kind: str) -> None:
    """Chunked prefill, plain steps and partly accepted rounds give the drafts of a single read."""
    model = make_model(vocab=3)
    drafter, prompt = fit(kind, model), make_prompt(80, vocab=3)
    watched: Any = Watched(drafter)
    steps = run(model, prompt, watched, max_tokens=40, plan=plan, prefill_step_size=70)
    text = [*prompt, *ids(steps)]
    assert steps[-1].stats.accepted > 4
    reading, checked = Reading(drafter.open(model), model, text), 0
    for end, made, tokens in watched.drafts:
        length = int(end.item()) if isinstance(end, mx.array) else end
        if length < len(text):
            source = drafter.open(model)
            reading.feed(source, 0, length)
            assert tokens.tolist() == draft(source, text[length], made)
            checked += 1
    assert checked > 10


@pytest.mark.parametrize("kind", CACHED_KINDS)
def test_a_source_continues_after_an_early_end_and_a_fork(kind: str) -> None:
    model = make_model(vocab=FEW)
    drafter, prompt = fit(kind, model), make_prompt(12, vocab=FEW)
    plan = Plan(2, 3, 7)
    for count in (1, 2, 4, 7):
        source, cache = drafter.open(model), make_prompt_cache(model)
        text = [*prompt, *ids(run(model, prompt, source, max_tokens=count, plan=plan, prompt_cache=cache))]
        fork, more = source.fork(), make_prompt(3, vocab=FEW, seed=count)
        for each in (fork, source):  # the fork continues with another text and must not affect the source
            other = [3, 1, 2] if each is fork else more
            again = make_prompt_cache(model) if each is fork else cache
            if each is fork:
                run(model, text, prompt_cache=again, max_tokens=0)
            whole = [*text, *other]
            steps = run(model, other, each, max_tokens=6, plan=plan, prompt_cache=again, history=text)
            whole += ids(steps)
            expected = run(model, [*text, *other], max_tokens=6)
            assert ids(steps) == ids(expected)
        assert draft(source, 5, plan) == draft_afresh(drafter, model, [*whole, 5], plan)


@pytest.mark.parametrize("kind", CACHED_KINDS)
def test_rewinding_a_plain_step_keeps_earlier_ones(kind: str) -> None:
    model = make_model(vocab=FEW)
    drafter, tokens, plan = fit(kind, model), make_prompt(14, vocab=FEW), Plan(2, 3, 7)
    source: Any = drafter.open(model)
    # As if decoding had run ahead with a wrong token.
    ahead = Reading(source, model, [*tokens[:12], (tokens[12] + 1) % FEW])
    for start, stop in ((0, 10), (10, 11), (11, 12), (12, 13)):
        ahead.feed(source, start, stop)
    source.rewind(1)
    Reading(source, model, tokens).feed(source, 12)
    assert draft(source, 5, plan) == draft_afresh(drafter, model, [*tokens, 5], plan)


@pytest.mark.parametrize("kind", CACHED_KINDS)
def test_only_the_window_remains_after_a_gap(kind: str) -> None:
    model = make_model(vocab=FEW)
    drafter, size = fit(kind, model), MAX_EXCESS + 200
    source: Any = drafter.open(model)
    source.max_kv_size = 20
    reading = Reading(source, model, make_prompt(size, vocab=FEW))
    reading.feed(source, 0, 10)
    reading.feed(source, 60)
    assert len(draft(source, 0, Plan(1, 2, 3))) == 3
    rows = [keys.shape[2] for keys, _ in source.state[0]]
    assert all(count <= 20 + MAX_EXCESS for count in rows)


@pytest.mark.parametrize("kind", CACHED_KINDS)
def test_rounds_fill_no_more_than_the_window(kind: str) -> None:
    """Includes rounds drafted from the context alone, where the head drafts nothing."""
    model = make_model(vocab=FEW)
    drafter, size = fit(kind, model), MAX_EXCESS + 150
    source: Any = drafter.open(model)
    source.max_kv_size = 20
    reading = Reading(source, model, make_prompt(size, vocab=FEW))
    for at in range(size):
        reading.feed(source, at, at + 1, known=False)
    waiting = sum(len(rows.tokens) for rows in source._rows)
    assert source._n_rows <= 20 + MAX_EXCESS and waiting <= 66
    assert len(draft(source, 0, Plan(1, 2, 3))) == 3
