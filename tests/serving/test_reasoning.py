"""Reasoning through a client's round trip, in each API: what comes back is what the model wrote."""

from collections.abc import Iterator

import anthropic
import pytest

from helpers.servers import USER, Scripted, ask, events_of, save_tokenizer, start_scripted

TEMPLATE = """{%- for m in messages %}<{{ m.role }}>
{%- if m.reasoning_content %}({{ m.reasoning_content }}){% endif %}{{ m.content }}
{%- for call in m.tool_calls or [] %}[{{ call.function.name }}]{% endfor %}
{%- endfor %}{% if add_generation_prompt %}<assistant><think>{% endif %}
{%- if enable_thinking is defined %}{% endif %}{# <tool_call> tool_call.name #}"""
"""Shows reasoning in its place."""

CALL = '<tool_call>{"name": "look", "arguments": {}}</tool_call>'
FUNCTION = {"name": "look", "parameters": {"type": "object"}}
RETURNED = "<user>Hi<assistant>(Where?)[look]<tool>ok<assistant><think>"
"""The next prompt, if nothing of the answer was lost."""


@pytest.fixture(scope="module")
def server_of_templates(tmp_path_factory) -> Iterator[Scripted]:
    with start_scripted(save_tokenizer(tmp_path_factory.mktemp("reasoning"), TEMPLATE)) as both:
        yield both


@pytest.fixture
def scripted(server_of_templates) -> Scripted:
    """A server whose model reasons, and calls a tool after some newlines."""
    server_of_templates[1].texts = [["Where?</think>", "\n\n", CALL]]
    return server_of_templates


def post(scripted: Scripted, path: str, **body):
    reply = ask(scripted[0], path, body)
    assert reply.status == 200, reply.body
    return reply.json


@pytest.mark.parametrize("name", ["reasoning", "reasoning_content"])
def test_chat_completions_return_it(scripted, name):
    """Clients read, and send back, one of the two names."""
    path = "/v1/chat/completions"
    tools = [{"type": "function", "function": FUNCTION}]
    message = post(scripted, path, messages=USER, tools=tools)["choices"][0]["message"]
    assert message["content"] is None
    assert message[name] == "Where?"
    sent = {key: message[key] for key in ("role", "content", "tool_calls", name)}
    result = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "ok"}
    post(scripted, path, messages=[*USER, sent, result], tools=tools)
    assert scripted[1].prompt == RETURNED

    events = events_of(ask(scripted[0], path, {"messages": USER, "tools": tools, "stream": True}))
    deltas = [event["choices"][0]["delta"] for event in events]
    assert "".join(delta.get(name, "") for delta in deltas) == "Where?"
    assert not any(delta.get("content") for delta in deltas)


@pytest.mark.parametrize("kept", ["all", "signature", "redacted"])
@pytest.mark.parametrize("stream", [False, True])
def test_messages_return_it(scripted, kept, stream):
    """A client may drop the text of a block, but returns the signature as it is."""
    server, worker = scripted
    tools = [{"name": "look", "input_schema": FUNCTION["parameters"]}]
    fields = {"model": "demo", "max_tokens": 99, "messages": USER, "tools": tools}
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0) as client:
        if stream:
            with client.messages.stream(**fields) as events:
                made = events.get_final_message()
        else:
            made = client.messages.create(**fields)
    thinking, call = [block.model_dump() for block in made.content]
    assert thinking["thinking"] == "Where?"
    assert thinking["signature"]
    if kept == "signature":
        thinking["thinking"] = ""
    elif kept == "redacted":
        thinking = {"type": "redacted_thinking", "data": thinking["signature"]}
    result = {"type": "tool_result", "tool_use_id": call["id"], "content": "ok"}
    turns = [
        {"role": "assistant", "content": [thinking, call]},
        {"role": "user", "content": [result]},
    ]
    post(scripted, "/v1/messages", messages=[*USER, *turns], tools=tools, max_tokens=9)
    assert worker.prompt == RETURNED


