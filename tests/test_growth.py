"""What a cache is said to take is never less than what it holds, however the text was read, drafted and quantised."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import pytest
from families import make_family
from mlx_lm.generate import maybe_quantize_kv_cache
from mlx_lm.models.cache import make_prompt_cache
from test_session import END, make_drafter, make_model, never, session
from toys import ids, run

from mlx_redrafter import RedrafterError, Session
from mlx_redrafter.session.memory import MARGIN, bytes_of, growth_of, reach_of

PIECES = ([10, 1, 300, 1, 1, 1], [600] + [1] * 20, [7] * 60, [255, 1, 1, 513, 3], [1] * 70 + [64, 64, 1, 1])
"""How many tokens each forward reads."""

pytestmark = pytest.mark.filterwarnings("ignore:the drafter has guessed no token right")


@pytest.mark.parametrize("how", [{}, {"max_kv_size": 64}, {"max_kv_size": 300}], ids=str)
@pytest.mark.parametrize("family", ["qwen3", "gemma3_text", "gpt_oss", "falcon_h1", "deepseek_v32", "llama4_text"])
def test_a_cache_never_holds_more_than_was_said(family: str, how: dict[str, int]) -> None:
    model = make_family(family)
    growth = growth_of(model, **how)
    for pieces in PIECES:
        cache, tokens = make_prompt_cache(model, how.get("max_kv_size")), 0
        for count in pieces:
            model(mx.ones((1, count), mx.int32), cache=cache)  # never computed: its shapes tell
            tokens += count
            held = bytes_of(cache)
            assert held <= growth.bytes_at(tokens, max(pieces)), (pieces, tokens)
        assert held > 0.3 * growth.bytes_at(tokens, pieces[-1]), "nor is it much less"


@pytest.mark.parametrize("start", [0, 100, 400])
@pytest.mark.parametrize("bits", [4, 8])
def test_a_cache_is_counted_as_it_is_before_it_is_quantised(bits: int, start: int) -> None:
    model = make_model("qwen3")
    growth = growth_of(model, kv_bits=bits, kv_group_size=32, quantized_kv_start=start)
    for pieces in PIECES:
        cache, tokens, most = make_prompt_cache(model), 0, 0
        for count in pieces:
            model(mx.ones((1, count), mx.int32), cache=cache)
            tokens += count
            most = max(most, bytes_of(cache))
            maybe_quantize_kv_cache(cache, start, 32, bits)
            assert max(most, bytes_of(cache)) <= growth.bytes_at(tokens, max(pieces)), (pieces, tokens)
    assert growth.bytes_at(40_000) < 0.7 * growth_of(model).bytes_at(40_000), "it is quantised in the end"


@pytest.mark.parametrize(
    "how",
    [
        {},
        {"max_kv_size": 64},
        {"kv_bits": 8, "kv_group_size": 32, "quantized_kv_start": 100},
        {"prefill_step_size": 50},
        {"prefill_step_size": 50, "max_kv_size": 64},
        {"beam_width": 10, "draft_depth": 12},
    ],
    ids=str,
)
@pytest.mark.parametrize("family", ["qwen3", "gemma3_text"])
def test_no_turn_takes_more_than_the_budget(family: str, how: dict[str, Any]) -> None:
    if "kv_bits" in how and family != "qwen3":
        pytest.skip("mlx-lm quantises the caches of few families")
    model = make_model(family)
    cache_of = {name: how[name] for name in how if name.startswith(("max_kv", "kv_", "quantized"))}
    budget = growth_of(model, **cache_of).bytes_at(340)
    talk = session(family, memory_budget=budget, when_full="trim", **how)
    most, refused = 0, 0

    def look(*of: Any) -> None:
        """At what is in memory, whether a prompt is read or an answer made."""
        nonlocal most
        most = max(most, bytes_of(talk._cache))

    for letters in (3, 150, 1, 90, 200, 2, 60, 280):
        try:
            talk.send("a" * letters, on_token=look, prompt_progress_callback=look, logits_processors=[never(END)])
        except RedrafterError as error:
            refused += 1
            assert f"more than its budget of {budget}" in str(error)
    assert 0.2 * budget < most <= budget and refused < 6


def test_a_ring_with_room_for_short_turns_alone_refuses_a_long_one_and_goes_on_for_ever() -> None:
    model = make_model("qwen3")
    growth = growth_of(model, max_kv_size=64)
    talk = session(max_kv_size=64, memory_budget=growth.bytes_at(10**6, MARGIN), drafter=False)
    for _ in range(12):
        assert talk.send("a" * 40).tokens
    with pytest.raises(RedrafterError, match="more than its budget"):
        talk.send("a" * 200)
    assert talk.send("a" * 200, prefill_step_size=MARGIN).tokens, "in shorter pieces it has room"
    assert len(talk.tokens) > 600


def test_a_tree_larger_than_usual_has_its_room() -> None:
    model = make_model("qwen3")
    drafter = make_drafter(model)
    assert reach_of(None, {}, 10) == reach_of(drafter, {"draft_depth": 3}, 10) == (9, MARGIN)
    assert reach_of(drafter, {"plan": (10, 12)}, 5000).tree > 121 and reach_of(drafter, {}, 5000).prompt == 2048
    for wrong in ({"prefill_step_size": "x"}, {"tree_size": 1.5}, {"plan": "maybe"}):
        with pytest.raises(RedrafterError):
            reach_of(drafter, wrong, 10)  # type: ignore[arg-type]


def test_where_no_budget_is_given_what_the_cache_holds_counts_as_free(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model("qwen3")
    talk = Session(model, session().tokenizer, max_tokens=4)
    monkeypatch.setattr("mlx_redrafter.session.memory.free", lambda: 10**7)
    room = [talk._budget.longest(talk._cache, reach_of(None, {}, 10))]
    talk.send("a" * 30)
    room.append(talk._budget.longest(talk._cache, reach_of(None, {}, 10)))
    assert room[1] > room[0], "nothing was taken from what is free"
    assert ids(run(model, talk.tokens[:-4], max_tokens=4)) == talk.tokens[-4:]
