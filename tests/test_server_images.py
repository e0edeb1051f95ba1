"""Messages with images: where they may come from, and that their answers keep the promises of all others.

The model is one of letters: its processor makes two letters of an image, and they are read like any others.
"""

from __future__ import annotations

import base64
import io
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.sample_utils import make_logits_processors
from PIL import Image
from service import (
    BEAM,
    END,
    PATIENCE,
    Reference,
    Reply,
    ask,
    counted,
    held,
    idle,
    send,
    server_of,
    together,
    until,
    with_toys,
)

from mlx_redrafter.serving import answers
from mlx_redrafter.serving.command import Server
from mlx_redrafter.serving.jobs import Job

pytestmark = pytest.mark.filterwarnings("ignore:the drafter has guessed no token right")
CHAT = "/v1/chat/completions"
TEMPLATE = (
    "{% for m in messages %}U{% for p in m.content %}{{ p.text if p.type == 'text' else 'ZZ' }}{% endfor %}z"
    "{% endfor %}A"
)


def png() -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (2, 2)).save(file, "PNG")
    return file.getvalue()


PICTURE = f"data:image/png;base64,{base64.b64encode(png()).decode()}"


class Processor:
    """Of images, as mlx-lm loads one beside a model that sees."""

    image_token = "Z"

    def __call__(self, text: str, images: list[Any]) -> tuple[str, list[mx.array]]:
        assert all(image.shape == (2, 2, 3) for image in images)
        return text, [mx.zeros((1,))] * len(images)


@contextmanager
def seeing(root: Path, *flags: str) -> Iterator[Server]:
    """A server whose model sees."""
    with server_of(*with_toys(root), *BEAM, *flags) as server, pytest.MonkeyPatch.context() as patch:
        provider = server.responder.model_provider
        patch.setattr(provider.tokenizer._tokenizer, "chat_template", TEMPLATE)
        patch.setattr(provider, "processor", Processor())
        read = lambda self, ids, pixel_values: self.model.embed_tokens(ids)  # noqa: E731
        patch.setattr(type(provider.model), "embed_inputs", read, raising=False)
        yield server


@pytest.fixture(scope="module")
def server(root: Path) -> Iterator[Server]:
    with seeing(root, "--max-prompt-tokens", "20") as server:
        yield server


@pytest.fixture
def web() -> Iterator[tuple[str, list[str]]]:
    """(the address of a server with one picture, the paths that it was asked for)."""
    asked: list[str] = []

    class Pages(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            self.send_response(200 if self.path == "/picture" else 404)
            self.send_header("Content-Type", "image/png")
            self.end_headers()
            self.wfile.write(png())

        def log_message(self, format: str, *args: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Pages) as pages:
        thread = threading.Thread(target=pages.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        yield f"http://127.0.0.1:{pages.server_port}", asked
        pages.shutdown()
        thread.join()


def messages(url: Any = PICTURE, text: str = "hello") -> list[dict[str, Any]]:
    """One message, with a text and an image."""
    return [{"role": "user", "content": [{"type": "text", "text": text}, image(url)]}]


def image(url: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}}


def look(server: Server, url: Any = PICTURE, text: str = "hello", **fields: Any) -> Reply:
    """The reply to a message with an image."""
    return ask(server, "POST", CHAT, {"messages": messages(url, text), "max_tokens": 9} | fields)


def test_an_image_is_read_and_its_answer_counts_like_any_other(server: Server, root: Path) -> None:
    names = ("prompt", "cached", "generated")
    before = [counted(server, "tokens_total", kind=kind) for kind in names]
    first = counted(server, "first_token_seconds_count")
    replies = [look(server, text="counting") for _ in range(2)]
    until(lambda: idle(server))
    expected = Reference(root).text("UcountingZZzA", max_tokens=9)
    assert [reply.json["choices"][0]["message"]["content"] for reply in replies] == [expected] * 2
    assert [reply.json["usage"]["prompt_tokens_details"]["cached_tokens"] for reply in replies] == [0, 12]
    after = [counted(server, "tokens_total", kind=kind) for kind in names]
    assert [b - a for a, b in zip(before, after, strict=True)] == [26, 12, 18]
    assert counted(server, "first_token_seconds_count") == first + 2


@pytest.mark.parametrize("url", ["/picture", "file:///etc/passwd", "ftp://127.0.0.1/x", "HTTPS://x", "//x", 5])
def test_an_image_from_anywhere_but_the_request_is_refused_and_not_fetched(
    url: Any, server: Server, web: tuple[str, list[str]]
) -> None:
    where, asked = web
    url = where + url if url == "/picture" else url
    reply = look(server, url)
    assert reply.status == 400 and reply.error.startswith("an image must be a URL that begins with data:, got "), reply
    assert asked == []


def test_with_the_flag_images_are_fetched(root: Path, web: tuple[str, list[str]]) -> None:
    where, asked = web
    with seeing(root, "--allow-image-urls") as server:
        reply = look(server, f"{where}/picture")
        assert reply.status == 200 and asked == ["/picture"]
        assert reply.json["choices"] == look(server).json["choices"]
        missing = look(server, f"{where}/missing")
        assert missing.json["error"]["type"] == "invalid_request_error" and missing.status == 400
        assert missing.error == "an image cannot be fetched: HTTP Error 404: Not Found"
        other = look(server, "file:///etc/passwd")
        assert other.status == 400 and "begins with data: or http:// or https://" in other.error


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"text": "a" * 16}, "the prompt must have at most 20 tokens, got 21"),
        ({"logit_bias": {"9999": 5}}, "logit_bias must be of token ids from 0 to 52, got 9999"),
        ({"url": "data:image/png;base64,AAAA"}, "the prompt cannot be made: cannot identify image file"),
        ({"url": "data:image/png;base64,A"}, "the prompt cannot be made: "),
    ],
)
def test_a_request_with_an_image_that_cannot_be_served_is_told_why(
    fields: dict[str, Any], said: str, server: Server
) -> None:
    reply = look(server, **fields)
    assert reply.status == 400 and said in reply.error, reply
    assert idle(server)


