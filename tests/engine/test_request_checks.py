"""What decoding refuses, in one line and before the prompt is read; and some odd requests that it serves."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from fractions import Fraction
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx_lm.models import llama
from mlx_lm.models.cache import KVCache, make_prompt_cache
from mlx_lm.tuner.lora import LoRAEmbedding
from small import randomised, small_drafter, small_llama

from mlx_redrafter.errors import CheckpointError, RedrafterError, UnsupportedModelError
from mlx_redrafter.generate import generate_step

PROMPT = [1, 2, 3]
XTC = {"temp": 0.8, "xtc_probability": 0.5}
pytestmark = pytest.mark.filterwarnings("ignore:the drafter has guessed no token right")


def decode(model: nn.Module, *, drafted: bool = True, prompt: Any = PROMPT, **options: Any) -> list[int]:
    """Four tokens by a small target."""
    drafter = small_drafter() if drafted else None
    return [token for token, _, _ in generate_step(prompt, model, drafter, max_tokens=4, **options)]


def decode_small(drafted: bool, **options: Any) -> list[int]:
    return decode(small_llama(), drafted=drafted, **options)


def refused(call: Callable[..., Any], pattern: str, kind: type[Exception] = RedrafterError) -> None:
    """Asserts that `call` raises `kind` with one line, `pattern`, before any progress with the prompt is reported."""
    progress: list[tuple[int, int]] = []
    with pytest.raises(kind) as raised:
        call(prompt_progress_callback=lambda done, total: progress.append((done, total)))
    message = str(raised.value)
    assert "\n" not in message and re.fullmatch(pattern, message), message
    assert progress == []


@pytest.mark.parametrize("drafted", [True, False])
def test_good_options_are_served_with_progress(drafted: bool) -> None:
    # Negative control for everything below.
    progress: list[tuple[int, int]] = []
    tokens = decode(
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
def test_impossible_plans_are_refused(options: dict[str, Any], pattern: str) -> None:
    refused(lambda **more: decode(small_llama(), **options, **more), pattern)


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
def test_options_out_of_range_are_refused(options: dict[str, Any], pattern: str, drafted: bool) -> None:
    refused(lambda **more: decode_small(drafted, **options, **more), pattern)


@pytest.mark.parametrize("drafted", [True, False])
def test_negative_max_tokens_but_minus_one_are_refused(drafted: bool) -> None:
    drafter = small_drafter() if drafted else None
    refused(
        lambda **more: next(generate_step(PROMPT, small_llama(), drafter, max_tokens=-2, **more)),
        r"max_tokens must be -1 \(no limit\) or at least 1, got -2",
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
        ([[1, 2]], r"the prompt must be .*, got shape \(1, 2\) of mlx.core.int64"),
        (mx.array([[1], [2]]), r"the prompt must be .*, got shape \(2, 1\) of mlx.core.int32"),
        (mx.array(3), r"the prompt must be .*, got shape \(\) of mlx.core.int32"),
        ("the cat", "the prompt must be one sequence of token ids, got str 'the cat'"),
        (["the", "cat"], r"the prompt must be .*, got \['the', 'cat'\]"),
        ([[1], [1, 2]], r"the prompt must be .*, got \[\[1\], \[1, 2\]\]"),
    ],
)
def test_prompts_that_are_not_token_ids_are_refused(prompt: Any, pattern: str, drafted: bool) -> None:
    refused(lambda **more: decode_small(drafted, prompt=prompt, **more), pattern)


def test_numpy_prompts_are_served() -> None:
    assert decode(small_llama(), prompt=np.array(PROMPT)) == decode(small_llama())


class Foreign(KVCache):
    """A cache of an unknown type."""


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
def test_models_that_cannot_be_drafted_for_are_refused(name: str, beam_width: int) -> None:
    make, pattern = UNSUPPORTED[name]
    refused(lambda **more: decode(make(), beam_width=beam_width, **more), pattern, UnsupportedModelError)


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_models_that_cannot_be_drafted_for_decode_plainly(name: str) -> None:
    make, _ = UNSUPPORTED[name]
    model = randomised(make(), 0)
    context = list(PROMPT)
    for token in decode(model, drafted=False):
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


def test_a_llama_without_rope_modules_takes_trees() -> None:
    model = small_llama()
    expected = decode(model, beam_width=4)
    for layer in model.layers:
        rope = layer.self_attn.rope
        layer.self_attn = WithoutRopeModule(layer.self_attn, lambda x, offset=0, rope=rope: rope(x, offset))
    assert decode(model, beam_width=4) == decode(model, drafted=False) == expected


def test_a_llama_without_cache_positions_takes_chains_with_a_warning() -> None:
    model = small_llama()
    for layer in model.layers:
        layer.self_attn = WithoutRopeModule(layer.self_attn, lambda x, offset=0: x)
    reason = "drafting chains, not trees, for llama: its positions do not come from its cache"
    with pytest.warns(UserWarning, match=reason) as caught:
        tokens = decode(model, beam_width=4)
    assert [each.filename for each in caught] == [__file__], "where the caller's own line is"
    assert tokens == decode(model, drafted=False)


@pytest.mark.parametrize("beam_width", [1, 4])
def test_unknown_prompt_caches_are_refused(beam_width: int) -> None:
    refused(
        lambda **more: decode(small_llama(), beam_width=beam_width, prompt_cache=[KVCache(), Foreign()], **more),
        "the prompt cache must be of mlx-lm's own caches, got Foreign",
    )


@pytest.mark.parametrize(
    ("sizes", "pattern"),
    [
        ({"hidden": 48}, "the drafter expects hidden size 32, the target has 48"),
        ({"vocab": 65}, "the drafter expects vocabulary size 64, the target has 65"),
    ],
)
def test_drafters_of_another_size_are_refused(sizes: dict[str, int], pattern: str) -> None:
    refused(lambda **more: decode(small_llama(**sizes), **more), pattern, CheckpointError)


def test_options_are_checked_at_the_first_token() -> None:
    steps: Iterator[Any] = generate_step(PROMPT, small_llama(), small_drafter(), temp=-1)
    with pytest.raises(RedrafterError):
        next(steps)


@pytest.mark.parametrize("drafted", [False, True])
@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"temp": 1.0, "top_k": 64}, "top_k must be below the vocabulary's 64, got 64"),
        ({"temp": 1.0, "min_p": 0.1, "min_tokens_to_keep": 65}, "min_tokens_to_keep must be"),
        ({"prompt": [2**32 + 5]}, "token ids, got 4294967301"),
        ({"prompt": mx.array([2**32 - 1], mx.uint32)}, "token ids, got 4294967295"),
        ({"prompt": [-(2**40)]}, "token ids, got -?1099511627776"),
        ({"prompt": mx.array([5 - 2**32], mx.int64)}, "token ids, got -?4294967291"),
        ({"prompt": [64]}, "token ids must be from 0 to 63, got 64"),
        ({"prompt": [-1]}, "token ids must be from 0 to 63, got -1"),
        ({"prompt": None}, "token ids, got NoneType"),
        ({"prompt": b"abc"}, "token ids, got bytes"),
        ({"temp": float("inf")}, "temp must be 0, or from"),
        ({"temp": 1e-40}, "temp must be 0, or from"),
        ({"temp": None}, "temp must be at least 0, got None"),
        ({"temp": "1"}, "temp must be at least 0, got '1'"),
        ({"seed": 1.5}, "seed must be an integer, got 1.5"),
        ({"logits_processors": lambda history, logits: logits}, "logits_processors must be a list"),
        ({"sampler": lambda x: x.argmax(-1), "top_k": 3}, "either a sampler or top_k"),
        ({"sampler": 5}, "sampler must be a function, got int"),
        ({"logits_processors": 5}, "logits_processors must be a list of functions, got 5"),
        ({"logits_processors": [None]}, r"logits_processors must be a list of functions, got \[None\]"),
        ({"prompt_progress_callback": 5}, "prompt_progress_callback must be a function, got 5"),
        ({**XTC, "xtc_special_tokens": "ab"}, "xtc_special_tokens must be token ids, got 'ab'"),
        ({**XTC, "xtc_special_tokens": [64]}, "xtc_special_tokens must be token ids from 0 to 63, got 64"),
        ({**XTC, "xtc_special_tokens": [10**20]}, "xtc_special_tokens must be token ids from 0 to 63, got 1000"),
        ({"kv_bits": 8, "kv_group_size": 64, "quantized_kv_start": 0}, "kv_group_size must divide the head size 16"),
    ],
)
def test_requests_are_refused_before_the_prompt_is_read(drafted: bool, options: dict[str, Any], reason: str) -> None:
    cache = make_prompt_cache(small_llama())
    with pytest.raises(RedrafterError, match=reason) as raised:
        decode_small(drafted, **options, prompt_cache=cache)
    assert "\n" not in str(raised.value)
    assert cache[0].offset == 0
    assert mx.random.uniform(shape=(2,)).tolist(), "mlx's random state is sound"


@pytest.mark.parametrize("drafted", [False, True])
def test_caches_of_another_depth_are_refused(drafted: bool) -> None:
    cache = make_prompt_cache(small_llama())
    for wrong in (cache[:1], cache * 2):
        with pytest.raises(RedrafterError, match="prompt cache must have 2 layers as the model has, got"):
            decode_small(drafted, prompt_cache=wrong)


def test_tree_size_is_checked_with_processors_too() -> None:
    with pytest.raises(RedrafterError, match="tree_size"):
        decode(small_llama(), beam_width=2, tree_size=10**6, logits_processors=[lambda history, logits: logits])


def test_numpy_integers_are_integers() -> None:
    assert decode_small(True, seed=np.int64(3), beam_width=np.int64(2), temp=1.0) == decode(
        small_llama(), drafted=False, seed=3, temp=1.0
    )


@pytest.mark.parametrize("drafted", [False, True])
@pytest.mark.parametrize(
    ("given", "plain"),
    [
        ({"temp": 1.0, "top_k": np.int64(5)}, {"temp": 1.0, "top_k": 5}),
        (
            {"temp": np.float64(1), "min_p": np.float32(0.25), "min_tokens_to_keep": np.int64(2)},
            {"temp": 1.0, "min_p": 0.25, "min_tokens_to_keep": 2},
        ),
        ({"temp": 1.0, "top_p": Fraction(1, 2)}, {"temp": 1.0, "top_p": 0.5}),
        (
            {"temp": 0.8, "xtc_probability": Fraction(1, 2), "xtc_special_tokens": np.array([1, 2])},
            {**XTC, "xtc_special_tokens": [1, 2]},
        ),
        ({**XTC, "xtc_special_tokens": None}, {**XTC, "xtc_special_tokens": []}),
        ({"beam_width": 2, "tree_size": np.int64(4)}, {"beam_width": 2, "tree_size": 4}),
    ],
)
def test_numbers_of_other_types_are_numbers(drafted: bool, given: dict[str, Any], plain: dict[str, Any]) -> None:
    assert decode_small(drafted, seed=1, **given) == decode(small_llama(), drafted=drafted, seed=1, **plain)


@pytest.mark.parametrize("top_p", [1e-320, 1e-46, 1e-30])
@pytest.mark.parametrize("drafted", [False, True])
def test_the_smallest_top_p_keeps_the_likeliest_token(drafted: bool, top_p: float) -> None:
    assert decode_small(drafted, seed=1, temp=0.8, top_p=top_p) == decode(
        small_llama(), drafted=drafted, seed=1, temp=0.8, top_k=1
    )


@pytest.mark.parametrize("cache", [(None, None), [None, None], ["a", "b"]], ids=["a tuple", "of nothing", "of strings"])
@pytest.mark.parametrize("drafted", [False, True])
def test_other_objects_are_refused_as_prompt_cache(drafted: bool, cache: Any) -> None:
    with pytest.raises(RedrafterError, match=r"prompt[_ ]cache must"):
        decode_small(drafted, prompt_cache=cache)


@pytest.mark.parametrize("drafted", [False, True])
def test_other_objects_are_refused_as_model(drafted: bool) -> None:
    drafter = small_drafter() if drafted else None
    with pytest.raises(RedrafterError, match="model must be what load returns, got NoneType"):
        next(generate_step(PROMPT, None, drafter))


def test_drafts_that_are_too_deep_are_refused() -> None:
    with pytest.raises(RedrafterError, match="draft_depth must be from 1 to 256, got 257"):
        decode(small_llama(), draft_depth=257)


def test_other_objects_are_refused_as_drafter() -> None:
    with pytest.raises(RedrafterError, match="drafter must be what load_drafter returns, got str"):
        next(generate_step(PROMPT, small_llama(), "drafter"))  # type: ignore[arg-type]


@pytest.mark.parametrize("drafted", [False, True])
def test_targets_with_an_adapted_embedding_are_served(drafted: bool) -> None:
    model = small_llama(tie_word_embeddings=False)
    plain = [token for token, _, _ in generate_step(PROMPT, model, max_tokens=6)]
    model.model.embed_tokens = LoRAEmbedding.from_base(model.model.embed_tokens, r=4)
    drafter = small_drafter() if drafted else None
    # A new adapter changes nothing.
    assert [token for token, _, _ in generate_step(PROMPT, model, drafter, max_tokens=6)] == plain
