"""Every setting of a training run, once: a flag of the command, a key of its YAML file, a field here."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import mlx.core as mx

from ..atomic_files import expand_path
from ..checkpoints import DTYPES, check_demo_flags
from ..engine.plan import MAX_DRAFT_DEPTH
from ..errors import RedrafterError
from ..options import Options
from .distill import Recipe
from .fitting import Course
from .lessons import LABELS


def setting(default: Any, text: str, **more: Any) -> Any:
    """A field with what a flag needs to know of it.

    Args:
        text: the help.
        more: `type`, `choices`, `nargs` of argparse.
    """
    return field(default=default, metadata={"help": text, **more})


@dataclass(frozen=True)
class Settings:
    """A training run. Names and meanings are those of `mlx_lm.lora` where it has them."""

    model: str | None = setting(None, "target: a directory or Hugging Face repo; the packaged demo when not given")
    adapter_path: str | None = setting(None, "trained adapter weights of the target")
    trust_remote_code: bool = setting(False, "trust remote code for the tokenizer and the model")
    data: str | None = setting(None, "directory of {train,valid}.jsonl, or a dataset of the Hugging Face hub")
    mask_prompt: bool = setting(False, "do not learn the prompts of --data")
    prompts: str | None = setting(None, "file of prompts that the target answers: one a line, or jsonl")
    max_tokens: int = setting(256, "tokens of an answer at most", type=int)
    temp: tuple[float, ...] = setting((0.8,), "temperatures of the answers, in turns", type=float, nargs="+")
    output: str = setting("drafter", "directory of the drafter")
    exit_dim: int | None = setting(None, "width of the drafter's blocks and head", type=int)
    num_draft_layers: int | None = setting(None, "residual blocks of the drafter (default: 1)", type=int)
    draft_vocab_size: int | None = setting(None, "guess only so many tokens, the most frequent ones", type=int)
    size: str | None = setting(
        None, "auto: as large as a draft step stays cheap; the default without --exit-dim", choices=("auto",)
    )
    init_head: str = setting("target", "what the head starts as", choices=("target", "random"))
    dtype: str | None = setting(None, "dtype of the finished drafter; the target's when not given", choices=DTYPES)
    compute_dtype: str = setting("float32", "dtype of the drafter's forward and gradients", choices=DTYPES[1:])
    labels: str = setting("distribution", "what is learned to follow each token", choices=LABELS)
    teacher_top_k: int = setting(0, "learn only so many of the target's likeliest tokens; 0 for all", type=int)
    label_temp: float = setting(1.0, "temperature of labels that are drawn (--labels sampled)", type=float)
    draft_depth: int = setting(5, "K, how many guesses are trained from each position", type=int)
    depth_weights: tuple[float, ...] = setting((), "weight of each depth in the loss", type=float, nargs="+")
    iters: int = setting(1000, "iterations to train for", type=int)
    batch_size: int = setting(4, "texts of an iteration", type=int)
    grad_accumulation_steps: int = setting(1, "iterations before each update", type=int)
    grad_checkpoint: bool = setting(False, "compute activations again for the gradient: slower, less memory")
    learning_rate: float = setting(4e-3, "the highest learning rate of AdamW", type=float)
    warmup: float = setting(
        0.1, "share of the iterations in which the rate rises; then it falls as a cosine", type=float
    )
    weight_decay: float = setting(0.0, "of AdamW", type=float)
    max_seq_length: int = setting(2048, "longer texts are cut", type=int)
    steps_per_report: int = setting(10, "iterations between reports of the loss", type=int)
    steps_per_eval: int = setting(200, "iterations between validations", type=int)
    val_batches: int = setting(25, "batches of a validation; -1 for all", type=int)
    val_prompts: int = setting(8, "prompts that each validation really decodes", type=int)
    val_tokens: int = setting(64, "tokens it makes for each", type=int)
    patience: int = setting(0, "stop after so many validations without more tokens per round; 0 never", type=int)
    save_every: int = setting(100, "iterations between checkpoints", type=int)
    seed: int = setting(0, "of everything random", type=int)
    report_to: str | None = setting(None, "also report to wandb, swanlab, or both")
    project_name: str | None = setting(None, "project's name there")

    @property
    def recipe(self) -> Recipe:
        """What is taught."""
        return Recipe(
            depth=self.draft_depth,
            labels=self.labels,  # type: ignore[arg-type]
            top_k=self.teacher_top_k,
            temp=self.label_temp,
            depth_weights=tuple(self.depth_weights),
            learning_rate=self.learning_rate,
            warmup=self.warmup,
            weight_decay=self.weight_decay,
            grad_checkpoint=self.grad_checkpoint,
            seed=self.seed,
        )

    @property
    def course(self) -> Course:
        """How it runs."""
        return Course(
            self.iters,
            self.grad_accumulation_steps,
            self.checkpoint,
            self.save_every,
            None if self.compute_dtype == "float32" else getattr(mx, self.compute_dtype),
        )

    @property
    def place(self) -> Path:
        """Where the drafter will be."""
        return expand_path(self.output)

    @property
    def answers(self) -> Path:
        """The file of what the target said."""
        return self.work / "answers.jsonl"

    @property
    def record(self) -> Path:
        """The file of what the run has done so far."""
        return self.work / "run.json"

    @property
    def work(self) -> Path:
        """Where a run keeps what it needs to go on."""
        return self.place / "training"

    @property
    def checkpoint(self) -> Path:
        """The file that a run goes on from."""
        return self.work / "checkpoint.safetensors"


MOST = {"exit_dim": 2**16, "num_draft_layers": 64, "draft_depth": MAX_DRAFT_DEPTH}
MOST_OF_ANYTHING = 2**31 - 1

MAY_CHANGE = {"dtype", "steps_per_report", "report_to", "project_name", "save_every", "output", "trust_remote_code"}
"""Settings that may be others when a run goes on: none of them changes what is learned."""


def check(settings: Settings) -> None:
    """Refuses settings that mean nothing, before anything is loaded.

    Raises:
        RedrafterError: naming the setting.
    """
    check_sources(settings)
    if settings.model and not (settings.data or settings.prompts):
        raise RedrafterError("expected --data or --prompts: texts, or prompts that the target answers")
    sized = (settings.exit_dim, settings.num_draft_layers, settings.draft_vocab_size)
    if settings.size == "auto" and any(value is not None for value in sized):
        raise RedrafterError("--size auto chooses --exit-dim, --num-draft-layers and --draft-vocab-size itself")
    if settings.exit_dim is None and any(value is not None for value in sized):
        raise RedrafterError("give --exit-dim with --num-draft-layers and --draft-vocab-size, or none of them")
    check_numbers(settings)
    if settings.max_tokens <= settings.draft_depth and not settings.data:
        raise RedrafterError(
            f"max_tokens must be above draft_depth {settings.draft_depth}: answers must be longer than a draft, "
            f"got {settings.max_tokens}"
        )


def check_sources(settings: Settings) -> None:
    """Refuses a target and texts that do not go together.

    Raises:
        RedrafterError: naming the settings.
    """
    if settings.data and settings.prompts:
        raise RedrafterError("give either --data or --prompts, got both")
    check_demo_flags(settings.model, settings)
    if settings.mask_prompt and not settings.data:
        raise RedrafterError("--mask-prompt needs --data: the prompts of answers are never learned")


def check_numbers(settings: Settings) -> None:
    """Refuses numbers out of their range.

    Raises:
        RedrafterError: naming the setting.
    """
    least = {
        "exit_dim": 1,
        "num_draft_layers": 0,
        "draft_vocab_size": 2,
        "max_tokens": 1,
        "draft_depth": 1,
        "iters": 1,
        "batch_size": 1,
        "grad_accumulation_steps": 1,
        "max_seq_length": 8,
        "steps_per_report": 1,
        "steps_per_eval": 1,
        "val_prompts": 1,
        "val_tokens": 2,
        "patience": 0,
        "save_every": 1,
        "teacher_top_k": 0,
    }
    for name, low in least.items():
        value = getattr(settings, name)
        high = MOST.get(name, MOST_OF_ANYTHING)
        if value is not None and not low <= value <= high:
            bound = f"from {low} to {high}" if value > high else f"at least {low}"
            raise RedrafterError(f"{name} must be {bound}, got {value}")
    if settings.val_batches < 1 and settings.val_batches != -1:
        raise RedrafterError(f"val_batches must be at least 1, or -1 for all, got {settings.val_batches}")
    if not settings.temp:
        raise RedrafterError("temp must be at least one number")
    for temp in settings.temp:
        Options(temp=temp)
    numbers = ("learning_rate", "warmup", "weight_decay", "label_temp", "depth_weights")
    for name in numbers:
        value = getattr(settings, name)
        if not all(map(math.isfinite, value if isinstance(value, tuple) else (value,))):
            raise RedrafterError(f"{name} must be finite, got {value}")
    if not 0 <= settings.seed < 2**31:
        raise RedrafterError(f"seed must be from 0 to 2147483647, got {settings.seed}")


def changed(settings: Settings, before: dict[str, Any]) -> list[str]:
    """The settings that are not those of a run that is to go on, a clause each."""
    now = plain(settings)
    return [
        f"{name} was {before.get(name)}, got {value}"
        for name, value in now.items()
        if name not in MAY_CHANGE and before.get(name) != value
    ]


def plain(settings: Settings) -> dict[str, Any]:
    """The settings as JSON has them."""
    values = {each.name: getattr(settings, each.name) for each in fields(settings)}
    return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}
