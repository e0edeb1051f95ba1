"""What is measured: a target, its drafter, for mlx-lm's own speculation a draft model, and the prompts they decode."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchLinear
from mlx_lm.tokenizer_utils import TokenizerWrapper
from mlx_lm.utils import compute_bits_per_weight

from mlx_redrafter.checkpoints import load, load_drafter
from mlx_redrafter.demo import load_demo
from mlx_redrafter.drafters.recurrent import Drafter
from mlx_redrafter.engine.sampling import Sampler
from mlx_redrafter.engine.supported_models import find_parts
from mlx_redrafter.errors import RedrafterError, UnsupportedModelError

from .prompts import Prompt, chosen, one_of_each

DEMO_DRAFT_MODEL = Path(__file__).parent / "draft_model"
"""A smaller llama, trained on the demo's files, for mlx-lm's own speculation."""


HEADS = ("lm_head", "output", "embed_out")
"""What mlx-lm's models call their heads."""


@dataclass(frozen=True)
class Subject:
    """Models and prompts.

    Attributes:
        name: of the model, as records say it.
        model: the target.
        drafter: its drafter; None where only plain decoding is measured.
        drafter_name: as records say it.
        draft_model: for mlx-lm's own speculation; None to leave that out.
        draft_model_name: as records say it.
        prompts: what is decoded.
        sampler: how tokens are chosen, where that is not by `temp` and `seed`.
    """

    name: str
    model: nn.Module
    drafter: Drafter | None
    drafter_name: str | None
    draft_model: nn.Module | None
    draft_model_name: str | None
    prompts: list[Prompt]
    sampler: Sampler | None = None

    @property
    def described(self) -> dict[str, Any]:
        """What records say of the models."""
        return {
            "model": self.name,
            "model_bits": round(compute_bits_per_weight(self.model), 3),
            "model_gb": n_bytes(self.model) / 1e9,
            "drafter": self.drafter_name,
            "drafter_bits": round(compute_bits_per_weight(self.drafter), 3) if self.drafter else None,
            "drafter_gb": n_bytes(self.drafter) / 1e9 if self.drafter else None,
        }


def arrays(module: nn.Module) -> list[tuple[str, mx.array]]:
    """The names and arrays of its parameters."""
    return cast(list[tuple[str, mx.array]], tree_flatten(module.parameters()))


def n_bytes(module: nn.Module) -> int:
    """What its parameters take."""
    return sum(array.nbytes for _, array in arrays(module))


def bytes_per_forward(model: nn.Module) -> int | None:
    """The weights that a forward of one token reads; None where only some experts are.

    A table of tokens that is no head, too, is left out: one row of it is read.
    """
    if any(isinstance(each, (SwitchLinear, QuantizedSwitchLinear)) for _, each in model.named_modules()):
        return None
    try:
        table = find_parts(model).embedding
    except UnsupportedModelError:
        return n_bytes(model)
    headed = any(name.rpartition(".")[2] in HEADS for name, _ in model.named_modules())
    return n_bytes(model) - (n_bytes(table) if headed else 0)


def add_subject(
    parser: argparse.ArgumentParser, *, draft_model: bool = True, prompts: Sequence[str] = ("all",)
) -> None:
    """The flags that say what is measured.

    Args:
        draft_model: whether mlx-lm's own speculation takes part.
        prompts: those that are decoded where none are named.
    """
    parser.add_argument("--model", help="a directory or hub id; the packaged demo when not given")
    parser.add_argument("--drafter", help="the drafter that was trained for it")
    if draft_model:
        parser.add_argument(
            "--draft-model", help="a smaller model of the same vocabulary, for mlx-lm's own speculation"
        )
    parser.add_argument(
        "--prompts",
        nargs="+",
        default=list(prompts),
        metavar="NAME",
        help=f"names or categories of prompts, 'all', 'demo', or files (default: {' '.join(prompts)})",
    )


def open_subject(args: argparse.Namespace) -> Subject:
    """The models and prompts of the flags; see `opened`. A draft model is loaded only where they may name one."""
    draft_model = getattr(args, "draft_model", None)
    quick, speculation = getattr(args, "quick", False), hasattr(args, "draft_model")
    return opened(args.model, args.drafter, draft_model, args.prompts, quick=quick, speculation=speculation)


def opened(
    model: str | None = None,
    drafter: str | None = None,
    draft_model: str | None = None,
    prompts: Sequence[str] = ("all",),
    *,
    quick: bool = False,
    speculation: bool = True,
) -> Subject:
    """The models and prompts of these names; the packaged demo when there is no model.

    Args:
        quick: whether one prompt of each category is enough.
        speculation: whether the demo's draft model is loaded where none is named.

    Raises:
        RedrafterError: a model, drafter or prompt that is not to be had.
    """
    if model:
        target, tokenizer = load(model)
        own = load_drafter(drafter, target) if drafter else None
    else:
        target, tokenizer, own = load_demo(drafter)
    asked = draft_model
    if not asked and not model and speculation and DEMO_DRAFT_MODEL.exists():
        asked = str(DEMO_DRAFT_MODEL)
    other = load_draft_model(asked, tokenizer, mx.float32 if not model else None) if asked else None
    found = chosen(list(prompts), tokenizer)
    return Subject(
        name=model or "demo",
        model=target,
        drafter=own,
        drafter_name=None if own is None else drafter or "demo",
        draft_model=other,
        draft_model_name=None if other is None else draft_model or "demo",
        prompts=one_of_each(found) if quick else found,
    )


def load_draft_model(name: str, tokenizer: TokenizerWrapper, dtype: mx.Dtype | None) -> nn.Module:
    """A draft model for a target with this tokenizer, in this dtype; None leaves it in its own.

    Raises:
        RedrafterError: it is not to be had, or has another vocabulary.
    """
    found, own = load(name)
    if own.vocab_size != tokenizer.vocab_size:
        raise RedrafterError(
            f"the draft model must have the target's vocabulary of {tokenizer.vocab_size} tokens, "
            f"{name} has {own.vocab_size}"
        )
    if dtype is not None:
        found.set_dtype(dtype)
        mx.eval(found.parameters())
    return found


def drafter_of(subject: Subject, what: str) -> Drafter:
    """Its drafter.

    Args:
        what: needs one, with its article.

    Raises:
        RedrafterError: there is none.
    """
    if subject.drafter is None:
        raise RedrafterError(f"{what} needs the --drafter that was trained for the model")
    return subject.drafter
