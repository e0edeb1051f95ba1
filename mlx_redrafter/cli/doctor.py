"""`doctor`: measures the cost and predicts the speedup of drafting, with and without a drafter."""

from __future__ import annotations

import json
import platform
import sys
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from contextlib import suppress
from importlib.util import find_spec
from itertools import pairwise
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from .. import __version__
from ..atomic_files import expand_path, replace_file
from ..checkpoints import find_drafter_name, find_not_finite, format_dtype, is_quantized, list_weights, load_pair
from ..drafters import make_drafter
from ..drafters.protocol import Drafter
from ..engine.model_checks import check_draftable
from ..engine.model_parts import find_compute_dtype, find_module_name
from ..engine.plan import Plan, chain_plan
from ..engine.target import Target
from ..engine.types import Kept
from ..errors import RedrafterError, UnsupportedModelError
from ..generate import TRIAL_PROMPTS, try_drafter
from ..options import Options
from ..pair import Pair
from ..planning.acceptance import UNKNOWN_ACCEPTANCE, AcceptanceTable, find_acceptance, predict_tokens, scale_row
from ..planning.costs import CostTable, is_disturbed
from ..planning.machine import describe_machine, find_memory_bytes, has_fast_blas
from ..planning.planner import HYSTERESIS, find_starting_plan, predict_all
from ..planning.simulation import CHANGED_EVERY, predict_speeds
from ..planning.sizing import choose_size
from .arguments import make_parser

QUALITIES = (2.0, 2.5, 3.0, 3.5)
"""Drafter qualities to predict for: tokens per round with a chain of four drafted tokens."""
RATES = np.linspace(0, 0.95, 9501)
"""Rates at which a drafter's first guess is right."""
CHAIN_TOKENS = np.polyval([1] * 5, RATES)
"""Tokens per round with a chain of four drafted tokens, for each of `RATES`; at most 4.52."""

TRIAL_DEPTH, TRIAL_TOKENS = 4, 48
"""Chain length in a trial, and tokens decoded after each prompt."""
MIN_ACCEPTANCE = 0.1
"""If the first guess is accepted less often, the trial also tries other hidden states."""
LONG_CONTEXT = 32768
"""The context length at which the size of a drafter's cache is reported."""


def run() -> int:
    """Runs the command with `sys.argv`; returns the exit status."""
    about = "Predict the speedup of drafting on this machine, with and without a drafter, before you train one."
    parser = make_parser("doctor", about, "a random one of the size that training would choose")
    parser.add_argument("--refresh", action="store_true", help="measure again instead of using saved costs")
    parser.add_argument("--plot", metavar="PNG", help="also plot costs and predicted speeds to this file")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of the text")
    args = parser.parse_args()
    if args.plot is not None:
        check_plot(args.plot)
    model, tokenizer, drafter = load_pair(args, args.model, args.drafter)
    report = diagnose(model, drafter, tokenizer, refresh=args.refresh)
    demo = {} if args.model else {"model": "demo", "drafter": find_drafter_name(args) or "demo"}
    print(json.dumps(report | {"settings": vars(args) | demo}) if args.json else format_report(report))
    if args.plot is not None:
        draw_plot(args.plot, report)
    return 0


