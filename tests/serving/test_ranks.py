"""The server on several processes that share one model gives the texts of a single process."""

import json
import re
import signal
import subprocess
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import pytest

from helpers.families import make_family
from helpers.launch import start_ranks, wait_for_ranks
from helpers.servers import (
    PATIENCE,
    Running,
    ask,
    events_of,
    parse_flags,
    read_metrics,
    start_server,
    until,
)
from helpers.small import make_byte_tokenizer, save_target, small_drafter
from mlx_redrafter.drafters.checkpoint import list_weights
from mlx_redrafter.loading.checkpoints import save_drafter
from mlx_redrafter.machine import ranks
from mlx_redrafter.serving.http.process import load_service

PROMPT = "one two three, one two three, one two "
SCHEMA = {
    "type": "object",
    "properties": {"kind": {"enum": ["first", "second"]}, "ready": {"type": "boolean"}},
    "required": ["kind", "ready"],
    "additionalProperties": False,
}
VOCAB = 264
"""A few more than the tokenizer's."""
SEEDED = {"temperature": 0.8, "seed": 5}
TOGETHER = {
    "greedy": {"prompt": "abc abc abc", "stream": True},
    "seeded": {"prompt": "abc abc abd", "stream": True, **SEEDED, "top_p": 0.9},
    "penalties": {
        "prompt": "x",
        **SEEDED,
        "repetition_penalty": 1.3,
        "logit_bias": {"65": 3, "0": -100},
    },
    "two": {"prompt": "the same beginning of more than a few tokens, ", "n": 2, **SEEDED},
    "format": {
        "prompt": "json: ",
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "answer", "schema": SCHEMA},
        },
        "max_tokens": 60,
        **SEEDED,
    },
    "long prompt": {"prompt": 12 * PROMPT, "temperature": 0.8, "seed": 6},
    "plain": {"prompt": PROMPT, "draft_model": "none", "stream": True},
}


@pytest.fixture(scope="module")
def flags(tmp_path_factory) -> list[str]:
    """Flags for a byte-level target that mlx-lm can shard both ways, and its drafter."""
    root = tmp_path_factory.mktemp("pair")
    tokenizer = make_byte_tokenizer()
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4, "num_hidden_layers": 2}
    target = make_family("qwen2", vocab_size=VOCAB, max_position_embeddings=4096, **heads)
    save_target(root / "target", target, tokenizer, eos_token_id=0)
    # mlx-lm needs the index to load a pipeline.
    index = {"weight_map": dict.fromkeys(list_weights(target), "model.safetensors")}
    (root / "target" / "model.safetensors.index.json").write_text(
        json.dumps(index), encoding="utf-8"
    )
    save_drafter(root / "drafter", small_drafter(hidden=target.args.hidden_size, vocab=VOCAB))
    models = ["--model", str(root / "target"), "--drafter", str(root / "drafter")]
    return [
        *models,
        "--prefill-step-size",
        "64",
        "--draft-depth",
        "3",
        "--context",
        "--log-level",
        "ERROR",
    ]


@contextmanager
def serve(
    flags: Sequence[str], cache: Path
) -> Iterator[tuple[Running, list[subprocess.Popen[str]]]]:
    """A server on two ranks that compare their reads; killed at the end if still running."""
    given = ["-m", "mlx_redrafter.server", *flags, "--port", "0"]
    started = start_ranks(2, *given, **{ranks.CHECK_VARIABLE: "1", "XDG_CACHE_HOME": str(cache)})
    try:
        line = started[0].stderr.readline()
        assert line.startswith("serving on http://127.0.0.1:"), (line, wait_for_ranks(started))
        service = None  # it runs in another process
        yield Running(line.split()[-1], service), started
    finally:
        for each in started:
            each.kill()
        wait_for_ranks(
            [each for each in started if each.stdout is not None and not each.stdout.closed]
        )


