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
from ..engine.model_parts import CapturePoint, capture, find_head, find_module_name, find_parts
from ..errors import CheckpointError, RedrafterError, UnsupportedModelError, join_lines
from .data import Text, digest, list_ids

TOKENS_AT_ONCE = 1024
"""Maximum tokens in a forward, unless a single text is longer."""

TOP_K = 32
"""The number of likeliest next tokens that are stored and learned."""

CHECKED_TOKENS = 8
"""Tokens used to find out how a model computes its logits."""

ROWS_AT_ONCE = 128  # rows of logits in float32 at a time


def make_row_dtype(width: int) -> np.dtype[Any]:
    """The stored row of a token: hidden state, and the likeliest next tokens with their probabilities."""
    return np.dtype([("hidden", "<f2", (width,)), ("ids", "<i4", (TOP_K,)), ("probs", "<f2", (TOP_K,))])


def add_hidden_states(
    model: nn.Module, texts: Sequence[Text], path: Path | None = None, settings: dict[str, Any] | None = None
) -> list[Text]:
    """Adds the states of `model` to texts, memory-mapped.

    Args:
        path: the file for the states; states of the same texts that are in it are reused. None for a temporary file.
        settings: what else the states depend on, as JSON values.
    """
    teacher, groups = Teacher(model), group_texts(texts)
    # The first row of each group, and the number of rows.
    starts = [0, *accumulate(sum(len(texts[i].ids) - 1 for i in group) for group in groups)]
    header = {"width": teacher.width, "top_k": TOP_K, "texts": digest(list_ids(texts)), **(settings or {})}
    kind = make_row_dtype(teacher.width)
    try:
        with open_states(path, header) as file:
            rows = file.seek(0, 2) // kind.itemsize
            done = max(number for number, start in enumerate(starts) if start <= rows)
            file.truncate(file.seek(kind.itemsize * starts[done]))
            n_done = sum(map(len, groups[:done]))
            with tqdm(total=len(texts), initial=n_done, desc="reading", disable=n_done == len(texts)) as bar:
                for group in groups[done:]:
                    file.write(teacher.read([texts[i] for i in group]).tobytes())
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


class Teacher:
    """The target as a reader of texts."""

    def __init__(self, model: nn.Module) -> None:
        self._model, self._head, parts = model, find_head(model), find_parts(model)
        embedding: Any = parts.embedding
        tokens = (mx.arange(CHECKED_TOKENS) * (embedding.weight.shape[0] // CHECKED_TOKENS))[None]
        wanted, (hidden,) = capture([CapturePoint(parts.final_norm)], lambda: model(tokens))
        raw, self.vocab_size = self._head(hidden[-1]), wanted.shape[-1]
        self.width = hidden[-1].shape[-1]
        self._scale, self._cap = find_scale_and_cap(raw[..., : self.vocab_size], wanted, find_module_name(model))

    def logits(self, hidden: mx.array) -> mx.array:
        """(..., V) the target's logits for hidden states (..., D)."""
        logits = self._head(hidden)[..., : self.vocab_size]
        logits = logits if self._scale == 1 else logits * self._scale
        return logits if self._cap is None else mx.tanh(logits / self._cap) * self._cap

    def read(self, texts: Sequence[Text]) -> np.ndarray[Any, Any]:
        """(rows,) of `make_row_dtype`: the rows of all tokens of some texts, read in one forward.

        Only learned positions have likeliest tokens.
        """
        ids = np.zeros((len(texts), max(len(text.ids) for text in texts) - 1), np.int32)
        for row, text in enumerate(texts):
            ids[row, : len(text.ids) - 1] = text.ids[:-1]
        hidden = read_states(self._model, mx.array(ids))
        found = []
        for row, text in enumerate(texts):
            states = np.zeros(len(text.ids) - 1, make_row_dtype(self.width))
            states["hidden"] = np.array(hidden[row, : len(states)].astype(mx.float16))
            first = text.first_learned
            self._store_likeliest(states[first:], hidden[row, first : len(states)])
            found.append(states)
        rows = np.concatenate(found)
        if not np.isfinite(rows["hidden"]).all():
            raise CheckpointError("cannot train for this target: its hidden states are not finite in 16 bits")
        return rows

    def _store_likeliest(self, states: np.ndarray[Any, Any], hidden: mx.array) -> None:
        """Fills `ids` and `probs` of rows (N,), from hidden states (N, D), a few rows at a time."""
        count = min(TOP_K, self.vocab_size)
        for start in range(0, len(states), ROWS_AT_ONCE):
            rows = slice(start, start + ROWS_AT_ONCE)
            probs = mx.softmax(self.logits(hidden[rows]).astype(mx.float32), axis=-1)
            ids = mx.argpartition(-probs, count - 1, axis=-1)[:, :count].astype(mx.int32)
            kept = mx.take_along_axis(probs, ids, axis=-1)
            order = mx.argsort(-kept, axis=-1)
            states["ids"][rows, :count] = np.array(mx.take_along_axis(ids, order, axis=-1))
            states["probs"][rows, :count] = np.array(mx.take_along_axis(kept, order, axis=-1))


def find_scale_and_cap(raw: mx.array, logits: mx.array, name: str) -> tuple[float, float | None]:
    """Finds (factor, cap or None) such that a model's logits are cap * tanh(factor * raw / cap).

    Args:
        raw, logits: (..., V) the output matrix's results for some tokens, and the model's logits.
        name: the model's name, for the error.
    """
    x, y = (np.array(each.astype(mx.float32), np.float64).ravel() for each in (raw, logits))
    precision = 4 * max(float(mx.finfo(logits.dtype).eps), 1e-6)  # a few roundings of each logit

    def fits(found: np.ndarray) -> bool:
        return bool(np.all(np.abs(found - y) <= precision * (np.abs(y) + 0.25 * np.max(np.abs(y)))))

    if fits(x):
        return 1.0, None
    factor = float(x @ y) / max(float(x @ x), 1e-30)
    if fits(factor * x):
        return factor, None
    low, high = float(np.max(np.abs(x))) / 100, float(np.max(np.abs(y))) * 1e6
    while high / low > 1 + 1e-9:  # bisection: capped values grow with the cap
        cap = (low * high) ** 0.5
        low, high = (low, cap) if (np.abs(cap * np.tanh(x / cap)) > np.abs(y)).mean() > 0.5 else (cap, high)
    if fits(high * np.tanh(x / high)):
        return 1.0, high
    raise UnsupportedModelError(f"cannot train for {name}: its logits are not its output matrix's, scaled or capped")


def read_states(model: nn.Module, tokens: mx.array) -> mx.array:
    """(B, T, D) a model's hidden states after its final norm for tokens (B, T); logits are not computed."""
    return capture([CapturePoint(find_parts(model).final_norm)], lambda: model(tokens))[1][0][-1]
