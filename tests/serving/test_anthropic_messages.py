"""Anthropic's Messages API, with its official client and as Claude Code uses it."""

from typing import Any

import anthropic
import pytest

from helpers.servers import USER, ask, refuse

SHELL = {"name": "shell", "description": "Run it.", "input_schema": {"type": "object"}}
CALL = '<tool_call>{"name": "shell", "arguments": {"command": "ls"}}</tool_call>'


def test_text_without_streaming(scripted, scripted_anthropic):
    scripted[1].texts = [["Hm.</think>", "I am ", "fine."]]
    system = [
        {"type": "text", "text": "Be"},
        {"type": "text", "text": "kind.", "cache_control": {"type": "x"}},
    ]
    made = scripted_anthropic.messages.create(
        model="demo", max_tokens=50, system=system, messages=USER
    )
    assert scripted[1].prompt == "<system>Be\n\nkind.<user>Hi<assistant><think>"
    blocks = made.content
    assert [block.type for block in blocks] == ["thinking", "text"]
    assert blocks[0].thinking == "Hm."
    assert blocks[1].text == "I am fine."
    assert made.stop_reason == "end_turn"
    usage = made.usage
    assert usage.cache_read_input_tokens == 1
    assert usage.output_tokens > 3
    assert usage.rounds == 4


@pytest.mark.parametrize("stream", [False, True])
def test_stop_sequence_is_named(scripted, scripted_anthropic, stream):
    scripted[1].texts = [["</think>one, two, three"]]
    keywords = {
        "model": "demo",
        "max_tokens": 99,
        "messages": USER,
        "stop_sequences": ["zero", ", th"],
    }
    if stream:
        with scripted_anthropic.messages.stream(**keywords) as events:
            made = events.get_final_message()
    else:
        made = scripted_anthropic.messages.create(**keywords)
    assert made.content[0].text == "one, two"
    assert made.stop_reason == "stop_sequence"
    assert made.stop_sequence == ", th"


def test_tokens_are_counted(scripted, scripted_anthropic):
    counted = scripted_anthropic.messages.count_tokens(
        model="demo", messages=USER, tools=[SHELL], system="Be kind."
    )
    assert not scripted[1].requests
    scripted_anthropic.messages.create(
        model="demo", max_tokens=1, messages=USER, tools=[SHELL], system="Be kind."
    )
    assert counted.input_tokens == len(scripted[1].requests[-1].prompt)


def test_other_errors_have_anthropics_types(scripted, scripted_anthropic):
    with pytest.raises(anthropic.NotFoundError, match="expected model demo, got 'claude'"):
        scripted_anthropic.messages.create(model="claude", max_tokens=1, messages=USER)


def use(name: str, identifier: str = "c") -> dict[str, Any]:
    return {
        "role": "assistant",
        "content": [{"type": "tool_use", "id": identifier, "name": name, "input": {}}],
    }


def result(*parts, identifier: str = "c") -> dict[str, Any]:
    return {
        "role": "user",
        "content": [{"type": "tool_result", "tool_use_id": identifier, "content": list(parts)}],
    }


def system(*parts) -> dict[str, Any]:
    return {"role": "system", "content": list(parts)}


def refer(name) -> dict[str, Any]:
    return {"type": "tool_reference", "tool_name": name}


def add(**tool) -> dict[str, Any]:
    return {"type": "tool_addition", "tool": tool}


def remove(name: str) -> dict[str, Any]:
    return {"type": "tool_removal", "tool": {"type": "tool_reference", "name": name}}


FIND = {"name": "find", "input_schema": {"type": "object"}}
PAGE = {
    "name": "page",
    "description": "Reads.",
    "input_schema": {"type": "object"},
    "defer_loading": True,
}
SHOWN = (
    '<tools>\n{"type": "function", "function": {"name": "page", "description": "Reads.", '
    '"parameters": {"type": "object"}}}\n</tools>\n'
)
AVAILABLE = "The tool page is available.\n"
NOT_AVAILABLE = "The tool page is not available.\n"
BY_NAME = {"type": "tool_reference", "name": "page"}
BY_VALUE = {"type": "tool_definition", "definition": PAGE}


