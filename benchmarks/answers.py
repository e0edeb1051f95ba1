"""Drafts from past answers: tokens per round and speed, over how many answers are kept.

    python -m benchmarks answers --texts answers.json

The packaged demo continues pieces of the standard library at a temperature; some of what it has written is kept, and
other pieces are continued with drafts from the context alone (0 answers) and with drafts from past answers, too.
Tokens per round are pooled over the prompts: where every proposal is verified whole, counted on the plain texts, and
under `auto`, which leaves out what does not pay. The ratio to plain decoding is the median of the prompts', by turns.
Writing the answers takes minutes: with `--texts` they are kept in a file, and read from it where it is there.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from tqdm import tqdm

from mlx_redrafter.answer_folder import AnswerFolder
from mlx_redrafter.atomic_files import write_text
from mlx_redrafter.demo import load_demo
from mlx_redrafter.demo.sources import training_prompts
from mlx_redrafter.drafters.context import ContextSource
from mlx_redrafter.engine.stats import Stats
from mlx_redrafter.generate import decode_prompts
from mlx_redrafter.options import Options
from mlx_redrafter.training.data import generate_answers

from .command import add_json, parse_output, parse_positive
from .tables import show_rows

AT_ONCE = 32
"""Answers that are written side by side."""

Text = tuple[list[int], list[int]]
"""Token ids of a prompt and its answer."""


class ReadFolder(AnswerFolder):
    """A folder to which nothing is added while it is read."""

    def add(self, read: Sequence[int], made: Sequence[int]) -> None:
        """Nothing."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags."""
    add = parser.add_argument
    add("--kept", type=int, nargs="+", default=[0, 25, 100, 400], metavar="N", help="answers (default: 0 25 100 400)")
    add("--prompts", type=parse_positive, default=32, help="prompts that are measured (default: %(default)s)")
    add("--max-tokens", type=parse_positive, default=128, help="of each answer (default: %(default)s)")
    add("--temp", type=float, default=0.8, help="sampling temperature (default: %(default)s)")
    add("--seed", type=int, default=0, help="default: %(default)s")
    add("--texts", type=parse_output, help="a file that the answers are kept in")
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Prints a row for each number of answers; the exit status, 1 where a drafted text is not the plain one."""
    model, tokenizer, _ = load_demo()
    prompts = [tokenizer.encode(text) for text in training_prompts(args.prompts + max(args.kept), args.seed)]
    measured, others = prompts[: args.prompts], prompts[args.prompts :]
    texts = make_texts(model, tokenizer, others, args)
    with TemporaryDirectory() as root:
        rows = measure(model, tokenizer, measured, texts, Path(root), args)
    show_rows(args, rows)
    return 0 if all(row["same texts"] == len(measured) for row in rows) else 1


def make_texts(model: nn.Module, tokenizer: Any, prompts: Sequence[list[int]], args: argparse.Namespace) -> list[Text]:
    """The prompts with their answers, of the file where it has those of these prompts."""
    settings = [args.seed, args.temp, args.max_tokens]
    if args.texts is not None and args.texts.exists():
        found = json.loads(args.texts.read_text(encoding="utf-8"))
        if found["settings"] == settings and [prompt for prompt, _ in found["texts"]] == list(prompts):
            return [(prompt, answer) for prompt, answer in found["texts"]]
    mx.random.seed(args.seed)
    texts = list[Text]()
    for start in tqdm(range(0, len(prompts), AT_ONCE), "answers"):
        group = prompts[start : start + AT_ONCE]
        texts += zip(group, generate_answers(model, tokenizer, group, args.temp, args.max_tokens), strict=True)
    if args.texts is not None:
        write_text(args.texts, json.dumps({"settings": settings, "texts": texts}) + "\n")
    return texts


def count_rounds(answers: AnswerFolder | None, prompt: Sequence[int], text: Sequence[int]) -> int:
    """Rounds after the first token of a text where every proposal is verified whole."""
    source = ContextSource(answers.index() if answers is not None else None)
    source.read(prompt)
    source.confirm(text[:1])
    made, rounds = 1, 0
    while made < len(text):
        forecast = source.forecast(0)
        proposal = source.find(len(forecast.reach)) if forecast is not None else []
        pairs = zip(proposal, text[made:], strict=False)
        right = next((at for at, (guess, token) in enumerate(pairs) if guess != token), len(proposal))
        tokens = text[made : made + right + 1]
        source.confirm(tokens)
        made, rounds = made + len(tokens), rounds + 1
    return rounds


def measure(
    model: nn.Module,
    tokenizer: Any,
    prompts: Sequence[list[int]],
    texts: Sequence[Text],
    root: Path,
    args: argparse.Namespace,
) -> list[dict[str, Any]]:
    """The rows."""
    options: dict[str, Any] = {"max_tokens": args.max_tokens, "temp": args.temp, "seed": args.seed}
    sides = {None: Options(plan="off", **options)}
    for count in args.kept:
        folder = AnswerFolder(root / str(count), tokenizer)
        for read, answer in texts[:count]:
            folder.add(read, answer)
        sides[count] = Options(answers=ReadFolder(root / str(count), tokenizer) if count else None, **options)
    ends, stats = set(tokenizer.eos_token_ids), {count: Stats() for count in sides}
    ratios: dict[int | None, list[float]] = {count: [] for count in sides}
    same, made, rounds = dict.fromkeys(sides, 0), 0, dict.fromkeys(sides, 0)
    for prompt in tqdm(prompts, "prompts"):
        runs = {count: decode_prompts(model, None, [prompt], side, ends) for count, side in sides.items()}
        plain = runs[None]
        made += len(plain.texts[0]) - 1
        for count, each in runs.items():
            rounds[count] += count_rounds(sides[count].answers, prompt, plain.texts[0])
            stats[count] += each.stats
            ratios[count].append(each.tokens_per_second / (plain.tokens_per_second or 1.0))
            same[count] += each.texts == plain.texts
    return [
        {
            "answers": count,
            "tokens": sum(len(read) + len(answer) for read, answer in texts[:count]),
            "all verified": made / rounds[count],
            "tokens per round": stats[count].tokens_per_round,
            "rows per round": stats[count].rows_per_round,
            "x plain": median(ratios[count]),
            "same texts": same[count],
        }
        for count in args.kept
    ]
