"""OpenAI's Responses API, with the official client and as Codex uses it."""

import json

import pytest

from helpers.servers import USER, ask, refuse

SHELL = {
    "type": "function",
    "name": "shell",
    "description": "Run it.",
    "parameters": {"type": "object"},
}
CALL = '<tool_call>{"name": "shell", "arguments": {"command": ["ls"]}}</tool_call>'


def test_text_without_streaming(scripted, scripted_openai):
    scripted[1].texts = [["Let me see.</think>", "It is ", "blue."]]
    made = scripted_openai.responses.create(model="demo", input="Why?", instructions="Be brief.")
    assert scripted[1].prompt == "<system>Be brief.<user>Why?<assistant><think>"
    assert made.output_text == "It is blue."
    assert made.status == "completed"
    assert made.usage
    assert 0 < made.usage.output_tokens_details.reasoning_tokens < made.usage.output_tokens
    assert [item.type for item in made.output] == ["reasoning", "message"]
    usage = made.usage
    assert usage.input_tokens + usage.output_tokens == usage.total_tokens
    assert usage.rounds == 4
    assert usage.drafted == 8
    assert usage.accepted == 6
    assert usage.tokens_per_round == 2.5


def test_events_come_in_order(scripted, scripted_openai):
    scripted[1].texts = [["Hm.", "</think>", "I ", "look.", CALL]]
    events = list(
        scripted_openai.responses.create(model="demo", input="ls", tools=[SHELL], stream=True)
    )
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
        told = [event for event in events if event.type in steps]
        deltas = [event.delta for event in told if steps[event.type] == "delta"]
        (done,) = [event.text for event in told if steps[event.type] == "done"]
        assert "".join(deltas) == done == whole
    last = events[-1]
    call = last.response.output[-1]
    assert call.type == "function_call"
    assert call.name == "shell"
    assert json.loads(call.arguments) == {"command": ["ls"]}
    assert call.status == "completed"
    assert last.response.usage.output_tokens > 0


SAID = [
    {"type": "input_text", "text": "Sender: /root\n"},
    {"type": "encrypted_content", "encrypted_content": "Count."},
]
LOGS = [{"type": "logs", "logs": "4"}]
SHELL_OUTPUT = [{"stdout": "a.py", "stderr": "", "outcome": {"type": "exit", "exit_code": 0}}]
LOADED = {"type": "function", "name": "load", "parameters": {"type": "object"}}


@pytest.mark.parametrize(
    ("item", "shown"),
    [
        (
            {"type": "agent_message", "author": "/root", "content": SAID},
            "<user>Sender: /root\nCount.",
        ),
        ({"type": "local_shell_call", "call_id": "c", "action": {"command": ["ls"]}}, '["ls"]'),
        ({"type": "apply_patch_call", "call_id": "c", "operation": {"diff": "+x"}}, '"diff": "+x"'),
        ({"type": "mcp_call", "id": "m", "name": "f", "arguments": "{}", "output": "y"}, "<tool>y"),
        (
            {"type": "mcp_call", "id": "m", "name": "f", "arguments": "{}", "error": "no"},
            "<tool>no",
        ),
        ({"type": "code_interpreter_call", "id": "i", "code": "2+2", "outputs": LOGS}, "<tool>4"),
        ({"type": "code_interpreter_call", "id": "i", "code": "2+2", "outputs": LOGS}, '"2+2"'),
        (
            {"type": "file_search_call", "id": "s", "queries": ["q"], "results": [{"text": "r"}]},
            '"r"',
        ),
        ({"type": "web_search_call", "id": "w", "action": {"query": "q"}}, '"query": "q"'),
        ({"type": "shell_call_output", "call_id": "c", "output": SHELL_OUTPUT}, '"stdout": "a.py"'),
        ({"type": "tool_search_output", "call_id": "c", "tools": [LOADED]}, '"name": "load"'),
        ({"type": "additional_tools", "role": "developer", "tools": [LOADED]}, '"name": "load"'),
        ({"role": "user", "content": [{"type": "new_text", "text": "z"}]}, "<user>z"),
    ],
    ids=str,
)
def test_every_item_with_text_reaches_the_model(scripted, item, shown):
    assert ask(scripted[0], "/v1/responses", {"input": [*USER, item]}).status == 200
    assert shown in scripted[1].prompt


@pytest.mark.parametrize("kind", ["compaction", "compaction_trigger", "new_message", "input_text"])
def test_unknown_items_are_refused(scripted, kind):
    said = refuse(scripted[0], "/v1/responses", {"input": [*USER, {"type": kind, "text": "x"}]})
    assert said == f"input[1]: items of type {kind!r} are not supported"


def test_a_loaded_tool_may_be_called(scripted):
    scripted[1].texts = [["</think>", '<tool_call>{"name": "n__load"}</tool_call>']]
    namespace = {"type": "namespace", "name": "n", "tools": [LOADED]}
    found = {"type": "tool_search_output", "call_id": "c", "tools": [namespace]}
    made = ask(scripted[0], "/v1/responses", {"input": [*USER, found]}).json
    assert not scripted[1].prompt.startswith("<tool_call>"), "the prompt begins as before"
    call = made["output"][-1]
    assert (call["namespace"], call["name"]) == ("n", "load")


def test_an_answer_cut_short_is_incomplete(scripted, scripted_openai):
    scripted[1].texts = [["</think>one two three four five six"]]
    made = scripted_openai.responses.create(model="demo", input="Count.", max_output_tokens=4)
    assert made.status == "incomplete"
    assert made.incomplete_details.reason == "max_output_tokens"
    assert made.usage
    assert made.usage.output_tokens == 4
    assert made.output[-1].status == "incomplete"
