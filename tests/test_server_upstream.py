"""The same requests to mlx-lm's own server and to ours, over one model: the same replies."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.cache import LRUPromptCache
from mlx_lm.server import APIHandler, ModelProvider, ResponseGenerator
from service import BEAM, ask, server_of, until, with_toys
from toys import ALPHABET

from mlx_redrafter.serving.command import Server, checked
from mlx_redrafter.serving.flags import read_flags

pytestmark = pytest.mark.filterwarnings("ignore:the drafter has guessed no token right")
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
VARIED = {"presence_penalty": 3.0, "presence_context_size": 9, "max_tokens": 40, "seed": 1}
"""Greedy, and yet not always the same letters. With a seed mlx-lm's server decodes one request at a time."""


class Upstream(ResponseGenerator):
    """mlx-lm's, whose thread ends as cleanly as ours."""

    def _run_generate(self) -> None:
        super()._run_generate()
        mx.clear_streams()


def mark(tokenizer: Any) -> None:
    """Makes letters that random text is full of the marks of reasoning and of tools."""
    tokenizer._think_start, tokenizer._think_end = "kK"
    tokenizer._think_start_tokens, tokenizer._think_end_tokens = (ALPHABET.index("k"),), (ALPHABET.index("K"),)
    tokenizer._tool_call_start, tokenizer._tool_call_end = "sS"
    tokenizer._tool_parser = lambda text, tools: {"name": text, "arguments": {"of": len(tools or ())}}


@pytest.fixture(scope="module")
def ours(root: Path) -> Iterator[Server]:
    with server_of(*with_toys(root), *BEAM) as server:
        mark(server.responder.model_provider.tokenizer)
        yield server


@pytest.fixture(scope="module")
def theirs(root: Path) -> Iterator[ThreadingHTTPServer]:
    args = checked(read_flags(with_toys(root)))
    # It keeps no cache: behind a cached prompt its penalties would see only what is read anew.
    generator = Upstream(ModelProvider(args), LRUPromptCache(0))
    until(lambda: generator.model_provider.tokenizer is not None)
    mark(generator.model_provider.tokenizer)
    make: Any = lambda *given, **more: APIHandler(generator, *given, **more)  # noqa: E731
    with ThreadingHTTPServer(("127.0.0.1", 0), make) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()
    generator.stop_and_join()


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}]
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
REQUESTS: list[tuple[str, dict[str, Any]]] = [
    (TEXT, {"prompt": "hello", "max_tokens": 10, "seed": 1}),
    (TEXT, {"prompt": "hello", "logprobs": True} | VARIED),
    (TEXT, {"prompt": "hello", "logit_bias": {"3": 5.0, "9": -100}} | VARIED),
    (TEXT, {"prompt": "hello", "repetition_penalty": 1.2, "repetition_context_size": 30} | VARIED),
    (CHAT, {"messages": [user("hello")]} | VARIED),
    (CHAT, {"messages": [{"role": "system", "content": "brief"}, user("hello")], "top_logprobs": 2} | VARIED),
    (CHAT, {"messages": [user([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}])]} | VARIED),
    (CHAT, {"messages": [user("x")], "tools": TOOLS} | VARIED),
    (CHAT, {"messages": [user("x"), {"role": "assistant", "content": None, "tool_calls": [CALL]}]} | VARIED),
    (
        "/chat/completions",
        {"messages": [user("x"), {"role": "tool", "content": "3"}], "chat_template_kwargs": {"y": 1}} | VARIED,
    ),
    *((CHAT, {"messages": [user(word)]} | VARIED) for word in ("why", "what", "when", "who", "whence")),
]


def essence(reply: Any) -> Any:
    """A reply without what differs from call to call, and without what ours says besides."""
    choice = reply["choices"][0]
    for call in choice.get("message", {}).get("tool_calls", ()):
        del call["id"]
    usage = {name: reply["usage"][name] for name in ("prompt_tokens", "completion_tokens", "total_tokens")}
    return sorted(reply.keys()), reply["object"], reply["model"], choice, usage


def apart(value: Any) -> tuple[Any, list[float]]:
    """(a value with None in the place of each float, the floats)."""
    floats: list[float] = []
    rest = json.loads(json.dumps(value), parse_float=lambda text: floats.append(float(text)))
    return rest, floats


def joined(body: bytes) -> tuple[str, str, list[Any], list[str], Any]:
    """(content, reasoning, tool calls, reasons to end, usage) of a stream."""
    lines = [line for line in body.decode().split("\n\n") if line.startswith("data: ")]
    assert lines.pop() == "data: [DONE]"
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines]
    deltas = [choice.get("delta", choice) for chunk in chunks for choice in chunk["choices"]]
    content = "".join(delta.get("content", delta.get("text")) or "" for delta in deltas)
    calls = [call["function"] for delta in deltas for call in delta.get("tool_calls", ())]
    reasons = [choice["finish_reason"] for chunk in chunks for choice in chunk["choices"] if choice["finish_reason"]]
    return content, "".join(delta.get("reasoning", "") for delta in deltas), calls, reasons, chunks[-1]["usage"]


@pytest.mark.parametrize("request_", REQUESTS, ids=range(len(REQUESTS)))
def test_a_reply_is_that_of_mlx_lms_server(request_: Any, ours: Server, theirs: Any) -> None:
    path, body = request_
    mine, other = (ask(server, "POST", path, body) for server in (ours, theirs))
    assert (mine.status, mine.headers["content-type"]) == (other.status, other.headers["content-type"])
    (said, numbers), (expected, others) = (apart(essence(reply.json)) for reply in (mine, other))
    assert said == expected
    assert numbers == pytest.approx(others, abs=1e-3)  # rows of a tree and single rows differ in the last bits
    assert mine.json["usage"]["rounds"] > 0
    streaming = body | {"stream": True, "stream_options": {"include_usage": True}}
    mine, other = (ask(server, "POST", path, streaming) for server in (ours, theirs))
    *parts, usage = joined(mine.body)
    *their_parts, their_usage = joined(other.body)
    assert parts == their_parts
    assert {name: usage[name] for name in ("prompt_tokens", "completion_tokens")} == {
        name: their_usage[name] for name in ("prompt_tokens", "completion_tokens")
    }


def test_the_requests_above_bring_forth_reasoning_and_calls_of_tools(ours: Server) -> None:
    messages = [ask(ours, "POST", path, body).json["choices"][0]["message"] for path, body in REQUESTS if path != TEXT]
    assert any(each.get("reasoning") for each in messages) and any(each.get("tool_calls") for each in messages)
    assert any(each["content"] for each in messages)
