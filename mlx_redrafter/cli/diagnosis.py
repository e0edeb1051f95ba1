"""What drafting can do on this machine for a model: costs, the plan to begin with, what drafters would bring."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn

from .. import __version__
from ..checkpoints import check_fit
from ..drafters.recurrent import Drafter
from ..engine.supported_models import check_draftable, compute_dtype
from ..planning.autopilot import flight_of
from ..planning.costs import Costs
from ..planning.machine import about, memory
from ..planning.pilot import make_flight
from ..planning.planner import UNKNOWN, Acceptance, few_plans
from ..training.sizing import choose_size
from .advice import notes
from .patient import Half, Patient, drafter_of, not_finite, target_of
from .prognosis import Cliff, Offer, Outlook, Start, cliffs, in_steps, outlooks, pays_from, quality_of, starts

NOTHING: Acceptance = ((0.0,),)
"""Of a drafter none of whose tokens is accepted."""


class Diagnosis(NamedTuple):
    """What was found.

    Attributes:
        machine: see `machine.about`, and this package's version.
        memory_bytes: of the machine; None where the system does not tell.
        peak_bytes: the most that MLX held at a time while measuring, models included; None when nothing was measured.
        target, drafter: the pair.
        stand_in: why the drafter has its size, when it is a random one that stands in for its costs; None otherwise.
        acceptance: the drafter's own table, or what is assumed of it; nothing where numbers are not finite.
        not_finite: which of the two makes numbers that are not finite; no token can be accepted then.
        assumed: whether the acceptance is assumed.
        no_trees: why the model takes chains only; None when it takes trees.
        costs: what was measured, now or before.
        cliffs: jumps of the curve.
        starts: what `plan="auto"` begins with behind each length.
        outlooks: what other drafters would bring, a row for each.
        pays_from: for each length the least tokens per round of a line of four that pay; None: none does.
        notes: what a user should know, a sentence or two each.
    """

    machine: dict[str, Any]
    memory_bytes: int | None
    peak_bytes: int | None
    target: Patient
    drafter: Patient
    stand_in: str | None
    acceptance: Acceptance
    not_finite: Half | None
    assumed: bool
    no_trees: str | None
    costs: Costs
    cliffs: tuple[Cliff, ...]
    starts: tuple[Start, ...]
    outlooks: tuple[tuple[Outlook, ...], ...]
    pays_from: tuple[float | None, ...]
    notes: tuple[str, ...]

    @property
    def quality(self) -> float:
        """The drafter's tokens per round of a line of four, expected from its acceptance."""
        return quality_of(self.acceptance)

    def as_dict(self) -> dict[str, Any]:
        """For JSON: numbers, strings, lists and objects by name."""
        costs, steps = self.costs, in_steps(self.costs)
        return {
            "machine": self.machine,
            "memory": {
                "machine_bytes": self.memory_bytes,
                "target_bytes": self.target.weight_bytes,
                "drafter_bytes": self.drafter.weight_bytes,
                "peak_bytes": self.peak_bytes,
            },
            "target": self.target._asdict(),
            "drafter": {
                **self.drafter._asdict(),
                "stand_in": self.stand_in,
                "acceptance": [list(row) for row in self.acceptance],
                "acceptance_assumed": self.assumed,
                "tokens_per_round": self.quality,
            },
            "not_finite": self.not_finite,
            "trees": self.no_trees is None,
            "no_trees": self.no_trees,
            "costs": costs._asdict(),
            "plain_steps": [list(row) for row in steps],
            "cliffs": [cliff._asdict() for cliff in self.cliffs],
            "starts": [
                {"context": each.context, "plan": each.plan, "offer": offer(each.offer), "reason": each.reason}
                for each in self.starts
            ],
            "outlooks": [
                {"tokens_per_round": each.quality, "context": each.context, "offer": offer(each.offer)}
                for row in self.outlooks
                for each in row
            ],
            "pays_from": [
                {"context": context, "tokens_per_round": least}
                for context, least in zip(costs.contexts, self.pays_from, strict=True)
            ],
            "notes": list(self.notes),
        }


def offer(found: Offer | None) -> dict[str, Any] | None:
    """An offer for JSON."""
    if found is None:
        return None
    return {"plan": found.plan, "tokens_per_round": found.tokens, "plain_steps": found.steps, "ratio": found.times}


def diagnose(
    model: nn.Module,
    drafter: Drafter | None = None,
    *,
    refresh: bool = False,
    say: Callable[[str], None] = lambda text: None,
) -> Diagnosis:
    """Measures what is not known of this machine for a pair of models, and says what drafting can do there.

    Args:
        model: a model of mlx-lm.
        drafter: None lets a random one stand in for its costs, of the size that training would choose.
        refresh: measure anew.
        say: is told what takes time.

    Raises:
        UnsupportedModelError: the model cannot be drafted for.
        CheckpointError: the drafter is of another size.
    """
    no_trees = check_draftable(model, tree=True)
    trees, stand_in, acceptance = no_trees is None, None, None
    if drafter is None:
        say("no drafter given: a random one of the size that training would choose stands in for its costs")
        drafter, stand_in = random_drafter(model)
    else:
        check_fit(drafter, model)
        acceptance = drafter.args.acceptance
    odd = not_finite(model, drafter)
    measures = False

    def begin() -> None:
        """Says so, and the peak of memory counts from here."""
        nonlocal measures
        measures = True
        say("measuring: ten seconds at most, or one turn of everything where that takes longer")
        mx.reset_peak_memory()

    flight = flight_of(model, drafter, trees=trees, refresh=refresh, begin=begin)
    peak, costs = mx.get_peak_memory() if measures else None, flight.costs
    target, facts, machine = target_of(model), drafter_of(drafter), about() | {"mlx_redrafter": __version__}
    said = notes(
        machine,
        target,
        facts,
        costs,
        acceptance=acceptance,
        stands_in=stand_in is not None,
        not_finite=odd,
    )
    believed = acceptance or UNKNOWN
    if odd is not None:
        believed = NOTHING
        flight = make_flight(costs, believed, few_plans(costs, believed))
    return Diagnosis(
        machine=machine,
        memory_bytes=memory(),
        peak_bytes=peak,
        target=target,
        drafter=facts,
        stand_in=stand_in,
        acceptance=believed,
        not_finite=odd,
        assumed=acceptance is None,
        no_trees=no_trees,
        costs=costs,
        cliffs=cliffs(costs),
        starts=starts(flight, believed),
        outlooks=outlooks(costs),
        pays_from=tuple(pays_from(costs, context) for context in costs.contexts),
        notes=tuple(said),
    )


def random_drafter(model: nn.Module) -> tuple[Drafter, str]:
    """(a drafter of the size that training would choose for this model, why of that size)."""
    dtype = compute_dtype(model)
    choice = choose_size(model, dtype=dtype)
    drafter = Drafter(choice.args)
    drafter.set_dtype(dtype)
    mx.eval(drafter.parameters())
    return drafter, choice.reason
