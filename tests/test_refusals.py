"""What decoding refuses, in one line and before the prompt is read."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx_lm.models import llama
from mlx_lm.models.cache import KVCache
from small import randomised, small_drafter, small_llama

from mlx_redrafter.errors import CheckpointError, RedrafterError, UnsupportedModelError
from mlx_redrafter.generate import generate_step

PROMPT = [1, 2, 3]


def decoded(model: nn.Module, *, drafted: bool = True, prompt: Any = PROMPT, **options: Any) -> list[int]:
    """Four tokens by a small target."""
    drafter = small_drafter() if drafted else None
    return [token for token, _, _ in generate_step(prompt, model, drafter, max_tokens=4, **options)]


def refused(call: Callable[..., Any], pattern: str, kind: type[Exception] = RedrafterError) -> None:
    """Asserts that `call` raises `kind` with one line, `pattern`, before any progress with the prompt is reported."""
    progress: list[tuple[int, int]] = []
    with pytest.raises(kind) as raised:
        call(prompt_progress_callback=lambda done, total: progress.append((done, total)))
    message = str(raised.value)
    assert "\n" not in message and re.fullmatch(pattern, message), message
    assert progress == []


@pytest.mark.parametrize("drafted", [True, False])
def test_sound_settings_are_served_and_their_progress_is_reported(drafted: bool) -> None:
    # Negative control for everything below.
    progress: list[tuple[int, int]] = []
    tokens = decoded(
        small_llama(), drafted=drafted, prompt_progress_callback=lambda done, total: progress.append((done, total))
    )
    assert len(tokens) == 4 and progress[-1] == (3, 3)


@pytest.mark.parametrize(
    ("options", "pattern"),
    [
        ({"beam_width": 0}, "beam_width must be from 1 to the vocabulary's 64, got 0"),
        ({"beam_width": 65}, "beam_width must be from 1 to the vocabulary's 64, got 65"),
        ({"draft_depth": 0}, "draft_depth must be from 1 to 256, got 0"),
        ({"tree_size": 1}, r"tree_size counts the root and must be from 2 to .* = 4, got 1"),
        ({"beam_width": 3, "draft_depth": 2, "tree_size": 8}, r"tree_size .* from 2 to .* = 7, got 8"),
    ],
)
def test_an_impossible_beam_is_refused(options: dict[str, Any], pattern: str) -> None:
    refused(lambda **more: decoded(small_llama(), **options, **more), pattern)


@pytest.mark.parametrize("drafted", [True, False])
@pytest.mark.parametrize(
    ("options", "pattern"),
    [
        ({"temp": -0.1}, "temp must be at least 0, got -0.1"),
        ({"temp": float("nan")}, "temp must be at least 0, got nan"),
        ({"top_p": 2}, "top_p must be from 0 to 1, got 2"),
        ({"min_p": -1}, "min_p must be from 0 to 1, got -1"),
        ({"top_k": -1}, "top_k must be at least 0, got -1"),
        ({"xtc_probability": 1.5}, "xtc_probability must be from 0 to 1, got 1.5"),
        ({"xtc_threshold": 0.6}, "xtc_threshold must be from 0 to 0.5, got 0.6"),
        ({"kv_bits": 4, "kv_group_size": 16}, "kv_group_size must be .*, got 16"),
        ({"kv_bits": 7}, "kv_bits must be .*, got 7"),
        ({"prefill_step_size": 0}, "prefill_step_size must be at least 1, got 0"),
        ({"max_kv_size": 7}, "max_kv_size must be at least 8, got 7"),
        (
            {"sampler": lambda logprobs: mx.argmax(logprobs, axis=-1), "temp": 0.5},
            r"give either a sampler or temp, got both \(temp=0.5\)",
        ),
    ],
)
def test_a_setting_out_of_its_range_is_refused(options: dict[str, Any], pattern: str, drafted: bool) -> None:
    refused(lambda **more: decoded(small_llama(), drafted=drafted, **options, **more), pattern)


@pytest.mark.parametrize("drafted", [True, False])
def test_a_negative_number_of_tokens_other_than_no_limit_is_refused(drafted: bool) -> None:
    drafter = small_drafter() if drafted else None
    refused(
        lambda **more: next(generate_step(PROMPT, small_llama(), drafter, max_tokens=-2, **more)),
        r"max_tokens must be -1 \(no limit\) or at least 0, got -2",
    )


@pytest.mark.parametrize("drafted", [True, False])
@pytest.mark.parametrize(
    ("prompt", "pattern"),
    [
        ([], "the prompt is empty: expected at least one token"),
        (mx.zeros((0,), mx.int32), "the prompt is empty: expected at least one token"),
        ([1.5], r"the prompt must be one sequence of token ids, got shape \(1,\) of mlx.core.float32"),
        (mx.array([1.0, 2.0]), r"the prompt must be .*, got shape \(2,\) of mlx.core.float32"),
        ([True, False], r"the prompt must be .*, got shape \(2,\) of mlx.core.bool"),
        ([[1, 2]], r"the prompt must be .*, got shape \(1, 2\) of mlx.core.int32"),
        (mx.array([[1], [2]]), r"the prompt must be .*, got shape \(2, 1\) of mlx.core.int32"),
        (mx.array(3), r"the prompt must be .*, got shape \(\) of mlx.core.int32"),
        ("the cat", "the prompt must be one sequence of token ids, got str 'the cat'"),
        (["the", "cat"], r"the prompt must be .*, got list \['the', 'cat'\]"),
        ([[1], [1, 2]], "the prompt must be .*, got parts of unequal length"),
    ],
)
def test_a_prompt_that_is_no_sequence_of_ids_is_refused(prompt: Any, pattern: str, drafted: bool) -> None:
    refused(lambda **more: decoded(small_llama(), drafted=drafted, prompt=prompt, **more), pattern)


def test_a_numpy_prompt_is_served_as_a_list_is() -> None:
    assert decoded(small_llama(), prompt=np.array(PROMPT)) == decoded(small_llama())


class Foreign(KVCache):
    """A cache that nobody knows."""


def make_foreign() -> nn.Module:
    model = small_llama()
    model.make_cache = lambda: [Foreign() for _ in model.layers]
    return model


class Nameless(nn.Module):
    """A model that keeps its tokens where no model of mlx-lm does."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Linear(64, 64)
        self.layers = [nn.Linear(64, 64)]

    def __call__(self, tokens: mx.array, cache: Any = None) -> mx.array:
        return self.layers[0](self.rows(mx.eye(64)[tokens]))


