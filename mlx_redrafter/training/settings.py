"""The settings of a training run. Each field is also a flag of the command and a key of its YAML file."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any

import mlx.core as mx

from ..checkpoints import DTYPES, check_demo_flags
from ..drafters import DEFAULT, TRAINABLE
from ..drafters.trainable import TrainableArgs
from ..engine.plan import MAX_DRAFT_DEPTH
from ..errors import RedrafterError
from ..options import Options

LABELS = ("distribution", "sampled")
"""Training labels: the target's distribution after each token, or a token sampled from it."""


def setting(default: Any, text: str, least: float | None = None, most: float = 2**31 - 1, **flag: Any) -> Any:
    """A dataclass field with its help text, its range, and argparse keywords such as `choices` and `nargs`."""
    if least is not None:
        flag.setdefault("type", float if isinstance(default, float) else int)
    return field(default=default, metadata={"least": least, "most": most, "flag": {"help": text, **flag}})


@dataclass(frozen=True)
class TrainingArgs:
    """Settings of a training run. Names and meanings follow `mlx_lm.lora`.

    Raises:
        RedrafterError: a value is out of range.
    """

    model: str | None = setting(None, "target: a directory or Hugging Face repo; the packaged demo if not given")
    adapter_path: str | None = setting(None, "trained adapter weights of the target")
    trust_remote_code: bool = setting(False, "trust remote code for the tokenizer and the model")
    data: str | None = setting(None, "directory with {train,valid}.jsonl, or a data set on the Hugging Face hub")
    mask_prompt: bool = setting(False, "do not learn the prompts in --data")
    prompts: str | None = setting(None, "file of prompts for the target to answer: one per line, or JSONL")
    drafter: str | None = setting(None, "drafter to train further; with --eval-only, to measure")
    minutes: float | None = setting(None, "approximate time limit of the whole run", 0.01, type=float)
    learn_prompts: bool = setting(False, "also learn the target's predictions within prompts")
    max_prompts: int | None = setting(None, "answer only this many prompts, from the first; all if not given", 2)
    max_tokens: int = setting(256, "maximum tokens of an answer", 1)
    temp: tuple[float, ...] = setting((0.8,), "temperatures for the answers, alternating", type=float, nargs="+")
    output: str = setting("drafter", "directory for the drafter")
    drafter_type: str = setting(DEFAULT, "kind of drafter", choices=tuple(TRAINABLE))
    exit_dim: int | None = setting(None, "width of blocks and head; chosen by measuring if not given", 1, 2**16)
    num_draft_layers: int | None = setting(None, "residual blocks; 1 if not given", 0, 64)
    inner_dim: int | None = setting(None, "state size; a quarter of the target's hidden size if not given", 1, 2**16)
    intermediate_size: int | None = setting(None, "MLP size; twice the target's hidden size if not given", 1, 2**20)
    untied: bool = setting(False, "a separate output matrix, and embedding, for each depth")
    draft_vocab_size: int | None = setting(None, "guess only this many tokens, the most frequent ones", 2)
    dtype: str | None = setting(None, "dtype of the finished drafter; the target's if not given", choices=DTYPES)
    compute_dtype: str = setting("float32", "dtype of the drafter's forward and gradients", choices=DTYPES[1:])
    labels: str = setting("distribution", "learn the target's distribution, or tokens sampled from it", choices=LABELS)
    teacher_top_k: int = setting(0, "learn only this many of the target's likeliest tokens, stored once; 0 for all", 0)
    draft_depth: int = setting(5, "K, the number of guesses to train from each position", 1, MAX_DRAFT_DEPTH)
    regression_weight: float = setting(
        3.0, "loss weight of the distance between features and the target's next hidden states; 0 for none", 0
    )
    iters: int = setting(1000, "iterations to train for", 1)
    batch_size: int = setting(4, "texts per iteration", 1)
    grad_accumulation_steps: int = setting(1, "iterations per update", 1)
    grad_checkpoint: bool = setting(False, "recompute activations for the gradient: slower, less memory")
    learning_rate: float = setting(4e-3, "peak learning rate of AdamW", 1e-12)
    warmup: float = setting(0.1, "share of iterations in which the learning rate rises", 0, 0.99)
    weight_decay: float = setting(0.0, "weight decay of AdamW", 0)
    max_seq_length: int = setting(2048, "maximum tokens of a text; longer ones are cut", 8)
    steps_per_report: int = setting(10, "iterations between loss reports", 1)
    steps_per_eval: int = setting(200, "iterations between validations", 1)
    val_batches: int = setting(25, "batches per validation; -1 for all", -1)
    val_prompts: int = setting(8, "held-out texts for tokens per round, and prompts of the final comparison", 1)
    val_tokens: int = setting(64, "tokens to decode per prompt in the final comparison", 2)
    patience: int = setting(0, "stop after this many validations without more tokens per round; 0 for never", 0)
    save_every: int = setting(100, "iterations between checkpoints", 1)
    seed: int = setting(0, "random seed", 0)

    def __post_init__(self) -> None:
        object.__setattr__(self, "temp", tuple(self.temp))  # argparse gives a list
        for each in fields(self):
            value, least, most = getattr(self, each.name), each.metadata["least"], each.metadata["most"]
            if least is not None and value is not None and not least <= value <= most:
                bounds = f"at least {least}" if value < least else f"from {least} to {most}"
                raise RedrafterError(f"{each.name} must be {bounds}, got {value}")
            choices = each.metadata["flag"].get("choices")
            if choices and value not in (*choices, each.default):
                raise RedrafterError(f"{each.name} must be one of {', '.join(choices)}, got {value!r}")
        if self.labels == "sampled" and self.teacher_top_k:
            raise RedrafterError(
                "teacher_top_k needs labels distribution, got sampled, which are drawn from all tokens"
            )
        if self.val_batches == 0:
            raise RedrafterError("val_batches must be at least 1, or -1 for all, got 0")
        if not self.temp:
            raise RedrafterError("temp must be at least one number, got none")
        for temp in self.temp:
            Options(temp=temp)

    def check_sources(self) -> None:
        """Checks that the settings for target and texts are consistent.

        Raises:
            RedrafterError: they are not.
        """
        given = [f"--{name}" for name in ("data", "prompts") if getattr(self, name) is not None]
        if "" in (self.data, self.prompts):
            raise RedrafterError(f"expected a name after {given[0]}, got an empty one")
        if len(given) > 1:
            raise RedrafterError(f"give either {given[0]} or {given[1]}, got both")
        check_demo_flags(self.model, self)
        if self.mask_prompt and not self.data:
            raise RedrafterError("--mask-prompt needs --data: other prompts are masked without --learn-prompts")
        if self.learn_prompts and self.data:
            raise RedrafterError("--learn-prompts cannot be used with --data, whose texts are learned whole")
        if self.data and self.max_prompts is not None:
            raise RedrafterError("--max-prompts cannot be used with --data, whose texts need no answers")

    def check_run(self) -> None:
        """Checks that the settings are consistent, before anything is loaded.

        Raises:
            RedrafterError: they are not.
        """
        self.check_sources()
        if self.model and not (self.data or self.prompts):
            raise RedrafterError("expected --data or --prompts: texts, or prompts to answer")
        if self.drafter and (self.drafter_type, self.draft_vocab_size) != (DEFAULT, None):
            raise RedrafterError("--drafter-type and --draft-vocab-size cannot be used with --drafter")
        for name in dict.fromkeys(size for kind in TRAINABLE.values() for size in kind.SIZES):
            flag = name.replace("_", "-")
            if getattr(self, name) not in (None, False) and self.drafter:
                raise RedrafterError(f"--{flag} cannot be used with --drafter, which has its own sizes")
            if getattr(self, name) not in (None, False) and name not in self.kind.SIZES:
                taken = " and ".join(f"--{size.replace('_', '-')}" for size in self.kind.SIZES)
                raise RedrafterError(
                    f"--{flag} cannot be used with --drafter-type {self.drafter_type}, which takes {taken}"
                )
        if self.is_measured and (self.num_draft_layers, self.draft_vocab_size) != (None, None):
            raise RedrafterError("--num-draft-layers and --draft-vocab-size need --exit-dim")
        if self.max_tokens <= self.draft_depth and not self.data:
            raise RedrafterError(
                f"max_tokens must be above draft_depth {self.draft_depth}: answers must be longer than a draft, "
                f"got {self.max_tokens}"
            )

    @property
    def kind(self) -> type[TrainableArgs]:
        """The config class of the drafter's kind."""
        return TRAINABLE[self.drafter_type]

    @property
    def is_measured(self) -> bool:
        """Whether the drafter's size is chosen by measuring."""
        return self.kind.MEASURED is not None and getattr(self, self.kind.MEASURED) is None

    @property
    def mixed_dtype(self) -> mx.Dtype | None:
        """The dtype of forward and gradients; None for float32."""
        return None if self.compute_dtype == "float32" else getattr(mx, self.compute_dtype)

    def to_json(self) -> dict[str, Any]:
        """The settings as JSON values."""
        return {name: list(value) if isinstance(value, tuple) else value for name, value in vars(self).items()}
