"""What the server refuses: keys, lengths, paths, fields, and more requests than it can hold."""

from __future__ import annotations

import http.client
import json
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families
from service import (
    BEAM,
    PATIENCE,
    VOCAB,
    ask,
    busy,
    client_of,
    complete,
    crowd,
    held,
    idle,
    send,
    server_of,
    together,
    until,
    with_toys,
)
from small import small_drafter

from mlx_redrafter.checkpoints import save_drafter
from mlx_redrafter.errors import RedrafterError
from mlx_redrafter.serving.command import Server, checked
from mlx_redrafter.serving.flags import read_flags

pytestmark = pytest.mark.filterwarnings("ignore:the drafter has guessed no token right")
FLAGS = (
    *(*BEAM, "--max-prompt-tokens", "20", "--max-completion-tokens", "12", "--max-request-bytes", "3000"),
    *("--max-queue", "2", "--decode-concurrency", "1"),
)
KEY = "s3cret key"
BEARER = {"Authorization": f"Bearer {KEY}"}
TEXT = "/v1/completions"


@pytest.fixture(scope="module")
def locked(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    file = tmp_path_factory.mktemp("key") / "key"
    file.write_text(KEY + "\n")
    with server_of(*with_toys(root), *BEAM, "--api-key-file", str(file)) as server:
        yield server


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"max_tokens": 13}, "max_tokens must be at most 12, got 13"),
        ({"max_completion_tokens": 13}, "max_tokens must be at most 12"),
        ({"max_tokens": 0}, "max_tokens must be at least 1"),
        ({"prompt": "a" * 21}, "the prompt must have at most 20 tokens, got 21"),
        ({"prompt": ""}, "the prompt is empty"),
        ({"prompt": None}, "the request has no prompt"),
        ({"prompt": "\ud800"}, "the prompt cannot be made"),
        ({"temperature": -1}, "temperature must be at least 0"),
        ({"temperature": 1e-200}, "temp must be"),
        ({"top_k": 53, "temperature": 1}, "top_k must be below the vocabulary's 53"),
        ({"xtc_probability": 0.5, "xtc_threshold": 0.9, "temperature": 1}, "xtc_threshold must be from 0 to 0.5"),
        ({"logit_bias": {"53": 1}}, "logit_bias must be of token ids from 0 to 52, got 53"),
        ({"draft_model": "third"}, "there is no drafter 'third' for this model; there are one, second, none"),
        ({"beam_width": 99}, "beam_width must be from 1 to the vocabulary's 53"),
        ({"draft_depth": 10**6}, "draft_depth must be from 1 to"),
        ({"beam_width": 32, "draft_depth": 2}, "1 + beam_width * draft_depth must be at most 64 here, got 65"),
        ({"beam_width": 22}, "1 + beam_width * draft_depth must be at most 64 here, got 67 for 22 * 3"),
        ({"plan": [32, 2, 5]}, "1 + beam_width * draft_depth must be at most 64 here, got 65"),
        ({"draft_depth": 64}, "1 + beam_width * draft_depth must be at most 64 here, got 65 for 1 * 64"),
        ({"num_draft_tokens": 64}, "1 + beam_width * draft_depth must be at most 64 here, got 65"),
        ({"plan": [99, 256], "draft_model": "second"}, "beam_width must be from 1 to the vocabulary's 53"),
        ({"plan": "fast"}, "plan must be 'auto', 'off'"),
        ({"plan": [2, 2], "beam_width": 2}, "give either plan or beam_width"),
        ({"stop": 5}, "stop must be a string"),
        ({"n": 3}, "n must be 1"),
        ({"top_logprobs": 12}, "top_logprobs must be at most 11"),
        ({"logit_bias": {"5": 1e39}, "logprobs": True}, "logit_bias[5] must be from -1e+18 to 1e+18, got 1e+39"),
        ({"repetition_penalty": 1e-39, "logprobs": True}, "repetition_penalty must be 0, or from 1e-18 to 1e+18"),
        ({"repetition_penalty": -2}, "repetition_penalty must be at least 0"),
    ],
)
def test_a_request_that_cannot_be_served_is_told_why(fields: dict[str, Any], said: str, server: Server) -> None:
    reply = ask(server, "POST", TEXT, {"prompt": "hello"} | fields)
    assert reply.status == 400 and said in reply.error, reply
    assert reply.json["error"]["type"] == "invalid_request_error"
    assert complete(server, "hello")["usage"]["completion_tokens"] <= 12


