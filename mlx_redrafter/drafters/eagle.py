"""EAGLE heads: one transformer layer with a KV cache that reads the target's states and its own outputs.

A pair is the state f_i at a position and the token t_(i+1) after it; e = embedding of t_(i+1):

    EAGLE-1   x = fc([e ; f])                    f: the hidden state after the final norm
              x = x + attention(x)
              feature = x + mlp(norm(x))         logits = U feature, U: the target's output matrix

    EAGLE-3   f = fc([a ; b ; c])                a, b, c: the outputs of three layers, or of another number
              x = f + attention([norm(e) ; norm(f)])
              feature = x + mlp(norm(x))         logits = lm_head(norm(feature))

In a draft, the feature replaces the state f of the next position. Norms are RMS norms. EAGLE-3 heads differ in what is
normed: a, b and c, each (fc_norm) or concatenated (norm_before_fc); queries and keys (qk_norm); the residual to which
attention is added (norm_before_residual); the feature that replaces the next state (norm_output).

Source: SafeAILab/EAGLE, eagle/model/cnets1.py and cnets.py; arXiv 2401.15077, 2503.01840. `fc_norm` and a separate
`head_dim`: SpecForge; the other norms: vllm-project/speculators. Tensors are named as there, except the layer's.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import KW_ONLY, MISSING, dataclass, field, replace
from typing import Any, Self, cast

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import llama, qwen3

from ..engine.beam_search import State
from ..engine.model_parts import AFTER_NORM, find_output_matrix
from ..engine.source import Source
from ..errors import CheckpointError, RedrafterError, join_lines
from .cached import LayerCache, PairDrafter, PairSource
from .checkpoint import DRAFT_IDS, Checkpoint, Config, matches_any
from .config import LayerArgs, check_states, declare, flag, flatten, get_object, is_list_of
from .protocol import Embed, Head
from .trainable import Project, TrainableArgs, TrainableDrafter

MODEL_TYPE = "eagle"

N_DEFAULT_STATES = 3
"""How many target layers EAGLE-3 reads if its config does not name them."""

NAMES = (
    (r"t2d|(?:.*\.)?rotary_emb\.inv_freq", ""),
    (r"(?:midlayer|layers\.0)\.(.*)", r"layer.\1"),
    (r"layers\.[1-9]\d{0,2}\..*", r"\g<0>"),  # `from_published` refuses these
    (r"fc\.(?:weight|bias)|(?:input_)?norm\.weight|lm_head\.weight|embed_tokens\.weight|fc_norm\.\d\.weight", r"\g<0>"),
    ("d2t", DRAFT_IDS),
)
"""The authors' names, and those of SpecForge, vLLM and speculators."""


def recognises(names: Collection[str], config: Config) -> bool:
    """Whether a checkpoint holds an EAGLE head."""
    return matches_any(r"fc\.weight|(?:midlayer|layers\.0)\.hidden_norm\.weight", names)


