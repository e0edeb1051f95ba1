"""The tables of the documents, each made of the results that are kept."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from statistics import median
from typing import Any

from mlx_redrafter.engine.plan import Plan
from mlx_redrafter.planning.costs import parse_costs

from .contest import DRAFTED, MLX_LM, MLX_LM_DRAFT, PLAIN
from .record import Record
from .results import DEMO, Results
from .study import study
from .tables import by_contestant, markdown, summed

SYNTHETIC = "synthetic"
"""How the names of files of results at real sizes begin."""


def machine_of(records: Iterable[Record]) -> str:
    """The machine and the settings in a sentence; nothing where nobody decoded."""
    record = next((record for record in records if record["kind"] == "speed"), None)
    if record is None:
        return ""
    machine = record["machine"]
    told = [machine["chip"], f"{machine['cores']} cores", machine["platform"].split("-with")[0]]
    told += [f"{name} {machine[name]}" for name in ("mlx", "mlx-lm", "mlx_redrafter")]
    told += [str(machine["blas"])] if "blas" in machine else [machine["device"]]
    told += [f"{name}={value}" for name, value in machine.items() if name.startswith(("OPENBLAS_", "OMP_"))]
    how = [f"{record['max_tokens']} tokens", f"{record['repeats']} turns", f"temperature {record['temp']:g}"]
    return f"{', '.join(told)}; {', '.join(how)}, seed {record['seed']}; {machine['when'][:10]}.\n"


def demo(results: Results) -> str:
    """Every contestant on the demo's own prompts."""
    own = [record for record in results.files.get(DEMO, []) if record.get("category") == "demo"]
    if not own:
        return ""
    lines = [
        {
            "": name,
            "tokens per round": row["tokens/round"] if own_records[0]["contestant"] != PLAIN else None,
            "tokens/s": row["tokens/s"],
            "against plain decoding, median (least to most)": ratio(row),
            "same tokens": row["same tokens"],
        }
        for name, own_records in by_contestant(own).items()
        for row in [summed(own_records)]
    ]
    return f"{markdown(lines)}\n{machine_of(own)}"


def ratio(row: dict[str, Any]) -> str:
    """A median and how far it goes."""
    return f"{row['x plain']:.2f} ({row['least']:.2f} to {row['most']:.2f})"


def categories(results: Results) -> str:
    """What each kind of prompt gives."""
    records = [record for record in results.files.get(DEMO, []) if record["kind"] == "speed"]
    names = list(dict.fromkeys(record["category"] for record in records))
    lines = []
    for name in names:
        sides = by_contestant(record for record in records if record["category"] == name)
        fixed = {
            label: summed(own)
            for label, own in sides.items()
            if own[0]["contestant"] == DRAFTED and isinstance(own[0]["plan"], list)
        }
        best = max(fixed, key=lambda label: fixed[label]["x plain"], default=None)
        lines.append(
            {
                "prompts": f"{name} ({len(sides[PLAIN])})",
                "plain tokens/s": median(record["tokens_per_second"] for record in sides[PLAIN]),
                "auto": ratio(summed(sides["auto"])) if "auto" in sides else None,
                "auto, random drafter": x_plain(sides, "auto, random drafter"),
                "best fixed": best and f"{best}: {fixed[best]['x plain']:.2f}",
                "tokens per round of it": best and fixed[best]["tokens/round"],
                MLX_LM: x_plain(sides, MLX_LM),
                MLX_LM_DRAFT: x_plain(sides, MLX_LM_DRAFT),
            }
        )
    return markdown(lines) if lines else ""


def x_plain(sides: dict[str, list[Record]], name: str) -> float | None:
    """A contestant's median ratio; None where it did not take part."""
    return summed(sides[name])["x plain"] if name in sides else None


def synthetic(results: Results) -> str:
    """Every contestant at real sizes."""
    lines = []
    for name, records in results.files.items():
        if name.startswith(SYNTHETIC):
            lines += [line for own in by_model(records).values() for line in sized(own)]
    return f"{markdown(lines)}\n{machines(results)}" if lines else ""


def machines(results: Results) -> str:
    """The machines of the synthetic results, each once."""
    told = {
        machine_of(records): None for name, records in results.files.items() if name.startswith(SYNTHETIC) and records
    }
    return "".join(told)


def by_model(records: Iterable[Record]) -> dict[str, list[Record]]:
    """Model and bits -> its records."""
    found: dict[str, list[Record]] = {}
    for record in records:
        found.setdefault(f"{record['model']}, {record['model_bits']:.3g} bits, {record['drafter']}", []).append(record)
    return found