def diagnose(
    model: nn.Module, drafter: Drafter | None = None, tokenizer: Any = None, *, refresh: bool = False
) -> dict[str, Any]:
    """The object of `--json` without `settings`. Without a drafter, measures one of the size that training chooses.

    Args:
        tokenizer: for trying the drafter on a few prompts, see `make_trial`; None for no trial.

    Raises:
        UnsupportedModelError: the model does not support drafting.
    """
    no_trees, stand_in, trial = check_draftable(model, tree=True), None, None
    can_merge = no_trees is None
    if drafter is None:
        print("no drafter given: measuring a random one of the size that training would choose", file=sys.stderr)
        choice = choose_size(model, find_compute_dtype(model))
        drafter, stand_in = make_drafter(choice.args), choice.reason
        drafter.set_dtype(find_compute_dtype(model))
        mx.eval(drafter.parameters())
    no_trees = no_trees or drafter.explain_chains()
    mx.reset_peak_memory()
    args, (not_finite, row_bytes) = drafter.args, probe_drafter(model, drafter)
    costs = Pair(model, drafter).costs(trees=no_trees is None, refresh=refresh)
    acceptance = ((0.0,),) if not_finite else find_acceptance(drafter)
    if tokenizer is not None and not (stand_in or not_finite):
        trial = make_trial(model, tokenizer, drafter)
        if args.acceptance is None:
            acceptance = correct_acceptance(acceptance, trial["acceptance_per_depth"])
    rates = np.interp(QUALITIES, CHAIN_TOKENS, RATES).tolist()
    report: dict[str, Any] = {
        "machine": describe_machine() | {"mlx_redrafter": __version__},
        "target": describe_model(model, find_module_name(model), find_compute_dtype(model)),
        "drafter": {
            **describe_model(drafter, args.describe(), drafter.dtype),
            "stand_in": stand_in,
            "base_model": args.base_model,
            "states": args.describe_states(),
            "acceptance": [list(row) for row in acceptance],
            "acceptance_assumed": args.acceptance is None and trial is None,
            "acceptance_tried": args.acceptance is None and trial is not None,
            "trial": trial,
            "tokens_per_round": predict_tokens(acceptance, chain_plan(4)),
        },
        "speeds": {
            "drafter": None if stand_in else predict_speeds(costs, acceptance, trees=can_merge),
            "no_drafter": predict_speeds(costs, None, trees=can_merge),
        },
        "not_finite": not_finite,
        "trees": no_trees is None,
        "no_trees": no_trees,
        "costs": costs._asdict(),
        "plain_steps": [[ms / plain for ms in row] for row, plain in zip(costs.verify, costs.plain, strict=True)],
        "cliffs": [
            {"context": context, "nodes": nodes, "before": before, "times": many / few}
            for context, row in zip(costs.contexts, costs.verify, strict=True)
            for (before, few), (nodes, many) in pairwise(zip(costs.counts, row, strict=True))
            if not 0.8 <= many / few <= 1.25
        ],
        "starts": [find_start(costs, acceptance, context) for context in costs.contexts],
        "predictions": [
            {"tokens_per_round": tokens, "context": at, "offer": find_plan_speed(costs, make_acceptance(rate), at)}
            for tokens, rate in zip(QUALITIES, rates, strict=True)
            for at in costs.contexts
        ],
        "pays_from": [{"context": at, "tokens_per_round": find_break_even(costs, at)} for at in costs.contexts],
    }
    report["memory"] = {f"{role}_bytes": report[role]["weight_bytes"] for role in ("target", "drafter")}
    report["memory"]["drafter_cache_bytes"] = LONG_CONTEXT * row_bytes
    report["memory"] |= {"machine_bytes": find_memory_bytes(), "peak_bytes": mx.get_peak_memory()}
    return report | {"notes": list(find_notes(report, disturbed=is_disturbed(costs)))}


def describe_model(module: nn.Module, name: str, dtype: mx.Dtype) -> dict[str, Any]:
    """Name, dtype, quantization and bytes of weights of a model."""
    weight_bytes = sum(array.nbytes for array in list_weights(module).values())
    return {"name": name, "dtype": format_dtype(dtype), "quantized": is_quantized(module), "weight_bytes": weight_bytes}


def probe_drafter(model: nn.Module, drafter: Drafter) -> tuple[str | None, int]:
    """("target" or "drafter" if its numbers are not finite, else None; bytes per token of the drafter's cache)."""
    source, guesses, text = drafter.open(model), list[mx.array](), list(range(min(16, drafter.args.vocab_size)))

    def record(logits: mx.array, level: int, paths: mx.array) -> mx.array:
        guesses.append(mx.maximum(logits, 0))  # -inf is valid for tokens that are never guessed
        return logits

    target = Target(model, capture=source.capture)
    logits, hidden = target.forward(mx.array(text))
    source.keep(Kept(mx.array(text), hidden, None, len(text), 0))
    source.read([*text, 0])
    source.propose(mx.array(0), chain_plan(min(2, drafter.args.max_depth or 2)), record, in_level_order=False)
    states = mx.concatenate([states.reshape(-1) for states in hidden.values()]) if hidden else logits
    return find_not_finite({"target": states, "drafter": mx.concatenate(guesses)}), source.row_bytes


