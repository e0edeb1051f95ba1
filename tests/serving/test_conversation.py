"""From an agent's messages to the model's prompt, in every API."""

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest

from helpers.servers import (
    BODIES,
    USER,
    Reply,
    Running,
    Scripted,
    ask,
    save_tokenizer,
    start_scripted,
)
from mlx_redrafter.serving.formats.conversation import arrange

IMAGE = {
    "/v1/chat/completions": {"type": "image_url", "image_url": {"url": "data:image/png;base64,x"}},
    "/v1/responses": {"type": "input_image", "image_url": "data:image/png;base64,x"},
    "/v1/messages": {
        "type": "image",
        "source": {"type": "base64", "media_type": "image/png", "data": "x"},
    },
}
TEXT = {"/v1/chat/completions": "text", "/v1/responses": "input_text", "/v1/messages": "text"}
CALL = '<tool_call>{"name": "%s", "arguments": %s}</tool_call>'
"""A tool call as the model writes it."""


def post(server: Running, path: str, messages: list[dict[str, Any]], **fields) -> Reply:
    """Sends messages in the format of the path's API."""
    name = "input" if path == "/v1/responses" else "messages"
    return ask(server, path, BODIES[path] | {name: messages} | fields)


def read_prompt(both: Scripted, path: str, messages: list[dict[str, Any]], **fields) -> str:
    """The model's prompt for messages."""
    reply = post(both[0], path, messages, **fields)
    assert reply.status == 200, reply.body
    return both[1].prompt


def say(role: str, content) -> dict[str, Any]:
    return {"role": role, "content": content}


LATE = "<system>\n%s\n</system>"


@pytest.mark.parametrize("path", IMAGE)
@pytest.mark.parametrize(
    ("talk", "prompt"),
    [
        ("system A|system B|user Hi", "<system>A\n\nB<user>Hi"),
        (
            "user Hi|assistant Yes?|system Late.|user Go.",
            f"<user>Hi<assistant>Yes?<user>{LATE % 'Late.'}\n\nGo.",
        ),
        ("user Hi|system Late.", f"<user>Hi\n\n{LATE % 'Late.'}"),
        (
            "system A|user Hi|assistant Yes?|user Go.|system B",
            f"<system>A<user>Hi<assistant>Yes?<user>Go.\n\n{LATE % 'B'}",
        ),
        (
            "user Hi|system A|assistant Yes?|user Go.",
            f"<user>Hi\n\n{LATE % 'A'}<assistant>Yes?<user>Go.",
        ),
        (
            "user U|assistant A|system S|system T|assistant B|user V",
            f"<user>U<assistant>A<user>{LATE % 'S'}\n\n{LATE % 'T'}<assistant>B<user>V",
        ),
    ],
)
def test_system_messages_may_come_at_any_time(scripted, path, talk, prompt):
    messages = [say(*message.split(" ", 1)) for message in talk.split("|")]
    assert read_prompt(scripted, path, messages).startswith(f"{prompt}<assistant>")


def test_system_messages_do_not_separate_a_call_from_its_result():
    turns = [say(role, role[0]) for role in ("user", "assistant", "system", "tool", "tool", "user")]
    late = say("user", "<system>\ns\n</system>\n\nu")
    assert arrange(turns) == [
        say("user", "u"),
        say("assistant", "a"),
        say("tool", "t"),
        say("tool", "t"),
        late,
    ]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses"])
def test_developer_messages_are_system_messages(scripted, path):
    talk = [say("developer", "A"), say("user", "Hi"), say("developer", "B")]
    found = read_prompt(scripted, path, talk)
    assert found.startswith("<system>A<user>Hi\n\n<system>\nB\n</system><assistant>")


@pytest.mark.parametrize("path", IMAGE)
def test_images_are_replaced_by_a_note(scripted, path):
    shown = say("user", [{"type": TEXT[path], "text": "See: "}, IMAGE[path]])
    found = read_prompt(scripted, path, [shown, say("assistant", "Nice."), say("user", "Why?")])
    assert found.startswith("<user>See: [image omitted]<assistant>Nice.<user>Why?<assistant>")


