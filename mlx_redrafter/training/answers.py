"""The target's own answers to the user's prompts, kept on disk: the best text to learn from is what it will write."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.generate import BatchGenerator
from mlx_lm.sample_utils import make_sampler
from tqdm import tqdm

from ..atomic_files import write_text
from ..errors import RedrafterError, one_line
from .data import Text

AT_ONCE = 32
"""How many answers are written side by side at most, and then saved."""


class Asking(NamedTuple):
    """What answers depend on; a file of answers begins with it.

    Attributes:
        model: the target's name, its adapters included.
        prompts: a digest of the prompts.
        temps: temperatures; groups of prompts take turns.
        max_tokens: of an answer.
        seed: of `mx.random`, for each group anew.
    """

    model: str
    prompts: str
    temps: tuple[float, ...]
    max_tokens: int
    seed: int


def digest(ids: Any) -> str:
    """What tells lists of token ids apart, however they are nested."""
    return hashlib.sha256(json.dumps(ids).encode()).hexdigest()


def group_size(count: int, temps: Sequence[float]) -> int:
    """How many of `count` prompts are answered side by side: so few that every temperature has its turn."""
    return max(1, min(AT_ONCE, -(-count // len(temps))))


def answered(
    model: nn.Module, tokenizer: Any, prompts: Sequence[Sequence[int]], asking: Asking, path: Path
) -> list[Text]:
    """Prompt and answer of each, the prompt masked; those already in `path` are not written again.

    Answers go to the file in groups of `AT_ONCE`, so that a run that was stopped loses one group at most. The token
    that ends an answer is part of it.

    Raises:
        RedrafterError: the file is of other prompts, another model or other settings, or cannot be written.
    """
    done = read(path, asking, len(prompts))
    if len(done) < len(prompts):
        say_(model, tokenizer, prompts, asking, path, done)
    return [
        Text(np.array([*prompt, *answer], np.int32), len(prompt)) for prompt, answer in zip(prompts, done, strict=True)
    ]


def read(path: Path, asking: Asking, count: int) -> list[list[int]]:
    """The answers in a file, whole groups of them; none when there is no file, or none that was begun.

    Args:
        count: how many prompts there are to answer.

    Raises:
        RedrafterError: it is no file of answers, or of other ones.
    """
    try:
        header, *groups = path.read_text(encoding="utf-8").split("\n")[:-1]  # what has no end is half a line
    except (FileNotFoundError, ValueError) as error:
        if isinstance(error, UnicodeDecodeError):
            raise RedrafterError(f"{path} holds no answers: {one_line(error)}; delete it to begin anew") from error
        return []
    try:
        said = dict(json.loads(header))
        sizes = [len(json.loads(group)) for group in groups]
        done = [list(map(int, answer)) for group in groups for answer in json.loads(group)]
    except (ValueError, TypeError, RecursionError) as error:
        raise RedrafterError(f"{path} holds no answers: {one_line(error)}; delete it to begin anew") from error
    wanted = json.loads(json.dumps(asking._asdict()))
    if odd := [key for key in wanted if said.get(key) != wanted[key]]:
        raise RedrafterError(
            f"{path} holds answers of another run: expected {odd[0]} {wanted[odd[0]]}, got {said.get(odd[0])}"
        )
    size = group_size(count, asking.temps)
    if sizes != [min(size, count - start) for start in range(0, count, size)][: len(sizes)] or len(done) > count:
        raise RedrafterError(f"{path} is damaged: its groups of answers are not those of {count} prompts; delete it")
    return done


def say_(
    model: nn.Module,
    tokenizer: Any,
    prompts: Sequence[Sequence[int]],
    asking: Asking,
    path: Path,
    done: list[list[int]],
) -> None:
    """Writes the answers that are missing behind those that are `done`, to the list and to the file."""
    size = group_size(len(prompts), asking.temps)
    try:
        mend_(path, asking)
        groups = [prompts[start : start + size] for start in range(0, len(prompts), size)]
        with path.open("a", encoding="utf-8") as file, tqdm(total=len(prompts), desc="answers") as bar:
            bar.update(len(done))
            started, count = time.perf_counter(), 0
            for number, group in list(enumerate(groups))[len(done) // size :]:
                mx.random.seed(asking.seed + number)
                temp = asking.temps[number % len(asking.temps)]
                answers = generated(model, tokenizer, group, temp, asking.max_tokens)
                file.write(json.dumps(answers) + "\n")
                file.flush()
                done += answers
                count += sum(map(len, answers))
                bar.update(len(group))
                bar.set_postfix_str(f"{count / (time.perf_counter() - started):.0f} tokens/s")
    except OSError as error:
        raise RedrafterError(f"cannot write the answers to {path}: {one_line(error)}") from error


def mend_(path: Path, asking: Asking) -> None:
    """Begins the file, or cuts off half a line at its end; at no moment is a whole line lost."""
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    whole = text[: text.rfind("\n") + 1] or json.dumps(asking._asdict()) + "\n"
    if whole != text:
        write_text(path, whole)


def generated(
    model: nn.Module, tokenizer: Any, prompts: Sequence[Sequence[int]], temp: float, max_tokens: int
) -> list[list[int]]:
    """The answers to these prompts, side by side, by mlx-lm's batch generator."""
    generator = BatchGenerator(
        model,
        max_tokens=max_tokens,
        stop_tokens=[[token] for token in tokenizer.eos_token_ids],
        sampler=make_sampler(temp),
    )
    uids = generator.insert([list(prompt) for prompt in prompts])
    answers: dict[int, list[int]] = {uid: [] for uid in uids}
    while responses := generator.next_generated():
        for response in responses:
            answers[response.uid].append(response.token)
    generator.close()
    return [answers[uid] for uid in uids]
