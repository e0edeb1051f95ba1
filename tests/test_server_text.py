"""What the server says is what `stream_generate` says with the same seed, asked by OpenAI's own client."""

from __future__ import annotations

import json
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import openai
import pytest
from mlx_lm.models.cache import LRUPromptCache, make_prompt_cache
from mlx_lm.sample_utils import make_logits_processors
from service import BEAM, CHAT, END, VOCAB, Reference, ask, client_of, complete, save_toys, server_of, with_toys
from small import save_target
from toys import make_model, make_tokenizer

from mlx_redrafter.errors import RedrafterError
from mlx_redrafter.serving.command import Server
from mlx_redrafter.serving.prompts import Prompts

PROMPT = "hello there what is this"
pytestmark = pytest.mark.filterwarnings("ignore:the drafter has guessed no token right")
FLAGS = (*BEAM, "--max-tokens", "30")

SAMPLED = {"temperature": 0.9, "seed": 5}
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "greedy": ({}, {}),
    "sampled": (SAMPLED, {"temp": 0.9, "seed": 5}),
    "filters": (
        SAMPLED | {"top_p": 0.9, "top_k": 20, "min_p": 0.01},
        {"temp": 0.9, "seed": 5, "top_p": 0.9, "top_k": 20, "min_p": 0.01},
    ),
    "xtc": (
        SAMPLED | {"xtc_probability": 1, "xtc_threshold": 0.05},
        {"temp": 0.9, "seed": 5, "xtc_probability": 1.0, "xtc_threshold": 0.05},
    ),
    "penalty": (
        SAMPLED | {"repetition_penalty": 1.4, "repetition_context_size": 60},
        {"temp": 0.9, "seed": 5, "logits_processors": make_logits_processors(None, 1.4, 60)},
    ),
    "presence": (
        {"presence_penalty": 2.0, "frequency_penalty": 1.0, "presence_context_size": 60},
        {"logits_processors": make_logits_processors(None, 0.0, 20, 2.0, 60, 1.0, 20)},
    ),
    "bias": ({"logit_bias": {"7": 12.5}}, {"logits_processors": make_logits_processors({7: 12.5})}),
    "three tokens": ({"max_tokens": 3}, {"max_tokens": 3}),
    "another beam": ({"beam_width": 1, "draft_depth": 4}, {}),
    "a chain by mlx-lm's name": ({"num_draft_tokens": 3}, {}),
}


@pytest.mark.parametrize("drafter", [{}, {"draft_model": None}, {"draft_model": "none"}, {"draft_model": "second"}])
@pytest.mark.parametrize("case", CASES)
def test_the_text_is_that_of_the_library_cold_and_warm(
    case: str, drafter: dict[str, Any], client: openai.OpenAI, reference: Reference
) -> None:
    fields, options = CASES[case]
    prompt = f"{PROMPT}{case.replace(' ', '')}{drafter.get('draft_model', 'first')}"
    expected = reference.responses(prompt, **options)
    known = []
    for _ in range(2):
        reply = client.completions.create(model="default_model", prompt=prompt, extra_body=fields | drafter)
        assert reply.choices[0].text == "".join(each.text for each in expected)
        assert reply.choices[0].finish_reason == expected[-1].finish_reason
        usage: Any = reply.usage
        assert usage.prompt_tokens == expected[-1].prompt_tokens
        assert usage.completion_tokens == expected[-1].generation_tokens
        plain = "draft_model" in drafter and drafter["draft_model"] in (None, "none")
        assert (usage.rounds == 0) == (plain or usage.completion_tokens == 1)
        assert 0 <= usage.accepted <= usage.drafted and (usage.drafted == 0) == (usage.rounds == 0)
        known.append(usage.prompt_tokens_details.cached_tokens)
    assert known[1] == len(prompt) - 1  # the second one has read the last token again, as with mlx-lm, and no other


def test_a_chat_is_what_the_template_makes_of_it(client: openai.OpenAI, reference: Reference) -> None:
    messages: list[Any] = [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "hel"}, {"type": "text", "text": "lo"}]},
    ]
    reply = client.chat.completions.create(model="default_model", messages=messages, **SAMPLED)  # type: ignore[arg-type]
    expected = reference.responses("SbeabriefzUhellozA", temp=0.9, seed=5)
    assert reply.choices[0].message.content == "".join(each.text for each in expected)
    assert reply.choices[0].message.role == "assistant" and reply.choices[0].finish_reason == expected[-1].finish_reason


def test_a_conversation_reads_only_what_is_new(client: openai.OpenAI, reference: Reference) -> None:
    messages: list[Any] = []
    for turn, said in enumerate(("hello", "what now", "and then")):
        messages.append({"role": "user", "content": said})
        reply = client.chat.completions.create(model="default_model", messages=messages, max_tokens=9, **SAMPLED)  # type: ignore[arg-type]
        rendered = "".join(f"{'UA'[m['role'] == 'assistant']}{m['content'].replace(' ', 'a')}z" for m in messages) + "A"
        answer = reply.choices[0].message.content
        assert answer == reference.text(rendered, temp=0.9, seed=5, max_tokens=9)
        usage: Any = reply.usage
        assert (usage.prompt_tokens_details.cached_tokens > usage.prompt_tokens / 2) == bool(turn)
        messages.append({"role": "assistant", "content": answer})


