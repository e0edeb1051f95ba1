"""Drafter configs, validated against tensor shapes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import KW_ONLY, MISSING, dataclass, field, fields, replace
from typing import Any, Self

import mlx.nn as nn
import numpy as np
from mlx_lm.models.rope_utils import initialize_rope

from ..engine.model_parts import AFTER_NORM, BEFORE_NORM
from ..engine.plan import MAX_DRAFT_DEPTH
from ..errors import CheckpointError, join_lines
from .checkpoint import DRAFT_IDS, MAX_COUNT, MAX_SIZE, Checkpoint, Config, is_count


def get_object(config: Config, key: str, where: str) -> Config:
    """The object at a key of a config; empty if the key is missing.

    Args:
        where: the checkpoint's name, for errors.

    Raises:
        CheckpointError: the value is not an object.
    """
    value = config.get(key)
    if value is not None and not isinstance(value, dict):
        raise CheckpointError(f"{where}/config.json: expected {key} to be an object, got {_shorten(value)}")
    return value or {}


def flatten(config: Config, own: str, where: str) -> Config:
    """A published config with its nested parts merged in, and `base_model`.

    Args:
        own: the key of the drafter's part, which takes precedence over the others.
        where: the checkpoint's name, for errors.

    Raises:
        CheckpointError: a part is not an object.
    """
    parts = get_object(config, "transformer_layer_config", where), config, get_object(config, own, where)
    verifier = get_object(get_object(config, "speculators_config", where), "verifier", where)
    base = {"base_model": verifier.get("name_or_path") or config.get("base_model_name_or_path")}
    found = {key: value for part in parts for key, value in part.items() if value is not None}
    rope = get_object(found, "rope_parameters", where)
    return found | {"rope_parameters": get_object(rope, "full_attention", where) or rope} | base


def check_states(n_inputs: int, n_states: int, sizes: Iterable[Any], where: str) -> None:
    """Compares the number of target states in a config with the input width of a head's `fc`.

    Args:
        n_inputs: the input width of `fc`.
        n_states: how many states the config names.
        sizes: possible sizes of a state, the most certain first; None for unknown ones.
        where: the checkpoint's name, for errors.

    Raises:
        CheckpointError: they do not fit.
    """
    for size in filter(is_count, sizes):
        if n_inputs % size == 0 and n_inputs // size != n_states:
            expected = f"{n_inputs // size} layers, as fc.weight reads {n_inputs} numbers, {size} of each"
            raise CheckpointError(f"{where}/config.json: expected {expected}, got {n_states}")


def find_rope_type(rope: Config) -> str:
    """The type of a RoPE, read as mlx-lm reads it."""
    return str(rope.get("type") or rope.get("rope_type") or "default")


def declare(default: Any, is_valid: Callable[[Any], bool], expected: str) -> Any:
    """A config field, which may be None if that is its default; `expected` describes valid values in errors."""
    return field(default=default, metadata={"is_valid": is_valid, "expected": expected})


def size(default: Any = MISSING, *, least: int = 1, most: int = MAX_SIZE) -> Any:
    """A field for an integer, such as a width, a vocabulary size or a token id."""
    return declare(default, lambda value: type(value) is int and least <= value <= most, f"from {least} to {most}")


def count(default: Any = MISSING, *, least: int = 1) -> Any:
    """A field for a number of layers, heads or guesses."""
    return size(default, least=least, most=MAX_COUNT)


def number(default: Any = MISSING) -> Any:
    """A field for a number above 0."""
    return declare(default, is_positive, "to be a number above 0")


def flag(default: bool) -> Any:
    """A field for true or false."""
    return declare(default, lambda value: type(value) is bool, "true or false")


def layer_numbers() -> Any:
    """A field for a list of the target's layers, from 0; None by default."""
    return declare(None, lambda value: is_list_of(int, value), "as layer numbers")


def nested(default: Any = None) -> Any:
    """A field for an object."""
    return declare(default, lambda value: isinstance(value, dict), "to be an object")


def is_positive(value: Any) -> bool:
    """Whether a value is a number above 0."""
    return type(value) in (int, float) and 0 < value < math.inf


def is_list_of(kind: Any, value: Any) -> bool:
    """Whether a value is a list of items of this type, none of them negative."""
    return isinstance(value, list) and all(type(item) is kind and item >= 0 for item in value)


def is_acceptance(value: Any) -> bool:
    """Whether a value is a list of rows of the same length with shares from 0 to 1."""
    try:
        shares = np.array(value)
    except ValueError:  # rows of different lengths
        return False
    return shares.ndim == 2 and shares.size > 0 and shares.dtype.kind in "fi" and bool((abs(shares - 0.5) <= 0.5).all())


