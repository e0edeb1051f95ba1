"""Anthropic's Messages API, with its official client and as Claude Code uses it."""

from __future__ import annotations

from typing import Any

import anthropic
import pytest
from servers import Running, ScriptedWorker

Scripted = tuple[Running, ScriptedWorker]
SHELL: Any = {"name": "shell", "description": "Run it.", "input_schema": {"type": "object"}}
CALL = '<tool_call>{"name": "shell", "arguments": {"command": "ls"}}</tool_call>'
USER: Any = [{"role": "user", "content": "Hi"}]


def test_text_without_streaming(scripted: Scripted, scripted_anthropic: anthropic.Anthropic) -> None:
    scripted[1].texts = [["Hm.</think>", "I am ", "fine."]]
    system: Any = [{"type": "text", "text": "Be"}, {"type": "text", "text": "kind.", "cache_control": {"type": "x"}}]
    made = scripted_anthropic.messages.create(model="demo", max_tokens=50, system=system, messages=USER)
    assert scripted[1].prompt == "<system>Be\n\nkind.<user>Hi<assistant><think>"
    blocks: Any = made.content
    assert [block.type for block in blocks] == ["thinking", "text"]
    assert (blocks[0].thinking, blocks[1].text, made.stop_reason) == ("Hm.", "I am fine.", "end_turn")
    usage: Any = made.usage
    assert (usage.cache_read_input_tokens, usage.output_tokens > 3, usage.rounds) == (1, True, 4)


def test_the_official_client_accumulates_a_stream(scripted: Scripted, scripted_anthropic: anthropic.Anthropic) -> None:
    scripted[1].texts = [["Hm.</think>", "I ", "look.", CALL, CALL]]
    kinds, texts = [], []
    with scripted_anthropic.messages.stream(model="demo", max_tokens=99, messages=USER, tools=[SHELL]) as stream:
        for event in stream:
            kinds.append(event.type)
            if event.type == "text":
                texts.append(event.text)
        made: Any = stream.get_final_message()
    assert "".join(texts) == "I look." and kinds[0] == "message_start" and kinds[-1] == "message_stop"
    assert [block.type for block in made.content] == ["thinking", "text", "tool_use", "tool_use"]
    assert [block.input for block in made.content[2:]] == [{"command": "ls"}] * 2
    assert made.stop_reason == "tool_use" and made.content[2].id != made.content[3].id
    assert made.usage.output_tokens > 0


def test_a_prefilled_answer_is_continued(scripted: Scripted, scripted_anthropic: anthropic.Anthropic) -> None:
    messages: Any = [*USER, {"role": "assistant", "content": "I am"}]
    made = scripted_anthropic.messages.create(model="demo", max_tokens=1, messages=messages)
    assert scripted[1].prompt == "<user>Hi<assistant>I am"
    assert made.stop_reason == "max_tokens" and made.usage.output_tokens == 1


@pytest.mark.parametrize("stream", [False, True])
def test_stop_sequence_is_named(scripted: Scripted, scripted_anthropic: anthropic.Anthropic, stream: bool) -> None:
    scripted[1].texts = [["</think>one, two, three"]]
    keywords: Any = {"model": "demo", "max_tokens": 99, "messages": USER, "stop_sequences": ["zero", ", th"]}
    if stream:
        with scripted_anthropic.messages.stream(**keywords) as events:
            made: Any = events.get_final_message()
    else:
        made = scripted_anthropic.messages.create(**keywords)
    assert made.content[0].text == "one, two" and (made.stop_reason, made.stop_sequence) == ("stop_sequence", ", th")


def test_tokens_are_counted(scripted: Scripted, scripted_anthropic: anthropic.Anthropic) -> None:
    counted = scripted_anthropic.messages.count_tokens(model="demo", messages=USER, tools=[SHELL], system="Be kind.")
    assert not scripted[1].requests
    scripted_anthropic.messages.create(model="demo", max_tokens=1, messages=USER, tools=[SHELL], system="Be kind.")
    assert counted.input_tokens == len(scripted[1].requests[-1].prompt)


def test_other_errors_have_anthropics_types(scripted: Scripted, scripted_anthropic: anthropic.Anthropic) -> None:
    with pytest.raises(anthropic.NotFoundError, match="expected model demo, got 'claude'"):
        scripted_anthropic.messages.create(model="claude", max_tokens=1, messages=USER)
