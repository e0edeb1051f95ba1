"""Targets, texts and drafters shared by the trainer's tests."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from small import make_byte_tokenizer, save_target, small_llama

from mlx_redrafter import load_demo
from mlx_redrafter.training.data import Text

VOCAB = 23


@pytest.fixture
def model() -> nn.Module:
    """A target with tied embeddings, D = 16, with clear preferences for some tokens."""
    model = small_llama(hidden=16, vocab=VOCAB, tie_word_embeddings=True)
    model.model.norm.weight = 3 + model.model.norm.weight
    return model


@pytest.fixture
def texts() -> list[Text]:
    """Six texts of up to 13 tokens, some with a masked prompt."""
    rng = np.random.default_rng(0)
    return [Text(rng.integers(0, VOCAB, size).astype(np.int32), size % 3) for size in (13, 12, 9, 13, 11, 13)]


@pytest.fixture(scope="package")
def demo() -> tuple[Any, Any]:
    """(model, tokenizer) of the packaged demo."""
    return load_demo()[:2]


@pytest.fixture(scope="package")
def target(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A target on disk for whole runs: a random llama that mostly repeats a few of its 257 tokens, which are bytes."""
    place = tmp_path_factory.mktemp("small") / "target"
    tokenizer = make_byte_tokenizer()
    vocab = len(tokenizer)
    model = small_llama(vocab=vocab, layers=1, tie_word_embeddings=True)
    table = model.model.embed_tokens
    table.weight = table.weight * mx.where(mx.arange(vocab) % 30 == 5, 8.0, 1.0)[:, None]
    save_target(place, model, tokenizer, eos_token_id=0)
    return str(place)
