"""Compares kinds of drafters on the demo, trained with the same data, iterations and number of weights.

    python -m benchmarks heads --output heads --results benchmarks/results/heads.jsonl

The target generates the texts once. Each kind is trained on them at each learning rate; the drafter with the most
tokens per round on held-out prompts represents it. Then the demo's prompts are decoded, greedy and sampled, with each
kind at each shape, a bigram of the same texts, the context alone, and mlx-lm's speculative decoding. Ratios are to
plain decoding in the same repeat.

Each kind also decodes after prompts of 64, 512, ... tokens that end at the same places in long held-out source files:
drafters are trained on short texts, and some may be worse at longer contexts. `--output` stores texts, drafters and
records: the same command continues a stopped run, and prints the tables of a finished one.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from mlx_redrafter import load_demo
from mlx_redrafter.atomic_files import expand_path, write_text
from mlx_redrafter.checkpoints import evaluate, load, load_drafter, save_drafter
from mlx_redrafter.demo.sources import split_files, training_prompts
from mlx_redrafter.drafters import TRAINABLE
from mlx_redrafter.drafters.config import DrafterArgs
from mlx_redrafter.drafters.protocol import Drafter, Embed
from mlx_redrafter.engine.beam_search import Advance, State
from mlx_redrafter.engine.model_parts import model_sizes
from mlx_redrafter.engine.plan import Plan
from mlx_redrafter.errors import RedrafterError
from mlx_redrafter.generate import decode_prompts, encode
from mlx_redrafter.options import Options
from mlx_redrafter.planning.costs import parse_costs
from mlx_redrafter.planning.sizing import n_weights
from mlx_redrafter.training.data import AnswerFile, Text, make_batches
from mlx_redrafter.training.evaluation import make_prompts, measure_guesses
from mlx_redrafter.training.hidden_states import add_hidden_states
from mlx_redrafter.training.settings import TrainingArgs
from mlx_redrafter.training.targets import Teacher, new_drafter
from mlx_redrafter.training.trainer import fit, make_loss, make_optimizer, target_arrays

from .command import parse_above_zero, parse_output, parse_positive
from .contest import find_status, hold_contest, measure_costs
from .contestants import Contestant, Settings, make_contestants, make_ours, warm_up
from .models import DRAFT_MODEL, Prompt, Workload, find_prompts
from .records import Record, Results, read_records, stamp, write_records
from .tables import (
    CONTEXT,
    DRAFTED,
    MLX_LM_DRAFT,
    PLAIN,
    Row,
    describe_machine,
    format_markdown,
    format_text,
    group_by_contestant,
    summarize,
)

SIZES: dict[str, dict[str, Any]] = {
    "recurrent": {"exit_dim": 512, "num_draft_layers": 1},
    "medusa": {"num_draft_layers": 1, "untied": False},
    "mlp_speculator": {"inner_dim": 376, "untied": False},
    "arctic_lstm": {"inner_dim": 298},
    "eagle": {"intermediate_size": 1196},
}
"""Sizes that give all kinds the same number of weights for the demo, within 1%."""

DEPTH, SHAPES = 5, ((1, 4), (4, 5), (8, 5))
TEMPS = (0.0, 0.8)
RATES = dict.fromkeys(SIZES, (4e-3, 8e-3)) | {"medusa": (4e-3,), "arctic_lstm": (8e-3,), "eagle": (1e-3, 2e-3)}
"""Learning rates to try per kind: the best ones from 4e-3 to 1.6e-2; lower for EAGLE heads, which diverge there."""

TEXTS, HELD_OUT, BIGRAM = 704, 24, "bigram of the same texts"
LENGTHS, PLACES, LONG = (64, 512, 1024, 1984), 4, "after {} tokens"
"""Lengths of the long prompts, the number of places, and the category of such prompts."""


class Bigram(Drafter):
    """Drafts the most frequent successors of a token in some texts; a baseline for heads."""

    def __init__(self, args: DrafterArgs, texts: Iterable[Text]) -> None:
        super().__init__(args)
        counts = np.full((args.vocab_size, args.vocab_size), 1e-2, np.float32)
        for text in texts:
            np.add.at(counts, (text.ids[:-1], text.ids[1:]), 1)
        self.successors = nn.Embedding(*counts.shape)
        self.successors.weight = mx.log(mx.array(counts))

    def begin(self, hidden: mx.array, embed: Embed) -> Advance:
        """Starts a draft, without state."""

        def advance(tokens: mx.array, state: State) -> tuple[mx.array, State]:
            return self.successors(tokens), ()

        return advance


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags."""
    add = parser.add_argument
    add("--output", type=expand_path, required=True, metavar="DIR", help="directory for texts, drafters and records")
    add("--results", type=parse_output, metavar="FILE", help="file for all records, one per line")
    add("--kinds", nargs="+", choices=SIZES, default=list(SIZES), help="default: all")
    add("--iters", type=parse_positive, default=400, help="iterations, of two texts each (default: %(default)s)")
    add("--learning-rates", type=parse_above_zero, nargs="+", metavar="RATE", help="rates to try (default: by kind)")
    add("--texts", type=parse_positive, default=TEXTS, help="texts to generate (default: %(default)s)")
    add("--text-tokens", type=parse_positive, default=128, help="tokens per text (default: %(default)s)")
    add("--max-tokens", type=parse_positive, default=64, help="tokens to decode per prompt (default: %(default)s)")
    add("--prompts", nargs="+", default=["demo"], metavar="NAME", help="as in run (default: demo)")