def test_text_documents_are_read(scripted):
    source = {"type": "text", "media_type": "text/plain", "data": "42"}
    blocks = [
        {"type": "document", "title": "Answers", "source": source},
        {"type": "text", "text": "What is it?"},
    ]

    def read(*parts):
        return read_prompt(scripted, "/v1/messages", [say("user", parts)])

    assert read(*blocks).startswith("<user>Answers:\n42\nWhat is it?")
    for block in (
        {
            "type": "document",
            "source": {"type": "content", "content": [{"type": "text", "text": "42"}]},
        },
        {
            "type": "search_result",
            "source": "https://a.example",
            "content": [{"type": "text", "text": "42"}],
        },
    ):
        assert read(block).startswith("<user>Document:\n42\n")
    pdf = {
        "type": "document",
        "source": {"type": "base64", "media_type": "application/pdf", "data": "x"},
    }
    assert read(pdf, blocks[1]).startswith("<user>[document omitted]What is it?")


CUSTOM = {
    "type": "custom",
    "name": "apply_patch",
    "description": "Edits.",
    "format": {"type": "grammar"},
}
NAMESPACE = {
    "type": "namespace",
    "name": "mcp__files",
    "description": "Files.",
    "tools": [{"type": "function", "name": "read", "parameters": {"type": "object"}}],
}
HOSTED = [
    {"type": "web_search"},
    {"type": "image_generation"},
    {"type": "tool_search", "execution": "client"},
]


def test_tools_of_all_kinds_are_shown_as_functions(scripted, scripted_openai):
    tools = [CUSTOM, NAMESPACE, *HOSTED]
    scripted[1].texts = [
        [
            "</think>",
            CALL % ("apply_patch", '{"input": "*** Begin"}'),
            CALL % ("mcp__files__read", '{"path": "a"}'),
        ]
    ]
    with scripted_openai.responses.stream(model="demo", input="Edit.", tools=tools) as stream:
        kinds = [event.type.removeprefix("response.") for event in stream]
        made = stream.get_final_response()
    shown = "".join(
        f"<tool_call> is how to call {name}\n" for name in ("apply_patch", "mcp__files__read")
    )
    assert scripted[1].prompt.startswith(f"{shown}<user>Edit.")
    patch, read = made.output
    assert patch.type == "custom_tool_call"
    assert patch.name == "apply_patch"
    assert patch.input == "*** Begin"
    assert read.type == "function_call"
    assert read.name == "read"
    assert read.namespace == "mcp__files"
    assert (
        kinds.count("custom_tool_call_input.done")
        == kinds.count("function_call_arguments.done")
        == 1
    )
    history = [
        say("user", "Edit."),
        *[item.model_dump(exclude_none=True) for item in made.output],
        {"type": "custom_tool_call_output", "call_id": patch.call_id, "output": "Done."},
        {
            "type": "function_call_output",
            "call_id": read.call_id,
            "output": [{"type": "input_text", "text": "A"}],
        },
        {"type": "web_search_call", "id": "ws_1", "status": "completed"},
    ]
    scripted[1].texts = [["</think>ok"]]
    scripted_openai.responses.create(model="demo", input=history, tools=tools)
    calls = (
        '<tool_call>apply_patch {"input": "*** Begin"}</tool_call>'
        '<tool_call>mcp__files__read {"path": "a"}</tool_call>'
    )
    assert f"<assistant>{calls}<tool>" in scripted[1].prompt
    assert scripted[1].prompt.endswith("<tool>Done.<tool>A<assistant><think>")


