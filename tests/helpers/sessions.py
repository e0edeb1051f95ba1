"""Sessions over toy models, and fresh runs to compare them with."""

import functools

import mlx.nn as nn

from helpers.families import make_family
from helpers.toys import make_tokenizer
from mlx_redrafter import Answer, Session, generate_step
from mlx_redrafter.drafters.recurrent import Drafter, DrafterArgs
from mlx_redrafter.target.model_parts import get_model_sizes

CHAT = (
    "{% for m in messages %}{{ 'S' if m.role == 'system' else 'U' if m.role == 'user' else 'A' }}"
    "{{ m.content }}{{ 'z' }}{% endfor %}{% if add_generation_prompt %}A{% endif %}"
)
END = 26
"""Id of z, which ends each message of `CHAT`."""

FAMILIES = ["qwen3", "gemma3_text", "mamba", "qwen3_5"]
"""KV caches, ring buffers, recurrent states, and KV caches with states."""


@functools.cache
def make_model(family: str) -> nn.Module:
    """A random model, shared between tests."""
    return make_family(family)


def make_drafter(model: nn.Module, **more) -> Drafter:
    """A random, unevaluated drafter; `more` goes to its arguments."""
    return Drafter(DrafterArgs(*get_model_sizes(model), exit_dim=16, num_draft_layers=1, **more))


def chat_tokenizer(template: str = CHAT):
    """One token per letter, with a chat template."""
    tokenizer = make_tokenizer([END], vocab=53)
    tokenizer._tokenizer.chat_template = template
    tokenizer.has_chat_template = True
    return tokenizer


def make_session(family: str = "qwen3", *, drafter: bool = True, **options) -> Session:
    """A session over a toy model with a random drafter."""
    model = make_model(family)
    options = {"max_tokens": 9, "beam_width": 1, "draft_depth": 2} | options
    return Session(model, chat_tokenizer(), make_drafter(model) if drafter else None, **options)


def plain_session(family: str = "qwen3", **options) -> Session:
    """A session without template and drafter; a token is a letter."""
    return Session(make_model(family), make_tokenizer(vocab=53), **options)


def assert_fresh(session: Session, answer: Answer, **options):
    """Asserts that the last answer is plain decoding's, from an empty cache and the same tokens."""
    assert answer.tokens
    assert session.tokens[-len(answer.tokens) :] == answer.tokens
    read = session.tokens[: -len(answer.tokens)]
    steps = generate_step(
        read, session.model, max_tokens=len(answer.tokens), context=False, **options
    )
    assert [token for token, _, _ in steps] == answer.tokens