def run(args: argparse.Namespace) -> int:
    """Trains, decodes and prints the tables; returns the exit status of `find_status`."""
    model, tokenizer, _ = load_demo()
    draft_model = load(DRAFT_MODEL)[0]
    draft_model.set_dtype(mx.float32)
    base = Workload("demo", model, None, None, draft_model, "demo", find_prompts(args.prompts, tokenizer))
    how = {"max_tokens": args.text_tokens, "iters": args.iters, "batch_size": 2, "draft_depth": DEPTH}
    settings = TrainingArgs(**how)
    pieces = [encode(tokenizer, text) for text in training_prompts(args.texts, settings.seed)]
    answers = AnswerFile(args.output / "answers.jsonl", settings, pieces).complete(model, tokenizer)
    texts = [text for text in answers if len(text.ids) > text.offset + DEPTH]
    read = add_hidden_states(model, texts)
    training, held_out = read[:-HELD_OUT], read[-HELD_OUT:]

    batches, teacher = make_batches(training, settings.batch_size, settings.seed), Teacher(model)

    @cache  # the same for all kinds
    def ask_target(iteration: int) -> list[mx.array]:
        return target_arrays(teacher, None, batches(iteration), settings, iteration)

    scores = [
        sweep(model, kind, replace(settings, learning_rate=rate), ask_target, held_out, args.output)
        for kind in args.kinds
        for rate in args.learning_rates or RATES[kind]
    ]
    bigram = Bigram(DrafterArgs(*model_sizes(model), model_type="bigram"), training)
    workloads = {"others": base, "bigram": replace(base, drafter=bigram, drafter_name=BIGRAM)}
    for kind in args.kinds:
        best = max((score for score in scores if score["kind"] == kind), key=lambda score: score["tokens per round"])
        name = f"{kind}, {best['M weights']:.2f} M weights, learning rate {best['learning rate']:g}"
        drafter = load_drafter(args.output / best["directory"], model)
        workloads[best["directory"]] = replace(base, drafter=drafter, drafter_name=name)
    records = [
        record
        for temp in TEMPS
        for name, workload in workloads.items()
        for record in decode(workload, temp, args.max_tokens, args.output / f"{name}-{temp}-{args.max_tokens}.jsonl")
    ]
    long = find_long_prompts(tokenizer)
    records += [
        record
        for name, workload in workloads.items()
        if workload.drafter is not None and name != "bigram"
        for record in decode(replace(workload, prompts=long), 0.0, 48, args.output / f"{name}-long.jsonl", SHAPES[:1])
    ]
    if args.results:
        write_records(args.results, records)
    shown = [{name: value for name, value in score.items() if name != "directory"} for score in scores]
    tables = format_text(shown), format_text(make_rows(records)), format_text(make_length_rows(records))
    print("\n\n".join((*tables, describe(records))), end="")
    return find_status(record for record in records if record["kind"] == "speed")


def find_long_prompts(tokenizer: Any) -> list[Prompt]:
    """Prompts of `LENGTHS` tokens that end at some places in held-out source files."""
    found = (encode(tokenizer, file.read_text(encoding="utf-8")) for file in split_files()[1])
    texts = [text for text in found if len(text) > LENGTHS[-1]]
    return [
        Prompt(f"long/{length}/{number}", LONG.format(length), text[LENGTHS[-1] - length : LENGTHS[-1]])
        for length in LENGTHS
        for number, text in enumerate(texts[:PLACES])
    ]


def sweep(
    model: nn.Module,
    kind: str,
    settings: TrainingArgs,
    ask_target: Callable[[int], list[mx.array]],
    held_out: list[Text],
    output: Path,
) -> Row:
    """Trains and saves a kind at a learning rate, if not done before; returns its result.

    Raises:
        RedrafterError: the saved one was trained for another number of iterations.
    """
    name = f"{kind}-{settings.learning_rate:g}"
    place, score = output / name, output / name / "score.json"
    if score.exists():
        found: Row = json.loads(score.read_text(encoding="utf-8"))
        if found["iterations"] != settings.iters:
            raise RedrafterError(f"{place} was trained for {found['iterations']} iterations: give another --output")
        return found
    sizes = TRAINABLE[kind].for_training(*model_sizes(model), depth=DEPTH, draft_vocab_size=None, **SIZES[kind])
    mx.random.seed(settings.seed)
    drafter = new_drafter(model, sizes)
    print(f"training {name}", file=sys.stderr)
    evaluate(model, drafter)
    optimizer, loss, file = make_optimizer(settings), make_loss(drafter, settings), place / "checkpoint.safetensors"
    fit(drafter, optimizer, loss, ask_target, settings, name=name, checkpoint=file)
    mean_loss, acceptance = measure_guesses(model, drafter, held_out, settings)
    drafter.args = replace(drafter.args, acceptance=acceptance)
    options = Options(max_tokens=48, temp=TEMPS[-1], seed=0, plan=SHAPES[0])
    stats = decode_prompts(model, drafter, make_prompts(held_out, HELD_OUT), options).stats
    save_drafter(place, drafter)
    found = {
        "kind": kind,
        "M weights": n_weights(sizes) / 1e6,
        "iterations": settings.iters,
        "learning rate": settings.learning_rate,
        "loss": mean_loss,
        "tokens per round": stats.tokens_per_round,
        "directory": name,
    }
    write_text(score, json.dumps(found, indent=1) + "\n")
    file.unlink()
    return found