UNSUPPORTED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "no table": (
        Nameless,
        "cannot draft for this model: expected model.embed_tokens as in mlx-lm's language models, .*Nameless has none",
    ),
    "another cache": (make_foreign, r"cannot draft for llama: its cache \(Foreign\) is not known"),
}


@pytest.mark.parametrize("beam_width", [1, 4])
@pytest.mark.parametrize("name", UNSUPPORTED)
def test_a_model_that_cannot_be_drafted_for_is_refused_before_its_prompt_is_read(name: str, beam_width: int) -> None:
    make, pattern = UNSUPPORTED[name]
    refused(lambda **more: decoded(make(), beam_width=beam_width, **more), pattern, UnsupportedModelError)


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_a_model_that_cannot_be_drafted_for_is_served_plainly(name: str) -> None:
    make, _ = UNSUPPORTED[name]
    model = randomised(make(), 0)
    context = list(PROMPT)
    for token in decoded(model, drafted=False):
        seen = context[-1:] if name == "no table" else context
        assert token == mx.argmax(model(mx.array([seen]))[0, -1]).item()
        context.append(token)


class WithoutRopeModule(llama.Attention):
    """Attention whose positions come from a function of its own."""

    def __init__(self, attention: llama.Attention, rope: Callable[..., mx.array]) -> None:
        nn.Module.__init__(self)
        dict.update(self, {name: child for name, child in attention.items() if name != "rope"})
        for name in ("n_heads", "n_kv_heads", "head_dim", "scale"):
            setattr(self, name, getattr(attention, name))
        self.rope = rope


def test_a_llama_without_rope_modules_takes_trees_all_the_same() -> None:
    model = small_llama()
    expected = decoded(model, beam_width=4)
    for layer in model.layers:
        rope = layer.self_attn.rope
        layer.self_attn = WithoutRopeModule(layer.self_attn, lambda x, offset=0, rope=rope: rope(x, offset))
    assert decoded(model, beam_width=4) == decoded(model, drafted=False) == expected


def test_a_llama_that_takes_no_positions_from_its_cache_takes_chains_and_it_is_said() -> None:
    model = small_llama()
    for layer in model.layers:
        layer.self_attn = WithoutRopeModule(layer.self_attn, lambda x, offset=0: x)
    reason = "drafting chains, not trees, for llama: its positions do not come from its cache"
    with pytest.warns(UserWarning, match=reason) as caught:
        tokens = decoded(model, beam_width=4)
    assert [each.filename for each in caught] == [__file__], "where the caller's own line is"
    assert tokens == decoded(model, drafted=False)


@pytest.mark.parametrize("beam_width", [1, 4])
def test_a_prompt_cache_of_another_kind_is_refused(beam_width: int) -> None:
    refused(
        lambda **more: decoded(small_llama(), beam_width=beam_width, prompt_cache=[KVCache(), Foreign()], **more),
        "the prompt cache must be of mlx-lm's own caches, got Foreign",
    )


@pytest.mark.parametrize(
    ("sizes", "pattern"),
    [
        ({"hidden": 48}, "the drafter expects hidden size 32, the target has 48"),
        ({"vocab": 65}, "the drafter expects vocabulary size 64, the target has 65"),
    ],
)
def test_a_drafter_of_another_size_is_refused(sizes: dict[str, int], pattern: str) -> None:
    refused(lambda **more: decoded(small_llama(**sizes), **more), pattern, CheckpointError)


def test_settings_are_checked_at_the_first_token_and_not_when_the_generator_is_made() -> None:
    steps: Iterator[Any] = generate_step(PROMPT, small_llama(), small_drafter(), temp=-1)
    with pytest.raises(RedrafterError):
        next(steps)