def test_a_prompt_that_is_an_earlier_one_and_its_whole_answer_goes_on(server: Server, reference: Reference) -> None:
    prompt = "onceuponatimex"
    answer = complete(server, prompt, max_tokens=7)["choices"][0]["text"]
    assert len(answer) == 7
    reply = complete(server, prompt + answer, max_tokens=8)
    assert reply["choices"][0]["text"] == reference.text(prompt + answer, max_tokens=8)
    assert reply["usage"]["prompt_tokens_details"]["cached_tokens"] == len(prompt) + 5


def test_there_is_always_a_token_left_to_read() -> None:
    model = make_model(vocab=53)
    for kind, left in ((Prompts, 1), (LRUPromptCache, 0)):  # mlx-lm's own as a control
        prompts, cache = kind(), make_prompt_cache(model)
        model(mx.array([[1, 2, 3]]), cache=cache)
        prompts.insert_cache("key", [1, 2, 3], cache)
        found, rest = prompts.fetch_nearest_cache("key", [1, 2, 3])
        assert found is not None and (len(rest) > 0) == left and found[0].offset == 3 - len(rest)
        assert prompts.fetch_nearest_cache("key", [1])[1] == [1]


def test_a_prompt_of_one_token_is_answered(server: Server, reference: Reference) -> None:
    for _ in range(2):
        assert complete(server, "q")["choices"][0]["text"] == reference.text("q")


@pytest.mark.parametrize("drafter", [{}, {"draft_model": None}])
def test_stop_words_end_the_text_wherever_they_are_cut_into_tokens(
    drafter: dict[str, Any], server: Server, reference: Reference
) -> None:
    whole = reference.text("stopping")
    for at in range(3, len(whole) - 4, 4):
        words = ["Q" * 9, whole[at : at + 3]]
        reply = complete(server, "stopping", stop=words, **drafter)["choices"][0]
        assert reply["text"] == whole[: whole.index(words[1])] == reference.text("stopping", stop=words)
        assert reply["finish_reason"] == "stop"


def test_the_end_of_text_token_ends_it(server: Server, reference: Reference) -> None:
    found = 0
    for seed in range(12):
        expected = reference.responses("ending", temp=1.5, seed=seed)
        reply = complete(server, "ending", temperature=1.5, seed=seed)
        assert reply["choices"][0]["text"] == "".join(each.text for each in expected)
        assert reply["choices"][0]["finish_reason"] == expected[-1].finish_reason
        found += expected[-1].token == END
    assert found


def test_log_probabilities_are_those_of_the_library(client: openai.OpenAI, reference: Reference) -> None:
    expected = reference.responses("UlogprobszA", max_tokens=6)
    reply = client.chat.completions.create(
        model="default_model",
        messages=[{"role": "user", "content": "logprobs"}],
        max_tokens=6,
        logprobs=True,
        top_logprobs=3,
    )
    logprobs: Any = reply.choices[0].logprobs
    assert len(logprobs.content) == len(expected)
    for got, response in zip(logprobs.content, expected, strict=True):
        best = sorted(response.logprobs.tolist(), reverse=True)[:3]
        assert sorted((each.logprob for each in got.top_logprobs), reverse=True) == pytest.approx(best, abs=1e-4)
    alone: Any = client.chat.completions.create(
        model="default_model", messages=[{"role": "user", "content": "logprobs"}], max_tokens=6, logprobs=True
    )
    values = [each.logprob for each in alone.choices[0].logprobs.content]
    assert values == pytest.approx([r.logprobs[r.token].item() for r in expected], abs=1e-4)


def test_the_packaged_demo_drafts_and_says_how_much_it_saved() -> None:
    with server_of("--draft-depth", "3") as server, client_of(server) as client:
        replies = [
            client.completions.create(
                model="default_model",
                prompt="class Stack:",
                max_tokens=40,
                temperature=0.8,
                seed=1,
                extra_body={"draft_model": name},
            )
            for name in ("demo", None)
        ]
        drafted, plain = (reply.usage.model_dump() for reply in replies if reply.usage)
        assert replies[0].choices[0].text == replies[1].choices[0].text
        assert 0 < drafted["accepted"] < drafted["drafted"] and drafted["rounds"] < 39
        assert drafted["tokens_per_round"] == pytest.approx(1 + drafted["accepted"] / drafted["rounds"], abs=1e-3)
        assert plain["rounds"] == plain["drafted"] == plain["accepted"] == 0


