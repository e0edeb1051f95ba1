"""Texts to train on, given ones, past answers or the target's own answers to prompts, and their batches."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Sequence
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.generate import BatchGenerator
from mlx_lm.sample_utils import make_sampler
from mlx_lm.tuner.datasets import CacheDataset, load_dataset
from tqdm import tqdm

from ..answer_folder import Text as Text
from ..answer_folder import number_request, read_texts
from ..atomic_files import expand_path, write_text
from ..errors import RedrafterError, one_line
from ..generate import encode_chat
from .settings import TrainingArgs
from .targets import Batch

AT_ONCE = 32
"""Answers that are written side by side at most, and then saved."""

HELD_OUT = 10
"""One past request in this many is held out."""

PAD_TO, PAD_POSITIONS_TO = 32, 128
"""Texts of a batch are padded to one more than a multiple of this, and what is learned of them: few shapes occur."""

Prompt = str | list[dict[str, Any]]
"""A prompt as it was given: a string, or the messages of a chat."""


class TooFewTextsError(RedrafterError):
    """There is not enough to learn from, or nothing to hold out."""


def read_lines(path: Path, what: str) -> list[tuple[str, str]]:
    """(line, its place) for each line of a file that is not empty.

    Args:
        what: names the lines in errors.

    Raises:
        RedrafterError: it cannot be read, or has no lines.
    """
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise RedrafterError(f"cannot read the {what} in {path}: {one_line(error)}") from error
    found = [(line, f"{path}, line {number}") for number, line in enumerate(lines, start=1) if line.strip()]
    if not found:
        raise RedrafterError(f"expected {what} in {path}, one a line, got an empty file")
    return found


def parse_object(line: str, place: str) -> dict[str, Any]:
    """The JSON object of a line."""
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise RedrafterError(f"{place}: expected a JSON object, got {line[:40]!r}")
    return value


def read_prompts(path: str | Path) -> list[Prompt]:
    """The prompts in a file: one a line, or jsonl with `prompt` or `messages`, whose answer is left to the target.

    Raises:
        RedrafterError: no such file, an empty one, or a line that is not a prompt.
    """
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
    """Their token ids, through the chat template if there is one.

    Raises:
        RedrafterError: a prompt that the chat template refuses, or one without a token.
    """
    found = []
    for number, prompt in enumerate(prompts, start=1):
        try:
            found.append(encode_chat(tokenizer, prompt))
        except Exception as error:  # whatever a chat template says of messages that it does not take
            raise RedrafterError(f"prompt {number}: the tokenizer refuses it: {one_line(error)[:200]}") from error
        if not found[-1]:
            raise RedrafterError(f"prompt {number}: expected at least one token, got none")
    return found


def load_prompts(path: str | Path, tokenizer: Any) -> list[list[int]]:
    """The prompts in a file as token ids; errors are those of `read_prompts` and `encode_prompts`."""
    return encode_prompts(read_prompts(path), tokenizer)


def check_data(data: str) -> None:
    """Refuses what `load_texts` could not read, without a tokenizer or the network.

    Raises:
        RedrafterError: naming the folder, the file or the line.
    """
    path = expand_path(data)
    problem = "expected a directory of train.jsonl and valid.jsonl, or a data set's hub id, got " + repr(data)
    if path.is_dir():
        for file in (path / "train.jsonl", path / "valid.jsonl"):
            if file.exists() or file.name == "train.jsonl":
                for line, place in read_lines(file, "texts"):  # mlx-lm would not say which line
                    parse_object(line, place)
    elif path.exists():
        raise RedrafterError(f"{problem}, a file")
    elif data.count("/") > 1 or data.startswith((".", "~", "/")):  # no hub id
        raise RedrafterError(f"{problem}: no such folder")
    elif find_spec("datasets") is None:
        raise RedrafterError(f'{problem}: no such folder; to read data sets of the hub, pip install ".[train]"')


def load_texts(data: str, tokenizer: Any, *, mask_prompt: bool) -> tuple[list[Text], list[Text]]:
    """(training, validation) texts, by mlx-lm's own loader.

    Args:
        data: a directory of {train, valid}.jsonl, or a data set of the Hugging Face hub.

    Raises:
        RedrafterError: there is no such data, or it is in no form that mlx-lm reads.
    """
    check_data(data)
    path = expand_path(data)
    name = str(path) if path.exists() else data
    settings = SimpleNamespace(data=name, train=True, test=False, mask_prompt=mask_prompt)
    try:
        training, validation, _ = (CacheDataset(part) for part in load_dataset(settings, tokenizer))
        return tuple(  # type: ignore[return-value]
            [Text(np.array(ids), int(offset)) for ids, offset in (part[i] for i in range(len(part)))]
            for part in (training, validation)
        )
    except Exception as error:  # whatever the data makes mlx-lm, the hub and the tokenizer say
        reason = f"{type(error).__name__}: {one_line(error)[:300]}"
        raise RedrafterError(f"cannot read the data {data}: {reason}") from error


def load_answers(folder: str, kept: Path | None, tokenizer: Any, max_seq_length: int) -> tuple[list[Text], list[Text]]:
    """(training, validation) texts of past answers. A request is held out in every run or in none.

    Args:
        folder: `--answers` of the commands that kept them.
        kept: the file in which `save_texts` has kept those of a run; None for a new run.
        max_seq_length: longer texts lose their beginning, as the answer is at the end.

    Raises:
        RedrafterError: see `read_texts`.
    """
    if kept is not None:
        parts = json.loads(kept.read_text(encoding="utf-8"))
        training, validation = ([Text(np.array(ids, np.int32), offset) for offset, ids in part] for part in parts)
        return training, validation
    found: tuple[list[Text], list[Text]] = [], []
    for text in read_texts(folder, tokenizer):
        cut = max(0, len(text.ids) - max_seq_length - 1)
        found[is_held_out(text)].append(Text(text.ids[cut:], max(0, text.offset - cut)))
    return found


def is_held_out(text: Text) -> bool:
    """Whether the request of a past text is held out, which its number says."""
    request = number_request(text.ids[: text.offset]) if text.request is None else text.request
    return request % HELD_OUT == 0


def save_texts(path: Path, *parts: Sequence[Text]) -> None:
    """Keeps texts for `load_answers`."""
    write_text(path, json.dumps(list(map(list_ids, parts))) + "\n")


def list_ids(texts: Sequence[Text]) -> list[list[Any]]:
    """The offset and the token ids of each text."""
    return [[text.offset, text.ids.tolist()] for text in texts]


def digest(ids: Any) -> str:
    """A hash of nested lists of token ids."""
    return hashlib.sha256(json.dumps(ids).encode()).hexdigest()


class AnswerFile:
    """The file of the answers to some prompts: a line with the settings they depend on, then a line for each answer.

    Args:
        path: of the file, which need not exist.
        args: the settings of the run.
        prompts: their token ids.
    """

    def __init__(self, path: Path, args: TrainingArgs, prompts: Sequence[Sequence[int]]) -> None:
        self.path, self.prompts, self.args = path, prompts, args
        settings = args.to_json()
        self.header = {name: settings[name] for name in ("model", "adapter_path", "temp", "max_tokens", "seed")}
        # Prompts of about the same length need no padding beside each other; the longest need the most memory.
        self._order = sorted(range(len(prompts)), key=lambda i: -len(prompts[i]))
        self.header |= {"prompts": digest(prompts), "order": "longest prompt first"}
        # Small enough for a group of every temperature.
        self.group_size = max(1, min(AT_ONCE, -(-len(prompts) // len(args.temp))))

    def read(self) -> list[list[int]]:
        """The answers in the file, that to the longest prompt first; none when there is no file.

        Raises:
            RedrafterError: not a file of answers, or of answers to other prompts or settings.
        """
        try:
            header, *done = map(json.loads, self.path.read_text(encoding="utf-8").splitlines())
            done = [list(map(int, answer)) for answer in done]
        except FileNotFoundError:
            return []
        except (OSError, ValueError, TypeError) as error:
            raise RedrafterError(f"cannot read the answers in {self.path}: {one_line(error)}") from error
        for key, value in self.header.items():
            if not isinstance(header, dict) or header.get(key) != value:
                raise RedrafterError(f"{self.path} holds the answers of another run, with another {key}")
        return done[: len(self.prompts)]

    def count_missing(self) -> int:
        """How many answers the file does not have; errors are those of `read`."""
        return len(self.prompts) - len(self.read())

    def complete(self, model: nn.Module, tokenizer: Any) -> list[Text]:
        """Prompt and answer of each, the prompt masked; the target writes the answers that the file does not have.

        A stopped run loses one group at most. The token that ends an answer is part of it.

        Raises:
            RedrafterError: see `read`.
            OSError: the file cannot be written.
        """
        done = self.read()
        with tqdm(total=len(self.prompts), initial=len(done), desc="answers") as bar:
            while places := self._order[len(done) : len(done) + self.group_size]:
                group = [self.prompts[i] for i in places]
                number = len(done) // self.group_size
                mx.random.seed(self.args.seed + number)
                temp = self.args.temp[number % len(self.args.temp)]
                done += generate_answers(model, tokenizer, group, temp, self.args.max_tokens)
                bar.update(len(group))
                write_text(self.path, "".join(json.dumps(line) + "\n" for line in [self.header, *done]))
        answers = dict(zip(self._order, done, strict=True))
        return [join_text(prompt, answers[i]) for i, prompt in enumerate(self.prompts)]


def join_text(prompt: Sequence[int], answer: Sequence[int]) -> Text:
    """A prompt and its answer, the prompt masked."""
    return Text(np.array([*prompt, *answer], np.int32), len(prompt))


def generate_answers(
    model: nn.Module, tokenizer: Any, prompts: Sequence[Sequence[int]], temp: float, max_tokens: int
) -> list[list[int]]:
    """The answers to these prompts, side by side, by mlx-lm's batch generator."""
    ends = [[token] for token in tokenizer.eos_token_ids]
    generator = BatchGenerator(model, max_tokens=max_tokens, stop_tokens=ends, sampler=make_sampler(temp))
    answers: dict[int, list[int]] = {uid: [] for uid in generator.insert([list(prompt) for prompt in prompts])}
    while responses := generator.next_generated():
        for response in responses:
            answers[response.uid].append(response.token)
    generator.close()
    return list(answers.values())


