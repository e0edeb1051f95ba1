"""Training texts and batches. Texts are given, or the target's own answers to prompts."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.generate import BatchGenerator
from mlx_lm.sample_utils import make_sampler
from mlx_lm.tuner.datasets import CacheDataset, load_dataset
from tqdm import tqdm

from ..atomic_files import expand_path, write_text
from ..errors import RedrafterError, join_lines
from ..generate import encode_chat
from ..json_objects import parse_object
from .settings import TrainingArgs
from .targets import Batch

MAX_BATCH_SIZE = 32
"""Maximum batch size for generating answers; each batch is saved."""

VALIDATION_BATCHES = 25
"""The most batches of held-out texts."""

PAD_TO, PAD_POSITIONS_TO = 32, 128
"""Texts in a batch are padded to a multiple of the first plus 1, learned positions to a multiple of the second, so that
few shapes occur."""

Prompt = str | list[dict[str, Any]]
"""A prompt as given: a string, or chat messages."""


class Text(NamedTuple):
    """A text as token ids.

    Attributes:
        ids: (L,) integers.
        offset: the number of prompt tokens at its start, which are not learned.
        states: (L - 1,) what the target computed at all tokens except the last, see `make_row_dtype`; None before it
            has read the text.
    """

    ids: np.ndarray
    offset: int
    states: np.ndarray | None = None

    @property
    def first_learned(self) -> int:
        """The first position whose next token is learned; at least 1, as the first guess follows the second token."""
        return max(self.offset - 1, 1)


def read_lines(path: Path, what: str) -> list[tuple[str, str]]:
    """(line, its place) for each non-empty line of a file.

    Args:
        what: what the lines are, for error messages.
    """
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise RedrafterError(f"cannot read the {what} in {path}: {join_lines(error)}") from error
    found = [(line, f"{path}, line {number}") for number, line in enumerate(lines, start=1) if line.strip()]
    if not found:
        raise RedrafterError(f"expected {what} in {path}, one per line, got an empty file")
    return found


def read_prompts(path: str | Path) -> list[Prompt]:
    """Reads prompts from a file: one per line, or JSONL with `prompt` or `messages`. A final answer is dropped."""
    path = expand_path(path)
    found: list[Prompt] = []
    for line, place in read_lines(path, "prompts"):
        if path.suffix not in (".jsonl", ".json"):
            found.append(line)
            continue
        value = parse_object(line, place)
        prompt, messages = value.get("prompt"), value.get("messages")
        if isinstance(prompt, str) and prompt:
            found.append(prompt)
        elif isinstance(messages, list) and messages and all(isinstance(message, dict) for message in messages):
            is_answered = len(messages) > 1 and messages[-1].get("role") == "assistant"
            found.append(messages[:-1] if is_answered else messages)
        else:
            raise RedrafterError(f"{place}: expected an object with 'prompt' or 'messages', got {line[:40]!r}")
    return found


def encode_prompts(prompts: Sequence[Prompt], tokenizer: Any) -> list[list[int]]:
    """The token ids of prompts, with the chat template if there is one."""
    found = []
    for number, prompt in enumerate(prompts, start=1):
        try:
            found.append(encode_chat(tokenizer, prompt))
        except Exception as error:  # chat templates raise errors of any type
            raise RedrafterError(f"prompt {number}: the tokenizer rejects it: {join_lines(error)[:200]}") from error
        if not found[-1]:
            raise RedrafterError(f"prompt {number}: expected at least one token, got none")
    return found


def load_prompts(path: str | Path, tokenizer: Any) -> list[list[int]]:
    """The prompts in a file as token ids."""
    return encode_prompts(read_prompts(path), tokenizer)


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
            [Text(np.array(ids), int(offset)) for ids, offset in (part[i] for i in range(len(part)))]
            for part in (training, validation)
        )
    except Exception as error:  # mlx-lm, the hub and tokenizers raise errors of many types
        reason = f"{type(error).__name__}: {join_lines(error)[:300]}"
        raise RedrafterError(f"cannot read the data {data}: {reason}") from error


def list_ids(texts: Sequence[Text]) -> list[list[Any]]:
    """The offset and the token ids of each text."""
    return [[text.offset, text.ids.tolist()] for text in texts]


def digest(ids: Any) -> str:
    """The SHA-256 of nested lists of token ids."""
    return hashlib.sha256(json.dumps(ids).encode()).hexdigest()


class AnswerFile:
    """A file of generated answers: one line with the settings they depend on, then one line per answer.

    Args:
        path: the file, which may not exist yet.
        args: the settings of the run.
        prompts: token ids of the prompts.
    """

    def __init__(self, path: Path, args: TrainingArgs, prompts: Sequence[Sequence[int]]) -> None:
        self.path, self.prompts, self.args = path, prompts, args
        self.header = {name: getattr(args, name) for name in ("model", "adapter_path", "temp", "max_tokens", "seed")}
        # Prompts of similar length need little padding. The longest come first, as they need the most memory.
        self._order = sorted(range(len(prompts)), key=lambda i: -len(prompts[i]))
        self.header |= {"prompts": digest(prompts), "order": "longest prompt first"}

    def read(self) -> list[list[int]]:
        """The answers in the file, longest prompt first; empty if there is no file."""
        try:
            header, *done = map(json.loads, self.path.read_text(encoding="utf-8").splitlines())
            done = [list(map(int, answer)) for answer in done]
        except FileNotFoundError:
            return []
        except (OSError, ValueError, TypeError) as error:
            raise RedrafterError(f"cannot read the answers in {self.path}: {join_lines(error)}") from error
        for key, value in self.header.items():
            if not isinstance(header, dict) or header.get(key) != value:
                raise RedrafterError(f"{self.path} has the answers of another run, with a different {key}")
        return done[: len(self.prompts)]

    def complete(self, model: nn.Module, tokenizer: Any) -> list[Text]:
        """Generates the missing answers; returns each prompt with its answer.

        A stopped run loses at most one group. An answer includes its end-of-text token.
        """
        done = self.read()
        with tqdm(total=len(self.prompts), initial=len(done), desc="answers") as bar:
            while places := self._order[len(done) : len(done) + MAX_BATCH_SIZE]:
                group = [self.prompts[i] for i in places]
                mx.random.seed(self.args.seed + len(done) // MAX_BATCH_SIZE)
                done += generate_answers(model, tokenizer, group, self.args.temp, self.args.max_tokens)
                bar.update(len(group))
                write_text(self.path, "".join(json.dumps(line) + "\n" for line in [self.header, *done]))
        answers = dict(zip(self._order, done, strict=True))
        return [Text(np.array([*prompt, *answers[i]], np.int32), len(prompt)) for i, prompt in enumerate(self.prompts)]


def generate_answers(
    model: nn.Module, tokenizer: Any, prompts: Sequence[Sequence[int]], temp: float, max_tokens: int
) -> list[list[int]]:
    """Generates answers to all prompts in one batch, with mlx-lm's batch generator."""
    ends = [[token] for token in tokenizer.eos_token_ids]
    generator = BatchGenerator(model, max_tokens=max_tokens, stop_tokens=ends, sampler=make_sampler(temp))
    answers: dict[int, list[int]] = {uid: [] for uid in generator.insert([list(prompt) for prompt in prompts])}
    while responses := generator.next_generated():
        for response in responses:
            answers[response.uid].append(response.token)
    generator.close()
    return list(answers.values())


