"""A server over several processes that share one model answers what one in a single process does."""

from __future__ import annotations

import http.client
import json
import shutil
import signal
import subprocess
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from families import make_family
from launch import start_ranks, wait_for_ranks
from mlx_lm.utils import save_config, save_model
from servers import Running, ask, events_of, load_service, parse_flags, start_server, until

from benchmarks.serving import OURS, save_demo
from mlx_redrafter import ranks
from mlx_redrafter.demo import DIRECTORY, demo_prompts

CODE, OTHER = demo_prompts("code")[:2]
SCHEMA = {
    "type": "object",
    "properties": {"name": {"enum": ["alpha", "beta"]}, "sizes": {"type": "array", "items": {"type": "integer"}}},
    "required": ["name", "sizes"],
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "sizes", "schema": SCHEMA}}
REQUESTS: list[dict[str, Any]] = [
    {"prompt": CODE, "max_tokens": 40},
    {"prompt": CODE, "max_tokens": 30, "temperature": 0.9, "seed": 3},
    {"prompt": "sizes = ", "max_tokens": 40, "response_format": FORMAT},
    {"prompt": OTHER, "max_tokens": 60, "stop": "\n"},
    {"prompt": OTHER, "max_tokens": 12, "temperature": 0.7, "seed": 1, "top_p": 0.9, "repetition_penalty": 1.2},
    {"prompt": CODE + OTHER, "max_tokens": 12, "n": 2, "seed": 5, "temperature": 0.8, "logprobs": 2},
]


class Ranks(NamedTuple):
    """A server that several processes are."""

    server: Running
    processes: list[subprocess.Popen[str]]


@contextmanager
def start_server_on_ranks(count: int, flags: Sequence[str], caches: Path) -> Iterator[Ranks]:
    """A server on some ranks, which compare what they decode; what still runs at the end is killed."""
    environment = {ranks.CHECK: "1", "XDG_CACHE_HOME": str(caches)}
    processes = start_ranks(count, "-m", "mlx_redrafter.server", "--port", "0", *flags, **environment)
    try:
        stderr, lines = processes[0].stderr, list[str]()
        assert stderr is not None
        for line in stderr:
            lines.append(line)
            if line.startswith("serving on "):
                break
        else:
            raise AssertionError(lines)
        server = Running(line.split()[-1], None)  # type: ignore[arg-type]
        yield Ranks(server, processes)
    finally:
        for process in processes:
            process.kill()
        wait_for_ranks(processes)


def read_choices(server: Running, body: dict[str, Any]) -> list[tuple[str, str]]:
    """(text, reason of its end) of each choice."""
    reply = ask(server, "/v1/completions", body)
    assert reply.status == 200, reply
    return [(choice["text"], choice["finish_reason"]) for choice in reply.json["choices"]]


def answer_all(server: Running) -> list[Any]:
    """What the server answers to clients at once, one of which leaves, and then to one alone, twice."""
    host, port = server.address
    leaving = http.client.HTTPConnection(host, port, timeout=60)
    leaving.request("POST", "/v1/completions", json.dumps({"prompt": CODE, "max_tokens": 500, "stream": True}))
    leaving.getresponse().read(20)
    with ThreadPoolExecutor(len(REQUESTS)) as pool:
        running = [pool.submit(read_choices, server, body) for body in REQUESTS]
        wait(running, return_when=FIRST_COMPLETED)
        leaving.close()
        together = [each.result() for each in running]
    alone = [read_choices(server, body) for body in REQUESTS[:3]]
    stream = events_of(ask(server, "/v1/completions", {**REQUESTS[0], "stream": True}))
    assert "".join(event["choices"][0]["text"] for event in stream) == together[0][0][0]
    assert alone == together[:3]
    return together


def read_metrics(server: Running) -> dict[str, float]:
    """The numbers of /metrics by name and labels."""
    lines = ask(server, "/metrics").body.decode().splitlines()
    return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines if line[0] != "#")}


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The flags for the demo in float32 and its drafter."""
    return [*save_demo(tmp_path_factory.mktemp("demo"))[OURS], "--draft-depth", "3", "--context"]


@pytest.fixture(scope="module")
def expected(demo: list[str]) -> list[Any]:
    """What one process answers."""
    with start_server(load_service(parse_flags(*demo))) as server:
        return answer_all(server)


def test_two_ranks_answer_what_one_process_does(demo: list[str], expected: list[Any], tmp_path: Path) -> None:
    with start_server_on_ranks(2, demo, tmp_path) as (server, processes):
        assert answer_all(server) == expected
        until(lambda: ask(server, "/health").json["running"] == 0)  # the client that left is forgotten
        counted = read_metrics(server)
        assert counted['mlx_redrafter_tokens_total{kind="cached"}'] > 100
        assert counted['mlx_redrafter_tokens_total{kind="accepted"}'] > 10
        assert counted['mlx_redrafter_mode_switches_total{to="batch"}'] > 0
        assert counted['mlx_redrafter_generations_total{end="cancelled"}'] >= 1
        with ThreadPoolExecutor(1) as pool:
            last = pool.submit(read_choices, server, {**REQUESTS[0], "max_tokens": 200})
            until(lambda: ask(server, "/health").json["running"] == 1)
            for process in processes:  # as Ctrl-C does; rank 0 finishes what runs
                process.send_signal(signal.SIGINT)
            assert last.result()[0][0].startswith(expected[0][0][0])
        assert [each.status for each in wait_for_ranks(processes)] == [0, 0]


def test_ranks_of_a_pipeline_answer_what_one_process_does(tmp_path: Path) -> None:
    target = tmp_path / "target"
    shutil.copytree(DIRECTORY / "target", target, ignore=shutil.ignore_patterns("*.safetensors*"))
    config: dict[str, Any] = {"num_hidden_layers": 3, "num_key_value_heads": 2, "vocab_size": 4096}
    model = make_family("qwen2", **config)
    save_model(target, model)
    given = json.loads((target / "config.json").read_text())
    kept = {name: given[name] for name in ("bos_token_id", "eos_token_id") if name in given}
    save_config(vars(model.args) | kept, target / "config.json")
    flags = ["--model", str(target), "--log-level", "ERROR", "--context"]
    with start_server(load_service(parse_flags(*flags))) as server:
        expected = answer_all(server)
    with start_server_on_ranks(2, [*flags, "--pipeline"], tmp_path) as (server, _):
        assert answer_all(server) == expected


def test_a_rank_that_dies_ends_the_server(demo: list[str], tmp_path: Path) -> None:
    with start_server_on_ranks(2, demo, tmp_path) as (_, processes):
        processes[1].kill()
        assert wait_for_ranks(processes)[0].status == 1
