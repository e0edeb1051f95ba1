"""Drafter configs: plain dataclasses, and what published configs have in common."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass, fields
from typing import Any, Self

from ..target.model_parts import AFTER_NORM, BEFORE_NORM
from .checkpoint import Checkpoint, Config
from .layers import ACTIVATIONS, get_rope_type

MAY_BE_ZERO = ("num_draft_layers", "num_layers", "mask_token_id")
"""The numbers of a config that may be 0; all others are at least 1."""

MAX_VOCAB = 1 << 24
"""The largest vocabulary, far above any model's: logits have a number for each token."""

MAX_INT = (1 << 31) - 1
"""The largest number in a shape of MLX."""


def get_object(config: Config, key: str) -> Config:
    """The object at a key of a config; empty if the key is missing."""
    return config.get(key) or {}


def merge_parts(config: Config, own: str) -> Config:
    """A published config with its nested parts merged in, and `base_model`.

    Args:
        own: the key of the drafter's part, which takes precedence over the others.
    """
    parts = get_object(config, "transformer_layer_config"), config, get_object(config, own)
    verifier = get_object(get_object(config, "speculators_config"), "verifier")
    base = {"base_model": verifier.get("name_or_path") or config.get("base_model_name_or_path")}
    return {key: value for part in parts for key, value in part.items() if value is not None} | base


ROPES = ("default", "mrope", "linear", "llama3", "yarn", "deepseek_yarn", "proportional")
"""Supported types of RoPE. Others depend on the length of the text."""

NEUTRAL = {
    "embedding_multiplier": 1,
    "residual_multiplier": 1,
    "logits_scaling": 1,
    "scale_emb": 1,
    "attention_multiplier": None,
    "query_pre_attn_scalar": None,
    "scale_depth": None,
    "dim_model_base": None,
    "attn_logit_softcapping": None,
    "clip_qkv": None,
    "attention_sink_bias": False,
    "gating": None,
    "partial_rotary_factor": 1,
}
"""Keys of models' configs that change the computation, and their values without an effect.

No tensor shows them.
"""


@dataclass(frozen=True)
class DrafterArgs:
    """The `config.json` of every drafter.

    Attributes:
        hidden_size: D, the target's.
        vocab_size: V, the target's.
        model_type: the kind.
        draft_depth: how many tokens it drafts by default; None if the config does not say.
        base_model: the target it was trained for, a path or hub id; None if the config does not
            say.
        draft_vocab_size: how many tokens it can guess, those in `draft_ids`; None for all.
        acceptance: for each depth, the shares of positions at which its first, second, ... guess
            was right in training; None if the config does not say.
        hidden_state: which of the target's hidden states it reads; None for `AFTER_NORM`. With the
            wrong one, hardly any guess is right.
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

    def __post_init__(self) -> None:
        if self.vocab_size > MAX_VOCAB:
            raise ValueError(f"expected vocab_size up to {MAX_VOCAB}, got {self.vocab_size}")
        state = self.hidden_state
        if state not in (None, AFTER_NORM, BEFORE_NORM):
            raise ValueError(
                f"expected hidden_state to be {AFTER_NORM} or {BEFORE_NORM}, got {state!r}"
            )

    @property
    def n_guesses(self) -> int:
        """V', how many tokens it can guess."""
        return self.draft_vocab_size or self.vocab_size

    @property
    def max_depth(self) -> int | None:
        """The most tokens that it can draft; None for any number."""
        return None

    @property
    def state_name(self) -> str:
        """The name of the target's hidden state that it reads."""
        return self.hidden_state or AFTER_NORM

    def describe_sizes(self) -> str:
        """A short description of its sizes."""
        raise NotImplementedError

    def describe_states(self) -> str:
        """The target's hidden states that it reads, in words."""
        place = "before" if self.hidden_state == BEFORE_NORM else "after"
        return f"the hidden state {place} the final norm"

    def explain_useless(self) -> str:
        """What to check if no guess is right."""
        doubts = "Was it trained for this model, and do its weights fit this dtype?"
        return f"{doubts} It reads {self.describe_states()}"

    def to_dict(self) -> dict[str, Any]:
        """The contents of a `config.json`, without fields that are None."""
        return {key: value for key, value in vars(self).items() if value is not None}

    @classmethod
    def from_dict(cls, config: dict[str, Any]) -> Self:
        """The arguments in a `config.json`; other keys and nulls are ignored."""
        types = {field.name: str(field.type) for field in fields(cls)}
        found = {key: value for key, value in config.items() if key in types and value is not None}
        for key, value in found.items():
            least = 0 if key in MAY_BE_ZERO else 1
            is_size = type(value) is int and least <= value <= MAX_INT
            if types[key].startswith("int") and not is_size:
                raise ValueError(f"expected {key} from {least} to {MAX_INT}, got {value!r:.40}")
        return cls(**found)