def select_prompts(args: TrainingArgs, prompts: list[list[int]], say: Callable[[str], None]) -> list[list[int]]:
    """The prompts that leave room for an answer, without duplicates."""
    unique = {tuple(prompt): prompt for prompt in prompts}.values()  # else the same one may be learned and held out
    found = [prompt for prompt in unique if len(prompt) < args.max_seq_length - args.draft_depth]
    if dropped := len(prompts) - len(found):
        say(f"skipped {dropped} of {len(prompts)} prompts: duplicates, or too long for --max-seq-length")
    return found


def cut_texts(args: TrainingArgs, texts: Sequence[Text], name: str, say: Callable[[str], None]) -> list[Text]:
    """Cuts texts to `max_seq_length`, and drops those too short to learn every depth from."""
    cut = [text._replace(ids=text.ids[: args.max_seq_length + 1]) for text in texts]
    usable = [text for text in cut if len(text.ids) > max(text.offset, 1) + args.draft_depth]
    if dropped := len(texts) - len(usable):
        say(f"skipped {dropped} of {len(texts)} {name} texts: too short for drafts of {args.draft_depth}")
    return usable


def split_texts(
    args: TrainingArgs, training: list[Text], validation: list[Text], say: Callable[[str], None]
) -> tuple[list[Text], list[Text]]:
    """(training, validation) texts after `cut_texts`; validation texts beyond `VALIDATION_BATCHES` are dropped.

    Without validation texts, a random part of the training texts is held out.
    """
    training, validation = (
        cut_texts(args, texts, name, say) for texts, name in ((training, "training"), (validation, "validation"))
    )
    if not validation:
        order = np.random.default_rng(args.seed).permutation(len(training)).tolist()
        held_out = set(order[: max(1, round(0.05 * len(training)))])
        validation = [training[i] for i in sorted(held_out)]
        training = [text for i, text in enumerate(training) if i not in held_out]
    if len(training) < args.batch_size:
        raise RedrafterError(
            f"expected at least as many texts as the batch size {args.batch_size}, got {len(training)} that are long "
            f"enough, besides {len(validation)} held out"
        )
    if not args.mask_prompt:
        training = [text._replace(offset=0) for text in training]
    return training, validation[: VALIDATION_BATCHES * args.batch_size]


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
