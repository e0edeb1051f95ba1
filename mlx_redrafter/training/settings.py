"""Every setting of a training run, once: a flag of the command, a key of its YAML file, a field here."""

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
"""What should follow a token: the target's distribution, or a token drawn from it."""


def setting(default: Any, text: str, least: float | None = None, most: float = 2**31 - 1, **flag: Any) -> Any:
    """A field with its help, the range of a number, and what else its flag needs: argparse's `choices`, `nargs`."""
    if least is not None:
        flag.setdefault("type", float if isinstance(default, float) else int)
    return field(default=default, metadata={"least": least, "most": most, "flag": {"help": text, **flag}})


@dataclass(frozen=True)
class TrainingArgs:
    """A training run. Names and meanings follow `mlx_lm.lora`.

    Raises:
        RedrafterError: a value out of its range.
    """

    model: str | None = setting(None, "target: a directory or Hugging Face repo; the packaged demo when not given")
    adapter_path: str | None = setting(None, "trained adapter weights of the target")
    trust_remote_code: bool = setting(False, "trust remote code for the tokenizer and the model")
    data: str | None = setting(None, "directory of {train,valid}.jsonl, or a data set of the Hugging Face hub")
    mask_prompt: bool = setting(False, "do not learn the prompts of --data")
    prompts: str | None = setting(None, "file of prompts that the target answers: one a line, or jsonl")
    answers: str | None = setting(None, "folder of past answers (--answers of chat) to learn from")
    drafter: str | None = setting(None, "the drafter to go on from; --eval-only: the one to measure")
    minutes: float | None = setting(None, "about how long the run may take", 0.01, type=float)
    learn_prompts: bool = setting(False, "learn what the target would say after each token of a prompt, too")
    max_prompts: int | None = setting(None, "answer only the first of the prompts; all when not given", 2)
    max_tokens: int = setting(256, "tokens of an answer at most", 1)
    temp: tuple[float, ...] = setting((0.8,), "temperatures of the answers, alternating", type=float, nargs="+")
    output: str = setting("drafter", "directory of the drafter")
    drafter_type: str = setting(DEFAULT, "kind of the drafter", choices=tuple(TRAINABLE))
    exit_dim: int | None = setting(None, "width of its blocks and head; measured when not given", 1, 2**16)
    num_draft_layers: int | None = setting(None, "residual blocks; 1 when not given", 0, 64)
    inner_dim: int | None = setting(None, "width of its states; a quarter of the target's when not given", 1, 2**16)
    intermediate_size: int | None = setting(None, "width of its MLP; twice the target's when not given", 1, 2**20)
    untied: bool = setting(False, "an output matrix, and embedding, for each depth")
    draft_vocab_size: int | None = setting(None, "guess only this many tokens, the most frequent ones", 2)
    dtype: str | None = setting(None, "dtype of the finished drafter; the target's when not given", choices=DTYPES)
    compute_dtype: str = setting("float32", "dtype of the drafter's forward and gradients", choices=DTYPES[1:])
    labels: str = setting("distribution", "what is learned to follow each token", choices=LABELS)
    teacher_top_k: int = setting(0, "learn only this many of the target's likeliest tokens, found once; 0 for all", 0)
    draft_depth: int = setting(5, "K, how many guesses are trained from each position", 1, MAX_DRAFT_DEPTH)
    regression_weight: float = setting(
        3.0, "weight of how far features are from the target's next hidden states; 0 for none", 0
    )
    iters: int = setting(1000, "iterations to train for", 1)
    batch_size: int = setting(4, "texts of an iteration", 1)
    grad_accumulation_steps: int = setting(1, "iterations before each update", 1)
    grad_checkpoint: bool = setting(False, "compute activations again for the gradient: slower, less memory")
    learning_rate: float = setting(4e-3, "the highest learning rate of AdamW", 1e-12)
    warmup: float = setting(0.1, "share of the iterations in which the rate rises before it falls", 0, 0.99)
    weight_decay: float = setting(0.0, "of AdamW", 0)
    max_seq_length: int = setting(2048, "longer texts are cut", 8)
    steps_per_report: int = setting(10, "iterations between reports of the loss", 1)
    steps_per_eval: int = setting(200, "iterations between validations", 1)
    val_batches: int = setting(25, "batches of a validation; -1 for all", -1)
    val_prompts: int = setting(8, "prompts that each validation really decodes", 1)
    val_tokens: int = setting(64, "tokens it makes for each", 2)
    patience: int = setting(0, "stop after this many validations without more tokens per round; 0 never", 0)
    save_every: int = setting(100, "iterations between checkpoints", 1)
    seed: int = setting(0, "of everything random", 0)

    def __post_init__(self) -> None:
        object.__setattr__(self, "temp", tuple(self.temp))  # a list, of argparse
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
                "teacher_top_k goes with labels distribution, got sampled, which are drawn from all tokens"
            )
        if self.val_batches == 0:
            raise RedrafterError("val_batches must be at least 1, or -1 for all, got 0")
        if not self.temp:
            raise RedrafterError("temp must be at least one number")
        for temp in self.temp:
            Options(temp=temp)

    def check_sources(self) -> None:
        """Refuses a target and texts that do not go together, by a RedrafterError."""
        given = [f"--{name}" for name in ("data", "prompts", "answers") if getattr(self, name) is not None]
        if "" in (self.data, self.prompts, self.answers):
            raise RedrafterError(f"expected a name after {given[0]}, got an empty one")
        if len(given) > 1:
            raise RedrafterError(f"give either {given[0]} or {given[1]}, got both")
        check_demo_flags(self.model, self)
        if self.mask_prompt and not self.data:
            raise RedrafterError("--mask-prompt needs --data: other prompts are learned with --learn-prompts only")
        if self.learn_prompts and self.data:
            raise RedrafterError("--learn-prompts does not go with --data, whose texts are learned whole")
        if (self.data or self.answers) and self.max_prompts is not None:
            raise RedrafterError(f"--max-prompts does not go with {given[0]}, whose texts need no answers")

    def check_run(self) -> None:
        """Refuses settings that no run can have, by a RedrafterError, before anything is loaded."""
        self.check_sources()
        if self.model and not (self.data or self.prompts or self.answers):
            raise RedrafterError("expected --data or --prompts, or --answers: texts, or prompts to answer")
        if self.drafter and (self.drafter_type, self.draft_vocab_size) != (DEFAULT, None):
            raise RedrafterError("--drafter-type and --draft-vocab-size do not go with --drafter, which has its own")
        for name in dict.fromkeys(size for kind in TRAINABLE.values() for size in kind.SIZES):
            flag = name.replace("_", "-")
            if getattr(self, name) not in (None, False) and self.drafter:
                raise RedrafterError(f"--{flag} does not go with --drafter, which has its own sizes")
            if getattr(self, name) not in (None, False) and name not in self.kind.SIZES:
                taken = " and ".join(f"--{size.replace('_', '-')}" for size in self.kind.SIZES)
                raise RedrafterError(f"--{flag} does not go with --drafter-type {self.drafter_type}, which has {taken}")
        if self.is_measured and (self.num_draft_layers, self.draft_vocab_size) != (None, None):
            raise RedrafterError("give --exit-dim with --num-draft-layers and --draft-vocab-size, or none of them")
        if self.max_tokens <= self.draft_depth and not (self.data or self.answers):
            raise RedrafterError(
                f"max_tokens must be above draft_depth {self.draft_depth}: answers must be longer than a draft, "
                f"got {self.max_tokens}"
            )

    @property
    def kind(self) -> type[TrainableArgs]:
        """The sizes that drafters of the kind have."""
        return TRAINABLE[self.drafter_type]

    @property
    def is_measured(self) -> bool:
        """Whether the size is chosen by measuring."""
        return self.kind.MEASURED is not None and getattr(self, self.kind.MEASURED) is None

    @property
    def mixed_dtype(self) -> mx.Dtype | None:
        """What forward and gradients are computed in, when not in float32."""
        return None if self.compute_dtype == "float32" else getattr(mx, self.compute_dtype)

    def to_json(self) -> dict[str, Any]:
        """The settings as JSON has them."""
        return {name: list(value) if isinstance(value, tuple) else value for name, value in vars(self).items()}
