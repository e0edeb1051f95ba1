"""Access control, request limits, disconnects, health and metrics."""

import gzip
import json
import socket
import zlib
from collections.abc import Iterator
from http.client import HTTPResponse

import anthropic
import openai
import pytest

from helpers.servers import (
    BODIES,
    PATIENCE,
    USER,
    Running,
    ask,
    events_of,
    parse_flags,
    read_metrics,
    refuse,
    send_request,
    start_demo,
    start_scripted,
    until,
)
from helpers.workers import count, count_tokens
from mlx_redrafter.cli.server import make_parser
from mlx_redrafter.errors import RedrafterError
from mlx_redrafter.serving.api_errors import GenerationFailed
from mlx_redrafter.serving.http import app
from mlx_redrafter.serving.http.process import GracefulServer

KEY = "correct-horse"
BEARER = {"Authorization": f"Bearer {KEY}"}
TEXT = "/v1/completions"


@pytest.fixture(scope="module")
def locked(chat_tokenizer) -> Iterator[Running]:
    """A server with an API key that allows requests from two origins."""
    flags = ("--api-key", KEY, "--allowed-origins", "http://b.example, http://a.example")
    with start_scripted(chat_tokenizer, *flags) as (server, _):
        yield server


@pytest.mark.parametrize(
    "headers",
    [{}, {"Authorization": KEY}, {"Authorization": "Bearer \xe9\xff"}, {"x-api-key": f"{KEY}x"}],
)
@pytest.mark.parametrize("path", [TEXT, "/x", "/metrics"])
def test_requests_without_the_key_are_refused(locked, path, headers):
    reply = ask(locked, path, {"prompt": "x"} if path == TEXT else None, headers)
    assert reply.status == 401
    assert reply.headers["www-authenticate"] == "Bearer"
    assert KEY not in reply.error


def test_requests_with_the_key_work_and_health_needs_none(locked):
    assert ask(locked, "/health").status == 200
    for path in ("/v1/models", "/metrics"):
        assert ask(locked, path, headers=BEARER | {"Host": "proxy.example"}).status == 200
    with openai.OpenAI(base_url=f"{locked.url}/v1", api_key=KEY, max_retries=0) as client:
        assert client.completions.create(model="demo", prompt="x", max_tokens=3).choices[0].text
    with anthropic.Anthropic(base_url=locked.url, api_key=KEY, max_retries=0) as client:
        assert client.messages.create(model="demo", max_tokens=3, messages=USER).id


@pytest.mark.parametrize(
    "host",
    [
        "evil.example",
        "evil.example:80",
        "localhost.evil.example",
        "localhost@evil.example",
        "[::2]",
        "[",
        "",
    ],
)
def test_unknown_host_names_are_refused(scripted, host):
    said = (
        "without --api-key the Host must be localhost, 127.0.0.1, [::1] or host.docker.internal, "
        f"got {host!r}"
    )
    for path, body in ((TEXT, {"prompt": "x"}), ("/health", None)):
        assert refuse(scripted[0], path, body, {"Host": host}, 403) == said


@pytest.mark.parametrize(
    "host", ["localhost", "LocalHost:8080", "127.0.0.1:80", "[::1]", "host.docker.internal:80"]
)
def test_local_host_names_are_accepted(scripted, host):
    assert ask(scripted[0], "/health", headers={"Host": host}).status == 200


def check_origins(server: Running, expected: dict[str, int], headers: dict[str, str]):
    """Compares the status of requests and preflights of pages with these origins.

    Only accepted pages may read it.
    """
    asked = {
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization",
    }
    asked["Access-Control-Request-Private-Network"] = "true"
    for origin, status in expected.items():
        simple = {
            "Origin": origin,
            "Content-Type": "text/plain",
        }  # which browsers send without a preflight
        reply = ask(server, TEXT, {"prompt": "x", "max_tokens": 1}, headers | simple)
        assert reply.status == status, (origin, reply)
        assert status == 200 or reply.error.endswith(f"got {origin!r}")
        preflight = ask(server, TEXT, None, asked | {"Origin": origin}, "OPTIONS")
        assert preflight.status == (200 if status == 200 else 400), (origin, preflight)
        for each in (reply, preflight):
            assert (each.headers.get("access-control-allow-origin") == origin) is (status == 200)


