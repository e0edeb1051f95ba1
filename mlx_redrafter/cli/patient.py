"""The two models of a pair as far as costs depend on them, and whether their numbers are."""

from __future__ import annotations

from typing import Literal, NamedTuple, cast

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from ..checkpoints import dtype_name
from ..drafters.recurrent import Drafter
from ..engine.supported_models import compute_dtype
from ..engine.target import Target, model_name

Half = Literal["target", "drafter"]
"""One of a pair."""


class Patient(NamedTuple):
    """A model as far as its costs depend on it.

    Attributes:
        name: of the target its module in mlx-lm, of a drafter its sizes.
        dtype: it computes in.
        quantized: whether some of its weights are.
        weight_bytes: of all its tensors.
    """

    name: str
    dtype: str
    quantized: bool
    weight_bytes: int


def target_of(model: nn.Module) -> Patient:
    """A target, as a patient."""
    return Patient(model_name(model), dtype_name(compute_dtype(model)), *weights(model))


def drafter_of(drafter: Drafter) -> Patient:
    """A drafter, as a patient."""
    return Patient(sizes_told(drafter), dtype_name(drafter.dtype), *weights(drafter))


def weights(module: nn.Module) -> tuple[bool, int]:
    """(whether some are quantised, their bytes)."""
    flat = cast(list[tuple[str, mx.array]], tree_flatten(module.parameters()))
    return any(name.endswith(".scales") for name, _ in flat), sum(array.nbytes for _, array in flat)


def sizes_told(drafter: Drafter) -> str:
    """The sizes of a drafter in words."""
    args = drafter.args
    blocks = f"{args.num_draft_layers} block{'s' * (args.num_draft_layers != 1)}"
    guessed = "" if args.draft_vocab_size is None else f", draft vocabulary {args.draft_vocab_size}"
    return f"exit_dim {args.exit_dim}, {blocks}{guessed}"


def not_finite(model: nn.Module, drafter: Drafter) -> Half | None:
    """Which of the two says something behind a few tokens that is no number, in the dtype it has."""
    target = Target(model)
    tokens = mx.arange(16) % drafter.args.vocab_size
    logits, hidden = target.forward(tokens, want_hidden=True)
    assert hidden is not None
    # Some models say -inf of tokens that they never say.
    if not mx.isfinite(hidden).all().item() or mx.isnan(logits).any().item() or mx.isposinf(logits).any().item():
        return "target"
    embedded = target.embed(tokens).astype(drafter.dtype)
    state = drafter.advance(embedded, drafter.advance(embedded, None))
    made = drafter.lm_head[-1](drafter.features(hidden.astype(drafter.dtype), state))
    return None if mx.isfinite(made).all().item() else "drafter"