@pytest.mark.parametrize(
    "fields",
    [
        {"draft_depth": 63},
        {"plan": [31, 2]},
        {"beam_width": 1, "draft_depth": 200, "tree_size": 8},
        {"num_draft_tokens": 3},
        {"beam_width": 53, "draft_model": None},
        {"beam_width": 53, "draft_model": "none"},
        {"plan": "off"},
    ],
)
def test_a_beam_within_the_bound_is_served(fields: dict[str, Any], server: Server) -> None:
    assert complete(server, "hello", max_tokens=3, **fields)["usage"]["completion_tokens"] <= 3


def test_the_bound_of_a_beam_is_for_requests_and_can_be_set(root: Path) -> None:
    with server_of(*with_toys(root), "--beam-width", "4", "--draft-depth", "4", "--max-tree-size", "3") as server:
        assert complete(server, "hello", max_tokens=3)["usage"]["rounds"] > 0
        assert ask(server, "POST", TEXT, {"prompt": "hello", "plan": [1, 3]}).status == 400
        assert complete(server, "hello", max_tokens=3, plan=[1, 2])


@pytest.mark.parametrize("fields", [{"xtc_probability": 0.5}, {"temperature": 1}])
def test_a_threshold_of_xtc_that_does_not_matter_is_no_fault(fields: dict[str, Any], server: Server) -> None:
    expected = complete(server, "hello", seed=1, **fields)["choices"]
    assert complete(server, "hello", seed=1, xtc_threshold=0.9, **fields)["choices"] == expected


def test_openais_client_shows_what_is_wrong(server: Server) -> None:
    with client_of(server) as client, pytest.raises(openai.BadRequestError, match="max_tokens must be at most 12"):
        client.completions.create(model="default_model", prompt="x", max_tokens=99)


def test_a_chat_needs_messages_and_a_model_that_sees_for_images(server: Server) -> None:
    for path in ("/v1/chat/completions", "/chat/completions"):
        assert ask(server, "POST", path, {"prompt": "x"}).error == "the request has no messages"
    part = {"type": "image_url", "image_url": {"url": "http://127.0.0.1:9/never-asked"}}
    reply = ask(server, "POST", path, {"messages": [{"role": "user", "content": [part]}]})
    assert (reply.status, reply.error) == (400, "the model that is loaded sees no images")


def test_a_chat_template_of_the_clients_own_is_refused(server: Server) -> None:
    endless = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    fields = {"messages": [{"role": "user", "content": "x"}], "chat_template_kwargs": {"chat_template": endless}}
    reply = ask(server, "POST", "/v1/chat/completions", fields)
    assert (reply.status, reply.error[-13:]) == (400, "chat_template")
    assert complete(server, "hello", max_tokens=1)


def test_the_strongest_bias_and_penalty_give_finite_numbers(server: Server) -> None:
    fields = {"logit_bias": {"5": 1e18, "6": -1e18}, "repetition_penalty": 1e-18, "top_logprobs": 3, "logprobs": True}
    told = json.dumps(complete(server, "fine", max_tokens=4, **fields))
    assert "NaN" not in told and "Infinity" not in told


@pytest.mark.parametrize("method", ["GET", "POST"])
def test_another_path_is_not_found(method: str, server: Server) -> None:
    assert ask(server, method, "/v1/embeddings", {} if method == "POST" else None).status == 404


