"""The recurrent drafter: guesses the next tokens from the target's last hidden state.

    s_t = SiLU(rnn_w(e_t) + rnn_u(s_{t-1}))     s_0 = 0; e_t: the token before, in the target's
                                                embedding
    y   = concat[h, s_t]                        h: the target's hidden state, the same for a draft
    y   = input_proj(y)                         only when exit_dim != 2 * hidden_size
    y   = y + SiLU(linear(y))                   num_draft_layers times
    logits = head(y)                            of all tokens, or of those in draft_ids

Source: Apple's ml-recurrent-drafter, recurrent_drafting/modeling_drafter.py::Drafter; arXiv
2403.09919, section 3. Parameters are named as in its checkpoints, so that its files load unchanged.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any, Self

import mlx.core as mx
import mlx.nn as nn

from ..engine.beam_search import State
from ..errors import CheckpointError
from .checkpoint import DRAFT_IDS, Checkpoint, Config
from .protocol import Embed
from .trainable import TrainableArgs, TrainableDrafter

MODEL_TYPE = "recurrent_drafting_drafter"

HEAD = "lm_head.weight"
"""TensorRT-LLM's name for the output matrix, and many models'; Apple's has a number."""

OLD_HEAD = r"(?:lm_heads?\.(?:0\.(?=\d))?|0\.)"
OURS = r"(?:rnn_[uw]|input_proj|lm_head(?:\.\d+)?(?:\.linear)?)\.(?:weight|bias|scales|biases)"
"""Our names, and `HEAD`."""

NAMES = (
    (r"input_proj(?:s(?:\.0)?)?\.(weight|bias)", r"input_proj.\1"),
    (rf"{OLD_HEAD}(\d{{1,3}}\.(?:linear\.(?:weight|bias)|weight))", r"lm_head.\1"),
    (r"layers\.(\d{1,3}\.linear\.(?:weight|bias))", r"lm_head.\1"),
    (r"emb_norm\.weight", ""),  # from Apple's internal trainer; no forward uses it
)
"""Apple's names and their older forms, and those of NeMo-Skills, ModelOpt and TensorRT-LLM."""

TENSORRT_LLM = {
    "redrafter_exit_dim": "exit_dim",
    "redrafter_num_layers": "num_draft_layers",
    "redrafter_is_rnn": "rnn",
}
"""Keys of TensorRT-LLM's config -> Apple's."""

PADDING = 64
"""TensorRT-LLM pads a vocabulary by fewer tokens than this for each rank.

More is an error in the config.
"""


def recognizes(names: Collection[str], config: Config) -> bool:
    """Always true: a checkpoint that no other kind recognizes is read as a recurrent drafter."""
    return True


def sanitize(checkpoint: Checkpoint, model: nn.Module | None) -> Config:
    """Renames the tensors of a drafter in Apple's format to our names; returns its config.

    That format is also ours. Sizes that the config does not give follow from the tensors. The
    config beside some drafters is their base model's.
    """
    checkpoint.rename(NAMES)
    tensors = checkpoint.tensors
    where = checkpoint.where
    unknown = [
        checkpoint.stored[name]
        for name in tensors
        if not re.fullmatch(rf"{OURS}|{DRAFT_IDS}", name)
    ]
    if unknown or tensors.keys() <= {HEAD}:
        why = f"it holds {unknown[0]!r}" if unknown else "it holds at most an output matrix"
        raise CheckpointError(
            f"{where} is not a drafter: {why}; a smaller language model is given as --draft-model"
        )

    blocks = checkpoint.count(r"lm_head\.(\d+)\.linear\.weight")
    head = f"lm_head.{blocks}.weight"
    if HEAD in tensors and head not in tensors:
        tensors[head] = tensors.pop(HEAD)
    n_guesses, exit_dim = checkpoint.shape(head)
    has_rnn = "rnn_w.weight" in tensors
    if has_rnn:
        hidden_size = checkpoint.shape("rnn_w.weight")[0]
    else:
        widest = "input_proj.weight" if "input_proj.weight" in tensors else head
        hidden_size = checkpoint.shape(widest)[1] // 2
    found: Config = {
        "hidden_size": hidden_size,
        "exit_dim": exit_dim,
        "num_draft_layers": blocks,
        "rnn": has_rnn,
        "hidden_state": None,
    }
    if DRAFT_IDS not in tensors:
        found["vocab_size"] = n_guesses

    config = {TENSORRT_LLM.get(key, key): value for key, value in checkpoint.config.items()}
    if config.get("model_type", MODEL_TYPE) != MODEL_TYPE:
        config = {"vocab_size": config.get("vocab_size")}
    found |= {key: value for key, value in config.items() if value not in (None, -1)}

    padding = n_guesses - found["vocab_size"] if DRAFT_IDS not in tensors else 0
    if 0 < padding < PADDING * checkpoint.n_ranks:
        tensors[head] = tensors[head][:-padding]
        said = f"config.json says vocab_size {n_guesses - padding}"
        checkpoint.notes.append(f"the last {padding} outputs of the head are left out: {said}")
    return found


