"""How an answer ends: with its whole text, its reason, and the right words where it cannot."""

from __future__ import annotations

import copy
import json
import socket
import threading
from pathlib import Path
from typing import Any

import pytest
from service import BEAM, END, PATIENCE, Reference, Reply, ask, counted, held, idle, send, server_of, until, with_toys

from mlx_redrafter.serving.command import Server

pytestmark = pytest.mark.filterwarnings("ignore:the drafter has guessed no token right")
FLAGS = (*BEAM, "--max-tokens", "30")
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
streaming = pytest.mark.parametrize("stream", [False, True])


def tools(server: Server, monkeypatch: pytest.MonkeyPatch, start: str, end: str, parser: Any) -> None:
    """Makes these the marks of a call."""
    tokenizer = server.responder.model_provider.tokenizer
    server.responder._state_machine_cache.clear()
    monkeypatch.setattr(tokenizer, "_tool_call_start", start)
    monkeypatch.setattr(tokenizer, "_tool_call_end", end)
    monkeypatch.setattr(tokenizer, "_tool_parser", parser)


def answer(server: Server, path: str, stream: bool, **fields: Any) -> tuple[str, list[Any], str]:
    """(text, calls, reason) of an answer, however it is sent."""
    reply = ask(server, "POST", path, fields | {"stream": stream})
    assert reply.status == 200, reply
    lines = [line.removeprefix("data: ") for line in reply.body.decode().split("\n\n") if line.startswith("data: {")]
    choices = [json.loads(line)["choices"][0] for line in lines] if stream else [reply.json["choices"][0]]
    parts = [choice.get("delta", choice.get("message", choice)) for choice in choices]
    text = "".join(part.get("content", part.get("text")) or "" for part in parts)
    calls = [call["function"] for part in parts for call in part.get("tool_calls") or ()]
    assert all(choice["finish_reason"] is None for choice in choices[:-1])
    return text, calls, choices[-1]["finish_reason"]


