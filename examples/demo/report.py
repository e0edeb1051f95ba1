"""Measures the demo on files that neither the target nor the drafter has seen."""

from __future__ import annotations

import re

import mlx.nn as nn
from mlx_lm.tokenizer_utils import TokenizerWrapper

from benchmarks.acceptance import measure
from mlx_redrafter.demo.sources import library_name, split_files
from mlx_redrafter.drafters.recurrent import Drafter
from mlx_redrafter.generate import encode

PROMPTS, PROMPT_TOKENS, NEW_TOKENS = 16, 80, 128
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


def held_out_bytes() -> int:
    """How many bytes the held-out files have together."""
    return sum(path.stat().st_size for path in split_files()[1])


def measured(model: nn.Module, tokenizer: TokenizerWrapper, drafter: Drafter, count: int = PROMPTS) -> dict[str, float]:
    """Tokens per round on so many held-out prompts, greedy and at temperature 0.8, at two shapes."""
    ids = [encode(tokenizer, text) for text in prompts(tokenizer, count).values()]
    return {
        f"{shape[0]}x{shape[1]} at {temp}": measure(model, drafter, ids, shape, max_tokens=NEW_TOKENS, temp=temp)[
            "tokens/round"
        ]
        for temp in (0.0, 0.8)
        for shape in ((1, 4), (4, 5))
    }
