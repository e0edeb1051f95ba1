"""OpenAI's chat and text completions, with the official client."""

import json
from concurrent.futures import ThreadPoolExecutor

import jsonschema
import openai
import pytest

from helpers.servers import USER, ask, refuse, start_scripted
from helpers.workers import count
from mlx_redrafter import stream_generate

TEXT = "/v1/completions"
PROMPT = "class Stack:\n    def __init__(self):\n"
SAMPLED = {"temperature": 0.8, "top_p": 0.95, "seed": 7}
WEATHER = {
    "type": "function",
    "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}},
}
CALL = '<tool_call>{"name": "weather", "arguments": {"city": "Bern"}}</tool_call>'


def expected_text(models, prompt, **options) -> str:
    """The library's text."""
    model, tokenizer, drafter = models
    return "".join(
        each.text for each in stream_generate(model, tokenizer, prompt, drafter=drafter, **options)
    )


@pytest.mark.parametrize("sampling", [{}, SAMPLED])
def test_text_matches_the_library(openai_client, demo_models, sampling):
    options = {
        "temp": sampling.get("temperature", 0.0),
        **{k: v for k, v in sampling.items() if k != "temperature"},
    }
    expected = expected_text(demo_models, PROMPT, max_tokens=24, **options)
    for prompt in (PROMPT, demo_models[1].encode(PROMPT)):  # the second time it is cached
        made = openai_client.completions.create(
            model="demo", prompt=prompt, max_tokens=24, **sampling
        )
        assert made.choices[0].text == expected
        assert made.choices[0].finish_reason == "length"
        usage = made.usage
        assert usage.completion_tokens == 24
        assert usage.total_tokens == usage.prompt_tokens + 24
        assert usage.drafted > 0
        assert 1 + usage.rounds + usage.accepted >= 24
    assert usage.prompt_tokens_details.cached_tokens == usage.prompt_tokens - 1


@pytest.mark.parametrize("stream", [False, True])
def test_stop_string_ends_the_text(openai_client, demo_models, stream):
    whole = expected_text(demo_models, PROMPT, max_tokens=24)
    stop = whole[12:15]
    made = openai_client.completions.create(
        model="demo", prompt=PROMPT, max_tokens=24, stop=["never", stop], stream=stream
    )
    choices = [each.choices[0] for each in made] if stream else made.choices
    assert "".join(each.text for each in choices) == whole[: whole.index(stop)]
    assert [each.finish_reason for each in choices] == [None] * (len(choices) - 1) + ["stop"]


@pytest.mark.parametrize("drafter", [None, "none"])
def test_plain_decoding_gives_the_same_text(demo, demo_models, drafter):
    made = ask(demo, TEXT, {"prompt": PROMPT, "max_tokens": 24, "draft_model": drafter}).json
    assert made["choices"][0]["text"] == expected_text(demo_models, PROMPT, max_tokens=24)
    assert made["usage"]["drafted"] == 0


def test_choices_have_their_own_seeds(openai_client, demo_models):
    texts = [
        expected_text(demo_models, PROMPT, max_tokens=20, temp=1.0, seed=5 + at) for at in range(3)
    ]
    fields = {
        "model": "demo",
        "prompt": PROMPT,
        "max_tokens": 20,
        "n": 3,
        "seed": 5,
        "temperature": 1.0,
    }
    made = openai_client.completions.create(**fields)
    assert [each.text for each in made.choices] == texts
    assert len(set(texts)) > 1
    pieces = [each.choices[0] for each in openai_client.completions.create(**fields, stream=True)]
    assert ["".join(each.text for each in pieces if each.index == at) for at in range(3)] == texts


@pytest.mark.parametrize("stream", [False, True])
def test_each_prompt_gets_its_choices(openai_client, demo_models, stream):
    prompts = [PROMPT, "# 1\n"]
    fields = {"model": "demo", "prompt": prompts, "max_tokens": 9, "n": 2, **SAMPLED}
    made = openai_client.completions.create(**fields)
    pieces = list(openai_client.completions.create(**fields, stream=True)) if stream else [made]
    choices = [choice for piece in pieces for choice in piece.choices]
    options = {"max_tokens": 9, "temp": 0.8, "top_p": 0.95}
    texts = [
        expected_text(demo_models, prompt, seed=7 + at, **options)
        for prompt in prompts
        for at in range(2)
    ]
    assert ["".join(each.text for each in choices if each.index == at) for at in range(4)] == texts
    usage = made.usage
    assert usage.prompt_tokens == sum(len(demo_models[1].encode(prompt)) for prompt in prompts)
    assert usage.completion_tokens == 36


def test_a_prompt_that_is_refused_cancels_those_before_it(scripted):
    refuse(scripted[0], TEXT, {"prompt": ["x", []]})
    assert [request.cancelled for request in scripted[1].requests] == [True]