def sized(records: list[Record]) -> Iterable[dict[str, Any]]:
    """The rows of a model."""
    costs = next((record for record in records if record["kind"] == "costs"), None)
    for name, own in by_contestant(records).items():
        first, row = own[0], summed(own)
        yield {
            "target": f"{first['model'].replace(', random weights', '')}, {first['model_bits']:.3g} bits",
            "acceptance": (first["drafter"] or "").removeprefix("oracle, acceptance ").split(",")[0],
            "": name,
            "tokens/s": row["tokens/s"],
            "tokens per round": row["tokens/round"],
            "x plain": row["x plain"],
            "limit": middle(limit(costs, record) for record in own),
            "GB/s": median(record["bandwidth_gb_s"] or 0.0 for record in own) or None,
            "same tokens": row["same tokens"],
            "tokens x turns": f"{first['max_tokens']} x {first['repeats']}",
        }


def limits(results: Results) -> str:
    """Tokens per round against what a round costs, beside what was measured."""
    records = results.files.get(DEMO, [])
    costs = next((record for record in records if record["kind"] == "costs"), None)
    lines = []
    for name, own in by_contestant(records).items():
        reached = [(highest, each["ratio"] / highest) for each in own if (highest := limit(costs, each)) is not None]
        if not reached or own[0]["contestant"] != DRAFTED:
            continue
        row = summed(own)
        lines.append(
            {
                "W x K": name,
                "tokens per round": row["tokens/round"],
                "verify + draft, in plain steps": middle(parts(costs, each) for each in own),
                "limit": median(highest for highest, _ in reached),
                "measured": row["x plain"],
                "of the limit": f"{100 * median(share for _, share in reached):.0f}%",
            }
        )
    return markdown(lines) if lines else ""


def limit(costs: Record | None, record: Record) -> float | None:
    """Tokens per round over verify forward and draft in plain steps, each measured alone: no round costs less.

    None where the plan is not fixed, or was not measured.
    """
    steps = parts(costs, record)
    return None if steps is None else (record["tokens"] - 1) / record["rounds"] / steps


def parts(costs: Record | None, record: Record) -> float | None:
    """Verify forward and draft in plain steps, behind the text as it is halfway through; None as in `limit`."""
    if costs is None or not isinstance(record["plan"], list):
        return None
    found, plan = parse_costs(costs["costs"]), Plan(*record["plan"])
    if not found.has(plan):
        return None
    length = record["prompt_tokens"] + record["tokens"] // 2
    return found._replace(rest=(0.0, 0.0)).round_ms(plan, length) / found.plain_ms(length)


def middle(values: Iterable[float | None]) -> float | None:
    """The median of what there is; None where there is nothing."""
    return median(found) if (found := [value for value in values if value is not None]) else None


def predicted(results: Results) -> str:
    """What changes would bring on Apple's chips of 2024: predicted, beside what Apple measured."""
    found = study(None, None)
    changes = found["predicted_changes"]
    lines = []
    for row in found["measured_by_apple"]:
        own = [each for each in changes if (each["chip"], each["dtype"]) == (row["chip"], row["dtype"])]
        lines.append(
            {"chip": f"{row['chip']} {row['dtype']}", "measured by Apple: best": apples(row)}
            | {f"predicted: {each['change']}": f"{each['predicted_x_plain']:.2f}" for each in own}
        )
    proof = found["proof"]
    return (
        f"{markdown(lines)}\nThe model's error on held-out cells, {proof['predictions']} predictions: median "
        f"{100 * proof['predicted_speed_error_median']:.2f}%, 95th percentile "
        f"{100 * proof['predicted_speed_error_95th_percentile']:.1f}%, worst "
        f"{100 * proof['worst']['predicted_speed_error']:.1f}%.\n"
    )


def apples(row: dict[str, Any]) -> str:
    """Apple's best shape, its tokens a second, and how often plain decoding's that is."""
    width, depth = row["best_shape"]
    return f"{width} x {depth}: {row['tokens_per_second']:.1f}, {row['x_plain']:.2f}"


def place_of(machine: dict[str, Any]) -> str:
    """A contributor's machine, as far as it is known."""
    cores, memory = machine.get("gpu_cores"), machine["memory_gb"]
    parts = [machine["chip"], cores and f"{cores} GPU cores", memory and f"{memory:g} GB", machine.get("power")]
    return ", ".join(part for part in parts if part)


def contributed(results: Results) -> str:
    """What others have measured."""
    lines = []
    for suite in results.contributed:
        told = {"measured by": suite["contributor"], "on": place_of(suite["machine"])}
        lines += [told | line for own in by_model(suite["records"]).values() for line in sized(own)]
    return markdown(lines) if lines else "None yet.\n"


BLOCKS: dict[str, Callable[[Results], str]] = {
    "demo": demo,
    "categories": categories,
    "limits": limits,
    "synthetic": synthetic,
    "predicted": predicted,
    "contributed": contributed,
}
"""Name of a place in the documents -> what makes its table."""