@dataclass(frozen=True)
class DrafterArgs(TrainableArgs):
    """The config of a recurrent drafter.

    Attributes:
        exit_dim: X, the width of the residual blocks and the head; 2 * D needs no input projection.
        num_draft_layers: how many residual blocks come before the head.
        rnn: whether the state is gated as above; if not, s_t = e_t + s_{t-1}.
    """

    exit_dim: int
    num_draft_layers: int
    rnn: bool = True
    model_type: str = field(default=MODEL_TYPE, kw_only=True)

    def describe_sizes(self) -> str:
        cell = "" if self.rnn else ", no rnn"
        return f"exit_dim {self.exit_dim}, blocks {self.num_draft_layers}{cell}"

    @classmethod
    def for_training(cls, hidden_size: int, vocab_size: int, *, depth: int, **sizes: Any) -> Self:
        """The sizes of a drafter to train; `exit_dim` must be given."""
        return cls(hidden_size, vocab_size, **({"num_draft_layers": 1} | sizes))

    @classmethod
    def sizes_to_try(cls, hidden_size: int) -> list[dict[str, int]]:
        """Widths from 1/16 to 2 times the target's, with one block and with two."""
        sizes = []
        for width in {max(64, 2 * hidden_size // 2**n // 32 * 32) for n in range(6)}:
            sizes += [{"exit_dim": width, "num_draft_layers": layers} for layers in (1, 2)]
        return sizes


class ResidualBlock(nn.Module):
    """y + SiLU(linear(y)) on (..., X) arrays."""

    def __init__(self, dims: int) -> None:
        super().__init__()
        self.linear = nn.Linear(dims, dims)

    def __call__(self, y: mx.array) -> mx.array:
        return y + nn.silu(self.linear(y))


class Drafter(TrainableDrafter):
    """A recurrent drafter. It has no state between calls."""

    args: DrafterArgs

    def __init__(self, args: DrafterArgs) -> None:
        super().__init__(args)
        if args.exit_dim != 2 * args.hidden_size:
            self.input_proj = nn.Linear(2 * args.hidden_size, args.exit_dim)
        blocks = [ResidualBlock(args.exit_dim) for _ in range(args.num_draft_layers)]
        self.lm_head = [*blocks, nn.Linear(args.exit_dim, args.n_guesses, bias=False)]
        if args.rnn:
            self.rnn_u = nn.Linear(args.hidden_size, args.hidden_size)
            self.rnn_w = nn.Linear(args.hidden_size, args.hidden_size, bias=False)
        self.hold_draft_ids()

    def read_token(
        self, tokens: mx.array, embed: Embed, hidden: mx.array, state: State, depth: int
    ) -> mx.array:
        """(..., D) the state after one more token; s_0 = 0."""
        embedding = embed(tokens).astype(self.dtype)
        if "rnn_w" not in self:
            return embedding if state is None else embedding + state
        before = self.rnn_u.bias if state is None else self.rnn_u(state)
        return nn.silu(self.rnn_w(embedding) + before)

    def features(self, hidden: mx.array, state: mx.array, depth: int = 0) -> mx.array:
        """(..., X) the head's input, the same function at every depth."""
        hidden = mx.broadcast_to(hidden.astype(state.dtype), state.shape)
        y = mx.concatenate([hidden, state], axis=-1)
        if "input_proj" in self:
            y = self.input_proj(y)
        for block in self.lm_head[:-1]:
            y = block(y)
        return y

    def set_axes(self, axes: mx.array) -> None:
        """Takes the axes in which its output matrix is initialized.

        So features along them predict the target's choice.
        """
        self._axes = axes[:, : self.args.exit_dim]

    @property
    def output_layers(self) -> list[nn.Module]:
        return self.lm_head[-1:]

    def name_part(self, name: str) -> str:
        if name.startswith("rnn_"):
            return "rnn"
        return "head" if name == f"lm_head.{self.args.num_draft_layers}" else "blocks"
