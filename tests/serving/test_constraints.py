"""What an answer must be: a format under any API's name, which tools it may call, and how often."""

import json
from collections.abc import Iterator
from itertools import product
from typing import Any

import pytest

from helpers.servers import (
    BODIES,
    CHAT_TEMPLATE,
    USER,
    ask,
    events_of,
    refuse,
    save_tokenizer,
    start_scripted,
)

OBJECT = {"type": "object"}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
NAMED = {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}
FLAT = {"type": "json_schema", "schema": SCHEMA}
PATHS = ("/v1/chat/completions", "/v1/responses", "/v1/messages")


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    ("fields", "schema"),
    [
        *product(
            [
                {"response_format": NAMED},
                {"response_format": FLAT},
                {"text": {"format": FLAT}},
                {"output_config": {"format": FLAT}},
                {"output_format": FLAT},
                {"format": SCHEMA},
                {"guided_json": SCHEMA},
                {"guided_json": json.dumps(SCHEMA)},
                {"json_schema": SCHEMA},
                {"structured_outputs": {"json": SCHEMA, "regex": None, "json_object": False}},
            ],
            [SCHEMA],
        ),
        *product(
            [
                {"response_format": {"type": "json_object"}},
                {"format": "json"},
                {"structured_outputs": {"json_object": True}},
            ],
            [OBJECT],
        ),
    ],
    ids=str,
)
def test_a_schema_is_followed_wherever_it_is(scripted, path, fields, schema):
    assert ask(scripted[0], path, BODIES[path] | fields).status == 200
    assert scripted[1].requests[-1].asked["grammar"].arguments[0] == schema


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"guided_regex": "a+"}, "guided_regex"),
        ({"guided_choice": ["a", "b"]}, "guided_choice"),
        ({"guided_grammar": "start: x"}, "guided_grammar"),
        ({"grammar": 'root ::= "p"'}, "grammar"),
        ({"regex": "a+"}, "regex"),
        ({"ebnf": 'root ::= "p"'}, "ebnf"),
        ({"structural_tag": {"structures": []} | FLAT}, "structural_tag"),
        ({"structured_outputs": {"choice": ["a"]}}, "structured_outputs.choice"),
        ({"response_format": {"type": "structural_tag"}}, "response_format.type"),
        ({"response_format": {"type": "regex", "regex": "a"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        (
            {"response_format": {"type": "json_schema", "json_schema": SCHEMA}},
            "response_format json_schema needs a schema, got",
        ),
        ({"guided_json": "no JSON"}, "guided_json the schema is not JSON"),
        ({"guided_json": SCHEMA, "format": SCHEMA}, "expected one format of the answer, got 2"),
    ],
    ids=str,
)
def test_other_formats_are_refused_by_name(scripted, path, fields, named):
    assert refuse(scripted[0], path, BODIES[path] | fields).startswith(named)


def declare(name: str, path: str) -> dict[str, Any]:
    """A tool without parameters."""
    if path == "/v1/messages":
        return {"name": name, "input_schema": OBJECT}
    function = {"name": name, "parameters": OBJECT}
    if path == "/v1/responses":
        return {"type": "function", **function}
    return {"type": "function", "function": function}


def call(name: str) -> str:
    return f'<tool_call>{{"name": "{name}", "arguments": {{}}}}</tool_call>'


def list_calls(reply: dict[str, Any]) -> list[str]:
    """Names of the tools that a reply calls."""
    if "choices" in reply:
        calls = reply["choices"][0]["message"].get("tool_calls", [])
        return [each["function"]["name"] for each in calls]
    items = reply.get("output", reply.get("content"))
    return [each["name"] for each in items if each["type"] in ("function_call", "tool_use")]


ONCE = {
    "/v1/chat/completions": {"parallel_tool_calls": False},
    "/v1/responses": {"parallel_tool_calls": False},
    "/v1/messages": {"tool_choice": {"type": "auto", "disable_parallel_tool_use": True}},
}


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("together", [False, True], ids=["two calls", "a list of two"])
def test_one_call_where_one_was_asked_for(scripted, path, together):
    server, worker = scripted
    text = call("f") + call("g") + "and more"
    if together:
        text = '<tool_call>[{"name": "f"}, {"name": "g"}]</tool_call>'
    worker.texts = [["</think>", text]]
    body = BODIES[path] | {"tools": [declare("f", path), declare("g", path)]}
    assert list_calls(ask(server, path, body).json) == ["f", "g"]
    reply = ask(server, path, body | ONCE[path]).json
    assert list_calls(reply) == ["f"]
    assert worker.requests[-1].cancelled
    assert "and more" not in json.dumps(reply)
    if path == "/v1/responses":
        assert reply["parallel_tool_calls"] is False
        assert reply["status"] == "completed"
    elif path == "/v1/messages":
        assert reply["stop_reason"] == "tool_use"
    else:
        assert reply["choices"][0]["finish_reason"] == "tool_calls"


def allow(path: str, mode: str, *names: str) -> dict[str, Any]:
    """The `tool_choice` that allows these tools."""
    tools = [{"type": "function", "name": name} for name in names]
    if path == "/v1/responses":
        return {"type": "allowed_tools", "mode": mode, "tools": tools}
    nested = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": nested}}


@pytest.mark.parametrize("path", PATHS[:2])
def test_only_allowed_tools_are_called(scripted, path):
    server, worker = scripted
    body = BODIES[path] | {"tools": [declare(name, path) for name in ("f", "g", "h")]}
    worker.texts = [["</think>", call("f"), call("h"), call("g")]]
    whole = ask(server, path, body)
    prompt = worker.prompt
    assert list_calls(whole.json) == ["f", "h", "g"]
    reply = ask(server, path, body | {"tool_choice": allow(path, "auto", "f", "g")})
    assert list_calls(reply.json) == ["f", "g"]
    assert call("h") in reply.body.decode().replace('\\"', '"')
    assert worker.prompt == prompt, "the cached prompt is the same"

    worker.texts = [["</think>", '{"name": "g", "arguments": {}}']]
    reply = ask(server, path, body | {"tool_choice": allow(path, "required", "g", "f")})
    assert list_calls(reply.json) == ["g"]
    functions = worker.requests[-1].asked["grammar"].arguments[0]
    assert [function["name"] for function in functions] == ["g", "f"]
    for choice in (allow(path, "auto", "x"), {"type": "allowed_tools"}):
        assert refuse(server, path, body | {"tool_choice": choice}).startswith("tool_choice")


@pytest.mark.parametrize(
    ("fields", "mark"),
    [
        ({"continue_final_message": True, "add_generation_prompt": False}, {}),
        ({"continue_final_message": True}, {}),
        ({}, {"prefix": True}),
        ({}, {"partial": True}),
    ],
    ids=str,
)
def test_a_begun_answer_is_continued(scripted, fields, mark):
    body = {"messages": [*USER, {"role": "assistant", "content": "I am", **mark}], **fields}
    assert ask(scripted[0], "/v1/chat/completions", body).status == 200
    assert scripted[1].prompt == "<user>Hi<assistant>I am"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/messages"])
def test_a_continued_text_keeps_its_first_space(scripted, path, stream):
    scripted[1].texts = [[" a", "  b"]]
    begun = {"messages": [*USER, {"role": "assistant", "content": "I am"}], "max_tokens": 99}
    body = BODIES[path] | begun | {"continue_final_message": True, "stream": stream}
    reply = ask(scripted[0], path, body)
    made = events_of(reply) if stream else [reply.json]
    assert "".join(find_texts(made)) == " a  b"


def find_texts(part) -> Iterator[str]:
    """Yields the texts of an answer in any API's form."""
    if isinstance(part, list):
        for each in part:
            yield from find_texts(each)
    elif isinstance(part, dict):
        for name, value in part.items():
            if name in ("text", "content") and isinstance(value, str):
                yield value
            else:
                yield from find_texts(value)


def test_whitespace_that_the_template_removes_still_ends_the_prompt(tmp_path):
    template = CHAT_TEMPLATE.replace("m.content", "(m.content | trim)")
    messages = [*USER, {"role": "assistant", "content": "def f():\n    "}]
    with start_scripted(save_tokenizer(tmp_path, template)) as (server, worker):
        assert ask(server, "/v1/messages", {"messages": messages, "max_tokens": 9}).status == 200
    assert worker.prompt == "<user>Hi<assistant>def f():\n    "


@pytest.mark.parametrize(
    "fields", [{"continue_final_message": True}, {"add_generation_prompt": False}], ids=str
)
def test_an_answer_that_cannot_be_continued_is_refused(scripted, fields):
    said = refuse(scripted[0], "/v1/chat/completions", {"messages": USER, **fields})
    assert "continue_final_message" in said


def test_a_stream_ends_with_its_only_call(scripted):
    server, worker = scripted
    path = "/v1/chat/completions"
    worker.texts = [["</think>", call("f"), call("f")]]
    body = {"messages": USER, "tools": [declare("f", path)], "parallel_tool_calls": False}
    events = events_of(ask(server, path, body | {"stream": True}))
    choices = [event["choices"][0] for event in events]
    assert sum(len(each["delta"].get("tool_calls", ())) for each in choices) == 1
    assert choices[-1]["finish_reason"] == "tool_calls"