@pytest.mark.parametrize(
    ("written", "given"),
    [('"ls"', "ls"), ("null", ""), ('{"a": "é"}', '{"a": "é"}'), ("[1, true]", "[1, true]")],
)
def test_a_custom_tool_takes_text_in_a_chat(scripted, scripted_openai, written, given):
    tools = [{"type": "custom", "custom": {"name": "run", "description": "Runs."}}]
    scripted[1].texts = [["</think>", CALL % ("run", f'{{"input": {written}}}')]]
    made = scripted_openai.chat.completions.create(model="demo", messages=USER, tools=tools)
    (call,) = made.choices[0].message.tool_calls or ()
    assert call.type == "custom"
    assert call.custom.name == "run"
    assert call.custom.input == given
    history = [
        *USER,
        made.choices[0].message.model_dump(),
        say("tool", "a.py") | {"tool_call_id": "1"},
    ]
    scripted_openai.chat.completions.create(model="demo", messages=history, tools=tools)
    shown = json.dumps({"input": given}, ensure_ascii=False)
    assert f"<tool_call>run {shown}</tool_call><tool>a.py" in scripted[1].prompt


BROKEN = ['{"path": "a', '{"a": "\\ud83d"}', "[1]"]
ITEMS = """{%- for m in messages %}<{{ m.role }}>{{ m.content }}
{%- for tool_call in m.tool_calls or [] %}
{%- for name, value in tool_call.function.arguments.items() %}<{{ name }}>{{ value }}
{%- endfor %}{% endfor %}
{%- endfor %}{% if enable_thinking is defined %}{% endif %}{# <tool_call> tool_call.name #}"""
"""A template that accepts tool arguments only as objects."""


def call_in_history(path: str, arguments) -> list[dict[str, Any]]:
    """A conversation with a tool call that has these arguments."""
    if path == "/v1/responses":
        call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": arguments}
        return [
            say("user", "x"),
            call,
            {"type": "function_call_output", "call_id": "c", "output": "No."},
        ]
    if path == "/v1/messages":
        use = {"type": "tool_use", "id": "c", "name": "f", "input": arguments}
        result = {"type": "tool_result", "tool_use_id": "c", "content": "No."}
        return [say("user", "x"), say("assistant", [use]), say("user", [result])]
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}
    return [say("user", "x"), say("assistant", None) | {"tool_calls": [call]}, say("tool", "No.")]


@pytest.fixture(scope="module")
def going_through_items(tmp_path_factory) -> Iterator[Scripted]:
    """A scripted server with the template `ITEMS`."""
    with start_scripted(save_tokenizer(tmp_path_factory.mktemp("tokenizer"), ITEMS)) as both:
        yield both


@pytest.mark.parametrize("path", IMAGE)
@pytest.mark.parametrize("arguments", BROKEN)
def test_invalid_arguments_are_the_only_value_of_an_object(
    scripted, going_through_items, path, arguments
):
    talk = call_in_history(path, arguments)
    shown = json.dumps({"arguments": arguments})
    for both, call in (
        (scripted, f"<tool_call>f {shown}</tool_call>"),
        (going_through_items, f"<arguments>{arguments}"),
    ):
        found = read_prompt(both, path, talk)
        assert found.startswith(f"<user>x<assistant>{call}<tool>No.")


NINE = """{%- for m in messages %}{%- for tool_call in m.tool_calls or [m] %}
{%- set id = m.tool_call_id if m.role == "tool" else tool_call.id %}
{%- if (m.tool_calls or m.role == "tool") and (id is not string or id | length != 9) %}
{{- raise_exception("ids must have nine letters or digits") }}{% endif %}<{{ id }}>
{%- endfor %}{{ m.content }}{%- endfor %}{# <tool_call> tool_call.name #}"""


@pytest.mark.parametrize("path", IMAGE)
@pytest.mark.parametrize("identifier", ["call_0123456789abcdef", "toolu_01A09", "VvvODy9mT", "a:b"])
def test_a_template_may_want_ids_of_nine_characters(tmp_path, path, identifier):
    talk = json.loads(json.dumps(call_in_history(path, {})).replace('"c"', json.dumps(identifier)))
    if path == "/v1/chat/completions":
        talk[-1]["tool_call_id"] = identifier
    with start_scripted(save_tokenizer(tmp_path, NINE)) as both:
        (prompt,) = {read_prompt(both, path, talk) for _ in range(2)}
    called, answered = re.findall("<([a-zA-Z0-9]{9})>", prompt)
    assert called == answered
    assert (called == identifier) is identifier.isalnum()


