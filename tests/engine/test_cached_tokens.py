"""Recovering the tokens of a prompt cache from its first layer."""

from __future__ import annotations

import mlx.core as mx
import pytest
from families import make_family
from mlx_lm.models.cache import make_prompt_cache
from toys import make_prompt

from mlx_redrafter.engine.cached_tokens import find_tokens


@pytest.mark.parametrize("name", ["qwen3", "gemma2", "phi3"])
def test_tokens_are_recovered(name: str) -> None:
    model, text = make_family(name), make_prompt(6, vocab=50)
    cache = make_prompt_cache(model)
    assert find_tokens(model, cache) is None, "an empty cache"
    model(mx.array(text)[None], cache=cache)
    assert find_tokens(model, cache) == text


@pytest.mark.parametrize("name", ["gpt2", "mamba2", "deepseek_v3"])
def test_caches_without_values_per_token_give_none(name: str) -> None:
    """gpt2 adds positions to its embedding; states and latents hold no values per token."""
    model, text = make_family(name), make_prompt(60, vocab=50)
    cache = make_prompt_cache(model)
    model(mx.array(text)[None], cache=cache)
    assert find_tokens(model, cache) is None
