"""The settings of a training run. Each field is also a flag of the command."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any

from ..decoding.options import check_number
from ..drafters import DEFAULT, TRAINABLE
from ..drafters.trainable import TrainableArgs
from ..errors import RedrafterError
from ..loading.checkpoints import DTYPE_NAMES
from ..loading.named_models import ModelArgs


def setting(default: Any, text: str, least: float | None = None, **flag: Any) -> Any:
    """A dataclass field with its help text, its smallest value, and argparse keywords."""
    if least is not None:
        flag.setdefault("type", float if isinstance(default, float) else int)
    return field(default=default, metadata={"least": least, "flag": {"help": text, **flag}})


@dataclass(frozen=True)
class TrainingArgs:
    """Settings of a training run. Names and meanings follow `mlx_lm.lora`."""

    model: str | None = setting(
        None, "target: a directory or Hugging Face repo; the packaged demo if not given"
    )
    adapter_path: str | None = setting(None, "trained adapter weights of the target")
    trust_remote_code: bool = setting(False, "trust remote code for the tokenizer and the model")
    prompts: str | None = setting(
        None, "file of prompts to answer first, one per line or JSONL; others are self-made"
    )
    data: str | None = setting(
        None, "directory with {train,valid}.jsonl, or a data set on the Hugging Face hub"
    )
    mask_prompt: bool = setting(False, "learn only the answers, not the prompts")
    output: str = setting("drafter", "directory for the drafter")
    minutes: float = setting(60.0, "time for the whole run; more make a better drafter", 0.01)
    max_tokens: int = setting(256, "maximum tokens of an answer", 1)
    temp: float = setting(0.8, "temperature of the answers", 0)
    max_seq_length: int = setting(2048, "maximum tokens of a text; longer ones are cut", 8)
    drafter_type: str = setting(DEFAULT, "kind of drafter", choices=tuple(TRAINABLE))
    exit_dim: int | None = setting(
        None, f"width of a {DEFAULT} drafter; chosen by measuring if not given", 1
    )
    num_draft_layers: int | None = setting(
        None, f"residual blocks of a {DEFAULT} drafter; needs --exit-dim", 1
    )
    draft_vocab_size: int | None = setting(
        None, "guess only this many tokens, the most frequent ones", 2
    )
    draft_depth: int = setting(5, "K, the number of guesses to train from each position", 1)
    dtype: str | None = setting(
        None, "dtype of the finished drafter; the target's if not given", choices=DTYPE_NAMES
    )
    batch_size: int = setting(4, "texts per iteration", 1)
    learning_rate: float = setting(4e-3, "peak learning rate of AdamW", 1e-12)
    seed: int = setting(0, "random seed", 0)

    @property
    def model_args(self) -> ModelArgs:
        """The target to load."""
        return ModelArgs(
            model=self.model,
            adapter_path=self.adapter_path,
            trust_remote_code=self.trust_remote_code,
        )

    def __post_init__(self) -> None:
        for each in fields(self):
            value = getattr(self, each.name)
            least = each.metadata["least"]
            flag = each.metadata["flag"]
            if value is None and each.default is None:
                continue
            if value not in flag.get("choices", (value,)):
                names = ", ".join(flag["choices"])
                raise RedrafterError(f"{each.name} must be one of {names}, got {value!r}")
            if least is None:
                continue
            check_number(each.name, value, flag["type"])
            if not value >= least:
                raise RedrafterError(f"{each.name} must be at least {least}, got {value}")

    def check_run(self) -> None:
        """Checks that the settings are consistent, before anything is loaded."""
        if self.data and self.prompts:
            raise RedrafterError("give either --data or --prompts, got both")
        sizes = {"--exit-dim": self.exit_dim, "--num-draft-layers": self.num_draft_layers}
        if self.drafter_type == DEFAULT:
            sizes |= {"--draft-vocab-size": self.draft_vocab_size}
        given = [flag for flag, value in sizes.items() if value]
        if given and self.drafter_type != DEFAULT:
            raise RedrafterError(
                f"{given[0]} cannot be used with --drafter-type {self.drafter_type}"
            )
        if given and not self.exit_dim:
            raise RedrafterError(f"{given[0]} needs --exit-dim")

    @property
    def kind(self) -> type[TrainableArgs]:
        """The config class of the drafter's kind."""
        return TRAINABLE[self.drafter_type]
