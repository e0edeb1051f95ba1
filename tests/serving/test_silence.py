"""Keep-alive events during a long prefill and a long tool call."""

import logging
import threading

import pytest

from helpers.servers import BODIES, USER, ScriptedWorker, send_request, until
from mlx_redrafter.serving.http import app

CALL = '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'


class Pauses:
    """An answer with two pauses, before its start and before its call.

    Each ends after two empty events.
    """

    def __init__(self, engine: ScriptedWorker):
        self.gates = [engine.gate, threading.Event()]
        self.empty = 0
        engine.gate.clear()
        engine.texts = [["Hm.</think>I look.", self.gates[1], CALL, CALL]]

    def count(self, *, is_empty: bool):
        """Counts an event and opens the gates that are due."""
        self.empty += is_empty
        for gate in self.gates[: self.empty // 2]:
            gate.set()


@pytest.fixture
def pauses(scripted, monkeypatch) -> Pauses:
    """The scripted answer with pauses."""
    monkeypatch.setattr(app, "PROGRESS_SECONDS", 0.05)
    return Pauses(scripted[1])


def test_openais_client_accepts_empty_chat_chunks(pauses, scripted_openai):
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
    deltas = []
    with scripted_openai.chat.completions.stream(
        model="demo", messages=USER, tools=tools
    ) as stream:
        for event in stream:
            if event.type == "chunk":
                delta = event.chunk.choices[0].delta
                pauses.count(
                    is_empty=not (
                        delta.content or delta.tool_calls or getattr(delta, "reasoning", "")
                    )
                )
            elif event.type == "content.delta":
                deltas.append(event.delta)
        message = stream.get_final_completion().choices[0].message
    assert pauses.empty >= 4
    assert all(deltas)
    assert (
        (message.role, message.content)
        == ("assistant", "".join(deltas))
        == ("assistant", "I look.")
    )
    assert [call.function.arguments for call in message.tool_calls or ()] == ['{"a": 1}'] * 2


def test_openais_client_accepts_empty_completion_chunks(pauses, scripted_openai):
    texts = []
    for chunk in scripted_openai.completions.create(model="demo", prompt="x", stream=True):
        texts.append(chunk.choices[0].text)
        pauses.count(is_empty=not texts[-1])
    assert pauses.empty >= 4
    assert "".join(texts) == f"Hm.</think>I look.{CALL}{CALL}"


def test_openais_client_accepts_empty_response_events(pauses, scripted_openai):
    tools = [{"type": "function", "name": "f", "parameters": {"type": "object"}}]
    numbers = []
    with scripted_openai.responses.stream(model="demo", input="x", tools=tools) as stream:
        for event in stream:
            numbers.append(event.sequence_number)
            pauses.count(
                is_empty=event.type == "response.in_progress" and event.sequence_number > 1
            )
        made = stream.get_final_response()
    assert pauses.empty >= 4
    assert numbers == list(range(len(numbers)))
    assert made.output_text == "I look."
    assert made.status == "completed"
    assert [call.arguments for call in made.output[-2:]] == ['{"a": 1}'] * 2


def test_anthropics_client_accepts_empty_events(pauses, scripted_anthropic):
    tools = [{"name": "f", "input_schema": {"type": "object"}}]
    with scripted_anthropic.messages.stream(
        model="demo", max_tokens=99, messages=USER, tools=tools
    ) as stream:
        for event in stream:
            pauses.count(is_empty=event.type == "message_delta" and event.delta.stop_reason is None)
        made = stream.get_final_message()
    assert pauses.empty >= 4
    assert made.usage.output_tokens > 9
    assert made.stop_reason == "tool_use"
    reasoning, text, *calls = made.content
    assert reasoning.thinking == "Hm."
    assert text.text == "I look."
    assert [call.input for call in calls] == [{"a": 1}] * 2
    assert calls[0].id != calls[1].id


@pytest.mark.parametrize("path", BODIES)
def test_comments_and_log_report_prefill_progress(scripted, pauses, path, caplog):
    server, engine = scripted
    pauses.gates[1].set()
    caplog.set_level(logging.INFO)
    with send_request(server, path, stream=True) as connection:
        until(lambda: len(engine.requests) == 1)
        engine.requests[0].n_prefilled = 2
        found = b""
        progress = f"2/{len(engine.requests[0].prompt)}"
        while f": keepalive {progress}\n\n".encode() not in found:
            found += connection.recv(1 << 16)
        assert f"Prompt processing progress: {progress}" in caplog.messages
        engine.gate.set()
        while not found.endswith(b"\r\n0\r\n\r\n"):
            found += connection.recv(1 << 16)
    kinds = {"/v1/responses": b"response.completed", "/v1/messages": b"message_stop"}
    assert kinds.get(path, b"[DONE]") in found
