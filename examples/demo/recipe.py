"""Makes the demo's two models from nothing but the running interpreter's standard library.

    LD_PRELOAD=libopenblas.so.0 OPENBLAS_NUM_THREADS=1 python -m examples.demo.recipe --output DIR

Every stage leaves files in DIR and takes up where it was stopped. `package` puts the result into the package.
"""

from __future__ import annotations

import argparse
import json
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.tokenizer_utils import TokenizerWrapper

from mlx_redrafter import load, load_drafter
from mlx_redrafter.demo.sources import split_files
from mlx_redrafter.drafters.recurrent import DrafterArgs
from mlx_redrafter.engine.supported_models import model_sizes
from mlx_redrafter.generate import encode
from mlx_redrafter.training.settings import TrainingArgs

from . import corpus, drafter, report, target

VOCAB_SIZE = 2048
ROWS_PER_STEP = 2
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")
ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "mlx_redrafter" / "demo"
DRAFT_MODEL = ROOT / "benchmarks" / "draft_model"


def make_corpus(out: Path) -> None:
    """The tokenizer, and the two halves of the split as streams of its ids."""
    if (out / "held.npy").exists():
        return
    training, held_out = split_files()
    tokenizer = corpus.train_tokenizer(training, VOCAB_SIZE, out / "target")
    np.save(out / "train.npy", corpus.encode_files(training, tokenizer))
    np.save(out / "held.npy", corpus.encode_files(held_out, tokenizer))
    print(f"{len(training)} training files, {len(held_out)} held out")


def make_target(out: Path, steps: int) -> None:
    """The target, in the directory that already has the tokenizer."""
    if not (out / "target" / "model.safetensors").exists():
        target.train(np.load(out / "train.npy"), target.config(VOCAB_SIZE, 0), steps, out / "target")


def make_draft_model(out: Path, steps: int) -> None:
    """A smaller model of the same text, with the same tokenizer, for mlx-lm's own speculation."""
    place = out / "draft_model"
    if (place / "model.safetensors").exists():
        return
    place.mkdir(exist_ok=True)
    target.train(np.load(out / "train.npy"), target.draft_config(VOCAB_SIZE, 0), steps, place)
    for file in TOKENIZER_FILES:
        shutil.copyfile(out / "target" / file, place / file)


def make_drafter(out: Path, steps: int) -> None:
    """The drafter, from texts that the target wrote."""
    if (out / "drafter" / "model.safetensors").exists():
        return
    model, _ = trained(out)
    texts = drafter.write_texts(model, np.load(out / "train.npy"), out / "texts")
    args = DrafterArgs(*model_sizes(model), exit_dim=160, num_draft_layers=1)
    settings = TrainingArgs(iters=steps, batch_size=ROWS_PER_STEP, learning_rate=4e-3)
    drafter.train(model, texts, args, settings, out / "drafter")


def describe_drafter(out: Path) -> None:
    """Acceptance and depth into the drafter's config."""
    model, tokenizer = trained(out)
    prompts = [encode(tokenizer, text) for text in report.prompts(tokenizer).values()]
    drafter.describe(model, np.load(out / "held.npy"), prompts, set(tokenizer.eos_token_ids), out / "drafter")


def print_report(out: Path) -> None:
    """Held-out bits per byte, and tokens per round."""
    model, tokenizer = trained(out)
    bits = target.bits_per_byte(model, np.load(out / "held.npy"), report.held_out_bytes())
    print(f"target: {bits:.3f} bits per held-out byte")
    network = load_drafter(out / "drafter", model)
    network.set_dtype(mx.float32)
    for name, value in report.measured(model, tokenizer, network).items():
        print(f"{name}: {value:.2f} tokens per round")


def package(out: Path) -> None:
    """Copies what is needed at run time into the package, and the draft model to the benchmarks."""
    _, tokenizer = trained(out)
    weights = ("config.json", "model.safetensors")
    for name, place, files in (
        ("target", PACKAGE / "target", (*weights, *TOKENIZER_FILES)),
        ("drafter", PACKAGE / "drafter", weights),
        ("draft_model", DRAFT_MODEL, (*weights, *TOKENIZER_FILES)),
    ):
        place.mkdir(parents=True, exist_ok=True)
        for file in files:
            shutil.copyfile(out / name / file, place / file)
    prompts = [{"name": name, "text": text} for name, text in report.prompts(tokenizer).items()]
    (PACKAGE / "prompts.json").write_text(json.dumps(prompts, indent=1) + "\n", encoding="utf-8")


def trained(out: Path) -> tuple[nn.Module, TokenizerWrapper]:
    """The target as it is stored, in float32: what the drafter has to know is the rounded model."""
    model, tokenizer = load(out / "target")
    model.set_dtype(mx.float32)
    return model, tokenizer


def main() -> None:
    """Runs the stages that are asked for, in order."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, metavar="DIR")
    parser.add_argument(
        "--stages",
        default="corpus,target,drafter,describe,draft-model,report",
        help="also: package (default: %(default)s)",
    )
    parser.add_argument("--steps", type=int, default=2400, help="of the target (default: %(default)s)")
    parser.add_argument("--drafter-steps", type=int, default=5120, help="default: %(default)s")
    args = parser.parse_args()
    stages: dict[str, Callable[[], None]] = {
        "corpus": lambda: make_corpus(args.output),
        "target": lambda: make_target(args.output, args.steps),
        "drafter": lambda: make_drafter(args.output, args.drafter_steps),
        "describe": lambda: describe_drafter(args.output),
        "draft-model": lambda: make_draft_model(args.output, args.steps),
        "report": lambda: print_report(args.output),
        "package": lambda: package(args.output),
    }
    chosen = args.stages.split(",")
    if unknown := set(chosen) - set(stages):
        parser.error(f"no such stage: {', '.join(sorted(unknown))}; there are {', '.join(stages)}")
    args.output.mkdir(parents=True, exist_ok=True)
    for name in (stage for stage in stages if stage in chosen):
        print(f"== {name}", flush=True)
        started = time.time()
        stages[name]()
        print(f"== {name}: {time.time() - started:.0f} s", flush=True)


if __name__ == "__main__":
    main()
