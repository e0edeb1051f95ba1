"""Default requests of coding agents and agent libraries, with shortened texts."""

import json
import re
from typing import Any

import pytest

from helpers.servers import ask, events_of, read_settings

SCHEMA = {
    "$schema": "https://json-schema.org/draft/2020-12/schema",
    "type": "object",
    "properties": {"path": {"type": "string", "description": "A file."}},
    "required": ["path"],
    "additionalProperties": False,
}
CHAT_TOOL = {
    "type": "function",
    "function": {"name": "read", "description": "Reads.", "parameters": SCHEMA},
}
RESPONSES_TOOL = {
    "type": "function",
    "name": "read",
    "description": "Reads.",
    "parameters": SCHEMA,
    "strict": False,
}
CACHED = {"cache_control": {"type": "ephemeral"}}
CALL = '</think><tool_call>{"name": "read", "arguments": {"path": "a.py"}}</tool_call>'


def text(words: str, kind: str = "text", **more) -> dict[str, Any]:
    return {"type": kind, "text": words, **more}


def message(role: str, words: str) -> dict[str, Any]:
    return {"type": "message", "role": role, "content": [text(words, "input_text")]}


READ = {"path": "a.py"}
READ_CALL = {
    "type": "tool_use",
    "id": "toolu_1",
    "name": "read",
    "input": READ,
    "caller": {"type": "direct"},
}
PNG = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "x"}}
RESULT = {
    "type": "tool_result",
    "tool_use_id": "toolu_1",
    "is_error": False,
    "content": [text("x = 1"), PNG],
    **CACHED,
}
CLAUDE_CODE = {
    "model": "demo",
    "max_tokens": 32000,
    "stream": True,
    "system": [
        text("x-anthropic-billing-header: cc_version=2.1; cc_entrypoint=cli; cch=1a2b3;"),
        text("You are an agent.", **CACHED),
    ],
    "messages": [
        {
            "role": "user",
            "content": [text("<system-reminder>Today.</system-reminder>"), text("Fix it.")],
        },
        {
            "role": "assistant",
            "content": [{"type": "thinking", "thinking": "Look.", "signature": ""}, READ_CALL],
        },
        {"role": "user", "content": [RESULT]},
        {"role": "system", "content": "The user sent a new message."},
    ],
    "tools": [
        {
            "name": "read",
            "description": "Reads.",
            "input_schema": SCHEMA,
            "eager_input_streaming": True,
        },
        {
            "type": "web_search_20250305",
            "name": "web_search",
            "max_uses": 8,
            "allowed_domains": ["a.example"],
        },
    ],
    "metadata": {"user_id": "user_1"},
    "thinking": {"type": "adaptive"},
    "output_config": {"effort": "high"},
    "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
}
PATCH = {"type": "custom", "name": "apply_patch", "description": "Edits."}
GRAMMAR = {"type": "grammar", "syntax": "lark", "definition": "start: x"}
SEARCH = RESPONSES_TOOL | {"name": "search"}
CODEX = {
    "model": "demo",
    "instructions": "You are an agent.",
    "stream": True,
    "store": False,
    "input": [
        message("developer", "<permissions/>"),
        message("user", "<environment_context/>"),
        message("user", "Fix it."),
        {
            "type": "reasoning",
            "summary": [text("Look.", "summary_text")],
            "content": None,
            "encrypted_content": "x",
        },
        {
            "type": "function_call",
            "name": "read",
            "arguments": '{"path":"a.py"}',
            "call_id": "call_1",
        },
        {"type": "function_call_output", "call_id": "call_1", "output": "x = 1"},
        {
            "type": "custom_tool_call",
            "call_id": "call_2",
            "name": "apply_patch",
            "input": "*** Begin",
        },
        {"type": "custom_tool_call_output", "call_id": "call_2", "output": "Done."},
        message("developer", "Mode: plan."),
    ],
    "tools": [
        RESPONSES_TOOL,
        PATCH | {"format": GRAMMAR},
        {"type": "namespace", "name": "mcp__docs", "description": "Docs.", "tools": [SEARCH]},
        {
            "type": "tool_search",
            "execution": "client",
            "description": "Finds tools.",
            "parameters": {"type": "object"},
        },
        {"type": "web_search", "external_web_access": False},
    ],
    "tool_choice": "auto",
    "parallel_tool_calls": True,
    "reasoning": {"effort": "medium", "summary": "auto"},
    "include": ["reasoning.encrypted_content"],
    "prompt_cache_key": "k",
    "text": {"verbosity": "low"},
    "client_metadata": {"x-codex-installation-id": "1"},
}
CHAT = {
    "model": "demo",
    "stream": True,
    "stream_options": {"include_usage": True},
    "messages": [
        {"role": "system", "content": "You are an agent."},
        {"role": "user", "content": [{"type": "text", "text": "Fix it."}]},
    ],
    "tools": [CHAT_TOOL],
}
LIMIT = {"max_completion_tokens": 8192, "parallel_tool_calls": False}
AGENTS = {
    "Claude Code": ("v1/messages?beta=true", CLAUDE_CODE),
    "Codex": ("responses", CODEX),
    "opencode": ("chat/completions", CHAT | {"max_tokens": 8192, "temperature": 0.55, "top_p": 1}),
    "Zed": (
        "chat/completions",
        CHAT | LIMIT | {"stop": [], "prompt_cache_key": None, "reasoning_effort": None},
    ),
    "Continue": (
        "chat/completions",
        CHAT | {"tool_choice": "auto", "presence_penalty": 0.0, "stop": None},
    ),
    "aider": ("chat/completions", CHAT | {"tools": None, "temperature": 0}),
    "LangChain": ("chat/completions", CHAT | {"stream": False, "n": 1, "tool_choice": "auto"}),
    "OpenAI Agents": (
        "responses",
        {
            "model": "demo",
            "input": [{"role": "user", "content": "Fix it."}],
            "include": [],
            "tools": [RESPONSES_TOOL],
            "stream": True,
        },
    ),
}


