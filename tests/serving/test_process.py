"""The server and race commands as processes: output, exit and signals."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from http.client import HTTPConnection
from pathlib import Path
from typing import TextIO
from urllib.request import Request, urlopen

import pytest

from helpers.servers import PATIENCE

ROOT = Path(__file__).parent.parent.parent
ENDLESS = {"stream": True, "max_tokens": 1800, "logit_bias": {"0": -100}}


@contextmanager
def start(*command: str, **variables: str) -> Iterator[tuple[subprocess.Popen[str], TextIO]]:
    """Starts a module; yields (process, its standard error) and kills it at the end."""
    given = [sys.executable, "-m", *command]
    own = {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    environment = {**os.environ, **own, **variables}
    with subprocess.Popen(given, env=environment, stderr=subprocess.PIPE, text=True) as running:
        assert running.stderr is not None
        try:
            yield running, running.stderr
        finally:
            running.kill()


@contextmanager
def serve(*flags: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Starts a server of the demo; yields (process, URL) and kills it at the end."""
    own = ("--port", "0", "--log-level", "ERROR", "--draft-depth", "2")
    with start("mlx_redrafter.server", *flags, *own) as (running, stderr):
        line = stderr.readline()
        if not line.startswith("serving on http://127.0.0.1:"):
            running.kill()  # a server that lives does not end its standard error
            pytest.fail(line + stderr.read())
        yield running, line.split()[-1]


def end(running: subprocess.Popen[str], signal_number: signal.Signals):
    """Waits for a process that has got a signal, and asserts that it ended without a message."""
    assert running.wait(PATIENCE) == -signal_number
    assert running.stderr.read() == ""


def post(url: str, **fields):
    """Sends a completion request; returns the open reply."""
    return urlopen(
        Request(f"{url}/v1/completions", json.dumps({"prompt": "def"} | fields).encode()),
        timeout=PATIENCE,
    )


def test_a_signal_lets_answers_finish_and_saves_the_prompt_cache(tmp_path):
    caches = ("--prompt-cache-dir", str(tmp_path / "caches"))
    prompt = "def add(first, second):\n    return first"
    with serve(*caches) as (running, url):
        with post(url, **ENDLESS | {"prompt": prompt, "max_tokens": 100}) as stream:
            assert stream.readline().startswith(b"data: ")
            running.send_signal(signal.SIGTERM)
            text = stream.read().decode()
        *_, last, done = (line[6:] for line in text.split("\n\n") if line.startswith("data: "))
        assert done == "[DONE]"
        assert json.loads(last)["choices"][0]["finish_reason"] == "length"
        end(running, signal.SIGTERM)
    with serve(*caches) as (_, url), post(url, prompt=prompt, max_tokens=8) as reply:
        assert json.load(reply)["usage"]["prompt_tokens_details"]["cached_tokens"] > 0


def test_answers_are_cut_off_after_the_drain_timeout():
    with serve("--drain-timeout", "1") as (running, url):
        with closing(HTTPConnection(url.removeprefix("http://"), timeout=PATIENCE)) as whole:
            whole.request(
                "POST",
                "/v1/completions",
                json.dumps({"prompt": "def"} | ENDLESS | {"stream": False}),
            )
            with post(url, **ENDLESS) as stream:
                assert stream.readline()
                running.send_signal(signal.SIGINT)
                assert b"shutting down" in stream.read().split(b"\n\n")[-3]  # before [DONE]
            reply = whole.getresponse()
            assert reply.status == 503
            assert "shutting down" in json.load(reply)["error"]["message"]
        end(running, signal.SIGINT)


def test_a_signal_during_measuring(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    flags = ("--port", str(port))
    caches = str(tmp_path)
    with start("mlx_redrafter.server", *flags, XDG_CACHE_HOME=caches) as (running, stderr):
        assert any("measuring this machine" in line for line in stderr)
        socket.create_connection(("127.0.0.1", port), timeout=PATIENCE).close()
        running.send_signal(signal.SIGINT)
        end(running, signal.SIGINT)


def test_a_second_signal_exits_at_once():
    with serve() as (running, url), post(url, **ENDLESS) as stream:
        assert stream.readline()
        running.send_signal(signal.SIGTERM)
        with pytest.raises(OSError):
            while True:  # until the first signal has closed the port
                socket.create_connection(
                    ("127.0.0.1", int(url.rpartition(":")[2])), timeout=PATIENCE
                ).close()
                time.sleep(0.05)
        running.send_signal(signal.SIGTERM)
        assert running.wait(PATIENCE) == -signal.SIGTERM


def test_a_port_in_use_is_reported_before_loading():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        command = [
            sys.executable,
            "-m",
            "mlx_redrafter.server",
            "--model",
            "/no/such/model",
            "--port",
            port,
        ]
        variables = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
        result = subprocess.run(
            command, env=variables, capture_output=True, text=True, timeout=PATIENCE, check=False
        )
    assert result.returncode == 1
    assert result.stdout == ""
    assert len(result.stderr.splitlines()) == 1
    assert result.stderr.startswith("error: cannot listen on 127.0.0.1, port")
