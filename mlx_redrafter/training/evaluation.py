"""Evaluates a drafter: its guesses on held-out examples, and the speed of decoding with it."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import NamedTuple

import mlx.nn as nn
import numpy as np

from ..decoding.options import Options
from ..decoding.trials import PromptRuns, check_speedup, decode_prompts, join_runs
from ..drafters.trainable import TrainableDrafter
from ..engine.stats import Stats
from ..measuring.pair import Pair
from .data import Example
from .loss import draft_loss
from .targets import make_targets

N_RANKS = 8
"""Ranks of guesses whose acceptance is recorded; wider beams gain little."""

PROMPT_LENGTH = 64
"""Tokens of the prompt taken from an example without a masked prompt."""

ALL_KINDS = "all"


def measure_guesses(
    embedding: nn.Module,
    drafter: TrainableDrafter,
    examples: Sequence[Example],
    depth: int,
    batch_size: int,
) -> tuple[float, list[list[float]]]:
    """Measures a drafter's guesses on held-out examples, each made after a correct prefix.

    Returns:
        The loss (see `DraftLoss`, with equal weights for all depths), and (K, R) the share of
        positions where the guess of each rank is the target's likeliest token.
    """
    loss = 0.0
    positions = 0
    hits = np.zeros((depth, N_RANKS))
    tried = np.zeros((depth, 1))
    by_length = sorted(examples, key=lambda example: len(example.tokens))
    for start in range(0, len(by_length), batch_size):
        batch = by_length[start : start + batch_size]
        targets = make_targets(embedding, batch, drafter.get("draft_ids"))
        found = draft_loss(drafter, targets, depth, equal_weights=True)
        size = int((np.array(targets.positions) >= 0).sum())
        loss = loss + size * float(np.array(found.loss))
        positions = positions + size
        ranks = np.array(found.ranks)
        hits += (ranks[:, :, None] == np.arange(N_RANKS)).sum(axis=1)
        tried += (ranks >= 0).sum(axis=1, keepdims=True)
    return loss / max(positions, 1), (hits / np.maximum(tried, 1)).tolist()


def count_rounds(
    embedding: nn.Module,
    drafter: TrainableDrafter,
    example: Example,
    depth: int,
    *,
    of_text: bool = True,
) -> Stats:
    """The statistics of generating an example's answer with chains, without decoding.

    All guesses are made at once: those after a wrong one do not count, so each may be made after a
    correct prefix.

    Args:
        depth: the length of chains.
        of_text: the right guess is the example's own token, as the target generated it; otherwise
            the target's likeliest.
    """
    size = len(example.tokens)
    targets = make_targets(embedding, [example], drafter.get("draft_ids"), of_text=of_text)
    ranks = np.array(draft_loss(drafter, targets, depth, equal_weights=True).ranks)
    positions = np.array(targets.positions)
    right = np.zeros((depth, size + depth), bool)
    right[:, positions[positions >= 0]] = ranks[:, positions >= 0] == 0

    # After the token at c the draft's root is at c + 1, and the guess of depth k at c + k + 1.
    of_draft = [right[k, k + 1 : k + 1 + size] for k in range(depth)]
    accepted = np.cumprod(of_draft, axis=0).sum(axis=0)
    rounds = 0
    first = max(example.offset, 1)
    position = first
    while position < size - 1:
        rounds = rounds + 1
        position = position + 1 + int(accepted[position - 1])
    return Stats(rounds=rounds, accepted=size - 1 - first - rounds)


def cut_prompt(example: Example) -> tuple[str, list[int]]:
    """(kind, tokens) of a prompt for decoding: the masked part, or else the first tokens."""
    size = example.offset or min(PROMPT_LENGTH, max(1, len(example.tokens) // 2))
    return example.kind, example.tokens[:size].tolist()


class SpeedResult(NamedTuple):
    """The speed of decoding some prompts.

    Attributes:
        kind: of the prompts.
        prompts: their number.
        against_plain: drafted over plain speed, measured one after the other; None if other work
            disturbed them.
        same_tokens: whether all tokens equal those of plain decoding.
        drafter_tokens_per_round: of the rounds that the context did not win; 1 if there are none.
    """

    kind: str
    prompts: int
    tokens_per_round: float
    against_plain: float | None
    same_tokens: bool
    drafter_tokens_per_round: float = 1.0


def compare_speed(
    pair: Pair,
    prompts: Sequence[tuple[str, list[int]]],
    options: Options,
    eos_token_ids: Collection[int],
    should_stop: Callable[[int], bool] = lambda done: False,
) -> list[SpeedResult]:
    """Decodes prompts plainly and with the drafter.

    Args:
        prompts: (kind, tokens) of each.
        should_stop: called with the number of prompts that were decoded.

    Returns:
        The results of each kind, and of all at the end.
    """
    runs = dict[str, list[tuple[PromptRuns, PromptRuns]]]()
    plainly = replace(options, plan="off")
    for done, (kind, prompt) in enumerate(prompts, start=1):
        plain = decode_prompts(pair, [prompt], plainly, eos_token_ids)
        drafted = decode_prompts(pair, [prompt], options, eos_token_ids)
        for name in (kind, ALL_KINDS):
            runs.setdefault(name, []).append((plain, drafted))
        if should_stop(done):
            break

    results = []
    for kind in sorted(runs, key=lambda kind: (kind == ALL_KINDS, kind)):
        plain, drafted = map(join_runs, zip(*runs[kind], strict=True))
        tokens = drafted.stats.tokens_per_round
        speedup = drafted.tokens_per_second / (plain.tokens_per_second or math.inf)
        ratio = check_speedup(speedup, tokens)
        is_same = drafted.tokens == plain.tokens
        stats = drafted.stats
        own = (stats.accepted - stats.context_accepted) / max(1, stats.drafter_rounds)
        results.append(SpeedResult(kind, len(runs[kind]), tokens, ratio, is_same, 1 + own))
    return results


def format_results(results: Sequence[SpeedResult]) -> str:
    """The results as a text table, with a note on their reliability."""
    lines = [f"{'held-out prompts':<24}  tokens/round  drafter alone  against plain  same"]
    for result in results:
        ratio = "busy" if result.against_plain is None else f"{result.against_plain:.2f}"
        same = "yes" if result.same_tokens else "NO"
        lines.append(
            f"{f'{result.kind}, {result.prompts}':<24}  {result.tokens_per_round:>12.2f}  "
            f"{result.drafter_tokens_per_round:>13.2f}  {ratio:>13}  {same:>4}"
        )
    if any(result.against_plain is None for result in results):
        lines.append("busy: not measured, as other work on the machine disturbed the times")
    if not results[-1].same_tokens:
        lines.append("NO: a token differs from plain decoding's, see docs/exactness.md")
    return "\n".join(lines)
