"""Speedup of a chat model on Spec-Bench, by kind of text, with alternating contestants.

    python -m benchmarks specbench --model M --questions question.jsonl
    python -m benchmarks specbench --model M --drafter D --questions question.jsonl --plot m.png

The questions come from https://github.com/hemingkx/Spec-Bench: a file with one JSON object per
line, with `question_id`, `category` and `turns`. The second turn of a question follows the plain
answer to the first. Contestants, timing and records are those of `run`. What is already in
`--output` is not measured again: records of this machine, these versions, weights and settings.
Other records stay in the file, and are not shown.

Source: Xia et al., Unlocking Efficiency in Large Language Model Inference, arXiv 2401.07851.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple

from tqdm import tqdm

from mlx_redrafter.decoding.options import Options
from mlx_redrafter.decoding.trials import decode_prompts
from mlx_redrafter.errors import RedrafterError
from mlx_redrafter.files import expand_path, parse_object
from mlx_redrafter.measuring.pair import Pair
from mlx_redrafter.text.encoding import encode_chat
from mlx_redrafter.training.prompts import read_lines

from .command import parse_output, parse_plan, parse_plot, parse_positive
from .contest import compare_contestants, compute_status, measure_costs_record, warm_up_all
from .contestants import Settings, make_contestants
from .models import NamedPrompt, add_workload, load_workload
from .plots import draw_bars
from .records import Record, make_record_key, read_records, stamp, write_records
from .tables import (
    PLAIN,
    Line,
    describe_setting,
    format_text,
    get_label,
    group_by_contestant,
    summarize,
)

KIND_BY_CATEGORY = {
    "summarization": "summaries",
    "translation": "translation",
    "math_reasoning": "maths",
    "qa": "questions",
    "rag": "answers from a text",
}
"""Category -> its name in tables; all other categories, from MT-bench, are chat."""

CHAT = "chat"
ALL = "all"
SPEED_LABEL = "speed, plain decoding = 1"
TEMPS = (0.0, 0.7)
ANSWER_TOKENS = 96
CHAT_PLANS: list[Any] = ["auto", (1, 3), (1, 4), (4, 5)]


class Question(NamedTuple):
    """A question with one or more turns, and its kind of text."""

    name: str
    kind: str
    turns: list[str]


def read_questions(path: Path) -> list[Question]:
    """Reads the questions in a file."""
    found = []
    for line, place in read_lines(path, "questions"):
        value = parse_object(line, place)
        try:
            number, category, turns = (value[key] for key in ("question_id", "category", "turns"))
        except KeyError as error:
            raise RedrafterError(f"{place}: expected a question with a field {error}") from error
        found.append(Question(f"{category}/{number}", KIND_BY_CATEGORY.get(category, CHAT), turns))
    return found


def choose_questions(questions: Sequence[Question], limit: int | None) -> list[Question]:
    """At most `limit` questions of each kind, evenly spread; None for all."""
    if limit is None:
        return list(questions)
    kinds: dict[str, list[Question]] = {}
    for question in questions:
        kinds.setdefault(question.kind, []).append(question)
    chosen = []
    for own in kinds.values():
        count = min(limit, len(own))
        chosen += [own[at * len(own) // count] for at in range(count)]
    return chosen


def make_turn_prompts(
    questions: Iterable[Question], model: Any, tokenizer: Any, max_tokens: int
) -> Iterator[NamedPrompt]:
    """A prompt for each turn; later turns follow the plain greedy answer to the previous one."""
    ends = frozenset(tokenizer.eos_token_ids)
    options = Options(max_tokens=max_tokens, temp=0.0, plan="off")
    pair = Pair(model)
    for question in questions:
        messages: list[dict[str, Any]] = []
        for number, turn in enumerate(question.turns, 1):
            messages.append({"role": "user", "content": turn})
            ids = encode_chat(tokenizer, messages)
            yield NamedPrompt(f"{question.name}/{number}", question.kind, ids, ends)
            if number < len(question.turns):
                tokens = decode_prompts(pair, [ids], options, ends).tokens[0]
                answer = tokenizer.decode([token for token in tokens if token not in ends])
                messages.append({"role": "assistant", "content": answer})


def make_kind_lines(records: Sequence[Record], what: str) -> list[Line]:
    """A line for each kind of text and one for all: a value of `summarize` for each contestant.

    Args:
        what: the name of the value.
    """
    speeds = [record for record in records if record["kind"] == "speed"]
    lines = []
    for kind in [*dict.fromkeys(record["category"] for record in speeds), ALL]:
        chosen = [record for record in speeds if kind in (record["category"], ALL)]
        by_side = group_by_contestant(chosen)
        summaries = {name: summarize(own) for name, own in by_side.items() if name != PLAIN}
        count = max((summary["prompts"] for summary in summaries.values()), default=0)
        line: Line = {"text": f"{kind} ({count})"}
        for name, summary in summaries.items():
            line[name] = summary[what]
        lines.append(line)
    return lines


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags."""
    add_workload(parser, prompts=())
    add = parser.add_argument
    add(
        "--questions",
        type=expand_path,
        required=True,
        metavar="FILE",
        help="Spec-Bench's question.jsonl",
    )
    add("--limit", type=parse_positive, help="questions per kind (default: all)")
    add(
        "--temp",
        type=float,
        nargs="+",
        default=TEMPS,
        help="sampling temperatures (default: 0 0.7)",
    )
    add(
        "--max-tokens",
        type=parse_positive,
        default=ANSWER_TOKENS,
        help="tokens per answer (default: %(default)s)",
    )
    add("--seed", type=int, default=0, help="random seed (default: %(default)s)")
    add(
        "--repeats",
        type=parse_positive,
        default=1,
        help="repeats of each contestant (default: %(default)s)",
    )
    add(
        "--plans",
        type=parse_plan,
        nargs="+",
        default=CHAT_PLANS,
        metavar="PLAN",
        help="auto, W,K or W,K,N",
    )
    add("--random-drafter", action="store_true", help="also run auto with an untrained drafter")
    add("--exact", action="store_true", help="also run auto with the context and --exact")
    add(
        "--output",
        type=parse_output,
        metavar="FILE",
        help="file for records; existing ones are not measured again",
    )
    add("--plot", type=parse_plot, metavar="FILE", help="file for a bar chart of the speeds")