def test_logprobs_match_the_library(demo, openai_client, demo_models):
    model, tokenizer, _ = demo_models
    steps = list(stream_generate(model, tokenizer, PROMPT, max_tokens=5, context=False))
    made = openai_client.completions.create(model="demo", prompt=PROMPT, max_tokens=5, logprobs=2)
    found = made.choices[0].logprobs
    assert "".join(found.tokens) == made.choices[0].text
    assert found.token_logprobs == pytest.approx(
        [each.logprobs[each.token].item() for each in steps], abs=1e-3
    )
    assert all(len(each) == 2 for each in found.top_logprobs)
    for more in ({"logprobs": True}, {}):
        body = {"prompt": PROMPT, "max_tokens": 5, "top_logprobs": 3, **more}
        content = ask(demo, TEXT, body).json["choices"][0]["logprobs"]["content"]
        assert [each["id"] for each in content] == [each.token for each in steps]
        assert [len(each["top_logprobs"]) for each in content] == [3] * 5


def test_json_mode_gives_an_object(openai_client):
    messages = [{"role": "user", "content": "x"}]
    made = openai_client.chat.completions.create(
        model="demo", messages=messages, max_tokens=30, response_format={"type": "json_object"}
    )
    assert made.choices[0].message.content.startswith("{")
    assert made.usage.drafted > 0


def test_an_overly_complex_schema_fails(demo):
    schema = {"type": "string", "pattern": "^(a{1000}){1000}$"}
    shape = {"type": "json_schema", "json_schema": {"schema": schema}}
    said = refuse(demo, TEXT, {"prompt": "x", "max_tokens": 9, "response_format": shape})
    assert said.startswith("the JSON schema cannot be followed: lexer error: too many")


def test_schemas_are_followed_by_several_requests(demo, demo_models):
    schema = {
        "type": "object",
        "properties": {"n": {"type": "integer", "maximum": 99}},
        "required": ["n"],
    }
    shape = {
        "type": "json_schema",
        "json_schema": {"schema": schema | {"additionalProperties": False}},
    }
    bodies = [
        {"prompt": f"# {at}\n", "max_tokens": 60, "temperature": 1.0, "seed": at} for at in range(6)
    ]
    for body in bodies[::2]:
        body["response_format"] = shape
    with ThreadPoolExecutor(len(bodies)) as pool:
        replies = list(pool.map(lambda body: ask(demo, TEXT, body), bodies))
    texts = [reply.json["choices"][0]["text"] for reply in replies]
    worker = demo.service.worker
    assert count(worker, "round_requests") > count(worker, "rounds")
    for text in texts[::2]:
        jsonschema.validate(json.loads(text), schema)
    for at in (1, 3, 5):
        assert texts[at] == expected_text(
            demo_models, f"# {at}\n", max_tokens=60, temp=1.0, seed=at
        )


def test_chat_uses_the_template(scripted, scripted_openai):
    _, engine = scripted
    engine.texts = [["I ", "am fine."]]
    messages = [
        {"role": "developer", "content": "Be kind."},
        {
            "role": "user",
            "content": [{"type": "text", "text": "How "}, {"type": "text", "text": "are you?"}],
        },
    ]
    made = scripted_openai.chat.completions.create(model="demo", messages=messages)
    assert engine.prompt == "<system>Be kind.<user>How are you?<assistant><think>"
    # Both the prompt and the answer end within the model's reasoning.
    message = made.choices[0].message
    assert message.content is None
    assert message.reasoning == "I am fine."
    made = scripted_openai.chat.completions.create(
        model="demo",
        messages=messages,
        extra_body={"chat_template_kwargs": {"enable_thinking": False}},
    )
    assert engine.prompt.endswith("<assistant>")
    assert made.choices[0].message.content == "I am fine."


@pytest.mark.parametrize("stream", [False, True])
def test_reasoning_and_tool_calls_are_separated(scripted, scripted_openai, stream):
    scripted[1].texts = [["Let me see.", "</think>", "I ask. ", CALL, CALL.replace("Bern", "Rom")]]
    made = scripted_openai.chat.completions.create(
        model="demo", messages=USER, tools=[WEATHER], parallel_tool_calls=True, stream=stream
    )
    choices = [each.choices[0] for each in made] if stream else made.choices
    messages = [each.delta if stream else each.message for each in choices]
    assert "".join(each.content or "" for each in messages) == "I ask. "
    assert "".join(getattr(each, "reasoning", "") for each in messages) == "Let me see."
    calls = [call for each in messages for call in each.tool_calls or []]
    assert [(call.function.name, json.loads(call.function.arguments)) for call in calls] == [
        ("weather", {"city": "Bern"}),
        ("weather", {"city": "Rom"}),
    ]
    assert not stream or [each.role for each in messages] == ["assistant"] + [None] * (
        len(messages) - 1
    )
    assert choices[-1].finish_reason == "tool_calls"
    assert len({call.id for call in calls}) == 2
    assert not stream or [call.index for call in calls] == [0, 1]


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({}, CALL),
        ({"tools": [WEATHER], "tool_choice": "none"}, CALL),
        ({"tools": [WEATHER]}, "<tool_call>no JSON"),
    ],
)
def test_invalid_calls_stay_text(scripted, fields, text):
    server, engine = scripted
    engine.texts = [["</think>", text]]
    made = ask(server, "/v1/chat/completions", {"messages": USER, **fields}).json["choices"][0]
    assert made["message"]["content"] == text
    assert made["finish_reason"] == "stop"
    assert ("is how to call" in engine.prompt) is bool(fields)


