"""What a client may ask for: checked before anything of it is used."""

from __future__ import annotations

import inspect
import json
import math
from contextlib import suppress
from typing import Any

import mlx.core as mx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerBase

from mlx_redrafter.serving.bodies import (
    CHECKS,
    LARGEST,
    LONGEST_STOP,
    MAX_NESTING,
    MOST_STOPS,
    RESERVED,
    STRONGEST,
    Refusal,
    read,
)
from mlx_redrafter.serving.decoding import IMPOSSIBLE, finite

CHAT = {"messages": [{"role": "user", "content": "hello"}]}


def body(**fields: Any) -> dict[str, Any]:
    """What is made of a chat request with these fields."""
    return read(json.dumps(CHAT | fields).encode())


def nested(depth: int) -> Any:
    value: Any = 0
    for _ in range(depth):
        value = [value]
    return value


def test_what_is_right_stays_as_it_is() -> None:
    asked = {
        "model": "default_model",
        "stream": True,
        "temperature": 0.5,
        "top_k": 3,
        "seed": -(2**80),
        "tools": [{"type": "function"}],
        "plan": [2, 3],
        "something_else": {"x": [1, None]},
        "n": 1,
    }
    assert body(**asked) == CHAT | asked


def test_what_may_be_written_in_several_ways_is_made_one() -> None:
    found = body(
        stop="x", xtc_probability=1, stream_options={}, logit_bias={"07": 1}, max_tokens=None, draft_model=None
    )
    assert found["stop"] == ["x"] and found["stream_options"] == {"include_usage": False}
    assert found["logit_bias"] == {"7": 1.0}
    assert isinstance(found["xtc_probability"], float) and isinstance(found["logit_bias"]["7"], float)
    # null is as good as nothing, but asks for plain decoding in place of a drafter's name.
    assert "max_tokens" not in found and found["draft_model"] is None and "draft_model" not in body()


@pytest.mark.parametrize(
    ("raw", "said"),
    [
        (b"", "Invalid JSON"),
        (b"\xff{}", "not UTF-8"),
        (b"{", "Invalid JSON"),
        (b"[]", "got a list"),
        (b"3", "got a number"),
        (b"null", "got null"),
        (b"[" * 100_000, "nested deeper"),
        (b'{"x":' + b"[" * 200 + b"]" * 200 + b"}", "nested deeper"),
        (b'{"seed":' + b"1" * 5000 + b"}", "Invalid JSON"),
        (b'{"temperature": NaN}', "NaN is no number"),
        (b'{"temperature": -Infinity}', "-Infinity is no number"),
        (b'{"temperature": 1e999}', "temperature must be a finite number"),
    ],
)
def test_what_is_no_json_object_is_refused(raw: bytes, said: str) -> None:
    with pytest.raises(Refusal, match=said) as caught:
        read(raw)
    assert caught.value.status == 400


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tokens", True),
        ("max_tokens", 3.0),
        ("max_tokens", "3"),
        ("top_k", LARGEST + 1),
        ("seed", 1.5),
        ("seed", False),
        ("temperature", "hot"),
        ("temperature", True),
        ("temperature", 10**400),
        ("stream", 1),
        ("logprobs", 5),
        ("model", 3),
        ("model", ""),
        ("adapters", ""),
        ("draft_model", ["a"]),
        ("stop", 5),
        ("stop", [""]),
        ("stop", ["a", 5]),
        ("stop", ""),
        ("stop", ["a"] * (MOST_STOPS + 1)),
        ("stop", "a" * (LONGEST_STOP + 1)),
        ("prompt", ["a"]),
        ("messages", []),
        ("messages", "hello"),
        ("messages", [3]),
        ("messages", [{"content": "x"}]),
        ("messages", [{"role": 3}]),
        ("messages", [{"role": "user", "content": 3}]),
        ("messages", [{"role": "user", "content": ["x"]}]),
        ("messages", [{"role": "user", "content": [{"text": "x"}]}]),
        ("messages", [{"role": "user", "content": [{"type": "text", "text": 3}]}]),
        ("messages", [{"role": "user", "content": [{"type": "text"}]}]),
        ("messages", [{"role": "user", "content": [{"type": "text", "text": None}]}]),
        ("messages", [{"role": "user"}]),
        ("messages", [{"role": "system"}, {"role": "user", "content": "x"}]),
        ("messages", [{"role": "assistant", "tool_calls": 3}]),
        ("tools", {}),
        ("role_mapping", {"user": 3}),
        ("chat_template_kwargs", []),
        ("chat_template_kwargs", {"chat_template": "{% for i in range(99999) %}{% endfor %}"}),
        ("chat_template_kwargs", {"enable_thinking": True, "max_length": 3}),
        ("stream_options", True),
        ("stream_options", {"include_usage": 1}),
        ("stream_options", {"include_usage": None}),
        ("stream_options", {"include_drafts": "yes"}),
        ("stream_options", {"include_drafts": 1}),
        ("stream_options", {"include_drafts": None}),
        ("logit_bias", [1]),
        ("logit_bias", {"a": 1}),
        ("logit_bias", {"-1": 1}),
        ("logit_bias", {"1" * 5000: 1}),
        ("logit_bias", {"1": None}),
        ("logit_bias", {"1": 1e39}),
        ("logit_bias", {"1": -1e19}),
        ("presence_penalty", 1e19),
        ("frequency_penalty", -1e19),
        ("repetition_penalty", 1e19),
        ("repetition_penalty", 1e-39),
        ("n", 2),
        ("n", "1"),
        ("plan", 3),
        ("plan", [1, "2"]),
        ("plan", "x" * 100_000),
        ("plan", [1] * 100_000),
        ("plan", {"x": "y" * 100_000}),
    ],
)
def test_a_field_of_the_wrong_kind_is_refused_by_its_name(field: str, value: Any) -> None:
    with pytest.raises(Refusal) as caught:
        body(**{field: value})
    assert field in str(caught.value) and len(str(caught.value).splitlines()) == 1 and len(str(caught.value)) < 200


