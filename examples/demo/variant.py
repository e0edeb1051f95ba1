"""Trains another drafter for the demo's target, to compare with: other texts, labels or sizes, everything else equal.

    python -m examples.demo.variant --output DIR --name given --texts given --labels data

DIR is that of the recipe, of which the stages `corpus` and `target` must have run. The drafter goes to DIR/NAME; behind
it one line tells tokens per round on held-out prompts, and what a draft step costs.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from mlx_redrafter import load_drafter
from mlx_redrafter.drafters.recurrent import DrafterArgs
from mlx_redrafter.engine.supported_models import model_sizes
from mlx_redrafter.planning.sizing import draft_milliseconds, plain_milliseconds
from mlx_redrafter.training.settings import LABELS, TrainingArgs

from . import drafter, report
from .recipe import trained

TEXTS = ("sampled", "greedy", "both", "given")


def main() -> None:
    """Trains the drafter of the flags unless it is there, and measures it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, metavar="DIR")
    parser.add_argument("--name", required=True)
    parser.add_argument(
        "--texts", choices=TEXTS, default="sampled", help="the target's own, at temperature 0.8 or 0, or half of each"
    )
    parser.add_argument("--labels", choices=LABELS, default="distribution")
    parser.add_argument("--iters", type=int, default=1200)
    parser.add_argument("--batch-size", type=int, default=2)
    parser.add_argument("--learning-rate", type=float, default=4e-3)
    parser.add_argument("--exit-dim", type=int, default=160)
    parser.add_argument("--num-draft-layers", type=int, default=1)
    parser.add_argument("--draft-vocab-size", type=int)
    parser.add_argument("--count", type=int, default=48, help="of held-out prompts (default: %(default)s)")
    args = parser.parse_args()
    model, tokenizer = trained(args.output)
    args_of_drafter = DrafterArgs(
        *model_sizes(model), args.exit_dim, args.num_draft_layers, draft_vocab_size=args.draft_vocab_size
    )
    place = args.output / args.name
    if not (place / "model.safetensors").exists():
        names = ("iters", "labels", "learning_rate", "batch_size")
        # All depths alike, as when docs/training.md was measured.
        settings = TrainingArgs(**{name: getattr(args, name) for name in names}, depth_weights=(1.0,) * 5)
        drafter.train(model, texts_of(args, model), args_of_drafter, settings, place)
    network = load_drafter(place, model)
    network.set_dtype(mx.float32)
    cost = draft_milliseconds(model, args_of_drafter, mx.float32) / plain_milliseconds(model)
    settings = {name: value for name, value in vars(args).items() if name != "output"}
    rows = report.measured(model, tokenizer, network, args.count)
    print(json.dumps({**settings, "tokens_per_round": rows, "draft_step_over_plain": cost}))


def texts_of(args: argparse.Namespace, model: nn.Module) -> np.ndarray:
    """(N, LENGTH) texts of the flags, written by the target where they are not there yet."""
    tokens = np.load(args.output / "train.npy")
    sources: dict[str, Callable[[], np.ndarray]] = {
        "sampled": lambda: drafter.write_texts(model, tokens, args.output / "texts"),
        "greedy": lambda: drafter.write_texts(model, tokens, args.output / "texts-greedy", 0.0),
        "given": lambda: drafter.given_texts(tokens),
    }
    if args.texts != "both":
        return sources[args.texts]()
    sampled, greedy = sources["sampled"](), sources["greedy"]()
    return np.concatenate([sampled[0::2], greedy[1::2]])


if __name__ == "__main__":
    main()