def test_only_pages_of_named_origins_may_send_requests(locked):
    check_origins(
        locked,
        {"http://a.example": 200, "http://localhost": 403, "app://x": 403, "null": 403},
        BEARER,
    )
    for own in (locked.url, locked.url.replace("http", "https")):
        assert ask(locked, "/v1/models", headers=BEARER | {"Origin": own}).status == 200


def test_by_default_pages_of_this_machine_and_of_apps_may_send_requests(scripted):
    accepted = [
        "http://localhost",
        "https://localhost:3000",
        "http://127.0.0.1:8080",
        "http://[::1]:1",
        "app://obsidian.md",
    ]
    accepted += ["http://0.0.0.0:3000", "file://", "tauri://localhost", "vscode-webview://abc"]
    refused = [
        "https://site.example",
        "null",
        "",
        "http://localhost.site.example",
        "http://127.0.0.1.site.example",
    ]
    refused += [
        "http://site.example/?http://localhost",
        "http://localhost:80@site.example",
        "http://192.168.0.7",
        "webapp://x",
    ]
    refused += ["chrome-extension://abc", "http://127.0.0.2", "https://site.example#app://x"]
    check_origins(scripted[0], dict.fromkeys(accepted, 200) | dict.fromkeys(refused, 403), {})
    assert not scripted[1].requests[len(accepted) :], "refused requests are not run"


def test_a_domain_that_points_to_this_machine_is_refused(scripted):
    headers = {"Host": "site.example", "Origin": "http://site.example"}
    said = refuse(scripted[0], TEXT, {"prompt": "x"}, headers, 403)
    assert "without --api-key the Host must be localhost" in said


def test_all_pages_may_send_requests_if_told_so(chat_tokenizer, caplog):
    with start_scripted(chat_tokenizer, "--allowed-origins", "*") as (server, _):
        reply = ask(server, TEXT, {"prompt": "x"}, {"Origin": "http://any.example"})
    assert reply.status == 200
    assert reply.headers["access-control-allow-origin"] == "*"
    assert caplog.text.count("Any web page that is open on this machine may use the server") == 1


FULL = {
    "/v1/messages": b'"model_context_window_exceeded"',
    "/v1/responses": b'"max_output_tokens"',
}
"""How an answer says that it was cut off, if not by "length"."""


@pytest.mark.parametrize(("flags", "most"), [((), 80), (("--max-tokens", "7"), 7)])
def test_an_answer_without_a_limit_fills_the_context(flags, most):
    with start_demo("--context-length", "80", "--log-level", "WARNING", *flags) as server:
        for path, body in BODIES.items():
            endless = {"max_tokens": -1} if path == "/v1/messages" else {}
            reply = ask(server, path, body | endless | {"logit_bias": {"0": -100}})
            assert reply.status == 200 and FULL.get(path, b'"length"') in reply.body, reply
            usage = reply.json["usage"]
            read = usage.get(
                "prompt_tokens",
                usage.get("input_tokens", 0) + usage.get("cache_read_input_tokens", 0),
            )
            made = usage.get("completion_tokens", usage.get("output_tokens"))
            assert made == (7 if most == 7 and not endless else 80 - read), path
        reply = ask(server, TEXT, {"prompt": "x " * 200})
        assert reply.status == 400
        assert reply.json["error"]["code"] == "context_length_exceeded"
        too_long = {"input": "x " * 200, "stream": True}
        created, failed = events_of(ask(server, "/v1/responses", too_long))
        assert created["type"] == "response.created"
        assert failed["response"]["error"]["code"] == "context_length_exceeded"


