"""Measures the demo on files that neither the target nor the drafter has seen."""

from __future__ import annotations

import re
from collections.abc import Sequence

import mlx.nn as nn
from corpus import library_name, split_files
from mlx_lm.tokenizer_utils import TokenizerWrapper

from mlx_redrafter import stream_generate
from mlx_redrafter.drafter import Drafter

PROMPTS, PROMPT_TOKENS, NEW_TOKENS = 16, 80, 128
DEFINITION = re.compile(r"^ *(?:async )?def ", re.MULTILINE)


def prompts(tokenizer: TokenizerWrapper) -> dict[str, str]:
    """File name -> whole lines from a function's first on, PROMPT_TOKENS or a few more, of held-out files."""
    found = {}
    for path in split_files()[1]:
        text = path.read_text(encoding="utf-8")
        starts = [match.start() for match in DEFINITION.finditer(text)]
        if starts and (prompt := excerpt(text[starts[len(starts) // 2] :], tokenizer)):
            found[library_name(path)] = prompt
    names = list(found)
    return {name: found[name] for name in names[:: len(names) // PROMPTS][:PROMPTS]}


def excerpt(text: str, tokenizer: TokenizerWrapper) -> str | None:
    """The first lines of `text` that make PROMPT_TOKENS tokens; None when they are too few, or far too long."""
    lines = text.splitlines()
    for count in range(1, len(lines) + 1):
        head = "\n".join(lines[:count])
        size = len(tokenizer.encode(head))
        if size >= PROMPT_TOKENS:
            return head if size <= 2 * PROMPT_TOKENS else None
    return None


def tokens_per_round(
    model: nn.Module,
    tokenizer: TokenizerWrapper,
    drafter: Drafter,
    texts: Sequence[str],
    width: int,
    depth: int,
    temp: float,
) -> tuple[float, list[list[int]]]:
    """(tokens per round pooled over `texts`, the tokens written behind each)."""
    rounds = accepted = 0
    written = []
    for seed, text in enumerate(texts):
        responses = list(
            stream_generate(
                model,
                tokenizer,
                text,
                drafter=drafter,
                beam_width=width,
                draft_depth=depth,
                temp=temp,
                seed=seed,
                max_tokens=NEW_TOKENS,
            )
        )
        rounds += responses[-1].rounds
        accepted += responses[-1].accepted
        written.append([response.token for response in responses])
    return 1 + accepted / rounds, written


def repeated(written: Sequence[Sequence[int]], n: int = 8) -> float:
    """The share of n-grams that the same text had before."""
    total = distinct = 0
    for tokens in written:
        grams = [tuple(tokens[i : i + n]) for i in range(len(tokens) - n + 1)]
        total, distinct = total + len(grams), distinct + len(set(grams))
    return 1 - distinct / total


def held_out_bytes() -> int:
    """How many bytes the held-out files have together."""
    return sum(path.stat().st_size for path in split_files()[1])


def print_table(model: nn.Module, tokenizer: TokenizerWrapper, drafter: Drafter) -> None:
    """Prints tokens per round, greedy and at temperature 0.8."""
    texts = list(prompts(tokenizer).values())
    for temp in (0.0, 0.8):
        for width, depth in ((1, 4), (4, 5)):
            rate, written = tokens_per_round(model, tokenizer, drafter, texts, width, depth, temp)
            print(
                f"temperature {temp}  beam_width {width}  draft_depth {depth}  tokens per round {rate:.2f}  "
                f"repeated 8-grams {repeated(written):.0%}",
                flush=True,
            )
