"""Request bodies: ignored fields, named errors, and fuzzing."""

import json
import math
from typing import Any

import pytest
from anthropic.types.beta import message_create_params as beta_message_params
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from openai.types import completion_create_params as completion_params
from openai.types.chat import completion_create_params as chat_params
from openai.types.responses import response_create_params as response_params

from helpers import servers
from helpers.servers import USER, ask, refuse
from mlx_redrafter.serving.http.app import APIS

CHAT = {"messages": USER}
TOOL, OTHER_TOOL = ({"type": "function", "function": {"name": name}} for name in "fg")
BODIES = servers.BODIES | {"/v1/messages/count_tokens": {"messages": USER}}


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (
            "/v1/chat/completions",
            {"user": "me", "store": True, "metadata": {}, "parallel_tool_calls": False},
        ),
        (
            "/v1/chat/completions",
            {"modalities": ["text"], "stop": None, "tools": None, "response_format": None},
        ),
        (
            "/v1/chat/completions",
            {"top_logprobs": -1, "reasoning_effort": "low", "model": "default_model"},
        ),
        ("/v1/completions", {"best_of": 1, "echo": False, "suffix": None, "prompt": [[1, 2]]}),
        ("/v1/completions", {"max_tokens": -1, "top_k": -1, "plan": "off"}),
        ("/v1/completions", {"max_tokens": 3.0, "top_k": 5.0, "seed": 1.0, "n": 2.0}),
        ("/v1/chat/completions", {"functions": [], "function_call": "none", "audio": None}),
        ("/chat/completions", {}),
        ("/completions", {"prompt": "x"}),
        ("/responses", {"input": "x"}),
        ("/messages", {"max_tokens": 3}),
        ("/messages/count_tokens", {}),
    ],
)
def test_harmless_fields_are_ignored(scripted, path, fields):
    reply = ask(scripted[0], path, {**BODIES.get(path, CHAT), **fields})
    assert reply.status == 200, reply.body


def test_half_a_character_is_replaced(scripted):
    server, engine = scripted
    body = '{"messages": [{"role": "user", "content": "cut %s, whole %s"}]}'
    half = "\ud83d"
    pair = "\ud83d\ude00"
    for text in (body % (r"\ud83d", r"\ud83d\ude00"), body % (half, pair)):
        raw = text.encode("utf-8", "surrogatepass")  # as Python and Java may write it
        assert ask(server, "/v1/chat/completions", raw).status == 200
        assert "cut \ufffd, whole \U0001f600" in engine.prompt


SDK_FIELDS = {
    "/v1/chat/completions": chat_params.CompletionCreateParamsBase,
    "/v1/completions": completion_params.CompletionCreateParamsBase,
    "/v1/responses": response_params.ResponseCreateParamsBase,
    "/v1/messages": beta_message_params.MessageCreateParamsBase,
}


@pytest.mark.parametrize("path", SDK_FIELDS)
def test_all_sdk_fields_are_read_refused_or_ignored(scripted, path):
    body_type = APIS[path].body_type
    read = {field.alias or name for name, field in body_type.model_fields.items()}
    others = SDK_FIELDS[path].__annotations__.keys() - read - BODIES[path].keys()
    for name in sorted(others):
        reply = ask(scripted[0], path, BODIES[path] | {name: {"any": ["thing"]}})
        if name in body_type.refused:
            assert reply.status == 400
            assert f"{name} is not supported" in reply.error
        else:
            assert reply.status == 200, (name, reply.body)


def call_of(function) -> dict[str, Any]:
    return {"messages": [{"role": "assistant", "tool_calls": [function]}]}


def answer(part: dict[str, Any]) -> dict[str, Any]:
    return {"role": "assistant", "content": [part]}


FUNCTION_CALL = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}


def format_of(kind: str, **schema) -> dict[str, Any]:
    return {"response_format": {"type": kind, "json_schema": {"schema": schema}}}


