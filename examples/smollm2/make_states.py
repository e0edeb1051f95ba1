"""Stores what the target computes at the tokens of answers, for `compare_losses.py`.

    python -m examples.smollm2.make_states TARGET OUTPUT --count 2816

Reads the conversations in a fixed random order (seed 0) and writes a shard, an .npz file, for each
256 of them; shards that are there are not written again. The forward is in bfloat16, which x86 CPUs
with AMX compute fast. A shard has the arrays of `StoredExample` one example after the other, and

    sizes   (N,) int32, tokens of each example
    leads   (N,) int32
    temps   (N,) float32
"""

from __future__ import annotations

import argparse
import gzip
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from examples.smollm2.stored_states import PACKAGED, load_draft_ids, make_index
from mlx_redrafter.files import replace_file

ANSWERS = Path(__file__).with_name("answers.jsonl.gz")
SHARD_SIZE = 256
BATCH_TOKENS = 3072
HEAD_POSITIONS = 128
LABELS = 32
DEPTH = 5
MAX_ANSWER = 158
"""Tokens of the longest answers; these were cut and have no end token."""


class Answer(NamedTuple):
    """A conversation as tokens.

    Attributes:
        tokens: prompt and answer.
        offset: the number of prompt tokens.
        temp: the temperature of the answer.
    """

    tokens: list[int]
    offset: int
    temp: float

    @property
    def first_learned(self) -> int:
        """The first position whose next token is learned."""
        return max(1, self.offset - 1)

    @property
    def start(self) -> int:
        """The first position that is stored."""
        return max(0, self.first_learned - DEPTH)


class States(NamedTuple):
    """The arrays of `StoredExample`."""

    tokens: np.ndarray
    hidden: np.ndarray
    ids: np.ndarray
    probs: np.ndarray


def encode(tokenizer: Any, conversation: dict[str, Any]) -> Answer:
    """A conversation with the end token of its answer, if that is not cut."""
    messages = conversation["messages"]
    options: dict[str, Any] = {"tokenize": True, "return_dict": False}
    prompt = tokenizer.apply_chat_template(messages[:-1], add_generation_prompt=True, **options)
    tokens = tokenizer.apply_chat_template(messages, **options)
    end = len(tokens) - 1  # without the newline after the end token
    if end - 1 - len(prompt) >= MAX_ANSWER:
        end -= 1
    return Answer(tokens[:end], len(prompt), conversation["temp"])


@torch.inference_mode()
def compute_states(model: Any, answers: Sequence[Answer], index: Tensor) -> list[States]:
    """The states of some answers, with one forward.

    The last token is not read; its states are those of the token before.

    Args:
        index: (V,), see `make_index`.
    """
    width = max(len(answer.tokens) for answer in answers) - 1
    inputs = torch.zeros(len(answers), width, dtype=torch.long)
    for i, answer in enumerate(answers):
        inputs[i, : len(answer.tokens) - 1] = torch.tensor(answer.tokens[:-1])
    found = []
    for answer, outputs in zip(answers, model.model(inputs).last_hidden_state, strict=True):
        hidden = outputs[answer.start : len(answer.tokens) - 1]
        ids = []
        probs = []
        for part in hidden.split(HEAD_POSITIONS):
            logits = model.lm_head(part).float()
            top, tokens = logits.topk(LABELS)
            largest = top[:, :1]
            norm = logits.sub_(largest).exp_().sum(-1, keepdim=True)
            ids.append(index[tokens].numpy())
            probs.append(((top - largest).exp() / norm).numpy())
        states = States(
            np.array(answer.tokens[answer.start :], np.int32),
            repeat_last(hidden.float().numpy().astype(np.float16)),
            repeat_last(np.concatenate(ids).astype(np.int16)),
            repeat_last(np.concatenate(probs).astype(np.float16)),
        )
        found.append(states)
    return found


def repeat_last(array: np.ndarray) -> np.ndarray:
    """(L, ...) -> (L + 1, ...)"""
    return np.concatenate([array, array[-1:]])


def group_by_length(answers: Sequence[Answer]) -> list[list[int]]:
    """Indices of answers that one forward reads, the shortest first."""
    groups = list[list[int]]()
    for i in sorted(range(len(answers)), key=lambda i: len(answers[i].tokens)):
        if groups and (len(groups[-1]) + 1) * len(answers[i].tokens) <= BATCH_TOKENS:
            groups[-1].append(i)
        else:
            groups.append([i])
    return groups


def make_shard(model: Any, answers: Sequence[Answer], index: Tensor) -> dict[str, np.ndarray]:
    """The arrays of a shard."""
    states = dict[int, States]()
    for group in group_by_length(answers):
        computed = compute_states(model, [answers[i] for i in group], index)
        states.update(zip(group, computed, strict=True))
    arrays = {
        name: np.concatenate([getattr(states[i], name) for i in range(len(answers))])
        for name in States._fields
    }
    return arrays | {
        "sizes": np.array([len(states[i].tokens) for i in range(len(answers))], np.int32),
        "leads": np.array([each.first_learned - each.start for each in answers], np.int32),
        "temps": np.array([answer.temp for answer in answers], np.float32),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("target", type=Path, help="folder with SmolLM2-135M-Instruct")
    parser.add_argument("output", type=Path, help="folder for the shards")
    parser.add_argument("--answers", type=Path, default=ANSWERS, help="conversations, .jsonl.gz")
    parser.add_argument("--drafter", type=Path, default=PACKAGED, help="has the vocabulary")
    parser.add_argument("--count", type=int, help="the first conversations only")
    args = parser.parse_args()
    torch.set_num_threads(1)
    with gzip.open(args.answers, "rt", encoding="utf-8") as file:
        conversations = [json.loads(line) for line in file]
    order = np.random.default_rng(0).permutation(len(conversations))[: args.count]
    model = LlamaForCausalLM.from_pretrained(args.target, dtype=torch.bfloat16).eval()
    tokenizer = PreTrainedTokenizerFast.from_pretrained(args.target)
    index = make_index(load_draft_ids(args.drafter), model.config.vocab_size)
    for shard, start in enumerate(range(0, len(order), SHARD_SIZE)):
        path = args.output / f"{shard:03}.npz"
        if path.exists():
            continue
        began = time.time()
        chosen = order[start : start + SHARD_SIZE]
        answers = [encode(tokenizer, conversations[i]) for i in chosen]
        answers = [answer for answer in answers if len(answer.tokens) > answer.offset + 1]
        arrays = make_shard(model, answers, index)
        with replace_file(path) as partial:
            np.savez(partial, **arrays)
        print(f"{path.name}: {len(answers)} answers, {time.time() - began:.0f} s", flush=True)


if __name__ == "__main__":
    main()