@pytest.mark.parametrize("path", BODIES)
def test_no_tokens_fill_the_cache(demo, path):
    text = f"{path} reads this before anyone asks: {'word ' * 50}"
    limit = "max_output_tokens" if path == "/v1/responses" else "max_tokens"
    messages = [{"role": "user", "content": text}]
    given = {TEXT: {"prompt": text, "logprobs": 1}, "/v1/responses": {"input": text}}
    body = given.get(path, {"messages": messages})
    made = ask(demo, path, body | {limit: 0}).json
    choice = made.get("choices", [made])[0]
    held = choice.get("message", choice)
    assert not (held.get("text") or held.get("content") or held.get("output"))
    assert choice.get("logprobs") is None
    ends = {choice.get(name) for name in ("finish_reason", "stop_reason", "status")}
    assert ends & {"length", "max_tokens", "incomplete"}
    assert 0 in (made["usage"].get("completion_tokens"), made["usage"].get("output_tokens"))

    worker = demo.service.worker
    before = count_tokens(worker, "cached")
    assert len(events_of(ask(demo, path, body | {limit: 0, "stream": True}))) < 5
    until(lambda: not worker.scheduler.running)
    assert count_tokens(worker, "cached") - before > 50


LONG = "it goes on " * 50_000


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/completions", {"prompt": LONG}),
        ("/v1/messages/count_tokens", {"messages": USER, "system": LONG}),
    ],
)
def test_most_of_a_prompt_far_too_long_is_not_encoded(scripted, path, fields, monkeypatch):
    kind = type(scripted[0].service.tokenizer._tokenizer)
    encoded = []
    encode = kind.encode

    def record(tokenizer, text, **options):
        encoded.append(text)
        return encode(tokenizer, text, **options)

    monkeypatch.setattr(kind, "encode", record)
    said = refuse(scripted[0], path, BODIES.get(path, {}) | fields)
    assert max(map(len, encoded)) < len(LONG) / 2
    assert "prompt is too long: at least " in said
    assert "tokens > 8192 maximum" in said
    assert ask(scripted[0], "/v1/completions", {"prompt": LONG[:9000]}).status == 200
    assert LONG[:9000] in encoded


@pytest.mark.parametrize("stream", [False, True])
def test_the_engine_stops_when_a_client_disconnects(demo, stream):
    engine = demo.service.worker
    cancelled = count(engine, "generations", end="cancelled")
    fields = {
        "max_tokens": 1900,
        "logit_bias": {"0": -100},
        "stream": stream,
        "draft_model": None,
    }
    with send_request(demo, TEXT, **fields) as connection:
        until(lambda: len(engine.scheduler.running) == 1)
        assert not stream or connection.recv(15) == b"HTTP/1.1 200 OK"
    until(
        lambda: (
            len(engine.scheduler.running) == 0
            and count(engine, "generations", end="cancelled") == cancelled + 1
        )
    )


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize(
    "error", [GenerationFailed("no memory"), GenerationFailed("the server ends", 503)]
)
def test_engine_failures_are_reported(scripted, path, error):
    server, engine = scripted
    body = BODIES[path]
    engine.texts = [["</think>", "one ", error]]
    reply = ask(server, path, body)
    assert reply.status == error.status
    assert reply.error == str(error)
    last = events_of(ask(server, path, body | {"stream": True}))[-1]
    if path == "/v1/responses":
        assert last["type"] == "response.failed"
        assert last["response"]["status"] == "failed"
        assert last["response"]["output"][0]["content"][0]["text"] == "one"
        last = last["response"]
    assert last["error"]["message"] == str(error)