@pytest.mark.parametrize("path", IMAGE)
@pytest.mark.parametrize("arguments", ["", None, " ", "null", "{}", {}])
def test_no_arguments_are_an_empty_object(scripted, path, arguments):
    found = read_prompt(scripted, path, call_in_history(path, arguments))
    assert found.startswith("<user>x<assistant><tool_call>f {}</tool_call><tool>No.")


def test_items_may_be_referenced(scripted, scripted_openai):
    scripted[1].texts = [["</think>It is blue."]]
    made = scripted_openai.responses.create(model="demo", input="Why?")
    reference = {"type": "item_reference", "id": made.output[0].id}
    scripted_openai.responses.create(
        model="demo", input=[{"role": "user", "content": "Why?"}, reference]
    )
    assert scripted[1].prompt == "<user>Why?<assistant>It is blue.<assistant><think>"


SWITCHES = {
    "enable_thinking": "{{ '<think>' if enable_thinking | default(true) else '<think></think>' }}",
    "thinking": "{{ '<think>' if thinking | default(true) else '<think></think>' }}",
    "effort": "{{ '<think>' if reasoning_effort | default('high') != 'none' "
    "else '<think></think>' }}",
    "levels": "effort {{ reasoning_effort | default('medium') }}",
}
"""Ends of templates with each form of the switch that turns reasoning off; the last has none."""


@pytest.mark.parametrize("switch", SWITCHES)
def test_effort_none_turns_reasoning_off(tmp_path, switch):
    template = "{% for m in messages %}{{ m.content }}{% endfor %}" + SWITCHES[switch]
    fields = [
        ("/v1/chat/completions", {"reasoning_effort": "none"}),
        ("/v1/chat/completions", {"reasoning": {"effort": "none"}}),
        ("/v1/chat/completions", {"reasoning": {"enabled": False}}),
        ("/v1/chat/completions", {"reasoning": {"max_tokens": 0}}),
        ("/v1/chat/completions", {"thinking": {"type": "disabled"}}),
        ("/v1/chat/completions", {"enable_thinking": False}),
        ("/v1/chat/completions", {"think": False}),
        ("/v1/responses", {"reasoning": {"effort": "none"}}),
        ("/v1/messages", {"thinking": {"type": "disabled"}, "output_config": {"effort": "none"}}),
        ("/v1/messages", {"thinking": {"type": "disabled"}}),
        ("/v1/messages", {"thinking": {"type": "enabled", "budget_tokens": 0}}),
    ]
    off, on = (
        ("effort low", "effort medium") if switch == "levels" else ("<think></think>", "<think>")
    )
    wanted = {"chat_template_kwargs": dict.fromkeys(("enable_thinking", "thinking"), True)}
    still = off if switch in ("effort", "levels") else on
    tokenizer = save_tokenizer(tmp_path, f"{template}{{# <tool_call> tool_call.name #}}")
    with start_scripted(tokenizer) as both:
        for path, none in fields:
            for more, expected in ((none, off), ({}, on), (none | wanted, still)):
                assert read_prompt(both, path, [say("user", "Hi")], **more) == f"Hi{expected}"


CHAT_TOOL = {"type": "function", "function": {"name": "f"}}
RESPONSES_TOOL = {"type": "function", "name": "f"}
MESSAGES_TOOL = {"name": "f", "input_schema": {"type": "object"}}


