"""`doctor`: measures what a round costs on this machine, and tries a drafter on a few prompts."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from .. import __version__
from ..decoding.options import CACHE_OPTIONS, OPTION_NAMES, Options
from ..decoding.recipe import choose_row_counts, get_cache_row_classes, make_cache_choice
from ..decoding.trials import TRIAL_PROMPTS, try_drafter
from ..drafters import make_drafter
from ..drafters.checkpoint import count_bytes
from ..drafters.protocol import Drafter
from ..engine.plan import OFF, chain_plan
from ..engine.types import RowCounts
from ..errors import RedrafterError
from ..loading.auto_drafter import examine_published, format_bytes
from ..loading.checkpoints import format_dtype, is_quantized
from ..loading.fit import measure_fit
from ..loading.named_models import load_models, load_named_drafter
from ..machine.description import describe_machine
from ..measuring.pair import Pair
from ..measuring.row_classes import format_row_counts
from ..measuring.sizing import choose_size
from ..measuring.store import read_hits
from ..measuring.verdicts import Verdicts
from ..planning.acceptance import compute_cumulative, get_acceptance
from ..planning.auto_planner import HYSTERESIS
from ..planning.costs import CostTable, is_disturbed
from ..target.model_checks import check_draftable
from ..target.model_parts import AFTER_NORM, get_compute_dtype, get_module_name
from .arguments import add_options, get_flags, make_parser, read_model_args

TRIAL_DEPTH = 8
"""The longest chain of a trial."""

TRIAL_TOKENS = 48
"""Tokens decoded after each prompt of a trial."""

MIN_ACCEPTANCE = 0.1
"""If the first guess is right less often, the drafter is probably for another model."""

Report = dict[str, Any]
"""The object of `--json` without `settings`, or a part of it."""


def run() -> int:
    """Runs the command with `sys.argv`; returns the exit status."""
    about = (
        "Measure what drafting costs on this machine, and what a drafter gains on a few prompts."
    )
    parser = make_parser("doctor", about, "a random one of the size that training would choose")
    add = parser.add_argument
    add("--refresh", action="store_true", help="measure again instead of using what was saved")
    add("--json", action="store_true", help="print one JSON object instead of the text")
    names = (*CACHE_OPTIONS, "few_rows")
    add_options(parser, without=OPTION_NAMES - {*names})
    args = parser.parse_args()
    options = Options(**get_flags(args, names))
    named = read_model_args(args)
    fit = measure_fit(args.model, named.drafter_name) if args.model else None
    if fit is not None:
        if not fit.fits and not fit.is_here:
            raise RedrafterError(f"{fit}. Nothing was downloaded")
        _say(str(fit))
    model, tokenizer, drafter, drafter_name = load_models(named)
    report = diagnose(model, tokenizer, drafter, options, refresh=args.refresh)
    report["published"] = list_published(args, model, options)
    if fit is not None:
        sizes = {"model": fit.model._asdict(), "drafter": fit.drafter and fit.drafter._asdict()}
        report["fit"] = fit._asdict() | sizes | {"fits": fit.fits}
    if not args.json:
        print(format_report(report))
        return 0
    settings = vars(args)
    if not args.model:
        settings["model"] = "demo"
    if args.draft_model is None:
        settings["drafter"] = drafter_name
    print(json.dumps(report | {"settings": settings}))
    return 0


def diagnose(
    model: nn.Module,
    tokenizer: Any,
    drafter: Drafter | None = None,
    options: Options | None = None,
    *,
    refresh: bool = False,
) -> Report:
    """Measures the pair and tries the drafter.

    Without a drafter, measures one of the size that training chooses.

    Args:
        options: those of the prompt cache, for which rows are compared, and `few_rows`.
        refresh: measure again.
    """
    options = options or Options()
    check_draftable(model, tree=False)
    stand_in = None
    if drafter is None:
        drafter, stand_in = make_stand_in(model)
    pair = Pair(model, drafter).with_few_rows(options.few_rows != OFF)
    no_trees = pair.explain_chains(states=(AFTER_NORM,)) or drafter.explain_chains()
    verdicts = pair.get_or_measure_verdicts(refresh=refresh) or Verdicts()
    costs = pair.get_or_measure_costs(trees=no_trees is None, refresh=refresh)
    if is_disturbed(costs):
        _say("the measured times contradict each other: measuring again")
        costs = pair.get_or_measure_costs(trees=no_trees is None, refresh=True)

    classes = get_cache_row_classes(pair, options, refresh=refresh)
    choice = None
    trial = None
    if stand_in is None:
        if not is_disturbed(costs):
            choose_row_counts(pair, replace(options, exact=True), refresh=refresh)
        choice = read_choice(pair, options, classes)
        trial = try_chain(pair, tokenizer, options)

    few_rows = verdicts.make_few_rows()
    kept = pair.make_costs(trees=no_trees is None).read()
    chains = list_chains(costs, drafter.args.max_depth, trial)
    report: Report = {
        "machine": describe_machine() | {"mlx_redrafter": __version__},
        "target": describe_model(model, get_module_name(model), get_compute_dtype(model)),
        "drafter": {
            **describe_model(drafter, drafter.args.describe_sizes(), drafter.dtype),
            "stand_in": stand_in,
            "base_model": drafter.args.base_model,
            "states": drafter.args.describe_states(),
        },
        "trial": trial,
        "no_trees": no_trees,
        "rollback": pair.describe_rollback(),
        "separate": pair.explain_separate(),
        "row_classes": classes,
        "cache": {"kv_bits": options.kv_bits, "max_kv_size": options.max_kv_size},
        "exact": choice,
        "few_rows": {
            "row_counts": few_rows.row_counts,
            "failure": verdicts.failure,
            "tried": verdicts.list_lines(),
        },
        "costs": costs._asdict(),
        "measured": kept and kept.moment,
        "chains": chains,
        "fastest": choose_fastest(chains),
        "published": [],
        "fit": None,
    }
    return report | {"notes": list_notes(report)}


def make_stand_in(model: nn.Module) -> tuple[Drafter, str]:
    """(a random drafter of the size that training chooses, why this size)."""
    _say("no drafter given: measuring a random one of the size that training would choose")
    size = choose_size(model, get_compute_dtype(model))
    drafter = make_drafter(size.args)
    drafter.set_dtype(get_compute_dtype(model))
    mx.eval(drafter.parameters())
    return drafter, size.reason


def read_choice(pair: Pair, options: Options, classes: Sequence[RowCounts]) -> Report | None:
    """The row counts of `exact`, with the moment of the choice; None if there was none to make."""
    chosen = make_cache_choice(pair, options).read()
    if chosen is None or len(classes) == 1 or chosen.value.row_counts not in classes:
        return None
    return {"row_counts": chosen.value.row_counts} | chosen.moment._asdict()


def try_chain(pair: Pair, tokenizer: Any, options: Options) -> Report:
    """The acceptance of the longest chain on a few prompts, with the options' `few_rows`."""
    assert pair.drafter is not None
    _say(f"trying the drafter on {len(TRIAL_PROMPTS)} prompts")
    depth = min(TRIAL_DEPTH, pair.drafter.args.max_depth or TRIAL_DEPTH)
    own = Options(
        max_tokens=TRIAL_TOKENS, plan=(1, depth), context=False, few_rows=options.few_rows
    )
    stats = try_drafter(pair, tokenizer, own)
    return {"depth": depth, "acceptance_per_depth": stats.acceptance_per_depth}


