"""Training texts, and batches of them. `--data` gives texts; otherwise they are the target's answers to prompts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np
from mlx_lm.tuner.datasets import CacheDataset, load_dataset

from ..atomic_files import expand_path
from ..errors import RedrafterError, join_lines
from .targets import Batch

PAD_TO, PAD_POSITIONS_TO = 32, 128
"""Texts in a batch are padded to a multiple of the first plus 1, learned positions to a multiple of the second, so that
few shapes occur."""


GIVEN = "given"
"""The kind of texts, and of answers to prompts, that a user gives."""


class Text(NamedTuple):
    """A text as token ids.

    Attributes:
        ids: (L,) integers.
        offset: the number of prompt tokens at its start, which are not learned.
        states: (L - 1,) what the target computed at all tokens except the last, see `make_row_dtype`; None before it
            has read the text.
        kind: the kind of its prompt, see `KINDS`; "given" for prompts and texts of the user's.
        is_held_out: whether it is for validation only.
    """

    ids: np.ndarray
    offset: int
    states: np.ndarray | None = None
    kind: str = GIVEN
    is_held_out: bool = False

    @property
    def first_learned(self) -> int:
        """The first position whose next token is learned; at least 1, as the first guess follows the second token."""
        return max(self.offset - 1, 1)


def load_texts(data: str, tokenizer: Any, *, mask_prompt: bool) -> tuple[list[Text], list[Text]]:
    """Loads (training, validation) texts with mlx-lm's loader.

    Args:
        data: a directory with {train, valid}.jsonl, or a data set on the Hugging Face hub.
    """
    path = expand_path(data)
    name = str(path) if path.exists() else data
    settings = SimpleNamespace(data=name, train=True, test=False, mask_prompt=mask_prompt)
    try:
        training, validation, _ = (CacheDataset(part) for part in load_dataset(settings, tokenizer))
        return tuple(  # type: ignore[return-value]
            [
                Text(np.array(ids), int(offset), is_held_out=bool(at))
                for ids, offset in (part[i] for i in range(len(part)))
            ]
            for at, part in enumerate((training, validation))
        )
    except Exception as error:  # mlx-lm, the hub and tokenizers raise errors of many types
        reason = f"{type(error).__name__}: {join_lines(error)[:300]}"
        raise RedrafterError(f"cannot read the data {data}: {reason}") from error


def make_batches(texts: Sequence[Text], batch_size: int, seed: int) -> Callable[[int], Batch]:
    """Returns a function from iteration to a batch of texts of similar length; each epoch has another order.

    The batch depends only on the iteration, so that a resumed run sees the same batches.
    """
    by_length = sorted(range(len(texts)), key=lambda i: len(texts[i].ids))
    count = len(texts) // batch_size

    def batch(iteration: int) -> Batch:
        epoch, at = divmod(iteration, count)
        rng = np.random.default_rng((seed, epoch))
        # Each epoch skips other texts to get whole batches.
        skipped = set(rng.choice(len(texts), len(texts) - count * batch_size, replace=False).tolist())
        order = [i for place, i in enumerate(by_length) if place not in skipped]
        start = int(rng.permutation(count)[at]) * batch_size
        return collate([texts[i] for i in order[start : start + batch_size]])

    return batch


def collate(texts: Sequence[Text]) -> Batch:
    """Makes a batch of texts that the target has read, padded at the end."""

    def pad(size: int, multiple: int) -> int:
        return multiple * max(1, -(-size // multiple))

    width = 1 + pad(max(len(text.ids) for text in texts) - 1, PAD_TO)
    ids = np.zeros((len(texts), width), np.int32)
    read = [text.states for text in texts if text.states is not None]
    hidden = np.zeros((len(texts), width - 1, read[0]["hidden"].shape[-1]), np.float16)
    positions: list[int] = []
    for row, (text, states) in enumerate(zip(texts, read, strict=True)):
        ids[row, : len(text.ids)] = text.ids
        hidden[row, : len(states)] = states["hidden"]
        positions += range(row * (width - 1) + text.first_learned, row * (width - 1) + len(text.ids) - 1)
    size = pad(len(positions), PAD_POSITIONS_TO)
    padded = np.full(size, -1, np.int32)
    padded[: len(positions)] = positions

    def find_learned(name: str) -> np.ndarray:
        """(N, M) a field of the states at the learned positions, in their order; repeated where padded."""
        parts = [states[name][text.first_learned :] for text, states in zip(texts, read, strict=True)]
        return np.resize(np.concatenate(parts), (size, parts[0].shape[1]))

    likeliest, probs = mx.array(find_learned("ids")), mx.array(find_learned("probs"))
    return Batch(mx.array(ids), mx.array(padded), mx.array(hidden), likeliest, probs)


def find_most_frequent(texts: Iterable[Text], count: int, vocab_size: int) -> np.ndarray:
    """(count,) int32, ascending: the most frequent tokens outside of prompts; of equals, the lower ids."""
    seen = np.zeros(vocab_size, np.int64)
    for text in texts:
        seen += np.bincount(text.ids[text.offset :], minlength=vocab_size)[:vocab_size]
    return np.sort(np.argsort(-seen, kind="stable")[:count]).astype(np.int32)
