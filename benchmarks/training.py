"""What training a drafter costs: an iteration against its parts, memory at real sizes, and predictions.

    python -m benchmarks training cost
    python -m benchmarks training memory --hidden-size 2560 --vocab-size 151936
    python -m benchmarks training predict --bandwidth 400 --tflops 10

`cost` trains a drafter for the packaged demo and measures each part alone, in turns. `memory` gives random hidden
states and logits to a random drafter of that size. `predict` measures nothing: it counts bytes and operations.
"""

from __future__ import annotations

import argparse
from statistics import median
from time import perf_counter
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from mlx_redrafter.demo import load_demo
from mlx_redrafter.drafters.recurrent import DrafterArgs
from mlx_redrafter.engine.supported_models import model_sizes
from mlx_redrafter.errors import RedrafterError
from mlx_redrafter.planning.sizing import n_weights
from mlx_redrafter.training.answers import AT_ONCE
from mlx_redrafter.training.data import Text, collated
from mlx_redrafter.training.distill import Recipe, lesson_arrays, loss_of, make_lesson, train_drafter
from mlx_redrafter.training.estimate import disk_bytes, measured, minutes
from mlx_redrafter.training.fitting import Course
from mlx_redrafter.training.lessons import Batch, Heard, hear, new_drafter, untrained, vocabulary_of

from .building import drafter_size, weight_bytes
from .common import above_zero, positive
from .shapes import add_json, show
from .targets import TARGETS, TargetShape

LEAST_ITERATIONS = 4


def cost(args: argparse.Namespace) -> list[dict[str, Any]]:
    """The demo's iteration, and its parts alone.

    Raises:
        RedrafterError: too few iterations to leave one.
    """
    if args.iters < LEAST_ITERATIONS:
        raise RedrafterError(f"--iters must be at least {LEAST_ITERATIONS}: neither the first two count nor the last")
    model = load_demo()[0]
    hidden_size, vocab_size = model_sizes(model)
    drafter = new_drafter(model, DrafterArgs(hidden_size, vocab_size, args.exit_dim, 1))
    recipe = Recipe(depth=args.draft_depth)
    rng = np.random.default_rng(0)
    texts = [Text(rng.integers(vocab_size, size=args.length + 1), 0) for _ in range(args.batch_size)]
    batch = collated(texts)

    def lesson() -> list[mx.array]:
        return lesson_arrays(make_lesson(hear(model, batch), recipe, None, 0), None)

    taught = lesson()
    mx.eval(taught)
    gradient = nn.value_and_grad(drafter, loss_of(drafter, recipe))
    times: dict[str, list[float]] = {"target": [], "drafter": [], "iteration": []}
    for _ in range(args.rounds):
        for _ in range(3):
            times["target"].append(measured(lesson).seconds)
            times["drafter"].append(measured(lambda: gradient(*taught)).seconds)
        marks: list[float] = []

        def mark(done: int, shown: dict[str, float], marks: list[float] = marks) -> bool:
            marks.append(perf_counter())
            return False

        train_drafter(model, drafter, lambda iteration: batch, Course(args.iters), recipe, after=mark)
        # The first one compiles; the last one has no next lesson beside it.
        times["iteration"] += np.diff(marks[1:-1]).tolist()
    middle = {name: median(values) for name, values in times.items()}
    row = {f"{name} ms": 1e3 * value for name, value in middle.items()}
    return [{**row, "x sum": middle["iteration"] / (middle["target"] + middle["drafter"])}]


def memory(args: argparse.Namespace) -> list[dict[str, Any]]:
    """A batch's lesson from given logits, then loss and gradient: the most that each needs at a time."""
    drafter_args = DrafterArgs(
        args.hidden_size, args.vocab_size, args.exit_dim, 1, draft_vocab_size=args.draft_vocab_size
    )
    count = args.draft_vocab_size
    drafter = untrained(drafter_args, None if count is None else np.arange(count))
    mx.eval(drafter.parameters())
    tokens = mx.zeros((1, args.length + 1), mx.int32)
    shape = (1, args.length)
    hidden, embeddings = mx.random.normal((2, *shape, args.hidden_size)).astype(mx.bfloat16)
    logits = mx.random.normal((*shape, args.vocab_size)).astype(mx.bfloat16)
    heard = Heard(Batch(tokens, mx.ones(shape, mx.bool_)), hidden, embeddings, logits)
    mx.eval(heard)
    recipe = Recipe(depth=args.draft_depth, top_k=args.teacher_top_k)
    taught = measured(lambda: lesson_arrays(make_lesson(heard, recipe, vocabulary_of(drafter), 0), None))
    learned = measured(lambda: nn.value_and_grad(drafter, loss_of(drafter, recipe))(*taught.made))
    gigabytes = {
        "the target's logits": logits.nbytes,
        "lesson, at most": taught.memory,
        "lesson": sum(array.nbytes for array in taught.made),
        "weights and moments": 12 * n_weights(drafter_args),
        "loss and gradient": learned.memory,
    }
    return [{f"{name} GB": size / 1e9 for name, size in gigabytes.items()} | {"seconds": learned.seconds}]