def test_models_are_listed_where_nothing_was_ever_downloaded(
    client: openai.OpenAI, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "none"))
    (model,) = client.models.list().data
    assert model.id == str((root / "target").resolve())
    # What is listed can be asked for, and is not loaded a second time: its drafters are still there.
    reply: Any = client.completions.create(model=model.id, prompt="x", max_tokens=4)
    assert reply.usage.rounds > 0


def test_a_model_that_cannot_be_had_leaves_the_loaded_one_and_tells_nothing_of_files(
    root: Path, client: openai.OpenAI, server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    before = server.responder.model_provider.model
    (tmp_path / "secret.txt").write_text("x")
    (tmp_path / "half").mkdir()
    (tmp_path / "half" / "config.json").write_text('{"model_type": "llama"}')
    names = ["./nowhere", "/etc/passwd", "no/where", *(str(tmp_path / each) for each in ("", "secret.txt", "half"))]
    for name in names:
        with pytest.raises(openai.NotFoundError) as caught:
            client.completions.create(model=name, prompt="x")
        told = caught.value.response.json()["error"]["message"]
        assert told == f"the model {name!r:.100} is not here, or cannot be loaded"
    with pytest.raises(openai.NotFoundError, match="is not here, or cannot be loaded"):
        client.completions.create(model=str(root / "target"), prompt="x", extra_body={"adapters": str(tmp_path)})
    assert server.responder.model_provider.model is before


def damaged(root: Path) -> Path:
    """A target whose tokenizer cannot be read, which is seen once its weights are."""
    target = save_toys(root) / "target"
    (target / "tokenizer.json").write_text("{}", encoding="utf-8")
    return target


def without_tokenizer(root: Path) -> Path:
    """A target for which transformers makes up a tokenizer that knows no text."""
    save_target(root / "target", make_model("qwen2", vocab=VOCAB), make_tokenizer([END], vocab=VOCAB)._tokenizer)
    for file in (root / "target").glob("tokenizer*"):
        file.unlink()
    return root / "target"


@pytest.mark.parametrize("room", [None, 0])
@pytest.mark.parametrize("made", [damaged, without_tokenizer])
def test_a_model_that_fails_late_to_load_leaves_the_loaded_one_where_both_fit(
    made: Callable[[Path], Path], room: int | None, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = made(tmp_path)
    if room is not None:
        monkeypatch.setattr("mlx_redrafter.serving.provider.free_memory", lambda: room)
    with server_of(*with_toys(root), *BEAM) as server:
        provider = server.responder.model_provider
        first, before = complete(server, "x", max_tokens=4), provider.model
        reply = ask(server, "POST", "/v1/completions", {"prompt": "x", "model": str(broken)})
        assert (reply.status, provider.model) == (404, None if room == 0 else before)
        again = complete(server, "x", max_tokens=4)
        assert again["choices"] == first["choices"] and again["usage"]["rounds"] == first["usage"]["rounds"] > 0
        assert (provider.model is before) == (room is None)


def test_a_server_without_a_tokenizer_does_not_start(tmp_path: Path) -> None:
    target = without_tokenizer(tmp_path)
    with pytest.raises(RedrafterError) as caught, server_of("--model", str(target)):
        pytest.fail("it started")
    assert str(caught.value) == f"no tokenizer in {target}: expected tokenizer.json, or the files that it is made from"


def test_another_model_is_loaded_when_it_is_asked_for_and_has_no_drafters(root: Path, tmp_path: Path) -> None:
    other = save_toys(tmp_path)
    with server_of(*with_toys(root), *BEAM) as server:
        first = complete(server, "x", max_tokens=4)
        gone = weakref.ref(server.responder.model_provider.model)
        second = complete(server, "x", max_tokens=4, model=str(other / "target"))
        assert gone() is None
        assert first["choices"] == second["choices"]  # the same weights in another place
        assert first["usage"]["drafted"] > 0 and 0 < second["usage"]["rounds"] <= 3
        reply = ask(
            server,
            "POST",
            "/v1/completions",
            {"prompt": "x", "draft_model": "second", "model": str(other / "target")},
        )
        assert reply.status == 400 and "there is no drafter 'second'" in reply.error
        assert complete(server, "x", max_tokens=4)["usage"]["rounds"] > 0


def test_a_tokenizer_without_a_chat_template_gets_mlx_lms_own(tmp_path: Path) -> None:
    root = save_toys(tmp_path)
    for name in ("chat_template.jinja", "tokenizer_config.json"):
        if (path := root / "target" / name).exists():
            text = path.read_text(encoding="utf-8")
            if name.endswith(".json"):
                path.write_text(json.dumps(json.loads(text) | {"chat_template": None}), encoding="utf-8")
            else:
                assert text == CHAT
                path.unlink()
    reference = Reference(root)
    with server_of(*with_toys(root), *BEAM) as server:
        body = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 9}
        reply = ask(server, "POST", "/v1/chat/completions", body)
        assert reply.status == 200
        expected = reference.text("USER: hello\nASSISTANT:", max_tokens=9)
        assert reply.json["choices"][0]["message"]["content"] == expected
