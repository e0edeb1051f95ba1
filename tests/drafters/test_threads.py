"""Every kind of drafter and of text, used from alternating threads: no array must depend on the
thread that made it.
"""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import count, cycle

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.sample_utils import make_logits_processors

from helpers.cached import CACHED_KINDS, make_cached
from helpers.families import make_family
from helpers.grids import pairs
from helpers.heads import KINDS, make_head
from helpers.small import small_llama
from helpers.threads import workers
from helpers.toys import decode_steps, ids, make_tokenizer
from mlx_redrafter import Session, generate_step
from mlx_redrafter.decoding.generation import open_generation
from mlx_redrafter.decoding.options import Options
from mlx_redrafter.drafters.draft_model import DraftModel
from mlx_redrafter.drafters.protocol import Drafter
from mlx_redrafter.engine.planner import Planner
from mlx_redrafter.loading.checkpoints import evaluate
from mlx_redrafter.measuring.pair import Pair
from mlx_redrafter.target import kv_cache

pytestmark = pytest.mark.filterwarnings("ignore:the drafter has guessed no token right")

EVERY_KIND = (*CACHED_KINDS, *KINDS, "draft model", "context")
VOCAB = 40
PROMPT = [1, 2, 3, 4, 1, 2]
COUNT = 20
TEXTS = {
    "chain": {"plan": (1, 3)},
    "tree, 8 bits": {"plan": (3, 3), "kv_bits": 8, "kv_group_size": 32, "quantized_kv_start": 12},
    "hybrid": {"plan": (1, 2)},
}
SAMPLED = {"temp": 0.9, "top_p": 0.9, "xtc_probability": 0.5, "seed": 2}
CHOICES = {
    "greedy": {},
    "sampled": SAMPLED | {"logits_processors": make_logits_processors(repetition_penalty=1.3)},
}


def make_drafter(kind: str) -> Drafter | None:
    if kind == "context":
        return None
    if kind == "draft model":
        return DraftModel(small_llama(hidden=32, vocab=VOCAB, seed=2))
    drafter = make_head(kind, vocab=VOCAB) if kind in KINDS else make_cached(kind, vocab=VOCAB)
    evaluate(drafter)  # as after loading
    return drafter


def make_target(text: str) -> nn.Module:
    model = small_llama(hidden=64, vocab=VOCAB)
    if text == "hybrid":
        model = make_family("qwen3_5", vocab_size=VOCAB)
    evaluate(model)
    return model


@pytest.fixture
def turns() -> Iterator[Iterator[ThreadPoolExecutor]]:
    """Two threads, alternating."""
    with workers(2) as pools:
        yield cycle(pools)


@pytest.fixture
def pauses(monkeypatch):
    """Drafting begins after four plain steps, and pauses again after three rounds."""
    next_plan = Planner.next_plan
    places = count()

    def plan(planner, *given):
        return next_plan(planner, *given) if next(places) % 7 > 3 else None

    monkeypatch.setattr(Planner, "next_plan", plan)


@pytest.mark.parametrize(("kind", "text", "choice"), pairs(EVERY_KIND, TEXTS, CHOICES))
def test_each_token_may_come_from_another_thread(kind, text, choice, turns, pauses):
    model = make_target(text)
    options = {"max_tokens": COUNT + 4} | TEXTS[text] | CHOICES[choice]
    plain = generate_step(PROMPT, model, **options | {"plan": "off"})
    expected = [token for token, *_ in plain][:COUNT]
    cache = make_prompt_cache(model)
    rounds = []
    failures = []
    options |= {"context": kind == "context", "prompt_cache": cache}
    options |= {"on_round": lambda *made: rounds.append(made)}
    options |= {"on_drafter_failure": failures.append}
    steps = generate_step(PROMPT, model, make_drafter(kind), **options)
    made = [next(turns).submit(next, steps).result() for _ in range(COUNT)]
    assert [token for token, *_ in made] == expected
    assert all(mx.isfinite(logprobs).any() for _, logprobs, _ in made), "any thread can read them"
    assert failures == [] and (rounds or kind == "context")
    next(turns).submit(steps.close).result()
    assert kv_cache.length(cache) == len(PROMPT) + COUNT


@pytest.mark.parametrize("kind", EVERY_KIND)
def test_each_round_may_come_from_another_thread_than_the_source(kind, turns):
    """Pieces of the prompt included."""
    pair = Pair(make_target("chain"), make_drafter(kind))
    source = next(turns).submit(pair.open_source).result()
    processors = make_logits_processors(repetition_penalty=1.3)
    options = Options(max_tokens=12, plan=(1, 3), logits_processors=processors, prefill_step_size=2)
    generation = next(turns).submit(open_generation, pair, PROMPT, options, source).result()
    while next(turns).submit(generation.next_round).result() is not None:
        pass
    plain = decode_steps(PROMPT, pair.model, None, replace(options, plan="off"))
    assert generation.output.tokens == ids(list(plain))


@pytest.mark.parametrize("kind", EVERY_KIND)
def test_each_turn_and_fork_may_use_another_thread(kind, turns, pauses):
    model = make_target("chain")
    tokenizer = make_tokenizer(vocab=VOCAB)
    failures = []
    options = {"max_tokens": 12, "seed": 3, "temp": 0.8}
    plain = Session(model, tokenizer, plan="off", **options)
    options |= {"plan": (1, 3), "context": kind == "context"}
    options |= {"on_drafter_failure": failures.append}
    session = Session(model, tokenizer, make_drafter(kind), **options)
    for text in ("abcab", "bcab"):
        stream = session.stream(text)
        expected = plain.send(text).tokens
        assert [next(turns).submit(next, stream).result().token for _ in expected] == expected
        assert next(turns).submit(next, stream, None).result() is None
    fork = next(turns).submit(session.fork).result()
    for each in (fork, session):
        assert next(turns).submit(each.send, "aa").result().tokens == plain.fork().send("aa").tokens
    assert failures == []
