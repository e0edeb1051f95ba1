"""Decoding with a grammar: the text is plain decoding's, and forced tokens are drafted."""

from __future__ import annotations

import re
from itertools import product
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.sample_utils import make_logits_processors

from helpers.families import make_family
from helpers.grammars import Stuck, ToyGrammar, decode_plainly, decode_rounds, start_rounds
from helpers.grids import pairs
from helpers.toys import make_follower, make_model, make_prompt, record_hidden_states

PROMPT = make_prompt(9)
COUNT = 60
SAMPLED = {"temp": 0.9, "top_p": 0.95, "seed": 4}
QUANTIZED = {"kv_bits": 8, "kv_group_size": 32, "quantized_kv_start": 20}
PENALTIES = make_logits_processors(repetition_penalty=1.3, logit_bias={3: 2.0})


def with_drafter(model: Any, script: str, width: int, **options: Any) -> tuple[list[int], Any]:
    """Returns (plain tokens with the grammar, a drafter that follows `script` on them)."""
    vocab = model(mx.array([[0]])).shape[-1]
    with record_hidden_states(model) as recorded:
        plain = decode_plainly(model, PROMPT, max_tokens=COUNT + 8, vocab=vocab, **options)
    return plain[:COUNT], make_follower(model, [*PROMPT, *plain], recorded, script, width)


@pytest.mark.parametrize(
    ("script", "plan", "context", "options"),
    pairs(
        ("right", "mixed"),
        ((1, 4), (3, 3), (3, 4, 9)),
        (None, False),
        ({}, SAMPLED, {"logits_processors": PENALTIES}),
    ),
)
def test_drafted_text_is_plain_decoding(
    script: str, plan: tuple[int, ...], context: bool | None, options: dict[str, Any]
):
    model = make_model()
    plain, drafter = with_drafter(model, script, plan[0], **options)
    rounds = decode_rounds(
        model, PROMPT, drafter, ToyGrammar(), COUNT, plan=plan, context=context, **options
    )
    assert [token for each in rounds for token in each.tokens][:COUNT] == plain
    assert any(len(each.path) > 1 and not each.from_context for each in rounds)
    plans = [each.plan for each in rounds if each.plan is not None]
    assert any(each.n_context > 0 for each in plans) is (context is None)
    assert context is None or not any(each.from_context for each in rounds)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        *product(("llama", "mamba2", "gemma3_text", "qwen3_next"), ({}, SAMPLED)),
        ("llama", QUANTIZED),
    ],
    ids=str,
)
def test_forced_tokens_need_no_drafter(name: str, options: dict[str, Any]):
    """Includes chain-only models and ring buffers."""
    model = make_model() if name == "llama" else make_family(name)
    vocab = model(mx.array([[0]])).shape[-1]
    plain = decode_plainly(model, PROMPT, max_tokens=COUNT, vocab=vocab, **options)
    rounds = decode_rounds(model, PROMPT, None, ToyGrammar(vocab), COUNT, **options)
    assert [token for each in rounds for token in each.tokens][:COUNT] == plain
    # 3 of 8 tokens are forced, in one round each.
    assert sum(len(each.path) > 3 for each in rounds) >= COUNT // 8 - 2


@pytest.mark.parametrize("name", ["mamba2", "gemma3_text", "qwen2"])
def test_drafter_and_grammar_with_other_caches(name: str):
    model = make_family(name)
    plan = (1, 4) if name == "mamba2" else (2, 3)
    plain, drafter = with_drafter(model, "mixed", plan[0])
    grammar = ToyGrammar(model(mx.array([[0]])).shape[-1])
    rounds = decode_rounds(model, PROMPT, drafter, grammar, COUNT, plan=plan)
    assert [token for each in rounds for token in each.tokens][:COUNT] == plain
    assert {each.from_context for each in rounds if len(each.path) > 1} == {True, False}


def test_plain_steps_follow_the_grammar():
    model = make_model()
    rounds = decode_rounds(model, PROMPT, None, ToyGrammar(), COUNT, plan="off")
    expected = decode_plainly(model, PROMPT, max_tokens=COUNT)
    assert [token for each in rounds for token in each.tokens] == expected
    assert all(each.plan is None for each in rounds)


@pytest.mark.parametrize("stuck_at", range(18, 27, 2))
def test_a_grammar_without_a_next_token_raises(stuck_at: int):
    """All tokens before that point are still produced."""
    model = make_model()
    made = []
    plain, drafter = with_drafter(model, "right", 3)
    grammar = ToyGrammar(stuck_at=stuck_at)
    with pytest.raises(Stuck):
        for each in start_rounds(model, PROMPT, drafter, grammar, plan=(3, 3)):
            made.append(each.token)
    assert made == plain[:stuck_at]


def test_the_host_reads_the_tree_once_the_forward_is_enqueued(
    monkeypatch: pytest.MonkeyPatch,
):
    """Masks are computed during the forward, after a read that waits only for the draft."""
    model = make_model()
    events = []
    _, drafter = with_drafter(model, "right", 3)
    for owner, name in ((mx, "async_eval"), (mx.array, "tolist"), (ToyGrammar, "compute_mask")):
        real = getattr(owner, name)

        def call(*args, real=real, name=name, **keywords):
            events.append(name)
            return real(*args, **keywords)

        monkeypatch.setattr(owner, name, call)
    decode_rounds(model, PROMPT, drafter, ToyGrammar(), 12, plan=(3, 3), context=False)
    # Tree, logits; its tokens and parents; round, next draft, read.
    letters = "".join(each[0] for each in events)
    assert re.search("aac?ttc*aat", letters), events
