"""Every reply and every event has what the published schemas of both APIs require."""

import json
import threading
from collections.abc import Iterator

import pytest
from anthropic.types import Message, MessageTokensCount, ModelInfo, RawMessageStreamEvent
from anthropic.types.shared import ErrorResponse
from openai.types import Completion, Model
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.responses import Response, ResponseStreamEvent
from openai.types.shared import ErrorObject
from pydantic import BaseModel, TypeAdapter, ValidationError

from helpers.servers import BODIES, ask, events_of
from mlx_redrafter.serving.api_errors import GenerationFailed
from mlx_redrafter.serving.http import app

CHAT, TEXT, RESPONSES, MESSAGES = BODIES
COUNT = "/v1/messages/count_tokens"
KINDS = {
    CHAT: (ChatCompletion, ChatCompletionChunk),
    TEXT: (Completion, Completion),
    RESPONSES: (Response, ResponseStreamEvent),
    MESSAGES: (Message, RawMessageStreamEvent),
}
"""Path -> type of a reply, and of an event."""

NULLABLE = {
    "ChatCompletionMessage": "content refusal",
    "ChatCompletionTokenLogprob": "bytes",
    "Choice": "finish_reason logprobs",
    "ChoiceLogprobs": "content refusal",
    "CompletionChoice": "logprobs",
    "Delta": "container stop_details stop_reason stop_sequence",
    "ErrorObject": "code param",
    "ErrorResponse": "request_id",
    "FunctionTool": "parameters strict",
    "Logprobs": "text_offset token_logprobs tokens top_logprobs",
    "Message": "container stop_details stop_reason stop_sequence",
    "ModelInfo": "capabilities max_input_tokens max_tokens",
    "Response": "error incomplete_details instructions metadata temperature top_p",
    "TextBlock": "citations",
    "TopLogprob": "bytes",
    "Usage": "cache_creation inference_geo server_tool_use service_tier",
}
"""Type -> fields that may be null but must be there, which the types do not tell."""

PREFIXES = {
    "chat.completion": "chatcmpl-",
    "chat.completion.chunk": "chatcmpl-",
    "text_completion": "cmpl-",
    "response": "resp_",
    "message": "msg_",
    "reasoning": "rs_",
    "function_call": "fc_",
    "custom_tool_call": "ctc_",
}
"""`object` or `type` -> what the id begins with."""


def list_models(value) -> Iterator[BaseModel]:
    """All objects in a validated value."""
    if isinstance(value, BaseModel):
        yield value
        value = dict(value)
    for each in value.values() if isinstance(value, dict) else value:
        if isinstance(each, BaseModel | dict | list):
            yield from list_models(each)


def check(kind, data):
    """Asserts that an object has all required fields and the ids of its API."""
    raw = json.dumps(data)
    for model in list_models(TypeAdapter(kind).validate_json(raw, strict=True)):
        required = set(NULLABLE.get(type(model).__name__, "").split())
        assert not required - model.model_fields_set, (type(model), raw)
        prefix = PREFIXES.get(getattr(model, "object", getattr(model, "type", "")))
        assert prefix is None or str(getattr(model, "id", prefix)).startswith(prefix), raw


FUNCTION = {"name": "f", "parameters": {"type": "object"}}
TOOLS = {
    CHAT: [{"type": "function", "function": FUNCTION}],
    RESPONSES: [{"type": "function", "name": "f"}, {"type": "custom", "name": "g"}],
    MESSAGES: [{"name": "f", "input_schema": {"type": "object"}}],
}
CALL = '<tool_call>{"name": "%s", "arguments": {"input": "x"}}</tool_call>'
ANSWER = "Why?</think>So."
CASES = [
    *((path, {}, ANSWER) for path in BODIES),
    *((path, {"max_tokens": 2, "max_output_tokens": 2}, ANSWER) for path in BODIES),
    *((path, {"tools": tools}, ANSWER + CALL % "f") for path, tools in TOOLS.items()),
    (RESPONSES, {"tools": TOOLS[RESPONSES], "tool_choice": "required"}, CALL % "g"),
    (RESPONSES, {"include": ["reasoning.encrypted_content"], "instructions": "Go."}, ANSWER),
    (MESSAGES, {"thinking": {"type": "adaptive", "display": "omitted"}}, ANSWER),
    (MESSAGES, {"stop_sequences": ["o"]}, ANSWER),
    (CHAT, {"n": 2, "logprobs": True, "top_logprobs": 2}, ANSWER),
    (CHAT, {"stream_options": {"include_usage": True}}, ANSWER),
    (TEXT, {"logprobs": 2}, ANSWER),
    (TEXT, {"logprobs": 0, "stream_options": {"include_usage": True}}, ""),
]


@pytest.mark.parametrize(("path", "fields", "text"), CASES)
def test_replies_and_events_follow_the_schemas(scripted, path, fields, text, monkeypatch):
    monkeypatch.setattr(app, "PROGRESS_SECONDS", 0.02)
    server, engine = scripted
    engine.texts = [[text]]
    reply, event = KINDS[path]
    body = BODIES[path] | fields
    check(reply, ask(server, path, body).json)
    engine.gate.clear()
    threading.Timer(0.1, engine.gate.set).start()  # some events that keep the stream alive
    events = events_of(ask(server, path, body | {"stream": True}))
    has_usage = "stream_options" in fields
    for at, data in enumerate(events):
        if path == TEXT:  # its schema has only whole replies; of chunks, OpenAI's have null here
            for choice in data["choices"]:
                choice["finish_reason"] = choice["finish_reason"] or "stop"
        check(event, data)
        assert ("usage" in data) is has_usage or path in (RESPONSES, MESSAGES)
        assert not has_usage or (data["usage"] is None) is (at + 1 < len(events))


def test_models_and_counts_follow_the_schemas(scripted):
    server, _ = scripted
    listed = ask(server, "/v1/models").json
    for model in (*listed["data"], ask(server, "/v1/models/demo").json):
        check(Model, model)
        check(ModelInfo, model)
        assert model["max_input_tokens"] == model["max_tokens"] == 8192
    check(MessageTokensCount, ask(server, COUNT, BODIES[MESSAGES]).json)


@pytest.mark.parametrize("path", [*BODIES, COUNT])
@pytest.mark.parametrize("fields", [{"model": "x"}, {"model": 5}, {}, {"stream": True}])
def test_errors_follow_the_schemas(scripted, path, fields):
    server, engine = scripted
    engine.texts = [[GenerationFailed("no memory")]]
    reply = ask(server, path, BODIES.get(path, BODIES[MESSAGES]) | fields)
    if path == COUNT and reply.status == 200:
        return
    data = events_of(reply)[-1] if "stream" in fields else reply.json
    if data.get("type") == "response.failed":
        check(ResponseStreamEvent, data)
    elif path in (MESSAGES, COUNT):
        check(ErrorResponse, data)
    else:
        check(ErrorObject, data["error"])


def test_the_check_finds_a_missing_field(scripted):
    whole = ask(scripted[0], TEXT, BODIES[TEXT]).json
    for name in ("id", "choices"):
        with pytest.raises(ValidationError):
            check(Completion, {key: value for key, value in whole.items() if key != name})
    del whole["choices"][0]["logprobs"]
    with pytest.raises(AssertionError, match="CompletionChoice"):
        check(Completion, whole)