def decode(
    workload: Workload, temp: float, max_tokens: int, file: Path, shapes: Sequence[tuple[int, int]] | None = None
) -> list[Record]:
    """The records of a drafter at a temperature, stored in a file; without a drafter, of the other contestants.

    Args:
        shapes: (W, K) shapes; None for `SHAPES` and, if greedy, a record of costs.
    """
    if file.exists():
        return read_records(file)
    settings, sides = Settings(max_tokens=max_tokens, temp=temp, repeats=1), list[Contestant]()
    if workload.drafter is None:
        wanted = (PLAIN, MLX_LM_DRAFT, CONTEXT)
        sides = [side for side in make_contestants(workload, [], settings, context=True) if side.kind in wanted]
    else:
        sides = [make_ours(workload, None, "off", settings, PLAIN)]
        sides += [make_ours(workload, workload.drafter, plan, settings, DRAFTED) for plan in shapes or SHAPES]
    print(f"decoding with {workload.drafter_name or 'none'} at temperature {temp}", file=sys.stderr)
    is_timed = shapes is None and workload.drafter_name not in (None, BIGRAM) and temp == TEMPS[0]
    records = [measure_costs(workload)] if is_timed else []
    for side in sides:
        warm_up(workload, side)
    for found in hold_contest(workload, sides, settings):
        records += found
    records = [record | {"machine": stamp()} for record in records]
    write_records(file, records)
    return records


def make_rows(records: Sequence[Record]) -> list[Row]:
    """A row for each drafter at each shape, and for each other contestant, with columns for each temperature."""
    rows: dict[tuple[str, str], Row] = {}
    long = {LONG.format(length) for length in LENGTHS}
    records = [record for record in records if record.get("category") not in long]
    for temp in sorted({record["temp"] for record in records if record["kind"] == "speed"}):
        at = [record for record in records if record["kind"] == "speed" and record["temp"] == temp]
        for drafter in dict.fromkeys(record["drafter"] for record in at):
            own = [record for record in at if record["drafter"] == drafter]
            for name, group in group_by_contestant(own).items():
                if group[0]["contestant"] == PLAIN:
                    continue
                row = rows.setdefault((drafter or "", name), {"drafter": drafter or name, "W x K": ""})
                if drafter:
                    row["W x K"] = name
                found, kind = summarize(group), "greedy" if temp == 0 else f"T {temp:g}"
                row[f"{kind}: tokens per round"] = found["tokens/round"]
                row[f"{kind}: x plain"] = found["x plain"]
                row["draft, ms"] = find_draft_ms(records, group[0])
    return list(rows.values())


def make_length_rows(records: Sequence[Record]) -> list[Row]:
    """A row for each drafter: tokens per round with a chain of four, by prompt length."""
    rows: dict[str, Row] = {}
    for length in LENGTHS:
        own = [record for record in records if record.get("category") == LONG.format(length)]
        for name, group in group_by_contestant(own).items():
            for drafter in dict.fromkeys(record["drafter"] for record in group) if name != PLAIN else ():
                found = summarize([record for record in group if record["drafter"] == drafter])
                row = rows.setdefault(drafter, {"drafter": drafter, "W x K": name})
                row[f"after {length:,} tokens"] = found["tokens/round"]
    return list(rows.values())


def find_draft_ms(records: Iterable[Record], record: Record) -> float | None:
    """Milliseconds of a draft with the record's plan, measured separately; None if its width was not measured."""
    costs = next((each for each in records if each["kind"] == "costs" and each["drafter"] == record["drafter"]), None)
    if costs is None or record["contestant"] == CONTEXT or not isinstance(record["plan"], list):
        return None
    table, plan = parse_costs(costs["costs"]), Plan(*record["plan"])
    return table.draft_ms(plan) if plan.width in table.widths else None


def describe(records: Sequence[Record]) -> str:
    """One line with the machine and the settings."""
    record = next(record for record in records if record["kind"] == "speed")
    how = f"{record['max_tokens']} tokens, 1 turn, seed {record['seed']}; {record['machine']['when'][:10]}"
    return f"{describe_machine(record['machine'])}; {how}.\n"


def make_heads_table(results: Results) -> str:
    """The table of the kinds of drafters, from stored records."""
    records = results.files.get("heads", [])
    rows = make_rows(records), make_length_rows(records)
    return "\n".join((*map(format_markdown, filter(None, rows)), describe(records))) if records else ""
