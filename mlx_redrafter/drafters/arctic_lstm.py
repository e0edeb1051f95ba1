"""The Arctic LSTM speculator: an LSTM over the drafted tokens, starting from the target's hidden state.

    s_0 = R(h) / sqrt(2) with scale_input, else h; c_0 = 0       R(x) = x / sqrt(mean(x^2) + 1e-6)
    f, i, o, k = proj(s_t) + a * emb[token]         one embedding for all four; the first step has its own proj
    c_{t+1} = sigmoid(f) * c_t + sigmoid(i) * GELU(cell_ln(k))
    s_{t+1} = sigmoid(o) * GELU(state_ln(c_{t+1}))
    logits  = head(s_{t+1})

The weight a and the norms are the MLP speculator's. The four projections are one matrix here.

Source: Snowflake's ArcticTraining, projects/arctic_lstm_speculator/speculator/speculator.py, method "sum_lstm".
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Self

import mlx.core as mx
import mlx.nn as nn

from ..engine.beam_search import State
from ..errors import CheckpointError
from . import mlp_speculator
from .checkpoint import Checkpoint, Config
from .config import flag
from .mlp_speculator import BiasedRMSNorm, find_part
from .protocol import Embed
from .trainable import Project, TrainableDrafter, fill_columns, scale_components

MODEL_TYPE = "arctic_lstm"

GATES = ("forget", "input", "output", "cell")
"""The order of the gates in a projection's rows."""

NAMES = (
    (r"forget_emb\.0\.weight", "emb.weight"),
    (r"(?:input|output|cell)_emb\.0\.weight|head\.(?!0\.)\d{1,3}\.weight", ""),
    (r"(forget|input|output|cell)_proj\.([01])\.weight", r"proj.\2.\1"),
    (r"(cell_ln|state_ln)\.0\.(weight|bias)", r"\1.\2"),
    (r"head\.0\.weight", "head.weight"),
)


def recognises(names: Collection[str], config: Config) -> bool:
    """Whether a checkpoint holds an Arctic LSTM."""
    return "forget_emb.0.weight" in names


@dataclass(frozen=True)
class DrafterArgs(mlp_speculator.DrafterArgs):
    """The config of an Arctic LSTM: that of an MLP speculator with tied weights."""

    tie_weights: bool = flag(True)
    model_type: str = field(default=MODEL_TYPE, kw_only=True)

    SIZES = ("inner_dim",)

    @classmethod
    def from_published(cls, checkpoint: Checkpoint, model: nn.Module | None) -> Self:
        """The arguments of a published speculator; joins its four projections.

        Raises:
            CheckpointError: the speculator is not supported, or its config does not fit its tensors.
        """
        for key in ("tie_weights", "tie_lstm_embs"):
            if checkpoint.config.get(key, True) is not True:
                got = f"{key} true for an LSTM speculator, got {checkpoint.config[key]!r:.40}"
                raise CheckpointError(f"{checkpoint.where}: expected {got}")
        checkpoint.rename(NAMES, MODEL_TYPE)
        for step in ("proj.0", "proj.1"):
            names = [name for gate in GATES if (name := f"{step}.{gate}") in checkpoint.tensors]
            if len(names) < len(GATES):
                got = f"{len(names)} of the four gates of {step}.weight"
                raise CheckpointError(f"incomplete drafter: {checkpoint.where} holds {got}")
            if len(shapes := {checkpoint.matrix(name) for name in names}) > 1:
                got = f"the matrices of {step} to have one shape, got {sorted(shapes)}"
                raise CheckpointError(f"{checkpoint.where}: expected {got}")
            gates = [checkpoint.read_tensor(name) for name in names]
            checkpoint.tensors[f"{step}.weight"] = mx.concatenate(gates)
            for name in names:
                del checkpoint.tensors[name]
        rows, hidden_size = checkpoint.matrix("proj.0.weight")
        return cls.from_sizes(checkpoint, hidden_size, checkpoint.matrix("emb.weight")[0], rows // len(GATES))

    def describe(self) -> str:
        return f"inner_dim {self.inner_dim}, n_predict {self.n_predict}"


class Drafter(TrainableDrafter):
    """An Arctic LSTM. It has no state between calls."""

    args: DrafterArgs

    def __init__(self, args: DrafterArgs) -> None:
        super().__init__(args)
        inner = args.inner_dim
        self.emb = nn.Embedding(args.vocab_size, inner)
        self.proj = [nn.Linear(size, len(GATES) * inner, bias=False) for size in (args.hidden_size, inner)]
        self.cell_ln, self.state_ln = BiasedRMSNorm(inner), BiasedRMSNorm(inner)
        self.head = nn.Linear(inner, args.n_guesses, bias=False)
        self.hold_draft_ids()

    def read_token(self, tokens: mx.array, embed: Embed, hidden: mx.array, state: State, depth: int) -> State:
        """(s, c), (..., I) each, after one more token."""
        embedded = self.args.embedding_weight * self.emb(tokens)
        if state is None:
            return self.step(self.proj[0](self.args.start(hidden.astype(self.dtype))), embedded, None)
        return self.step(self.proj[1](state[0]), embedded, state[1])

    def features(self, hidden: mx.array, state: State, depth: int) -> mx.array:
        """(..., I) the state s."""
        features: mx.array = state[0]
        return features

    def start_from(self, project: Project) -> None:
        """Initialises output matrix and embedding with the principal components of the target's embedding."""
        project = scale_components(project)
        super().start_from(project)
        columns = project(mx.arange(self.args.vocab_size), self.args.inner_dim)
        self.emb.weight = fill_columns(self.emb.weight, columns)

    def step(self, projected: mx.array, embedded: mx.array, cell: mx.array | None) -> tuple[mx.array, mx.array]:
        """(the next state, the next cell), (..., I) each.

        Args:
            projected: (..., 4 * I) the projected state.
            embedded: (..., I) the token's weighted embedding.
            cell: (..., I), None for zeros.
        """
        gates = mx.unflatten(projected, -1, (len(GATES), -1)) + embedded[..., None, :]
        kept, taken, given = (mx.sigmoid(gates[..., gate, :]) for gate in range(3))
        new = nn.gelu(self.cell_ln(gates[..., 3, :])) * taken
        cell = new if cell is None else cell * kept + new
        return nn.gelu(self.state_ln(cell)) * given, cell

    @property
    def output_layers(self) -> list[nn.Module]:
        return [self.head]

    def find_part(self, name: str) -> str:
        return find_part(name)
