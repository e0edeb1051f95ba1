"""A diagnosis as a page of text for a terminal of 80 columns."""

from __future__ import annotations

from collections.abc import Sequence
from textwrap import wrap

from ..planning.meter import COUNTS
from .diagnosis import Diagnosis
from .patient import Patient
from .picture import COLUMNS, chart
from .prognosis import Outlook, shape

INDENT, CELL = 10, 35

PREDICTED = (
    "Predicted: how many times as fast as plain decoding a drafter would be that makes so many tokens per round of a "
    "line of 4 drafted tokens, right equally often at any depth; by which plan, W x K, and how many tokens per round "
    "that makes. Where plain decoding is faster, auto decodes plainly."
)


def page(found: Diagnosis, *, blocks: bool) -> list[str]:
    """A diagnosis in lines of at most 80 columns.

    Args:
        blocks: draw with Unicode's block elements; everything is ASCII otherwise.
    """
    said = [["", *wrap(f"Note: {note}.", COLUMNS, break_on_hyphens=False)] for note in found.notes]
    lines = about_lines(found)
    if found.not_finite is not None:  # before any speed
        lines += said.pop(0)
    lines += ["", "A verify forward, in milliseconds and in plain steps"]
    lines += [*chart(found.costs, blocks=blocks), "", *cost_lines(found)]
    lines += ["", "What plan=auto begins with" + (", acceptance as it is assumed" if found.assumed else "")]
    for each in found.starts:
        chosen = "plain decoding" if each.plan is None else shape(each.plan)
        lines += item(f"{each.context:,}", f"{chosen}: {each.reason}")
    lines += ["", *wrap(PREDICTED, COLUMNS), *outlook_lines(found)]
    return lines + [line for note in said for line in note]


def item(name: str, text: str) -> list[str]:
    """A named text, wrapped behind its name."""
    indent = " " * INDENT
    return wrap(text, COLUMNS, initial_indent=f"{name:{INDENT}}", subsequent_indent=indent, break_on_hyphens=False)


def about_lines(found: Diagnosis) -> list[str]:
    """Machine, versions, BLAS, models, memory."""
    machine = found.machine
    memory = "" if found.memory_bytes is None else f", {size(found.memory_bytes)} of memory"
    lines = item("machine", f"{machine['chip']}, {machine['cores']} cores{memory}, {machine['platform']}")
    lines += item("device", machine["device"])
    lines += item("versions", ", ".join(f"{k} {machine[k]}" for k in ("python", "mlx", "mlx-lm", "mlx_redrafter")))
    if "blas" in machine:
        settings = [f"{k}={v}" for k, v in machine.items() if k.startswith(("OPENBLAS_", "OMP_"))]
        lines += item("BLAS", ", ".join([machine["blas"], *settings]))
    lines += item("target", described(found.target))
    worth = f"{found.quality:.2f} tokens per round of a line of 4, {'assumed' if found.assumed else 'says its config'}"
    if found.not_finite is not None:
        worth = f"the {found.not_finite}'s numbers are not finite, see the note"
    elif found.stand_in is not None:
        worth = f"random, it stands in for the costs of a trained one: {found.stand_in}"
    lines += item("drafter", f"{described(found.drafter)}; {worth}")
    if found.no_trees is not None:
        lines += item("plans", f"chains only, no trees: {found.no_trees}")
    peak = "before, and kept; --refresh measures anew"
    if found.peak_bytes is not None:
        peak = f"just now, with {size(found.peak_bytes)} of memory at most, models included"
    return lines + item("measured", peak)


def described(each: Patient) -> str:
    """A model in words."""
    return f"{each.name}, {'quantised, ' * each.quantized}{each.dtype}, {size(each.weight_bytes)} of weights"


def cost_lines(found: Diagnosis) -> list[str]:
    """What stands beside the curve: plain steps, cliffs, drafts and the rest of rounds."""
    costs, step = found.costs, found.costs.plain[0]
    lines = item("plain", f"a step of plain decoding takes {' and '.join(f'{ms:.2f} ms' for ms in costs.plain)}")
    if costs.counts[-1] < COUNTS[-1]:
        lines += item("nodes", f"more than {costs.counts[-1]} were not measured in the time there was, nor are planned")
    lines += item("cliffs", "; ".join(cliff.told for cliff in found.cliffs) or "none")
    levels = ", ".join(f"{ms / step:.3f} {width} wide" for width, ms in zip(costs.widths, costs.level, strict=True))
    rest = f"the rest of a round {costs.rest[0] / step:.2f} with a chain"
    rest += f", {costs.rest[1] / step:.2f} with a tree" if len(costs.widths) > 1 else ""
    again = f"; a token that is read again {costs.again / step:.2f}" if costs.again else ""
    return lines + item("draft", f"in plain steps, a level costs {levels}; {rest}{again}")


def outlook_lines(found: Diagnosis) -> list[str]:
    """The table of what drafters would bring, this one's row first."""
    lines = [f"{'tokens':{INDENT}}" + "".join(f"{f'behind {at:,} tokens':{CELL}}" for at in found.costs.contexts)]
    if found.stand_in is None:
        entries = [Outlook(each.context, found.quality, each.offer) for each in found.starts]
        lines.append(row(f"{found.quality:.2f} this", entries))
    lines += [row(f"{entries[0].quality:.2f}", entries) for entries in found.outlooks]
    least = (f"from {least:.2f} tokens" if least is not None else "never" for least in found.pays_from)
    lines.append(f"{'pays':{INDENT}}" + "".join(f"{told:{CELL}}" for told in least))
    return [line.rstrip() for line in lines]


def row(name: str, entries: Sequence[Outlook]) -> str:
    """A row of the table."""
    cells = ""
    for each in entries:
        told = "not measured"
        if each.offer is not None:
            told = f"{each.offer.times:.2f} times, {shape(each.offer.plan)}: {each.offer.tokens:.2f}"
        cells += f"{told:{CELL}}"
    return f"{name:{INDENT}}{cells}"


def size(count: int) -> str:
    """Bytes in MB or GB."""
    return f"{count / 1e9:.2f} GB" if count >= 1e9 else f"{count / 1e6:.1f} MB"
