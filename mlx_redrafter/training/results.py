"""What a finished run leaves for people: a table, training.json, a picture, a model card, the command to use it."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from textwrap import dedent
from typing import Any

from ..atomic_files import replace_file, write_text
from ..checkpoints import card_header
from ..drafters.recurrent import DrafterArgs
from .measuring import Row
from .record import Record
from .settings import Settings


def fastest(rows: list[Row]) -> int:
    """K of the chain that decodes fastest here; the shallower one among equals."""
    chains = [row for row in rows if row.shape[0] == 1]
    return max(chains, key=lambda row: (row.tokens_per_second, -row.shape[1])).shape[1]


def described(
    args: DrafterArgs, base: str | None, acceptance: Sequence[Sequence[float]], rows: list[Row]
) -> DrafterArgs:
    """The sizes with what was found out: whose drafter it is, how good, and how deep it drafts best here.

    Args:
        acceptance: (K, R) see `Knowledge`.
    """
    rounded = [[round(share, 4) for share in row] for row in acceptance]
    return replace(args, base_model=base, draft_depth=fastest(rows), acceptance=rounded)


def use(settings: Settings, base: str | None) -> str:
    """The command that decodes with the drafter."""
    model = [] if base is None else ["--model", base]
    adapters = ["--adapter-path", settings.adapter_path] if settings.adapter_path else []
    adapters += ["--trust-remote-code"] if settings.trust_remote_code else []
    return shlex.join(
        [
            *("python", "-m", "mlx_redrafter.generate", *model, *adapters),
            *("--drafter", str(settings.place), "--prompt", "hello", "--compare"),
        ]
    )


def write_summary(path: Path, record: Record, rows: list[Row]) -> None:
    """`training.json`: the whole record, and the shapes that were measured at the end."""
    measured = [
        {
            "beam_width": row.shape[0],
            "draft_depth": row.shape[1],
            "tree_size": row.shape[2],
            "tokens_per_round": row.stats.tokens_per_round,
            "acceptance_per_depth": list(row.stats.acceptance_per_depth),
            "tokens_per_second": row.tokens_per_second,
            "against_plain": row.ratio,
            "same_tokens": row.same,
        }
        for row in rows
    ]
    write_text(path, json.dumps({**vars(record), "measured": measured}, indent=1) + "\n")


def draw(path: Path, record: Record) -> bool:
    """A picture of loss and acceptance; False when there is no matplotlib to draw it."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        return False
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    FigureCanvasAgg(figure)
    loss, acceptance = figure.subplots(1, 2)
    loss.plot(*columns(record.reports, "loss"), label="training", linewidth=1)
    loss.plot(*columns(record.validations, "loss"), "o-", label="validation")
    loss.set(xlabel="iteration", ylabel="loss, nats")
    loss.legend()
    depths = len(record.validations[0]["acceptance"]) if record.validations else 0
    iterations = [entry["iteration"] for entry in record.validations]
    for k in range(depths):
        shares = [entry["acceptance"][k][0] for entry in record.validations]
        acceptance.plot(iterations, shares, "o-", label=f"depth {k + 1}")
    acceptance.set(xlabel="iteration", ylabel="first guesses that are right", ylim=(0, 1))
    rounds = acceptance.twinx()
    rounds.plot(*columns(record.validations, "tokens_per_round"), "k--", label="tokens per round")
    rounds.set(ylabel="tokens per round, decoded")
    if depths:
        acceptance.legend(fontsize="small")
    with replace_file(path) as partly:
        figure.savefig(partly, dpi=120)
    return True


def columns(entries: list[dict[str, Any]], key: str) -> tuple[list[int], list[float]]:
    """(iterations, values)."""
    return [entry["iteration"] for entry in entries], [entry[key] for entry in entries]


def model_card(args: DrafterArgs, base: str | None, iterations: int, rows: list[Row], command: str) -> str:
    """The README of the result, in the hub's form."""
    guesses = "every token" if args.draft_vocab_size is None else f"the {args.draft_vocab_size} most frequent tokens"
    lines = "\n".join(
        f"| {row.shape[0]} x {row.shape[1]} | {row.shape[2]} | {row.stats.tokens_per_round:.2f} | {row.ratio:.2f} |"
        for row in rows
    )
    body = dedent(
        f"""\
        # A recurrent drafter for {base or "the demo of mlx_redrafter"}

        Trained by mlx_redrafter for {iterations} iterations on what the target says: exit_dim {args.exit_dim}, residual
        blocks {args.num_draft_layers}, guesses {guesses}.

        | W x K | nodes | tokens per round | speed against plain decoding, where it was trained |
        |---|---|---|---|
        """
    )
    return "\n".join([card_header(base), body + lines, "", "```bash", command, "```", ""])