def n_held_out(count: int) -> int:
    """How many texts are held out if there are no validation texts."""
    return min(max(1, round(0.05 * count)), 256)


def select_prompts(args: TrainingArgs, prompts: list[list[int]], say: Callable[[str], None]) -> list[list[int]]:
    """The prompts that leave room for an answer, each once, the first `max_prompts` of them.

    Raises:
        RedrafterError: too few for a batch and one to hold out.
    """
    unique = {tuple(prompt): prompt for prompt in prompts}.values()  # else one is learned and held out
    found = [prompt for prompt in unique if len(prompt) < args.max_seq_length - args.draft_depth]
    if dropped := len(prompts) - len(found):
        say(f"{dropped} of {len(prompts)} prompts are left out: given twice, or longer than --max-seq-length allows")
    found = found[: args.max_prompts]
    held_out = n_held_out(len(found))
    if len(found) < args.batch_size + held_out:
        raise RedrafterError(
            f"expected at least {args.batch_size + held_out} prompts, {held_out} of them to hold out, for a batch "
            f"size of {args.batch_size}, got {len(found)}"
        )
    used, count = args.iters * args.batch_size, len(found)
    if used < count - held_out:
        say(f"note: {args.iters} iterations learn from {used} answers at most: --max-prompts makes fewer than {count}")
    return found


