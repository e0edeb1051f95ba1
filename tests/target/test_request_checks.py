"""What decoding rejects with one line before prefill, and unusual requests that it accepts."""

from collections.abc import Callable

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx_lm.models import llama
from mlx_lm.models.cache import KVCache, QuantizedKVCache, RotatingKVCache, make_prompt_cache
from mlx_lm.tuner.lora import LoRAEmbedding

from helpers.refusals import refusal
from helpers.small import randomised, small_drafter, small_llama
from mlx_redrafter.decoding.responses import generate_step
from mlx_redrafter.errors import RedrafterError, UnsupportedModelError

PROMPT = [1, 2, 3]
XTC = {"temp": 0.8, "xtc_probability": 0.5}
pytestmark = pytest.mark.filterwarnings("ignore:the drafter has guessed no token right")


def decode(
    model: nn.Module | None = None, *, drafted: bool = True, prompt=PROMPT, **options
) -> list[int]:
    """Decodes four tokens with a small target."""
    model = small_llama() if model is None else model
    drafter = small_drafter() if drafted else None
    return [token for token, _, _ in generate_step(prompt, model, drafter, max_tokens=4, **options)]


class Foreign(KVCache):
    """A cache of an unknown type."""


REFUSED = [
    ({"prompt": []}, "the prompt is empty: expected at least one token"),
    *(
        ({"prompt": prompt}, "the prompt must be")
        for prompt in ([1.5], [[1, 2]], "the cat", [[1], [1, 2]])
    ),
    *(({"prompt": [token]}, f"token ids.*, got {token}") for token in (64, -1, 2**32 + 5)),
    ({"temp": 1.0, "top_k": 64}, "top_k must be below the vocabulary's 64, got 64"),
    ({"temp": 1.0, "min_p": 0.1, "min_tokens_to_keep": 65}, "min_tokens_to_keep must be"),
    (
        {**XTC, "xtc_special_tokens": [64]},
        "xtc_special_tokens must be token ids from 0 to 63, got 64",
    ),
    (
        {"kv_bits": 8, "kv_group_size": 64, "quantized_kv_start": 0},
        "kv_group_size must divide the head size 16",
    ),
    (
        {"prompt_cache": [RotatingKVCache(12)] * 2, "kv_bits": 8},
        "mlx-lm cannot quantize a RotatingKVCache",
    ),
    (
        {"prompt_cache": [QuantizedKVCache(32)] * 2, "kv_bits": 4, "kv_group_size": 32},
        "with kv_bits 8 and",
    ),
    (
        {"prompt_cache": [KVCache(), Foreign()]},
        "the prompt cache must consist of mlx-lm's caches, got Foreign",
    ),
    ({"prompt_cache": [KVCache()]}, "the prompt cache must have 2 layers like the model, got 1"),
    ({"prompt_cache": ["a", "b"]}, "prompt[_ ]cache must"),
]


@pytest.mark.parametrize(("options", "reason"), REFUSED, ids=[reason for _, reason in REFUSED])
def test_bad_requests_are_refused_before_prefill(options, reason):
    cache = make_prompt_cache(small_llama())
    progress = []
    report = {"prompt_progress_callback": lambda done, total: progress.append((done, total))}
    with pytest.raises(RedrafterError, match=reason) as raised:
        decode(**({"prompt_cache": cache} | report | options))
    assert "\n" not in str(raised.value)
    assert progress == []
    assert cache[0].offset == 0
    # Negative control: a valid request succeeds and reports progress.
    assert len(decode(**report)) == 4
    assert progress[-1] == (3, 3)


def test_drafters_of_another_size_are_refused():
    for sizes in ({"hidden": 48}, {"vocab": 65}):
        with refusal(f"the drafter expects .*, the target has {max(sizes.values())}"):
            decode(small_llama(**sizes))


def make_foreign() -> nn.Module:
    model = small_llama()
    model.make_cache = lambda: [Foreign() for _ in model.layers]
    return model


class Nameless(nn.Module):
    """A model without an embedding where mlx-lm's models have one."""

    def __init__(self):
        super().__init__()
        self.vectors = nn.Linear(64, 64)
        self.layers = [nn.Linear(64, 64)]

    def __call__(self, tokens: mx.array, cache=None) -> mx.array:
        return self.layers[0](self.vectors(mx.eye(64)[tokens]))


@pytest.mark.parametrize(
    ("make", "pattern"),
    [
        (
            Nameless,
            "cannot draft for this model: expected model.embed_tokens .*, .*Nameless has none",
        ),
        (make_foreign, r"cannot draft for llama: its cache \(Foreign\) is not known"),
    ],
)
def test_unsupported_models_decode_plainly_only(make, pattern):
    model = randomised(make(), 0)
    for width in (1, 4):
        with pytest.raises(UnsupportedModelError, match=pattern):
            decode(model, beam_width=width)
    tokens = list(PROMPT)
    for token in decode(model, drafted=False):
        seen = tokens[-1:] if make is Nameless else tokens
        assert token == mx.argmax(model(mx.array([seen]))[0, -1]).item()
        tokens.append(token)


class WithoutRopeModule(llama.Attention):
    """Attention with a function, not a module, as its rope."""

    def __init__(self, attention: llama.Attention, rope: Callable[..., mx.array]):
        nn.Module.__init__(self)
        dict.update(self, {name: child for name, child in attention.items() if name != "rope"})
        for name in ("n_heads", "n_kv_heads", "head_dim", "scale"):
            setattr(self, name, getattr(attention, name))
        self.rope = rope


def test_positions_outside_a_cache_allow_chains_only():
    model = small_llama()
    expected = decode(model, beam_width=4)
    ropes = [layer.self_attn.rope for layer in model.layers]
    for layer, rope in zip(model.layers, ropes, strict=True):
        function = lambda x, offset=0, rope=rope: rope(x, offset)  # noqa: E731
        layer.self_attn = WithoutRopeModule(layer.self_attn, function)
    assert decode(model, beam_width=4) == expected, "the rope may be a function"
    for layer in model.layers:
        layer.self_attn = WithoutRopeModule(layer.self_attn, lambda x, offset=0: x)
    reason = "drafting chains, not trees, for llama: its positions do not come from its cache"
    with pytest.warns(UserWarning, match=reason) as caught:
        tokens = decode(model, beam_width=4)
    assert [each.filename for each in caught] == [__file__], "the caller's own line"
    assert tokens == decode(model, drafted=False)


@pytest.mark.parametrize(
    ("given", "plain"),
    [
        ({"prompt": np.array(PROMPT)}, {}),
        ({"temp": 0.8, "top_p": 1e-320}, {"temp": 0.8, "top_k": 1}),
        ({**XTC, "xtc_special_tokens": np.array([1, 2])}, {**XTC, "xtc_special_tokens": [1, 2]}),
        ({**XTC, "xtc_special_tokens": None}, {**XTC, "xtc_special_tokens": []}),
    ],
    ids=str,
)
def test_equivalent_options_give_equal_tokens(given, plain):
    assert decode(seed=1, **given) == decode(seed=1, **plain)


def test_embeddings_with_adapters_work():
    model = small_llama(tie_word_embeddings=False)
    plain = decode(model, drafted=False)
    model.model.embed_tokens = LoRAEmbedding.from_base(model.model.embed_tokens, r=4)
    assert decode(model) == decode(model, drafted=False) == plain, "a new adapter changes nothing"