@dataclass(frozen=True)
class DrafterArgs(LayerArgs, TrainableArgs):
    """The config of an EAGLE head.

    Attributes:
        version: 1 or 3; 1 also for EAGLE-2, whose heads are the same.
        qkv_bias, o_bias, fc_bias: whether these layers have a bias.
        own_embedding: whether it has its own embedding; if not, it uses the target's.
        fc_norm: whether each of the states is normed before `fc`.
        norm_before_fc: whether the concatenated states are normed before `fc`.
        qk_norm: whether each head's queries and keys are normed.
        norm_before_residual: whether attention is added to the normed state instead of the state.
        norm_output: whether the normed feature replaces the state of the next position.
    """

    version: int = declare(MISSING, lambda value: value in (1, 3), "1 or 3")
    _: KW_ONLY
    qkv_bias: bool = flag(False)
    fc_bias: bool = flag(False)
    own_embedding: bool = flag(False)
    o_bias: bool = flag(False)
    fc_norm: bool = flag(False)
    norm_before_fc: bool = flag(False)
    qk_norm: bool = flag(False)
    norm_before_residual: bool = flag(False)
    norm_output: bool = flag(False)
    model_type: str = field(default=MODEL_TYPE)

    SIZES = ("intermediate_size",)

    @classmethod
    def from_published(cls, checkpoint: Checkpoint, model: nn.Module | None) -> Self:
        """The arguments of a published head; renames its tensors to our names.

        Norms before attention mean version 3. An embedding in version 1 is a copy of the target's, and dropped.

        Raises:
            CheckpointError: the head is not supported, or its config does not fit its tensors.
        """
        checkpoint.rename(NAMES, MODEL_TYPE)
        tensors, where = checkpoint.tensors, checkpoint.where
        if others := sorted(name for name in tensors if name.startswith("layers.")):
            raise CheckpointError(f"{where}: only EAGLE heads with one layer are supported, got {others[0]}")
        of_version_3 = {"layer.hidden_norm.weight", "layer.input_layernorm.weight", "lm_head.weight"}
        version = 3 if of_version_3 & tensors.keys() else 1
        config = checkpoint.config = read_config(checkpoint.config, where)
        layers = config["capture_layers"] if version == 3 else None
        width, n_inputs = checkpoint.matrix("fc.weight")
        n_states = 2 if version == 1 else len(layers or [0] * N_DEFAULT_STATES)
        known = [config.get("target_hidden_size"), None if "embed_tokens.weight" in tensors else width]
        check_states(n_inputs, n_states, known if version == 3 else (), where)
        vocab_size = checkpoint.find_vocab_size(["embed_tokens.weight"])
        if version == 1:
            tensors.pop("embed_tokens.weight", None)
        checkpoint.add_row_numbers(vocab_size)
        fields = config | cls.read_layer(checkpoint, "layer") | {"vocab_size": vocab_size, "capture_layers": layers}
        args = cls.derive(
            checkpoint.shapes,
            fields | {"hidden_state": AFTER_NORM},
            where,
            width=width,
            hidden_size=n_inputs // n_states,
            version=version,
            qkv_bias="layer.self_attn.q_proj.bias" in tensors,
            fc_bias="fc.bias" in tensors,
            own_embedding="embed_tokens.weight" in tensors,
            o_bias="layer.self_attn.o_proj.bias" in tensors,
            qk_norm="layer.self_attn.q_norm.weight" in tensors,
            fc_norm="fc_norm.0.weight" in tensors,
            norm_before_fc="input_norm.weight" in tensors,
        )
        checkpoint.compare(args.list_config_values())
        return args

    @classmethod
    def for_training(
        cls, hidden_size: int, vocab_size: int, *, depth: int, draft_vocab_size: int | None, **sizes: Any
    ) -> Self:
        """The sizes of an EAGLE-1 head to train.

        Raises:
            RedrafterError: a draft vocabulary is given.
        """
        if draft_vocab_size is not None:
            raise RedrafterError("an EAGLE-1 head uses the target's output matrix: leave out draft_vocab_size")
        heads = next(count for count in range(max(1, hidden_size // 64), 0, -1) if hidden_size % (2 * count) == 0)
        inner = sizes["intermediate_size"] or 2 * hidden_size
        head_dim = hidden_size // heads
        return cls(hidden_size, vocab_size, hidden_size, inner, heads, heads, head_dim, version=1, fc_bias=True)

    def check(self, where: str) -> None:
        super().check(where)
        if self.version == 1 and self.norm_output:
            raise CheckpointError(
                f"{where}/config.json: expected norm_output false for EAGLE-1, which has no norm there"
            )
        if self.fc_norm and self.norm_before_fc:
            raise CheckpointError(f"{where}/config.json: expected fc_norm or norm_before_fc, got both")
        if self.width != self.hidden_size and not self.own_embedding:
            raise CheckpointError(
                f"{where}: a head of width {self.width} needs its own embedding for a target of width "
                f"{self.hidden_size}, and has none"
            )

    @property
    def n_states(self) -> int:
        """How many target layers EAGLE-3 reads."""
        return len(self.capture_layers or [0] * N_DEFAULT_STATES)

    @property
    def min_layers(self) -> int:
        """The fewest layers that a target must have; `find_default_layers` needs 4."""
        return 4 if self.version == 3 and self.capture_layers is None else super().min_layers

    def describe_states(self) -> str:
        if self.version == 3 and self.capture_layers is None:
            return f"the outputs of {N_DEFAULT_STATES} layers, the default ones"
        return super().describe_states()

    def list_variants(self, n_layers: int) -> dict[str, Self]:
        if self.version == 3 and self.capture_layers is None:
            return replace(self, capture_layers=find_default_layers(n_layers)).list_variants(n_layers)
        others = super().list_variants(n_layers)
        if self.version == 3:  # projects have different defaults for these
            for name in ("norm_before_residual", "norm_output"):
                other: dict[str, Any] = {name: not getattr(self, name)}
                others[f"{name} {str(other[name]).lower()}"] = replace(self, **other)
        return others

    def explain_fixed(self) -> str | None:
        if self.version == 3 or self.own_embedding:
            return f"expected an EAGLE-1 head that reads the target's embedding, got {self.describe()}"
        return super().explain_fixed()

    def describe(self) -> str:
        return f"EAGLE-{self.version}, {super().describe()}"


def read_config(config: Config, where: str) -> Config:
    """A flat published config, with `capture_layers`: the layers whose outputs it reads, or None.

    In configs of speculators and NVIDIA, layer numbers mean the inputs of layers. In other configs, a list that begins
    with 1 means outputs and any other list inputs, as in SGLang. Flags default to false, as in speculators.

    Raises:
        CheckpointError: the head is of a kind that is not supported.
    """
    own, flat = get_object(config, "eagle_config", where), flatten(config, "eagle_config", where)
    if (kind := flat.get("speculators_model_type", "eagle3")) != "eagle3":
        raise CheckpointError(f"{where} is a {join_lines(kind)[:40]}: only EAGLE-3 heads of speculators are supported")
    for key, expected in (("use_aux_hidden_state", True), ("use_mtp_layernorm", False), ("parallel_draft_step", 1)):
        if flat.get(key, expected) != expected:
            got = f"{expected}, got {flat[key]!r:.40}"
            raise CheckpointError(f"{where}/config.json: expected {key} of an EAGLE head to be {got}")
    layers = flat.get("eagle_aux_hidden_state_layer_ids")
    if layers is not None and not (is_list_of(int, layers) and layers):
        raise CheckpointError(f"{where}/config.json: expected capture_layers as layer numbers, got {layers!r:.40}")
    enters = "speculators_model_type" in flat or "use_aux_hidden_state" in own or (layers and layers[0] != 1)
    if layers is not None and enters:
        layers = [layer - 1 for layer in layers]
    return flat | {"capture_layers": layers}


def find_default_layers(n_layers: int) -> list[int]:
    """The target's layers whose outputs EAGLE-3 reads by default: the inputs of layers 2, n / 2 and n - 3."""
    return [1, n_layers // 2 - 1, n_layers - 4]


class Layer(nn.Module):
    """The transformer layer; the input of its attention may be wider than the layer."""

    def __init__(self, args: DrafterArgs) -> None:
        super().__init__()
        home: Any = qwen3 if args.qk_norm else llama
        own = home.ModelArgs.from_dict(args.for_mlx_lm() | {"model_type": "llama"})
        n_inputs, bias = args.width * (2 if args.version == 3 else 1), args.qkv_bias
        self.self_attn, self.mlp = home.Attention(own), qwen3.MLP(args.width, args.intermediate_size)
        for name, heads in (
            ("q_proj", args.num_attention_heads),
            ("k_proj", args.num_key_value_heads),
            ("v_proj", args.num_key_value_heads),
        ):
            self.self_attn[name] = nn.Linear(n_inputs, heads * args.head_dim, bias=bias)
        self.self_attn.o_proj = nn.Linear(args.num_attention_heads * args.head_dim, args.width, bias=args.o_bias)
        self.post_attention_layernorm = nn.RMSNorm(args.width, args.rms_norm_eps)
        if args.version == 3:
            self.input_layernorm = nn.RMSNorm(args.width, args.rms_norm_eps)
            self.hidden_norm = nn.RMSNorm(args.width, args.rms_norm_eps)


class Drafter(PairDrafter, TrainableDrafter):
    """An EAGLE head. Version 1 can be trained. At each depth it is trained on its own features, as when drafting.

    Source of training: arXiv 2408.15766 (HASS) and 2503.01840, section 3.1, with only the loss of the tokens.
    """

    args: DrafterArgs

    def __init__(self, args: DrafterArgs) -> None:
        super().__init__(args)
        self.needs_head = args.version == 1
        n_inputs = 2 * args.width if args.version == 1 else self.n_inputs
        self.fc = nn.Linear(n_inputs, args.width, bias=args.fc_bias)
        self.layer = Layer(args)
        if args.own_embedding:
            self.embed_tokens = nn.Embedding(args.vocab_size, args.width)
        if args.fc_norm:
            self.fc_norm = [nn.RMSNorm(args.hidden_size, args.rms_norm_eps) for _ in range(args.n_states)]
        if args.norm_before_fc:
            self.input_norm = nn.RMSNorm(n_inputs, args.rms_norm_eps)
        if args.version == 3:
            self.norm = nn.RMSNorm(args.width, args.rms_norm_eps)
            self.lm_head = nn.Linear(args.width, args.n_guesses, bias=False)
        self.hold_draft_ids()

    @property
    def n_inputs(self) -> int:
        return self.args.hidden_size * (1 if self.args.version == 1 else self.args.n_states)

    def open(self, model: nn.Module) -> Source:
        if self.args.version == 1:
            return PairSource(self, model, [self.args.state_name])
        return PairSource(self, model, self.args.capture_layers or find_default_layers(len(model.layers)))

    def project(self, states: mx.array) -> mx.array:
        states = states.astype(self.dtype)
        if self.args.version == 1:
            return states
        if "fc_norm" in self:
            parts = mx.split(states, self.args.n_states, axis=-1)
            states = mx.concatenate([norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)], axis=-1)
        elif "input_norm" in self:
            states = self.input_norm(states)
        return self.fc(states)

    def read_pairs(
        self, features: mx.array, tokens: mx.array, embed: Embed, caches: Sequence[LayerCache], mask: mx.array | str
    ) -> mx.array:
        embedded = (self.embed_tokens if "embed_tokens" in self else embed)(tokens).astype(self.dtype)
        layer, (cache,) = self.layer, caches
        if self.args.version == 1:
            x = residual = self.fc(mx.concatenate([embedded, features], axis=-1))
        else:
            normed = layer.hidden_norm(features)
            x = mx.concatenate([layer.input_layernorm(embedded), normed], axis=-1)
            residual = normed if self.args.norm_before_residual else features
        x = residual + layer.self_attn(x[None], cast(Any, mask), cache)[0]
        x = x + layer.mlp(layer.post_attention_layernorm(x))
        return self.norm(x) if self.args.norm_output else x

    def guess(self, features: mx.array, head: Head | None) -> mx.array:
        if head is not None:
            return head(features).astype(mx.float32)
        return self.scatter(self.lm_head(features if self.args.norm_output else self.norm(features)))

    @property
    def dtype(self) -> mx.Dtype:
        dtype: mx.Dtype = self.layer.post_attention_layernorm.weight.dtype
        return dtype

    def read_token(self, tokens: mx.array, embed: Embed, hidden: mx.array, state: State, depth: int) -> State:
        """(feature, cache rows by depth), for training version 1.

        At depth d, the token at column c belongs to the draft that starts after column c - d. It sees the text's pairs
        before that draft, which are the rows of depth 0. Of each later depth it sees the row of its own draft, which is
        at the token's own column.

        Args:
            tokens, hidden: (B, T), (B, T, D).
        """
        features, rows = (hidden.astype(self.dtype), []) if state is None else state
        x = self.fc(mx.concatenate([embed(tokens).astype(self.dtype), features], axis=-1))
        attention: Any = self.layer.self_attn
        queries, keys, values = (
            layer(x).reshape(*x.shape[:2], -1, self.args.head_dim).swapaxes(1, 2)
            for layer in (attention.q_proj, attention.k_proj, attention.v_proj)
        )
        queries, keys = attention.rope(queries), attention.rope(keys)
        rows = [*rows, (keys.swapaxes(1, 2), values.swapaxes(1, 2))]
        x = x + attention.o_proj(attend(queries, rows, attention.scale).swapaxes(1, 2).flatten(2))
        return x + self.layer.mlp(self.layer.post_attention_layernorm(x)), rows

    def features(self, hidden: mx.array, state: State, depth: int) -> mx.array:
        """(..., H), the input of the target's output matrix."""
        return cast(mx.array, state[0])

    def share(self, model: nn.Module) -> None:
        """Stores the target's output matrix."""
        layer = nn.Linear(1, 1, bias=False)
        layer.weight = find_output_matrix(model).astype(mx.float32)
        self._shared = [layer]

    def start_from(self, project: Project) -> None:
        """Initialises the head near the identity on the target's states, which the output matrix expects."""
        width, near = self.args.width, 0.1
        weight = mx.eye(width)
        self.fc.weight = mx.concatenate([near * self.fc.weight[:, :width], weight], axis=1)
        for layer in (self.layer.self_attn.o_proj, self.layer.mlp.down_proj):
            layer.weight = near * layer.weight

    @property
    def output_layers(self) -> list[nn.Module]:
        """Its output matrix; during training of version 1, the target's, see `share`."""
        return [self.lm_head] if "lm_head" in self else list(getattr(self, "_shared", []))


def attend(queries: mx.array, rows: Sequence[tuple[mx.array, mx.array]], scale: float) -> mx.array:
    """(B, heads, T, head_dim) the attention output for a draft's tokens, see `Drafter.read_token`.

    Args:
        queries: (B, heads, T, head_dim).
        rows: by depth, (B, T, heads of keys and values, head_dim) each.
    """
    depth, (count, size) = len(rows) - 1, queries.shape[1:3]
    repeats = count // rows[0][0].shape[2]
    moved = [tuple(mx.repeat(array.swapaxes(1, 2), repeats, axis=1) for array in row) for row in rows]
    (keys, values), own = moved[0], moved[1:]
    column = mx.arange(size)
    # Column 0 has no state before it, and columns beyond the end of the text wrap to its beginning.
    sees = (column <= column[:, None]) & ((column > depth) | (column == column[:, None]))
    scores = mx.where(sees, queries @ keys.swapaxes(2, 3), -mx.inf)
    scores = mx.concatenate([scores, *((queries * key).sum(axis=-1, keepdims=True) for key, _ in own)], axis=-1)
    weights = mx.softmax(scale * scores, axis=-1)
    out = weights[..., :size] @ values
    for at, (_, value) in enumerate(own, size):
        out = out + weights[..., at : at + 1] * value
    return out
