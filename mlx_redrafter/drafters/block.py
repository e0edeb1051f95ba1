"""Block drafters: one forward guesses a whole block of tokens.

For the text they cache only keys and values, computed from the outputs u_i of some target layers at position i:

    c_i = norm(fc(u_i))            shared by all layers; each has its own keys k_proj(c_i) and values v_proj(c_i)

After p positions, a block is the root at p and mask tokens at p + 1, p + 2, ... Its rows run through the layers
together, and see the text and each other. Each row guesses the token at its own position, or at the next one. The
block's keys and values are then dropped. The plan sets the length of a block. As its rows see each other, a shorter
draft is not a prefix of a longer one.

Layers are Qwen3's unless a kind defines others. Their dtype is the file's, not the target's.

Source: z-lab/dflash, dflash/model.py; arXiv 2602.06036.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Iterable
from dataclasses import KW_ONLY, dataclass
from typing import Any, Self, cast

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models import qwen3
from mlx_lm.models.cache import KVCache
from mlx_lm.models.rope_utils import YarnRoPE, initialize_rope

from ..engine.beam_search import Advance, State
from ..engine.model_parts import AFTER_NORM, find_compute_dtype, find_head, find_model_sizes, find_module_name
from ..engine.source import Source
from ..errors import CheckpointError
from .cached import CachedSource
from .checkpoint import DRAFT_IDS, MAX_COUNT, Checkpoint, Config, Names, is_count, matches_any
from .config import (
    LayerArgs,
    check_states,
    count,
    declare,
    find_rope_type,
    flag,
    flatten,
    is_list_of,
    is_positive,
    number,
    size,
)
from .protocol import Drafter, Head

ROPES: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor",),
    "yarn": ("factor", "original_max_position_embeddings"),
    "proportional": (),
}
"""RoPE type -> the numbers that it needs in the config."""

Guess = Callable[[mx.array, int], mx.array]
"""(tokens (W,), row) -> (W, V') float32 logits of a row's guess after each of these tokens."""


@dataclass(frozen=True)
class BlockArgs(LayerArgs):
    """The config of a block drafter.

    Attributes:
        num_layers: L.
        block_size: B, the most rows of a block, the root's included.
        mask_token_id: the token whose embedding is used for unknown tokens.
        from_anchor: whether each row j, including the root's, guesses the token at p + j + 1 instead of p + j.
        attention_bias: whether the attention projections have biases.
        own_embedding, own_head: whether it has its own embedding and output matrix; if not, it uses the target's.
        layer_windows: for each layer, how many positions a row sees, including its own, or 0 for all; None if all
            layers see all.
        layer_causal: for each layer, whether a row sees no later row; None if no layer is causal.
        embedding_scale: a factor for embeddings; None for the target's.
        output_multiplier: a factor for logits.
        final_logit_softcapping: the cap of the multiplied logits; None for none.
    """

    num_layers: int = count()
    block_size: int = count()
    mask_token_id: int = size(least=0)
    _: KW_ONLY
    from_anchor: bool = flag(False)
    attention_bias: bool = flag(False)
    own_embedding: bool = flag(False)
    own_head: bool = flag(False)
    layer_windows: list[int] | None = declare(None, lambda value: is_list_of(int, value), "as numbers of positions")
    layer_causal: list[bool] | None = declare(None, lambda value: is_list_of(bool, value), "as a list of true or false")
    embedding_scale: float | None = number(None)
    output_multiplier: float = number(1.0)
    final_logit_softcapping: float | None = number(None)

    def check(self, where: str) -> None:
        rope = self.rope_scaling or {}
        needed = ROPES.get(find_rope_type(rope))
        if needed is None or not all(is_positive(rope.get(key)) for key in needed):
            expected = f"a RoPE of type {', '.join(ROPES)} with its numbers"
            raise CheckpointError(f"{where}/config.json: expected {expected}, got {rope!r:.80}")
        super().check(where)
        for name in ("layer_windows", "layer_causal"):
            if (given := getattr(self, name)) is not None and len(given) != self.num_layers:
                expected = f"{name} to have an entry for each of {self.num_layers} layers"
                raise CheckpointError(f"{where}/config.json: expected {expected}, got {given!r:.40}")
        if not self.capture_layers:
            raise CheckpointError(f"expected capture_layers, the layers to read, in {where}/config.json, got none")
        if self.max_depth < 1:
            raise CheckpointError(
                f"{where}/config.json: expected block_size from 2 to {MAX_COUNT}, got {self.block_size}"
            )
        if self.mask_token_id >= self.vocab_size:
            raise CheckpointError(
                f"{where}/config.json: expected mask_token_id below {self.vocab_size}, got {self.mask_token_id}"
            )
        if self.draft_vocab_size is not None and not self.own_head:
            raise CheckpointError(f"incomplete drafter: {where} has a draft vocabulary, and holds no lm_head.weight")
        if self.width != self.hidden_size and not (self.own_embedding and self.own_head):
            raise CheckpointError(
                f"{where}: a head of width {self.width} needs its own embedding and output matrix for a target of "
                f"width {self.hidden_size}"
            )

    @classmethod
    def from_block(cls, checkpoint: Checkpoint, model: nn.Module | None, own: Config) -> Self:
        """The arguments of a published head after `prepare`, see `DrafterArgs.from_published`.

        Args:
            own: the kind's own fields.

        Raises:
            CheckpointError: the config does not fit the tensors.
        """
        tensors, config, where = checkpoint.tensors, checkpoint.config, checkpoint.where
        (width, n_inputs), n_states = checkpoint.matrix("fc.weight"), len(config["capture_layers"])
        hidden_size, vocab_size = find_model_sizes(model) if model is not None else (None, None)
        needs_target = not {"embed_tokens.weight", "lm_head.weight"} <= tensors.keys()
        known = (config.get("target_hidden_size"), hidden_size, width if needs_target else None)
        check_states(n_inputs, n_states, known if n_inputs != n_states * width else (), where)
        if n_inputs % n_states:
            expected = f"fc.weight to read the outputs of {n_states} target_layer_ids side by side"
            raise CheckpointError(f"{where}: expected {expected}, got shape {(width, n_inputs)}")
        by_token = ["embed_tokens.weight", "markov_w1.weight", "selector.predecessor.weight"]
        vocab_size = checkpoint.find_vocab_size(by_token) or vocab_size
        if vocab_size is None:
            raise CheckpointError(f"expected vocab_size in {where}/config.json, got none: give --base-model")
        checkpoint.add_row_numbers(vocab_size)
        fields = config | cls.read_layer(checkpoint, "layers.0") | own
        args = cls.derive(
            checkpoint.shapes,
            fields | {"vocab_size": vocab_size, "hidden_state": AFTER_NORM},
            where,
            width=width,
            hidden_size=n_inputs // n_states,
            own_embedding="embed_tokens.weight" in tensors,
            own_head="lm_head.weight" in tensors,
            attention_bias="layers.0.self_attn.q_proj.bias" in tensors,
        )
        checkpoint.compare(args.list_config_values())
        return args

    @property
    def max_depth(self) -> int:
        """The most tokens that it can draft: the number of rows that guess."""
        return self.block_size - (not self.from_anchor)

    @property
    def layer_masks(self) -> list[tuple[int, bool]]:
        """For each layer, (the window of its attention mask or 0 for none, whether the mask is causal)."""
        windows, causal = (given or [0] * self.num_layers for given in (self.layer_windows, self.layer_causal))
        return list(zip(windows, map(bool, causal), strict=True))

    def list_config_values(self) -> dict[str, Any]:
        return super().list_config_values() | {"num_hidden_layers": self.num_layers}

    def describe(self) -> str:
        return f"block {self.block_size}, layers {self.num_layers}, {super().describe()}"


def make_rope(dims: int, base: float, traditional: bool, scaling: dict[str, Any] | None) -> Any:
    """mlx-lm's RoPE; YaRN also with unrounded bounds, as in gpt-oss.

    Source: transformers, modeling_rope_utils.py::_compute_yarn_parameters; arXiv 2309.00071, section 3.
    """
    rope: Any = initialize_rope(dims, base, traditional, scaling)
    if isinstance(rope, YarnRoPE) and scaling is not None and scaling.get("truncate") is False:
        length = scaling["original_max_position_embeddings"]
        low, high = (
            dims * math.log(length / (2 * math.pi * scaling.get(key, turns))) / (2 * math.log(base))
            for key, turns in (("beta_fast", 32), ("beta_slow", 1))
        )
        low, high = max(low, 0), min(high, dims - 1)
        ramp = mx.clip((mx.arange(dims // 2) - low) / max(high - low, 1e-3), 0, 1)
        rope._freqs = base ** (mx.arange(0, dims, 2) / dims) / (1 - ramp + ramp / scaling["factor"])
    return rope


class Attention(nn.Module):
    """Attention of a block's rows to the text's rows and to each other, with one KV cache."""

    def __init__(self, args: BlockArgs) -> None:
        super().__init__()
        width, head_dim, bias = args.width, args.head_dim, args.attention_bias
        self.head_dim, self.scale = head_dim, head_dim**-0.5
        self.q_proj = nn.Linear(width, args.num_attention_heads * head_dim, bias=bias)
        self.k_proj = nn.Linear(width, args.num_key_value_heads * head_dim, bias=bias)
        self.v_proj = nn.Linear(width, args.num_key_value_heads * head_dim, bias=bias)
        self.o_proj = nn.Linear(args.num_attention_heads * head_dim, width, bias=bias)
        self.q_norm = nn.RMSNorm(head_dim, args.rms_norm_eps)
        self.k_norm = nn.RMSNorm(head_dim, args.rms_norm_eps)
        self.rope = make_rope(head_dim, args.rope_theta, args.rope_traditional, args.rope_scaling)

    def append(self, rows: mx.array, position: mx.array | int, cache: KVCache) -> tuple[mx.array, mx.array]:
        """Appends keys and values of rows (R, H), the first at `position`; returns all keys and values in the cache."""
        keys = self._split(self.k_proj(rows))
        values = self.make_values(rows, keys)
        return cache.update_and_fetch(self.rope(self.k_norm(keys), offset=position), values)

    def make_values(self, rows: mx.array, keys: mx.array) -> mx.array:
        """(1, heads, R, head_dim) the values of rows (R, H); `keys` are their keys before the norm."""
        return self._split(self.v_proj(rows))

    def __call__(self, rows: mx.array, position: mx.array, cache: KVCache, mask: mx.array) -> mx.array:
        """(B, H) the output for a block's rows; `mask` (B, C) covers the last C cache rows, including the block's."""
        queries = self.rope(self.q_norm(self._split(self.q_proj(rows))), offset=position)
        keys, values = (array[..., -mask.shape[1] :, :] for array in self.append(rows, position, cache))
        out = mx.fast.scaled_dot_product_attention(queries, keys, values, scale=self.scale, mask=mask)
        return self.o_proj(out[0].swapaxes(0, 1).flatten(1))

    def _split(self, rows: mx.array) -> mx.array:
        return rows.reshape(1, len(rows), -1, self.head_dim).swapaxes(1, 2)


Attend = Callable[[mx.array], mx.array]
"""Normed rows (B, H) -> attention's output (B, H)."""


class Layer(nn.Module):
    """A layer of Qwen3."""

    def __init__(self, args: Any) -> None:
        super().__init__()
        self.self_attn = Attention(args)
        self.mlp: nn.Module = qwen3.MLP(args.width, args.intermediate_size)
        self.input_layernorm = nn.RMSNorm(args.width, args.rms_norm_eps)
        self.post_attention_layernorm = nn.RMSNorm(args.width, args.rms_norm_eps)

    def __call__(self, rows: mx.array, attend: Attend) -> mx.array:
        """(B, H) the output for a block's rows (B, H)."""
        rows = rows + attend(self.input_layernorm(rows))
        return rows + self.mlp(self.post_attention_layernorm(rows))


class BlockDrafter(Drafter):
    """A block drafter. A kind defines its layers, and how a guess depends on the token drafted before it.

    It computes in its own dtype. Outputs of a target's layers may overflow float16, so heads stored in float16 are read
    as bfloat16.
    """

    takes_float16 = False
    args: BlockArgs

    def __init__(self, args: BlockArgs) -> None:
        super().__init__(args)
        width = args.width
        self.fc = nn.Linear(self.n_inputs, width, bias=False)
        self.hidden_norm = nn.RMSNorm(width, args.rms_norm_eps)
        self.layers: list[Layer] = [self.make_layer() for _ in range(args.num_layers)]
        self.norm = nn.RMSNorm(width, args.rms_norm_eps)
        if args.own_embedding:
            self.embed_tokens = nn.Embedding(args.vocab_size, width)
        if args.own_head:
            self.lm_head = nn.Linear(width, args.n_guesses, bias=False)
        self.hold_draft_ids()

    def make_layer(self) -> Layer:
        """A new layer of this kind."""
        return Layer(self.args)

    @property
    def n_inputs(self) -> int:
        """The width of the target's concatenated states."""
        return self.args.hidden_size * len(self.args.capture_layers or [])

    @property
    def dtype(self) -> mx.Dtype:
        dtype: mx.Dtype = self.norm.weight.dtype
        return dtype

    def open(self, model: nn.Module) -> Source:
        return BlockSource(self, model)

    def append(self, states: mx.array, position: int, caches: Iterable[KVCache]) -> mx.array:
        """Appends the keys and values of positions to each layer's cache.

        Args:
            states: (R, X) the target's concatenated states.
            position: of the first.

        Returns:
            (R, H) the features that keys and values are made from.
        """
        features: mx.array = self.hidden_norm(self.fc(states.astype(self.dtype)))
        for layer, cache in zip(self.layers, caches, strict=True):
            layer.self_attn.append(features, position, cache)
        return features

    def run(
        self, embedded: mx.array, position: mx.array, caches: Iterable[KVCache], masks: Iterable[mx.array]
    ) -> mx.array:
        """(B, H) the final states of a block.

        Args:
            embedded: (B, H) the root and the mask tokens.
            position: () int32, the root's.
            caches, masks: one for each layer, see `Attention`.
        """
        rows = embedded.astype(self.dtype)
        for layer, cache, mask in zip(self.layers, caches, masks, strict=True):

            def attend(
                normed: mx.array, attention: Attention = layer.self_attn, cache: KVCache = cache, mask: mx.array = mask
            ) -> mx.array:
                return attention(normed, position, cache, mask)

            rows = layer(rows, attend)
        return cast(mx.array, self.norm(rows))

    def make_guess(self, states: mx.array, head: Head) -> Guess:
        """The guesses of rows with final states (D, H). In this class they do not depend on the token before.

        Args:
            head: its own or the target's output matrix.
        """
        logits = self.make_logits(states, head)
        return lambda tokens, row: mx.broadcast_to(logits[row], (len(tokens), logits.shape[1]))

    def make_logits(self, states: mx.array, head: Head) -> mx.array:
        """(D, V') float32 logits of final states, multiplied and capped by the config."""
        logits, cap = head(states).astype(mx.float32) * self.args.output_multiplier, self.args.final_logit_softcapping
        return logits if cap is None else cap * mx.tanh(logits / cap)

    def sample_logits(self) -> mx.array:
        """Logits of at most eight rows of a fixed random block after eight positions.

        A drafter that uses the target's output matrix returns their final states instead.
        """
        generator, args = np.random.default_rng(0), self.args
        states, embedded = (
            mx.array(generator.normal(size=(8, width)).astype(np.float32)) for width in (self.n_inputs, args.width)
        )
        count = min(8, args.max_depth)
        caches = [KVCache() for _ in self.layers]
        self.append(states, 0, caches)
        masks = [mx.ones((count, 8 + count), mx.bool_)] * len(caches)
        rows = self.run(embedded[:count], mx.array(8), caches, masks)
        if "lm_head" not in self:
            return rows.astype(mx.float32)
        guess, tokens = self.make_guess(rows, self.lm_head), mx.arange(count) % args.vocab_size
        return mx.concatenate([guess(tokens[row : row + 1], row) for row in range(count)])


class BlockSource(CachedSource):
    """The source of a block drafter: each layer's cache holds the text's keys and values, then a block's.

    Args:
        drafter: its weights.
        model: the target.
    """

    drafter: BlockDrafter

    def __init__(self, drafter: BlockDrafter, model: nn.Module) -> None:
        args = drafter.args
        super().__init__(drafter, model, args.capture_layers or [], args.num_layers)
        windows = [window for window, _ in args.layer_masks]
        self._window = max(windows) if all(windows) else None
        self._positions = mx.zeros((0,), mx.int32)  # of the rows
        if "embed_tokens" in drafter:
            self._embed = drafter.embed_tokens
        scale = args.embedding_scale
        if scale is None:
            scale = math.sqrt(args.hidden_size) if find_module_name(model).startswith("gemma") else 1.0
        self._scale = scale
        self._head = (
            drafter.lm_head if "lm_head" in drafter else _cast_input(find_head(model), find_compute_dtype(model))
        )

    def append_rows(self, states: mx.array, tokens: mx.array, position: int) -> mx.array:
        """Appends rows; the tokens are not used."""
        own = mx.arange(position, position + len(states))
        self._positions = mx.concatenate([self._positions[: self._caches[0].offset], own])
        return self.drafter.append(states, position, self._caches)

    def _drop_oldest(self) -> None:
        before = self._n_rows
        super()._drop_oldest()
        if self._n_rows < before:
            self._positions = self._positions[before - self._n_rows : before]

    def begin(self, root: mx.array, depth: int = 1) -> Advance:
        """Runs a block. Beyond `depth`, which no plan reaches, the last row's guess is repeated."""
        _, sees, position = self.append_pending_rows(root)
        drafter, args = self.drafter, self.drafter.args
        first = 0 if args.from_anchor else 1
        tokens = mx.concatenate([root.reshape(1).astype(mx.int32), mx.full((first + depth - 1,), args.mask_token_id)])
        own = position + mx.arange(len(tokens))
        kinds = {kind: make_mask(sees, self._positions, own, *kind) for kind in set(args.layer_masks)}
        near = len(self._rows[-1].tokens) + len(tokens) - 2
        # All rows before these columns are outside the window.
        masks = [kinds[kind][:, -(kind[0] + near) if kind[0] else 0 :] for kind in args.layer_masks]
        rows = drafter.run(self._scale * self._embed(tokens), position, self._caches, masks)
        guess = drafter.make_guess(rows[first:], self._head)

        def advance(tokens: mx.array, state: State) -> tuple[mx.array, State]:
            row = state or 0
            return drafter.scatter(guess(tokens, min(row, depth - 1))), row + 1

        return advance

    @property
    def state(self) -> Any:
        return *super().state, self._positions


def make_mask(sees: mx.array, positions: mx.array, own: mx.array, window: int, causal: bool) -> mx.array:
    """(B, R + B) bool: which rows of the text, then of the block, each row of the block sees.

    Args:
        sees: (R,) bool, which rows of the text a block sees.
        positions: (R,) int32, of the text's rows.
        own: (B,) int32, the positions of the block's rows.
        window: a row sees positions at a distance below this, before and after; 0 for all.
        causal: whether a row sees no later row of its block.
    """
    size = len(own)
    mask = mx.concatenate([mx.broadcast_to(sees, (size, len(sees))), mx.ones((size, size), mx.bool_)], axis=1)
    distance = own[:, None] - mx.concatenate([positions, own])
    if window:
        mask = mask & (mx.abs(distance) < window)
    return mask & (distance >= 0) if causal else mask


def _cast_input(head: Head, dtype: mx.Dtype) -> Head:
    """The target's output matrix applied in its own dtype, to avoid a copy in another one."""
    return lambda states: head(states.astype(dtype))


BLOCK_NAMES = (
    (r"(?:encoder\.)?fc\.weight", "fc.weight"),
    (r"hidden_norm\.weight|encoder\.output_norm_enc\.weight", "hidden_norm.weight"),
    (r"norm\.weight|lm_head\.weight|embed_tokens\.weight", r"\g<0>"),
    (r"t2d|(?:.*\.)?rotary_emb\.inv_freq", ""),
    (r"(?:midlayer|layers\.0)\.(.*)", r"layers.0.\1"),
    (r"layers\.\d{1,3}\..*", r"\g<0>"),
    ("d2t", DRAFT_IDS),
)
"""The tensors of all block drafters, with the names of DFlash's and Muse's authors and of SpecForge."""

ARCHITECTURE = re.compile(r".*(DFlash|DSpark|MuseGlimmerAssistant).*")

DEEPSPEC = re.compile(r"(Qwen3|Gemma4)DSpark.*")
"""Heads whose layers all see the whole text, even if the target's layers do not."""

SLIDING, FULL = "sliding_attention", "full_attention"


def find_architecture(config: Config) -> str:
    """The architecture in a config; empty if it names no architecture."""
    names = config.get("architectures")
    return str(names[0]) if isinstance(names, list) and names else ""


def recognises_block(names: Collection[str], config: Config, marks: str) -> bool:
    """Whether a checkpoint holds a block drafter. (EAGLE's `hidden_norm` is inside its layer.)

    Args:
        marks: a pattern of tensors that only the kind has.
    """
    pattern = rf"hidden_norm\.weight|encoder\.(?:fc|output_norm_enc)\.weight|{marks}"
    return matches_any(pattern, names) or ARCHITECTURE.fullmatch(find_architecture(config)) is not None


def prepare(checkpoint: Checkpoint, names: Names, kind: str) -> None:
    """Renames the tensors of a published head to our names, and reads its config, see `read_config`.

    Args:
        names: the kind's names.
        kind: its `model_type`.

    Raises:
        CheckpointError: it is another kind of block drafter, or has parts that are not supported.
    """
    config, where = checkpoint.config, checkpoint.where
    flat, name = flatten(config, "dflash_config", where), find_architecture(config)
    kinds = list_kinds(flat)
    unknown = [kind for kind in kinds if kind.lower() not in ("dflash", "dflash2", "dspark")]
    if name and not ARCHITECTURE.fullmatch(name):
        unknown.append(name)
    head = flat.get("markov_head_type", "vanilla")
    for is_other, what in (
        (bool(unknown), f"is a {' '.join(unknown)!s:.60}"),
        (head != "vanilla" and flat.get("markov_rank") != 0, f"has a Markov head of type {head!r:.40}"),
        (bool(flat.get("attention_sink_bias")), "has attention sinks"),
    ):
        if is_other:
            raise CheckpointError(f"{where} {what}: supported block drafters are DFlash, DFlash 2 and plain DSpark")
    checkpoint.rename(names, kind)
    for part in ("fc.weight", "hidden_norm.weight"):
        if part not in checkpoint.tensors:
            raise CheckpointError(f"incomplete drafter: {where} is of kind {kind}, and has no {part}")
    checkpoint.config = read_config(config, checkpoint.count(r"layers\.(\d+)\..*"), where)


def list_kinds(flat: Config) -> list[str]:
    """The names of the head's kind in a config."""
    return [str(flat[key]) for key in ("speculators_model_type", "projector_type") if key in flat]


def read_config(config: Config, n_layers: int, where: str) -> Config:
    """A flat published config with the fields of `BlockArgs`, except tensor sizes, `from_anchor` and `block_size`.

    Projects store the config differently. DFlash's keys are next to those of a Qwen3 model, or under `dflash_config`.
    DeepSpec's are next to the target's whole config, which does not apply to the drafter. In speculators' configs, the
    keys of layers are under `transformer_layer_config`.

    Args:
        n_layers: how many layers the head has.

    Raises:
        CheckpointError: the target's layers that it reads are missing, or a value is not supported.
    """
    flat = flatten(config, "dflash_config", where)
    layers, entering = flat.get("target_layer_ids"), flat.get("aux_hidden_state_layer_ids")
    if layers is None and isinstance(entering, list) and all(type(layer) is int for layer in entering):
        layers = [layer - 1 for layer in entering]  # a layer's input is the output of the one before
    if not isinstance(layers, list) or not layers:
        what = "target_layer_ids, the target's layers to read"
        raise CheckpointError(f"expected {what}, in {where}/config.json, got none")
    return flat | {
        "capture_layers": layers,
        "num_layers": n_layers,
        "embedding_scale": flat.get("input_embedding_scale"),
        # Gemma's keys for full-attention layers, the only layers in its drafters
        "head_dim": flat.get("global_head_dim", flat.get("head_dim")),
        "num_key_value_heads": flat.get("num_global_key_value_heads", flat.get("num_key_value_heads")),
        **_find_layer_masks(flat, config, n_layers, where),
    }


def _find_layer_masks(flat: Config, config: Config, n_layers: int, where: str) -> Config:
    """`layer_windows` and `layer_causal`, each None if no layer has a window or is causal.

    Sliding layers are causal unless the config says otherwise. In Qwen3's configs they have a window only with
    `use_sliding_window`. If all layers have full attention, `use_swa` makes all of them sliding.
    """
    types, name = flat.get("layer_types"), find_architecture(config)
    if DEEPSPEC.fullmatch(name):
        types = None
    elif types is None and flat.get("use_sliding_window"):
        raise CheckpointError(f"{where}/config.json: expected layer_types with use_sliding_window, got none")
    types = types or [FULL] * n_layers
    if not isinstance(types, list) or len(types) != n_layers or any(each not in (FULL, SLIDING) for each in types):
        known = f"{n_layers} layer_types, each {FULL} or {SLIDING}"
        raise CheckpointError(f"{where}/config.json: expected {known}, got {types!r:.80}")
    has_window = flat.get("model_type") != "qwen3" or flat.get("use_sliding_window") is True
    window, is_causal = flat.get("sliding_window"), "Assistant" not in name
    if "speculators_model_type" in config:
        is_causal = not flat.get("sliding_window_non_causal", flat.get("speculators_model_type") == "dflash2")
    if flat.get("use_swa") and SLIDING not in types:
        types, window, is_causal = [SLIDING] * n_layers, flat.get("swa_window_size", window), False
        has_window = True
    if has_window and SLIDING in types and not is_count(window):
        raise CheckpointError(f"{where}/config.json: expected sliding_window to be at least 1, got {window!r:.40}")
    explicit = flat.get("is_causal", flat.get("causal"))
    windows = [window if has_window and each == SLIDING else 0 for each in types]
    causal = [each == SLIDING and is_causal if explicit is None else explicit is True for each in types]
    return {"layer_windows": windows if any(windows) else None, "layer_causal": causal if any(causal) else None}
