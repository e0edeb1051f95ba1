"""Where a text ends, it ends at the same token with and without a drafter: inside a round, or between two."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import pytest
from toys import SCRIPTS, Scripted, ids, make_model, make_prompt, make_tokenizer, run, scripted, with_plain

from mlx_redrafter import generate, stream_generate

PROMPT = make_prompt(7, seed=4)
COUNT = 16
BEAMS = {
    "chain": {"beam_width": 1, "draft_depth": 3},
    "tree": {"beam_width": 2, "draft_depth": 3},
    "pruned tree": {"beam_width": 3, "draft_depth": 3, "tree_size": 6},
}
CHOICES = {"greedy": {}, "sampled": {"temp": 1.0, "top_p": 0.9, "seed": 8}}
Response = tuple[int, str, str | None, bool, int]


@functools.cache
def plain_tokens(choice: str) -> tuple[int, ...]:
    return tuple(ids(run(make_model(), PROMPT, max_tokens=COUNT + 8, **CHOICES[choice])))


@functools.cache
def drafter_of(width: int, choice: str, script: str, luck: int) -> Scripted:
    return scripted(make_model(), [*PROMPT, *plain_tokens(choice)], script, width=width, luck=luck)


@functools.cache
def alone(choice: str, eos: int | None = None, stop: tuple[str, ...] = ()) -> tuple[Response, ...]:
    """The responses without a drafter."""
    return tuple(responses(None, choice, eos=() if eos is None else (eos,), stop=list(stop)))


def responses(beam: str | None, choice: str, script: str = "mixed", *, luck: int = 0, **more: Any) -> list[Response]:
    """(token, text, reason, whether it was drafted, rounds so far) of each response of one stream."""
    options: dict[str, Any] = {"max_tokens": COUNT} | CHOICES[choice] | more
    tokenizer = make_tokenizer(options.pop("eos", ()))
    if beam is not None:
        options |= BEAMS[beam] | {"drafter": drafter_of(BEAMS[beam]["beam_width"], choice, script, luck)}
    stream = stream_generate(make_model(), tokenizer, PROMPT, **options)
    return [(r.token, r.text, r.finish_reason, r.from_draft, r.rounds) for r in stream]


def what_is_said(found: Sequence[Response]) -> list[tuple[int, str, str | None]]:
    """All that may not depend on the drafter."""
    return [response[:3] for response in found]


@pytest.mark.parametrize("choice", CHOICES)
@pytest.mark.parametrize("beam", BEAMS)
def test_an_end_of_text_token_ends_the_text_wherever_in_a_round_it_falls(beam: str, choice: str) -> None:
    plain, places = plain_tokens(choice)[:COUNT], set()
    for turn, eos in enumerate(sorted(set(plain))):
        expected = what_is_said(alone(choice, eos))
        assert [token for token, _, _ in expected] == list(plain[: plain.index(eos) + 1])
        assert expected[-1][2] == "stop" and all(reason is None for _, _, reason in expected[:-1])
        for script in ("mixed", SCRIPTS[turn % 2]):
            found = responses(beam, choice, script, luck=turn, eos=[eos])
            assert what_is_said(found) == expected
            places.add("root" if found[-1][4] == 0 else "accepted" if found[-1][3] else "tip")
    assert places == {"root", "accepted", "tip"}


@pytest.mark.parametrize("choice", CHOICES)
@pytest.mark.parametrize("beam", BEAMS)
def test_a_stop_string_ends_the_text_wherever_in_a_round_it_falls(beam: str, choice: str) -> None:
    whole, places = "".join(text for _, text, _, _, _ in alone(choice)), set()
    assert len(whole) == COUNT
    for length in (1, 3):
        for start in range(0, COUNT - length + 1, length):
            stop = whole[start : start + length]
            expected = alone(choice, stop=(stop, "never said"))
            assert "".join(text for _, text, _, _, _ in expected) == whole[: whole.index(stop)]
            found = responses(beam, choice, luck=start, stop=[stop, "never said"])
            assert what_is_said(found) == what_is_said(expected)
            assert found[-1][2] == "stop"
            places.add("root" if found[-1][4] == 0 else "accepted" if found[-1][3] else "tip")
    assert places == {"root", "accepted", "tip"}


@pytest.mark.parametrize("script", SCRIPTS)
@pytest.mark.parametrize("beam", BEAMS)
def test_every_max_tokens_ends_the_generation_at_that_token(beam: str, script: str) -> None:
    model = make_model()
    plain, drafter = with_plain(model, PROMPT, 13, script, width=BEAMS[beam]["beam_width"])
    for count in range(13):
        assert ids(run(model, PROMPT, drafter, max_tokens=count, **BEAMS[beam])) == ids(plain[:count])
        if count:
            found = responses(beam, "greedy", script, max_tokens=count)
            assert [token for token, *_ in found] == ids(plain[:count])
            assert [reason for _, _, reason, _, _ in found] == [None] * (count - 1) + ["length"]


def test_a_text_without_end_goes_on_as_plain_decoding_does() -> None:
    beam, model, count = "pruned tree", make_model(), 300
    plain, drafter = with_plain(model, PROMPT, count, "mixed", width=BEAMS[beam]["beam_width"], luck=2)
    stream = stream_generate(model, make_tokenizer(), PROMPT, drafter=drafter, max_tokens=-1, **BEAMS[beam])
    assert [response.token for _, response in zip(range(count), stream, strict=False)] == ids(plain)
    stream.close()


def test_the_whole_text_is_the_stream_put_together() -> None:
    drafter = scripted(make_model(), [*PROMPT, *plain_tokens("greedy")], "mixed", width=3)
    expected = "".join(text for _, text, _, _, _ in alone("greedy"))
    options = {"max_tokens": COUNT, "beam_width": 3, "draft_depth": 2}
    assert generate(make_model(), make_tokenizer(), PROMPT, drafter=drafter, **options) == expected
