"""The command as a process: what it prints, how it ends, and what it refuses."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.parse import urlsplit
from urllib.request import Request, urlopen

import pytest
from service import BEAM, END, PATIENCE, until, with_toys

ROOT = Path(__file__).parent.parent
LONG = {"max_tokens": 600, "logit_bias": {str(END): -100}}


def command(*flags: str) -> list[str]:
    return [sys.executable, "-m", "mlx_redrafter.server", *flags]


@contextmanager
def process(root: Path, *flags: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """(the running command, its URL); killed at the end if it still runs."""
    given = [*with_toys(root), *BEAM, "--port", "0", "--log-level", "ERROR", *flags]
    with subprocess.Popen(
        command(*given), cwd=ROOT, env={**os.environ, "HF_HUB_OFFLINE": "1"}, stderr=subprocess.PIPE, text=True
    ) as running:
        try:
            assert running.stderr is not None
            line = running.stderr.readline()
            assert line.startswith("serving on http://127.0.0.1:"), line + running.stderr.read()
            yield running, line.split()[-1]
        finally:
            running.kill()


def post(url: str, **fields: Any) -> Any:
    """An open reply."""
    return urlopen(
        Request(f"{url}/v1/completions", json.dumps({"prompt": "hello"} | fields).encode()), timeout=PATIENCE
    )


def health(url: str) -> Any:
    """What /health says."""
    try:
        with urlopen(f"{url}/health", timeout=PATIENCE) as reply:
            return json.load(reply)
    except HTTPError as error:
        with error:
            return json.load(error)


def status(url: str) -> str:
    """What /health says of the whole."""
    return str(health(url)["status"])


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_lets_the_answer_end_refuses_others_and_exits_with_0(number: int, root: Path) -> None:
    with process(root, "--decode-concurrency", "1") as (running, url):
        where = urlsplit(url)
        idle = socket.create_connection(
            (where.hostname, where.port), timeout=PATIENCE
        )  # says nothing, and is not waited for
        with idle, post(url, stream=True, **LONG) as stream:
            assert stream.readline().startswith(b": keepalive")
            assert status(url) == "ok"
            running.send_signal(number)
            until(lambda: status(url) == "draining")
            with pytest.raises(HTTPError, match="503") as refused:
                post(url)
            with refused.value:
                assert int(refused.value.headers["Retry-After"]) >= 1
            lines = [line for line in stream.read().decode().split("\n\n") if line.startswith("data: ")]
        assert lines[-1] == "data: [DONE]"
        chunks = [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]
        assert chunks[-1]["choices"][0]["finish_reason"] == "length"
        assert len("".join(chunk["choices"][0]["text"] for chunk in chunks)) == LONG["max_tokens"]
        assert running.wait(PATIENCE) == 0
        assert running.stderr is not None and running.stderr.read() == ""


def test_a_client_that_is_still_sending_when_the_signal_comes_is_told_503(root: Path) -> None:
    with process(root) as (running, url):
        where = urlsplit(url)
        with socket.create_connection((where.hostname, where.port), timeout=PATIENCE) as client:
            client.sendall(b'POST /v1/completions HTTP/1.0\r\nContent-Length: 15\r\n\r\n{"prom')
            time.sleep(0.5)  # so that it has been heard
            running.send_signal(signal.SIGTERM)
            until(lambda: status(url) == "draining")
            time.sleep(0.5)
            client.sendall(b'pt": "x"}')
            assert client.makefile("rb").readline().split()[1] == b"503"
        assert running.wait(PATIENCE) == 0


def test_an_answer_that_takes_too_long_is_broken_off_and_its_client_told(root: Path) -> None:
    endless = {"stream": True, "max_tokens": 10**6, "logit_bias": {END: -100}}
    with process(root, "--drain-timeout", "1") as (running, url), post(url, **endless) as unread:
        with post(url, **endless) as stream:
            running.send_signal(signal.SIGTERM)
            *_, last = (line for line in stream if line.startswith(b"data: "))
        assert json.loads(last.removeprefix(b"data: "))["error"]["code"] == 503
        assert running.wait(PATIENCE) == 128 + signal.SIGTERM
        assert unread.status == 200  # whose client reads nothing, and was not waited for


def test_a_second_signal_ends_it_at_once(root: Path) -> None:
    with process(root) as (running, url), post(url, stream=True, max_tokens=10**6, logit_bias={END: -100}) as stream:
        assert stream.readline()
        running.send_signal(signal.SIGTERM)
        until(lambda: status(url) == "draining")
        running.send_signal(signal.SIGTERM)
        assert running.wait(PATIENCE) == -signal.SIGTERM


def test_a_second_signal_ends_it_at_once_in_the_middle_of_what_takes_long(root: Path) -> None:
    endless = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    body = json.dumps({"messages": [{"role": "user", "content": "hello"}]}).encode()
    with process(root, "--chat-template", endless) as (running, url):
        where = urlsplit(url)
        with socket.create_connection((where.hostname, where.port), timeout=PATIENCE) as client:
            client.sendall(b"POST /v1/chat/completions HTTP/1.0\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
            until(lambda: health(url)["running"] == 1)
            running.send_signal(signal.SIGINT)
            until(lambda: health(url)["status"] == "draining")
            running.send_signal(signal.SIGINT)
            assert running.wait(PATIENCE) == -signal.SIGINT


def test_a_port_in_use_is_told_in_one_line(root: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        given = command(*with_toys(root), *BEAM, "--port", str(taken.getsockname()[1]), "--log-level", "WARNING")
        result = subprocess.run(given, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert result.returncode == 1 and result.stdout == ""
    assert len(result.stderr.splitlines()) == 1 and result.stderr.startswith("error: cannot listen on 127.0.0.1, port")


def test_help_has_mlx_lms_flags_and_ours() -> None:
    given = [sys.executable, "-m", "mlx_redrafter", "server", "--help"]
    result = subprocess.run(given, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert (result.returncode, result.stderr) == (0, "")
    for flag in ("--drafter", "--api-key-file", "--host", "--prompt-cache-size", "--chat-template-args", "--kv-bits"):
        assert flag in result.stdout
