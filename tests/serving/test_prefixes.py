"""Prefixes that later prompts share: where they end, and what a hybrid model reuses."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from helpers.families import make_family
from helpers.servers import Running, ask, parse_flags, start_server
from helpers.sessions import chat_tokenizer as letter_tokenizer
from mlx_redrafter.decoding.options import Options
from mlx_redrafter.serving.formats.completion import Service
from mlx_redrafter.serving.formats.prefixes import count_shared, list_piece_ends
from mlx_redrafter.serving.scheduling.worker import Worker
from mlx_redrafter.text.chat_template import render

LAWS = " ".join(f"Law {i}: keep {i * 7 % 101}." for i in range(40))
CALL = {"type": "function", "function": {"name": "read", "arguments": {"path": "a"}}}
SYSTEM = {"role": "system", "content": LAWS}
QUESTION = {"role": "user", "content": f"What of {LAWS[:200]}"}
AFTER_A_CALL = [
    {"role": "assistant", "content": "I look.", "tool_calls": [CALL]},
    {"role": "tool", "content": LAWS},
]

THINKING = """{% set ns = namespace(last=0) %}{% for m in messages if m.role == 'user' %}
{%- set ns.last = messages.index(m) %}{% endfor %}{% for m in messages %}<{{ m.role }}>
{%- if m.reasoning_content and loop.index0 > ns.last %}<think>
{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}
{% endfor %}{% if add_generation_prompt %}<assistant><think>
{% endif %}"""
"""Shows reasoning only for answers after the last user message."""


def find(tokenizer, messages: list[Any], template: str, **more) -> tuple[list[str], str]:
    """Returns (texts of the shared prefixes, the whole text)."""
    args = {"chat_template": template}
    text = render(tokenizer, messages, args, **more)
    prompt = tokenizer.encode(text, add_special_tokens=False)
    whole = messages[:-1] if more.get("prefilled") else messages
    lengths = list_piece_ends(tokenizer, prompt, text, whole, args)
    return [tokenizer.decode(prompt[:length]) for length in lengths], text


@pytest.mark.parametrize("more", [[], AFTER_A_CALL], ids=["a first prompt", "a tool result"])
def test_everything_before_the_reasoning_is_shared(chat_tokenizer, more):
    found, text = find(chat_tokenizer, [SYSTEM, QUESTION, *more], THINKING)
    assert found == [f"<system>{LAWS}\n<user>", text.removesuffix("<think>\n")]


def test_dropped_reasoning_shortens_the_shared_prefix(chat_tokenizer):
    call, result = AFTER_A_CALL
    found, text = find(
        chat_tokenizer, [SYSTEM, QUESTION, call | {"reasoning_content": "Where?"}, result], THINKING
    )
    first, *_, last = text.split("<think>\n")
    assert found[:2] == [f"<system>{LAWS}\n<user>", first]
    assert last == ""
    assert text.startswith(found[2])
    assert len(text) - len(found[2]) <= len("<think>\n")


@pytest.mark.parametrize("has_tools", [True, False])
def test_calls_may_begin_with_different_tokens_than_answers(chat_tokenizer, has_tools):
    # 8 spaces are one token.
    shown = "<{{ m.role }}>\n    {{ m.content }}{{ '    <tool_call>' if m.tool_calls }}\n"
    begin = "{% if add_generation_prompt %}<assistant>\n    <think>{% endif %}"
    args = {"chat_template": f"{{% for m in messages %}}{shown}{{% endfor %}}{begin}"}
    args |= {"tools": [{"type": "function", "function": CALL["function"]}]} if has_tools else {}

    def encode(*more):
        text = render(chat_tokenizer, [*messages, *more], args)
        return text, chat_tokenizer.encode(text, add_special_tokens=False)

    messages = [SYSTEM, QUESTION]
    text, prompt = encode()
    lengths = list_piece_ends(chat_tokenizer, prompt, text, messages, args)
    answer = {"role": "assistant", "content": "It is."}
    call = AFTER_A_CALL[0] | {"content": ""}
    for following, is_shared in ([answer, QUESTION], True), ([call, AFTER_A_CALL[1]], has_tools):
        later = encode(*following)[1]
        assert (max(n for n in lengths if later[:n] == prompt[:n]) > len(prompt) - 8) is is_shared


def test_a_prefilled_answer_is_not_shared(chat_tokenizer):
    begun = {"role": "assistant", "content": "It is"}
    found, text = find(chat_tokenizer, [SYSTEM, QUESTION, begun], THINKING, prefilled=True)
    assert found[:2] == [f"<system>{LAWS}\n<user>", text.removesuffix("It is")]


def test_the_whole_prompt_is_kept_if_the_template_fails(chat_tokenizer):
    fixed = (
        "{% if messages | length > 2 %}{{ raise_exception('no') }}{% endif %}"
        + "{{ messages[-1].content }}"
    )
    found, text = find(chat_tokenizer, [SYSTEM, QUESTION], fixed)
    assert found == [
        chat_tokenizer.decode(chat_tokenizer.encode(text, add_special_tokens=False)[:-1])
    ]


@pytest.mark.parametrize("seed", range(6))
def test_shared_tokens_of_long_texts_are_counted(chat_tokenizer, seed):
    choose = random.Random(seed)
    words = [
        choose.choice(["law", " keeps", "\n\n", "  ", "1234", "é", "\n", " the"])
        for _ in range(4000)
    ]
    text = "".join(words)
    size = choose.randrange(6000, 9000)
    other = text[:size] + choose.choice(["x", "\n", "  8"]) * 3 + text
    expected = 0
    prompt = chat_tokenizer.encode(text, add_special_tokens=False)
    for ours, theirs in zip(
        prompt, chat_tokenizer.encode(other, add_special_tokens=False), strict=False
    ):
        if ours != theirs:
            break
        expected += 1
    assert count_shared(chat_tokenizer, prompt, text, other) == expected > 0


@contextmanager
def serving(**settings) -> Iterator[Running]:
    """A server over a random hybrid model, one token per letter.

    Generation prompts add a T that history lacks.
    """
    tokenizer = letter_tokenizer(
        "{% for m in messages %}{{ m.role[0] | upper }}{{ m.content }}z{% endfor %}"
        "{% if add_generation_prompt %}AT{% endif %}"
    )
    worker = Worker(
        make_family("qwen3_5"), tokenizer, options=Options(), context_length=4096, **settings
    )
    worker.start()
    with start_server(Service(worker, tokenizer, parse_flags(), "hybrid", None)) as server:
        yield server


@pytest.mark.parametrize(
    "sampling", [{"temperature": 0}, {"temperature": 0.9, "seed": 3}], ids=["greedy", "seed"]
)
def test_a_hybrid_model_prefills_only_new_text(sampling):
    system = {"role": "system", "content": "keep the laws " * 5}
    asked = [[system, {"role": "user", "content": "which law holds of all that are kept"}]]

    def get(server, messages):
        reply = ask(
            server, "/v1/chat/completions", {"messages": messages, "max_tokens": 12} | sampling
        )
        assert reply.status == 200, reply
        usage = reply.json["usage"]
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        return reply.json["choices"][0]["message"]["content"], usage["prompt_tokens"], cached

    with serving() as server:
        answers = [get(server, asked[0])]
        for turn in range(5):
            question = {"role": "user", "content": f"and what of number {turn} then"}
            asked.append([*asked[-1], {"role": "assistant", "content": answers[-1][0]}, question])
            answers.append(get(server, asked[-1]))
        asked.append([system, {"role": "user", "content": "name a prime"}])
        answers.append(get(server, asked[-1]))
    lengths = [length for _, length, _ in answers]
    shared = len("S") + len(system["content"]) + len("zU")
    assert [cached for _, _, cached in answers] == [
        0,
        *(length - 1 for length in lengths[:5]),
        shared,
    ]
    with serving(prompt_cache_bytes=0) as server:
        assert [get(server, messages)[0] for messages in asked] == [text for text, _, _ in answers]
