"""Memory budgets of a session: the longest conversation that fits, and what happens there."""

import mlx.core as mx
import pytest
from mlx_lm.generate import maybe_quantize_kv_cache
from mlx_lm.models.cache import make_prompt_cache

from helpers.refusals import refusal
from helpers.sessions import assert_fresh, make_model, make_session, plain_session
from mlx_redrafter.decoding.cache_bytes import compute_cache_bytes
from mlx_redrafter.decoding.options import Options
from mlx_redrafter.machine import memory

pytestmark = pytest.mark.filterwarnings("ignore:the drafter has guessed no token right")

SPARE = 320
"""Cache rows that a session reserves for allocations and trees."""


def budget(tokens: int, family: str = "qwen3", **options) -> int:
    """Bytes for a conversation of `tokens` tokens."""
    size = compute_cache_bytes(make_model(family), Options(**options))
    return round(size.fixed + size.per_token * (tokens + SPARE))


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("qwen3", {}),
        ("qwen3", {"max_kv_size": 300}),
        ("qwen3", {"kv_bits": 4, "kv_group_size": 32}),
        *((family, {}) for family in ("gemma3_text", "falcon_h1", "deepseek_v32", "mamba")),
    ],
)
def test_the_longest_conversation_fills_the_budget(family, options):
    model = make_model(family)
    size = compute_cache_bytes(
        model, Options(prefill_step_size=64, quantized_kv_start=128, **options)
    )
    cache = make_prompt_cache(model, options.get("max_kv_size"))
    for _ in range(16):
        model(mx.ones((1, 64), mx.int32), cache=cache)  # lazy: only the shapes are needed
        if "kv_bits" in options:
            maybe_quantize_kv_cache(cache, 128, 32, options["kv_bits"])
    taken = sum(c.nbytes for c in cache)
    if size.per_token:
        assert size.count_tokens(taken + size.fixed) >= 900
        assert size.count_tokens(taken - size.quantized_per_token) < 1024
    else:
        assert taken <= size.fixed
        assert size.count_tokens(size.fixed) > 10**9


def test_a_turn_without_room_is_refused_before_prefill():
    session = plain_session(max_tokens=9, memory_budget=budget(192))
    session.send("hello")
    before = session.tokens
    with refusal("the conversation would be"):
        session.send("x" * 300)
    assert session.tokens == before
    answer = session.send("more", max_tokens=-1)
    assert answer.finish_reason == "length"
    assert len(session.tokens) == 192


@pytest.mark.parametrize(
    ("max_tokens", "kept"), [(5, "abcd"), (6, "bcd"), (54, "bcd"), (55, "cd"), (-1, "cd")]
)
def test_only_as_much_is_trimmed_as_the_answer_needs(max_tokens, kept):
    session = plain_session(max_tokens=9, memory_budget=budget(192), when_full="trim")
    for letter in "abc":
        session.send(letter * 40)
    assert len(session.tokens) == 3 * 49
    answer = session.send("d" * 40, max_tokens=max_tokens)
    assert [each["content"][0] for each in session.messages if each["role"] == "user"] == list(kept)
    assert len(answer.tokens) == (max_tokens if max_tokens > 0 else 192 - 49 - 40)
    assert_fresh(session, answer)


def test_the_system_message_is_never_trimmed():
    session = make_session(memory_budget=budget(192), when_full="trim")
    session.send([{"role": "system", "content": "be brief"}, {"role": "user", "content": "a" * 40}])
    for letter in "bcdefgh":
        session.send(letter * 40)
        assert len(session.tokens) <= 192
    assert session.messages[0] == {"role": "system", "content": "be brief"}
    assert session.messages[1]["content"] not in ("a" * 40, "b" * 40)
    assert session.messages[-2]["content"] == "h" * 40
    with refusal("more than its budget"):
        session.send("x" * 300)


def test_free_memory_is_the_default_budget(monkeypatch):
    session = plain_session(max_tokens=4)
    monkeypatch.setattr("mlx_redrafter.session.session.get_free_bytes", lambda: budget(100))
    for _ in range(8):  # the session's own cache counts as available
        session.send("a" * 30)
    assert len(session.tokens) == 8 * 34
    with refusal("more than the machine has left"):
        session.send("a" * 400)


def test_kept_prompt_caches_may_have_half_of_the_free_memory(monkeypatch):
    for free, expected in ((100 << 30, 50 << 30), (1 << 30, 1 << 30)):
        usable = free + mx.get_active_memory()
        monkeypatch.setattr(memory, "get_usable_bytes", lambda usable=usable: usable)
        assert memory.get_prompt_cache_bytes() == pytest.approx(expected, rel=1e-3)