def make_trial(model: nn.Module, tokenizer: Any, drafter: Drafter) -> dict[str, Any]:
    """Tries a drafter on a few prompts, greedy; if hardly any guess is right, also with other hidden states.

    A drafter that reads the wrong hidden state or layer raises no error, but none of its guesses is right.

    Returns:
        `depth` of the chain, `tokens_per_round`, `acceptance_per_depth`, and `others`, a dictionary from config entry
        to tokens per round.
    """
    depth = min(TRIAL_DEPTH, drafter.args.max_depth or TRIAL_DEPTH)
    options = Options(max_tokens=TRIAL_TOKENS, plan=(1, depth), context=False)
    stats, own, others = try_drafter(model, tokenizer, drafter, options), drafter.args, dict[str, float]()
    shares = stats.acceptance_per_depth
    if not shares or shares[0] < MIN_ACCEPTANCE:
        try:
            for what, drafter.args in own.list_variants(len(getattr(model, "layers", []))).items():
                with suppress(UnsupportedModelError):
                    others[what] = try_drafter(model, tokenizer, drafter, options).tokens_per_round
        finally:
            drafter.args = own
    return {
        "depth": depth,
        "tokens_per_round": stats.tokens_per_round,
        "acceptance_per_depth": shares,
        "others": others,
    }


def correct_acceptance(table: AcceptanceTable, shares: Sequence[float]) -> AcceptanceTable:
    """The table with measured rates of the first guesses; deeper levels use the last measured rate."""
    rates = [share / before if before else 0.0 for before, share in pairwise((1.0, *shares))]
    rows = [table[min(depth, len(table) - 1)] for depth in range(max(len(rates), len(table)))]
    return [
        scale_row(row, rates[min(depth, len(rates) - 1)] / row[0]) if rates and row[0] else row
        for depth, row in enumerate(rows)
    ]


def describe_trial(report: dict[str, Any]) -> list[str]:
    """Lines on the drafter's target, its cache, and the result of its trial."""
    drafter, trial = report["drafter"], report["drafter"]["trial"]
    made_for = f"it was made for {drafter['base_model']}" if drafter["base_model"] else "its config names no target"
    lines = [f"It reads {drafter['states']}; {made_for}"]
    if size := report["memory"]["drafter_cache_bytes"]:
        lines.append(f"Its cache takes {size / 1e6:,.0f} MB after {LONG_CONTEXT:,} tokens")
    if trial:
        shares = " ".join(f"{share:.2f}" for share in trial["acceptance_per_depth"])
        lines.append(
            f"Tried on {len(TRIAL_PROMPTS)} prompts, greedy: {trial['tokens_per_round']:.2f} tokens per round with a "
            f"chain of {trial['depth']}, accepted at depth 1, 2, ...: {shares}"
        )
        if trial["others"]:
            tried = ", ".join(f"{tokens:.2f} with {what}" for what, tokens in trial["others"].items())
            best = max(trial["others"], key=trial["others"].__getitem__)
            is_better = trial["others"][best] >= trial["tokens_per_round"] + MIN_ACCEPTANCE
            lines.append(
                f"Warning: its first guess is hardly ever right. Is it for this model? Tokens per round with other "
                f"hidden states: {tried}" + f"; record {best} in its config.json" * is_better
            )
    return lines


def make_acceptance(rate: float) -> AcceptanceTable:
    """A table whose first guess is right at this rate at every depth, and whose other guesses at most as often."""
    first, *others = UNKNOWN_ACCEPTANCE[0]
    return ((rate, *(min(rate, (1 - rate) * other / (1 - first)) for other in others)),)


def find_break_even(costs: CostTable, context: int) -> float | None:
    """The tokens per round, with a chain of four, from which a plan beats plain decoding; None if none does."""
    at = bisect_right(RATES, 1, key=lambda rate: find_plan_speed(costs, make_acceptance(rate), context)["ratio"])
    return float(CHAIN_TOKENS[at]) if at < len(RATES) else None