SETTINGS = {
    "Claude Code": "claude_code.sh",
    "Codex": "codex.toml",
    "opencode": "opencode.json",
    "Zed": "zed.json",
    "Continue": "continue.yaml",
}
"""The file in examples/agents, which holds the address below which an agent asks."""


@pytest.mark.parametrize("agent", AGENTS)
def test_agents_are_answered_with_calls(scripted, agent):
    api, body = AGENTS[agent]
    scripted[1].texts = [[CALL]]
    base = "/v1"
    if agent in SETTINGS:
        settings = read_settings(SETTINGS[agent], scripted[0])
        (base,) = re.findall(rf"{scripted[0].url}([/\w]*)", settings)
        assert "demo" in settings
        if SETTINGS[agent].endswith(".json"):
            json.loads(settings)
    reply = ask(scripted[0], f"{base}/{api}", body)
    assert reply.status == 200, reply.body
    assert "Fix it." in scripted[1].prompt
    assert "web_search" not in scripted[1].prompt
    if body["stream"]:
        last = events_of(reply)[-1]
        assert (
            last.get("type") in ("message_stop", "response.completed")
            or last["usage"]["completion_tokens"]
        )
    assert b"a.py" in reply.body or not body["tools"]


def test_conversations_of_agents_become_one_prompt(scripted):
    """System messages join the nearest user turn;

    Claude Code's header, which varies, is dropped.
    """
    ask(scripted[0], "/v1/messages", CLAUDE_CODE)
    assert scripted[1].prompt == (
        "<tool_call> is how to call read\n<system>You are an agent."
        "<user><system-reminder>Today.</system-reminder>Fix it."
        '<assistant><tool_call>read {"path": "a.py"}</tool_call><tool>x = 1[image omitted]'
        "<user><system>\nThe user sent a new message.\n</system><assistant><think>"
    )
    ask(scripted[0], "/v1/responses", CODEX)
    tools = "".join(
        f"<tool_call> is how to call {name}\n"
        for name in ("read", "apply_patch", "mcp__docs__search")
    )
    assert scripted[1].prompt == (
        f"{tools}<system>You are an agent.\n\n<permissions/>"
        "<user><environment_context/><user>Fix it."
        '<assistant><tool_call>read {"path": "a.py"}</tool_call><tool>x = 1'
        '<assistant><tool_call>apply_patch {"input": "*** Begin"}</tool_call><tool>Done.'
        "<user><system>\nMode: plan.\n</system><assistant><think>"
    )
