"""`doctor`: measures what a round costs on this machine, and tries a drafter on a few prompts."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from .. import __version__
from ..arguments import get_drafter_name, load_models, make_parser
from ..checkpoints import format_dtype, is_quantized
from ..drafters import make_drafter
from ..drafters.checkpoint import count_bytes
from ..drafters.protocol import Drafter
from ..engine.exactness import format_row_counts
from ..engine.model_checks import check_draftable
from ..engine.model_parts import get_compute_dtype, get_module_name
from ..engine.plan import chain_plan
from ..machine.description import describe_machine
from ..options import Options
from ..pair import Pair
from ..planning.costs import CostTable, is_disturbed
from ..planning.planner import HYSTERESIS
from ..planning.sizing import choose_size
from ..setup import get_cache_row_classes
from ..trials import TRIAL_PROMPTS, try_drafter

TRIAL_DEPTH = 8
TRIAL_TOKENS = 48
"""The longest chain of a trial, and tokens decoded after each prompt."""

MIN_ACCEPTANCE = 0.1
"""If the first guess is right less often, the drafter is probably for another model."""


def run() -> int:
    """Runs the command with `sys.argv`; returns the exit status."""
    about = (
        "Measure what drafting costs on this machine, and what a drafter gains on a few prompts."
    )
    parser = make_parser("doctor", about, "a random one of the size that training would choose")
    parser.add_argument(
        "--refresh", action="store_true", help="measure again instead of using what was saved"
    )
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object instead of the text"
    )
    args = parser.parse_args()
    model, tokenizer, drafter = load_models(args)
    report = diagnose(model, tokenizer, drafter, refresh=args.refresh)
    demo = {} if args.model else {"model": "demo", "drafter": get_drafter_name(args) or "demo"}
    print(
        json.dumps(report | {"settings": vars(args) | demo}) if args.json else format_report(report)
    )
    return 0


def diagnose(
    model: nn.Module, tokenizer: Any, drafter: Drafter | None = None, *, refresh: bool = False
) -> dict[str, Any]:
    """The object of `--json` without `settings`.

    Without a drafter, measures one of the size that training chooses.
    """
    no_trees = check_draftable(model, tree=True)
    stand_in = None
    trial = None
    if drafter is None:
        print(
            "no drafter given: measuring a random one of the size that training would choose",
            file=sys.stderr,
        )
        choice = choose_size(model, get_compute_dtype(model))
        drafter = make_drafter(choice.args)
        stand_in = choice.reason
        drafter.set_dtype(get_compute_dtype(model))
        mx.eval(drafter.parameters())
    no_trees = no_trees or drafter.explain_chains()
    pair = Pair(model, drafter)
    costs = pair.measure_costs(trees=no_trees is None, refresh=refresh)
    if is_disturbed(costs):
        print("the measured times contradict each other: measuring again", file=sys.stderr)
        costs = pair.measure_costs(trees=no_trees is None, refresh=True)
    if stand_in is None:
        print(f"trying the drafter on {len(TRIAL_PROMPTS)} prompts", file=sys.stderr)
        depth = min(TRIAL_DEPTH, drafter.args.max_depth or TRIAL_DEPTH)
        stats = try_drafter(
            pair, tokenizer, Options(max_tokens=TRIAL_TOKENS, plan=(1, depth), context=False)
        )
        trial = {"depth": depth, "acceptance_per_depth": stats.acceptance_per_depth}
    chains = [] if is_disturbed(costs) else list_chains(costs, drafter.args.max_depth, trial)
    tried = [
        chain for chain in chains if "speedup" in chain and chain["context"] == costs.contexts[0]
    ]
    report: dict[str, Any] = {
        "machine": describe_machine() | {"mlx_redrafter": __version__},
        "target": describe_model(model, get_module_name(model), get_compute_dtype(model)),
        "drafter": {
            **describe_model(drafter, drafter.args.describe(), drafter.dtype),
            "stand_in": stand_in,
            "base_model": drafter.args.base_model,
            "states": drafter.args.describe_states(),
        },
        "trial": trial,
        "no_trees": no_trees,
        "row_classes": get_cache_row_classes(pair, Options(), refresh=refresh),
        "costs": costs._asdict(),
        "chains": chains,
        "fastest": max(tried, key=lambda chain: chain["speedup"], default=None),
    }
    return report | {"notes": list(find_notes(report))}


def describe_model(module: nn.Module, name: str, dtype: mx.Dtype) -> dict[str, Any]:
    """Name, dtype, quantization and bytes of weights of a model."""
    size = count_bytes(module)
    return {
        "name": name,
        "dtype": format_dtype(dtype),
        "quantized": is_quantized(module),
        "weight_bytes": size,
    }


def list_chains(
    costs: CostTable, max_depth: int | None, trial: dict[str, Any] | None
) -> list[dict[str, Any]]:
    """The cost in plain steps of each measured chain, at each context length.

    After a trial also its speed.
    """
    found = []
    depths = [
        count - 1 for count in costs.counts[1:] if max_depth is None or count - 1 <= max_depth
    ]
    for context in costs.contexts:
        for depth in depths:
            ms = max(costs.round_ms(chain_plan(depth), context), costs.least_ms(1 + depth, context))
            steps = ms / costs.plain_ms(context)
            chain: dict[str, Any] = {"context": context, "depth": depth, "plain_steps": steps}
            if trial and depth <= trial["depth"]:
                tokens = 1 + sum(trial["acceptance_per_depth"][:depth])
                chain |= {"tokens_per_round": tokens, "speedup": tokens / steps}
            found.append(chain)
    return found


def find_notes(report: dict[str, Any]) -> Iterator[str]:
    """Notes for the user, the most serious first."""
    machine = report["machine"]
    target = report["target"]
    trial = report["trial"]
    if trial and sum(trial["acceptance_per_depth"][:1]) < MIN_ACCEPTANCE:
        yield "the drafter's first guess is hardly ever right: is it for this model, its states and its dtype?"
    if "blas" in machine and (target["quantized"] or target["dtype"] != "float32"):
        yield "on a CPU MLX multiplies 16-bit and quantized weights without the BLAS: slow, more so for more nodes"


def describe_verdict(report: dict[str, Any]) -> str:
    """Whether the drafter pays.

    Without one, from how many tokens per round one would; or that the machine was busy.
    """
    fastest = report["fastest"]
    if not report["chains"]:
        return "Busy, not measured: the times contradict each other. Run this again when nothing else is running."
    if fastest is None:
        chain = min(report["chains"], key=lambda chain: abs(chain["depth"] - 4))
        steps = f"{chain['plain_steps']:.2f}"
        why = f"a round of 1 x {chain['depth']} takes {steps} plain steps"
        return f"A drafter pays here from {steps} tokens per round: {why}."
    made = (
        f"1 x {fastest['depth']} makes {fastest['tokens_per_round']:.2f} tokens in a round of "
        f"{fastest['plain_steps']:.2f} plain steps, {fastest['speedup']:.2f} times plain decoding"
    )
    verdict = "pays" if fastest["speedup"] > 1 + HYSTERESIS else "does not pay"
    return f"This drafter {verdict} here: {made} on {len(TRIAL_PROMPTS)} prompts; yours may differ."


def format_report(report: dict[str, Any]) -> str:
    """The report as text: verdict, notes, models, trial, and costs by nodes."""
    costs = report["costs"]
    drafter = report["drafter"]
    trial = report["trial"]
    text = [describe_verdict(report), *(f"Warning: {note}." for note in report["notes"]), ""]
    text.append(
        "Machine: " + ", ".join(f"{key} {value}" for key, value in report["machine"].items())
    )
    for role in ("target", "drafter"):
        name, dtype, quantized, size = (
            report[role][key] for key in ("name", "dtype", "quantized", "weight_bytes")
        )
        text.append(
            f"{role.title()}: {name}, {'quantized, ' * quantized}{dtype}, {size / 1e6:,.1f} MB of weights"
        )
    if drafter["stand_in"]:
        text.append(f"This drafter is random and only shows costs: {drafter['stand_in']}")
    else:
        made_for = (
            f"it was made for {drafter['base_model']}"
            if drafter["base_model"]
            else "its config names no target"
        )
        text.append(f"It reads {drafter['states']}; {made_for}")
    if trial:
        shares = " ".join(f"{share:.2f}" for share in trial["acceptance_per_depth"])
        text.append(
            f"Tried greedily with a chain of {trial['depth']}. Accepted at depth 1, 2, ...: {shares}"
        )
    alike = "; ".join(map(format_row_counts, report["row_classes"]))
    text.append(
        f"Row counts computed alike: {alike} (chains, {report['target']['dtype']}); see --exact of generate"
    )
    if report["no_trees"]:
        text.append(f"Plans: chains only, {report['no_trees']}")

    after = [f"after {context:,} tokens" for context in costs["contexts"]]
    if not report["chains"]:
        return "\n".join(text)
    unit = "1.00 is a plain step, or one node if that takes longer, as it is read at once"
    table = [
        ("",),
        (f"Milliseconds of a forward ({unit}); --refresh measures again:",),
        ("nodes", *after),
    ]
    columns = [(plain, *row) for plain, row in zip(costs["plain"], costs["verify"], strict=True)]
    for nodes, row in zip(
        ("plain step", *costs["counts"]), zip(*columns, strict=True), strict=True
    ):
        cells = (
            f"{ms:.2f} ({ms / max(column[:2]):.2f})"
            for ms, column in zip(row, columns, strict=True)
        )
        table.append((f"{nodes}", *cells))
    table += [
        ("",),
        ("Plain steps of a whole round, and so the tokens per round from which it pays:",),
        ("plan", *after),
    ]
    for depth in dict.fromkeys(chain["depth"] for chain in report["chains"]):
        own = [
            f"{chain['plain_steps']:.2f}" for chain in report["chains"] if chain["depth"] == depth
        ]
        table.append((f"1 x {depth}", *own))
    return "\n".join([*text, *("".join(f"{cell:>24}" for cell in row).rstrip() for row in table)])