@contextmanager
def answering(server: Server, monkeypatch: pytest.MonkeyPatch, **fields: Any) -> Iterator[tuple[Any, threading.Event]]:
    """(a connection on which an image was asked about, an event that lets the answer go on from its first token)."""
    asked = {"messages": messages(), "max_tokens": 500, "logit_bias": {END: -100}} | fields
    with held(server, monkeypatch, at=1) as gate, send(server, CHAT, **asked) as connection:
        assert gate.reached.wait(PATIENCE)
        assert ask(server, "GET", "/health").json["running"] == 1
        yield connection, gate


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_to_an_image_ends_when_its_client_goes(
    stream: bool, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    left, made = counted(server, "clients_left_total"), counted(server, "tokens_total", kind="generated")
    with answering(server, monkeypatch, stream=stream) as (connection, gate):
        connection.close()
        gate.set()
        until(lambda: idle(server))
    assert counted(server, "clients_left_total") == left + 1
    assert counted(server, "tokens_total", kind="generated") == made + 1


def test_an_answer_to_an_image_ends_when_the_server_does(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with seeing(root) as server:
        with answering(server, monkeypatch) as (connection, gate):
            server.responder._stop = True
            gate.set()
            raw = b""
            while more := connection.recv(1 << 16):
                raw += more
        head, _, body = raw.partition(b"\r\n\r\n")
        assert b" 503 " in head and json.loads(body)["error"]["message"] == "the server ends"


def test_an_answer_to_an_image_lets_others_have_their_turns(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answers, "TURN", 0.0)
    monkeypatch.setattr(answers, "LEAST", 1)
    with seeing(root) as server:
        order: list[bool] = []
        count = server.responder._count

        def counting(job: Job) -> None:
            order.append(job.request_type == "chat")
            count(job)

        monkeypatch.setattr(server.responder, "_count", counting)
        bias = {"logit_bias": {END: -100}}
        replies: list[Reply] = []
        one = threading.Thread(target=lambda: replies.append(look(server, max_tokens=60, **bias)))
        with held(server, monkeypatch, at=2) as gate:
            one.start()
            assert gate.reached.wait(PATIENCE)
            with send(server, max_tokens=12, **bias) as text, send(server, max_tokens=12, **bias) as another:
                until(lambda: server.responder.queue.qsize() == 2)
                gate.set()
                others = [b"".join(iter(lambda each=each: each.recv(1 << 16), b"")) for each in (text, another)]
            one.join()
    texts = [json.loads(other.partition(b"\r\n\r\n")[2])["choices"][0]["text"] for other in others]
    reference, processors = Reference(root), make_logits_processors(logit_bias={END: -100})
    assert texts == [reference.text("hello", max_tokens=12, logits_processors=processors)] * 2
    (reply,) = replies
    expected = reference.text("UhelloZZzA", max_tokens=60, logits_processors=processors)
    assert reply.json["choices"][0]["message"]["content"] == expected
    # The others began behind the image's second token, and had ended long before it did.
    assert len(order) == 60 + 2 * 12 and order.index(False) < 5 and all(order[-20:])


def test_answers_without_images_take_turns_though_the_model_sees(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answers, "TURN", 0.0)
    monkeypatch.setattr(answers, "LEAST", 1)
    with seeing(root) as server:
        responder, running = server.responder, []
        count = responder._count

        def counting(job: Any) -> None:
            if not running:
                until(lambda: responder.queue.qsize() == 1)
            running.append(responder.running)
            count(job)

        monkeypatch.setattr(responder, "_count", counting)
        asked = {"prompt": "h", "max_tokens": 20, "logit_bias": {END: -100}}  # a prompt of one piece
        replies = together([lambda: ask(server, "POST", "/v1/completions", asked)] * 2)
        assert [reply.status for reply in replies] == [200] * 2
    assert max(running) == 2
