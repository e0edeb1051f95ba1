"""Real decoding of several prompts, pooled: what a drafter is worth, and how fast it is."""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from typing import NamedTuple

import mlx.nn as nn

from ..drafters.recurrent import Drafter
from .decode import Settings, decode
from .stats import Stats


class Trial(NamedTuple):
    """What came of it.

    Attributes:
        stats: of all prompts together.
        texts: the token ids that were made, for each prompt.
        seconds: from each prompt's first token to its last, added up.
    """

    stats: Stats
    texts: tuple[tuple[int, ...], ...]
    seconds: float

    @property
    def tokens_per_second(self) -> float:
        """After the first token of each prompt; 0 when there is no more than that."""
        made = sum(len(text) - 1 for text in self.texts)
        return made / self.seconds if self.seconds else 0.0


def try_out(
    model: nn.Module,
    drafter: Drafter | None,
    prompts: Sequence[Sequence[int]],
    settings: Settings,
    ends: Collection[int] = (),
) -> Trial:
    """Decodes every prompt; `drafter` None decodes plainly.

    Args:
        prompts: token ids.
        ends: ids that end a text.
    """
    stats, texts, seconds = Stats(), [], 0.0
    for prompt in prompts:
        text: list[int] = []
        started = time.perf_counter()
        for step in decode(prompt, model, drafter, settings):
            text.append(step.token)
            if len(text) == 1:
                started = time.perf_counter()
            if step.token in ends:
                break
        seconds += time.perf_counter() - started
        stats = stats.plus(step.stats)
        texts.append(tuple(text))
    return Trial(stats, tuple(texts), seconds)
