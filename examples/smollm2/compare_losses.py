"""Trains drafters for SmolLM2-135M-Instruct that differ only in the loss; counts tokens per round.

    python -m examples.smollm2.compare_losses train STATES --target DIR --variant lk --seed 1
    python -m examples.smollm2.compare_losses evaluate STATES --target DIR
    python -m examples.smollm2.compare_losses report

`make_states.py` writes STATES. The first 320 examples are for validation. `torch_loss.py` explains
the variants. All is in torch, which uses the matrix units of recent x86 CPUs; update rule, labels
and the loss `today` are those of `mlx_redrafter/training`. Training continues from the last
checkpoint. `evaluate` adds to `results.jsonl` in the output folder and skips what is there.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from examples.smollm2.report import PLANS, print_report
from examples.smollm2.rounds import count_rounds
from examples.smollm2.stored_states import (
    PACKAGED,
    StoredExample,
    join_examples,
    load_draft_ids,
    load_examples,
    make_index,
)
from examples.smollm2.torch_drafter import TorchDrafter, initialize_weights
from examples.smollm2.torch_loss import DEPTH, VARIANTS, draft_loss
from mlx_redrafter.files import replace_file
from mlx_redrafter.training.data import make_batches
from mlx_redrafter.training.trainer import compute_rate_factor

HELD_OUT = 320
VALIDATION_BATCH = 64
LK_CONSTANT = 3.0


class Vocabulary:
    """The tokens of the target and those that the drafter can guess.

    Attributes:
        draft_ids: (V',) int64.
        embedding: (V, D) float32, the target's.
        index: (V,) int64, see `make_index`.
    """

    def __init__(self, target: Path, drafter: Path) -> None:
        self.draft_ids = load_draft_ids(drafter)
        with safe_open(target / "model.safetensors", "pt") as file:
            self.embedding = file.get_tensor("model.embed_tokens.weight").float()
        self.index = make_index(self.draft_ids, len(self.embedding))


def train(
    args: argparse.Namespace, examples: Sequence[StoredExample], vocabulary: Vocabulary
) -> None:
    """Trains a drafter, and writes it, its checkpoint and a log with a line for each iteration."""
    uses_lk, reads_own = VARIANTS[args.variant]
    sizes = f"{args.exit_dim}x{args.blocks}-{args.answers}-{args.steps}"
    path = args.output / f"{args.variant}-{sizes}-{args.seed}.pt"
    learned: Any = examples[HELD_OUT : HELD_OUT + args.answers]
    batches: Any = make_batches(learned, args.batch, args.seed)
    weights, axes = initialize_weights(
        vocabulary.embedding, vocabulary.draft_ids, args.exit_dim, args.blocks, args.seed
    )
    kept = {
        "step": 0,
        "weights": weights,
        "m": {name: torch.zeros_like(weight) for name, weight in weights.items()},
        "v": {name: torch.zeros_like(weight) for name, weight in weights.items()},
        "alpha": [0.0] * DEPTH,
        "seconds": [0.0, 0.0],
    }
    if path.exists():
        kept = torch.load(path)
    weights = {name: weight.requires_grad_() for name, weight in kept["weights"].items()}
    drafter = TorchDrafter(weights, vocabulary.embedding)
    for step in range(kept["step"], args.steps):
        began = time.time()
        cpu_began = time.process_time()
        batch = join_examples(batches(step), vocabulary.index)
        shares = [math.exp(-LK_CONSTANT * alpha) if uses_lk else 1.0 for alpha in kept["alpha"]]
        generator = torch.Generator().manual_seed(1000 * args.seed + step)
        random = torch.rand(2, len(batch.tokens), generator=generator)
        own = random[1] < 0.5 if reads_own else None
        loss, sums = draft_loss(drafter, axes, batch, shares, random[0] < args.part, own)
        loss.backward()
        rate = args.rate * compute_rate_factor(step / args.steps)
        norm = update(weights, kept["m"], kept["v"], rate)
        kept["step"] = step + 1
        kept["alpha"] = [each.overlap / each.weight for each in sums]
        wall, cpu = kept["seconds"]
        wall += time.time() - began
        cpu += time.process_time() - cpu_began
        kept["seconds"] = [wall, cpu]
        entry = {
            "step": step + 1,
            "loss": round(loss.item(), 4),
            "norm": round(norm, 3),
            "first": round(sums[0].right / sums[0].weight, 4),
            "alpha": [round(alpha, 3) for alpha in kept["alpha"]],
            "guesses": round(sum(each.weight for each in sums)),
            "seconds": [round(wall, 1), round(cpu, 1)],
        }
        if (step + 1) % args.check == 0 or step + 1 == args.steps:
            entry |= validate(drafter, axes, examples[:HELD_OUT], vocabulary)
            with replace_file(path) as partial:
                torch.save(kept, partial)
        with path.with_suffix(".jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(entry) + "\n")
    tensors = {name: weight.detach() for name, weight in weights.items()}
    tensors["draft_ids"] = vocabulary.draft_ids.int()
    save_file(tensors, path.with_suffix(".safetensors"))


@torch.no_grad()
def update(
    weights: dict[str, Tensor], means: dict[str, Tensor], squares: dict[str, Tensor], rate: float
) -> float:
    """Updates weights in place by AdamW without bias correction, as MLX's.

    Gradients are clipped to a norm of 1 and dropped afterwards.

    Args:
        means: the running mean of each gradient.
        squares: that of its square.

    Returns:
        The norm of all gradients before clipping.
    """
    norm = math.sqrt(sum(float(weight.grad.square().sum()) for weight in weights.values()))
    for name, weight in weights.items():
        grad = weight.grad * min(1.0, 1 / (norm + 1e-6))
        means[name].mul_(0.9).add_(grad, alpha=0.1)
        squares[name].mul_(0.95).addcmul_(grad, grad, value=0.05)
        weight.sub_(rate * means[name] / (squares[name].sqrt() + 1e-8))
        weight.grad = None
    return norm


@torch.no_grad()
def validate(
    drafter: TorchDrafter, axes: Tensor, examples: Sequence[StoredExample], vocabulary: Vocabulary
) -> dict[str, float]:
    """The cross-entropy with equal weights at all depths, and tokens per round of 1 x 4."""
    entropy = 0.0
    weight = 0.0
    for start in range(0, len(examples), VALIDATION_BATCH):
        batch = join_examples(examples[start : start + VALIDATION_BATCH], vocabulary.index)
        _, sums = draft_loss(drafter, axes, batch, [1.0] * DEPTH, equal_weights=True)
        entropy += sum(each.entropy for each in sums)
        weight += sum(each.weight for each in sums)
    counts = [
        count_rounds(drafter, example, vocabulary.draft_ids, vocabulary.index, 1, 4)
        for example in examples
    ]
    tokens = sum(count for count, _ in counts)
    rounds = sum(count for _, count in counts)
    return {"valid": round(entropy / weight, 4), "tokens_per_round": round(tokens / rounds, 4)}


def evaluate(
    args: argparse.Namespace, examples: Sequence[StoredExample], vocabulary: Vocabulary
) -> None:
    """Counts tokens and rounds of all trained drafters, example by example.

    Of answers that drafters may have learned from only the held-out ones, and not with the packaged
    drafter, which learned from these too.
    """
    path = args.output / "results.jsonl"
    done = set()
    if path.exists():
        for line in path.read_text(encoding="utf-8").splitlines():
            record = json.loads(line)
            done.add((record["name"], record["texts"], record["plan"]))
    texts = "+".join(folder.name for folder in args.states)
    files = {file.stem: file for file in sorted(args.output.glob("*.safetensors"))}
    if args.unseen:
        files["packaged"] = args.drafter
    else:
        examples = examples[:HELD_OUT]
    for name, file in files.items():
        tensors = load_file(file)
        weights = {key: tensor.float() for key, tensor in tensors.items() if key != "draft_ids"}
        drafter = TorchDrafter(weights, vocabulary.embedding)
        for plan in PLANS:
            if (name, texts, str(plan)) in done:
                continue
            each = [
                count_rounds(drafter, example, vocabulary.draft_ids, vocabulary.index, *plan)
                for example in examples
            ]
            temps = [example.temp for example in examples]
            record = {"name": name, "texts": texts, "plan": str(plan), "temps": temps, "each": each}
            with path.open("a", encoding="utf-8") as out:
                out.write(json.dumps(record) + "\n")


def make_parser() -> argparse.ArgumentParser:
    """The commands' flags."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    shared = argparse.ArgumentParser(add_help=False)
    shared.add_argument("states", nargs="+", type=Path, help="folders by make_states")
    shared.add_argument("--target", type=Path, required=True, help="folder with the model")
    shared.add_argument("--drafter", type=Path, default=PACKAGED, help="has the vocabulary")
    output = argparse.ArgumentParser(add_help=False)
    output.add_argument("--output", type=Path, default=Path("losses"), help="default: losses")
    training = commands.add_parser("train", parents=[shared, output])
    training.add_argument("--variant", choices=VARIANTS, default="today")
    training.add_argument("--seed", type=int, default=0)
    training.add_argument("--answers", type=int, default=2240, help="examples to learn")
    training.add_argument("--steps", type=int, default=280, help="iterations")
    training.add_argument("--batch", type=int, default=64, help="examples an iteration")
    training.add_argument("--exit-dim", type=int, default=320)
    training.add_argument("--blocks", type=int, default=2)
    training.add_argument("--check", type=int, default=70, help="iterations between checkpoints")
    training.add_argument("--rate", type=float, default=8e-3, help="peak learning rate")
    training.add_argument("--part", type=float, default=0.5, help="share of drafts in an iteration")
    evaluation = commands.add_parser("evaluate", parents=[shared, output])
    evaluation.add_argument(
        "--unseen", action="store_true", help="other answers: count all, also the packaged drafter"
    )
    commands.add_parser("report", parents=[output])
    return parser


def main() -> None:
    args = make_parser().parse_args()
    if args.command == "report":
        print_report(args.output / "results.jsonl")
        return
    torch.set_num_threads(1)
    torch.set_float32_matmul_precision("medium")
    args.output.mkdir(parents=True, exist_ok=True)
    examples = load_examples(args.states)
    vocabulary = Vocabulary(args.target, args.drafter)
    run = train if args.command == "train" else evaluate
    run(args, examples, vocabulary)


if __name__ == "__main__":
    main()
