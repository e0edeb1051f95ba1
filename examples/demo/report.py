"""Measures the demo on files that neither the target nor the drafter has seen."""

from __future__ import annotations

import math
import re
from itertools import zip_longest
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.tokenizer_utils import TokenizerWrapper
from tqdm import tqdm

from benchmarks.acceptance import measure_plan
from examples.demo.library import get_library_name, split_files
from mlx_redrafter.decoding.responses import stream_generate
from mlx_redrafter.drafters.recurrent import Drafter
from mlx_redrafter.text.encoding import encode

from .edits import Edit, make_edits

PROMPTS = 16
PROMPT_TOKENS = 80
NEW_TOKENS = 128
WINDOW = 1024
DEFINITION = re.compile(r"^ *(?:async )?def ", re.MULTILINE)


def choose_prompts(tokenizer: TokenizerWrapper, count: int = PROMPTS) -> dict[str, str]:
    """File name -> whole lines from a function's first on, of `count` held-out files.

    They make PROMPT_TOKENS tokens or a few more.
    """
    found = {}
    for path in split_files()[1]:
        text = path.read_text(encoding="utf-8")
        starts = [match.start() for match in DEFINITION.finditer(text)]
        if starts:
            prompt = cut_excerpt(text[starts[len(starts) // 2] :], tokenizer)
            if prompt:
                found[get_library_name(path)] = prompt
    names = list(found)
    return {name: found[name] for name in names[:: max(1, len(names) // count)][:count]}


def cut_excerpt(text: str, tokenizer: TokenizerWrapper) -> str | None:
    """The first lines of `text` that make PROMPT_TOKENS tokens.

    None if they are too few, or far too long.
    """
    lines = text.splitlines()
    for count in range(1, len(lines) + 1):
        head = "\n".join(lines[:count])
        size = len(tokenizer.encode(head))
        if size >= PROMPT_TOKENS:
            return head if size <= 2 * PROMPT_TOKENS else None
    return None


def measure_bits_per_byte(model: nn.Module, tokens: np.ndarray) -> float:
    """Bits the model needs for each byte of the held-out files.

    They are read in windows of WINDOW tokens without overlap.

    Args:
        tokens: the files as a stream of ids.
    """
    nats = 0.0
    for i in range(0, len(tokens) - 1, WINDOW):
        ids = mx.array(tokens[i : i + WINDOW + 1].astype(np.int32))[None]
        nats += nn.losses.cross_entropy(model(ids[:, :-1]), ids[:, 1:]).sum().item()
    return nats / math.log(2) / sum(path.stat().st_size for path in split_files()[1])


def make_held_out_edits(
    tokenizer: TokenizerWrapper, count: int, seed: int, answer_tokens: range
) -> list[Edit]:
    """Edits of held-out functions and of JSON documents with their names, as many of each kind.

    Args:
        answer_tokens: how long their answers are.
    """
    texts = [path.read_text(encoding="utf-8") for path in split_files()[1]]
    made = make_edits(texts, 10 * count, seed)
    short = [edit for edit in made if len(tokenizer.encode(edit.after)) in answer_tokens]
    kinds = {edit.kind: [each for each in short if each.kind == edit.kind] for edit in short}
    turns = zip_longest(*(kinds[kind] for kind in sorted(kinds)))
    return [edit for turn in turns for edit in turn if edit][:count]


def is_right(model: nn.Module, tokenizer: TokenizerWrapper, edit: Edit) -> bool:
    """Whether the greedy answer to an edit is the edited source, ended by the end-of-text token."""
    limit = len(tokenizer.encode(edit.after)) + 1
    answers = list(stream_generate(model, tokenizer, edit.prompt, max_tokens=limit))
    text = "".join(each.text for each in answers)
    return answers[-1].finish_reason == "stop" and text == edit.after


def measure_edits(
    model: nn.Module, tokenizer: TokenizerWrapper, made: list[Edit]
) -> list[dict[str, Any]]:
    """A line for each kind of edit and one for all: how many there are, and how many are right."""
    right: dict[str, list[bool]] = {}
    for edit in tqdm(made, desc="edits"):
        right.setdefault(edit.kind, []).append(is_right(model, tokenizer, edit))
    kinds = dict(sorted(right.items()))
    kinds["all"] = [found for kind in right.values() for found in kind]
    return [
        {"kind": kind, "edits": len(found), "right": sum(found)} for kind, found in kinds.items()
    ]


def measure_texts(
    model: nn.Module, tokenizer: TokenizerWrapper, drafter: Drafter
) -> list[dict[str, Any]]:
    """Lines of `benchmarks.acceptance` on held-out prompts, greedy and sampled, with two plans."""
    ids = [encode(tokenizer, text) for text in choose_prompts(tokenizer).values()]
    return [
        {"temp": temp} | measure_plan(model, drafter, ids, plan, max_tokens=NEW_TOKENS, temp=temp)
        for temp in (0.0, 0.8)
        for plan in ((1, 4), (4, 5))
    ]
