"""Measures the demo on files that neither the target nor the drafter has seen."""

from __future__ import annotations

import math
import re
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.tokenizer_utils import TokenizerWrapper

from benchmarks.acceptance import measure
from mlx_redrafter.demo.sources import library_name, split_files
from mlx_redrafter.drafters.recurrent import Drafter
from mlx_redrafter.generate import encode

PROMPTS, PROMPT_TOKENS, NEW_TOKENS = 16, 80, 128
WINDOW = 1024
DEFINITION = re.compile(r"^ *(?:async )?def ", re.MULTILINE)


def prompts(tokenizer: TokenizerWrapper, count: int = PROMPTS) -> dict[str, str]:
    """File name -> whole lines from a function's first on, PROMPT_TOKENS or a few more, of `count` held-out files."""
    found = {}
    for path in split_files()[1]:
        text = path.read_text(encoding="utf-8")
        starts = [match.start() for match in DEFINITION.finditer(text)]
        if starts and (prompt := excerpt(text[starts[len(starts) // 2] :], tokenizer)):
            found[library_name(path)] = prompt
    names = list(found)
    return {name: found[name] for name in names[:: max(1, len(names) // count)][:count]}


def excerpt(text: str, tokenizer: TokenizerWrapper) -> str | None:
    """The first lines of `text` that make PROMPT_TOKENS tokens; None when they are too few, or far too long."""
    lines = text.splitlines()
    for count in range(1, len(lines) + 1):
        head = "\n".join(lines[:count])
        size = len(tokenizer.encode(head))
        if size >= PROMPT_TOKENS:
            return head if size <= 2 * PROMPT_TOKENS else None
    return None


def bits_per_byte(model: nn.Module, tokens: np.ndarray) -> float:
    """Bits the model needs for each byte of the held-out files, in windows of WINDOW tokens without overlap.

    Args:
        tokens: the files as a stream of ids.
    """
    nats = 0.0
    for i in range(0, len(tokens) - 1, WINDOW):
        ids = mx.array(tokens[i : i + WINDOW + 1].astype(np.int32))[None]
        nats += nn.losses.cross_entropy(model(ids[:, :-1]), ids[:, 1:]).sum().item()
    return nats / math.log(2) / sum(path.stat().st_size for path in split_files()[1])


def measure_texts(model: nn.Module, tokenizer: TokenizerWrapper, drafter: Drafter) -> list[dict[str, Any]]:
    """Rows of `benchmarks.acceptance` on held-out prompts, greedy and at temperature 0.8, at two shapes."""
    ids = [encode(tokenizer, text) for text in prompts(tokenizer).values()]
    return [
        {"temp": temp} | measure(model, drafter, ids, plan, max_tokens=NEW_TOKENS, temp=temp)
        for temp in (0.0, 0.8)
        for plan in ((1, 4), (4, 5))
    ]
