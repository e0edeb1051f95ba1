"""Heads with a KV cache: drafts do not depend on how the text was read, and the cache keeps its
window.
"""

import copy

import mlx.core as mx
import pytest
from mlx_lm.models.cache import make_prompt_cache

from helpers.cached import CACHED_KINDS, Reading, make_cached
from helpers.toys import ids, make_model, make_prompt, run
from mlx_redrafter.drafters.cached import MAX_EXCESS
from mlx_redrafter.drafters.protocol import Drafter
from mlx_redrafter.engine.plan import Plan
from mlx_redrafter.engine.source import Source
from mlx_redrafter.target.model_parts import get_model_sizes

pytestmark = pytest.mark.filterwarnings("ignore:the drafter has guessed no token right")

FEW = 8
"""Small enough that random drafters are often right."""


def fit(kind: str, model) -> Drafter:
    """A random head for a model."""
    return make_cached(kind, *get_model_sizes(model), layers=len(model.layers))


class Watched:
    """A drafter whose sources record each draft and the text length before it."""

    def __init__(self, drafter: Drafter):
        self._drafter = drafter
        self.drafts = []

    def __getattr__(self, name: str):
        return getattr(self._drafter, name)

    @property
    def __class__(self) -> type:
        return type(self._drafter)

    def open(self, model) -> Source:
        """A source of the drafter's own class that records its drafts."""
        source = self._drafter.open(model)
        propose = source.propose
        end = 0

        def keep_end(kept):
            nonlocal end
            type(source).keep(source, kept)
            end = kept.position + mx.array(kept.n_kept)

        def note(root, plan, adjust, *, in_level_order):
            tree = propose(root, plan, adjust, in_level_order=in_level_order)
            self.drafts.append((end, plan, tree.tokens))
            return tree

        source.keep = keep_end
        source.propose = note
        return source


def draft(source: Source, root: int, plan: Plan) -> list[int]:
    """The tokens of a draft."""
    tokens = source.propose(mx.array(root), plan, None, in_level_order=False).tokens
    return list(tokens.tolist())


def draft_afresh(drafter: Drafter, model, text: list[int], plan: Plan) -> list[int]:
    """Tokens drafted by a new source that reads all of `text` at once.

    Its last token is the root.
    """
    source = drafter.open(model)
    Reading(source, model, text[:-1]).feed(source)
    return draft(source, text[-1], plan)


@pytest.mark.parametrize("kind", CACHED_KINDS)
@pytest.mark.parametrize("plan", [(1, 4), (3, 3, 6)], ids=str)
def test_drafts_do_not_depend_on_how_the_text_was_read(plan, kind):
    """Chunked prefill, plain steps and partly accepted rounds give the drafts of a single read."""
    model = make_model(vocab=3)
    drafter = fit(kind, model)
    prompt = make_prompt(80, vocab=3)
    watched = Watched(drafter)
    steps = run(model, prompt, watched, max_tokens=40, plan=plan, prefill_step_size=70)
    text = [*prompt, *ids(steps)]
    assert steps[-1].stats.accepted > 4
    reading = Reading(drafter.open(model), model, text)
    checked = 0
    for end, made, tokens in watched.drafts:
        length = int(end.item()) if isinstance(end, mx.array) else end
        if length < len(text):
            source = drafter.open(model)
            reading.feed(source, 0, length)
            assert tokens.tolist() == draft(source, text[length], made)
            checked += 1
    assert checked > 10


@pytest.mark.parametrize("kind", CACHED_KINDS)
def test_a_source_continues_after_an_early_end_and_a_fork(kind):
    model = make_model(vocab=FEW)
    drafter = fit(kind, model)
    prompt = make_prompt(12, vocab=FEW)
    plan = Plan(2, 3, 7)
    for count in (1, 2, 4, 7):
        source = drafter.open(model)
        cache = make_prompt_cache(model)
        steps = run(model, prompt, source, max_tokens=count, plan=plan, prompt_cache=cache)
        text = [*prompt, *ids(steps)]
        fork = source.fork()
        more = make_prompt(3, vocab=FEW, seed=count)
        # The fork continues with another text and must not affect the source.
        for each, other, own in (
            (fork, [3, 1, 2], copy.deepcopy(cache)),
            (source, more, cache),
        ):
            steps = run(model, other, each, max_tokens=6, plan=plan, prompt_cache=own, history=text)
            whole = [*text, *other, *ids(steps)]
            assert ids(steps) == ids(run(model, [*text, *other], max_tokens=6))
        assert draft(source, 5, plan) == draft_afresh(drafter, model, [*whole, 5], plan)


@pytest.mark.parametrize("kind", CACHED_KINDS)
def test_rewinding_a_plain_step_keeps_earlier_ones(kind):
    model = make_model(vocab=FEW)
    drafter = fit(kind, model)
    tokens = make_prompt(14, vocab=FEW)
    plan = Plan(2, 3, 7)
    source = drafter.open(model)
    # As if decoding had run ahead with a wrong token.
    ahead = Reading(source, model, [*tokens[:12], (tokens[12] + 1) % FEW])
    for start, stop in ((0, 10), (10, 11), (11, 12), (12, 13)):
        ahead.feed(source, start, stop)
    source.rewind(1)
    Reading(source, model, tokens).feed(source, 12)
    assert draft(source, 5, plan) == draft_afresh(drafter, model, [*tokens, 5], plan)


@pytest.mark.parametrize("is_known", [True, False])
@pytest.mark.parametrize("kind", CACHED_KINDS)
def test_rows_fill_no_more_than_the_window(kind, is_known):
    """After a gap, and in rounds drafted from the context alone, where the head drafts nothing."""
    model = make_model(vocab=FEW)
    drafter = fit(kind, model)
    size = MAX_EXCESS + 200
    source = drafter.open(model)
    source.max_kv_size = 20
    reading = Reading(source, model, make_prompt(size, vocab=FEW))
    if is_known:
        reading.feed(source, 0, 10)
        reading.feed(source, 60)
    else:
        for at in range(size):
            reading.feed(source, at, at + 1, known=False)
    caches, waiting, *_ = source.arrays
    assert all(keys.shape[2] <= 20 + MAX_EXCESS for keys, _ in caches)
    assert is_known or sum(len(rows.tokens) for rows in waiting) <= 66
    assert len(draft(source, 0, Plan(1, 2, 3))) == 3