def cut_texts(args: TrainingArgs, texts: Sequence[Text], name: str, say: Callable[[str], None]) -> list[Text]:
    """The texts, cut to `max_seq_length`, and without those that have nothing to learn at every depth."""
    cut = [text._replace(ids=text.ids[: args.max_seq_length + 1]) for text in texts]
    usable = [text for text in cut if len(text.ids) > max(text.offset, 1) + args.draft_depth]
    if dropped := len(texts) - len(usable):
        say(f"{dropped} of {len(texts)} {name} texts are left out: too short for drafts of {args.draft_depth}")
    return usable


def split_texts(
    args: TrainingArgs, training: list[Text], validation: list[Text], say: Callable[[str], None]
) -> tuple[list[Text], list[Text]]:
    """(training, validation), see `cut_texts`; of validation texts as many as a validation takes.

    Without validation texts a random share of the others is held out, except of past answers.

    Raises:
        TooFewTextsError: too few.
    """
    training, validation = (
        cut_texts(args, texts, name, say) for texts, name in ((training, "training"), (validation, "validation"))
    )
    if args.answers and len(validation) < 2:
        raise TooFewTextsError(
            f"expected at least 2 held-out answers, got {len(validation)} beside {len(training)} to learn: every "
            f"{HELD_OUT}th request is held out"
        )
    if not validation:
        if len(training) < 2:
            raise TooFewTextsError(f"expected at least 2 texts of enough tokens, got {len(training)}")
        order = np.random.default_rng(args.seed).permutation(len(training)).tolist()
        held_out = set(order[: n_held_out(len(training))])
        validation = [training[i] for i in sorted(held_out)]
        training = [text for i, text in enumerate(training) if i not in held_out]
    if len(training) < args.batch_size:
        raise TooFewTextsError(
            f"expected at least as many texts as the batch size {args.batch_size}, got {len(training)}"
        )
    if args.learn_prompts:
        training = [text._replace(offset=0) for text in training]
    return training, validation[: args.val_batches * args.batch_size] if args.val_batches > 0 else validation