@dataclass(frozen=True)
class DrafterArgs:
    """The `config.json` of every drafter.

    Attributes:
        hidden_size: D, the target's.
        vocab_size: V, the target's.
        model_type: the kind.
        draft_depth: how many tokens it drafts by default; None if the config does not say.
        base_model: the target it was trained for, a path or hub id; None if the config does not say.
        draft_vocab_size: how many tokens it can guess, those in `draft_ids`; None for all.
        acceptance: for each depth, the shares of positions at which its first, second, ... guess was right in training;
            None if the config does not say.
        hidden_state: which of the target's hidden states it reads; None for `AFTER_NORM`. With the wrong one, hardly
            any guess is right.
    """

    hidden_size: int = size()
    vocab_size: int = size()
    _: KW_ONLY
    model_type: str
    draft_depth: int | None = size(None, most=MAX_DRAFT_DEPTH)
    base_model: str | None = declare(None, lambda value: isinstance(value, str) and value.isprintable(), "to be a name")
    draft_vocab_size: int | None = None
    acceptance: list[list[float]] | None = declare(
        None, is_acceptance, "to be a row of shares from 0 to 1 for each depth"
    )
    hidden_state: str | None = declare(
        None, lambda value: value in (AFTER_NORM, BEFORE_NORM), f"to be {AFTER_NORM} or {BEFORE_NORM}"
    )

    @property
    def n_guesses(self) -> int:
        """V', how many tokens it can guess, the rows of its head."""
        return self.vocab_size if self.draft_vocab_size is None else self.draft_vocab_size

    @property
    def max_depth(self) -> int | None:
        """The most tokens that it can draft; None for any number."""
        return None

    @property
    def min_layers(self) -> int:
        """The fewest layers that a target must have for all layers to exist whose outputs are read."""
        return 0

    @property
    def reads_before_norm(self) -> bool:
        """Whether it reads the target's hidden state before the final norm."""
        return self.hidden_state == BEFORE_NORM

    @property
    def state_name(self) -> str:
        """The name of the target's hidden state that it reads."""
        return self.hidden_state or AFTER_NORM

    def describe(self) -> str:
        """A short description of its sizes."""
        raise NotImplementedError

    def describe_states(self) -> str:
        """The target's hidden states that it reads, in words."""
        return f"the hidden state {'before' if self.reads_before_norm else 'after'} the final norm"

    def explain_useless(self) -> str:
        """What to check if no guess is right."""
        return f"Was it trained for this model, and do its weights fit this dtype? It reads {self.describe_states()}"

    def list_variants(self, n_layers: int) -> dict[str, Self]:
        """Variants of these arguments that read other hidden states, by the config entry that differs.

        Args:
            n_layers: how many layers the target has.
        """
        other = AFTER_NORM if self.reads_before_norm else BEFORE_NORM
        return {f"hidden_state {other}": replace(self, hidden_state=other)}

    def to_dict(self) -> dict[str, Any]:
        """The contents of a `config.json`, without fields that are None."""
        return {key: value for key, value in vars(self).items() if value is not None}

    @classmethod
    def from_dict(cls, config: dict[str, Any]) -> Self:
        """The arguments in a `config.json`; other keys are ignored."""
        names = {field.name for field in fields(cls)}
        return cls(**{key: value for key, value in config.items() if key in names})

    @classmethod
    def derive(cls, shapes: Mapping[str, tuple[int, ...]], config: dict[str, Any], where: str, **sizes: Any) -> Self:
        """The arguments from a config and tensor shapes; the config supplies only what shapes cannot.

        Args:
            where: the checkpoint's name, for errors.
            sizes: fields that follow from the shapes.

        Raises:
            CheckpointError: a field is missing or invalid, or fields contradict each other.
        """
        found: dict[str, Any] = {}
        for each in fields(cls):
            value = config.get(each.name)
            if not each.metadata or each.name in sizes or (value is None and each.default is not MISSING):
                continue
            if value is None:
                raise CheckpointError(f"expected {each.name} in {where}/config.json, got none")
            if not each.metadata["is_valid"](value):
                expected = f"{each.name} {each.metadata['expected']}"
                raise CheckpointError(f"{where}/config.json: expected {expected}, got {_shorten(value)}")
            found[each.name] = value
        if DRAFT_IDS in shapes:
            found["draft_vocab_size"] = shapes[DRAFT_IDS][0]
        args = cls(**found, **sizes)
        args.check(where)
        return args

    def check(self, where: str) -> None:
        """Checks that the fields are consistent.

        Args:
            where: the checkpoint's name, for errors.

        Raises:
            CheckpointError: they are not.
        """

    @classmethod
    def from_published(cls, checkpoint: Checkpoint, model: nn.Module | None) -> Self:
        """The arguments of a published head; renames its tensors to our names.

        Args:
            model: the target; None if not known.

        Raises:
            CheckpointError: the head is not supported, or its config does not fit its tensors.
        """
        raise NotImplementedError

    def list_config_values(self) -> dict[str, Any]:
        """The values that a published config must not contradict, by the config's keys."""
        return vars(self)


