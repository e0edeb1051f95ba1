"""Answers that are sent as they are made: their order, their ends, and what a client that goes leaves behind."""

from __future__ import annotations

import json
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import openai
import pytest
from mlx_lm.sample_utils import make_logits_processors
from service import (
    BEAM,
    END,
    PATIENCE,
    Reference,
    ask,
    complete,
    counted,
    held,
    idle,
    send,
    server_of,
    until,
    with_toys,
)

from mlx_redrafter.serving import answers, decoding
from mlx_redrafter.serving.command import Server
from mlx_redrafter.serving.jobs import Job

pytestmark = pytest.mark.filterwarnings("ignore:the drafter has guessed no token right")
FLAGS = (*BEAM, "--max-tokens", "30", "--prefill-step-size", "16")


@pytest.mark.parametrize("drafter", [{}, {"draft_model": None}])
def test_the_chunks_are_the_text_in_order_then_the_reason_then_the_usage(
    drafter: dict[str, Any], client: openai.OpenAI, reference_text: str
) -> None:
    with client.chat.completions.create(
        model="default_model",
        messages=[{"role": "user", "content": "hello"}],
        stream=True,
        stream_options={"include_usage": True},
        temperature=0.9,
        seed=5,
        extra_body=drafter,
    ) as stream:
        chunks = list(stream)
    *deltas, last, usage = chunks
    assert "".join(each.choices[0].delta.content or "" for each in chunks[:-1]) == reference_text
    assert all(each.choices[0].finish_reason is None for each in deltas) and len(deltas) > 3
    assert last.choices[0].finish_reason in ("stop", "length")
    told: Any = usage.usage
    assert usage.choices == [] and usage.object == "chat.completion.chunk"
    assert (told.rounds == 0) == bool(drafter) and told.completion_tokens >= len(reference_text)
    assert {each.id for each in chunks} == {usage.id}


@pytest.fixture(scope="module")
def reference_text(root: Path) -> str:
    return Reference(root).text("UhellozA", temp=0.9, seed=5)


def test_a_stream_says_how_the_prompt_is_read_first_and_done_last(server: Server) -> None:
    reply = ask(
        server, "POST", "/v1/completions", {"prompt": "k" * 100, "stream": True, "stream_options": {}, "max_tokens": 4}
    )
    lines = [line for line in reply.body.decode().split("\n\n") if line]
    news = [line for line in lines if line.startswith(":")]
    assert news[0] == ": keepalive 0/100" and news[-1] == ": keepalive 100/100" and len(news) > 5
    assert lines[: len(news)] == news and lines[-1] == "data: [DONE]"
    assert all("choices" in json.loads(line.removeprefix("data: ")) for line in lines[len(news) : -1])
    assert reply.headers["content-type"] == "text/event-stream"


