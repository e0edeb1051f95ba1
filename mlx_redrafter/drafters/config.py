"""A drafter's config: what it says, and what it and the tensors must say before anything is made of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, MISSING, dataclass, fields, replace
from typing import Any, Self, TypeVar

import mlx.core as mx
import numpy as np

from ..engine.model_parts import AFTER_NORM, BEFORE_NORM
from ..engine.plan import MAX_DRAFT_DEPTH
from ..errors import CheckpointError, one_line

MAX_SIZE, MAX_COUNT = 2**24, 256
"""More than any width or vocabulary, and any number of heads or layers: larger ones in a config are errors."""

DRAFT_IDS = "draft_ids"
"""The tensor that names the tokens a drafter can guess."""


@dataclass(frozen=True)
class DrafterArgs:
    """What the `config.json` of every drafter says, in its names.

    Attributes:
        hidden_size: D, the target's.
        vocab_size: V, the target's.
        model_type: the kind.
        draft_depth: how many tokens it should draft when nothing else is asked for; None when it does not say.
        base_model: the target it was trained for, a path or hub id; None when it does not say.
        draft_vocab_size: how many tokens it can guess, which `draft_ids` names; None for all.
        acceptance: for each depth, the shares of positions at which its first, second, ... guess was right when it was
            trained; None when it does not say.
        hidden_state: which of the target's hidden states it reads; None for `AFTER_NORM`. With the wrong one hardly
            any guess is right.
    """

    hidden_size: int
    vocab_size: int
    _: KW_ONLY
    model_type: str
    draft_depth: int | None = None
    base_model: str | None = None
    draft_vocab_size: int | None = None
    acceptance: list[list[float]] | None = None
    hidden_state: str | None = None

    @property
    def n_guesses(self) -> int:
        """V', how many tokens it can guess: the rows of its head."""
        return self.vocab_size if self.draft_vocab_size is None else self.draft_vocab_size

    @property
    def max_depth(self) -> int | None:
        """How many tokens it can draft at most; None for any number."""
        return None

    @property
    def min_layers(self) -> int:
        """How many layers a target must have at least, so that it has those whose outputs are read."""
        return 0

    @property
    def before_norm(self) -> bool:
        """Whether it reads the target's hidden state from before the final norm."""
        return self.hidden_state == BEFORE_NORM

    @property
    def state_name(self) -> str:
        """Which of the target's hidden states it reads."""
        return self.hidden_state or AFTER_NORM

    def describe(self) -> str:
        """Its own sizes, in a few words."""
        raise NotImplementedError

    def describe_states(self) -> str:
        """Which of the target's hidden states it reads."""
        return f"the hidden state {'before' if self.before_norm else 'after'} the final norm"

    def explain_useless(self) -> str:
        """What to look at where it guesses nothing right."""
        return (
            "Is it trained for this model, and are its weights sound in this dtype? It reads "
            f"{self.describe_states()}: mlx_redrafter.doctor tries others"
        )

    def try_others(self, n_layers: int) -> dict[str, Self]:
        """The same with other hidden states: what to record -> the arguments.

        Args:
            n_layers: of the target.
        """
        other = AFTER_NORM if self.before_norm else BEFORE_NORM
        return {f"hidden_state {other}": replace(self, hidden_state=other)}

    def to_dict(self) -> dict[str, Any]:
        """The keys of a `config.json` that have a value."""
        return {key: value for key, value in vars(self).items() if value is not None}

    @classmethod
    def from_dict(cls, config: dict[str, Any]) -> Self:
        """The arguments named in a `config.json`; other keys are ignored."""
        names = {field.name for field in fields(cls)}
        return cls(**{key: value for key, value in config.items() if key in names})

    @classmethod
    def derive(cls, shapes: Mapping[str, tuple[int, ...]], config: dict[str, Any], where: str) -> Self:
        """Its sizes, from a config and from the shapes of its tensors, which its weights are compared with.

        Args:
            where: the checkpoint's name, for errors.

        Raises:
            CheckpointError: a size is missing or none.
        """
        sizes = {}
        for field in fields(cls):
            value = config.get(field.name, field.default)
            if value is MISSING or (value is None and field.default is MISSING):
                raise CheckpointError(f"{where} has no config.json that says {field.name}")
            if field.type == "bool" and type(value) is not bool:
                raise CheckpointError(f"{where}/config.json: expected {field.name} true or false, got {value!r:.40}")
            least = 0 if field.name.endswith("_id") else 1
            most = MAX_SIZE if field.name.endswith(("_size", "_dim", "_id", "width", "rank")) else MAX_COUNT
            if field.type == "int" and not (type(value) is int and least <= value <= most):
                raise CheckpointError(
                    f"{where}/config.json: expected {field.name} from {least} to {most}, got {value!r:.40}"
                )
            if field.type == "float" and not (isinstance(value, (int, float)) and 0 < value < math.inf):
                raise CheckpointError(
                    f"{where}/config.json: expected {field.name} to be a number above 0, got {value!r:.40}"
                )
            if field.type in ("int", "bool", "float"):
                sizes[field.name] = value
        if DRAFT_IDS in shapes:
            sizes["draft_vocab_size"] = shapes[DRAFT_IDS][0]
        return cls(**sizes)


