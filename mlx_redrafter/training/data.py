"""Texts to train on: mlx-lm's datasets, or prompts for the target to answer; and the batches they make."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np
from mlx_lm.tuner.datasets import CacheDataset, load_dataset

from ..atomic_files import expand_path
from ..errors import RedrafterError, one_line
from ..generate import encode_chat
from .lessons import Batch

PAD_TO = 32
"""Texts of a batch are padded to one more than a multiple of this, so that few shapes occur."""


class Text(NamedTuple):
    """A text as token ids.

    Attributes:
        ids: (L,) integers.
        offset: how many of them are a prompt that is not to be learned.
    """

    ids: np.ndarray
    offset: int


def load_texts(data: str, tokenizer: Any, *, mask_prompt: bool) -> tuple[list[Text], list[Text]]:
    """(training, validation) texts, by mlx-lm's own loader.

    Args:
        data: a directory of {train, valid}.jsonl, or a dataset of the Hugging Face hub.

    Raises:
        RedrafterError: there is no such data, or it is in no form that mlx-lm reads.
    """
    path = expand_path(data)
    settings = SimpleNamespace(
        data=str(path) if path.exists() else data, train=True, test=False, mask_prompt=mask_prompt
    )
    if not data or (path.exists() and not path.is_dir()):
        raise RedrafterError(
            f"expected a directory of train.jsonl and valid.jsonl, or a dataset's hub id, got {data!r}"
        )
    if not path.exists() and (path.is_absolute() or data.count("/") > 1 or data.startswith((".", "~"))):
        raise RedrafterError(f"expected a directory of train.jsonl and valid.jsonl, got {data!r}: no such directory")
    for name in ("train.jsonl", "valid.jsonl"):
        file = path / name
        if path.is_dir() and (file.is_file() or name == "train.jsonl"):
            check_lines(file)
    try:
        training, validation, _ = load_dataset(settings, tokenizer)
        return tuple(  # type: ignore[return-value]
            [Text(np.array(ids), int(offset)) for ids, offset in map(CacheDataset(part).__getitem__, range(len(part)))]
            for part in (training, validation)
        )
    except Exception as error:  # whatever the data makes mlx-lm, the hub and the tokenizer say
        reason = f"{type(error).__name__}: {one_line(error)[:300]}"
        raise RedrafterError(f"cannot read the data {data}: {reason}") from error


def check_lines(file: Path) -> None:
    """Refuses a file of texts that mlx-lm could not read, by its line.

    Raises:
        RedrafterError: no file, an empty one, or a line that is no JSON object.
    """
    try:
        lines = file.read_text(encoding="utf-8").split("\n")
    except FileNotFoundError:
        raise RedrafterError(f"expected texts in {file}, one JSON object a line, got no file") from None
    except (OSError, UnicodeDecodeError) as error:
        raise RedrafterError(f"cannot read {file}: {one_line(error)}") from error
    if not any(lines):
        raise RedrafterError(f"expected texts in {file}, one JSON object a line, got an empty file")
    keys: set[str] = set()
    for number, line in enumerate(lines[:-1] if not lines[-1] else lines, start=1):
        try:
            value = json.loads(line)
        except (ValueError, RecursionError):  # no JSON, or beyond what Python reads
            value = None
        if not isinstance(value, dict):
            raise RedrafterError(f"{file}, line {number}: expected a JSON object, got {line[:40]!r}")
        keys = keys or set(value)
        if not keys & set(value):
            raise RedrafterError(f"{file}, line {number}: expected the keys {sorted(keys)}, got {sorted(value)}")


def load_prompts(path: Path, tokenizer: Any) -> list[list[int]]:
    """Prompts as token ids: one a line, or jsonl with `prompt` or `messages`; through the chat template if any.

    Raises:
        RedrafterError: no such file, an empty one, or a line that is no prompt.
    """
    try:
        lines = expand_path(path).read_text(encoding="utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise RedrafterError(f"cannot read the prompts in {path}: {one_line(error)}") from error
    found = [encoded_line(tokenizer, line, path, number) for number, line in enumerate(lines, start=1) if line.strip()]
    if not found:
        raise RedrafterError(f"expected prompts in {path}, one a line, got an empty file")
    return found


def encoded_line(tokenizer: Any, line: str, path: Path, number: int) -> list[int]:
    """The token ids of a line."""
    prompt = parsed(line, path, number)
    try:
        ids = encode_chat(tokenizer, prompt)
    except Exception as error:  # whatever a chat template says of messages that it does not take
        raise RedrafterError(f"{path}, line {number}: the tokenizer refuses it: {one_line(error)[:200]}") from error
    if not ids:
        raise RedrafterError(f"{path}, line {number}: expected a prompt of at least one token, got none")
    return ids


def parsed(line: str, path: Path, number: int) -> str | list[dict[str, Any]]:
    """The prompt or the messages of a line."""
    if path.suffix not in (".jsonl", ".json"):
        return line
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:  # no JSON, or beyond what Python reads
        raise RedrafterError(f"{path}, line {number}: expected a JSON object, got {line[:40]!r}") from error
    value = value if isinstance(value, dict) else {}
    prompt, messages = value.get("prompt"), value.get("messages")
    if isinstance(prompt, str) and prompt:
        return prompt
    if isinstance(messages, list) and messages and all(isinstance(message, dict) for message in messages):
        # What the assistant said at the end is what the target is to say itself.
        return messages[:-1] if len(messages) > 1 and messages[-1].get("role") == "assistant" else messages
    raise RedrafterError(f"{path}, line {number}: expected an object with 'prompt' or 'messages', got {line[:40]!r}")


def usable(texts: Iterable[Text], longest: int, depth: int) -> list[Text]:
    """Those texts, cut to `longest` + 1 tokens, that have something to learn at every depth."""
    cut = [Text(text.ids[: longest + 1], text.offset) for text in texts]
    return [text for text in cut if len(text.ids) > max(text.offset, 1) + depth]


def split(texts: list[Text], share: float, most: int, seed: int) -> tuple[list[Text], list[Text]]:
    """(training, held-out) texts: a random share, at least one and at most `most`.

    Raises:
        RedrafterError: too few to hold one out.
    """
    if len(texts) < 2:
        raise RedrafterError(f"expected at least 2 texts of enough tokens, got {len(texts)}")
    order = np.random.default_rng(seed).permutation(len(texts))
    count = min(max(1, round(share * len(texts))), most, len(texts) - 1)
    return [texts[i] for i in sorted(order[count:])], [texts[i] for i in sorted(order[:count])]


def make_batches(texts: Sequence[Text], batch_size: int, seed: int) -> Callable[[int], Batch]:
    """Iteration -> a batch: texts of like length together, in an order that is new each time all have been seen.

    A function of the iteration alone, so that a run that goes on sees what it would have seen.
    """
    if len(texts) < batch_size:
        raise RedrafterError(f"expected at least as many texts as the batch size {batch_size}, got {len(texts)}")
    by_length = sorted(range(len(texts)), key=lambda i: len(texts[i].ids))
    count = len(texts) // batch_size

    def batch(iteration: int) -> Batch:
        """A function of the iteration alone: a run that goes on gets the same ones."""
        epoch, at = divmod(iteration, count)
        rng = np.random.default_rng((seed, epoch))
        # Texts that do not fill a batch are others in each epoch.
        skipped = set(rng.choice(len(texts), len(texts) - count * batch_size, replace=False).tolist())
        order = [i for place, i in enumerate(by_length) if place not in skipped]
        start = int(rng.permutation(count)[at]) * batch_size
        return collated([texts[i] for i in order[start : start + batch_size]])

    return batch


def collated(texts: Sequence[Text]) -> Batch:
    """Texts as a batch, padded at the end."""
    longest = max(len(text.ids) for text in texts)
    width = 1 + PAD_TO * -(-(longest - 1) // PAD_TO)
    ids = np.zeros((len(texts), width), np.int32)
    counts = np.zeros((len(texts), width - 1), bool)
    for row, text in enumerate(texts):
        ids[row, : len(text.ids)] = text.ids
        counts[row, max(text.offset - 1, 0) : len(text.ids) - 1] = True
    return Batch(mx.array(ids), mx.array(counts))


def most_frequent(texts: Iterable[Text], count: int, vocab_size: int) -> np.ndarray:
    """(count,) int32, ascending: the tokens that are written most often; the lower id first among equals."""
    seen = np.zeros(vocab_size, np.int64)
    for text in texts:
        seen += np.bincount(text.ids[text.offset :], minlength=vocab_size)[:vocab_size]
    return np.sort(np.argsort(-seen, kind="stable")[:count]).astype(np.int32)
