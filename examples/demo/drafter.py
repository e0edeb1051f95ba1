"""Trains the demo's drafter on edits, and on what the target writes behind pieces of files."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models.cache import make_prompt_cache
from tqdm import tqdm

from mlx_redrafter.drafters.recurrent import Drafter, DrafterArgs
from mlx_redrafter.files import replace_file
from mlx_redrafter.loading.checkpoints import load_drafter, save_drafter
from mlx_redrafter.target.model_parts import get_parts
from mlx_redrafter.training.data import Example, list_most_frequent, make_batches
from mlx_redrafter.training.evaluation import measure_guesses
from mlx_redrafter.training.hidden_states import add_hidden_states
from mlx_redrafter.training.settings import TrainingArgs
from mlx_redrafter.training.targets import initialize_drafter
from mlx_redrafter.training.trainer import train_drafter

PROMPT = 64
LENGTH = 257
BATCHES = 6
BATCH_SIZE = 256
TEMPERATURE = 0.8


def generate_continuations(
    model: nn.Module, prompts: mx.array, length: int, temp: float
) -> mx.array:
    """(B, length) ids: each prompt (B, P) and what the model writes behind it.

    It goes on past the end of text.

    Args:
        temp: temperature; 0 is greedy.
    """
    cache = make_prompt_cache(model)
    pieces = [prompts]
    for _ in range(prompts.shape[1], length):
        logits = model(pieces[-1], cache=cache)[:, -1].astype(mx.float32)
        noisy = logits + temp * mx.random.gumbel(logits.shape)
        pieces.append(mx.argmax(noisy, axis=-1, keepdims=True))
        mx.eval(pieces[-1])
    return mx.concatenate(pieces, axis=1)


def write_texts(
    model: nn.Module,
    tokens: np.ndarray,
    directory: Path,
    temp: float = TEMPERATURE,
    batches: int = BATCHES,
    seed: int = 0,
) -> np.ndarray:
    """(N, LENGTH) uint16 texts by the model, one file a batch.

    Batches that are there are not written again.
    """
    order = np.random.default_rng(seed).permutation(len(tokens) // PROMPT)
    starts = order[: batches * BATCH_SIZE] * PROMPT
    files = [directory / f"{i:03}.npy" for i in range(batches)]
    for i, file in enumerate(tqdm(files, desc="texts")):
        if file.exists():
            continue
        mx.random.seed(seed + i)
        at = starts[i * BATCH_SIZE : (i + 1) * BATCH_SIZE]
        prompts = mx.array(tokens[at[:, None] + np.arange(PROMPT)].astype(np.int32))
        written = np.array(generate_continuations(model, prompts, LENGTH, temp))
        with replace_file(file) as partly:
            np.save(partly, written.astype(np.uint16))
    return np.concatenate([np.load(file) for file in files])


def train(
    model: nn.Module,
    examples: list[Example],
    args: DrafterArgs,
    settings: TrainingArgs,
    steps: int,
    directory: Path,
) -> Drafter:
    """The trained drafter, also saved to `directory` in float16.

    Args:
        model: the target.
        examples: what it learns from.
        args: its sizes; a draft vocabulary is the examples' most frequent tokens.
        settings: of the training.
        steps: its iterations.
    """
    mx.random.seed(settings.seed)
    count = args.draft_vocab_size
    ids = None if count is None else list_most_frequent(examples, count, args.vocab_size)
    drafter = initialize_drafter(model, args, ids)
    read = add_hidden_states(model, examples)
    batches = make_batches(read, settings.batch_size, settings.seed)
    train_drafter(
        get_parts(model).embedding,
        drafter,
        batches,
        lambda done: done / steps,
        depth=settings.draft_depth,
        learning_rate=settings.learning_rate,
        checkpoint=directory / "checkpoint.safetensors",
    )
    save_drafter(directory, drafter, dtype=mx.float16)
    return drafter


def describe(model: nn.Module, held_out: np.ndarray, directory: Path, depth: int = 5) -> None:
    """Writes into the config of the drafter in `directory` how good it is.

    Args:
        held_out: a stream of ids that nobody has learned; the target writes behind pieces of it.
    """
    drafter = load_drafter(directory, model)
    drafter.set_dtype(mx.float32)
    texts = write_texts(model, held_out, directory / "texts", batches=1)
    read = add_hidden_states(model, [Example(text.astype(np.int32), PROMPT) for text in texts])
    embedding = get_parts(model).embedding
    _, acceptance = measure_guesses(embedding, drafter, read, depth, batch_size=16)
    rounded = [[round(rate, 4) for rate in rates] for rates in acceptance]
    drafter.args = replace(drafter.args, acceptance=rounded)
    save_drafter(directory, drafter, dtype=mx.float16)
