"""Speedup of JSON schema output in the server's engine; drafted and plain decoding alternate.

    python -m benchmarks structured

Uses the packaged demo in float32, greedy by default, one request at a time; its text is
meaningless. Prints tokens per second after the first token, as medians over the repeats, their
ratio, tokens per round, and whether both texts are the same.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from statistics import median
from typing import TYPE_CHECKING, Any

from mlx_redrafter import load_demo
from mlx_redrafter.decoding.options import Options
from mlx_redrafter.decoding.trials import check_speedup
from mlx_redrafter.serving.scheduling.request import Request

from .command import add_json, parse_positive
from .tables import print_table

if TYPE_CHECKING:
    from mlx_redrafter.serving.scheduling.worker import Worker


def make_object(**properties: Any) -> dict[str, Any]:
    """The schema of an object with exactly these properties."""
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


TEXT = {"type": "string", "maxLength": 40}
NUMBER = {"type": "number", "minimum": 0, "maximum": 10000}
PERSON = make_object(
    first_name=TEXT,
    last_name=TEXT,
    department={"enum": ["engineering", "marketing", "operations", "human resources"]},
    years_of_employment={"type": "integer", "minimum": 0, "maximum": 50},
    is_manager={"type": "boolean"},
)
SCHEMAS: dict[str, dict[str, Any]] = {
    "list of records": make_object(
        employees={"type": "array", "items": PERSON, "minItems": 4, "maxItems": 8}
    ),
    "order": make_object(
        order_number={"type": "integer", "minimum": 1, "maximum": 99999},
        customer=make_object(
            name=TEXT, email_address=TEXT, shipping_address=make_object(street=TEXT, city=TEXT)
        ),
        items={
            "type": "array",
            "items": make_object(
                product_name=TEXT, quantity={"type": "integer", "maximum": 99}, unit_price=NUMBER
            ),
            "minItems": 2,
            "maxItems": 5,
        },
        status={"enum": ["pending", "processing", "shipped", "delivered", "cancelled"]},
        total_price=NUMBER,
    ),
    "review": make_object(
        summary={"type": "string", "maxLength": 200},
        severity={"enum": ["low", "medium", "high", "critical"]},
        affected_functions={"type": "array", "items": TEXT, "minItems": 1, "maxItems": 5},
        suggested_change={"type": "string", "maxLength": 200},
        needs_discussion={"type": "boolean"},
    ),
    "any object": {"type": "object"},
}
PROMPT_FORMAT = "# An example of {}, as JSON\nexample = "


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags."""
    add = parser.add_argument
    add(
        "--max-tokens",
        type=parse_positive,
        default=256,
        help="tokens per answer (default: %(default)s)",
    )
    add("--temp", type=float, default=0.0, help="sampling temperature (default: %(default)s)")
    add("--repeats", type=parse_positive, default=5, help="repeats (default: %(default)s)")
    add("--no-drafter", action="store_true", help="draft only from grammar and context")
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Prints a line for each schema.

    Returns exit status 1 if a drafted text differs from the plain one, or nothing was drafted.
    """
    from mlx_redrafter.serving.scheduling.worker import Worker  # needs llguidance, unlike --help

    model, tokenizer, drafter = load_demo()
    engine = Worker(
        model,
        tokenizer,
        None if args.no_drafter else drafter,
        options=Options(),
        prompt_cache_bytes=0,
    )
    engine.start()
    try:
        lines = [time_schema(engine, tokenizer, name, args) for name in SCHEMAS]
    finally:
        engine.close(20)
    print_table(args, lines)
    vacuous = [line["schema"] for line in lines if not line["drafted"]]
    if vacuous:
        names = ", ".join(vacuous)
        print(f"nothing was drafted, so nothing was compared: {names}", file=sys.stderr)
    return int(bool(vacuous) or not all(line["same text"] for line in lines))


def time_schema(
    engine: Worker, tokenizer: Any, name: str, args: argparse.Namespace
) -> dict[str, Any]:
    """The line of a schema."""
    asked = {
        "prompt": tokenizer.encode(PROMPT_FORMAT.format(name)),
        "grammar": engine.grammars.compile(SCHEMAS[name]),
        "max_tokens": args.max_tokens,
        "temp": args.temp,
        "seed": 0,
    }
    answers = set[tuple[int, ...]]()
    speeds: dict[bool, list[float]] = {False: [], True: []}
    for _ in range(args.repeats):
        for draft, found in speeds.items():
            tokens, made = asyncio.run(collect_answer(engine, draft=draft, **asked))
            answers.add(tuple(tokens))
            found.append((len(made.output.tokens) - 1) / made.seconds)
    plain = median(speeds[False])
    drafted = median(speeds[True])
    tokens_per_round = (len(tokens) - 1) / made.output.stats.rounds
    return {
        "schema": name,
        "tokens": len(tokens),
        "plain, tokens/s": plain,
        "drafted, tokens/s": drafted,
        "ratio": check_speedup(drafted / plain, tokens_per_round),
        "tokens per round": tokens_per_round,
        "drafted": made.output.stats.drafted,
        "same text": len(answers) == 1,
    }


async def collect_answer(engine: Worker, **asked: Any) -> tuple[list[int], Request]:
    """(the tokens of an answer, its request with statistics)."""
    request = engine.submit(**asked)
    return [event.token async for event in request.read_events()], request
