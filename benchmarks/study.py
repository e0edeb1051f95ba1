"""The proof of the model on Apple's published runs, and what changes would bring, as one object and as tables."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from .costmodel import CLIFF, MEDIAN_BOUND, NO_CLIFF, PRIOR, SPLITS, TAIL_BOUND, Miss, fit, prove
from .published import SOURCE, Published, read_all
from .tables import markdown
from .whatif import CORNER, Inferred, infer_acceptance, tokens_by_shape, what_if

Rows = list[dict[str, Any]]


def study(chip: str | None, dtype: str | None) -> dict[str, Any]:
    """The proof on all that was published, and the changes on the chips that are asked for; None asks for all."""
    everything = read_all()
    asked = [each for each in everything if chip in (None, each.chip) and dtype in (None, each.dtype)]
    misses = prove(everything)
    median, tail = summary(misses)
    control = summary(prove(everything, NO_CLIFF))
    blind = prove(everything, blind=True)
    any_half = summary(blind)
    tables = {dtype: infer_acceptance(tokens) for dtype, tokens in tokens_by_shape(everything).items()}
    return {
        "source": SOURCE,
        "proof": {
            "cells": sum(len(each.cells) for each in everything),
            "runs": sum(each.used for each in everything),
            "disturbed_runs_left_out": sum(each.left_out for each in everything),
            "splits": SPLITS,
            "predictions": len(misses),
            "predicted_speed_error_median": median,
            "predicted_speed_error_95th_percentile": tail,
            "bounds": [MEDIAN_BOUND, TAIL_BOUND],
            "passed": median < MEDIAN_BOUND and tail < TAIL_BOUND,
            "worst": miss_row(max(misses)),
            "predicted_speed_error_without_the_cliff": {"median": control[0], "95th_percentile": control[1]},
            "predicted_speed_error_of_any_half": {
                "median": any_half[0],
                "95th_percentile": any_half[1],
                "worst": max(blind).error,
            },
            "by_chip": by_chip(everything, misses),
        },
        "predicted_parameters": [model_row(each) for each in everything],
        "predicted_acceptance": {dtype: acceptance_row(found) for dtype, found in tables.items()},
        "measured_by_apple": [apple_row(each) for each in asked],
        "predicted_changes": [
            {
                "chip": each.chip,
                "dtype": each.dtype,
                "change": each.change,
                "predicted_best_plan": list(each.plan),
                "predicted_tokens_per_round": each.tokens,
                "predicted_tokens_per_second": each.per_second,
                "predicted_x_plain": each.x_plain,
                "predicted_x_apples_best": each.x_best,
                "predicted_x_plain_of_4x4": each.corner_x_plain,
            }
            for each in what_if(asked, everything, tables)
        ],
    }


def summary(misses: Sequence[Miss]) -> tuple[float, float]:
    """(median, 95th percentile) of the errors."""
    found = np.percentile([miss.error for miss in misses], (50, 95))
    return float(found[0]), float(found[1])


def by_chip(everything: Sequence[Published], misses: Sequence[Miss]) -> Rows:
    """The errors of each chip and dtype alone."""
    rows = []
    for each in everything:
        own = [miss for miss in misses if (miss.chip, miss.dtype) == (each.chip, each.dtype)]
        median, tail = summary(own)
        worst = miss_row(max(own))
        rows.append(
            {
                "chip": each.chip,
                "dtype": each.dtype,
                "predicted_speed_error_median": median,
                "predicted_speed_error_95th_percentile": tail,
                "predicted_speed_error_worst": worst["predicted_speed_error"],
                "worst_shape": worst["shape"],
            }
        )
    return rows


def miss_row(miss: Miss) -> dict[str, Any]:
    """A held-out cell and what was said of it."""
    return {
        "chip": miss.chip,
        "dtype": miss.dtype,
        "shape": [miss.width, miss.depth],
        "seed": miss.seed,
        "predicted_tokens_per_second": miss.predicted,
        "measured_by_apple_tokens_per_second": miss.published,
        "predicted_speed_error": miss.error,
    }


def model_row(each: Published) -> dict[str, Any]:
    """The model fitted to all cells of a chip and dtype."""
    model = fit(each.cells.values(), each.plain_ms)
    numbers = {f"predicted_{name}": getattr(model, name) for name in PRIOR}
    return {"chip": each.chip, "dtype": each.dtype, "measured_by_apple_plain_ms": each.plain_ms} | numbers


def acceptance_row(found: Inferred) -> dict[str, Any]:
    """An inferred table and how well it fits."""
    return {
        "by_depth_and_rank": found.law.table(),
        "tokens_per_round_error_mean": found.mean_error,
        "tokens_per_round_error_largest": found.largest_error,
    }


def apple_row(each: Published) -> dict[str, Any]:
    """What Apple measured: the best shape, and the corner."""
    best, corner = each.best, each.cells[CORNER]
    return {
        "chip": each.chip,
        "dtype": each.dtype,
        "plain_tokens_per_second": each.plain_per_second,
        "mlx_lm_tokens_per_second": 1e3 / each.mlx_lm_ms,
        "best_shape": [best.width, best.depth],
        "tokens_per_round": best.tokens_per_round,
        "tokens_per_second": best.tokens_per_second,
        "x_plain": best.tokens_per_second / each.plain_per_second,
        "x_plain_of_4x4": corner.tokens_per_second / each.plain_per_second,
    }


def study_text(found: dict[str, Any]) -> str:
    """The proof and the changes in words and tables."""
    proof, worst = found["proof"], found["proof"]["worst"]
    control = proof["predicted_speed_error_without_the_cliff"]
    any_half = proof["predicted_speed_error_of_any_half"]
    verdict = "Passed." if proof["passed"] else "FAILED: believe nothing below."
    parts = [
        f"Source: {found['source']}.",
        f"Proof: {proof['predictions']} held-out cells predicted in {proof['splits']} half splits of the shapes; "
        f"{proof['cells']} cells of {proof['runs']} greedy runs, {proof['disturbed_runs_left_out']} disturbed ones "
        f"left out.\nError of the predicted speed: median {proof['predicted_speed_error_median']:.2%} (under "
        f"{MEDIAN_BOUND:.0%}), 95th percentile {proof['predicted_speed_error_95th_percentile']:.2%} (under "
        f"{TAIL_BOUND:.0%}). {verdict}\nWorst: {worst['predicted_speed_error']:.1%}, {worst['chip']} {worst['dtype']}, "
        f"{worst['shape'][0]} x {worst['shape'][1]}, seed {worst['seed']}: predicted "
        f"{worst['predicted_tokens_per_second']:.1f} tokens/s, measured by Apple "
        f"{worst['measured_by_apple_tokens_per_second']:.1f}.\nThe same model without the cliff: median "
        f"{control['median']:.1%}, 95th percentile {control['95th_percentile']:.0%}.\nA held-out cell's number of "
        f"rounds is given; predicted is what a round takes. Halves without a shape of {CLIFF} rows or more are left "
        f"out: they cannot know of the cliff. With them: median {any_half['median']:.2%}, 95th percentile "
        f"{any_half['95th_percentile']:.1%}, worst {any_half['worst']:.0%}.",
        table([percent(row) for row in proof["by_chip"]]),
        "The model of a round, in plain steps: two rows, each row more, the cliff at 16, each row beyond it, a level "
        "of a chain's draft, of a beam's.",
        table(found["predicted_parameters"]),
        "Measured by Apple:",
        table(found["measured_by_apple"]),
        "Predicted, nobody has run it:",
        table(found["predicted_changes"]),
    ]
    for dtype, row in found["predicted_acceptance"].items():
        first = ", ".join(f"{chance:.2f}" for chance in row["by_depth_and_rank"][0])
        mean, largest = row["tokens_per_round_error_mean"], row["tokens_per_round_error_largest"]
        parts.append(
            f"Predicted acceptance, inferred from Apple's rounds, {dtype}: ranks 1 to 4 at depth 1 {first}. "
            f"It misses the tokens per round by {mean:.1%} on the mean, {largest:.1%} at most."
        )
    return "\n\n".join(parts)


def table(rows: Rows) -> str:
    """Rows as a Markdown table; names with spaces for underscores."""
    return markdown([{name.replace("_", " "): value for name, value in row.items()} for row in rows]).rstrip()


def percent(row: dict[str, Any]) -> dict[str, Any]:
    """A row whose numbers are shares, for people."""
    return {name: f"{value:.2%}" if isinstance(value, float) else value for name, value in row.items()}