def predict(args: argparse.Namespace) -> list[dict[str, Any]]:
    """A row for each published target of one piece."""
    return [predicted(target, args) for target in TARGETS if target.experts is None]


def predicted(target: TargetShape, args: argparse.Namespace) -> dict[str, Any]:
    """What the trainer would choose and take, if decoding is bound by memory and training by arithmetic."""
    target_bytes = weight_bytes(target, args.bits, target.num_hidden_layers)
    chosen = drafter_size(target, target_bytes, 2)
    tokens = args.batch_size * args.length
    drafter = 6 * args.draft_depth * n_weights(chosen) * tokens  # forward, and twice that backward, at each depth
    iteration = (2 * target.n_weights * tokens + drafter) / (args.tflops * 1e12)
    answers = args.answers * args.max_tokens / AT_ONCE * target_bytes / (args.bandwidth * 1e9)
    logits = tokens * target.vocab_size
    # Logits in 16 bits, the lesson's 64 likeliest tokens aside; 64 MB of the drafter's, five times over; two layers'
    # activations of the target; the drafter's activations at every depth.
    activations = tokens * (2 * 2 * (target.intermediate_size + 4 * target.hidden_size))
    activations += 4 * args.draft_depth * tokens * (4 * target.hidden_size + 6 * chosen.exit_dim)
    memory_bytes = target_bytes + 16 * n_weights(chosen) + 2 * logits + 5 * 64e6 + activations
    return {
        "target": f"{target.name} {args.bits}-bit",
        "GB": target_bytes / 1e9,
        "exit_dim": chosen.exit_dim,
        "blocks": chosen.num_draft_layers,
        "guesses": chosen.draft_vocab_size or target.vocab_size,
        "M weights": n_weights(chosen) / 1e6,
        "answers": minutes(answers),
        "training": minutes(args.iters * iteration),
        "memory GB": memory_bytes / 1e9,
        "disk MB": (disk_bytes(chosen) + 8 * args.answers * args.max_tokens) / 1e6,
    }


KINDS = {"cost": cost, "memory": memory, "predict": predict}
"""What it prints rows of."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """A command for each kind, with its flags."""
    kinds = parser.add_subparsers(dest="kind", required=True)
    for kind in KINDS:
        one = kinds.add_parser(kind)
        add_json(one)
        one.add_argument("--draft-depth", type=positive, default=5)
        one.add_argument("--batch-size", type=positive, default={"cost": 2, "memory": 1, "predict": 4}[kind])
        one.add_argument("--length", type=positive, default={"cost": 256, "memory": 1024, "predict": 320}[kind])
        if kind != "predict":
            one.add_argument("--exit-dim", type=positive, default={"cost": 160, "memory": 256}[kind])
        if kind == "cost":
            one.add_argument("--rounds", type=positive, default=3)
            one.add_argument("--iters", type=positive, default=12, help="of a round")
        if kind == "memory":
            one.add_argument("--hidden-size", type=positive, default=2560)
            one.add_argument("--vocab-size", type=positive, default=151936)
            one.add_argument("--draft-vocab-size", type=positive)
            one.add_argument("--teacher-top-k", type=positive, default=64)
        if kind == "predict":
            one.add_argument("--bandwidth", type=above_zero, required=True, help="GB/s that decoding sees")
            one.add_argument("--tflops", type=above_zero, required=True, help="10^12 operations/s that training sees")
            one.add_argument("--bits", type=positive, default=4)
            one.add_argument("--iters", type=positive, default=1000)
            one.add_argument("--answers", type=positive, default=2000)
            one.add_argument("--max-tokens", type=positive, default=256)


def run(args: argparse.Namespace) -> int:
    """Prints one table; the exit status."""
    show(args, KINDS[args.kind](args))
    return 0