@streaming
def test_a_text_that_ends_like_a_mark_of_a_tool_begins_keeps_its_end(
    stream: bool, server: Server, reference: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = reference.text("hello")
    for at in (4, 8, 12):
        stop = whole[at : at + 3]
        expected = reference.text("hello", stop=[stop])
        # No call ever begins: the second letter of the mark does not follow the first.
        tools(server, monkeypatch, expected[-1] + "\n", "\n\n", None)
        assert answer(server, TEXT, stream, prompt="hello", stop=stop) == (expected, [], "stop")
        ended = whole[: len(expected)], [], "length"
        assert answer(server, TEXT, stream, prompt="hello", max_tokens=len(expected)) == ended


@streaming
def test_so_does_one_that_ends_with_the_end_of_text_token(
    stream: bool, server: Server, reference: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = ((seed, reference.responses("ending", temp=1.5, seed=seed)) for seed in range(40))
    seed, expected = next((seed, found) for seed, found in answers if found[-1].token == END and len(found) > 2)
    text = "".join(each.text for each in expected)
    tools(server, monkeypatch, text[-1] + "\n", "\n\n", None)
    assert answer(server, TEXT, stream, prompt="ending", temperature=1.5, seed=seed) == (text, [], "stop")


def said_of_letters(reference: Reference) -> tuple[str, str]:
    """(a word, the answer to it with seed 1), whose first nine letters are all different."""
    words = ("what", "when", "where", "why", "who", "whence", "whither", "how")
    told = ((word, reference.text(f"U{word}zA", temp=1, seed=1)) for word in words)
    return next((word, text) for word, text in told if len(set(text[:9])) == 9)


def failing(text: str, tools: Any) -> Any:
    raise ValueError("this is no call")


@streaming
@pytest.mark.parametrize("parser", [lambda text, tools: {"name": text, "arguments": {}}, failing])
def test_an_answer_that_stops_behind_a_call_says_so(
    parser: Any, stream: bool, server: Server, reference: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    word, whole = said_of_letters(reference)
    tools(server, monkeypatch, whole[1], whole[3], parser)
    said = {"messages": [{"role": "user", "content": word}], "temperature": 1, "seed": 1}
    calls = [] if parser is failing else [{"name": whole[2], "arguments": "{}"}]
    expected = whole[0] + whole[4:8], calls
    # mlx-lm says "tool_calls" of one that could not be parsed as well.
    assert answer(server, CHAT, stream, stop=whole[8], **said) == (*expected, "tool_calls")
    assert answer(server, CHAT, stream, max_tokens=8, **said) == (*expected, "length")


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ({"name": "now"}, "{}"),
        ({"name": "now", "parameters": {"of": 1}}, '{"of": 1}'),
        ([{"name": "now", "arguments": {"of": 1}}], '{"of": 1}'),
        *[
            (odd, None)
            for odd in (
                "now",
                ["now"],
                5,
                None,
                {"arguments": {}},
                [[]],
                {"name": 1},
                KeyError("name"),
                {"name": "x", "arguments": {1j}},
            )
        ],
    ],
)
@streaming
def test_whatever_a_model_writes_as_a_call_the_answer_is_whole(
    stream: bool,
    written: Any,
    expected: str | None,
    server: Server,
    reference: Reference,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def parser(text: str, tools: Any) -> Any:
        if isinstance(written, Exception):
            raise written
        return copy.deepcopy(written)

    word, whole = said_of_letters(reference)
    tools(server, monkeypatch, whole[1], whole[3], parser)
    said = {"messages": [{"role": "user", "content": word}], "temperature": 1, "seed": 1, "max_tokens": 8}
    calls = [] if expected is None else [{"name": "now", "arguments": expected}]
    assert answer(server, CHAT, stream, **said) == (whole[0] + whole[4:8], calls, "length")


@streaming
def test_a_reply_counts_once_with_the_status_that_was_sent(
    stream: bool, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    def replies() -> dict[int, float]:
        return {status: counted(server, "requests_total", endpoint=TEXT, status=str(status)) for status in (200, 500)}

    def broken(*args: Any) -> Any:
        raise RuntimeError("the engine has stopped")

    before = replies()
    with monkeypatch.context() as patch:
        patch.setattr(server.responder, "_told", broken)
        ask(server, "POST", TEXT, {"prompt": "hello", "stream": stream})
    sent = 200 if stream else 500
    assert {status: count - before[status] for status, count in replies().items()} == {200: 0, 500: 0} | {sent: 1}


def test_a_client_that_goes_before_its_reply_counts_as_none(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    before = counted(server, "requests_total", endpoint=TEXT, status="200")
    with held(server, monkeypatch) as gate:
        with send(server):
            assert gate.reached.wait(PATIENCE)
        gate.set()
        until(lambda: idle(server))
        assert server.wait_idle(PATIENCE)
    assert counted(server, "requests_total", endpoint=TEXT, status="200") == before


@streaming
def test_who_is_broken_off_by_the_servers_end_is_told_503(
    stream: bool, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with server_of(*with_toys(root), *BEAM) as server, held(server, monkeypatch) as gate:
        found: list[Reply] = []
        body = {"prompt": "hello", "max_tokens": 1000, "logit_bias": {END: -100}, "stream": stream}
        client = threading.Thread(target=lambda: found.append(ask(server, "POST", TEXT, body)))
        client.start()
        assert gate.reached.wait(PATIENCE)
        server.responder._stop = True
        gate.set()
        client.join()
    (reply,) = found
    last = reply.body.decode().rstrip().rpartition("data: ")[2]
    error = {"message": "the server ends", "type": "server_error", "code": 503}
    assert json.loads(last) == {"error": error} and reply.status == (200 if stream else 503)


def test_a_client_that_closes_its_sending_half_is_taken_for_one_that_went(server: Server) -> None:
    with send(server, logit_bias={END: -100}) as connection:
        connection.shutdown(socket.SHUT_WR)
        assert connection.recv(100) == b""