def raw(server: Server, data: bytes, *, close: bool = True) -> bytes:
    """Bytes to the server, and all that comes back."""
    with socket.create_connection(server.server_address[:2], timeout=PATIENCE) as connection:
        connection.sendall(data)
        if close:
            connection.shutdown(socket.SHUT_WR)
        found = b""
        while more := connection.recv(1 << 16):
            found += more
        return found


@pytest.mark.parametrize(
    ("length", "status"),
    [(b"", 411), (b"-5", 400), (b"x", 400), (b"1_0", 400), (b"+3", 400), (b"3001", 413), (b"9" * 400, 413)],
)
def test_a_body_needs_a_length_that_is_one_and_not_too_long(length: bytes, status: int, server: Server) -> None:
    header = b"Content-Length: " + length + b"\r\n" if length else b""
    reply = raw(server, b"POST /v1/completions HTTP/1.1\r\n" + header + b"\r\n{}", close=True)
    assert reply.split()[1] == str(status).encode(), reply


def test_a_long_body_is_refused_before_it_is_read_and_its_sender_sees_the_reply(server: Server) -> None:
    reply = ask(server, "POST", TEXT, {"prompt": "a" * 2_000_000})
    assert (reply.status, reply.error) == (413, "the body must have at most 3000 bytes")


@pytest.mark.parametrize("data", [b"", b"\r\n", b"nonsense\r\n\r\n", b"POST / HTTP/9.9\r\n\r\n", b"\xff\x00" * 50])
def test_what_is_no_http_does_no_harm(data: bytes, server: Server) -> None:
    raw(server, data)
    assert complete(server, "hello", max_tokens=2)["usage"]["completion_tokens"] == 2


def test_what_a_client_sends_cannot_forge_the_log(server: Server, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    raw(server, b"GET /\x1b[2J\x9b1Amoved HTTP/1.0\r\n\r\n")
    raw(server, b"GET /moved \x85\x0b HTTP/1.0\r\n\r\n")
    found = [record.message for record in caplog.records if "moved" in record.message]
    assert any(r'"GET /\x1b[2J\x9b1Amoved HTTP/1.0" 404' in each for each in found)
    assert len(found) > 1 and all(each.isprintable() for each in found)


def test_a_client_that_says_nothing_is_dropped(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mlx_redrafter.serving.handler.Handler.timeout", 0.2)
    started = time.monotonic()
    head = b"POST /v1/completions HTTP/1.1\r\nContent-Length: 100\r\n\r\n{"
    assert b"200" not in raw(server, head, close=False)[:20]
    assert time.monotonic() - started < 10
    assert server.wait_idle(PATIENCE)


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"Authorization": "Bearer wrong"},
        {"Authorization": KEY},
        {"Authorization": f"Basic {KEY}"},
        {"Authorization": "Bearer \xe9\xff"},
        {"Authorization": f"Bearer {KEY}x"},
    ],
)
@pytest.mark.parametrize(
    ("method", "path"), [("POST", TEXT), ("POST", "/x"), ("GET", "/v1/models"), ("GET", "/metrics")]
)
def test_without_the_key_nothing_is_answered(method: str, path: str, headers: dict[str, str], locked: Server) -> None:
    reply = ask(locked, method, path, {"prompt": "x"} if method == "POST" else None, headers)
    assert reply.status == 401 and reply.headers["www-authenticate"] == "Bearer" and KEY not in reply.error


def test_with_the_key_everything_is_and_health_without(locked: Server) -> None:
    assert ask(locked, "GET", "/health").status == 200
    for path in ("/v1/models", "/metrics"):
        assert ask(locked, "GET", path, headers=BEARER).status == 200
    with client_of(locked, KEY) as client:
        assert client.completions.create(model="default_model", prompt="x", max_tokens=3).choices[0].text
    with client_of(locked, "other") as client, pytest.raises(openai.AuthenticationError):
        client.models.list()


