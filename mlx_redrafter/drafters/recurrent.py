"""The recurrent drafter: a small network that guesses the next tokens from the target's last hidden state.

    s_t = SiLU(rnn_w(e_t) + rnn_u(s_{t-1}))         s_0 = 0; e_t: the target's raw embedding of the token before
    y   = concat[h, s_t]                            h: the target's hidden state, the same for the whole draft
    y   = input_proj(y)                             only when exit_dim != 2 * hidden_size
    y   = y + SiLU(linear(y))                       num_draft_layers times
    logits = head(y)                                of every token, or of those that draft_ids names

Source: Apple's ml-recurrent-drafter, recurrent_drafting/modeling_drafter.py::Drafter; arXiv 2403.09919, section 3.
Parameter names are those of its checkpoints, so that its files load as they are.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import mlx.core as mx
import mlx.nn as nn

MODEL_TYPE = "recurrent_drafting_drafter"


@dataclass(frozen=True)
class DrafterArgs:
    """What a drafter's `config.json` says of it, in its names.

    Attributes:
        hidden_size: D, the target's.
        vocab_size: V, the target's.
        exit_dim: X, the width of the residual blocks and the head; 2 * D needs no input projection.
        num_draft_layers: how many residual blocks stand before the head.
        rnn: whether the state is gated as above; if not, s_t = e_t + s_{t-1}.
        draft_depth: how many tokens it should draft when nothing else is asked for; None when it does not say.
        base_model: the target it was trained for, a path or hub id; None when it does not say.
        draft_vocab_size: how many tokens it can guess, which `draft_ids` names; None for all.
        acceptance: for each depth, the shares of positions at which its first, second, ... guess was right when it was
            trained; None when it does not say.
    """

    hidden_size: int
    vocab_size: int
    exit_dim: int
    num_draft_layers: int
    rnn: bool = True
    model_type: str = MODEL_TYPE
    draft_depth: int | None = None
    base_model: str | None = None
    draft_vocab_size: int | None = None
    acceptance: list[list[float]] | None = None

    @property
    def n_guesses(self) -> int:
        """V', how many tokens it can guess: the rows of its head."""
        return self.vocab_size if self.draft_vocab_size is None else self.draft_vocab_size

    def to_dict(self) -> dict[str, Any]:
        """The keys of a `config.json` that have a value."""
        return {key: value for key, value in vars(self).items() if value is not None}

    @classmethod
    def from_dict(cls, config: dict[str, Any]) -> DrafterArgs:
        """The arguments named in a `config.json`; other keys are ignored."""
        names = {field.name for field in fields(cls)}
        return cls(**{key: value for key, value in config.items() if key in names})


class ResidualBlock(nn.Module):
    """y + SiLU(linear(y)) on (..., X) arrays."""

    def __init__(self, dims: int) -> None:
        super().__init__()
        self.linear = nn.Linear(dims, dims)

    def __call__(self, y: mx.array) -> mx.array:
        return y + nn.silu(self.linear(y))


class Drafter(nn.Module):
    """The drafter's weights and its two stages; it keeps nothing between calls."""

    def __init__(self, args: DrafterArgs) -> None:
        super().__init__()
        self.args = args
        if args.exit_dim != 2 * args.hidden_size:
            self.input_proj = nn.Linear(2 * args.hidden_size, args.exit_dim)
        blocks: list[nn.Module] = [ResidualBlock(args.exit_dim) for _ in range(args.num_draft_layers)]
        self.lm_head = [*blocks, nn.Linear(args.exit_dim, args.n_guesses, bias=False)]
        if args.rnn:
            self.rnn_u = nn.Linear(args.hidden_size, args.hidden_size)
            self.rnn_w = nn.Linear(args.hidden_size, args.hidden_size, bias=False)
        if args.draft_vocab_size is not None:
            self.draft_ids = mx.arange(args.n_guesses, dtype=mx.int32)
            self.freeze(recurse=False, keys=["draft_ids"])

    def advance(self, embedding: mx.array, state: mx.array | None) -> mx.array:
        """The state after one more token.

        Args:
            embedding: (..., D) the target's raw embedding of that token.
            state: (..., D) the state before it, or None for s_0 = 0.
        """
        if "rnn_w" not in self:
            return embedding if state is None else embedding + state
        return nn.silu(self.rnn_w(embedding) + (self.rnn_u.bias if state is None else self.rnn_u(state)))

    def logits(self, hidden: mx.array, state: mx.array) -> mx.array:
        """(..., V) float32 logits of the token that follows `state`; minus infinity for a token it cannot guess.

        Args:
            hidden: (..., D) the target's hidden state; broadcast against `state`.
            state: (..., D).
        """
        guesses = self.lm_head[-1](self.features(hidden, state)).astype(mx.float32)
        if "draft_ids" not in self:
            return guesses
        everything = mx.full((*guesses.shape[:-1], self.args.vocab_size), -mx.inf)
        return mx.put_along_axis(everything, mx.broadcast_to(self.draft_ids, guesses.shape), guesses, axis=-1)

    def features(self, hidden: mx.array, state: mx.array) -> mx.array:
        """(..., X) what the head is applied to; arguments as for `logits`."""
        hidden = mx.broadcast_to(hidden.astype(state.dtype), state.shape)
        y = mx.concatenate([hidden, state], axis=-1)
        if "input_proj" in self:
            y = self.input_proj(y)
        for block in self.lm_head[:-1]:
            y = block(y)
        return y

    def step(self, embedding: mx.array, state: mx.array | None, hidden: mx.array) -> tuple[mx.array, mx.array]:
        """(the state after one more token, the features of what follows it)."""
        state = self.advance(embedding, state)
        return state, self.features(hidden, state)

    @property
    def dtype(self) -> mx.Dtype:
        """The dtype its states are computed in."""
        head = self.lm_head[-1]
        dtype: mx.Dtype = head.scales.dtype if "scales" in head else head.weight.dtype
        return dtype if mx.issubdtype(dtype, mx.floating) else mx.float32
