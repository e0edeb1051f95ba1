"""Makes the demo's two models from the standard library and the packages of packages.txt.

    python -m examples.demo.recipe --output DIR

Every stage leaves files in DIR and takes up where it was stopped. `package` puts the result into
the package.
"""

from __future__ import annotations

import argparse
import json
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.convert import convert
from mlx_lm.tokenizer_utils import TokenizerWrapper
from mlx_lm.utils import dequantize_model, load_tokenizer

from benchmarks.tables import format_text
from examples.demo.library import split_files
from mlx_redrafter import load, load_drafter
from mlx_redrafter.drafters.recurrent import DrafterArgs
from mlx_redrafter.files import replace_file
from mlx_redrafter.target.model_parts import get_model_sizes
from mlx_redrafter.training.data import Example
from mlx_redrafter.training.settings import TrainingArgs

from . import corpus, drafter, edits, report, target

VOCAB_SIZE = 4096
BITS = 8
GROUP_SIZE = 64
EXAMPLES_PER_STEP = 2
EXIT_DIM = 256
EDITS = 30_000
EXERCISES = 26_000
EDIT_TEXTS = 1200
HELD_OUT_EDITS = 200
EDIT_TOKENS = 350
SHOWN_EDIT_TOKENS = range(60, 250)
SHOWN_FROM = 100
EDIT_RATE = 0.5
EDIT_DECAY_FROM = 0.5
WEIGHTS = ("config.json", "model.safetensors")
TOKENIZER = ("tokenizer.json", "tokenizer_config.json")
ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "mlx_redrafter" / "demo"
DRAFT_MODEL = ROOT / "benchmarks" / "draft_model"


def make_corpus(out: Path) -> None:
    """The tokenizer, and the library's two halves and the packages as streams of its ids."""
    if (out / "packages.npy").exists():
        return
    training, held_out = (
        [path.read_text(encoding="utf-8") for path in paths] for paths in split_files()
    )
    packages = list(corpus.package_texts(corpus.download_packages(out / "wheels"), held_out))
    tokenizer = corpus.train_tokenizer([*training, *packages], VOCAB_SIZE, out / "tokenizer")
    for name, texts in (("held", held_out), ("library", training), ("packages", packages)):
        tokens = corpus.encode_texts(texts, tokenizer)
        with replace_file(out / f"{name}.npy") as partly:
            np.save(partly, tokens)
        print(f"{name}: {len(texts)} files, {len(tokens)} tokens")


def make_target(out: Path, steps: int) -> None:
    """The target before it learns edits."""
    train_model(out, target.make_config(VOCAB_SIZE, 0), steps, out / "pretrained")


def make_edits(out: Path, steps: int) -> None:
    """The target, quantized, from the pretrained one.

    It learns edits by program of the same files, and more of the library.
    """
    if (out / "target").exists():
        return
    sequences = out / "edits.npz"
    if not sequences.exists():
        pack_edits(out, sequences)
    batch = target.make_edit_batches(dict(np.load(sequences)), np.load(out / "library.npy"), steps)
    settings = target.make_config(VOCAB_SIZE, 0)
    place = out / "float32"
    place.mkdir(exist_ok=True)
    if not (place / "model.safetensors").exists():
        start = out / "pretrained" / "model.safetensors"
        target.train(
            batch, settings, steps, place, start, rate=EDIT_RATE, decay_from=EDIT_DECAY_FROM
        )
    copy_tokenizer(out, place)
    quantization = {"quantize": True, "q_group_size": GROUP_SIZE, "q_bits": BITS}
    convert_model(place, out / "target", **quantization)


def pack_edits(out: Path, file: Path) -> None:
    """Writes edits of the training files and of the packages, as sequences of tokens."""
    training, held_out = (
        [path.read_text(encoding="utf-8") for path in paths] for paths in split_files()
    )
    wheels = corpus.download_packages(out / "wheels")
    texts = training + list(corpus.package_texts(wheels, held_out))
    exercises = edits.make_exercises(texts, EXERCISES)
    real = edits.make_edits(texts, EDITS)
    tokenizer = load_tokenizer(out / "tokenizer")
    packed = {}
    for name, length in target.EDIT_LENGTHS.items():
        made = real
        prompt_weight = edits.PROMPT_WEIGHT
        if name == "exercises":
            made = exercises
            prompt_weight = 0.0  # there is nothing to learn from random names
        packed[name], packed[f"{name}_weights"] = edits.pack_edits(
            made, tokenizer.encode, tokenizer.eos_token_id, length, prompt_weight
        )
        print(f"{name}: {len(packed[name])} sequences of {length} tokens", flush=True)
    with replace_file(file) as partly, partly.open("wb") as opened:
        np.savez(opened, **packed)


def make_draft_model(out: Path, steps: int) -> None:
    """A smaller model of the same text, with the same tokenizer, for mlx-lm's own speculation."""
    if (out / "draft_model").exists():
        return
    train_model(out, target.make_draft_config(VOCAB_SIZE, 0), steps, out / "draft_float32")
    convert_model(out / "draft_float32", out / "draft_model")


def convert_model(source: Path, place: Path, **quantization: Any) -> None:
    """A model in 16 bits or fewer, by mlx-lm; `place` is there when it is complete."""
    partly = place.with_name(f"{place.name}.partial")
    shutil.rmtree(partly, ignore_errors=True)
    convert(str(source), str(partly), dtype="float16", **quantization)
    partly.rename(place)