def list_published(args: Any, model: nn.Module, options: Options) -> list[Report]:
    """The published drafters for the target that the flags name, and whether they fit.

    Of those that were downloaded and measured, also the chain that is expected to be fastest.
    """
    found = []
    for published, stored, problem, _ in examine_published(args.model, model) if args.model else ():
        folder = stored and stored.folder
        fastest = None
        if problem is None and folder is not None:
            own = replace(read_model_args(args), drafter=str(folder), draft_model=None)
            try:
                pair = Pair(model, load_named_drafter(own, model, None)[0])
                fastest = predict_fastest(pair.with_few_rows(options.few_rows != OFF))
            except RedrafterError as error:
                problem = str(error)
        found.append(
            {
                "repo": published.repo,
                "kind": published.kind,
                "bytes": stored and stored.n_bytes,
                "is_downloaded": folder is not None,
                "problem": problem,
                "fastest": fastest,
            }
        )
    return found


def predict_fastest(pair: Pair) -> Report | None:
    """The chain that should be fastest, by saved costs and hits; None if none are saved."""
    drafter = pair.drafter
    assert drafter is not None
    trees = pair.explain_chains(states=(AFTER_NORM,)) is None
    costs = pair.make_costs(trees=trees).read_value()
    if costs is None:
        return None
    table = read_hits(pair.model, drafter).correct(get_acceptance(drafter))
    _, *shares = compute_cumulative(table, chain_plan(TRIAL_DEPTH))
    expected = {"depth": TRIAL_DEPTH, "acceptance_per_depth": shares}
    return choose_fastest(list_chains(costs, drafter.args.max_depth, expected))


def choose_fastest(chains: list[Report]) -> Report | None:
    """The fastest chain at the shorter context length; None if speeds are not known."""
    known = [chain for chain in chains if "speedup" in chain]
    known = [chain for chain in known if chain["context"] == known[0]["context"]]
    return max(known, key=lambda chain: chain["speedup"], default=None)