def test_a_body_that_does_not_come_ends_its_connection(scripted, monkeypatch):
    monkeypatch.setattr(app, "BODY_SECONDS", 0.2)
    with socket.create_connection(scripted[0].address, timeout=PATIENCE) as connection:
        connection.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 99\r\n\r\n"
            b'{"prompt"'
        )
        with HTTPResponse(connection) as reply:
            reply.begin()
            assert reply.status == 408
            assert b"expected the whole body, got 9 bytes" in reply.read()
        assert connection.recv(1) == b""
    assert not scripted[1].requests


def test_idle_connections_are_kept_for_longer_than_agents_pause(scripted):
    server = GracefulServer(app.make_app(scripted[0].service), scripted[0].service)
    assert server.config.timeout_keep_alive >= 75


def test_other_paths_and_methods_are_refused(scripted):
    for path, nearest in (
        ("/v1/chat/completion", "/v1/chat/completions"),
        ("/v1/response", "/v1/responses"),
        ("/api/models", "/v1/models"),
    ):
        said = f"{path} is not served here; the nearest path is {nearest}"
        assert refuse(scripted[0], path, {"input": "x"}, status=404) == said
    reply = ask(scripted[0], TEXT)
    assert reply.status == 405
    assert reply.headers["allow"] == "POST"


@pytest.mark.parametrize("coding", ["gzip", "deflate", "GZIP", "identity"])
def test_compressed_bodies_are_read(scripted, coding):
    raw = json.dumps({"prompt": "x"}).encode()
    compress = {"gzip": gzip.compress, "deflate": zlib.compress}.get(coding.lower(), bytes)
    reply = ask(scripted[0], TEXT, compress(raw), {"Content-Encoding": coding})
    assert reply.status == 200, reply.body


@pytest.mark.parametrize("coding", ["br", "zstd", "gzip, gzip"])
def test_other_codings_are_named(scripted, coding):
    reply = ask(scripted[0], TEXT, b"\x8b", {"Content-Encoding": coding})
    assert reply.status == 415
    assert reply.headers["accept-encoding"] == "gzip, deflate"
    assert reply.error.startswith("the Content-Encoding must be")
    assert coding in reply.error


def test_a_compressed_body_is_bounded(scripted, monkeypatch):
    monkeypatch.setattr(app, "MAX_BODY_BYTES", 1000)
    whole = gzip.compress(json.dumps({"prompt": "x" * 2000}).encode())
    for data, status, said in (
        (whole, 413, "the body has more than 1000 bytes"),
        (gzip.compress(b'{"prompt": "x"}')[:-9], 400, "the body's gzip data is incomplete"),
        (b'{"prompt": "x"}', 400, "the body is not compressed with gzip"),
    ):
        headers = {"Content-Encoding": "gzip"}
        assert refuse(scripted[0], TEXT, data, headers, status) == said


def test_any_body_is_bounded(scripted, monkeypatch):
    limit = 1 << 20
    monkeypatch.setattr(app, "MAX_BODY_BYTES", limit)
    fits = b'{"prompt": "x"}'.ljust(limit)
    assert ask(scripted[0], TEXT, fits).status == 200
    for data in (fits + b" ", fits * 30):  # more than any socket buffers
        reply = ask(scripted[0], TEXT, data)
        assert reply.status == 413
        assert reply.error == f"the body has more than {limit} bytes"
        assert reply.json["error"]["code"] == "request_too_large"
    refused = ask(scripted[0], "/v1/messages", fits * 2).json["error"]
    assert refused["type"] == "request_too_large"
    assert len(scripted[1].requests) == 1


@pytest.mark.parametrize("path", BODIES)
def test_proxies_do_not_hold_streams_back(scripted, path):
    reply = ask(scripted[0], path, BODIES[path] | {"stream": True})
    assert reply.headers["x-accel-buffering"] == "no"