STRANGE = ("evil.example", "evil.example:80", "localhost.evil.example", "127.0.0.1.evil.example:8080", "192.168.0.7",
           "[::2]", "[", "localhost@evil.example", "a:b:c", "")  # fmt: skip


@pytest.mark.parametrize("host", STRANGE)
@pytest.mark.parametrize(
    ("method", "path"), [("POST", TEXT), ("GET", "/health"), ("GET", "/v1/models"), ("OPTIONS", TEXT)]
)
def test_without_a_key_only_names_of_this_machine_are_answered(
    host: str, method: str, path: str, server: Server
) -> None:
    reply = ask(server, method, path, {"prompt": "x"} if method == "POST" else None, {"Host": host})
    said = f"without --api-key the Host must be localhost, 127.0.0.1 or [::1], got {host!r}"
    assert (reply.status, reply.error) == (403, said)


@pytest.mark.parametrize(
    "host",
    [
        "localhost",
        "LocalHost:8080",
        "127.0.0.1",
        "127.0.0.1:1",
        "127.8.9.10:80",
        "[::1]",
        "[::1]:8080",
        "::1",
        "localhost ",
    ],
)
def test_every_name_of_this_machine_is_answered(host: str, server: Server) -> None:
    assert ask(server, "GET", "/health", headers={"Host": host}).status == 200


def test_with_a_key_or_without_a_host_any_name_will_do(locked: Server, server: Server) -> None:
    assert ask(locked, "GET", "/v1/models", headers=BEARER | {"Host": "proxy.example"}).status == 200
    with socket.create_connection(server.server_address[:2], timeout=PATIENCE) as connection:
        connection.sendall(b"GET /health HTTP/1.0\r\n\r\n")
        assert connection.recv(64).startswith(b"HTTP/1.0 200")


def test_pages_that_are_not_named_may_not_even_ask(root: Path) -> None:
    asked = {"prompt": "x", "max_tokens": 1}
    with server_of(*with_toys(root), *BEAM, "--allowed-origins", "http://a.example") as server:
        for origin, status in (("http://a.example", 200), (None, 200), ("http://evil.example", 403), ("null", 403)):
            headers = {"Content-Type": "text/plain"} | ({"Origin": origin} if origin else {})
            assert ask(server, "POST", TEXT, asked, headers).status == status, origin


def test_a_second_host_is_looked_at_as_well(server: Server) -> None:
    with socket.create_connection(server.server_address[:2], timeout=PATIENCE) as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\nHost: evil.example\r\n\r\n")
        assert b" 403 " in connection.recv(64)


def test_a_page_in_a_browser_may_send_the_key(locked: Server) -> None:
    connection = http.client.HTTPConnection(*locked.server_address[:2], timeout=PATIENCE)
    asked = {"Origin": "http://page", "Access-Control-Request-Headers": "authorization,content-type"}
    connection.request("OPTIONS", TEXT, headers={"Access-Control-Request-Method": "POST"} | asked)
    reply = connection.getresponse()
    assert reply.status == 204 and reply.getheader("Access-Control-Allow-Origin") == "*"
    # By the Fetch standard * means every header but this one.
    named = (reply.getheader("Access-Control-Allow-Headers") or "").split(", ")
    assert "*" in named and "Authorization" in named
    connection.close()


