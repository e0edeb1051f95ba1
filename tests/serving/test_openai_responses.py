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
    assert made.output_text == "It is blue."
    assert made.status == "completed"
    assert made.usage
    assert 0 < made.usage.output_tokens_details.reasoning_tokens < made.usage.output_tokens
    assert [item.type for item in made.output] == ["reasoning", "message"]
    usage: Any = made.usage
    assert usage.input_tokens + usage.output_tokens == usage.total_tokens
    assert usage.rounds == 4
    assert usage.drafted == 8
    assert usage.accepted == 6
    assert usage.tokens_per_round == 2.5


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
        steps = {f"response.{kind}.{step}": step for step in ("delta", "done")}
        told: list[Any] = [event for event in events if event.type in steps]
        deltas = [event.delta for event in told if steps[event.type] == "delta"]
        (done,) = [event.text for event in told if steps[event.type] == "done"]
        assert "".join(deltas) == done == whole
    last: Any = events[-1]
    call = last.response.output[-1]
    assert call.type == "function_call"
    assert call.name == "shell"
    assert json.loads(call.arguments) == {"command": ["ls"]}
    assert call.status == "completed"
    assert last.response.usage.output_tokens > 0


def test_an_answer_cut_short_is_incomplete(
    scripted: Scripted, scripted_openai: openai.OpenAI
) -> None:
    scripted[1].texts = [["</think>one two three four five six"]]
    made = scripted_openai.responses.create(model="demo", input="Count.", max_output_tokens=4)
    assert made.status == "incomplete"
    assert made.incomplete_details is not None
    assert made.incomplete_details.reason == "max_output_tokens"
    assert made.usage
    assert made.usage.output_tokens == 4
    assert made.output[-1].status == "incomplete"


def test_a_schema_is_passed_on(scripted: Scripted, scripted_openai: openai.OpenAI) -> None:
    shape: Any = {"format": {"type": "json_schema", "name": "n", "schema": {"type": "object"}}}
    scripted_openai.responses.create(model="demo", input="x", text=shape)
    assert scripted[1].requests[-1].asked["grammar"] is not None