def test_an_unexpected_error_is_answered(scripted, caplog):
    server, engine = scripted
    engine.refusal = ZeroDivisionError("no number")
    label = 'requests_total{endpoint="/v1/completions",status="500"}'
    before = read_metrics(server).get(label, 0)
    reply = ask(server, TEXT, {"prompt": "x"}, {"Origin": "http://localhost"})
    assert reply.status == 500
    assert reply.error == "the server failed; see its log"
    assert reply.headers["access-control-allow-origin"] == "http://localhost"
    assert "connection" not in reply.headers
    assert read_metrics(server)[label] == before + 1
    assert caplog.text.count("ZeroDivisionError: no number") == caplog.text.count("Traceback") == 1


def test_health_describes_the_server(scripted, monkeypatch):
    server, engine = scripted
    expected = {
        "status": "ok",
        "model": "demo",
        "drafter": "demo",
        "running": 0,
        "queue": 0,
        "mode": "idle",
    }
    assert ask(server, "/health").json == expected
    monkeypatch.setattr(engine, "is_alive", False)
    reply = ask(server, "/health")
    assert reply.status == 503
    assert reply.json["status"] == "unavailable"


def test_metrics_count_answers(demo):
    before = read_metrics(demo)
    for _ in range(2):
        assert ask(demo, TEXT, {"prompt": "class Stack:\n", "max_tokens": 9}).status == 200
    assert ask(demo, TEXT, {"prompt": [5000]}).error == "token ids must be from 0 to 4095, got 5000"
    assert ask(demo, "/no/such/path").status == 404
    # A request is counted when it has ended.
    until(lambda: len(demo.service.worker.scheduler.running) == 0)
    found = {name: value - before.get(name, 0) for name, value in read_metrics(demo).items()}
    assert found['requests_total{endpoint="/v1/completions",status="200"}'] == 2
    assert found['requests_total{endpoint="/v1/completions",status="400"}'] == 1
    assert found['requests_total{endpoint="other",status="404"}'] == 1
    assert found['tokens_total{kind="generated"}'] == 18
    assert 0 < found['tokens_total{kind="accepted"}'] <= found['tokens_total{kind="drafted"}']
    assert found['tokens_total{kind="cached"}'] > 0
    assert found["rounds_total"] > 0
    assert found["answer_seconds_count"] == found["first_token_seconds_count"] == 2
    assert found["queue_length"] == found["running"] == 0
    assert "prompt_cache_bytes" in found


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (
            ["--host", "0.0.0.0"],
            "--host 0.0.0.0 needs a key: expected --api-key-file or --api-key, got neither",
        ),
        (["--chat-template", "x"], "--chat-template needs --model"),
        (["--api-key", " "], "the key must not be empty"),
        (["--temp", "-1"], "temp must be at least 0, got -1"),
        (["--plan", "off", "--draft-depth", "3"], "give either plan or draft_depth"),
    ],
)
def test_wrong_flags_are_named(flags, said):
    with pytest.raises(RedrafterError) as raised:
        parse_flags(*flags)
    assert str(raised.value).startswith(said)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--prompt-cache-bytes", "5 parsecs"], "expected a number of bytes, such as 512MB or 2GB"),
        (["--chat-template-args", "[1]"], "must be a JSON object, got list"),
        (
            ["--api-key", "x", "--api-key-file", __file__],
            "--api-key-file: not allowed with argument --api-key",
        ),
    ],
)
def test_wrong_values_are_usage_errors(flags, said, capsys):
    with pytest.raises(SystemExit):
        make_parser().parse_args(flags)
    assert said in capsys.readouterr().err


def test_flags_are_parsed(tmp_path):
    (tmp_path / "key").write_text(" secret\n")
    flags = f"--api-key-file {tmp_path}/key --prompt-cache-bytes 1.5GB --kv-bits 8 --no-context"
    args = parse_flags(*flags.split(), *["--host", "0.0.0.0", "--num-draft-tokens", "4"])
    assert args.api_key == "secret"
    assert args.prompt_cache_bytes == 1_500_000_000
    assert args.options.max_tokens == -1
    assert args.options.kv_bits == 8
    assert args.options.draft_depth == 4
    assert args.options.context is False