INVALID = [
    ("completions", {"best_of": 2}, "best_of must"),
    ("completions", {"echo": True}, "echo is not supported"),
    ("completions", {"max_tokens": 2.5}, "max_tokens must"),
    ("completions", {"prompt": ["a", 5]}, "prompt[1]"),
    ("completions", {"prompt": {}}, "prompt must"),
    ("completions", {"n": 17}, "n must"),
    ("completions", {"repetition_penalty": -2.0}, "repetition_penalty must"),
    ("completions", {"stop": [""]}, "stop must"),
    ("completions", {"top_logprobs": 21}, "top_logprobs must"),
    ("completions", format_of("xml"), "response_format.type must"),
    (
        "completions",
        format_of("json_schema", type="objekt"),
        "the JSON schema cannot be followed: Invalid type: objekt",
    ),
    ("chat/completions", {"audio": {"voice": "x"}}, "audio is not supported"),
    ("chat/completions", {"messages": [{"content": "x"}]}, "messages[0].role must"),
    (
        "chat/completions",
        {"messages": [{"role": "user", "content": 5}]},
        "messages[0].content must",
    ),
    ("chat/completions", call_of({"function": 5}), "messages[0].tool_calls must"),
    ("chat/completions", call_of({"type": "function"}), "messages[0].tool_calls must"),
    ("chat/completions", call_of(5), "messages[0].tool_calls must"),
    ("chat/completions", call_of({"function": {"name": {}}}), "messages[0].tool_calls must"),
    (
        "chat/completions",
        {"messages": [answer({"type": "thinking", "thinking": 5})]},
        "messages[0].content must",
    ),
    (
        "chat/completions",
        {"tools": [{"type": "function", "function": {}}]},
        "tools[0].function.name must",
    ),
    (
        "chat/completions",
        {"tools": [{"function": {"name": "f", "parameters": 1}}]},
        "tools[0].function.parameters must",
    ),
    ("chat/completions", {"tools": [TOOL], "tool_choice": "maybe"}, "tool_choice must"),
    ("chat/completions", {"tool_choice": "required"}, "tool_choice 'required' needs tools"),
    ("chat/completions", {"tools": [TOOL], "tool_choice": OTHER_TOOL}, "tool_choice names 'g'"),
    (
        "chat/completions",
        {"chat_template_kwargs": {"chat_template": "x"}},
        "chat_template_kwargs must",
    ),
    ("responses", {"previous_response_id": "resp_1"}, "previous_response_id is not supported"),
    (
        "responses",
        {"input": [{"type": "item_reference", "id": "x"}]},
        "input[0]: item 'x' is not kept here",
    ),
    ("responses", {"input": [{"type": "reasoning", "content": 5}]}, "input[0].content must"),
    (
        "responses",
        {"input": [{"type": "additional_tools", "tools": [{"name": 5}]}]},
        "input[0].tools[0].name must",
    ),
    (
        "responses",
        {"input": [FUNCTION_CALL | {"namespace": True}]},
        "input[0]: name and namespace must",
    ),
    (
        "responses",
        {"input": [FUNCTION_CALL | {"name": ["f"]}]},
        "input[0]: name and namespace must",
    ),
    (
        "responses",
        {"input": [{"role": "user", "content": [{"type": "input_text", "text": 5}]}]},
        "input[0].content",
    ),
    (
        "responses",
        {"tools": [{"type": "function", "name": "f", "parameters": {"x": math.inf}}]},
        "tools[0].parameters",
    ),
    ("responses", {"input": []}, "input"),
    ("responses", {"text": {"format": "json"}}, "text.format must"),
    ("messages", {"max_tokens": None}, "max_tokens is missing"),
    (
        "chat/completions",
        {"chat_template_kwargs": {"tokenize": True}},
        "chat_template_kwargs must be variables of the model's own template, got tokenize",
    ),
    ("chat/completions", {"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs must"),
    ("responses", {"chat_template_kwargs": {"self": 1}}, "chat_template_kwargs must"),
    ("messages", {"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role must"),
    (
        "messages",
        {"messages": [answer({"type": "tool_use", "name": 5})]},
        "messages[0].content[0].name must",
    ),
    (
        "messages",
        {"messages": [answer({"type": "tool_result", "content": 5})]},
        "messages[0].content[0].content must",
    ),
    (
        "messages",
        {"messages": [answer({"type": "document", "content": 5})]},
        "messages[0].content: document.content must",
    ),
    ("messages", {"system": "x", "messages": [*USER, {"role": 5}]}, "messages[1].role must"),
    ("messages", {"tools": [{"name": "f", "input_schema": 5}]}, "tools[0].input_schema must"),
    ("messages", {"system": 5}, "system must"),
    ("messages", {"system": [5]}, "system[0] must"),
    ("messages", {"max_tokens": "x"}, "max_tokens must"),
    ("messages", {"stop_sequences": [""]}, "stop_sequences must"),
    ("messages", {"stop_sequences": ["a", 5]}, "stop_sequences[1] must"),
    ("responses", {"instructions": "x", "input": [*USER, {"role": 5}]}, "input[1].role must"),
    ("responses", {"tool_choice": {"type": "web_search"}}, "tool_choice must"),
    ("responses", {"max_output_tokens": "x"}, "max_output_tokens must"),
    ("chat/completions", {"tool_choice": 5}, "tool_choice must"),
    ("chat/completions", {"messages": [USER[0] | {"prefix": True}]}, "messages[0].prefix needs"),
    ("chat/completions", {"temperature": "hot"}, "temperature must"),
    ("completions", {"logprobs": "x"}, "logprobs must"),
    ("completions", {"logprobs": 30}, "logprobs must be less than or equal to 20"),
    ("completions", {"response_format": {}, "reasoning": {"effort": 5}}, "reasoning.effort must"),
]


@pytest.mark.parametrize(("api", "fields", "named"), INVALID)
def test_invalid_fields_are_named(scripted, api, fields, named):
    reply = ask(scripted[0], f"/v1/{api}", BODIES[f"/v1/{api}"] | fields)
    assert reply.status == 400 and reply.error.startswith(named), reply.body
    assert "\n" not in reply.error
    assert len(reply.error) < 400
    assert reply.json["error"]["type"] == "invalid_request_error"
    assert (
        reply.json["type"] == "error"
        if api == "messages"
        else reply.json["error"]["code"] == "bad_request"
    )


@pytest.mark.parametrize(
    ("raw", "said"),
    [
        (b"", "the body is not JSON"),
        (b"[1]", "the body must be a JSON object, got list"),
        (b'{"prompt": "\xff"}', "the body is not UTF-8: see byte 12"),
        (b'{"prompt": "x", "temperature": NaN}', "temperature must be a finite number"),
        (b'{"a": ' + b"[" * 5000 + b"]" * 5000 + b"}", "maximum recursion depth"),
    ],
)
def test_bodies_other_than_json_objects_are_refused(scripted, raw, said):
    assert said in refuse(scripted[0], "/v1/completions", raw)


@pytest.mark.parametrize("seed", [0, -5, 2**70])
def test_any_other_integer_is_a_seed(demo, seed):
    body = {"prompt": ["x"] * 3, "max_tokens": 9, "temperature": 1.0}
    for value, n_texts in ((seed, 1), (-1, 3)):
        choices = ask(demo, "/v1/completions", body | {"seed": value}).json["choices"]
        assert len({choice["text"] for choice in choices}) == n_texts


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"prompt": []}, "the prompt is empty"),
        ({"prompt": [1, 4096]}, "token ids must be from 0 to 4095, got 4096"),
        ({"max_tokens": -5}, "max_tokens must be -1"),
        ({"max_completion_tokens": -5}, "max_completion_tokens must be -1"),
        ({"temperature": -1}, "temperature must be at least 0"),
        ({"temperature": 1.0, "top_k": 4096}, "top_k must be below the vocabulary's 4096"),
        ({"logit_bias": {"4096": 1.0}}, "logit_bias token ids must be from 0 to 4095, got 4096"),
    ],
)
def test_values_that_do_not_fit_the_model_are_named(demo, fields, said):
    assert refuse(demo, "/v1/completions", {"prompt": "x"} | fields).startswith(said)


