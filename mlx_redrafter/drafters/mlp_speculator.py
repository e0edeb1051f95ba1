"""The MLP speculator: a stage for each depth of a draft, with its own token embeddings.

    s_0     = h, or R(h) / sqrt(2) with scale_input             R(x) = x / sqrt(mean(x^2) + 1e-6)
    s_{i+1} = GELU(ln_i * R(proj_i(s_i) + a * emb_i[t_i]) + bias_i)       t_0: the root, t_1, ...: the drafted tokens
    logits  = head_i(s_{i+1})                                   of the token after t_i

    a = sqrt((1 - q^2) * inner_dim / 2) / q, q = 2^(-1 / (2 * n_predict)): the state decays over a draft's depth.

With tie_weights all stages share one embedding, norm and head, and all except the first share one projection.

Source: IBM's foundation-model-stack/fms-extras, fms_extras/models/speculator.py; the method "sum_rnn" of Snowflake's
ArcticTraining, projects/arctic_lstm_speculator, is the same. arXiv 2404.19124.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any, Self

import mlx.core as mx
import mlx.nn as nn

from ..engine.beam_search import State
from .checkpoint import Checkpoint, Config
from .protocol import Embed
from .trainable import Project, TrainableArgs, TrainableDrafter, fill_columns, scale_components

MODEL_TYPE = "mlp_speculator"

NAMES = ((r"(emb|proj|ln|head)\.(\d{1,3})(?:\.0)?\.(weight|bias)", r"\1.\2.\3"),)

TIED_NAMES = ((r"(?:(?:emb|ln|head)\.(?!0\.)|proj\.(?![01]\.))\d{1,3}\..*", ""), *NAMES)
"""Names for tied speculators, which may store the shared weights once per stage."""

EPS = 1e-6


def recognises(names: Collection[str], config: Config) -> bool:
    return not {"emb.0.weight", "emb.0.0.weight"}.isdisjoint(names)


def sanitize(checkpoint: Checkpoint, model: nn.Module | None) -> Config:
    config = checkpoint.config
    checkpoint.rename(TIED_NAMES if config.get("tie_weights") is True else NAMES)
    inner_dim, hidden_size = checkpoint.shape("proj.0.weight")
    sizes = {"hidden_size": hidden_size, "vocab_size": checkpoint.shape("emb.0.weight")[0], "inner_dim": inner_dim}
    return config | sizes | {"model_type": MODEL_TYPE}


@dataclass(frozen=True)
class DrafterArgs(TrainableArgs):
    """The config of an MLP speculator.

    Attributes:
        inner_dim: I, the width of its states.
        n_predict: N, the number of stages, which is the number of tokens that it was trained to draft.
        tie_weights: whether the stages share their weights.
        scale_input: whether the hidden state is normed and scaled first.
    """

    inner_dim: int
    n_predict: int
    tie_weights: bool = False
    scale_input: bool = False
    model_type: str = field(default=MODEL_TYPE, kw_only=True)

    @property
    def max_depth(self) -> int:
        return self.n_predict

    @property
    def embedding_weight(self) -> float:
        """a, the weight of an embedding beside the projected state."""
        fade = 2 ** (-0.5 / self.n_predict)
        return math.sqrt((1 - fade**2) * self.inner_dim / 2) / fade

    def start(self, hidden: mx.array) -> mx.array:
        """s_0 of a hidden state (..., D)."""
        return mx.fast.rms_norm(hidden, None, EPS) / math.sqrt(2) if self.scale_input else hidden

    @classmethod
    def for_training(
        cls, hidden_size: int, vocab_size: int, *, depth: int, draft_vocab_size: int | None, **sizes: Any
    ) -> Self:
        """The sizes of a speculator to train, with one stage for each guess. Its states have a quarter of D."""
        inner = max(64, hidden_size // 4 // 32 * 32)
        return cls(hidden_size, vocab_size, inner, depth, True, scale_input=True, draft_vocab_size=draft_vocab_size)

    def describe(self) -> str:
        return f"inner_dim {self.inner_dim}, n_predict {self.n_predict}{', tied' if self.tie_weights else ''}"


class BiasedRMSNorm(nn.Module):
    """weight * R(x) + bias: the original's layer norm, which subtracts no mean."""

    def __init__(self, dims: int) -> None:
        super().__init__()
        self.weight, self.bias = mx.ones((dims,)), mx.zeros((dims,))

    def __call__(self, x: mx.array) -> mx.array:
        return mx.fast.rms_norm(x, self.weight, EPS) + self.bias


class Speculator(TrainableDrafter):
    """What MLP speculators and Arctic LSTMs share: they have their own token embeddings."""

    args: DrafterArgs
    emb: Any

    def start_from(self, project: Project) -> None:
        """Initialises output matrices and embeddings with the principal components of the target's embedding."""
        project = scale_components(project)
        super().start_from(project)
        for embedding in [self.emb] if isinstance(self.emb, nn.Module) else self.emb:
            columns = project(mx.arange(self.args.vocab_size), self.args.inner_dim)
            embedding.weight = fill_columns(embedding.weight, columns)

    def find_part(self, name: str) -> str:
        return {"head": "head", "proj": "rnn", "emb": "embedding"}[name.partition(".")[0]]


class Drafter(Speculator):
    """An MLP speculator. Beyond the last depth, which no plan exceeds, the last stage is repeated."""

    def __init__(self, args: DrafterArgs) -> None:
        super().__init__(args)
        stages, inner = 1 if args.tie_weights else args.n_predict, args.inner_dim
        inputs = [args.hidden_size] + [inner] * (min(2, args.n_predict) if args.tie_weights else args.n_predict)
        self.emb = [nn.Embedding(args.vocab_size, inner) for _ in range(stages)]
        self.proj = [nn.Linear(size, inner, bias=False) for size in inputs[:-1]]
        self.ln = [BiasedRMSNorm(inner) for _ in range(stages)]
        self.head = [nn.Linear(inner, args.n_guesses, bias=False) for _ in range(stages)]
        self.hold_draft_ids()

    def read_token(self, tokens: mx.array, embed: Embed, hidden: mx.array, state: State, depth: int) -> mx.array:
        """(..., I) the state after one more token."""
        state = self.args.start(hidden.astype(self.dtype)) if state is None else state
        embedding, projection, norm = (each[min(depth, len(each) - 1)] for each in (self.emb, self.proj, self.ln))
        return nn.gelu(norm(projection(state) + self.args.embedding_weight * embedding(tokens)))

    @property
    def output_layers(self) -> list[nn.Module]:
        return list(self.head)
