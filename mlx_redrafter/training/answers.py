"""The target's own answers to prompts, kept on disk: the best text to learn from is what it will write."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.generate import BatchGenerator
from mlx_lm.sample_utils import make_sampler
from tqdm import tqdm

from ..atomic_files import write_text
from ..errors import RedrafterError, one_line
from .data import Text, digest
from .settings import TrainingArgs

AT_ONCE = 32  # answers that are written side by side at most, and then saved


class AnswerFile:
    """The answers to some prompts: a line that says what they depend on, then a line for each answer.

    Args:
        path: of the file, which need not exist.
        args: the settings of the run.
        prompts: their token ids.
    """

    def __init__(self, path: Path, args: TrainingArgs, prompts: Sequence[Sequence[int]]) -> None:
        self.path, self.prompts, self.args = path, prompts, args
        self.header = {
            **{name: args.to_json()[name] for name in ("model", "adapter_path", "temp", "max_tokens", "seed")},
            "prompts": digest(prompts),
        }
        # Few enough that every temperature has its turn.
        self.group_size = max(1, min(AT_ONCE, -(-len(prompts) // len(args.temp))))

    def read(self) -> list[list[int]]:
        """The answers in the file, in the order of the prompts; none when there is no file.

        Raises:
            RedrafterError: not a file of answers, or of other ones.
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

    def complete(self, model: nn.Module, tokenizer: Any) -> list[Text]:
        """Prompt and answer of each, the prompt masked; the target writes the answers that the file does not have.

        A stopped run loses one group at most. The token that ends an answer is part of it.

        Raises:
            RedrafterError: see `read`.
            OSError: the file cannot be written.
        """
        done = self.read()
        with tqdm(total=len(self.prompts), initial=len(done), desc="answers") as bar:
            while group := self.prompts[len(done) : len(done) + self.group_size]:
                number = len(done) // self.group_size
                mx.random.seed(self.args.seed + number)
                temp = self.args.temp[number % len(self.args.temp)]
                done += generate_answers(model, tokenizer, group, temp, self.args.max_tokens)
                bar.update(len(group))
                write_text(self.path, "".join(json.dumps(line) + "\n" for line in [self.header, *done]))
        pairs = zip(self.prompts, done, strict=True)
        return [Text(np.array([*prompt, *answer], np.int32), len(prompt)) for prompt, answer in pairs]


def generate_answers(
    model: nn.Module, tokenizer: Any, prompts: Sequence[Sequence[int]], temp: float, max_tokens: int
) -> list[list[int]]:
    """The answers to these prompts, side by side, by mlx-lm's batch generator."""
    ends = [[token] for token in tokenizer.eos_token_ids]
    generator = BatchGenerator(model, max_tokens=max_tokens, stop_tokens=ends, sampler=make_sampler(temp))
    uids = generator.insert([list(prompt) for prompt in prompts])
    answers: dict[int, list[int]] = {uid: [] for uid in uids}
    while responses := generator.next_generated():
        for response in responses:
            answers[response.uid].append(response.token)
    generator.close()
    return [answers[uid] for uid in uids]
