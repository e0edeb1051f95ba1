"""Tokens per round and speed with past answers, and with drafters trained on them, by number of answers.

    python -m benchmarks answers --kept 0 25 100 --prompts 12 --max-tokens 96 --minutes 1 --texts answers.json

takes about ten minutes on two cores; the defaults take several times as long.

The packaged demo continues pieces of two kinds of text, sampled: "code" from the standard library, on which its drafter
was trained, and "topics", the language manual in `pydoc_data`, on which neither model was trained. Some answers are
kept. `train --answers` trains the packaged drafter on them for `--minutes`; if the result is not better, the packaged
one is used. Other pieces are then continued with drafts from the context, from context and past answers, from the
drafter, and from all of them.

Tokens per round are pooled over the prompts, in two ways: with whole drafts verified, counted on the plain texts, and
under `auto`, which drafts only if that is faster. The ratio to plain decoding is the median over prompts, of
alternating runs. With `--texts` the answers are written to a file, or read from it if it exists.
"""

from __future__ import annotations

import argparse
import json
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple, cast

import mlx.core as mx
import mlx.nn as nn
from tqdm import tqdm

from mlx_redrafter import load_demo
from mlx_redrafter.answer_folder import AnswerFolder
from mlx_redrafter.atomic_files import write_text
from mlx_redrafter.checkpoints import load_drafter
from mlx_redrafter.demo import DIRECTORY
from mlx_redrafter.demo.sources import pick_pieces, split_files
from mlx_redrafter.drafters.context import ContextSource
from mlx_redrafter.drafters.trainable import TrainableDrafter
from mlx_redrafter.engine.stats import Stats
from mlx_redrafter.generate import decode_prompts
from mlx_redrafter.options import Options
from mlx_redrafter.training.data import MAX_BATCH_SIZE, generate_answers, join_text
from mlx_redrafter.training.evaluation import count_rounds, find_accepted
from mlx_redrafter.training.run import REFUSED, train
from mlx_redrafter.training.settings import TrainingArgs
from mlx_redrafter.training.targets import Teacher

from .command import add_json, parse_above_zero, parse_output, parse_positive
from .tables import show_rows

KINDS = {
    "code": lambda: split_files()[0],
    "topics": lambda: [Path(sysconfig.get_path("stdlib")) / "pydoc_data" / "topics.py"],
}
"""Kind of text -> its files."""

DEPTH = 5
"""The length of chains."""

Text = tuple[list[int], list[int]]
"""Token ids of a prompt and its answer."""


class ReadFolder(AnswerFolder):
    """A read-only answer folder."""

    def add(self, prompt: Sequence[int], made: Sequence[int], known: int = 0) -> None:
        """Does nothing."""


class Side(NamedTuple):
    """A combination of draft sources.

    Attributes:
        answers: number of past answers.
        source: name in the table.
        folder: the folder of past answers, or None.
        drafter: the drafter, or None.
        context: whether to draft from the context.
        gate: "written" or "refused", whether training wrote a new drafter; "" without training.
    """

    answers: int
    source: str
    folder: AnswerFolder | None
    drafter: TrainableDrafter | None
    context: bool
    gate: str


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags."""
    add = parser.add_argument
    add("--kept", type=int, nargs="+", default=[0, 25, 100, 400], metavar="N", help="default: 0 25 100 400")
    add("--kinds", nargs="+", choices=tuple(KINDS), default=list(KINDS), help="kinds of text (default: all)")
    add("--prompts", type=parse_positive, default=32, help="prompts to measure per kind (default: %(default)s)")
    add("--max-tokens", type=parse_positive, default=128, help="tokens per answer (default: %(default)s)")
    add("--minutes", type=parse_above_zero, default=5.0, help="time for training a drafter (default: %(default)s)")
    add("--iters", type=parse_positive, default=1000, help="maximum training iterations (default: %(default)s)")
    add("--temp", type=float, default=0.8, help="sampling temperature (default: %(default)s)")
    add("--seed", type=int, default=0, help="random seed (default: %(default)s)")
    add("--texts", type=parse_output, help="file to store the answers in")
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Prints a row for each number of answers and side; returns exit status 1 if a text differs from plain decoding."""
    model, tokenizer, _ = load_demo()
    rows = []
    for kind in args.kinds:
        pieces = pick_pieces(KINDS[kind](), args.prompts + max(args.kept), args.seed)
        prompts = [tokenizer.encode(text) for text in pieces]
        measured, others = prompts[: args.prompts], prompts[args.prompts :]
        texts = make_texts(kind, model, tokenizer, others, args)
        with TemporaryDirectory() as root:
            sides = [
                side for count in args.kept for side in make_sides(model, tokenizer, texts[:count], Path(root), args)
            ]
            rows += [{"kind": kind, **row} for row in measure(model, tokenizer, measured, sides, args)]
    show_rows(args, rows)
    return 0 if all(row["same texts"] == args.prompts for row in rows) else 1


