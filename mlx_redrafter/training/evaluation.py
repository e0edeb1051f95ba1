"""Evaluates a drafter: its guesses on held-out texts, and the speed of decoding with it."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from statistics import stdev
from typing import Any, NamedTuple

import mlx.nn as nn
import numpy as np
from tqdm import tqdm

from ..drafters.config import DrafterArgs
from ..drafters.protocol import Drafter
from ..drafters.trainable import TrainableDrafter
from ..engine.model_checks import check_draftable
from ..engine.stats import Stats
from ..options import Options
from ..pair import Pair
from ..trials import PromptRuns, check_speedup, decode_prompts, join_runs
from .data import Text, collate
from .loss import draft_loss
from .settings import TrainingArgs
from .targets import compute_targets

N_RANKS = 8  # ranks of guesses whose acceptance is recorded; wider beams gain little
MIN_PROMPTS = 8  # with fewer prompts, a table is marked as unreliable
PROMPT_TOKENS = 64  # length of the prompt taken from a text without a masked prompt
COMPARED_PROMPTS, COMPARED_TOKENS = 8, 64  # prompts of the final comparison, and tokens decoded after each
COMPARISONS = 3  # the most comparisons, if other work on the machine disturbs them


def measure_guesses(
    embedding: nn.Module, drafter: TrainableDrafter, texts: Sequence[Text], args: TrainingArgs
) -> tuple[float, list[list[float]]]:
    """Measures a drafter's guesses on held-out texts, each made after a correct prefix.

    Returns:
        The loss (see `DraftLoss`, with equal weights for all depths), and (K, R) the share of positions where the guess
        of each rank is the target's likeliest token.
    """
    loss, positions = 0.0, 0
    hits, tried = np.zeros((args.draft_depth, N_RANKS)), np.zeros((args.draft_depth, 1))
    by_length = sorted(texts, key=lambda text: len(text.ids))
    for start in range(0, len(by_length), args.batch_size):
        batch = collate(by_length[start : start + args.batch_size])
        targets = compute_targets(embedding, batch, drafter.get("draft_ids"))
        found = draft_loss(drafter, targets, args.draft_depth, [1.0] * args.draft_depth)
        ranks, size = np.array(found.ranks), int((np.array(batch.positions) >= 0).sum())
        loss, positions = loss + size * float(np.array(found.loss)), positions + size
        hits += (ranks[:, :, None] == np.arange(N_RANKS)).sum(axis=1)
        tried += (ranks >= 0).sum(axis=1, keepdims=True)
    return loss / max(positions, 1), (hits / np.maximum(tried, 1)).tolist()


def find_accepted(embedding: nn.Module, drafter: TrainableDrafter, text: Text, args: TrainingArgs) -> np.ndarray:
    """(L,) the number of guesses of a chain that would be accepted after each token, without decoding.

    All positions are computed at once: guesses after a wrong one do not count, so each may be made after a correct
    prefix.

    Args:
        args: `draft_depth` is the length of chains. With `data`, texts that the target did not generate, the right
            guess is the target's likeliest token; otherwise it is the text's own token.
    """
    batch, depth = collate([text]), args.draft_depth
    targets = compute_targets(embedding, batch, drafter.get("draft_ids"), of_text=not args.data)
    ranks = np.array(draft_loss(drafter, targets, depth, [1.0] * depth).ranks)
    positions = np.array(batch.positions)
    right = np.zeros((depth, len(text.ids) + depth), bool)
    right[:, positions[positions >= 0]] = ranks[:, positions >= 0] == 0
    # The guess of depth k in a draft after column c is at column c + k + 1.
    accepted = np.cumprod([right[k, k + 1 : k + 1 + len(text.ids)] for k in range(depth)], axis=0).sum(axis=0)
    return accepted  # after c: the token at c + 1 is the draft's root


def count_rounds(text: Text, accepted: np.ndarray) -> int:
    """The number of rounds to generate an answer after its first token, if whole drafts are verified.

    Args:
        accepted: from `find_accepted`.
    """
    rounds, at = 0, max(text.offset, 1)
    while at < len(text.ids) - 1:
        rounds, at = rounds + 1, at + 1 + int(accepted[at - 1])
    return rounds


def count_texts(
    embedding: nn.Module, drafter: TrainableDrafter, texts: Sequence[Text], args: TrainingArgs
) -> list[Stats]:
    """For each text, the statistics of generating its answer with chains of the drafter."""
    each = []
    for text in texts:
        rounds = count_rounds(text, find_accepted(embedding, drafter, text, args))
        each.append(Stats(rounds=rounds, accepted=len(text.ids) - max(text.offset, 1) - 1 - rounds))
    return each


def make_prompts(texts: Sequence[Text], most: int) -> list[list[int]]:
    """At most `most` prompts for decoding: the masked prompts of texts, or else their first tokens; no duplicates."""
    sizes = (text.offset or min(PROMPT_TOKENS, max(1, len(text.ids) // 2)) for text in texts)
    found = {tuple(text.ids[:size].tolist()): None for text, size in zip(texts, sizes, strict=True)}
    return [list(prompt) for prompt in list(found)[:most]]


class ShapeResult(NamedTuple):
    """The results of a beam shape on some prompts.

    Attributes:
        beam_width, draft_depth, tree_size: W, K and N.
        tokens_per_second: after the first token of each answer.
        against_plain: drafted over plain speed, measured one after the other; None if other work disturbed them.
        same_tokens: whether all tokens equal those of plain decoding.
        prompts: number of prompts.
        tokens_per_round_error, against_plain_error: standard errors over the prompts; None for fewer than two.
    """

    beam_width: int
    draft_depth: int
    tree_size: int
    tokens_per_round: float
    acceptance_per_depth: tuple[float, ...]
    tokens_per_second: float
    against_plain: float | None
    same_tokens: bool
    prompts: int
    tokens_per_round_error: float | None
    against_plain_error: float | None


def find_standard_error(values: Iterable[float]) -> float | None:
    """The standard error of the mean; None for fewer than two values."""
    found = list(values)
    return stdev(found) / len(found) ** 0.5 if len(found) > 1 else None


def format_error(value: float, error: float | None) -> str:
    """The value and its error with two decimals."""
    return f"{value:.2f}" if error is None else f"{value:.2f}±{error:.2f}"


def compare_shapes(
    model: nn.Module,
    drafter: Drafter,
    prompts: Sequence[Sequence[int]],
    shapes: Sequence[tuple[int, int]],
    options: Options,
    eos_token_ids: Collection[int],
) -> list[ShapeResult]:
    """A result for each shape (W, K); each prompt is decoded plainly and with every shape.

    Trees are skipped if the model takes only chains. If other work disturbed the speeds, all are measured again.
    """
    takes_trees = check_draftable(model, tree=True) is None
    plans: list[Any] = ["off", *(shape for shape in shapes if shape[0] == 1 or takes_trees)]
    pair, results = Pair(model, drafter), list[ShapeResult]()
    for _ in range(COMPARISONS):
        runs = {plan: list[PromptRuns]() for plan in plans}
        with tqdm(total=len(prompts) * len(plans), desc="comparison") as bar:
            for prompt in prompts:
                for plan, own in runs.items():
                    own.append(decode_prompts(pair, [prompt], replace(options, plan=plan), eos_token_ids))
                    bar.update()
        plain = runs.pop("off")
        results = [summarize_runs(width, depth, own, plain) for (width, depth), own in runs.items()]
        if all(result.against_plain is not None for result in results):
            break
    return results


def summarize_runs(width: int, depth: int, own: Sequence[PromptRuns], plain: Sequence[PromptRuns]) -> ShapeResult:
    """The result of a shape from its runs and those of plain decoding, one for each prompt."""
    pairs = [*zip(own, plain, strict=True), (join_runs(own), join_runs(plain))]
    *ratios, ratio = [a.tokens_per_second / (b.tokens_per_second or math.inf) for a, b in pairs]
    stats = pairs[-1][0].stats
    return ShapeResult(
        width,
        depth,
        1 + width * depth,
        stats.tokens_per_round,
        stats.acceptance_per_depth,
        pairs[-1][0].tokens_per_second,
        check_speedup(ratio, stats.tokens_per_round),
        [run.texts for run in own] == [run.texts for run in plain],
        len(own),
        find_standard_error(run.stats.tokens_per_round for run in own),
        find_standard_error(ratios),
    )


def add_results(
    sizes: DrafterArgs, base_model: str | None, acceptance: Sequence[Sequence[float]], results: Sequence[ShapeResult]
) -> DrafterArgs:
    """The config with measured results: the acceptance table, and the depth of the fastest chain as the default."""
    chains = [result for result in results if result.beam_width == 1]
    best = max(chains, key=lambda result: (result.against_plain or 0.0, -result.draft_depth))
    rounded = [[round(share, 4) for share in row] for row in acceptance]
    return replace(sizes, base_model=base_model, draft_depth=best.draft_depth, acceptance=rounded)


def format_table(results: Sequence[ShapeResult]) -> str:
    """The results as a text table, with a note on their reliability."""
    lines = [f"{'W':>3} {'K':>3} {'N':>4}  tokens/round  tokens/s  against plain  same  accepted at depth 1, 2, ..."]
    for row in results:
        shares = " ".join(f"{share:.2f}" for share in row.acceptance_per_depth)
        per_round = format_error(row.tokens_per_round, row.tokens_per_round_error)
        ratio = "busy" if row.against_plain is None else format_error(row.against_plain, row.against_plain_error)
        cells = f"{row.beam_width:>3} {row.draft_depth:>3} {row.tree_size:>4}  {per_round:>12}"
        cells += f"  {row.tokens_per_second:>8.1f}  {ratio:>13}  {'yes' if row.same_tokens else 'NO':>4}"
        lines.append(f"{cells}  {shares}")
    prompts = results[0].prompts if results else 0
    doubt = "" if prompts >= MIN_PROMPTS else ": too few for reliable numbers"
    if any(row.against_plain is None for row in results):
        doubt += "; busy: not measured, as other work on the machine disturbed the times"
    return "\n".join([*lines, f"± is the standard error over the prompts, {prompts}{doubt}"])