def test_when_the_queue_is_full_a_client_is_told_when_to_come_again(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    replies: list[Any] = []

    def one() -> None:
        replies.append(ask(server, "POST", TEXT, {"prompt": "hello", "max_tokens": 3}))

    threads = [threading.Thread(target=one) for _ in range(3)]
    with held(server, monkeypatch, at=1) as gate:
        for count, thread in enumerate(threads):
            thread.start()
            until(lambda count=count: busy(server) == count + 1)  # type: ignore[misc]
        health = ask(server, "GET", "/health").json
        assert (health["status"], health["running"], health["queue"]) == ("ok", 1, 2)
        refused = ask(server, "POST", TEXT, {"prompt": "hello"})
        assert refused.status == 503 and "the queue is full: 2 requests wait" in refused.error
        assert 1 <= int(refused.headers["retry-after"]) <= 60
        with client_of(server) as client, pytest.raises(openai.InternalServerError, match="queue is full"):
            client.completions.create(model="default_model", prompt="hello")
        gate.set()
        for thread in threads:
            thread.join()
    assert [reply.status for reply in replies] == [200] * 3
    assert len({json.dumps(reply.json["choices"]) for reply in replies}) == 1


def test_who_fills_the_queue_makes_room_for_another_client(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    greedy = {"max_tokens": 3, "user": "greedy"}
    with held(server, monkeypatch, at=1) as gate, crowd(server, [greedy] * 3) as opened:
        assert server.responder.queue.full()
        with send(server, max_tokens=3, user="modest") as modest:
            refused = b"".join(iter(lambda: opened[2].recv(1 << 16), b""))
            assert b" 503 " in refused.partition(b"\r\n")[0] and b"others have fewer requests in it" in refused
            assert b"\r\nRetry-After: " in refused and server.responder.queue.qsize() == 2
            gate.set()
            for each in (*opened[:2], modest):
                assert b" 200 " in each.recv(1 << 16)
    until(lambda: idle(server))


def test_clients_that_went_while_they_waited_keep_no_place_in_the_queue(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    with held(server, monkeypatch, at=1) as gate, crowd(server, [{"max_tokens": 3}] * 3) as opened:
        assert server.responder.queue.full()
        for each in opened[1:]:
            each.close()
        with send(server, max_tokens=3) as last:
            until(lambda: server.responder.queue.qsize() == 1)
            gate.set()
            assert b" 200 " in last.recv(1 << 16)
    until(lambda: idle(server))


def test_health_says_what_there_is_and_not_where(server: Server) -> None:
    reply = ask(server, "GET", "/health")
    assert reply.status == 200
    assert reply.json == {"status": "ok", "model": "target", "drafters": ["one", "second"], "running": 0, "queue": 0}


def test_metrics_count_what_was_asked_and_answered(root: Path) -> None:
    def read(server: Server) -> dict[str, float]:
        reply = ask(server, "GET", "/metrics")
        assert reply.status == 200 and reply.headers["content-type"].startswith("text/plain")
        families = list(text_string_to_metric_families(reply.body.decode()))
        assert all(family.name.startswith("mlx_redrafter_") for family in families)
        return {
            sample.name.removeprefix("mlx_redrafter_") + "".join(f",{v}" for _, v in sorted(sample.labels.items())):
                sample.value
            for family in families for sample in family.samples
        }  # fmt: skip

    with server_of(*with_toys(root), *BEAM) as server:
        assert read(server)["rounds_total"] == 0
        usage = [complete(server, "metrics", max_tokens=9)["usage"] for _ in range(2)]
        ask(server, "POST", TEXT, {"prompt": 3})
        ask(server, "GET", "/of-my-own-making")
        until(lambda: server.responder.running == 0)
        found = read(server)
        for kind in ("drafted", "accepted"):
            assert found[f"tokens_total,{kind}"] == sum(each[kind] for each in usage)
        assert found["rounds_total"] == sum(each["rounds"] for each in usage) > 0
        assert found["tokens_total,generated"] == sum(each["completion_tokens"] for each in usage)
        assert found["tokens_total,prompt"] == 14 and 0 < found["tokens_total,cached"] < 7
        assert found[f"requests_total,{TEXT},200"] == 2 and found[f"requests_total,{TEXT},400"] == 1
        assert found["requests_total,other,404"] == 1 and "making" not in str(found)
        assert found["first_token_seconds_count"] == found["answer_seconds_count"] == found["queue_seconds_count"] == 2
        assert found["queue_length"] == found["running"] == 0 < found["prompt_cache_bytes"]


def test_a_drafter_that_fails_in_the_middle_is_told_in_the_log_and_nowhere_else(
    root: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with server_of(*with_toys(root), *BEAM) as server:
        plain = complete(server, "failing", max_tokens=25, draft_model=None, temperature=0.9, seed=1)
        drafter = server.responder.model_provider.drafters["one"]
        left, real = iter(range(5)), type(drafter).logits

        def logits(self: Any, *args: Any) -> Any:
            if self is drafter and next(left, None) is None:
                raise RuntimeError("out of wits")
            return real(self, *args)

        monkeypatch.setattr(type(drafter), "logits", logits)
        reply = complete(server, "failing", max_tokens=25, temperature=0.9, seed=1)
        assert reply["choices"] == plain["choices"] and 0 < reply["usage"]["drafted"] < 20
        said = [record for record in caplog.records if "The drafter has failed" in record.message]
        assert len(said) == 1 and "out of wits" in str(said[0].exc_info)
        assert server.responder.meters.registry.get_sample_value("mlx_redrafter_drafter_failures_total") == 1


def test_requests_at_once_are_all_answered_rightly(root: Path) -> None:
    with server_of(*with_toys(root), *BEAM) as server:
        expected = {seed: complete(server, "x", temperature=1, seed=seed, max_tokens=9)["choices"] for seed in range(4)}
        calls = [
            lambda seed=seed % 4: (seed, complete(server, "x", temperature=1, seed=seed, max_tokens=9)["choices"])
            for seed in range(12)
        ]
        for seed, choices in together(calls):
            assert choices == expected[seed]


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--host", "0.0.0.0"], "lets others in: expected --api-key-file or --api-key"),
        (["--host", "0.0.0.0", "--api-key", " "], "the key must be printable ASCII, and not empty"),
        (["--host", "0.0.0.0", "--api-key", ""], "the key must be printable ASCII, and not empty"),
        (["--api-key", "a", "--api-key-file", "b"], "give either --api-key or --api-key-file"),
        (["--api-key-file", "/nowhere/key"], "cannot read the key in /nowhere/key"),
        (["--draft-model", "x"], "--draft-model is not served: expected --drafter"),
        (["--pipeline"], "several processes are not served"),
        (["--drafter", "x", "--no-drafter"], "either --drafter or --no-drafter"),
        (["--drafter", "a=x", "--drafter", "a=y"], "--drafter must be [NAME=]PATH with a name of its own, got 'a=y'"),
        (["--drafter", "none=x"], "with a name of its own"),
        (["--drafter", "default_model=x"], "with a name of its own"),
        (["--max-queue", "0"], "--max-queue must be at least 1, got 0"),
        (["--drain-timeout", "0"], "--drain-timeout must be at least 1, got 0"),
        (["--port", "65536"], "--port must be from 0 to 65535"),
        (["--adapter-path", "x"], "--adapter-path needs --model"),
        (["--beam-width", "0"], "--beam-width must be at least 1, got 0"),
        (["--draft-depth", "1000"], "draft_depth must be from 1 to 256, got 1000"),
        (["--tree-size", "999"], "tree_size counts the root and must be from 2 to"),
        (["--plan", "off", "--beam-width", "2"], "give either plan or beam_width"),
        (["--temp", "-1"], "temp must be at least 0, got -1.0"),
        (["--top-p", "5"], "top_p must be from 0 to 1, got 5.0"),
        (["--kv-bits", "7"], "kv_bits must be one of"),
        (["--kv-bits", "3", "--kv-group-size", "7"], "kv_group_size must be one of"),
        (["--num-draft-tokens", "-3"], "--num-draft-tokens must be from 0 to 256, got -3"),
        (["--num-draft-tokens", "5000"], "--num-draft-tokens must be from 0 to 256, got 5000"),
        (["--chat-template-args", "5"], "--chat-template-args must be a JSON object, got 5"),
        (["--chat-template-args", "[1]"], "--chat-template-args must be a JSON object, got [1]"),
    ],
)
def test_flags_that_do_not_go_together_are_refused(flags: list[str], said: str) -> None:
    with pytest.raises(RedrafterError) as caught:
        checked(read_flags(flags))
    assert said in str(caught.value)


def test_a_wide_beam_may_fit_a_drafter_that_is_not_loaded_yet() -> None:
    assert checked(read_flags(["--beam-width", "54"])).beam_width == 54


def test_spaces_around_a_key_are_no_part_of_it() -> None:
    assert checked(read_flags(["--api-key", " a b "])).api_key == "a b"


def test_every_flag_of_mlx_lm_is_there_and_its_module_is_left_alone() -> None:
    from mlx_lm import server as upstream

    before = upstream.argparse
    args = vars(read_flags(["--temp", "0.5", "--chat-template-args", '{"a": 1}', "--kv-bits", "8"]))
    assert upstream.argparse is before
    assert args["temp"] == 0.5 and args["chat_template_args"] == {"a": 1} and args["kv_bits"] == 8
    known = {"adapter_path", "allowed_origins", "log_level", "use_default_chat_template", "min_p", "prompt_cache_bytes"}
    assert known <= set(args) and args["decode_concurrency"] == 4
    assert checked(read_flags(["--num-draft-tokens", "5"])).draft_depth == 5
    assert checked(read_flags(["--num-draft-tokens", "0"])).drafters == {}


@pytest.mark.parametrize(
    ("beam", "said"),
    [
        (["--beam-width", "54"], "beam_width must be from 1 to the vocabulary's 53, got 54"),
        (["--tree-size", "99"], "tree_size counts the root and must be from 2 to 1 + beam_width * draft_depth = 4"),
    ],
)
def test_a_beam_that_fits_no_drafter_keeps_the_server_from_starting(beam: list[str], said: str, root: Path) -> None:
    with pytest.raises(RedrafterError) as caught, server_of(*with_toys(root), *beam):
        pytest.fail("it started")
    assert said in str(caught.value)


@pytest.mark.parametrize("size", ["-5", "x", "5XB", ""])
def test_a_size_that_is_none_is_told_as_argparse_does(size: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        read_flags(["--prompt-cache-bytes", size])
    told = capsys.readouterr().err.splitlines()[-1]
    expected = f"argument --prompt-cache-bytes: expected a number of bytes, as in 512MB or 2GB, got {size!r}"
    assert told.endswith(expected)
    assert read_flags(["--prompt-cache-bytes", "1.5GB"]).prompt_cache_bytes == 1_500_000_000


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--model", "./nowhere"], "no such directory: './nowhere'"),
        (["--drafter", "./nowhere"], "no such directory: './nowhere'"),
        (["--drafter", "wide"], "expects hidden size 96, the target has 64"),
        (["--adapter-path", "./nowhere"], "no adapter_config.json in nowhere"),
        (["--kv-bits", "8"], "kv_group_size must divide the head size"),
        (["--temp", "1", "--top-k", "53"], "top_k must be below the vocabulary's 53"),
        (["--host", "no.such.host.invalid", "--api-key", "k"], "cannot listen on no.such.host.invalid"),
    ],
)
def test_a_server_that_cannot_start_says_why_once_and_leaves_no_thread(
    flags: list[str], said: str, root: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    before = threading.active_count()
    save_drafter(tmp_path / "wide", small_drafter(hidden=96, vocab=VOCAB, exit_dim=16))
    given = [str(tmp_path / "wide") if flag == "wide" else flag for flag in flags]
    given = given if "--model" in flags else [*with_toys(root)[:2], *given]
    with pytest.raises(RedrafterError) as caught, server_of(*given, *BEAM):
        pytest.fail("it started")
    assert said in str(caught.value) and len(str(caught.value).splitlines()) == 1
    assert [record for record in caplog.records if record.levelname in ("ERROR", "CRITICAL")] == []
    assert threading.active_count() == before
