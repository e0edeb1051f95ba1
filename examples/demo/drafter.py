"""Trains the demo's drafter on what the target writes behind pieces of the training files."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models.cache import make_prompt_cache
from tqdm import tqdm

from mlx_redrafter.checkpoint import save_drafter
from mlx_redrafter.drafter import Drafter, DrafterArgs
from mlx_redrafter.files import replacing
from mlx_redrafter.target import sizes
from mlx_redrafter.training.data import Text, make_batches
from mlx_redrafter.training.distill import Recipe, train_drafter
from mlx_redrafter.training.fitting import Course
from mlx_redrafter.training.lessons import new_drafter

PROMPT, LENGTH = 64, 257
BATCHES, ROWS = 20, 256
TEMPERATURES = (0.0, 0.8)
ROWS_PER_STEP = 4


def continuations(model: nn.Module, prompts: mx.array, length: int, temps: mx.array) -> mx.array:
    """(B, length) ids: each prompt (B, P) and what the model writes behind it, past the end of text too.

    Args:
        temps: (B, 1) temperatures; 0 is greedy.
    """
    cache = make_prompt_cache(model)
    rows = [prompts]
    while sum(row.shape[1] for row in rows) < length:
        logits = model(rows[-1], cache=cache)[:, -1].astype(mx.float32)
        rows.append(mx.argmax(logits + temps * mx.random.gumbel(logits.shape), axis=-1, keepdims=True))
        mx.eval(rows[-1])
    return mx.concatenate(rows, axis=1)


def write_texts(model: nn.Module, tokens: np.ndarray, directory: Path, seed: int = 0) -> np.ndarray:
    """(N, LENGTH) uint16 texts by the model, one file a batch; batches that are there are not written again."""
    starts = np.random.default_rng(seed).permutation(len(tokens) // PROMPT)[: BATCHES * ROWS] * PROMPT
    temps = mx.array(TEMPERATURES)[mx.arange(ROWS) % len(TEMPERATURES)][:, None]
    files = [directory / f"{i:03}.npy" for i in range(BATCHES)]
    for i, file in enumerate(tqdm(files, desc="texts")):
        if file.exists():
            continue
        mx.random.seed(seed + i)
        at = starts[i * ROWS : (i + 1) * ROWS]
        prompts = mx.array(tokens[at[:, None] + np.arange(PROMPT)].astype(np.int32))
        with replacing(file) as partly:
            np.save(partly, np.array(continuations(model, prompts, LENGTH, temps)).astype(np.uint16))
    return np.concatenate([np.load(file) for file in files])


def train(
    model: nn.Module, tokens: np.ndarray, texts: np.ndarray, steps: int, directory: Path, seed: int = 0
) -> Drafter:
    """The trained drafter, also saved to `directory` in float16.

    Args:
        model: the target.
        tokens: the training files' stream.
        texts: (N, LENGTH) the model's own.
    """
    starts = np.arange(0, len(tokens) - LENGTH + 1, LENGTH - 1)
    few = np.random.default_rng(seed).permutation(starts)[: len(texts) // 4]
    rows = [*texts, *(tokens[start : start + LENGTH] for start in few)]
    lessons = [Text(row.astype(np.int32), 0) for row in rows]
    hidden_size, vocab_size = sizes(model)
    mx.random.seed(seed)
    args = DrafterArgs(hidden_size, vocab_size, exit_dim=160, num_draft_layers=1)
    drafter = new_drafter(model, args)
    # What the target finds likely is the richer lesson; what it would choose is the question asked at the end.
    phases = (
        (steps, "training", seed, Recipe(labels="distribution", learning_rate=4e-3)),
        (steps * 3 // 8, "choices", seed + 1, Recipe(labels="target", learning_rate=2e-3)),
    )
    for iters, name, order, recipe in phases:
        batches = make_batches(lessons, ROWS_PER_STEP, order)
        train_drafter(model, drafter, batches, Course(iters, checkpoint=directory / f"{name}.safetensors"), recipe)
    save_drafter(directory, drafter, dtype=mx.float16)
    return drafter
