"""The target reads all texts once. What training needs of it is stored, so that it runs no other forward."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import IO, Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from tqdm import tqdm

from ..atomic_files import write_text
from ..engine.model_parts import CapturePoint, capture, find_model_sizes, find_parts
from ..errors import CheckpointError, RedrafterError, join_lines
from .data import Text, digest, list_ids

TOKENS_AT_ONCE = 512
"""Maximum tokens in a forward, unless a single text is longer; all their logits are in memory."""

TOP_K = 32
"""The number of likeliest next tokens that are stored and learned."""

ROWS_AT_ONCE = 128  # probabilities in float32 at a time


def make_row_dtype(width: int) -> np.dtype[Any]:
    """The stored row of a token: hidden state, and the likeliest next tokens with their probabilities."""
    return np.dtype([("hidden", "<f2", (width,)), ("ids", "<i4", (TOP_K,)), ("probs", "<f2", (TOP_K,))])


def add_hidden_states(
    model: nn.Module, texts: Sequence[Text], path: Path | None = None, settings: dict[str, Any] | None = None
) -> list[Text]:
    """Adds what `model` computes at each token of texts, memory-mapped.

    Args:
        path: the file for the states; states of the same texts that are in it are reused. None for a temporary file.
        settings: what else the states depend on, as JSON values.
    """
    groups, width = group_texts(texts), find_model_sizes(model)[0]
    # The first row of each group, and the number of rows.
    starts = [0, *accumulate(sum(len(texts[i].ids) - 1 for i in group) for group in groups)]
    header = {"width": width, "top_k": TOP_K, "texts": digest(list_ids(texts)), **(settings or {})}
    kind = make_row_dtype(width)
    try:
        with open_states(path, header) as file:
            rows = file.seek(0, 2) // kind.itemsize
            done = max(number for number, start in enumerate(starts) if start <= rows)
            file.truncate(file.seek(kind.itemsize * starts[done]))
            n_done = sum(map(len, groups[:done]))
            with tqdm(total=len(texts), initial=n_done, desc="reading", disable=n_done == len(texts)) as bar:
                for group in groups[done:]:
                    file.write(read_group(model, [texts[i] for i in group]).tobytes())
                    bar.update(len(group))
            file.flush()
            kept = np.memmap(file, kind, "r", shape=(starts[-1],))
    except OSError as error:
        place = path or "a temporary file"
        raise RedrafterError(f"cannot store the hidden states in {place}: {join_lines(error)}") from error
    found, row = list(texts), 0
    for i in (i for group in groups for i in group):
        found[i] = texts[i]._replace(states=kept[row : row + len(texts[i].ids) - 1])
        row += len(texts[i].ids) - 1
    return found


def group_texts(texts: Sequence[Text]) -> list[list[int]]:
    """Groups texts of similar length, by index, into forwards of at most `TOKENS_AT_ONCE` tokens with padding."""
    groups: list[list[int]] = []
    for i in sorted(range(len(texts)), key=lambda i: len(texts[i].ids)):
        if groups and (len(groups[-1]) + 1) * (len(texts[i].ids) - 1) <= TOKENS_AT_ONCE:
            groups[-1].append(i)
        else:
            groups.append([i])
    return groups


def open_states(path: Path | None, header: dict[str, Any]) -> IO[bytes]:
    """Opens the file of states, empty unless it has states for `header`, which a JSON file beside it records."""
    if path is None:
        return tempfile.TemporaryFile()
    about = path.with_suffix(".json")
    try:
        same = path.exists() and json.loads(about.read_text(encoding="utf-8")) == header
    except (OSError, ValueError):
        same = False
    if not same:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"")
        write_text(about, json.dumps(header) + "\n")
    return path.open("r+b")


def read_group(model: nn.Module, texts: Sequence[Text]) -> np.ndarray[Any, Any]:
    """(rows,) of `make_row_dtype`: the rows of all tokens of some texts, read in one forward.

    Only learned positions have likeliest tokens.
    """
    ids = np.zeros((len(texts), max(len(text.ids) for text in texts) - 1), np.int32)
    for row, text in enumerate(texts):
        ids[row, : len(text.ids) - 1] = text.ids[:-1]
    logits, (states,) = capture([CapturePoint(find_parts(model).final_norm)], lambda: model(mx.array(ids)))
    found = []
    for row, text in enumerate(texts):
        size, first = len(text.ids) - 1, text.first_learned
        kept = np.zeros(size, make_row_dtype(states[-1].shape[-1]))
        kept["hidden"] = np.array(states[-1][row, :size].astype(mx.float16))
        for start in range(first, size, ROWS_AT_ONCE):
            part = slice(start, min(start + ROWS_AT_ONCE, size))
            likeliest, probs = find_likeliest(logits[row, part])
            kept["ids"][part, : likeliest.shape[1]] = np.array(likeliest)
            kept["probs"][part, : likeliest.shape[1]] = np.array(probs)
        found.append(kept)
    rows = np.concatenate(found)
    if not np.isfinite(rows["hidden"]).all():
        raise CheckpointError("cannot train for this target: its hidden states are not finite in 16 bits")
    return rows


def find_likeliest(logits: mx.array) -> tuple[mx.array, mx.array]:
    """((N, M) int32, (N, M) float32): the likeliest tokens, the likeliest first, and their probabilities."""
    probs, count = mx.softmax(logits.astype(mx.float32), axis=-1), min(TOP_K, logits.shape[-1])
    ids = mx.argpartition(-probs, count - 1, axis=-1)[:, :count].astype(mx.int32)
    kept = mx.take_along_axis(probs, ids, axis=-1)
    order = mx.argsort(-kept, axis=-1)
    return mx.take_along_axis(ids, order, axis=-1), mx.take_along_axis(kept, order, axis=-1)
