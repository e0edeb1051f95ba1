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

import mlx.core as mx
import mlx.nn as nn

from ..engine.beam_search import State
from . import mlp_speculator
from .checkpoint import Checkpoint, Config
from .mlp_speculator import BiasedRMSNorm, Speculator
from .protocol import Embed

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
    return "forget_emb.0.weight" in names


def sanitize(checkpoint: Checkpoint, model: nn.Module | None) -> Config:
    """Renames a published speculator's tensors to our names, and joins its four projections; returns our config."""
    config = checkpoint.config
    if not config.get("tie_lstm_embs", True) or not config.get("tie_weights", True):
        raise ValueError("expected tie_lstm_embs and tie_weights true for an LSTM speculator")
    checkpoint.rename(NAMES)
    for step in ("proj.0", "proj.1"):
        checkpoint.tensors[f"{step}.weight"] = mx.concatenate([checkpoint.pop(f"{step}.{gate}") for gate in GATES])
    rows, hidden_size = checkpoint.shape("proj.0.weight")
    vocab_size = checkpoint.shape("emb.weight")[0]
    sizes = {"hidden_size": hidden_size, "vocab_size": vocab_size, "inner_dim": rows // len(GATES)}
    return config | sizes | {"model_type": MODEL_TYPE}


@dataclass(frozen=True)
class DrafterArgs(mlp_speculator.DrafterArgs):
    """The config of an Arctic LSTM: that of an MLP speculator with tied weights."""

    tie_weights: bool = True
    model_type: str = field(default=MODEL_TYPE, kw_only=True)


class Drafter(Speculator):
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
        s, cell = (self.args.start(hidden.astype(self.dtype)), None) if state is None else state
        embedded = self.args.embedding_weight * self.emb(tokens)
        gates = mx.unflatten(self.proj[0 if state is None else 1](s), -1, (len(GATES), -1)) + embedded[..., None, :]
        kept, taken, given = (mx.sigmoid(gates[..., gate, :]) for gate in range(3))
        new = nn.gelu(self.cell_ln(gates[..., 3, :])) * taken
        cell = new if cell is None else cell * kept + new
        return nn.gelu(self.state_ln(cell)) * given, cell

    def features(self, hidden: mx.array, state: State, depth: int) -> mx.array:
        """(..., I) the state s."""
        return super().features(hidden, state[0], depth)

    @property
    def output_layers(self) -> list[nn.Module]:
        return [self.head]
