"""Every kind of drafter, used from alternating threads: its arrays must not depend on the thread
that made them.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import cycle

import pytest
from mlx_lm.models.cache import make_prompt_cache

from helpers.cached import CACHED_KINDS, make_cached
from helpers.heads import KINDS, make_head
from helpers.small import small_llama
from helpers.threads import workers
from helpers.toys import make_tokenizer
from mlx_redrafter import Session, generate_step
from mlx_redrafter.checkpoints import evaluate
from mlx_redrafter.drafters.draft_model import DraftModel
from mlx_redrafter.drafters.protocol import Drafter

pytestmark = pytest.mark.filterwarnings("ignore:the drafter has guessed no token right")

EVERY_KIND = (*CACHED_KINDS, *KINDS, "draft model")
VOCAB = 40
PROMPT = [1, 2, 3, 4]


def make_drafter(kind: str) -> Drafter | DraftModel:
    if kind == "draft model":
        return DraftModel(small_llama(hidden=32, vocab=VOCAB, seed=2))
    drafter = make_head(kind, vocab=VOCAB) if kind in KINDS else make_cached(kind, vocab=VOCAB)
    evaluate(drafter)  # as after loading
    return drafter


@pytest.fixture
def turns() -> Iterator[Iterator[ThreadPoolExecutor]]:
    """Two threads, alternating."""
    with workers(2) as pools:
        yield cycle(pools)


@pytest.mark.parametrize("kind", EVERY_KIND)
def test_each_token_may_come_from_another_thread(
    kind: str, turns: Iterator[ThreadPoolExecutor]
) -> None:
    model = small_llama(hidden=64, vocab=VOCAB)
    drafter = make_drafter(kind)
    plain = [token for token, *_ in generate_step(PROMPT, model, max_tokens=16, plan="off")]
    for plan, count in (((1, 3), 16), ((2, 3), 7)):
        cache = make_prompt_cache(model)
        options = {"plan": plan, "context": False, "prompt_cache": cache}
        steps = generate_step(PROMPT, model, drafter, max_tokens=16, **options)
        assert [next(turns).submit(next, steps).result()[0] for _ in range(count)] == plain[:count]
        next(turns).submit(steps.close).result()
        assert cache[0].offset == len(PROMPT) + count


@pytest.mark.parametrize("kind", EVERY_KIND)
def test_each_turn_and_fork_may_use_another_thread(
    kind: str, turns: Iterator[ThreadPoolExecutor]
) -> None:
    model = small_llama(hidden=64, vocab=VOCAB)
    tokenizer = make_tokenizer(vocab=VOCAB)
    plain = Session(model, tokenizer, max_tokens=8, plan="off")
    session = Session(
        model, tokenizer, make_drafter(kind), max_tokens=8, plan=(1, 3), context=False
    )
    for text in ("abcab", "bcab"):
        assert next(turns).submit(session.send, text).result().tokens == plain.send(text).tokens
    fork = next(turns).submit(session.fork).result()
    for each in (fork, session):
        assert next(turns).submit(each.send, "aa").result().tokens == plain.fork().send("aa").tokens