@dataclass(frozen=True)
class LayerArgs(DrafterArgs):
    """The config of a drafter with transformer layers.

    Attributes:
        width: H, the width of its layers.
        rope_scaling: as in mlx-lm's models; None for none.
        rope_traditional: whether RoPE pairs adjacent dimensions instead of halves.
        hidden_act: the MLP's activation, a name in `ACTIVATIONS`; None for the kind's default.
        capture_layers: the target's layers whose outputs it reads, in order, from 0; None for the
            kind's default.
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
    hidden_act: str | None = None
    capture_layers: list[int] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        name = self.hidden_act
        if name not in (None, *ACTIVATIONS):
            raise ValueError(
                f"expected hidden_act to be one of {', '.join(ACTIVATIONS)}, got {name!r:.40}"
            )

    def describe_states(self) -> str:
        if self.capture_layers is None:
            return super().describe_states()
        return f"the outputs of layers {', '.join(map(str, self.capture_layers))}"

    def describe_sizes(self) -> str:
        heads = f"heads {self.num_attention_heads} of {self.head_dim}"
        return f"width {self.width}, {heads}, MLP {self.intermediate_size}"


def read_layer(checkpoint: Checkpoint, config: Config, layer: str) -> Config:
    """The fields of a published head's transformer layer, from a flat config and tensors' shapes.

    Args:
        layer: the prefix of its tensors' names.
    """
    attention = f"{layer}.self_attn"
    (width,) = checkpoint.shape(f"{layer}.post_attention_layernorm.weight")
    head_dim = checkpoint.shape(f"{attention}.o_proj.weight")[1] // config["num_attention_heads"]
    return config | {
        "head_dim": head_dim,
        "num_key_value_heads": checkpoint.shape(f"{attention}.k_proj.weight")[0] // head_dim,
        "intermediate_size": checkpoint.shape(f"{layer}.mlp.gate_proj.weight")[0],
        "width": width,
        "hidden_act": config.get("hidden_activation") or config.get("hidden_act"),
        **read_rope(config),
    }


def read_rope(config: Config) -> Config:
    """The fields of a head's RoPE, from a flat config. A factor of 1 is no scaling."""
    rope = parse_rope(config)
    theta = rope.pop("rope_theta", None)
    if theta is None:
        theta = config.get("rope_theta", 10000.0)
    kind = get_rope_type(rope)
    if rope.get("factor") == 1 and kind != "proportional":
        kind = "default"
    if kind not in ROPES or (kind == "default" and rope.get("factor", 1) != 1):
        raise ValueError(f"expected rope_scaling of type {', '.join(ROPES)}, got {rope!r:.80}")
    if "max_position_embeddings" in config:
        rope.setdefault("original_max_position_embeddings", config["max_position_embeddings"])
    is_neox = config.get("rope_is_neox_style", config.get("is_neox_style"))
    return {
        "rope_theta": theta,
        "rope_scaling": None if kind == "default" else rope,
        "rope_traditional": is_neox is False,
    }


def parse_rope(config: Config) -> Config:
    """All keys of a flat config's RoPE, that of full attention if layers differ."""
    given = get_object(config, "rope_parameters")
    return get_object(config, "rope_scaling") | (get_object(given, "full_attention") or given)


def check_neutral(config: Config, neutral: Config) -> None:
    """Refuses a flat config in which one of the keys has another value than in `neutral`."""
    rope = parse_rope(config)
    for key, value in neutral.items():
        if key == "partial_rotary_factor" and get_rope_type(rope) == "proportional":
            continue
        got = config.get(key, rope.get(key, value))
        if got != value:
            raise ValueError(f"{key} {got!r:.40} is not supported")