def _say(text: str) -> None:
    print(text, file=sys.stderr)


def describe_model(module: nn.Module, name: str, dtype: mx.Dtype) -> Report:
    """Name, dtype, quantization and bytes of weights of a model."""
    return {
        "name": name,
        "dtype": format_dtype(dtype),
        "quantized": is_quantized(module),
        "weight_bytes": count_bytes(module),
    }


def list_chains(costs: CostTable, max_depth: int | None, trial: Report | None) -> list[Report]:
    """The cost in plain steps of each measured chain, at each context length.

    After a trial also its speed. Empty if the times contradict each other.
    """
    chains: list[Report] = []
    if is_disturbed(costs):
        return chains
    for context in costs.contexts:
        for count in costs.counts[1:]:
            depth = count - 1
            if max_depth is not None and depth > max_depth:
                continue
            round_ms = costs.round_ms(chain_plan(depth), context)
            steps = max(round_ms, costs.least_ms(count, context)) / costs.plain_ms(context)
            chain: Report = {"context": context, "depth": depth, "plain_steps": steps}
            if trial and depth <= trial["depth"]:
                tokens = 1 + sum(trial["acceptance_per_depth"][:depth])
                chain |= {"tokens_per_round": tokens, "speedup": tokens / steps}
            chains.append(chain)
    return chains


def list_notes(report: Report) -> list[str]:
    """Notes for the user, the most serious first."""
    notes = []
    target = report["target"]
    trial = report["trial"]
    if trial and sum(trial["acceptance_per_depth"][:1]) < MIN_ACCEPTANCE:
        notes.append(
            "the drafter's first guess is hardly ever right: is it for this model, its states and "
            "its dtype?"
        )
    if "blas" in report["machine"] and (target["quantized"] or target["dtype"] != "float32"):
        notes.append(
            "on a CPU MLX multiplies 16-bit and quantized weights without the BLAS: slow, more so "
            "for more nodes"
        )
    return notes


def describe_verdict(report: Report) -> str:
    """Whether the drafter pays.

    Without one, from how many tokens per round one would; or that the machine was busy.
    """
    fastest = report["fastest"]
    if not report["chains"]:
        return (
            "Busy, not measured: the times contradict each other. "
            "Run this again when nothing else is running."
        )
    if fastest is None:
        chain = min(report["chains"], key=lambda chain: abs(chain["depth"] - 4))
        steps = f"{chain['plain_steps']:.2f}"
        return (
            f"A drafter pays here from {steps} tokens per round: a round of 1 x {chain['depth']} "
            f"takes {steps} plain steps."
        )
    made = (
        f"1 x {fastest['depth']} makes {fastest['tokens_per_round']:.2f} tokens in a round of "
        f"{fastest['plain_steps']:.2f} plain steps, {fastest['speedup']:.2f} times plain decoding"
    )
    verdict = "pays" if fastest["speedup"] > 1 + HYSTERESIS else "does not pay"
    return f"This drafter {verdict} here: {made} on {len(TRIAL_PROMPTS)} prompts; yours may differ."


def format_report(report: Report) -> str:
    """The report as text: verdict, notes, models, trial, and costs by nodes."""
    drafter = report["drafter"]
    trial = report["trial"]
    machine = ", ".join(f"{key} {value}" for key, value in report["machine"].items())
    lines = [describe_verdict(report)]
    lines += [f"Warning: {note}." for note in report["notes"]]
    lines += ["", f"Machine: {machine}"]
    for role in ("target", "drafter"):
        model = report[role]
        dtype = "quantized, " * model["quantized"] + model["dtype"]
        size = f"{model['weight_bytes'] / 1e6:,.1f} MB of weights"
        lines.append(f"{role.title()}: {model['name']}, {dtype}, {size}")
    if drafter["stand_in"]:
        lines.append(f"This drafter is random and only shows costs: {drafter['stand_in']}")
    else:
        made_for = "its config names no target"
        if drafter["base_model"]:
            made_for = f"it was made for {drafter['base_model']}"
        lines.append(f"It reads {drafter['states']}; {made_for}")
    if trial:
        shares = " ".join(f"{share:.2f}" for share in trial["acceptance_per_depth"])
        depth = trial["depth"]
        lines.append(
            f"Tried greedily with a chain of {depth}. Accepted at depth 1, 2, ...: {shares}"
        )
    alike = "; ".join(map(format_row_counts, report["row_classes"]))
    where = f"chains, {report['target']['dtype']}"
    for name, value in report["cache"].items():
        if value is not None:
            where += f", {name} {value}"
    lines.append(f"Row counts computed alike: {alike} ({where}); see --exact of generate")
    if report["exact"]:
        lines.append(describe_choice(report))
    if report["no_trees"]:
        lines.append(f"Plans: chains only, {report['no_trees']}")
    if report["rollback"]:
        lines.append(f"Recurrent layers after a rejection: {report['rollback']}")
    if report["separate"]:
        lines.append(f"The server drafts for one request at a time: {report['separate']}")
    if report["few_rows"]["tried"] or report["few_rows"]["failure"]:
        lines += format_few_rows(report["few_rows"])
    if report["published"]:
        lines += ["", "Published drafters; --drafter auto takes the first that fits:"]
        lines += map(format_published, report["published"])
    if report["chains"]:
        lines += format_costs(report)
    return "\n".join(lines)


