"""The three functions: their responses, their ends, and what they say of a drafter that is of no use."""

from __future__ import annotations

import dataclasses
import warnings
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.generate import GenerationResponse as MlxLmResponse
from mlx_lm.generate import stream_generate as mlx_lm_stream_generate
from mlx_lm.sample_utils import make_sampler
from small import small_drafter
from toys import VOCAB, make_model, make_tokenizer

from mlx_redrafter import GenerationResponse, RedrafterError, generate, generate_step, stream_generate
from mlx_redrafter import generate as generation

PROMPT = [1, 2, 3]
pytestmark = pytest.mark.filterwarnings("ignore:the drafter has guessed no token right")


@pytest.fixture
def parts() -> tuple[Any, Any, Any]:
    model = make_model()
    return model, make_tokenizer(), small_drafter(hidden=model.args.hidden_size, vocab=VOCAB)


def test_a_response_has_every_field_of_mlx_lms_and_the_rounds(parts: tuple[Any, Any, Any]) -> None:
    model, tokenizer, drafter = parts
    last = list(stream_generate(model, tokenizer, PROMPT, drafter=drafter, max_tokens=30, beam_width=2, temp=1.0))[-1]
    theirs = {field.name for field in dataclasses.fields(MlxLmResponse)}
    assert theirs < {field.name for field in dataclasses.fields(GenerationResponse)}
    assert last.generation_tokens == 30 == 1 + last.rounds + last.accepted
    assert last.drafted == 6 * last.rounds
    assert last.tokens_per_round == pytest.approx(1 + last.accepted / last.rounds)
    assert sum(last.acceptance_per_depth) * last.rounds == pytest.approx(last.accepted)
    assert last.logprobs.shape == (VOCAB,) and mx.logsumexp(last.logprobs).item() == pytest.approx(0, abs=1e-4)
    assert last.prompt_tokens == 3 and last.finish_reason == "length"


@pytest.mark.parametrize("drafted", [False, True])
def test_plain_and_drafted_responses_are_mlx_lms_token_for_token(parts: tuple[Any, Any, Any], drafted: bool) -> None:
    model, tokenizer, drafter = parts
    theirs = list(mlx_lm_stream_generate(model, tokenizer, PROMPT, max_tokens=40))
    ours = list(stream_generate(model, tokenizer, PROMPT, drafter=drafter if drafted else None, max_tokens=40))
    for name in ("text", "token", "prompt_tokens", "generation_tokens", "finish_reason"):
        assert [getattr(r, name) for r in ours] == [getattr(r, name) for r in theirs], name
    assert all(mx.allclose(a.logprobs, b.logprobs, atol=1e-4) for a, b in zip(ours, theirs, strict=True))


def test_256_tokens_are_made_when_nothing_is_said(parts: tuple[Any, Any, Any]) -> None:
    model, tokenizer, drafter = parts
    assert len(list(generate_step(PROMPT, model, drafter))) == 256
    responses = list(stream_generate(model, tokenizer, PROMPT, drafter=drafter))
    assert len(responses) == 256 and responses[-1].finish_reason == "length"
    assert generate(model, tokenizer, PROMPT, drafter=drafter) == "".join(r.text for r in responses)


def test_a_prompt_may_be_text_ids_or_an_array(parts: tuple[Any, Any, Any]) -> None:
    model, tokenizer, drafter = parts
    text = tokenizer.decode(PROMPT)
    ids = tokenizer.encode(text)
    made = [generate(model, tokenizer, prompt, drafter=drafter, max_tokens=12) for prompt in (text, ids, mx.array(ids))]
    assert made[0] == made[1] == made[2]


def test_a_drawn_seed_is_reported_and_repeats_the_text(parts: tuple[Any, Any, Any]) -> None:
    model, tokenizer, drafter = parts
    first = list(stream_generate(model, tokenizer, PROMPT, temp=1.0, max_tokens=30))
    again = list(
        stream_generate(model, tokenizer, PROMPT, drafter=drafter, temp=1.0, max_tokens=30, seed=first[0].seed)
    )
    other = list(stream_generate(model, tokenizer, PROMPT, temp=1.0, max_tokens=30))
    assert [r.token for r in first] == [r.token for r in again] != [r.token for r in other]
    assert first[0].seed == again[-1].seed != other[0].seed


def test_a_drawn_seed_is_the_one_that_all_ranks_share(
    parts: tuple[Any, Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, tokenizer, drafter = parts
    drawn: list[int] = []
    monkeypatch.setattr(generation, "draw_seed", lambda: drawn.append(1) or 77)
    options: dict[str, Any] = {"drafter": drafter, "temp": 1.0, "max_tokens": 5}
    responses = list(stream_generate(model, tokenizer, PROMPT, **options))
    assert [r.seed for r in responses] == [77] * 5 and len(drawn) == 1, "once: each draw waits for the other ranks"
    assert list(stream_generate(model, tokenizer, PROMPT, seed=3, **options))[-1].seed == 3 and len(drawn) == 1


def test_a_drafter_that_guesses_nothing_is_said_out_loud_once(parts: tuple[Any, Any, Any]) -> None:
    model, tokenizer, drafter = parts
    never = small_drafter(hidden=drafter.args.hidden_size, vocab=VOCAB)
    right = {r.token for r in stream_generate(model, tokenizer, PROMPT, max_tokens=100)}
    # It can only say a token that the target never chooses.
    wrong = next(token for token in range(VOCAB) if token not in right)
    head = never.lm_head[-1]
    head.weight = mx.zeros_like(head.weight)
    only = mx.where(mx.arange(VOCAB) == wrong, 0.0, -1e9)
    never.logits = lambda hidden, state: mx.broadcast_to(only, (*state.shape[:-1], VOCAB))  # type: ignore[method-assign]
    with pytest.warns(UserWarning, match="guessed no token right in 16 rounds") as caught:
        list(stream_generate(model, tokenizer, PROMPT, drafter=never, max_tokens=60, plan=(1, 3)))
    assert len(caught) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        list(stream_generate(model, tokenizer, PROMPT, drafter=never, max_tokens=14, plan=(1, 3)))


def test_a_samplers_own_randomness_is_the_callers(parts: tuple[Any, Any, Any]) -> None:
    model, tokenizer, drafter = parts
    shapes = set()

    def sampler(logprobs: mx.array) -> mx.array:
        shapes.add(logprobs.shape)
        return make_sampler(temp=1.0)(logprobs)

    made = [generate(model, tokenizer, PROMPT, drafter=drafter, sampler=sampler, beam_width=2) for _ in range(2)]
    assert made[0] != made[1] and shapes == {(1, VOCAB)}


@pytest.mark.parametrize("options", [{"max_tokens": 0}, {"stop": [""]}, {"stop": ["a", 3]}, {"seed": "x"}])
def test_bad_options_are_refused_on_the_first_next(parts: tuple[Any, Any, Any], options: dict[str, Any]) -> None:
    model, tokenizer, drafter = parts
    with pytest.raises(RedrafterError):
        next(stream_generate(model, tokenizer, PROMPT, drafter=drafter, **options))
