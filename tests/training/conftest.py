"""Targets, texts and short runs shared by the trainer's tests."""

from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from helpers.jsonl import write_jsonl
from helpers.small import add_chat_template, make_byte_tokenizer, save_target, small_llama
from mlx_redrafter import load_demo
from mlx_redrafter.cli.train import parse_args
from mlx_redrafter.demo import demo_prompts
from mlx_redrafter.training import run
from mlx_redrafter.training.data import Example

VOCAB = 23
QUICK = ("--batch-size", "2", "--max-tokens", "10", "--draft-depth", "3")
PATCHES = {
    "run.MAX_VISITS": 1,
    "run.VALIDATIONS": 2,
    "run.MAX_COMPARED": 2,
    "run.COMPARED_TOKENS": 8,
    "example_makers.MAX_EXAMPLES": 16,
    "trainer.SAVE_EVERY": 2,
}
"""Changes that make runs short, and their number of texts and iterations independent of the time.
"""


@pytest.fixture
def model() -> nn.Module:
    """A target with tied embeddings, D = 16, with clear preferences for some tokens."""
    model = small_llama(hidden=16, vocab=VOCAB, tie_word_embeddings=True)
    model.model.norm.weight = 3 + model.model.norm.weight
    return model


@pytest.fixture
def examples() -> list[Example]:
    """Six texts of up to 13 tokens, some with a masked prompt."""
    rng = np.random.default_rng(0)
    return [
        Example(rng.integers(0, VOCAB, size).astype(np.int32), size % 3)
        for size in (13, 12, 9, 13, 11, 13)
    ]


@pytest.fixture(scope="package")
def demo() -> tuple[Any, Any]:
    """(model, tokenizer) of the packaged demo."""
    return load_demo()[:2]


@pytest.fixture
def chatty():
    """The demo's tokenizer with a chat template."""
    return add_chat_template(load_demo()[1])


@pytest.fixture(scope="package")
def target(tmp_path_factory) -> str:
    """A target on disk for whole runs: a random llama that mostly repeats a few of its 257 tokens,
    which are bytes.
    """
    place = tmp_path_factory.mktemp("small") / "target"
    tokenizer = make_byte_tokenizer()
    vocab = len(tokenizer)
    model = small_llama(vocab=vocab, layers=1, tie_word_embeddings=True)
    table = model.model.embed_tokens
    table.weight = table.weight * mx.where(mx.arange(vocab) % 30 == 5, 8.0, 1.0)[:, None]
    save_target(place, model, tokenizer, eos_token_id=0)
    return str(place)


@pytest.fixture(scope="package")
def prompts(tmp_path_factory) -> str:
    """A file of 16 prompts."""
    path = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    return write_jsonl(path, ({"prompt": text[:60]} for text in demo_prompts("code")))


@pytest.fixture(scope="package")
def data(tmp_path_factory) -> str:
    """A folder of 32 given texts."""
    place = tmp_path_factory.mktemp("texts")
    write_jsonl(place / "train.jsonl", ({"text": text[:80]} for text in demo_prompts()))
    return str(place)


@pytest.fixture(scope="package")
def script() -> str:
    """The Python code of a short run in another process; "{patch}" can change it."""
    lines = [
        "import os, runpy, signal",
        "from mlx_redrafter.training import example_makers, run, trainer",
        *(f"{name} = {value}" for name, value in PATCHES.items()),
        "{patch}",
        'runpy.run_module("mlx_redrafter.train", run_name="__main__")',
    ]
    return "\n".join(lines)


@pytest.fixture
def train(target, monkeypatch):
    """A short run in this process: (output, *flags, resume, dry_run) -> (exit status, messages)."""
    for name, value in PATCHES.items():
        monkeypatch.setattr(f"mlx_redrafter.training.{name}", value)

    def train(output, *flags, **options):
        said = []
        args, _ = parse_args(["--model", target, "--output", str(output), *QUICK, *map(str, flags)])
        return run.run_training(args, say=said.append, **options), said

    return train
