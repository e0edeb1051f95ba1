"""Whatever is sent, the server answers it with a sensible status, and the next good request rightly."""

from __future__ import annotations

import json
import socket
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from service import BEAM, PATIENCE, ask, complete

from mlx_redrafter.serving.bodies import CHECKS
from mlx_redrafter.serving.command import Server

pytestmark = pytest.mark.filterwarnings("ignore:the drafter has guessed no token right")
FLAGS = (*BEAM, "--max-tokens", "6", "--max-completion-tokens", "6", "--max-request-bytes", "20000")
FUZZ = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
CHAT = "/v1/chat/completions"
PATHS = ("/v1/completions", CHAT, "/chat/completions")

NUMBERS = st.sampled_from([-1, 0, 1, 2, 40, 53, 2**31 - 1, 2**31, 2**70, -0.0, 0.3, 1.0, 1.5, 1e-9, 1e30, 1e308])
LEAVES = st.none() | st.booleans() | NUMBERS | st.text(max_size=6) | st.sampled_from(["none", "second", "auto", "off"])
VALUES = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)
PARTS = st.fixed_dictionaries({}, optional={"type": st.sampled_from(["text", "image_url", "x"]), "text": LEAVES})
MESSAGES = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["user", "system", "assistant", "tool", "x"])},
        optional={
            "content": st.text(max_size=8) | st.none() | st.lists(PARTS, max_size=2),
            "tool_calls": st.none() | st.lists(VALUES, max_size=2),
            "name": LEAVES,
        },
    ),
    max_size=3,
)
NAMES = sorted({*CHECKS, "n"} - {"messages", "prompt", "model", "adapters"})
FIELDS = st.dictionaries(st.sampled_from(NAMES), NUMBERS | VALUES, max_size=3)
"""Not `model` and `adapters`, which would be looked for on the hub."""


@pytest.fixture(scope="module")
def right(server: Server) -> Any:
    """The choices of the good request."""
    return good(server)


def good(server: Server) -> Any:
    return complete(server, "hello", temperature=0.9, seed=3)["choices"]


@FUZZ
@given(path=st.sampled_from(PATHS), messages=MESSAGES, fields=FIELDS)
def test_bodies_of_any_fields(path: str, messages: Any, fields: dict[str, Any], server: Server, right: Any) -> None:
    reply = ask(server, "POST", path, {"prompt": "hello", "messages": messages} | fields)
    assert reply.status in (200, 400), (reply, fields)
    if reply.status == 400:
        assert len(reply.error.splitlines()) <= 1 or "template" in reply.error
        assert reply.json["error"]["type"] == "invalid_request_error"
    elif fields.get("stream") is True:
        assert reply.body.endswith(b"data: [DONE]\n\n") and b'"error"' not in reply.body
    else:
        assert reply.json["choices"][0]["finish_reason"] in ("stop", "length")
    assert good(server) == right


@FUZZ
@given(path=st.sampled_from(PATHS), body=st.binary(max_size=80) | VALUES.map(lambda value: json.dumps(value).encode()))
def test_bodies_of_any_bytes(path: str, body: bytes, server: Server, right: Any) -> None:
    assert ask(server, "POST", path, body).status == 400
    assert good(server) == right


@FUZZ
@given(
    head=st.sampled_from([b"", b"POST /v1/completions HTTP/1.1\r\n", b"GET /v1/models/", b"PUT /health HTTP/1.1\r\n"]),
    data=st.binary(max_size=200) | st.lists(st.sampled_from([b"Content-Length: ", b"9", b":", b"\r\n"])).map(b"".join),
)
def test_requests_of_any_bytes(head: bytes, data: bytes, server: Server, right: Any) -> None:
    with socket.create_connection(server.server_address[:2], timeout=PATIENCE) as connection:
        connection.sendall(head + data)
        connection.shutdown(socket.SHUT_WR)
        reply = b""
        with suppress(ConnectionResetError):  # closed with something unread
            while more := connection.recv(1 << 16):
                reply += more
    assert b" 200 " not in reply.partition(b"\r\n")[0] or head.startswith(b"GET")
    assert good(server) == right
    assert server.responder.is_healthy