def test_omitted_thinking_is_in_the_signature_only(scripted):
    thinking = {"type": "adaptive", "display": "omitted"}
    body = {"messages": USER, "max_tokens": 99, "thinking": thinking, "stream": True}
    events = events_of(ask(scripted[0], "/v1/messages", body))
    kinds = [event["delta"]["type"] for event in events if event["type"] == "content_block_delta"]
    assert kinds[0] == "signature_delta"
    assert "thinking_delta" not in kinds
    signature = next(event["delta"]["signature"] for event in events if "delta" in event)
    block = {"type": "thinking", "thinking": "", "signature": signature}
    turns = [{"role": "assistant", "content": [block]}, *USER]
    post(scripted, "/v1/messages", messages=[*USER, *turns], max_tokens=9)
    assert scripted[1].prompt == "<user>Hi<assistant>(Where?)<user>Hi<assistant><think>"


def test_foreign_signatures_are_ignored(scripted):
    for block in (
        {"type": "redacted_thinking", "data": "Z29uZQ=="},
        {"type": "thinking", "thinking": "", "signature": "no base64 \u2192"},
        {"type": "thinking", "thinking": "", "signature": 5},
    ):
        turns = [{"role": "assistant", "content": [block, {"type": "text", "text": "A."}]}, *USER]
        post(scripted, "/v1/messages", messages=[*USER, *turns], max_tokens=9)
        assert scripted[1].prompt == "<user>Hi<assistant>A.<user>Hi<assistant><think>"


@pytest.mark.parametrize("stream", [False, True])
def test_responses_return_it(scripted, stream):
    """The server keeps nothing: it is in the encrypted content, if a client asks for that."""
    path = "/v1/responses"
    fields = {"input": "Hi", "tools": [{"type": "function", **FUNCTION}]}
    plain = post(scripted, path, **fields)["output"]
    assert [item["type"] for item in plain] == ["reasoning", "function_call"]
    assert "encrypted_content" not in plain[0]

    fields |= {"store": False, "include": ["reasoning.encrypted_content"], "stream": stream}
    if stream:
        events = events_of(ask(scripted[0], path, fields))
        output = [event["item"] for event in events if event["type"].endswith("item.done")]
    else:
        output = post(scripted, path, **fields)["output"]
    reasoning, call = output
    blob = reasoning["encrypted_content"]
    sealed = {"type": "reasoning", "summary": [], "encrypted_content": blob}
    result = {"type": "function_call_output", "call_id": call["call_id"], "output": "ok"}
    for item in (sealed, reasoning | {"encrypted_content": None}):
        post(scripted, path, input=[*USER, item, call, result])
        assert scripted[1].prompt == RETURNED


@pytest.mark.parametrize("content", ["", "\n\n", None])
def test_whitespace_before_a_call_is_no_text(scripted, content):
    """Templates add a newline after a text, so the prompt would differ from what was written."""
    call = {"id": "c", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    answer = {"role": "assistant", "content": content, "tool_calls": [call]}
    result = {"role": "tool", "tool_call_id": "c", "content": "ok"}
    post(scripted, "/v1/chat/completions", messages=[*USER, answer, result])
    assert scripted[1].prompt == "<user>Hi<assistant>[look]<tool>ok<assistant><think>"


@pytest.mark.parametrize(
    ("text", "content"),
    [("\n\nYes.", "\n\nYes."), ("\n", "\n"), (f"\n\nI look.\n{CALL}\n", "\n\nI look.\n")],
)
def test_other_whitespace_is_text(scripted, text, content):
    scripted[1].texts = [[f"Where?</think>{text}"]]
    tools = [{"type": "function", "function": FUNCTION}]
    made = post(scripted, "/v1/chat/completions", messages=USER, tools=tools)
    assert made["choices"][0]["message"]["content"] == content
