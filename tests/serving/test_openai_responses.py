"""OpenAI's Responses API, with the official client and as Codex uses it."""

from __future__ import annotations

import json
from typing import Any

import openai

from helpers.servers import Scripted

SHELL = {
    "type": "function",
    "name": "shell",
    "description": "Run it.",
    "parameters": {"type": "object"},
}
CALL = '<tool_call>{"name": "shell", "arguments": {"command": ["ls"]}}</tool_call>'


def test_text_without_streaming(scripted: Scripted, scripted_openai: openai.OpenAI) -> None:
    scripted[1].texts = [["Let me see.</think>", "It is ", "blue."]]
    made = scripted_openai.responses.create(model="demo", input="Why?", instructions="Be brief.")
    assert scripted[1].prompt == "<system>Be brief.<user>Why?<assistant><think>"
    assert made.output_text == "It is blue." and made.status == "completed"
    assert (
        made.usage
        and 0 < made.usage.output_tokens_details.reasoning_tokens < made.usage.output_tokens
    )
    assert [item.type for item in made.output] == ["reasoning", "message"]
    usage: Any = made.usage
    assert usage.input_tokens + usage.output_tokens == usage.total_tokens
    assert (usage.rounds, usage.drafted, usage.accepted, usage.tokens_per_round) == (4, 8, 6, 2.5)


def test_events_come_in_order(scripted: Scripted, scripted_openai: openai.OpenAI) -> None:
    scripted[1].texts = [["Hm.", "</think>", "I ", "look.", CALL]]
    events = list(
        scripted_openai.responses.create(model="demo", input="ls", tools=[SHELL], stream=True)
    )  # type: ignore[list-item]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type.removeprefix("response.") for event in events]
    text = [
        "output_item.added",
        "content_part.added",
        "DELTAS",
        "DONE",
        "content_part.done",
        "output_item.done",
    ]
    expected = ["created", "in_progress"]
    for kind in ("reasoning_text", "output_text"):
        expected += [
            each.replace("DELTAS", f"{kind}.delta").replace("DONE", f"{kind}.done") for each in text
        ]
    expected += [
        "output_item.added",
        "function_call_arguments.delta",
        "function_call_arguments.done",
    ]
    expected += ["output_item.done", "completed"]
    assert [
        kind for at, kind in enumerate(kinds) if kinds[at - 1] != kind or not kind.endswith("delta")
    ] == expected
    for kind, whole in (("reasoning_text", "Hm."), ("output_text", "I look.")):
        deltas = [event.delta for event in events if event.type == f"response.{kind}.delta"]  # type: ignore[union-attr]
        (done,) = [event.text for event in events if event.type == f"response.{kind}.done"]  # type: ignore[union-attr]
        assert "".join(deltas) == done == whole
    last: Any = events[-1]
    call = last.response.output[-1]
    assert (call.type, call.name, json.loads(call.arguments)) == (
        "function_call",
        "shell",
        {"command": ["ls"]},
    )
    assert call.status == "completed" and last.response.usage.output_tokens > 0


def test_an_answer_cut_short_is_incomplete(
    scripted: Scripted, scripted_openai: openai.OpenAI
) -> None:
    scripted[1].texts = [["</think>one two three four five six"]]
    made = scripted_openai.responses.create(model="demo", input="Count.", max_output_tokens=4)
    assert made.status == "incomplete" and made.incomplete_details is not None
    assert (
        made.incomplete_details.reason == "max_output_tokens"
        and made.usage
        and made.usage.output_tokens == 4
    )
    assert made.output[-1].status == "incomplete"


def test_a_schema_is_passed_on(scripted: Scripted, scripted_openai: openai.OpenAI) -> None:
    shape: Any = {"format": {"type": "json_schema", "name": "n", "schema": {"type": "object"}}}
    scripted_openai.responses.create(model="demo", input="x", text=shape)
    assert scripted[1].requests[-1].asked["grammar"] is not None
