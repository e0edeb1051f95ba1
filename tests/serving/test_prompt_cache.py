"""The in-memory prompt cache: lookup by tokens, replacement and limits."""

from collections.abc import Iterator

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.generate import BatchGenerator
from mlx_lm.models.cache import make_prompt_cache

from helpers.families import make_family
from helpers.toys import assert_same_cache, make_model
from mlx_redrafter.serving.scheduling.prompt_cache import PromptCache

BIG = 1 << 30


def read(tokens: list[int], model=None):
    """A cache that holds these tokens."""
    model = model or make_model()
    cache = make_prompt_cache(model)
    mx.eval(model(mx.array([tokens]), cache=cache))
    return cache


def store(cache: PromptCache, tokens: list[int], model=None, **how: bool):
    """Stores the cache that holds these tokens."""
    cache.store(tokens, read(tokens, model), **how)


def count_bytes(tokens: list[int], model=None) -> int:
    """The size of the cache that holds these tokens."""
    return sum(c.nbytes for c in read(tokens, model))


@pytest.fixture
def exact_memory() -> Iterator[None]:
    """No freed buffers are reused: they may be larger than what they are reused for."""
    before = mx.set_cache_limit(0)
    yield
    mx.set_cache_limit(before)


def measure_freed(cache: PromptCache) -> int:
    """Clears the caches, which nothing else holds; returns how many bytes that frees."""
    before = mx.get_active_memory()
    cache.clear()
    return before - mx.get_active_memory()


@pytest.mark.parametrize(
    ("wanted", "held"),
    [
        ([1, 2, 3, 4, 5], 3),
        ([1, 2, 3], 2),
        ([1, 2, 9, 9], 2),
        ([1, 2], 1),
        ([9, 1, 2, 3], 0),
        ([1], 0),
    ],
)
def test_longest_common_prefix_is_found(wanted, held):
    cache = PromptCache(BIG)
    store(cache, [1, 2, 3])
    found, count = cache.fetch(wanted)
    assert count == held
    if held:
        assert_same_cache(found or [], read(wanted[:held]))
    else:
        assert found is None


def test_fetched_caches_are_copies():
    cache = PromptCache(BIG)
    model = make_model()
    store(cache, [1, 2, 3])
    first, _ = cache.fetch([1, 2, 3, 4])
    mx.eval(model(mx.array([[7, 8, 9]]), cache=first))
    assert_same_cache(cache.fetch([1, 2, 3, 4])[0] or [], read([1, 2, 3]))


@pytest.mark.parametrize("bits", [None, 8])
def test_a_fetched_cache_has_only_the_shared_rows(bits):
    cache = PromptCache(BIG)
    tokens = [token % 40 for token in range(600)]
    states = read(tokens)
    cache.store(tokens, [c.to_quantized(32, bits) for c in states] if bits else states)
    found, count = cache.fetch([*tokens[:60], 41, 42])
    assert found
    assert count == 60
    assert 5 * sum(c.nbytes for c in found) < cache.nbytes
    assert cache.fetch([*tokens, 41])[1] == 600  # the other one keeps all


def test_states_match_only_as_whole_prefixes():
    model = make_family("mamba2")
    cache = PromptCache(BIG)
    store(cache, [1, 2, 3], model)
    assert cache.fetch([1, 2, 4, 5]) == (None, 0)
    assert cache.fetch([1, 2, 3, 5])[1] == 3
    # The cache of a longer text cannot replace it.
    store(cache, [1, 2, 3, 4], model)
    assert len(cache) == 2
    assert cache.fetch([1, 2, 3, 5])[1] == 3


def test_longer_texts_replace_their_prefixes():
    cache = PromptCache(BIG)
    for tokens in ([1, 2], [1, 2, 3], [1, 2, 3], [1, 4]):
        store(cache, tokens)
    assert len(cache) == 2


def test_the_least_recently_used_is_dropped_first():
    size = count_bytes([1, 2])
    cache = PromptCache(2 * size)
    store(cache, [1, 2])
    store(cache, [3, 4])
    cache.fetch([1, 2, 5])
    store(cache, [5, 6])
    assert cache.nbytes == 2 * size
    assert [cache.fetch([*tokens, 0])[1] for tokens in ([1, 2], [3, 4], [5, 6])] == [2, 0, 2]
    cache.clear()
    assert len(cache) == 0
    assert cache.nbytes == 0


def test_the_longest_prefix_of_a_text_is_dropped_first():
    model = make_family("mamba2")
    size = count_bytes([1], model)
    cache = PromptCache(4 * size)
    for text in ([1], [1, 2], [1, 2, 3], [9]):
        store(cache, text, model)
    assert cache.fetch([1, 2, 3, 4])[1] == 3
    held = []
    for new in (7, 8, 6):
        cache.store([new], read([new], model))
        held.append([cache.find(np.array(text, np.int32))[1] for text in ([9], [1, 2, 3])])
    assert held == [[0, 3], [0, 2], [0, 1]]


def test_an_answer_does_not_drop_its_prompt():
    model = make_family("mamba2")
    cache = PromptCache(3 * count_bytes([1], model))
    for text in ([9], [1], [1, 2]):
        store(cache, text, model)
    # The other text is dropped first, then the other answer.
    for answer, held in (([1, 2, 3], [0, 3]), ([1, 2, 4], [0, 2])):
        store(cache, answer, model, has_answer=True)
        assert [cache.find(np.array(text, np.int32))[1] for text in ([9], [1, 2, 3])] == held


def test_the_newest_is_kept_even_if_it_is_too_large():
    cache = PromptCache(count_bytes([1, 2]))
    texts = [
        [1, 2],
        [token % 40 for token in range(600)],
        [39 - token % 40 for token in range(600)],
    ]
    for text in texts:
        store(cache, text)
        assert len(cache) == 1
        assert cache.fetch([*text, 0])[1] == len(text)


def test_a_longer_match_wins_over_an_older_text():
    cache = PromptCache(BIG)
    for text in ([9, 9, 9, 5, 9, 9], [1, 2, 3]):
        store(cache, text)
    assert cache.fetch([1, 2, 3, 5, 6])[1] == 3  # the older one has a 5 at the same position


@pytest.mark.usefixtures("exact_memory")
@pytest.mark.parametrize("name", ["llama", "mamba2", "gemma3_text", "qwen3_next", "falcon_h1"])
def test_caches_from_a_batch_take_what_is_counted(name):
    model = make_family(name)
    prompts = [[at + 1, *range(5 + at)] for at in range(16)]
    batch = BatchGenerator(model, prefill_batch_size=len(prompts))
    uids = batch.insert(prompts, [9] * len(prompts))
    while not batch.next()[1]:
        pass
    cache = PromptCache(BIG)
    for states, tokens in batch.remove(uids, return_prompt_caches=True).values():
        cache.store(tokens, states)
        cache.fetch([*tokens, 0])  # waits for the copies
    del states
    batch.close()
    counted = cache.nbytes
    assert len(cache) == len(prompts)
    assert measure_freed(cache) == pytest.approx(counted, rel=0.01)


@pytest.mark.usefixtures("exact_memory")
@pytest.mark.parametrize("name", ["llama", "falcon_h1", "rwkv7"])
def test_a_prefilled_cache_takes_what_is_counted(name):
    cache = PromptCache(BIG)
    tokens = [token % 40 for token in range(500)]
    states = read(tokens, make_family(name))
    cache.store(tokens, states)
    cache.fetch([*tokens, 0])  # waits for the copies
    del states
    counted = cache.nbytes
    assert measure_freed(cache) == pytest.approx(counted, rel=0.01)