def complete(server: Running, body: dict[str, Any]) -> tuple[list[str], dict[str, Any]]:
    """Returns (texts of an answer, its usage)."""
    reply = ask(
        server,
        "/v1/completions",
        {"max_tokens": 24} | body | {"stream_options": {"include_usage": True}},
    )
    if not body.get("stream"):
        return [choice["text"] for choice in reply.json["choices"]], reply.json["usage"]
    *chunks, last = events_of(reply)
    return ["".join(chunk["choices"][0]["text"] for chunk in chunks)], last["usage"]


@contextmanager
def open_stream(server: Running, body: dict[str, Any]) -> Iterator[Any]:
    """A stream after its first line, closed at the end even if unread."""
    connection = HTTPConnection(*server.address, timeout=PATIENCE)
    try:
        connection.request("POST", "/v1/completions", json.dumps(body | {"stream": True}))
        reply = connection.getresponse()
        assert reply.readline().startswith(b"data: ")
        yield reply
    finally:
        connection.close()


def talk(server: Running) -> dict[str, list[str]]:
    """Texts of mixed clients: alone, concurrent, disconnecting, with a stop string, repeated."""
    texts = {}
    texts["alone"], usage = complete(server, {"prompt": PROMPT, "max_tokens": 40})
    assert usage["drafted"] > 0
    assert usage["context_accepted"] > 0
    # It moves into the batch, and out again once it is the only request.
    with open_stream(
        server, {"prompt": "y", "max_tokens": 100, **SEEDED, "logit_bias": {"0": -100}}
    ) as stream:
        with open_stream(server, {"prompt": "gone", "max_tokens": -1, "logit_bias": {"0": -100}}):
            pass
        with ThreadPoolExecutor(len(TOGETHER)) as threads:
            replies = threads.map(lambda body: complete(server, body), TOGETHER.values())
            texts |= {name: each for name, (each, _) in zip(TOGETHER, replies, strict=True)}
        lines = [line for line in stream.read().decode().splitlines() if line.startswith("data: {")]
        texts["handed over"] = [
            "".join(json.loads(line[6:])["choices"][0]["text"] for line in lines)
        ]
    texts["stop"], _ = complete(server, TOGETHER["seeded"] | {"stop": [texts["seeded"][0][8:11]]})
    texts["again"], usage = complete(server, {"prompt": PROMPT, "max_tokens": 40})
    assert usage["prompt_tokens_details"]["cached_tokens"] == usage["prompt_tokens"] - 1
    until(lambda: read_metrics(server).get('generations_total{end="cancelled"}', 0) >= 2)
    return texts


@pytest.fixture(scope="module")
def texts(flags) -> dict[str, list[str]]:
    """The same texts from a server in one process."""
    with start_server(load_service(parse_flags(*flags))) as server:
        return talk(server)


@pytest.mark.parametrize("more", [[], ["--pipeline"]], ids=["tensor", "pipeline"])
def test_texts_match_one_process(more, flags, texts, tmp_path):
    with serve([*flags, *more], tmp_path) as (server, processes):
        assert talk(server) == texts
        metrics = read_metrics(server)
        assert min(metrics[f'mode_switches_total{{to="{to}"}}'] for to in ("batch", "single")) > 0
        with open_stream(server, {"prompt": PROMPT, "max_tokens": 40}) as stream:
            for each in processes:  # as Ctrl-C does
                each.send_signal(signal.SIGINT)
            assert b"[DONE]" in stream.read()  # running answers are finished
        ended = wait_for_ranks(processes)
    assert [each.status for each in ended] == [0, 0], ended
    assert not any(each.out or each.err for each in ended), ended


@pytest.mark.parametrize("is_idle", [True, False], ids=["idle", "decoding"])
def test_a_rank_that_is_killed_ends_the_others(is_idle, flags, tmp_path):
    with serve(flags, tmp_path) as (server, processes), ExitStack() as stack:
        if not is_idle:
            stack.enter_context(
                open_stream(server, {"prompt": "x", "max_tokens": -1, "logit_bias": {"0": -100}})
            )
        processes[1].kill()
        first, second = wait_for_ranks(processes)
    assert (first.status, second.status) == (1, -signal.SIGKILL), (first, second)
    # The ring fails the forward, or waits for a message after the lost one until the watcher ends
    # the process.
    assert re.search("error on rank 0: (RuntimeError: |another rank has ended)", first.err), first
