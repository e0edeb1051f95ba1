"""Computes the target's hidden states of all texts once, and stores them: training runs no other forward of it."""

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
from ..engine.model_parts import find_parts
from ..errors import CheckpointError, RedrafterError, join_lines
from .data import Text, digest, list_ids
from .targets import Teacher, find_likeliest, read_states

TOKENS_AT_ONCE = 1024
"""Maximum tokens in a forward, unless a single text is longer."""


def add_hidden_states(
    model: nn.Module,
    texts: Sequence[Text],
    path: Path | None = None,
    settings: dict[str, Any] | None = None,
    top_k: int = 0,
) -> list[Text]:
    """Adds the hidden states of `model` to texts, memory-mapped.

    Args:
        path: the file for the states; states of the same texts that are in it are reused. None for a temporary file.
        settings: what else the states depend on, as JSON values.
        top_k: the number of likeliest next tokens to store for each learned position; 0 for none.

    Raises:
        RedrafterError: the file cannot be written.
        CheckpointError: the states are not finite in 16 bits.
        UnsupportedModelError: see `find_parts`.
    """
    width = find_parts(model).embedding(mx.zeros((1,), mx.int32)).shape[-1]
    kind = make_row_dtype(width, top_k)
    teacher = Teacher(model) if top_k else None
    groups = group_texts(texts)
    # The first row of each group, and the number of rows.
    starts = [0, *accumulate(sum(len(texts[i].ids) - 1 for i in group) for group in groups)]
    header = {"width": width, "top_k": top_k, "texts": digest(list_ids(texts)), **(settings or {})}
    try:
        with open_states(path, header) as file:
            rows = file.seek(0, 2) // kind.itemsize
            done = max(number for number, start in enumerate(starts) if start <= rows)
            file.truncate(file.seek(kind.itemsize * starts[done]))
            n_done = sum(map(len, groups[:done]))
            with tqdm(total=len(texts), initial=n_done, desc="reading", disable=n_done == len(texts)) as bar:
                for group in groups[done:]:
                    file.write(read_group(model, [texts[i] for i in group], kind, teacher).tobytes())
                    bar.update(len(group))
            file.flush()
            kept = np.memmap(file, kind, "r", shape=(starts[-1],))
    except OSError as error:
        place = path or "a temporary file"
        raise RedrafterError(f"cannot store the hidden states in {place}: {join_lines(error)}") from error
    found, row = list(texts), 0
    for i in (i for group in groups for i in group):
        own = kept[row : row + len(texts[i].ids) - 1]
        likeliest = (own["ids"], own["probs"]) if top_k else None
        found[i] = texts[i]._replace(hidden=own["hidden"], likeliest=likeliest)
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


def make_row_dtype(width: int, top_k: int) -> np.dtype[Any]:
    """The stored row of a token: hidden state and, with `top_k`, likeliest next tokens and their probabilities."""
    likeliest = [("ids", "<i4", (top_k,)), ("probs", "<f2", (top_k,))] if top_k else []
    return np.dtype([("hidden", "<f2", (width,)), *likeliest])


def read_group(
    model: nn.Module, texts: Sequence[Text], kind: np.dtype[Any], teacher: Teacher | None
) -> np.ndarray[Any, Any]:
    """(rows,) of dtype `kind`: the rows of all tokens of some texts, read in one forward.

    Args:
        teacher: computes the likeliest tokens; None if none are stored.

    Raises:
        CheckpointError: the states are not finite in 16 bits.
    """
    ids = np.zeros((len(texts), max(len(text.ids) for text in texts) - 1), np.int32)
    for row, text in enumerate(texts):
        ids[row, : len(text.ids) - 1] = text.ids[:-1]
    hidden = read_states(model, mx.array(ids))
    found = []
    for row, text in enumerate(texts):
        kept = np.zeros(len(text.ids) - 1, kind)
        kept["hidden"] = np.array(hidden[row, : len(kept)].astype(mx.float16))
        if teacher is not None and (first := text.first_learned) < len(kept):
            states = hidden[row, first : len(kept)]
            kept["ids"][first:], kept["probs"][first:] = find_likeliest(teacher, states, kind["ids"].shape[0])
        found.append(kept)
    rows = np.concatenate(found)
    if not np.isfinite(rows["hidden"]).all():
        raise CheckpointError("cannot train for this target: its hidden states are not finite in 16 bits")
    return rows