def train_model(out: Path, settings: dict[str, Any], steps: int, place: Path) -> None:
    """A model of all the text, at last of the library alone, with its tokenizer."""
    place.mkdir(exist_ok=True)
    library = np.load(out / "library.npy")
    packages = np.load(out / "packages.npy")
    if not (place / "model.safetensors").exists():
        wide = np.concatenate([library, packages])
        target.train(target.make_text_batches(wide, library, steps), settings, steps, place)
    copy_tokenizer(out, place)


def copy_tokenizer(out: Path, place: Path) -> None:
    """The recipe's tokenizer beside a model."""
    for file in TOKENIZER:
        shutil.copyfile(out / "tokenizer" / file, place / file)


def make_drafter(out: Path, steps: int) -> None:
    """The drafter, from texts that the target wrote and from edits."""
    if (out / "drafter" / "model.safetensors").exists():
        return
    model, tokenizer = load_trained(out)
    written = drafter.write_texts(model, np.load(out / "library.npy"), out / "texts")
    texts = [Example(ids.astype(np.int32), 0) for ids in written]
    # The right answers, which are nearly always the target's own.
    packed = np.load(out / "edits.npz")
    answered = edits.split_edits(packed["edits"], packed["edits_weights"], tokenizer.eos_token_id)
    texts += [Example(*edit) for edit in answered[:EDIT_TEXTS]]
    args = DrafterArgs(*get_model_sizes(model), exit_dim=EXIT_DIM, num_draft_layers=1)
    settings = TrainingArgs(batch_size=EXAMPLES_PER_STEP, learning_rate=4e-3)
    drafter.train(model, texts, args, settings, steps, out / "drafter")


def describe_drafter(out: Path) -> None:
    """Acceptance and depth into the drafter's config."""
    drafter.describe(load_trained(out)[0], np.load(out / "held.npy"), out / "drafter")


def print_report(out: Path) -> None:
    """Held-out bits per byte, edits that are right, and tokens per round."""
    model, tokenizer = load_trained(out)
    made = report.make_held_out_edits(tokenizer, HELD_OUT_EDITS, 1, range(EDIT_TOKENS))
    print(format_text(report.measure_edits(model, tokenizer, made)))
    bits = report.measure_bits_per_byte(model, np.load(out / "held.npy"))
    print(f"target: {bits:.3f} bits per held-out byte")
    network = load_drafter(out / "drafter", model)
    network.set_dtype(mx.float32)
    print(format_text(report.measure_texts(model, tokenizer, network)))


def package(out: Path) -> None:
    """Copies what is needed at run time into the package, and the draft model to the benchmarks."""
    model, tokenizer = load_trained(out)
    for name, place, files in (
        ("target", PACKAGE / "target", (*WEIGHTS, *TOKENIZER)),
        ("drafter", PACKAGE / "drafter", WEIGHTS),
        ("draft_model", DRAFT_MODEL, (*WEIGHTS, *TOKENIZER)),
    ):
        place.mkdir(parents=True, exist_ok=True)
        for file in files:
            shutil.copyfile(out / name / file, place / file)
    code = [{"name": name, "text": text} for name, text in report.choose_prompts(tokenizer).items()]
    made = report.make_held_out_edits(tokenizer, SHOWN_FROM, 2, SHOWN_EDIT_TOKENS)
    # The first is what is shown: of those that the target does right, the longest. The others are
    # taken as they come.
    right = [edit for edit in made if report.is_right(model, tokenizer, edit)]
    shown = max(right, key=lambda edit: len(edit.after), default=made[0])
    made.sort(key=lambda edit: edit is not shown)
    shown_edits = [
        {"name": edit.kind, "text": edit.prompt, "answer": edit.after}
        for edit in made[: report.PROMPTS]
    ]
    for name, found in (("code", code), ("edits", shown_edits)):
        (PACKAGE / f"{name}.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


def load_trained(out: Path) -> tuple[nn.Module, TokenizerWrapper]:
    """The target as it is stored, in float32: the drafter has to know the quantized model."""
    model, tokenizer = load(out / "target")
    dequantize_model(model)
    model.set_dtype(mx.float32)
    return model, tokenizer


def main() -> None:
    """Runs the stages that are asked for, in order."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, required=True, metavar="DIR")
    parser.add_argument(
        "--stages",
        default="corpus,target,edits,drafter,describe,draft-model,report",
        help="also: package (default: %(default)s)",
    )
    parser.add_argument(
        "--steps", type=int, default=5000, help="of both llamas (default: %(default)s)"
    )
    parser.add_argument("--edit-steps", type=int, default=1700, help="default: %(default)s")
    parser.add_argument("--drafter-steps", type=int, default=1000, help="default: %(default)s")
    args = parser.parse_args()
    stages: dict[str, Callable[[], None]] = {
        "corpus": lambda: make_corpus(args.output),
        "target": lambda: make_target(args.output, args.steps),
        "edits": lambda: make_edits(args.output, args.edit_steps),
        "drafter": lambda: make_drafter(args.output, args.drafter_steps),
        "describe": lambda: describe_drafter(args.output),
        "draft-model": lambda: make_draft_model(args.output, args.steps),
        "report": lambda: print_report(args.output),
        "package": lambda: package(args.output),
    }
    chosen = args.stages.split(",")
    unknown = set(chosen) - set(stages)
    if unknown:
        parser.error(f"no such stage: {', '.join(sorted(unknown))}; there are {', '.join(stages)}")
    args.output.mkdir(parents=True, exist_ok=True)
    for name in (stage for stage in stages if stage in chosen):
        print(f"== {name}", flush=True)
        started = time.time()
        stages[name]()
        print(f"== {name}: {time.time() - started:.0f} s", flush=True)


if __name__ == "__main__":
    main()