def run(args: argparse.Namespace) -> int:
    """Prints tables of speeds and tokens per round for each temperature.

    Returns the status of `compute_status`.
    """
    questions = choose_questions(read_questions(args.questions), args.limit)
    workload, tokenizer = load_workload(args)
    if args.random_drafter:
        workload.require_drafter()
    made = make_turn_prompts(questions, workload.model, tokenizer, args.max_tokens)
    prompts = list(tqdm(made, "prompts"))
    records = list[Record]()
    if args.output and args.output.exists():
        records = read_records(args.output)

    machine = stamp()
    models = [workload.describe(), workload.draft_model_name, workload.digest_weights()]
    if workload.drafter is not None:
        key = make_record_key(machine, models)
        if all(record.get("key") != key for record in records):
            records.append(measure_costs_record(workload) | {"machine": machine, "key": key})
    sets = list[list[Record]]()
    for temp in args.temp:
        settings = Settings(args.max_tokens, temp, args.seed, args.repeats)
        sides = make_contestants(
            workload,
            args.plans,
            settings,
            mlx_lm=not temp,  # its sampled texts differ
            context=True,
            random=args.random_drafter,
            exact=args.exact,
        )
        prompt_keys = [
            make_record_key(machine, models, asdict(settings), prompt.name, prompt.ids)
            for prompt in prompts
        ]
        measured = {(record.get("key"), get_label(record)) for record in records}
        missing = dict[str, NamedPrompt]()
        for key, prompt in zip(prompt_keys, prompts, strict=True):
            if any((key, side.label) not in measured for side in sides):
                missing[key] = prompt

        left = replace(workload, prompts=list(missing.values()))
        if missing:
            warm_up_all(left, sides)
        contest = compare_contestants(left, sides, settings)
        for key, found in zip(missing, contest, strict=True):
            records = [record for record in records if record.get("key") != key]
            records += [each | {"machine": machine, "key": key} for each in found]
            if args.output:
                write_records(args.output, records)

        labels = {side.label for side in sides}
        shown = [
            record
            for record in records
            if record.get("key") in prompt_keys and get_label(record) in labels
        ]
        sets.append(shown)
        speeds = format_text(make_kind_lines(shown, "x plain"))
        tokens = format_text(make_kind_lines(shown, "tokens/round"))
        print(f"\ntemperature {temp:g}, times plain decoding\n\n{speeds}")
        print(f"\ntokens per round\n\n{tokens}\n\n{describe_setting(shown)}")
    if args.plot:
        draw_bars(args.plot, make_kind_lines(sets[0], "x plain"), SPEED_LABEL, has_line=True)
    return max(compute_status(shown) for shown in sets)