@pytest.mark.parametrize(
    ("path", "tool", "choice"),
    [
        ("/v1/chat/completions", CHAT_TOOL, "required"),
        ("/v1/chat/completions", CHAT_TOOL, CHAT_TOOL),
        ("/v1/responses", RESPONSES_TOOL, "required"),
        ("/v1/responses", RESPONSES_TOOL, RESPONSES_TOOL),
        ("/v1/messages", MESSAGES_TOOL, {"type": "any"}),
        (
            "/v1/messages",
            MESSAGES_TOOL,
            {"type": "tool", "name": "f", "disable_parallel_tool_use": True},
        ),
    ],
)
def test_a_forced_call_is_one_object(scripted, path, tool, choice):
    scripted[1].texts = [['</think>{"name": "f", "arguments": {"a": 1}}']]
    reply = post(scripted[0], path, [say("user", "x")], tools=[tool], tool_choice=choice)
    assert reply.status == 200, reply.body
    made = reply.json
    if path == "/v1/chat/completions":
        (choice,) = made["choices"]
        (call,) = choice["message"]["tool_calls"]
        found = call["function"]["name"], json.loads(call["function"]["arguments"])
        assert choice["finish_reason"] == "tool_calls"
        assert choice["message"]["content"] is None
    elif path == "/v1/responses":
        (item,) = made["output"]
        found = item["name"], json.loads(item["arguments"])
    else:
        (block,) = made["content"]
        found = block["name"], block["input"]
        assert block["type"] == "tool_use"
        assert made["stop_reason"] == "tool_use"
    assert found == ("f", {"a": 1})


@pytest.mark.parametrize(
    ("path", "tool", "none"),
    [
        ("/v1/chat/completions", CHAT_TOOL, "none"),
        ("/v1/responses", RESPONSES_TOOL, "none"),
        ("/v1/messages", MESSAGES_TOOL, {"type": "none"}),
    ],
)
def test_tools_stay_in_the_prompt_if_none_may_be_called(scripted, monkeypatch, path, tool, none):
    mark = 7
    bias = {8: 1.0}
    monkeypatch.setattr(type(scripted[1].tokenizer), "tool_call_start_tokens", (mark,))
    scripted[1].texts = [[f"</think>{CALL % ('f', '{}')}"]]
    prompts = []
    for choice in ({}, {"tool_choice": none}):
        reply = post(scripted[0], path, [say("user", "x")], tools=[tool], logit_bias=bias, **choice)
        prompts.append(scripted[1].prompt)
        asked = scripted[1].requests[-1].asked["logit_bias"]
        assert asked == (bias | {mark: -100.0} if choice else bias)
        assert (b"tool_call>" in reply.body) is bool(choice), "a call of another form stays text"
    assert prompts[0] == prompts[1]
    assert "is how to call f" in prompts[0]


def test_tools_and_a_format_may_be_combined(scripted):
    more = {"tools": [CHAT_TOOL], "response_format": {"type": "json_object"}}
    read_prompt(scripted, "/v1/chat/completions", [say("user", "x")], **more)
    *_, unless = scripted[1].requests[-1].asked["grammar"].arguments
    assert unless == tuple(scripted[1].tokenizer.tool_call_start_tokens)


ALTERNATING = """{%- for m in messages %}{% if (m.role == "user") != (loop.index0 % 2 == 0) %}
{{- raise_exception("roles must alternate") }}{% endif %}<{{ m.role }}>{{ m.content }}{% endfor %}
{%- if enable_thinking is defined %}{% endif %}{# <tool_call> tool_call.name #}"""


def test_turns_are_joined_if_the_template_rejects_them(tmp_path):
    talk = [
        say("system", "A"),
        say("user", "B"),
        say("user", "C"),
        say("assistant", "D"),
        say("user", "E"),
    ]
    path = "/v1/chat/completions"
    joined = "<user><system>\nA\n</system>\n\nB\n\nC<assistant>D<user>E"
    with start_scripted(save_tokenizer(tmp_path, ALTERNATING)) as both:
        assert read_prompt(both, path, talk) == joined
        assert "roles must alternate" in post(both[0], path, talk[3:]).error


def test_failures_of_tools_are_told(scripted):
    call = {
        "type": "tool_use",
        "id": "c",
        "name": "f",
        "input": {},
    }
    for given in ("No.", [{"type": "text", "text": "No."}]):
        result = {"type": "tool_result", "tool_use_id": "c", "content": given}
        for told in (True, False, None):
            talk = [
                say("user", "x"),
                say("assistant", [call]),
                say("user", [result | {"is_error": told}]),
            ]
            shown = "<error>\nNo.\n</error>" if told else "No."
            assert f"<tool>{shown}<assistant>" in read_prompt(scripted, "/v1/messages", talk)