@pytest.mark.parametrize("stream", [False, True])
def test_what_fails_in_the_middle_is_told_and_the_next_answer_is_right(
    stream: bool, client: openai.OpenAI, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = complete(server, "hello", max_tokens=8)["choices"]

    def broken(*args: Any) -> Any:
        if args[2].generation_tokens == 4:
            raise RuntimeError("the engine has stopped")
        return type(server.responder)._told(server.responder, *args)

    with monkeypatch.context() as patch:
        patch.setattr(server.responder, "_told", broken)
        if stream:
            with (
                pytest.raises(openai.APIError, match="the engine has stopped"),
                client.completions.create(model="default_model", prompt="hello", max_tokens=8, stream=True) as chunks,
            ):
                assert len("".join(chunk.choices[0].text for chunk in chunks)) == 3
        else:
            with pytest.raises(openai.InternalServerError, match="the engine has stopped"):
                client.completions.create(model="default_model", prompt="hello", max_tokens=8)
    assert complete(server, "hello", max_tokens=8)["choices"] == before


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("drafter", [{}, {"draft_model": None}])
def test_an_answer_ends_when_its_client_goes_and_what_was_read_is_kept(
    drafter: dict[str, Any], stream: bool, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    left, made = counted(server, "clients_left_total"), counted(server, "tokens_total", kind="generated")
    with held(server, monkeypatch) as gate:
        with send(server, stream=stream, prompt=f"going{stream}{len(drafter)}", **drafter):
            assert gate.reached.wait(PATIENCE)
        gate.set()
        until(lambda: idle(server) and counted(server, "clients_left_total") == left + 1)
    assert counted(server, "tokens_total", kind="generated") - made <= 3
    reply = complete(server, f"going{stream}{len(drafter)}", max_tokens=3)
    assert reply["usage"]["prompt_tokens_details"]["cached_tokens"] > 3


def test_it_ends_with_the_token_at_which_the_client_is_found_gone(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = 0

    def left(sock: Any) -> bool:
        nonlocal asked
        asked += 1
        return asked >= 12

    with monkeypatch.context() as patch:
        patch.setattr(decoding, "left", left)
        with send(server):
            until(lambda: asked >= 12 and idle(server))
    assert asked == 12  # nothing was done afterwards


def test_a_client_that_goes_while_its_prompt_is_read_or_while_it_waits_costs_nothing_more(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []
    real = decoding.left

    def left(sock: Any) -> bool:
        seen.append(1)
        return len(seen) > 4 or real(sock)

    with monkeypatch.context() as patch:
        patch.setattr(decoding, "left", left)
        with send(server, prompt="m" * 200):
            until(lambda: len(seen) == 5 and idle(server))
    # Three chunks of 16 were read, and are not read again.
    assert complete(server, "m" * 200, max_tokens=1)["usage"]["prompt_tokens_details"]["cached_tokens"] == 48
    before = counted(server, "tokens_total", kind="prompt")
    waiting = server.responder.cli_args.decode_concurrency
    with held(server, monkeypatch) as gate:
        running = [send(server, max_tokens=4) for _ in range(waiting)]
        assert gate.reached.wait(PATIENCE)
        with send(server, prompt="never read"):
            until(lambda: server.responder.queue.qsize() >= 1)
        gate.set()
        for each in running:
            while each.recv(1 << 16):
                pass
            each.close()
        until(lambda: idle(server))
    assert counted(server, "tokens_total", kind="prompt") - before <= 5 * waiting


def test_for_a_client_that_went_while_it_waited_no_other_model_is_loaded(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    sought: list[Any] = []
    monkeypatch.setattr("mlx_redrafter.serving.provider.find_model", sought.append)
    left = counted(server, "clients_left_total")
    with held(server, monkeypatch) as gate, send(server, max_tokens=4) as first:
        assert gate.reached.wait(PATIENCE)
        with send(server, model="of/another"):
            until(lambda: server.responder.queue.qsize() == 1)
        gate.set()
        assert b" 200 " in first.recv(1 << 16)
        until(lambda: idle(server))
        until(lambda: counted(server, "clients_left_total") > left)
    assert sought == []
    assert ask(server, "POST", "/v1/completions", {"prompt": "x", "model": "of/another"}).status == 404
    assert sought == ["of/another"]


@pytest.mark.parametrize("long", [1, 2, 5])
def test_while_long_prompts_are_read_others_have_their_turns(
    root: Path, monkeypatch: pytest.MonkeyPatch, long: int
) -> None:
    """Several are read in turns, too, and never more answers are made than may be."""
    monkeypatch.setattr(answers, "TURN", 0.0)
    monkeypatch.setattr(answers, "LEAST", 1)
    prompts = ["".join("abcdefg"[(i * i + each) % 7] for i in range(400 + each)) for each in range(long)] + ["hello"]
    flags = (*with_toys(root), *BEAM, "--prefill-step-size", "16", "--decode-concurrency", "3")
    asked: dict[str, Any] = {"max_tokens": 3, "logit_bias": {END: -100}}
    with server_of(*flags) as server, ExitStack() as stack:
        responder, made = server.responder, list[tuple[int, int]]()
        count = responder._count

        def counting(job: Job) -> None:
            made.append((job.prompt_tokens, responder.running))
            count(job)

        monkeypatch.setattr(responder, "_count", counting)
        with held(server, monkeypatch, at=1) as gate:
            sent = [stack.enter_context(send(server, prompt="abc", **asked))]
            assert gate.reached.wait(PATIENCE)
            for waiting, prompt in enumerate(prompts, 1):
                sent.append(stack.enter_context(send(server, prompt=prompt, **asked)))
                until(lambda waiting=waiting: responder.queue.qsize() == waiting)
            gate.set()
            replies = [b"".join(iter(lambda one=one: one.recv(1 << 16), b"")) for one in sent]
        until(lambda: idle(server))
    texts = [json.loads(reply.partition(b"\r\n\r\n")[2])["choices"][0]["text"] for reply in replies]
    reference, processors = Reference(root), make_logits_processors(logit_bias={END: -100})
    assert texts == [reference.text(prompt, max_tokens=3, logits_processors=processors) for prompt in ("abc", *prompts)]
    order = [prompt for prompt, _ in made]
    assert max(running for _, running in made) <= 3
    if long == 1:
        assert order[-1] == 400 and order.index(400) > order.index(5), "the short one is answered meanwhile"
    elif long == 5:
        ends = [max(i for i, prompt in enumerate(order) if prompt == count) for count in range(400, 405)]
        assert ends[0] < ends[3] and ends[1] < ends[4], "who comes later does not come first"


def test_answers_that_take_turns_do_not_meet(server: Server, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answers, "TURN", 0.0)
    monkeypatch.setattr(answers, "LEAST", 1)
    reference = Reference(root)
    most, bodies = 0, []
    told = type(server.responder)._told

    def watching(*args: Any) -> Any:
        nonlocal most
        most = max(most, server.responder.running)
        return told(server.responder, *args)

    monkeypatch.setattr(server.responder, "_told", watching)
    connections = []
    for seed in range(6):
        bodies.append({"prompt": f"turn{'abcdef'[seed]}", "max_tokens": 60, "temperature": 0.9, "seed": seed})
        connections.append(send(server, **bodies[-1]))
    for body, connection in zip(bodies, connections, strict=True):
        raw = b""
        while more := connection.recv(1 << 16):
            raw += more
        connection.close()
        text = json.loads(raw.partition(b"\r\n\r\n")[2])["choices"][0]["text"]
        assert text == reference.text(body["prompt"], max_tokens=60, temp=0.9, seed=body["seed"])
    assert most > 1