def find_plan_speed(
    costs: CostTable, acceptance: AcceptanceTable, context: int, plan: Plan | None = None
) -> dict[str, Any]:
    """The prediction for a plan, or for the fastest if None: cost of a round in `plain_steps`, speedup as `ratio`."""
    plans = (found for found in predict_all(costs, acceptance, context) if plan in (None, found.plan))
    best = max(plans, key=lambda found: found.speedup)
    return {"plan": best.plan, "tokens_per_round": best.tokens, "plain_steps": best.steps, "ratio": best.speedup}


def find_start(costs: CostTable, acceptance: AcceptanceTable, context: int) -> dict[str, Any]:
    """The plan that `auto` starts with and its prediction; if that is plain decoding, None and the fastest plan's."""
    plan = find_starting_plan(costs, acceptance, context)
    offer = find_plan_speed(costs, acceptance, context, plan)
    reason = f"{describe_plan(offer['plan'])} makes {offer['tokens_per_round']:.2f} tokens in a round of "
    reason += f"{offer['plain_steps']:.2f} plain steps, {offer['ratio']:.2f} times plain decoding"
    return {"context": context, "plan": plan, "offer": offer, "reason": reason}


def find_notes(report: dict[str, Any], *, disturbed: bool) -> Iterator[str]:
    """Notes for the user, the most serious first."""
    machine, target, drafter = report["machine"], report["target"], report["drafter"]
    if odd := report["not_finite"]:
        convert = "convert it, python -m mlx_redrafter.convert --model DRAFTER --mlx-path NEW --dtype float32"
        remedy = convert if odd == "drafter" else "its weights are damaged, or need another dtype"
        yield f"in {report[odd]['dtype']} the {odd}'s numbers are not finite: {remedy}"
    if disturbed:
        yield "the measured times contradict each other, the machine was busy: measure again with --refresh"
    if "blas" in machine and platform.system() == "Linux":
        if not has_fast_blas(machine["blas"]):
            yield "no fast BLAS: a forward of N nodes costs nearly N plain steps"
        if target["quantized"] or target["dtype"] != "float32":
            yield "on a CPU MLX multiplies 16-bit and quantized weights without the BLAS: slow, more so for more nodes"
    if drafter["stand_in"] is None and drafter["acceptance_assumed"]:
        yield "the drafter's config has no acceptance table: predictions assume one"


def describe_plan(plan: Plan) -> str:
    """`W x K`, followed by N if not all nodes are verified."""
    return f"{plan.width} x {plan.depth}" + ("" if plan.keeps_all_nodes else f", {plan.size} nodes")


def describe_verdict(report: dict[str, Any], limit: str) -> list[str]:
    """The predicted speed with default options, the tokens per round that a drafter needs, and the assumptions.

    Args:
        limit: the tokens per round from which a drafter is faster, as text.
    """
    if odd := report["not_finite"]:
        return [f"Drafting does not pay here: the {odd}'s numbers are not finite."]
    drafter, alone = report["speeds"]["drafter"], report["speeds"]["no_drafter"]
    speeds = drafter or alone
    verdict = "pays" if speeds["fresh"] > 1 + HYSTERESIS else "pays on copied text"
    verdict = "does not pay" if max(speeds.values()) <= 1 + HYSTERESIS else verdict
    fresh, copied = (f"{speeds[kind]:.2f}" for kind in ("fresh", "copied"))
    with_it = f"about {fresh} times plain decoding on fresh text, {copied} times on copied text"
    pays, rests = f"On fresh text a drafter pays from {limit} tokens per round", "this machine's times"
    if drafter:
        with_it = f"with this drafter {with_it}; without one {alone['fresh']:.2f} and {alone['copied']:.2f}"
        pays += f"; this one is expected to reach {report['drafter']['tokens_per_round']:.2f}"
        where = "on the prompts below" if report["drafter"]["acceptance_tried"] else "in training"
        rests += f" and the drafter's acceptance {where}"
    else:
        with_it = f"without a drafter {with_it}"
    example = f"copied text: the prompt with every {CHANGED_EVERY}th token changed"
    return [
        f"Drafting {verdict} here: {with_it}.",
        f"{pays}.",
        f"Predicted from {rests}; actual speed depends on your text ({example}).",
    ]