TEMPLATE_WITH_REASONING = """{%- for m in messages %}<{{ m.role }}>
{%- if m.FIELD %}({{ m.FIELD }}){% endif %}
{{- m.content }}
{%- if "FIELD" in m and m.content and m.tool_calls and "FIELD" == "thinking" %}
{{- raise_exception("both") }}{% endif %}
{%- endfor %}{% if enable_thinking is defined %}{% endif %}{# <tool_call> tool_call.name #}"""


def answer_after(*reasoning: dict[str, Any], kind: str = "text") -> dict[str, Any]:
    """An answer in parts, of which the last is its text."""
    return say("assistant", [*reasoning, {"type": kind, "text": "A."}])


SUMMARY = {"type": "summary_text", "text": "Hm."}
WITH_REASONING = [
    ("/v1/chat/completions", [answer_after({"type": "thinking", "thinking": "Hm."})]),
    (
        "/v1/chat/completions",
        [answer_after({"type": "thinking", "thinking": [{"type": "text", "text": "Hm."}]})],
    ),
    ("/v1/chat/completions", [answer_after({"type": "reasoning", "text": "Hm."})]),
    (
        "/v1/chat/completions",
        [answer_after({"type": "reasoning_content", "reasoning_content": {"text": "Hm."}})],
    ),
    (
        "/v1/chat/completions",
        [say("assistant", "A.") | {"reasoning": "Hm.", "reasoning_details": [{}]}],
    ),
    ("/v1/chat/completions", [say("assistant", "A.") | {"reasoning_content": "Hm."}]),
    ("/v1/messages", [answer_after({"type": "thinking", "thinking": "Hm."})]),
    ("/v1/responses", [{"type": "reasoning", "summary": [SUMMARY]}, say("assistant", "A.")]),
    (
        "/v1/responses",
        [
            {"type": "reasoning", "content": [SUMMARY | {"type": "reasoning_text"}]},
            say("assistant", "A."),
        ],
    ),
]
WITHOUT_REASONING = [
    ("/v1/chat/completions", answer_after({"type": "thinking", "thinking": ""})),
    ("/v1/chat/completions", say("assistant", "A.") | {"reasoning": {"x": 1}, "thinking": None}),
    ("/v1/messages", answer_after({"type": "redacted_thinking", "data": "x"})),
    ("/v1/responses", answer_after({"type": "reasoning", "encrypted": "x"}, kind="output_text")),
]


@pytest.mark.parametrize("field", ["reasoning_content", "reasoning", "thinking"])
def test_reasoning_goes_where_the_template_has_a_place(tmp_path, field):
    template = TEMPLATE_WITH_REASONING.replace("FIELD", field)
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    with start_scripted(save_tokenizer(tmp_path, template)) as both:

        def read(path, *turns):
            return read_prompt(both, path, [say("user", "x"), *turns])

        for path, answer in WITH_REASONING:
            found = read(path, *answer, say("user", "y"))
            assert found == "<user>x<assistant>(Hm.)A.<user>y"
        for path, message in WITHOUT_REASONING:
            assert read(path, message, say("user", "y")) == "<user>x<assistant>A.<user>y"
        calls = [
            say("assistant", "A.") | {"reasoning": "Hm.", "tool_calls": [call]},
            say("tool", "y"),
        ]
        shown = "A." if field == "thinking" else "(Hm.)A."  # that template rejects all three
        found = read("/v1/chat/completions", *calls)
        assert found == f"<user>x<assistant>{shown}<tool>y"


def test_reasoning_is_dropped_if_the_template_has_no_place_for_it(scripted):
    for path, answer in WITH_REASONING:
        found = read_prompt(scripted, path, [say("user", "x"), *answer, say("user", "y")])
        assert found.startswith("<user>x<assistant>A.<user>y<assistant>")


def test_a_prefilled_answer_follows_no_format(scripted):
    form = {"format": {"type": "json_schema", "schema": {"type": "object"}}}
    reply = post(
        scripted[0], "/v1/messages", [say("user", "x"), say("assistant", "{")], output_config=form
    )
    assert reply.status == 400
    assert "begun by the last message" in reply.error
