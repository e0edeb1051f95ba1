"""Batches of the target: answers are those of decoding alone, and their states those of a second
reading.
"""

from collections.abc import Collection, Sequence
from functools import partial

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx_lm.sample_utils import make_sampler

from helpers.families import make_family
from mlx_redrafter import generate_step
from mlx_redrafter.text.encoding import encode_chat
from mlx_redrafter.training import answers
from mlx_redrafter.training.answers import Continuation, decode_batch, measure_batch_size
from mlx_redrafter.training.data import Example
from mlx_redrafter.training.hidden_states import add_hidden_states

GREEDY = partial(mx.argmax, axis=-1)
TEXTS = ("def main(", "import", "class A:\n", "for x in", "return")


@pytest.fixture(autouse=True)
def small_batches(monkeypatch):
    monkeypatch.setattr(answers, "MAX_BATCH_SIZE", 4)


def decode(
    model: nn.Module,
    given: Sequence[Continuation],
    sampler=GREEDY,
    ends: Collection[int] = (),
    steps: int = 1000,
) -> list[Continuation]:
    """The waiting in the order in which they end."""
    waiting = list(given)
    left = [steps]

    def should_stop(tokens):
        left[0] -= 1
        return left[0] < 0

    def take(count):
        return [waiting.pop(0) for _ in waiting[:count]]

    return list(decode_batch(model, take, sampler, ends, should_stop, measure_batch_size(model)))


def test_answers_are_those_of_decoding_alone(demo):
    model, tokenizer = demo
    prompts = [encode_chat(tokenizer, text) for text in TEXTS]
    plain = []
    for prompt in prompts:
        steps = generate_step(prompt, model, max_tokens=9)
        plain.append([token for token, _, _ in steps])

    waiting = [
        Continuation(list(prompt), 4 + number, tag=number) for number, prompt in enumerate(prompts)
    ]
    found = decode(model, waiting)
    assert len(found) == 5 > answers.MAX_BATCH_SIZE, "the last one takes the place of another"
    for each in found:
        expected = plain[each.tag][: 4 + each.tag]
        assert each.tokens == [*prompts[each.tag], *expected]
        assert each.offset == len(prompts[each.tag])

    end = plain[2][2]
    (short,) = decode(model, [Continuation(list(prompts[2]), 9)], ends={end})
    to_end = plain[2][: plain[2].index(end) + 1]
    assert short.tokens[short.offset :] == to_end, "includes the end token"
    (longer,) = decode(model, [Continuation(list(prompts[2]), 9, min_tokens=6)], ends={end})
    assert len(longer.tokens) - longer.offset >= 6
    assert end not in longer.tokens[longer.offset : -1]


@pytest.mark.parametrize("name", ["llama", "cohere", "qwen3_5", "gemma2", "mamba", "phixtral"])
def test_states_are_those_of_a_second_reading(name):
    """Also of hybrids, and of models that mlx-lm does not batch correctly."""
    model = make_family(name)
    rng = np.random.default_rng(0)
    mx.random.seed(0)
    sizes = zip(rng.integers(1, 12, 9).tolist(), rng.integers(2, 14, 9).tolist(), strict=True)
    waiting = [
        Continuation(rng.integers(0, 20, size).tolist(), most, first_learned=1)
        for size, most in sizes
    ]
    waiting.append(Continuation([5, 3, 8, 2, 9], 6, first_learned=4))
    waiting.append(Continuation([7, 7, 2], 5))
    found = decode(model, waiting, make_sampler(1.0), {3})
    assert len(found) == 11
    assert sum(each.states is None for each in found) == 1
    for each in found:
        if each.states is not None and len(each.tokens) >= 3:
            check_states(model, each)


def check_states(model: nn.Module, answer: Continuation):
    """An answer's states are those of reading it."""
    states = answer.states
    first = answer.first_learned or 1
    example = Example(np.array(answer.tokens), first + 1)
    read = add_hidden_states(model, [example])[0].states
    assert states.shape == read.shape == (len(answer.tokens) - 1,)
    assert np.allclose(states["hidden"], read["hidden"], rtol=2e-3, atol=2e-3)
    assert np.allclose(states["probs"][first:], read["probs"][first:], rtol=2e-3, atol=2e-4)
    for one, other in zip(states[first:], read[first:], strict=True):
        assert set(one["ids"][:4]) & set(other["ids"][:4])
    unlearned = states["probs"][: min(first, answer.offset - 1)]
    assert not unlearned.any(), "nothing is learned there"


def test_stopping_ends_all_answers_where_they_are():
    model = make_family("llama")
    waiting = [Continuation([1, 2, last], 50, first_learned=1) for last in range(6)]
    found = decode(model, waiting, steps=5)
    assert [len(each.tokens) for each in found] == [3 + 5] * 4, "two were not begun"
    for each in found:
        assert each.states is not None
        assert len(each.states) == len(each.tokens) - 1


def test_what_has_not_begun_when_stopped_is_left_out():
    """The first step only reads the last token of the prompts."""
    model = make_family("llama")
    assert decode(model, [Continuation([1, 2, 3], 50, first_learned=1)], steps=0) == []


def test_models_that_cannot_be_batched_are_decoded_one_by_one():
    """mlx-lm pads the states of a Mamba, and cannot batch the masks of Gemma 2."""
    expected = {"llama": 4, "qwen3_5": 4, "mamba": 1, "gemma2": 1}
    assert {name: measure_batch_size(make_family(name)) for name in expected} == expected