def test_a_content_may_be_nothing_where_mlx_lm_has_a_use_for_it() -> None:
    called = [{"role": "assistant", "tool_calls": []}, {"role": "assistant", "content": None}]
    told = [*called, {"role": "tool"}, {"role": "user", "content": None}]
    assert body(messages=told)["messages"] == told


def test_what_is_missing_in_a_message_is_named() -> None:
    parts = [{"type": "text", "text": "x"}, {"type": "text"}]
    for message, said in (
        ({"role": "user"}, "messages[1].content must be a string or a list of parts, got none"),
        ({"role": "user", "content": parts}, "messages[1].content text must be a string, got null"),
    ):
        with pytest.raises(Refusal) as caught:
            body(messages=[{"role": "user", "content": "x"}, message])
        assert str(caught.value) == said


def test_every_argument_of_apply_chat_template_is_refused_or_known_to_do_no_harm() -> None:
    harmless = {"continue_final_message", "documents", "sanitize_control_tokens"}
    theirs = set(inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters)
    assert theirs - {"self", "kwargs"} - RESERVED <= harmless
    for name in RESERVED:
        with pytest.raises(Refusal, match=f"variables of the model's own template, got {name}"):
            body(chat_template_kwargs={name: None})
    asked = {"chat_template_kwargs": {"enable_thinking": False, "anything": [1, {"x": "y"}]}}
    assert body(**asked) == CHAT | asked


def test_a_reply_has_no_number_that_json_has_not() -> None:
    assert [finite(each) for each in (-0.5, -math.inf, math.nan)] == [-0.5, IMPOSSIBLE, IMPOSSIBLE]


def test_no_bias_and_penalty_that_pass_make_a_float32_infinite_together() -> None:
    asked: dict[str, Any] = {"logit_bias": {"1": STRONGEST}, "repetition_penalty": 1 / STRONGEST}
    assert body(**asked) == CHAT | asked
    assert mx.isfinite(mx.array(STRONGEST) / (1 / STRONGEST)).item()
    assert body(repetition_penalty=0, presence_penalty=-0.5)["repetition_penalty"] == 0


def test_stop_strings_may_be_as_many_and_as_long_as_is_said() -> None:
    stops = ["a" * LONGEST_STOP] * MOST_STOPS
    assert body(stop=stops)["stop"] == stops and body(stop=[])["stop"] == []


def test_a_body_may_be_as_deep_as_it_says() -> None:
    assert body(x=nested(MAX_NESTING - 2)) == CHAT | {"x": nested(MAX_NESTING - 2)}
    with pytest.raises(Refusal, match=f"deeper than {MAX_NESTING}"):
        body(x=nested(MAX_NESTING))


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=300, deadline=None)
@given(st.dictionaries(st.sampled_from([*CHECKS, "n"]), VALUES, max_size=4))
def test_whatever_is_sent_is_refused_or_becomes_what_can_be_sent_again(fields: dict[str, Any]) -> None:
    try:
        found = read(json.dumps(fields).encode())
    except Refusal as refusal:
        assert refusal.status == 400 and len(str(refusal)) < 300
        return
    assert read(json.dumps(found).encode()) == found
    assert all(math.isfinite(value) for value in found.values() if isinstance(value, float))


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=60))
def test_no_bytes_raise_anything_but_a_refusal(raw: bytes) -> None:
    with suppress(Refusal):
        assert isinstance(read(raw), dict)
