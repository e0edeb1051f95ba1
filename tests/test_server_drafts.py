"""What a client that asks for `include_drafts` is told of drafting, and that nobody else is."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
from mlx_lm.sample_utils import make_logits_processors
from service import END, Reference, ask, complete, together
from toys import ALPHABET

from mlx_redrafter.serving import answers
from mlx_redrafter.serving.command import Server
from mlx_redrafter.serving.drafts import News, Watch

pytestmark = pytest.mark.filterwarnings("ignore:the drafter has guessed no token right")
FLAGS = ("--beam-width", "26", "--draft-depth", "2")
"""A beam as wide as the vocabulary's half is often right, whatever the drafter knows."""
BOTH = {"include_usage": True, "include_drafts": True}


def chunks_of(server: Server, path: str = "/v1/completions", **fields: Any) -> list[dict[str, Any]]:
    """The chunks of a streamed answer, the one with the usage at the end."""
    asked = {"prompt": "hello", "max_tokens": 40, "stream": True, "stream_options": BOTH} | fields
    reply = ask(server, "POST", path, asked)
    lines = [line for line in reply.body.decode().split("\n\n") if line.startswith("data: ")]
    assert reply.status == 200 and lines.pop() == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines]


def tokens_of(chunks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The tokens of all chunks."""
    return [token for chunk in chunks if "redrafter" in chunk for token in chunk["redrafter"]["tokens"]]


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_the_tokens_make_the_text_and_those_that_were_drafted_are_as_many_as_were_accepted(
    temperature: float, server: Server, root: Path
) -> None:
    *chunks, last = chunks_of(server, temperature=temperature, seed=3, logit_bias={str(END): -100})
    text = Reference(root).text
    tokens, usage = tokens_of(chunks), last["usage"]
    assert "redrafter" not in last and all("redrafter" in chunk for chunk in chunks)
    said = "".join(token["text"] for token in tokens)
    assert said == "".join(chunk["choices"][0]["text"] for chunk in chunks)
    bias = make_logits_processors(logit_bias={END: -100})
    assert said == text("hello", max_tokens=40, temp=temperature, seed=3, logits_processors=bias)
    assert len(tokens) == usage["completion_tokens"] == 40
    assert sum(token["from_draft"] for token in tokens) == usage["accepted"] > 2
    final = chunks[-1]["redrafter"]
    assert {name: final[name] for name in ("rounds", "drafted", "accepted")} == {
        name: usage[name] for name in ("rounds", "drafted", "accepted")
    }


def test_the_trees_are_those_of_the_rounds_and_their_paths_spell_the_text(server: Server) -> None:
    *chunks, last = chunks_of(server, temperature=0.9, seed=3, logit_bias={str(END): -100})
    news = [chunk["redrafter"] for chunk in chunks]
    trees = [each["tree"] for each in news if "tree" in each]
    assert len(trees) == last["usage"]["rounds"] > 3
    assert all(set(tree) == {"tokens", "parents", "path", "next"} for tree in trees)
    said = "".join(token["text"] for each in news for token in each["tokens"])
    at = 0
    for tree in trees:
        tokens, parents, path = tree["tokens"], tree["parents"], tree["path"]
        assert len(tokens) == len(parents) == 1 + 26 * 2 and parents[0] == path[0] == 0
        assert set(tokens) <= set(ALPHABET)
        assert [parents[node] for node in path[1:]] == path[:-1]
        assert "".join(tokens[node] for node in path) == said[at : at + len(path)]
        at += len(path)
        assert tree["next"] == said[at]


def test_plain_decoding_tells_tokens_and_time_alone(server: Server) -> None:
    *chunks, last = chunks_of(server, draft_model=None)
    news = [chunk["redrafter"] for chunk in chunks]
    assert not any("tree" in each or each["rounds"] or each["drafted"] for each in news)
    assert len(tokens_of(chunks)) == last["usage"]["completion_tokens"]
    assert not any(token["from_draft"] for token in tokens_of(chunks))
    times = [each["seconds"] for each in news]
    assert times == sorted(times) and times[0] == 0 < times[-1]


def test_what_is_held_back_of_a_stop_word_comes_with_the_last_chunk_or_not_at_all(server: Server, root: Path) -> None:
    whole = Reference(root).text("hello", max_tokens=40)
    stop = whole[10:13]
    chunks = chunks_of(server, stop=stop)
    said = "".join(token["text"] for token in tokens_of(chunks))
    assert said == whole[: whole.index(stop)] and len(tokens_of(chunks)) > len(said)


@pytest.mark.parametrize(
    "fields",
    [
        {"stream_options": {"include_usage": True}},
        {"stream_options": {"include_usage": True, "include_drafts": False}},
    ],
)
def test_who_does_not_ask_is_not_told(fields: dict[str, Any], server: Server) -> None:
    assert not any("redrafter" in chunk for chunk in chunks_of(server, **fields))


def test_an_answer_in_one_piece_is_as_it_was(server: Server) -> None:
    assert "redrafter" not in complete(server, "hello", max_tokens=5, stream_options=BOTH)


def test_a_flag_that_is_none_is_refused(server: Server) -> None:
    asked = {"prompt": "hello", "stream": True, "stream_options": {"include_drafts": "yes"}}
    reply = ask(server, "POST", "/v1/completions", asked)
    assert reply.status == 400 and "stream_options.include_drafts must be true or false" in reply.error


def test_chat_is_told_as_well(server: Server) -> None:
    message = [{"role": "user", "content": "hello"}]
    *chunks, last = chunks_of(server, "/v1/chat/completions", messages=message, temperature=0.9, seed=2)
    said = "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks)
    assert "".join(token["text"] for token in tokens_of(chunks)) == said
    assert last["usage"]["rounds"] == chunks[-1]["redrafter"]["rounds"] > 0


def test_the_turns_of_others_are_not_an_answers_own_time(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answers, "TURN", 0.05)
    told = type(server.responder)._told

    def slowly(job: Any, args: Any, response: Any) -> Any:
        time.sleep(0.004)  # in the thread that has the turn
        return told(server.responder, job, args, response)

    monkeypatch.setattr(server.responder, "_told", slowly)
    fields = {"max_tokens": 80, "draft_model": None, "logit_bias": {str(END): -100}}
    started = time.perf_counter()
    pair = together([lambda: chunks_of(server, **fields), lambda: chunks_of(server, prompt="other", **fields)])
    took = time.perf_counter() - started
    own = [chunks[-2]["redrafter"]["seconds"] for chunks in pair]
    assert all(seconds >= 79 * 0.004 for seconds in own)
    # They took turns, so each waited for the other; without pauses each would count nearly all of the time.
    assert sum(own) <= took


def test_time_stands_still_between_turns_and_begins_with_the_first_token(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr("mlx_redrafter.serving.drafts.time.perf_counter", lambda: now)

    class Response:
        text, from_draft, draft_source, rounds, drafted, accepted = "x", False, None, 0, 0, 0

    watch = Watch(str)
    watch.pause()
    watch.go_on()
    now += 5
    assert watch.news(Response).seconds == 0  # type: ignore[arg-type]
    now += 1
    watch.go_on()
    assert watch.news(Response).seconds == 1  # type: ignore[arg-type]
    watch.pause()
    now += 50
    watch.pause()
    watch.go_on()
    now += 2
    assert watch.news(Response).seconds == 3  # type: ignore[arg-type]


def test_news_that_were_not_sent_are_sent_with_the_next() -> None:
    one, two, tree = {"text": "a", "from_draft": False}, {"text": "b", "from_draft": True}, {"tokens": ["a"]}
    both = News([two], 2, 6, 3, 0.5).behind(News([one], 1, 3, 2, 0.25, tree))
    assert both == News([one, two], 2, 6, 3, 0.5, tree)
    assert "tree" not in News().as_json() and both.as_json()["tree"] == tree