def make_texts(
    kind: str, model: nn.Module, tokenizer: Any, prompts: Sequence[list[int]], args: argparse.Namespace
) -> list[Text]:
    """The prompts with their answers, from the file if it has them, else generated."""
    settings, known = [args.seed, args.temp, args.max_tokens], dict[str, Any]()
    if args.texts is not None and args.texts.exists():
        known = json.loads(args.texts.read_text(encoding="utf-8"))
        found = known.get(kind, {"settings": None, "texts": []})
        if found["settings"] == settings and [prompt for prompt, _ in found["texts"]] == list(prompts):
            return [(prompt, answer) for prompt, answer in found["texts"]]
    mx.random.seed(args.seed)
    texts = list[Text]()
    for start in tqdm(range(0, len(prompts), MAX_BATCH_SIZE), f"answers, {kind}"):
        group = prompts[start : start + MAX_BATCH_SIZE]
        texts += zip(group, generate_answers(model, tokenizer, group, args.temp, args.max_tokens), strict=True)
    if args.texts is not None:
        write_text(args.texts, json.dumps(known | {kind: {"settings": settings, "texts": texts}}) + "\n")
    return texts


def make_sides(
    model: nn.Module, tokenizer: Any, texts: Sequence[Text], root: Path, args: argparse.Namespace
) -> list[Side]:
    """The sides that use these past answers."""
    count, name, gate, folder = len(texts), DIRECTORY / "drafter", "", None
    if texts:
        place = root / str(count)
        kept = AnswerFolder(place, tokenizer)
        for read, answer in texts:
            kept.add(read, answer)
        folder = ReadFolder(place, tokenizer)
        output = root / f"drafter-{count}"
        quick: dict[str, Any] = {"val_prompts": 1, "val_tokens": 16, "batch_size": 2, "max_tokens": args.max_tokens}
        settings = TrainingArgs(
            answers=str(place),
            drafter=str(name),
            output=str(output),
            minutes=args.minutes,
            iters=args.iters,
            draft_depth=DEPTH,
            seed=args.seed,
            **quick,
        )
        is_written = train(settings, say=lambda text: print(text, file=sys.stderr)) != REFUSED
        name, gate = (output, "written") if is_written else (name, "refused")
    drafter = cast(TrainableDrafter, load_drafter(name, model))
    drafter.set_dtype(mx.float32)
    return [
        Side(count, "context" if folder is None else "context and past answers", folder, None, True, ""),
        Side(count, "drafter", None, drafter, False, gate),
        Side(count, "both", folder, drafter, True, gate),
    ]


def measure(
    model: nn.Module, tokenizer: Any, prompts: Sequence[list[int]], sides: Sequence[Side], args: argparse.Namespace
) -> list[dict[str, Any]]:
    """A row for each side."""
    given: dict[str, Any] = {"max_tokens": args.max_tokens, "temp": args.temp, "seed": args.seed}
    ends, depth = set(tokenizer.eos_token_ids), TrainingArgs(draft_depth=DEPTH)
    stats, ratios = [Stats()] * len(sides), [list[float]() for _ in sides]
    same, rounds, made = [0] * len(sides), [0] * len(sides), 0
    teacher = Teacher(model)
    for prompt in tqdm(prompts, "prompts"):
        plain = decode_prompts(model, None, [prompt], Options(plan="off", **given), ends)
        text = join_text(prompt, plain.texts[0])
        made += len(plain.texts[0]) - 1
        for at, side in enumerate(sides):
            options = Options(answers=side.folder, context=side.context, **given)
            each = decode_prompts(model, side.drafter, [prompt], options, ends)
            stats[at] += each.stats
            ratios[at].append(each.tokens_per_second / (plain.tokens_per_second or 1.0))
            same[at] += each.texts == plain.texts
            accepted = None if side.drafter is None else find_accepted(teacher, side.drafter, text, depth)
            index = None if side.folder is None else side.folder.index()
            rounds[at] += count_rounds(text, accepted, ContextSource(index) if side.context else None)
    return [
        {
            "answers": side.answers,
            "drafts from": side.source,
            "gate": side.gate,
            "all verified": made / rounds[at],
            "tokens per round": stats[at].tokens_per_round,
            "rows per round": stats[at].rows_per_round,
            "x plain": median(ratios[at]),
            "same texts": same[at],
        }
        for at, side in enumerate(sides)
    ]