def format_report(report: dict[str, Any]) -> str:
    """The report as text: verdict, notes, models, starting plans, costs and predictions."""
    costs, drafter = report["costs"], report["drafter"]
    least = [each["tokens_per_round"] for each in report["pays_from"]]
    limits = [f"{tokens:.2f}" if tokens else f"more than {CHAIN_TOKENS[-1]:.2f}" for tokens in least]
    text = [*describe_verdict(report, limits[0]), *(f"Warning: {note}." for note in report["notes"]), ""]
    text.append("Machine: " + ", ".join(f"{key} {value}" for key, value in report["machine"].items()))
    for role in ("target", "drafter"):
        name, dtype, quantized, size = (report[role][key] for key in ("name", "dtype", "quantized", "weight_bytes"))
        text.append(f"{role.title()}: {name}, {'quantized, ' * quantized}{dtype}, {size / 1e6:,.1f} MB of weights")
    if drafter["stand_in"]:
        text.append(f"This drafter is random and only shows costs: {drafter['stand_in']}")
    else:
        text += describe_trial(report)
    if report["no_trees"]:
        text.append(f"Plans: chains only, {report['no_trees']}")
    text += ["", "Starting plan of auto (width x depth; plain decoding unless a plan is expected to be 2% faster):"]
    for start in report["starts"]:
        kind = "" if start["plan"] else "plain decoding, as the best plan "
        text.append(f"After {start['context']:,} tokens: {kind}{start['reason']}")

    after = [f"after {context:,} tokens" for context in costs["contexts"]]
    table = [("",), ("Milliseconds (and plain steps) of a forward; --refresh measures again:",), ("nodes", *after)]
    table.append(("plain step", *(f"{ms:.2f} (1.00)" for ms in costs["plain"])))
    for at, nodes in enumerate(costs["counts"]):
        row = zip(costs["verify"], report["plain_steps"], strict=True)
        table.append((f"{nodes}", *(f"{ms[at]:.2f} ({steps[at]:.2f})" for ms, steps in row)))
    table += [("",), ("Predicted speed over plain decoding, by tokens per round of a chain of four:",), ("", *after)]
    for tokens in QUALITIES:
        offers = [each["offer"] for each in report["predictions"] if each["tokens_per_round"] == tokens]
        table.append((f"{tokens:.2f}", *(f"{offer['ratio']:.2f} ({describe_plan(offer['plan'])})" for offer in offers)))
    table.append(("pays from", *limits))
    return "\n".join([*text, *("".join(f"{cell:>24}" for cell in row).rstrip() for row in table)])


def check_plot(name: str) -> None:
    """Checks, before anything is measured, that a plot can be drawn.

    Raises:
        RedrafterError: the name does not end in .png, its folder does not exist, or matplotlib is missing.
    """
    path = expand_path(name)
    if path.suffix.lower() != ".png" or not path.parent.is_dir():
        raise RedrafterError(f"--plot: expected a .png file in an existing folder, got {name}")
    if find_spec("matplotlib") is None:
        raise RedrafterError("--plot needs matplotlib: pip install matplotlib")


def draw_plot(name: str, report: dict[str, Any]) -> None:
    """Plots costs and predicted speeds to a PNG file, written completely or not at all."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4), layout="constrained")
    costs, speeds = figure.subplots(1, 2)
    for context, steps in zip(report["costs"]["contexts"], report["plain_steps"], strict=True):
        ratios = [each["offer"]["ratio"] for each in report["predictions"] if each["context"] == context]
        costs.plot(report["costs"]["counts"], steps, "o-")
        speeds.plot(QUALITIES, ratios, "o-", label=f"after {context:,} tokens")
    costs.set(xlabel="nodes of a forward", ylabel="plain steps", ylim=(0, None))
    speeds.set(xlabel="tokens per round of a chain of 4 drafted tokens", ylabel="predicted speed over plain decoding")
    speeds.legend()
    with replace_file(expand_path(name)) as partial:
        figure.savefig(partial, dpi=120, format="png")
