"""The recurrent drafter: a small network that guesses the next tokens from the target's last hidden state.

    s_t = SiLU(rnn_w(e_t) + rnn_u(s_{t-1}))         s_0 = 0; e_t: the target's raw embedding of the token before
    y   = concat[h, s_t]                            h: the target's hidden state, the same for the whole draft
    y   = input_proj(y)                             only when exit_dim != 2 * hidden_size
    y   = y + SiLU(linear(y))                       num_draft_layers times
    logits = head(y)                                of all tokens, or of those in draft_ids

Source: Apple's ml-recurrent-drafter, recurrent_drafting/modeling_drafter.py::Drafter; arXiv 2403.09919, section 3.
Parameters are named as in its checkpoints, so that its files load unchanged.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Self

import mlx.core as mx
import mlx.nn as nn

from ..engine.beam_search import State
from ..errors import CheckpointError
from .checkpoint import DRAFT_IDS, DRAFTERS, Checkpoint, Config, is_count
from .config import count, flag, size
from .protocol import Embed
from .trainable import TrainableArgs, TrainableDrafter

MODEL_TYPE = "recurrent_drafting_drafter"

HEAD = "lm_head.weight"
"""TensorRT-LLM's name for the output matrix; Apple's has a number. Many base models have this name, too."""

NAMES = (
    (r"rnn_u\.(?:weight|bias)|rnn_w\.weight|draft_ids|lm_head\.weight", r"\g<0>"),
    (r"input_proj(?:s(?:\.0)?)?\.(weight|bias)", r"input_proj.\1"),
    (r"(?:lm_heads?\.(?:0\.(?=\d))?|0\.)(\d{1,3}\.(?:linear\.(?:weight|bias)|weight))", r"lm_head.\1"),
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
"""TensorRT-LLM pads a vocabulary by fewer rows than this for each rank; more is an error in the config."""


def recognises(names: Collection[str], config: Config) -> bool:
    """Always true: a checkpoint that no other kind recognises is read as a recurrent drafter."""
    return True


@dataclass(frozen=True)
class DrafterArgs(TrainableArgs):
    """The config of a recurrent drafter.

    Attributes:
        exit_dim: X, the width of the residual blocks and the head; 2 * D needs no input projection.
        num_draft_layers: how many residual blocks come before the head.
        rnn: whether the state is gated as above; if not, s_t = e_t + s_{t-1}.
    """

    exit_dim: int = size()
    num_draft_layers: int = count(least=0)
    rnn: bool = flag(True)
    model_type: str = field(default=MODEL_TYPE, kw_only=True)

    SIZES, MEASURED = ("exit_dim", "num_draft_layers"), "exit_dim"

    def describe(self) -> str:
        return f"exit_dim {self.exit_dim}, blocks {self.num_draft_layers}{'' if self.rnn else ', no rnn'}"

    @classmethod
    def for_training(
        cls, hidden_size: int, vocab_size: int, *, depth: int, draft_vocab_size: int | None, **sizes: Any
    ) -> Self:
        """The sizes of a drafter to train; `exit_dim` must be given."""
        layers = 1 if sizes["num_draft_layers"] is None else sizes["num_draft_layers"]
        return cls(hidden_size, vocab_size, sizes["exit_dim"], layers, draft_vocab_size=draft_vocab_size)

    @classmethod
    def sizes_to_try(cls, hidden_size: int) -> list[dict[str, int]]:
        """Widths from 1/16 to 2 times the target's, with one block and with two."""
        widths = {max(64, int(times * hidden_size) // 32 * 32) for times in (2, 1, 0.5, 0.25, 0.125, 0.0625)}
        return [{"exit_dim": width, "num_draft_layers": layers} for width in widths for layers in (1, 2)]

    @classmethod
    def from_published(cls, checkpoint: Checkpoint, model: nn.Module | None) -> Self:
        """The arguments of a drafter in Apple's format, which is also ours; renames its tensors to our names.

        Raises:
            CheckpointError: it is not one recurrent drafter, or its config does not fit its tensors.
        """
        checkpoint.rename(NAMES, MODEL_TYPE)
        if checkpoint.tensors.keys() == {HEAD} and not DRAFTERS.search(checkpoint.stored[HEAD]):
            names = [*checkpoint.stored.values()]
            raise CheckpointError(f"{checkpoint.where} holds no drafter: its tensors are {names}")
        if HEAD in checkpoint.tensors:
            blocks = checkpoint.count(r"lm_head\.(\d+)\.linear\.weight")
            head = f"lm_head.{blocks}.weight"
            if head in checkpoint.tensors:
                both = f"{checkpoint.stored[head]!r} and {checkpoint.stored[HEAD]!r}"
                raise CheckpointError(f"{checkpoint.where} holds two drafters: {both}")
            checkpoint.tensors[head] = checkpoint.tensors.pop(HEAD)
        for name in checkpoint.tensors:
            if name.endswith(".weight"):
                checkpoint.matrix(name)
        config = {TENSORRT_LLM.get(key, key): value for key, value in checkpoint.config.items()}
        if not (is_own := config.get("model_type", MODEL_TYPE) == MODEL_TYPE):  # it is a base model's
            config = {"vocab_size": config.get("vocab_size")}
        args = cls.derive(checkpoint.shapes, config, checkpoint.where)
        vocab_size, most = config.get("vocab_size"), PADDING * checkpoint.n_ranks
        if is_count(vocab_size) and 0 < (padding := args.n_guesses - vocab_size) < most:
            checkpoint.notes.append(
                f"the last {padding} rows of the head are left out: config.json says vocab_size {vocab_size}"
            )
            head = f"lm_head.{args.num_draft_layers}.weight"
            checkpoint.tensors[head] = checkpoint.tensors[head][:vocab_size]
            args = replace(args, vocab_size=vocab_size)
        if is_own:
            checkpoint.config = config
            checkpoint.compare(args.list_config_values())
        return args

    @classmethod
    def derive(cls, shapes: Mapping[str, tuple[int, ...]], config: dict[str, Any], where: str, **sizes: Any) -> Self:
        """The arguments of a drafter, with all sizes from tensor shapes.

        Args:
            config: its sizes are ignored, except the vocabulary size if there is a draft vocabulary.
            where: the checkpoint's name, for errors.

        Raises:
            CheckpointError: it is not a recurrent drafter.
        """
        layers = max((int(found[1]) for name in shapes if (found := re.match(r"lm_head\.(\d+)\.", name))), default=0)
        head = shapes.get(f"lm_head.{layers}.weight")
        if head is None:
            raise CheckpointError(
                f"not a drafter: {where} has no lm_head.N.weight; its tensors begin {sorted(shapes)[:3]}"
            )
        exit_dim = head[-1]
        if rnn := "rnn_w.weight" in shapes:
            hidden_size = shapes["rnn_w.weight"][0]
        else:
            hidden_size = shapes.get("input_proj.weight", head)[-1] // 2
        vocab_size: Any = head[0]
        if DRAFT_IDS in shapes:  # no tensor shows the target's vocabulary size
            vocab_size = config.get("vocab_size")
            if not is_count(vocab_size) or vocab_size < head[0]:
                got = f"at least {head[0]}, got {vocab_size!r:.40}"
                raise CheckpointError(f"{where}: with draft_ids, config.json must say vocab_size, {got}")
        sizes |= {
            "hidden_size": hidden_size,
            "vocab_size": vocab_size,
            "exit_dim": exit_dim,
            "num_draft_layers": layers,
        }
        args = super().derive(shapes, config, where, **sizes, rnn=rnn)
        return replace(args, draft_vocab_size=head[0] if DRAFT_IDS in shapes else None)


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
        blocks: list[nn.Module] = [ResidualBlock(args.exit_dim) for _ in range(args.num_draft_layers)]
        self.lm_head = [*blocks, nn.Linear(args.exit_dim, args.n_guesses, bias=False)]
        if args.rnn:
            self.rnn_u = nn.Linear(args.hidden_size, args.hidden_size)
            self.rnn_w = nn.Linear(args.hidden_size, args.hidden_size, bias=False)
        self.hold_draft_ids()

    def read_token(self, tokens: mx.array, embed: Embed, hidden: mx.array, state: State, depth: int) -> mx.array:
        """(..., D) the state after one more token."""
        return self.advance(embed(tokens).astype(self.dtype), state)

    def advance(self, embedding: mx.array, state: mx.array | None) -> mx.array:
        """The state after one more token.

        Args:
            embedding: (..., D) the target's raw embedding of that token.
            state: (..., D) the state before it, or None for s_0 = 0.
        """
        if "rnn_w" not in self:
            return embedding if state is None else embedding + state
        return nn.silu(self.rnn_w(embedding) + (self.rnn_u.bias if state is None else self.rnn_u(state)))

    def features(self, hidden: mx.array, state: mx.array, depth: int = 0) -> mx.array:
        """(..., X) the head's input.

        Args:
            hidden: (..., D) the target's hidden state; broadcast against `state`.
            state: (..., D).
            depth: not used.
        """
        hidden = mx.broadcast_to(hidden.astype(state.dtype), state.shape)
        y = mx.concatenate([hidden, state], axis=-1)
        if "input_proj" in self:
            y = self.input_proj(y)
        for block in self.lm_head[:-1]:
            y = block(y)
        return y

    def set_axes(self, axes: mx.array) -> None:
        """Takes the axes in which its output matrix is initialised, so that features along them predict the target's
        choice."""
        self._axes = axes[:, : self.args.exit_dim]

    @property
    def output_layers(self) -> list[nn.Module]:
        return self.lm_head[-1:]

    def find_part(self, name: str) -> str:
        if name.startswith("rnn_"):
            return "rnn"
        return "head" if name == f"lm_head.{self.args.num_draft_layers}" else "blocks"