def test_stop_strings_end_reasoning_and_calls_too(scripted):
    server, engine = scripted
    engine.texts = [["Let me see</think>", CALL]]
    body = {"messages": USER, "tools": [WEATHER], "stop": "me s"}
    made = ask(server, "/v1/chat/completions", body).json["choices"][0]
    reasoning = {"reasoning": "Let ", "reasoning_content": "Let "}
    assert made["message"] == {"role": "assistant", "content": None, "refusal": None, **reasoning}
    assert made["finish_reason"] == "stop"
    assert engine.requests[-1].cancelled


def test_sampling_fields_reach_the_engine(scripted):
    server, engine = scripted
    fields = {
        "top_k": 5,
        "min_p": 0.1,
        "xtc_probability": 0.2,
        "xtc_threshold": 0.3,
        "repetition_penalty": 1.1,
        "repetition_context_size": 7,
        "presence_penalty": 0.5,
        "frequency_penalty": -0.5,
        "seed": 0,
    }
    body = {
        "prompt": "x",
        "logit_bias": {"3": -100},
        "temperature": 0.5,
        "max_completion_tokens": 9,
        **fields,
    }
    assert ask(server, TEXT, body).status == 200
    expected = fields | {"temp": 0.5, "max_tokens": 9, "logit_bias": {3: -100.0}}
    asked = engine.requests[-1].asked
    assert {name: asked[name] for name in expected} == expected


def test_infinite_logprobs_become_finite(scripted):
    server, _ = scripted
    body = {"messages": USER, "logprobs": True, "top_logprobs": 2}
    made = ask(server, "/v1/chat/completions", body)
    assert b"Infinity" not in made.body
    assert (
        made.json["choices"][0]["logprobs"]["content"][0]["top_logprobs"][1]["logprob"] == -9999.0
    )


def test_logprobs_have_the_bytes_of_whole_characters(scripted):
    server, engine = scripted
    engine.texts = [["a€"]]
    made = ask(server, TEXT, {"prompt": "x", "logprobs": True}).json["choices"][0]["logprobs"][
        "content"
    ]
    assert [each["bytes"] for each in made] == [[ord("a")], None, None, None]


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs_say_where_the_tokens_of_the_text_begin(scripted, scripted_openai, stream):
    scripted[1].texts = [["one", " two"], ["three"]]
    made = scripted_openai.completions.create(
        model="demo", prompt="x", logprobs=0, n=2, stream=stream
    )
    choices = [each for chunk in (made if stream else [made]) for each in chunk.choices]
    for at, text in enumerate(["one two", "three"]):
        found = [each.logprobs for each in choices if each.index == at]
        tokens = [token for each in found for token in each.tokens]
        offsets = [offset for each in found for offset in each.text_offset]
        assert "".join(tokens) == text, "the end token is not listed"
        assert offsets == [len("".join(tokens[:n])) for n in range(len(tokens))]


def test_models_are_listed(demo, openai_client):
    assert [model.id for model in openai_client.models.list()] == ["demo"]
    assert openai_client.models.retrieve("demo").id == "demo"
    assert ask(demo, "/v1/models/").json == ask(demo, "/v1/models").json
    for ask_for in (
        lambda: openai_client.models.retrieve("gpt-5"),
        lambda: openai_client.completions.create(model="gpt-5", prompt="x"),
    ):
        with pytest.raises(openai.NotFoundError, match="expected model demo, got 'gpt-5'"):
            ask_for()


def test_the_model_may_be_served_under_other_names(chat_tokenizer):
    with start_scripted(chat_tokenizer, "--served-model-name", "a", "b") as (server, _):
        models = ask(server, "/models").json["data"]
        assert [model["id"] for model in models] == ["a", "b"]
        assert models[0]["context_length"] == 8192
        assert ask(server, "/v1/completions", {"prompt": "x", "model": "b"}).json["model"] == "a"
        reply = ask(server, "/v1/completions", {"prompt": "x", "model": "c"})
        assert reply.status == 404
        assert reply.json["error"]["code"] == "model_not_found"
        assert reply.error == "expected model a or b, got 'c'"
    with start_scripted(chat_tokenizer, "--served-model-name", "*") as (server, _):
        assert (
            ask(server, "/v1/completions", {"prompt": "x", "model": "gpt-5"}).json["model"]
            == "demo"
        )
        assert ask(server, "/v1/models/claude").json["id"] == "claude"