@pytest.mark.parametrize(
    ("tools", "change", "text", "is_known"),
    [
        (
            [PAGE, FIND],
            [result({"type": "text", "text": "One: "}, refer("page"))],
            f"<tool>One: {SHOWN}",
            True,
        ),
        ([FIND, PAGE], [result(refer("page"), refer("page"))], f"<tool>{SHOWN}{AVAILABLE}", True),
        ([FIND], [result(refer("page"))], f"<tool>{NOT_AVAILABLE}", False),
        (
            [PAGE, FIND],
            [result(), system(add(**BY_NAME))],
            f"<tool><user><system>\n{SHOWN}\n</system>",
            True,
        ),
        (
            [FIND],
            [result(), system(add(**BY_VALUE))],
            f"<tool><user><system>\n{SHOWN}\n</system>",
            True,
        ),
        (
            [FIND, PAGE],
            [result(refer("page")), system(remove("page"))],
            f"<tool>{SHOWN}<user><system>\n{NOT_AVAILABLE}\n</system>",
            False,
        ),
        (
            [FIND, PAGE],
            [result(refer("page")), system(remove("page"), add(**BY_NAME))],
            f"<tool>{SHOWN}<user><system>\n{NOT_AVAILABLE}{SHOWN}\n</system>",
            True,
        ),
    ],
)
def test_a_deferred_tool_is_shown_where_the_conversation_loads_it(
    scripted, tools, change, text, is_known
):
    server, engine = scripted
    body = {"max_tokens": 99, "messages": USER, "tools": [FIND]}
    ask(server, "/v1/messages", body)
    before = engine.prompt.removesuffix("<assistant><think>")
    assert before == "<tool_call> is how to call find\n<user>Hi"
    body |= {"tools": tools}
    assert ask(server, "/v1/messages", body).status == 200
    assert engine.prompt.removesuffix("<assistant><think>") == before, (
        "a deferred tool does not change the prompt"
    )
    body["messages"] = [*USER, use("find"), *change]
    engine.texts = [[f"</think>{CALL.replace('shell', 'page')}"]]
    (call,) = ask(server, "/v1/messages", body).json["content"]
    assert call["type"] == "tool_use"
    assert call["name"] == "page"
    expected = f"{before}<assistant><tool_call>find {{}}</tool_call>{text}<assistant><think>"
    assert engine.prompt.replace("\n", "") == expected.replace("\n", "")
    forced = body | {"tool_choice": {"type": "tool", "name": "page"}}
    assert ask(server, "/v1/messages", forced).status == (200 if is_known else 400)


def test_tools_are_shown_at_once_if_only_a_hosted_search_could_load_them(scripted):
    search = {"type": "tool_search_tool_regex_20251119", "name": "tool_search_tool_regex"}
    body = {"max_tokens": 9, "messages": USER, "tools": [search, PAGE]}
    assert ask(scripted[0], "/v1/messages", body).status == 200
    assert scripted[1].prompt.startswith("<tool_call> is how to call page\n<user>Hi")


@pytest.mark.parametrize(
    "message",
    [
        result(refer(5)),
        result({"type": "tool_reference"}),
        result("page"),
        system(add()),
        system({"type": "tool_addition", "tool": "page"}),
        system(add(type="tool_definition", definition=[PAGE])),
        system(add(type="mcp_toolset_reference", server_name="page")),
        system(add(type="tool_definition", definition={"input_schema": {}})),
    ],
)
def test_malformed_references_are_refused(scripted, message):
    body = {"max_tokens": 9, "messages": [*USER, use("find"), message], "tools": [FIND, PAGE]}
    assert "messages[2].content" in refuse(scripted[0], "/v1/messages", body)