def test_a_model_without_tools_says_so(demo):
    said = refuse(demo, "/v1/chat/completions", CHAT | {"tools": [TOOL]})
    assert "tools are not supported by this model" in said


def test_chat_works_without_a_template(demo, demo_models):
    body = {"messages": USER, "max_tokens": 5}
    made = ask(demo, "/v1/chat/completions", body).json
    assert made["usage"]["prompt_tokens"] == len(demo_models[1].encode("USER: Hi\nASSISTANT:"))


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3)
    ),
    max_leaves=8,
)
FIELD_NAMES = """model messages prompt input max_tokens stop stop_sequences tools tool_choice system
    temperature top_p seed logprobs top_logprobs n stream stream_options logit_bias text
    response_format thinking reasoning instructions chat_template_kwargs user"""
names = st.sampled_from(FIELD_NAMES.split())
KINDS = """text input_text output_text refusal thinking reasoning summary_text image document
    search_result tool_use tool_result tool_reference tool_definition tool_addition
    tool_removal message function custom namespace item_reference function_call
    function_call_output custom_tool_call custom_tool_call_output tool_search_tool_regex
    tool_search_tool_result x"""
FIELDS = """arguments call_id content custom data defer_loading definition description function id
    input input_schema is_error name namespace output parameters reasoning reasoning_content
    source summary text thinking title tool tool_call_id tool_calls tool_name tool_use_id
    tools"""