def read_optional(
    config: dict[str, Any], names: Sequence[str], is_valid: Callable[[Any], bool], expected: str, where: str
) -> dict[str, Any]:
    """The values of keys that a config need not have, None without one.

    Raises:
        CheckpointError: a value is not what is expected.
    """
    found = {name: config.get(name) for name in names}
    for name, value in found.items():
        if value is not None and not is_valid(value):
            raise CheckpointError(f"{where}/config.json: expected {name} to be {expected}, got {value!r:.40}")
    return found


def is_positive(value: Any) -> bool:
    """Whether a value is a number above 0."""
    return type(value) in (int, float) and 0 < value < math.inf


def is_count(value: Any) -> bool:
    """Whether a value is a size."""
    return type(value) is int and 0 < value <= MAX_SIZE


def is_list_of(kind: Any, value: Any) -> bool:
    """Whether a value is a list of such items, none of them negative."""
    return isinstance(value, list) and all(type(item) is kind and item >= 0 for item in value)


@dataclass(frozen=True)
class LayerArgs(DrafterArgs):
    """The sizes of a drafter that has transformer layers, in the names of their configs.

    Attributes:
        width: H, of its own rows.
        rope_scaling: as mlx-lm's models take it; None for none.
        rope_traditional: whether the rotation turns pairs of neighbours, not of halves.
        capture_layers: the layers whose outputs it reads, in this order, from 0; None for what the kind's default is.
    """

    width: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    _: KW_ONLY
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    rope_traditional: bool = False
    rope_scaling: dict[str, Any] | None = None
    capture_layers: list[int] | None = None

    @classmethod
    def derive(cls, shapes: Mapping[str, tuple[int, ...]], config: dict[str, Any], where: str) -> Self:
        """Its sizes, from the config; see `DrafterArgs.derive`."""
        args = super().derive(shapes, config, where)
        scaling, layers = config.get("rope_scaling"), config.get("capture_layers")
        if args.num_attention_heads % args.num_key_value_heads:
            heads = f"{args.num_attention_heads} heads, {args.num_key_value_heads} of keys and values"
            raise CheckpointError(f"{where}/config.json: expected a whole number of heads for each, got {heads}")
        if scaling is not None and not isinstance(scaling, dict):
            raise CheckpointError(f"{where}/config.json: expected rope_scaling to be an object, got {scaling!r:.40}")
        if layers is not None and not is_list_of(int, layers):
            raise CheckpointError(f"{where}/config.json: expected capture_layers as layer numbers, got {layers!r:.40}")
        return replace(args, rope_scaling=scaling, capture_layers=layers)

    @property
    def min_layers(self) -> int:
        """See `DrafterArgs.min_layers`."""
        return 1 + max(self.capture_layers or [-1])

    def describe_states(self) -> str:
        """See `DrafterArgs.describe_states`."""
        if self.capture_layers is None:
            return super().describe_states()
        return f"the outputs of layers {', '.join(map(str, self.capture_layers))}"

    def try_others(self, n_layers: int) -> dict[str, Self]:
        """See `DrafterArgs.try_others`: layers that are one lower or higher, as projects count them differently."""
        if self.capture_layers is None:
            return super().try_others(n_layers)
        shifted = ([layer + by for layer in self.capture_layers] for by in (-1, 1))
        return {
            f"capture_layers {layers}": replace(self, capture_layers=layers)
            for layers in shifted
            if min(layers) >= 0 and max(layers) < n_layers
        }

    def describe(self) -> str:
        """Its own sizes, in a few words."""
        return f"width {self.width}, heads {self.num_attention_heads} of {self.head_dim}, MLP {self.intermediate_size}"

    def for_mlx_lm(self) -> dict[str, Any]:
        """The keys of a config that mlx-lm's layer classes ask for."""
        names = ("intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "rms_norm_eps")
        own = {name: getattr(self, name) for name in (*names, "rope_theta", "rope_traditional", "rope_scaling")}
        return own | {"hidden_size": self.width, "vocab_size": self.vocab_size, "num_hidden_layers": 1}


Args = TypeVar("Args", bound=DrafterArgs)


def derive_args(kind: type[Args], shapes: Mapping[str, tuple[int, ...]], config: dict[str, Any], where: str) -> Args:
    """A drafter's sizes, see `DrafterArgs.derive`, and its defaults, from the config.

    Args:
        kind: the arguments of the kind of drafter that it must be.
        where: the checkpoint's name, for errors.

    Raises:
        CheckpointError: not a drafter of this kind, or a default out of its range.
    """
    for name, shape in shapes.items():
        if not shape:
            raise CheckpointError(f"{where}: expected {name} to be an array, got a single number")
    defaults: dict[str, Any] = {
        name: config.get(name) for name in ("draft_depth", "base_model", "acceptance", "hidden_state")
    }
    depth, base, acceptance, hidden_state = defaults.values()
    for name, valid, expected in (
        ("draft_depth", type(depth) is int and 1 <= depth <= MAX_DRAFT_DEPTH, f"from 1 to {MAX_DRAFT_DEPTH}"),
        ("base_model", isinstance(base, str) and base.isprintable(), "a name"),
        ("acceptance", _is_acceptance(acceptance), "a row of shares from 0 to 1 for each depth"),
        ("hidden_state", hidden_state in (AFTER_NORM, BEFORE_NORM), f"{AFTER_NORM} or {BEFORE_NORM}"),
    ):
        if not valid and config.get(name) is not None:
            raise CheckpointError(f"{where}/config.json: {name} must be {expected}, got {_shorten(config[name])}")
    return replace(kind.derive(shapes, config, where), **defaults)


def _is_acceptance(value: Any) -> bool:
    try:
        shares = np.array(value)
    except ValueError:  # rows of different lengths
        return False
    return shares.ndim == 2 and shares.size > 0 and shares.dtype.kind in "fi" and bool((abs(shares - 0.5) <= 0.5).all())


def _shorten(value: object) -> str:
    return one_line(repr(value))[:40]


def compare_config(sizes: Mapping[str, Any], config: dict[str, Any]) -> Iterator[str]:
    """A clause for each size that the config gives otherwise than the tensors; -1 and null give none.

    Args:
        sizes: what the tensors say, by the config's names.
    """
    for key, value in sizes.items():
        given = config.get(key, -1)
        if given not in (-1, None, value):
            yield f"says {key} {_shorten(given)}, its tensors say {value}"


def check_draft_ids(ids: mx.array, vocab_size: int, where: str) -> None:
    """Checks a draft vocabulary: (V',) token ids, all different.

    Raises:
        CheckpointError: saying what they are.
    """
    expected = f"{where}: expected {DRAFT_IDS} "
    if ids.dtype != mx.int32 or ids.ndim != 1:
        raise CheckpointError(f"{expected}as a row of int32, got {ids.dtype} of shape {ids.shape}")
    known = np.array(ids)
    if known.min() < 0 or known.max() >= vocab_size:
        raise CheckpointError(f"{expected}from 0 to {vocab_size - 1}, got {known.min()} to {known.max()}")
    if len(np.unique(known)) != len(known):
        raise CheckpointError(f"{where}: {DRAFT_IDS} names a token twice")
