"""A drafter that fails in the middle of an answer: plain decoding goes on from there, and nothing of it shows."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from families import Follower, make_family, overheard, script
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.sample_utils import make_logits_processors
from toys import (
    Scripted,
    assert_same_cache,
    ids,
    make_model,
    make_prompt,
    make_tokenizer,
    plainly,
    run,
    scripted,
    with_plain,
)

from mlx_redrafter import RedrafterError, stream_generate
from mlx_redrafter.options import Options

PROMPT = make_prompt(9)
COUNT = 20
CHAIN = {"beam_width": 1, "draft_depth": 4}
TREE = {"beam_width": 3, "draft_depth": 3}
HOWS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": {"temp": 0.9, "top_p": 0.9, "seed": 4},
    "processors": {"logits_processors": make_logits_processors(repetition_penalty=1.3)},
    "8 bits": {"kv_bits": 8, "kv_group_size": 32, "quantized_kv_start": 12},
}


class Broken(Exception):
    """What the drafter fails of."""


def failing(drafter: Scripted, calls: int, patch: pytest.MonkeyPatch) -> None:
    """Makes a drafter raise from this call on."""
    left, real = iter(range(calls)), type(drafter).logits

    def logits(hidden: mx.array, state: mx.array, left: Iterator[int] = left) -> mx.array:
        if next(left, None) is None:
            raise Broken(f"call {calls}")
        return real(drafter, hidden, state)

    patch.setattr(drafter, "logits", logits)


@pytest.mark.parametrize("beam", [CHAIN, TREE], ids=["chain", "tree"])
@pytest.mark.parametrize("how", HOWS)
def test_whichever_call_fails_the_tokens_and_the_cache_are_those_of_plain_decoding(
    how: str, beam: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, options = make_model(), HOWS[how]
    plain, drafter = with_plain(model, PROMPT, COUNT, "mixed", width=beam["beam_width"], luck=1, **options)
    expected = make_prompt_cache(model)
    run(model, PROMPT, max_tokens=COUNT, prompt_cache=expected, **options)
    for calls in range(0, 26, 3):
        said: list[Exception] = []
        failing(drafter, calls, monkeypatch)
        cache = make_prompt_cache(model)
        steps = run(
            model, PROMPT, drafter, max_tokens=COUNT, prompt_cache=cache, on_drafter_failure=said.append,
            **beam, **options,
        )  # fmt: skip
        assert ids(steps) == ids(plain), calls
        assert_same_cache(cache, expected)
        assert [str(error) for error in said] == [f"call {calls}"]  # once, and then never again
        counted = [step.stats.rounds for step in steps]
        assert counted == sorted(counted) and counted[-1] >= steps[-1].stats.accepted / beam["draft_depth"]


@pytest.mark.parametrize("name", ["qwen3_5", "gemma3_text", "mamba"])
def test_so_it_is_for_models_that_read_again_and_for_rings(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model: nn.Module = make_family(name)
    with overheard(model) as heard:
        plain = ids(run(model, PROMPT, max_tokens=COUNT + 8))
    text = PROMPT + plain
    drafter = Follower(model, text, heard, script("half", len(text), 1), 1)
    for calls in (0, 1, 4, 9):
        said: list[Exception] = []
        failing(drafter, calls, monkeypatch)
        steps = run(model, PROMPT, drafter, max_tokens=COUNT, on_drafter_failure=said.append, **CHAIN)
        assert ids(steps) == plain[:COUNT] and len(said) == 1


def test_the_text_of_the_answer_goes_on_where_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    model, tokenizer = make_model(), make_tokenizer()
    plain = plainly(model, tuple(PROMPT), COUNT + 8)
    drafter = scripted(model, [*PROMPT, *ids(plain)], "right", width=1)
    failing(drafter, 9, monkeypatch)
    said: list[Exception] = []
    common: dict[str, Any] = {"max_tokens": COUNT}
    expected = "".join(each.text for each in stream_generate(model, tokenizer, PROMPT, **common))
    *_, last = got = list(
        stream_generate(model, tokenizer, PROMPT, drafter=drafter, on_drafter_failure=said.append, **common, **CHAIN)
    )
    assert "".join(each.text for each in got) == expected and len(said) == 1
    assert last.accepted == 8 and last.rounds > last.accepted  # two rounds of four, and plain steps


def test_without_somebody_to_tell_the_error_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    drafter = with_plain(make_model(), PROMPT, COUNT, "mixed", width=1)[1]
    failing(drafter, 5, monkeypatch)
    with pytest.raises(Broken):
        run(make_model(), PROMPT, drafter, max_tokens=COUNT, **CHAIN)


def test_somebody_to_tell_must_be_a_function() -> None:
    with pytest.raises(RedrafterError, match="on_drafter_failure must be a function, got 3"):
        Options(on_drafter_failure=3)  # type: ignore[arg-type]
