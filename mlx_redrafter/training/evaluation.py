"""Evaluates a drafter: its guesses on held-out texts, and the speed of decoding with it."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import NamedTuple

import mlx.nn as nn
import numpy as np

from ..drafters.trainable import TrainableDrafter
from ..engine.stats import Stats
from ..options import Options
from ..pair import Pair
from ..trials import PromptRuns, check_speedup, decode_prompts, join_runs
from .data import Text
from .loss import draft_loss
from .settings import TrainingArgs
from .targets import make_targets

N_RANKS = 8  # ranks of guesses whose acceptance is recorded; wider beams gain little
PROMPT_TOKENS = 64  # length of the prompt taken from a text without a masked prompt
ALL = "all"  # instead of a kind


def measure_guesses(
    embedding: nn.Module, drafter: TrainableDrafter, texts: Sequence[Text], args: TrainingArgs
) -> tuple[float, list[list[float]]]:
    """Measures a drafter's guesses on held-out texts, each made after a correct prefix.

    Returns:
        The loss (see `DraftLoss`, with equal weights for all depths), and (K, R) the share of
        positions where the guess of each rank is the target's likeliest token.
    """
    loss = 0.0
    positions = 0
    hits = np.zeros((args.draft_depth, N_RANKS))
    tried = np.zeros((args.draft_depth, 1))
    by_length = sorted(texts, key=lambda text: len(text.ids))
    for start in range(0, len(by_length), args.batch_size):
        targets = make_targets(
            embedding, by_length[start : start + args.batch_size], drafter.get("draft_ids")
        )
        found = draft_loss(drafter, targets, args.draft_depth, [1.0] * args.draft_depth)
        ranks = np.array(found.ranks)
        size = int((np.array(targets.positions) >= 0).sum())
        loss = loss + size * float(np.array(found.loss))
        positions = positions + size
        hits += (ranks[:, :, None] == np.arange(N_RANKS)).sum(axis=1)
        tried += (ranks >= 0).sum(axis=1, keepdims=True)
    return loss / max(positions, 1), (hits / np.maximum(tried, 1)).tolist()


def count_rounds(
    embedding: nn.Module, drafter: TrainableDrafter, text: Text, args: TrainingArgs
) -> Stats:
    """The statistics of generating a text's answer with chains of the drafter, without decoding.

    All guesses are made at once: those after a wrong one do not count, so each may be made after a
    correct prefix.

    Args:
        args: `draft_depth` is the length of chains. With `data`, texts that the target did not
            generate, the right guess is the target's likeliest token; otherwise it is the text's
            own token.
    """
    depth = args.draft_depth
    size = len(text.ids)
    targets = make_targets(embedding, [text], drafter.get("draft_ids"), of_text=not args.data)
    ranks = np.array(draft_loss(drafter, targets, depth, [1.0] * depth).ranks)
    positions = np.array(targets.positions)
    right = np.zeros((depth, size + depth), bool)
    right[:, positions[positions >= 0]] = ranks[:, positions >= 0] == 0
    # After the token at c the draft's root is at c + 1, and the guess of depth k at c + k + 1.
    accepted = np.cumprod([right[k, k + 1 : k + 1 + size] for k in range(depth)], axis=0).sum(
        axis=0
    )
    rounds = 0
    at = max(text.offset, 1)
    while at < size - 1:
        rounds = rounds + 1
        at = at + 1 + int(accepted[at - 1])
    return Stats(rounds=rounds, accepted=size - 1 - max(text.offset, 1) - rounds)


def make_prompt(text: Text) -> tuple[str, list[int]]:
    """(kind, token ids) of a prompt for decoding: the masked part of a text, or else its first
    tokens.
    """
    size = text.offset or min(PROMPT_TOKENS, max(1, len(text.ids) // 2))
    return text.kind, text.ids[:size].tolist()


class SpeedResult(NamedTuple):
    """The speed of decoding some prompts.

    Attributes:
        kind: of the prompts.
        prompts: their number.
        against_plain: drafted over plain speed, measured one after the other; None if other work
            disturbed them.
        same_tokens: whether all tokens equal those of plain decoding.
    """

    kind: str
    prompts: int
    tokens_per_round: float
    against_plain: float | None
    same_tokens: bool


def compare_speed(
    pair: Pair,
    prompts: Sequence[tuple[str, list[int]]],
    options: Options,
    eos_token_ids: Collection[int],
    should_stop: Callable[[int], bool] = lambda done: False,
) -> list[SpeedResult]:
    """Decodes prompts plainly and with the drafter; returns the results of each kind, and of all at
    the end.

    Args:
        prompts: (kind, token ids) of each.
        should_stop: called with the number of prompts that were decoded.
    """
    runs = dict[str, list[tuple[PromptRuns, PromptRuns]]]()
    for done, (kind, prompt) in enumerate(prompts, start=1):
        plain, drafted = (
            decode_prompts(pair, [prompt], each, eos_token_ids)
            for each in (replace(options, plan="off"), options)
        )
        for name in (kind, ALL):
            runs.setdefault(name, []).append((plain, drafted))
        if should_stop(done):
            break
    results = []
    for kind in sorted(runs, key=lambda kind: (kind == ALL, kind)):
        plain, drafted = map(join_runs, zip(*runs[kind], strict=True))
        tokens = drafted.stats.tokens_per_round
        ratio = check_speedup(
            drafted.tokens_per_second / (plain.tokens_per_second or math.inf), tokens
        )
        results.append(
            SpeedResult(kind, len(runs[kind]), tokens, ratio, drafted.tokens == plain.tokens)
        )
    return results


def format_results(results: Sequence[SpeedResult]) -> str:
    """The results as a text table, with a note on their reliability."""
    lines = [f"{'held-out prompts':<24}  tokens/round  against plain  same"]
    for row in results:
        ratio = "busy" if row.against_plain is None else f"{row.against_plain:.2f}"
        name = f"{row.kind}, {row.prompts}"
        same = "yes" if row.same_tokens else "NO"
        lines.append(f"{name:<24}  {row.tokens_per_round:>12.2f}  {ratio:>13}  {same:>4}")
    if any(row.against_plain is None for row in results):
        lines.append("busy: not measured, as other work on the machine disturbed the times")
    if not results[-1].same_tokens:
        lines.append("NO: a token differs from plain decoding's, see docs/exactness.md")
    return "\n".join(lines)
