"""Trains the demo's drafter on what the target writes behind pieces of the training files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models.cache import make_prompt_cache
from tqdm import tqdm

from mlx_redrafter.atomic_files import replace_file
from mlx_redrafter.checkpoints import load_drafter, save_drafter
from mlx_redrafter.drafters.recurrent import Drafter, DrafterArgs
from mlx_redrafter.training.data import Text, make_batches, most_frequent
from mlx_redrafter.training.distill import Recipe, train_drafter
from mlx_redrafter.training.evaluation import Manner, examined
from mlx_redrafter.training.fitting import Course
from mlx_redrafter.training.lessons import new_drafter
from mlx_redrafter.training.measuring import compared
from mlx_redrafter.training.results import described

PROMPT, LENGTH = 64, 257
BATCHES, ROWS = 20, 256
TEMPERATURE = 0.8


def continuations(model: nn.Module, prompts: mx.array, length: int, temp: float) -> mx.array:
    """(B, length) ids: each prompt (B, P) and what the model writes behind it, past the end of text too.

    Args:
        temp: temperature; 0 is greedy.
    """
    cache = make_prompt_cache(model)
    rows = [prompts]
    while sum(row.shape[1] for row in rows) < length:
        logits = model(rows[-1], cache=cache)[:, -1].astype(mx.float32)
        rows.append(mx.argmax(logits + temp * mx.random.gumbel(logits.shape), axis=-1, keepdims=True))
        mx.eval(rows[-1])
    return mx.concatenate(rows, axis=1)


def write_texts(
    model: nn.Module,
    tokens: np.ndarray,
    directory: Path,
    temp: float = TEMPERATURE,
    batches: int = BATCHES,
    seed: int = 0,
) -> np.ndarray:
    """(N, LENGTH) uint16 texts by the model, one file a batch; batches that are there are not written again."""
    starts = np.random.default_rng(seed).permutation(len(tokens) // PROMPT)[: batches * ROWS] * PROMPT
    files = [directory / f"{i:03}.npy" for i in range(batches)]
    for i, file in enumerate(tqdm(files, desc="texts")):
        if file.exists():
            continue
        mx.random.seed(seed + i)
        at = starts[i * ROWS : (i + 1) * ROWS]
        prompts = mx.array(tokens[at[:, None] + np.arange(PROMPT)].astype(np.int32))
        with replace_file(file) as partly:
            np.save(partly, np.array(continuations(model, prompts, LENGTH, temp)).astype(np.uint16))
    return np.concatenate([np.load(file) for file in files])


def given_texts(tokens: np.ndarray, seed: int = 0) -> np.ndarray:
    """(N, LENGTH) pieces of the training files, as many as the model writes."""
    starts = np.arange(0, len(tokens) - LENGTH + 1, LENGTH - 1)
    chosen = np.random.default_rng(seed).permutation(starts)[: BATCHES * ROWS]
    return tokens[chosen[:, None] + np.arange(LENGTH)]


class Phase(NamedTuple):
    """A part of a training.

    Attributes:
        iters: how many batches.
        recipe: what is taught in them.
        seed: of the order of the texts.
    """

    iters: int
    recipe: Recipe
    seed: int = 0


def train(
    model: nn.Module,
    texts: np.ndarray,
    args: DrafterArgs,
    phases: Sequence[Phase],
    batch_size: int,
    directory: Path,
    seed: int = 0,
) -> Drafter:
    """The trained drafter, also saved to `directory` in float16.

    Args:
        model: the target.
        texts: (N, LENGTH) ids.
        args: its sizes; a draft vocabulary is the texts' most frequent tokens.
    """
    lessons = [Text(row.astype(np.int32), 0) for row in texts]
    mx.random.seed(seed)
    count = args.draft_vocab_size
    ids = None if count is None else most_frequent(lessons, count, args.vocab_size)
    drafter = new_drafter(model, args, ids)
    for number, phase in enumerate(phases):
        batches = make_batches(lessons, batch_size, phase.seed)
        course = Course(phase.iters, checkpoint=directory / f"phase-{number}.safetensors")
        train_drafter(model, drafter, batches, course, phase.recipe)
    save_drafter(directory, drafter, dtype=mx.float16)
    return drafter


def describe(
    model: nn.Module, held_out: np.ndarray, prompts: list[list[int]], ends: set[int], directory: Path, depth: int = 5
) -> None:
    """Writes into the config of the drafter in `directory` how good it is, and how deep it drafts best when greedy.

    Args:
        held_out: a stream of ids that nobody has learned; the target writes behind pieces of it.
        prompts: for real decoding.
        ends: ids that end a text.
    """
    drafter = load_drafter(directory, model)
    drafter.set_dtype(mx.float32)
    texts = [Text(row.astype(np.int32), PROMPT) for row in write_texts(model, held_out, directory / "texts", batches=1)]
    known = examined(model, drafter, texts, Recipe(depth=depth), 16)
    chains = [(1, k) for k in range(1, depth + 1)]
    rows = compared(model, drafter, prompts, chains, Manner(128, 0.0, 0, ends))
    drafter.args = described(drafter.args, None, known.acceptance, rows)
    save_drafter(directory, drafter, dtype=mx.float16)
