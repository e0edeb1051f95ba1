"""Batches of the target: answers are those of decoding alone, and their states those of a second
reading.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import partial
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx_lm.sample_utils import make_sampler

from helpers.families import make_family
from mlx_redrafter import generate_step
from mlx_redrafter.text.encoding import encode_chat
from mlx_redrafter.training import answers
from mlx_redrafter.training.answers import Row, decode_rows, find_batch_size
from mlx_redrafter.training.data import Text
from mlx_redrafter.training.hidden_states import add_hidden_states

GREEDY = partial(mx.argmax, axis=-1)
TEXTS = ("def main(", "import", "class A:\n", "for x in", "return")


@pytest.fixture(autouse=True)
def small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answers, "MAX_BATCH_SIZE", 4)


def decode(
    model: nn.Module,
    rows: Sequence[Row],
    sampler: Any = GREEDY,
    ends: Collection[int] = (),
    steps: int = 1000,
) -> list[Row]:
    """The rows in the order in which they end."""
    waiting = list(rows)
    left = [steps]

    def should_stop(tokens: int) -> bool:
        left[0] -= 1
        return left[0] < 0

    def take(count: int) -> list[Row]:
        return [waiting.pop(0) for _ in waiting[:count]]

    return list(decode_rows(model, take, sampler, ends, should_stop, find_batch_size(model)))


def test_answers_are_those_of_decoding_alone(demo: tuple[Any, Any]) -> None:
    model, tokenizer = demo
    prompts = [encode_chat(tokenizer, text) for text in TEXTS]
    plain = [
        [token for token, _, _ in generate_step(prompt, model, max_tokens=9)] for prompt in prompts
    ]
    found = decode(model, [Row(list(prompt), 4 + at, tag=at) for at, prompt in enumerate(prompts)])
    assert len(found) == 5 > answers.MAX_BATCH_SIZE, "the last one takes the place of another"
    for row in found:
        assert row.ids == [*prompts[row.tag], *plain[row.tag][: 4 + row.tag]] and row.offset == len(
            prompts[row.tag]
        )
    end = plain[2][2]
    (short,) = decode(model, [Row(list(prompts[2]), 9)], ends={end})
    assert short.ids[short.offset :] == plain[2][: plain[2].index(end) + 1], (
        "includes the end token"
    )
    (longer,) = decode(model, [Row(list(prompts[2]), 9, least=6)], ends={end})
    assert len(longer.ids) - longer.offset >= 6 and end not in longer.ids[longer.offset : -1]


@pytest.mark.parametrize("name", ["llama", "cohere", "qwen3_5", "gemma2", "mamba", "phixtral"])
def test_states_are_those_of_a_second_reading(name: str) -> None:
    """Also of hybrids, and of models that mlx-lm does not batch correctly."""
    model = make_family(name)
    rng = np.random.default_rng(0)
    mx.random.seed(0)
    sizes = zip(rng.integers(1, 12, 9).tolist(), rng.integers(2, 14, 9).tolist(), strict=True)
    rows = [Row(rng.integers(0, 20, size).tolist(), most, first_learned=1) for size, most in sizes]
    rows += [Row([5, 3, 8, 2, 9], 6, first_learned=4), Row([7, 7, 2], 5)]
    found = decode(model, rows, make_sampler(1.0), {3})
    assert len(found) == 11 and sum(row.states is None for row in found) == 1
    for row in found:
        if row.states is None or len(row.ids) < 3:
            continue
        first = row.first_learned or 1
        (text,) = add_hidden_states(model, [Text(np.array(row.ids), first + 1)])
        assert text.states is not None and row.states.shape == text.states.shape == (
            len(row.ids) - 1,
        )
        assert np.allclose(row.states["hidden"], text.states["hidden"], rtol=2e-3, atol=2e-3)
        assert np.allclose(
            row.states["probs"][first:], text.states["probs"][first:], rtol=2e-3, atol=2e-4
        )
        likeliest = zip(row.states[first:], text.states[first:], strict=True)
        assert all(set(one["ids"][:4]) & set(other["ids"][:4]) for one, other in likeliest)
        assert not row.states["probs"][: min(first, row.offset - 1)].any(), (
            "nothing is learned there"
        )


def test_stopping_ends_all_answers_where_they_are() -> None:
    model = make_family("llama")
    found = decode(model, [Row([1, 2, at], 50, first_learned=1) for at in range(6)], steps=5)
    assert [len(row.ids) for row in found] == [3 + 5] * 4, "two were not begun"
    assert all(row.states is not None and len(row.states) == len(row.ids) - 1 for row in found)


def test_models_that_cannot_be_batched_are_decoded_one_by_one() -> None:
    """mlx-lm pads the states of a Mamba, and cannot batch the masks of Gemma 2."""
    found = {
        name: find_batch_size(make_family(name)) for name in ("llama", "qwen3_5", "mamba", "gemma2")
    }
    assert found == {"llama": 4, "qwen3_5": 4, "mamba": 1, "gemma2": 1}