"""Types of parts, items and tools, and what any of them may have."""

kinds, keys = (st.sampled_from(words.split()) for words in (KINDS, FIELDS))
parts = st.recursive(
    values | st.sampled_from(["f", "g", "{}"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.builds(
            lambda kind, held: held | {"type": kind},
            kinds | values,
            st.dictionaries(keys, inner, max_size=4),
        )
    ),
    max_leaves=12,
)
messages = st.builds(
    lambda role, held: held | role,
    st.fixed_dictionaries(
        {}, optional={"role": st.sampled_from(["user", "assistant", "system", "tool"]) | values}
    ),
    st.dictionaries(keys, parts, max_size=4),
)
objects = st.lists(parts.filter(lambda part: isinstance(part, dict)), max_size=3)


@settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    path=st.sampled_from(list(BODIES)),
    given_fields=st.dictionaries(names, values, max_size=3),
    talk=st.none() | st.lists(messages, max_size=3) | objects,
    tools=st.none() | objects,
)
def test_no_field_breaks_the_server(scripted, path, given_fields, talk, tools):
    conversation = "input" if path == "/v1/responses" else "messages"
    body = {**BODIES[path], **given_fields}
    body |= ({} if talk is None else {conversation: talk}) | (
        {} if tools is None else {"tools": tools}
    )
    reply = ask(scripted[0], path, body)
    assert reply.status in (200, 400, 404), (body, reply)
    if reply.status != 200:
        assert reply.error
    elif not body.get("stream"):
        json.loads(reply.body, parse_constant=lambda name: pytest.fail(name))


@pytest.mark.parametrize("depth", [100, 400])
def test_deeply_nested_items_are_answered(scripted, depth):
    for begin, end in (
        ('[{"type": "thinking", "thinking": ', "}]"),
        ('[{"type": "document", "content": ', "}]"),
    ):
        nested = f"{begin * depth}[]{end * depth}".encode()
        for path in ("/v1/chat/completions", "/v1/messages"):
            talk = b'{"max_tokens": 9, "messages": [{"role": "assistant", "content": %s}]}' % nested
            reply = ask(scripted[0], path, talk)
            assert reply.status == 200 or (reply.status, reply.error) == (
                400,
                "the body is nested too deeply",
            )