@dataclass(frozen=True)
class LayerArgs(DrafterArgs):
    """The config of a drafter with transformer layers.

    Attributes:
        width: H, the width of its rows.
        rope_scaling: as in mlx-lm's models; None for none.
        rope_traditional: whether RoPE pairs adjacent dimensions instead of halves.
        capture_layers: the target's layers whose outputs it reads, in order, from 0; None for the kind's default.
    """

    width: int = size()
    intermediate_size: int = size()
    num_attention_heads: int = count()
    num_key_value_heads: int = count()
    head_dim: int = size()
    _: KW_ONLY
    rms_norm_eps: float = number(1e-6)
    rope_theta: float = number(10000.0)
    rope_traditional: bool = flag(False)
    rope_scaling: dict[str, Any] | None = nested()
    capture_layers: list[int] | None = layer_numbers()

    def check(self, where: str) -> None:
        if self.num_attention_heads % self.num_key_value_heads:
            heads = f"num_key_value_heads, {self.num_key_value_heads}, got {self.num_attention_heads}"
            raise CheckpointError(f"{where}/config.json: expected num_attention_heads to be a multiple of {heads}")
        if self.rope_scaling:
            try:
                initialize_rope(self.head_dim, self.rope_theta, self.rope_traditional, self.rope_scaling, MAX_SIZE)
            except (ArithmeticError, AssertionError, KeyError, TypeError, ValueError) as error:
                expected = f"a RoPE that mlx-lm supports, got {self.rope_scaling!r:.80}: {join_lines(error)}"
                raise CheckpointError(f"{where}/config.json: expected {expected}") from error

    @classmethod
    def read_layer(cls, checkpoint: Checkpoint, layer: str) -> dict[str, Any]:
        """The fields of a published head's first transformer layer, from its tensors' shapes and the config.

        Args:
            layer: the prefix of its tensors' names.

        Raises:
            CheckpointError: tensors are missing, or not matrices.
        """
        config = checkpoint.config
        width, heads = checkpoint.matrix(f"{layer}.self_attn.o_proj.weight")[1], config.get("num_attention_heads")
        head_dim = width // heads if is_count(heads) else None
        scaling, parameters = (get_object(config, f"rope_{key}", checkpoint.where) for key in ("scaling", "parameters"))
        rope = scaling | parameters
        thetas = (rope.pop("rope_theta", None), config.get("rope_theta"), 10000.0)
        keys = checkpoint.matrix(f"{layer}.self_attn.k_proj.weight")[0]
        return {
            "head_dim": head_dim,
            "num_key_value_heads": keys // head_dim if head_dim else None,
            "intermediate_size": checkpoint.matrix(f"{layer}.mlp.gate_proj.weight")[0],
            "rope_theta": next(theta for theta in thetas if theta is not None),
            "rope_scaling": None if find_rope_type(rope) == "default" else rope,
            "rope_traditional": config.get("rope_is_neox_style", config.get("is_neox_style", True)) is False,
        }

    def list_config_values(self) -> dict[str, Any]:
        """The values that a published config must not contradict; its `hidden_size` is the head's own width."""
        return {
            "vocab_size": self.vocab_size,
            "intermediate_size": self.intermediate_size,
            "num_key_value_heads": self.num_key_value_heads,
            "head_dim": self.head_dim,
            "hidden_size": self.width,
            "target_hidden_size": self.hidden_size,
            "draft_vocab_size": self.n_guesses,
        }

    @property
    def min_layers(self) -> int:
        return 1 + max(self.capture_layers or [-1])

    def describe_states(self) -> str:
        if self.capture_layers is None:
            return super().describe_states()
        return f"the outputs of layers {', '.join(map(str, self.capture_layers))}"

    def list_variants(self, n_layers: int) -> dict[str, Self]:
        """Variants whose layers are all one lower or one higher, as projects number layers differently."""
        if self.capture_layers is None:
            return super().list_variants(n_layers)
        shifted = ([layer + by for layer in self.capture_layers] for by in (-1, 1))
        return {
            f"capture_layers {layers}": replace(self, capture_layers=layers)
            for layers in shifted
            if min(layers) >= 0 and max(layers) < n_layers
        }

    def describe(self) -> str:
        return f"width {self.width}, heads {self.num_attention_heads} of {self.head_dim}, MLP {self.intermediate_size}"

    def for_mlx_lm(self) -> dict[str, Any]:
        """The config that mlx-lm's layer classes need."""
        names = ("intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "rms_norm_eps")
        own = {name: getattr(self, name) for name in (*names, "rope_theta", "rope_traditional", "rope_scaling")}
        fixed = {"num_hidden_layers": 1, "max_position_embeddings": MAX_SIZE, "tie_word_embeddings": False}
        return own | fixed | {"hidden_size": self.width, "vocab_size": self.vocab_size}


def _shorten(value: object) -> str:
    return join_lines(repr(value))[:40]
