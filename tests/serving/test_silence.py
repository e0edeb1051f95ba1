"""Keep-alive events during a long prefill and a long tool call."""

from __future__ import annotations

import logging
import threading
import time
from typing import Any

import anthropic
import openai
import pytest
from servers import BODIES, USER, Running, ScriptedWorker, send_request, until

from mlx_redrafter.serving import app

Scripted = tuple[Running, ScriptedWorker]
CALL = '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'


class Pauses:
    """An answer with two pauses, before its start and before its call; each ends after two empty events."""

    def __init__(self, engine: ScriptedWorker) -> None:
        self.gates, self.empty = [engine.gate, threading.Event()], 0
        engine.gate.clear()
        engine.texts = [["</think>I look.", self.gates[1], CALL]]

    def count(self, *, is_empty: bool) -> None:
        """Counts an event and opens the gates that are due."""
        self.empty += is_empty
        for gate in self.gates[: self.empty // 2]:
            gate.set()


@pytest.fixture
def pauses(scripted: Scripted, monkeypatch: pytest.MonkeyPatch) -> Pauses:
    """The scripted answer with pauses."""
    monkeypatch.setattr(app, "PROGRESS_SECONDS", 0.05)
    return Pauses(scripted[1])


def test_openais_client_accepts_empty_chat_chunks(pauses: Pauses, scripted_openai: openai.OpenAI) -> None:
    tools: Any = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
    deltas = []
    with scripted_openai.chat.completions.stream(model="demo", messages=USER, tools=tools) as stream:
        for event in stream:
            if event.type == "chunk":
                delta = event.chunk.choices[0].delta
                pauses.count(is_empty=not (delta.content or delta.tool_calls))
            elif event.type == "content.delta":
                deltas.append(event.delta)
        message = stream.get_final_completion().choices[0].message
    assert pauses.empty >= 4 and all(deltas)
    assert (message.role, message.content) == ("assistant", "".join(deltas)) == ("assistant", "I look.")
    assert [call.function.arguments for call in message.tool_calls or ()] == ['{"a": 1}']


def test_openais_client_accepts_empty_completion_chunks(pauses: Pauses, scripted_openai: openai.OpenAI) -> None:
    texts = []
    for chunk in scripted_openai.completions.create(model="demo", prompt="x", stream=True):
        texts.append(chunk.choices[0].text)
        pauses.count(is_empty=not texts[-1])
    assert pauses.empty >= 4 and "".join(texts) == f"</think>I look.{CALL}"


def test_openais_client_accepts_empty_response_events(pauses: Pauses, scripted_openai: openai.OpenAI) -> None:
    tools: Any = [{"type": "function", "name": "f", "parameters": {"type": "object"}}]
    numbers = []
    with scripted_openai.responses.stream(model="demo", input="x", tools=tools) as stream:
        for event in stream:
            numbers.append(event.sequence_number)
            pauses.count(is_empty=event.type == "response.in_progress" and event.sequence_number > 1)
        made: Any = stream.get_final_response()
    assert pauses.empty >= 4 and numbers == list(range(len(numbers)))
    assert (made.output_text, made.status, made.output[-1].arguments) == ("I look.", "completed", '{"a": 1}')


def test_anthropics_client_accepts_empty_events(pauses: Pauses, scripted_anthropic: anthropic.Anthropic) -> None:
    tools: Any = [{"name": "f", "input_schema": {"type": "object"}}]
    with scripted_anthropic.messages.stream(model="demo", max_tokens=99, messages=USER, tools=tools) as stream:
        for event in stream:
            pauses.count(is_empty=event.type == "message_delta" and event.delta.stop_reason is None)
        made: Any = stream.get_final_message()
    assert pauses.empty >= 4 and [block.type for block in made.content] == ["text", "tool_use"]
    assert (made.content[0].text, made.content[1].input, made.stop_reason) == ("I look.", {"a": 1}, "tool_use")
    assert made.usage.output_tokens > 9


@pytest.mark.parametrize("path", BODIES)
def test_comments_report_prefill_progress(scripted: Scripted, pauses: Pauses, path: str) -> None:
    server, engine = scripted
    pauses.gates[1].set()
    with send_request(server, path, stream=True) as connection:
        until(lambda: len(engine.requests) == 1)
        engine.requests[0].n_prefilled, found = 2, b""
        while b": keepalive 2/%d\n\n" % len(engine.requests[0].prompt) not in found:
            found += connection.recv(1 << 16)
        engine.gate.set()
        while not found.endswith(b"\r\n0\r\n\r\n"):
            found += connection.recv(1 << 16)
    kinds = {"/v1/responses": b"response.completed", "/v1/messages": b"message_stop"}
    assert kinds.get(path, b"[DONE]") in found


def test_the_log_reports_prefill_progress(scripted: Scripted, pauses: Pauses, caplog: pytest.LogCaptureFixture) -> None:
    server, engine = scripted
    caplog.set_level(logging.INFO)
    with send_request(server, "/v1/completions", stream=True) as connection:
        until(lambda: len(engine.requests) == 1)
        engine.requests[0].n_prefilled, total = 3, len(engine.requests[0].prompt)
        until(lambda: f"Prompt processing progress: 3/{total}" in caplog.messages)
        engine.gate.set()
        found = b""
        while b"look" not in found:
            found += connection.recv(1 << 16)
        caplog.clear()
        time.sleep(0.3)
        assert not [each for each in caplog.messages if "progress" in each]
        pauses.gates[1].set()