def format_published(line: Report) -> str:
    """A line on a published drafter: kind, size, and whether it fits or what it should gain."""
    parts = [f"{line['repo']}: {line['kind']}"]
    if line["bytes"] is not None:
        place = "on this machine" if line["is_downloaded"] else "to download"
        parts.append(f"{format_bytes(line['bytes'])} {place}")
    fastest = line["fastest"]
    if line["problem"]:
        parts.append(f"skipped: {line['problem']}")
    elif fastest:
        gain = f"{fastest['speedup']:.2f} times plain decoding expected"
        parts.append(f"fits, {gain} with 1 x {fastest['depth']}")
    else:
        parts.append("fits, not measured")
    return ", ".join(parts)


def format_few_rows(few_rows: Report) -> list[str]:
    """Lines with the row counts of the kernel for a few rows, and what was found out about it."""
    counts = format_row_counts(few_rows["row_counts"])
    used = f"used for {counts} rows" if counts else "not used"
    if few_rows["failure"]:
        used += f": {few_rows['failure']}"
    lines = ["", f"Kernel for a few rows: {used}; --few-rows off turns it off"]
    for line in few_rows["tried"]:
        rows, name, ms, mlx_ms, verdict = line.values()
        times = f"{ms:.3f} ms, MLX {mlx_ms:.3f} ms"
        lines.append(f"{rows:>6} rows  {name:<48} {times:<28} {verdict}")
    return lines


def describe_choice(report: Report) -> str:
    """The class of row counts that --exact uses, how long ago it was chosen, and the load then."""
    choice = report["exact"]
    chosen = format_row_counts(choice["row_counts"])
    if chosen == "1":
        chosen += " (nothing drafts)"
    moment = format_moment(report, choice["when"], choice["load"])
    advice = "--refresh chooses again"
    if not report["chains"]:
        advice += " when nothing else is running"
    return f"Chosen for --exact: {chosen}, {moment}; {advice}"


def format_moment(report: Report, when: str, load: float | None) -> str:
    """How long ago something was measured, and how busy the machine was then."""
    age = datetime.now(UTC) - datetime.fromisoformat(when)
    hours = age.total_seconds() / 3600
    ago = f"{hours / 24:.0f} days" if hours >= 48 else f"{hours:.1f} hours"
    return f"{ago} ago at load {load} on {report['machine']['cores']} cores"


def format_costs(report: Report) -> list[str]:
    """Lines with the milliseconds of a forward and the plain steps of a round, by nodes."""
    costs = report["costs"]
    after = [f"after {context:,} tokens" for context in costs["contexts"]]
    unit = "1.00 is a plain step, or one node if that takes longer, as it is read at once"
    columns = []
    for plain, verified in zip(costs["plain"], costs["verify"], strict=True):
        least = max(plain, verified[0])
        columns.append([f"{ms:.2f} ({ms / least:.2f})" for ms in (plain, *verified)])
    names = ["plain step", *map(str, costs["counts"])]
    lines = ["", f"Milliseconds of a forward ({unit}); --refresh measures again:"]
    if report["measured"]:
        lines.append(f"(measured {format_moment(report, *report['measured'])})")
    lines += _align([["nodes", *after], *zip(names, *columns, strict=True)])

    steps: dict[int, list[str]] = {}
    for chain in report["chains"]:
        steps.setdefault(chain["depth"], []).append(f"{chain['plain_steps']:.2f}")
    lines += ["", "Plain steps of a whole round, and so the tokens per round from which it pays:"]
    plans = [[f"1 x {depth}", *own] for depth, own in steps.items()]
    return lines + _align([["plan", *after], *plans])


def _align(table: Iterable[Iterable[str]]) -> list[str]:
    """The lines of a table, with cells of 24 characters."""
    return ["".join(f"{cell:>24}" for cell in cells) for cells in table]
