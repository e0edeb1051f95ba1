"""Decodes prompts one after another, and counts: to try a drafter, and to measure one."""

from __future__ import annotations

import time
from collections.abc import Container, Iterable, Sequence
from contextlib import closing
from typing import Any, NamedTuple

from ..engine.stats import Stats
from ..measuring.pair import Pair
from ..text.encoding import encode_chat
from .generation import open_generation
from .options import Options

TRIAL_PROMPTS = (
    "Write a function that reverses a linked list.\n\ndef reverse(",
    "Explain in three sentences why the sky is blue.",
    "import os\nimport sys\n\n\nclass Reader:\n    def __init__(self, path):\n",
    "List the planets of the solar system, with one fact about each.",
)
"""The prompts on which `doctor` and `convert` try a drafter."""

SPEEDUP_ERROR = 0.03
"""The relative error of a speedup on an idle machine."""


def check_speedup(measured: float, tokens_per_round: float) -> float | None:
    """A measured speedup, at most the tokens per round, as no round is faster than a plain step.

    None if more was measured, apart from noise: other work slowed plain decoding down.
    """
    if measured > (1 + SPEEDUP_ERROR) * tokens_per_round:
        return None
    return min(measured, tokens_per_round)


class PromptRuns(NamedTuple):
    """The result of decoding several prompts.

    Attributes:
        stats: statistics summed over all prompts.
        tokens: the generated tokens for each prompt.
        seconds: the time from the first token to the last, summed over all prompts.
    """

    stats: Stats
    tokens: tuple[tuple[int, ...], ...]
    seconds: float

    @property
    def tokens_per_second(self) -> float:
        """Speed after each prompt's first token; 0 if there are no further tokens."""
        count = sum(len(each) - 1 for each in self.tokens)
        return count / self.seconds if self.seconds else 0.0


def join_runs(runs: Iterable[PromptRuns]) -> PromptRuns:
    """The results of several calls of `decode_prompts` as one."""
    stats, tokens, seconds = zip(*runs, strict=True)
    return PromptRuns(sum(stats, Stats()), sum(tokens, ()), sum(seconds))


def decode_prompts(
    pair: Pair, prompts: Sequence[Sequence[int]], options: Options, end_tokens: Container[int] = ()
) -> PromptRuns:
    """Decodes prompts one after another."""
    stats = Stats()
    tokens = []
    seconds = 0.0
    for prompt in prompts:
        source = pair.open_source()
        generation = open_generation(pair, prompt, options, source, end_tokens=end_tokens)
        with closing(generation):
            next(generation, None)
            started = time.perf_counter()
            for _ in generation:
                pass
            seconds += time.perf_counter() - started
        stats += generation.output.stats
        tokens.append(tuple(generation.output.tokens))
    return PromptRuns(stats, tuple(tokens), seconds)


def try_drafter(pair: Pair, tokenizer: Any, options: Options) -> Stats:
    """Statistics of decoding `TRIAL_PROMPTS`, with the chat template if there is one."""
    prompts = [encode_chat(tokenizer, text) for text in TRIAL_PROMPTS]
    return decode_prompts(pair, prompts, options, set(tokenizer.eos_token_ids)).stats