def make_batches(texts: Sequence[Text], batch_size: int, seed: int) -> Callable[[int], Batch]:
    """Iteration -> a batch of texts of similar length; the order is new each time all have been seen.

    A function of the iteration alone, so that a resumed run sees what it would have seen.
    """
    by_length = sorted(range(len(texts)), key=lambda i: len(texts[i].ids))
    count = len(texts) // batch_size

    def batch(iteration: int) -> Batch:
        epoch, at = divmod(iteration, count)
        rng = np.random.default_rng((seed, epoch))
        # Texts that do not fill a batch are others in each epoch.
        skipped = set(rng.choice(len(texts), len(texts) - count * batch_size, replace=False).tolist())
        order = [i for place, i in enumerate(by_length) if place not in skipped]
        start = int(rng.permutation(count)[at]) * batch_size
        return collate([texts[i] for i in order[start : start + batch_size]])

    return batch


def collate(texts: Sequence[Text]) -> Batch:
    """Texts as a batch, padded at the end, with hidden states if they have them."""

    def pad(size: int, multiple: int) -> int:
        return multiple * max(1, -(-size // multiple))

    width = 1 + pad(max(len(text.ids) for text in texts) - 1, PAD_TO)
    ids = np.zeros((len(texts), width), np.int32)
    positions: list[int] = []
    for row, text in enumerate(texts):
        ids[row, : len(text.ids)] = text.ids
        positions += range(row * (width - 1) + text.first_learned, row * (width - 1) + len(text.ids) - 1)
    padded = np.full(pad(len(positions), PAD_POSITIONS_TO), -1, np.int32)
    padded[: len(positions)] = positions
    hidden: mx.array | None = None
    if (first_states := texts[0].hidden) is not None:
        states = np.zeros((len(texts), width - 1, first_states.shape[-1]), first_states.dtype)
        for row, text in enumerate(texts):
            assert text.hidden is not None
            states[row, : len(text.hidden)] = text.hidden
        hidden = mx.array(states)
    likeliest: tuple[mx.array, mx.array] | None = None
    if texts[0].likeliest is not None:
        # Of learned positions alone, one text after the other, as in `positions`.
        found = [[column[text.first_learned :] for column in text.likeliest or ()] for text in texts]
        columns = map(np.concatenate, zip(*found, strict=True))
        tokens, probs = (mx.array(np.resize(column, (len(padded), column.shape[1]))) for column in columns)
        likeliest = tokens, probs
    return Batch(mx.array(ids), mx.array(padded), hidden, likeliest)


def most_frequent(texts: Iterable[Text], count: int, vocab_size: int) -> np.ndarray:
    """(count,) int32, ascending: the tokens that are written most often; the lower id first among equals."""
    seen = np.zeros(vocab_size, np.int64)
    for text in texts:
        seen += np.bincount(text.ids[text.offset :], minlength=vocab_size)[:vocab_size]
    return np.sort(np.argsort(-seen, kind="stable")[:count]).astype(np.int32)
