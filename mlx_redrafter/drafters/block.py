"""Block drafters, DFlash and DSpark: one forward guesses a whole block of tokens.

For the text they cache only keys and values, computed from the outputs u_i of some target layers at
position i::

    c_i = norm(fc(u_i))            shared by all layers
    k_proj(c_i), v_proj(c_i)       each layer's own keys and values

After p positions, a block is the root at p and mask tokens at p + 1, p + 2, ... Its rows run
through the layers together, and see the text and each other. The block's keys and values are then
dropped. The plan sets the length of a block. As its rows see each other, a shorter draft is not a
prefix of a longer one.

    x_0 = embedding of the root, x_j = embedding of the mask token
    h   = norm(layers(x))
    row j guesses from h_j: logits = U h_j      U: an output matrix, its own or the target's

A row guesses the token at its own position, so that the root's is not used (DFlash), or at the next
one (DSpark). Heads have some of these parts:

    DSpark      a correction by the token e before: logits_j + W2 W1[e], after the multiplier and
                the cap
    DFlash 2    convolutions over the rows of the block before and after attention and MLP, and a
                selector
    Gemma 4     Gemma's layers. Values are the keys before their norm, or have their own projection,
                and are normed without a weight. The outputs of attention and MLP are normed, too.
                Embeddings are scaled

The coefficients of a convolution depend on the normed input rows y:

    conv(a)_j = sum_t (base_t + D_{j,t}) * a_{j-t}
    D_j = projection(y_j)                                   a number per group of channels

The selector ranks the K likeliest tokens c of a row, given the token e before it:

    score(c) = logit(c) + <predecessor(e) * P h_j, successor(c)>
    minus infinity for all other tokens

Published DSpark heads also estimate how likely each row is right, to end a draft early. This is
left out, as the plan fixes the length of a draft before anything is computed. A head's dtype is the
file's, but bfloat16 for float16, not the target's.

Source: z-lab/dflash, dflash/model.py, arXiv 2602.06036; deepseek-ai/DeepSpec,
deepspec/modeling/dspark/, arXiv 2607.05147. Tensors are named as there, except the selector's
codebooks.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Iterable
from dataclasses import KW_ONLY, dataclass
from functools import partial
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import KVCache

from ..engine.beam_search import Advance, State, top_w
from ..engine.plan import MAX_DRAFT_DEPTH
from ..engine.source import Source
from ..errors import CheckpointError
from ..target.model_parts import get_compute_dtype, get_head, get_model_sizes, get_module_name
from .cached import CachedSource
from .checkpoint import DRAFT_IDS, Checkpoint, Config, matches_any
from .config import NEUTRAL, LayerArgs, check_neutral, get_object, merge_parts, read_layer
from .layers import MLP, Attention
from .protocol import N_SAMPLES, Head, make_samples, scatter
from .protocol import Drafter as BaseDrafter

MODEL_TYPES = DFLASH, DSPARK = "dflash", "dspark"

NAMES = (
    (r"candidate_selector\.(predecessor|successor)_codebook(?:\.weight)?", r"selector.\1.weight"),
    (r"candidate_selector\.hidden_projection\.weight", "selector.hidden_projection.weight"),
    (r"(?:logit_head\.)?(?:markov_head\.)?(markov_w[12])\.weight", r"\1.weight"),
    (r"(?:logit_head\.)?confidence_head\..*", ""),  # not used here
    (r"encoder\.fc\.weight", "fc.weight"),
    (r"encoder\.output_norm_enc\.weight", "hidden_norm.weight"),
    (r"(?:.*\.)?rotary_emb\.inv_freq", ""),
    (r"midlayer\.(.*)", r"layers.0.\1"),
    ("d2t", DRAFT_IDS),
)
"""The names of the authors of DFlash, DSpark and Muse, and of SpecForge, which has older ones."""

MARKOV = r".*\bmarkov_w1\.weight"

MARKS = (
    rf"hidden_norm\.weight|encoder\.(?:fc|output_norm_enc)\.weight|candidate_selector\..*|{MARKOV}"
)
"""Tensors of block drafters. (EAGLE's `hidden_norm` is inside its layer.)"""

ARCHITECTURE = re.compile(r".*(DFlash|DSpark|MuseGlimmerAssistant).*")

DEEPSPEC = re.compile(r"(Qwen3|Gemma4)DSpark.*")
"""Heads whose layers all see the whole text, even if the target's layers do not."""

DEFAULT_BLOCK = 16
DEFAULT_CANDIDATES = 16
"""The rows of a DFlash block and the candidates of its selector, if the config does not say."""

SLIDING = "sliding_attention"
FULL = "full_attention"

Guess = Callable[[mx.array, int], mx.array]
"""(tokens (W,), row) -> (W, V') float32 logits of a row's guess after each of these tokens."""

Attend = Callable[[mx.array], mx.array]
"""Normed rows (B, H) -> attention's output (B, H)."""

DEFAULT_ACTIVATIONS = ("silu", "gelu_pytorch_tanh")
"""The activations of Qwen3 and of Gemma 4."""


def get_architecture(config: Config) -> str:
    """The architecture in a config; empty if it names no architecture."""
    names = config.get("architectures")
    return str(names[0]) if isinstance(names, list) and names else ""


def recognizes(names: Collection[str], config: Config) -> bool:
    """Whether a checkpoint holds a DFlash or DSpark head."""
    return bool(matches_any(MARKS, names) or ARCHITECTURE.fullmatch(get_architecture(config)))


def sanitize(checkpoint: Checkpoint, model: nn.Module | None) -> Config:
    """Renames a published head's tensors to our names; returns our config.

    DFlash's keys are next to those of a Qwen3 model, or under `dflash_config`. DeepSpec's are next
    to the target's whole config, which does not apply to the drafter. In speculators' configs, the
    keys of layers are under `transformer_layer_config`.
    """
    name = get_architecture(checkpoint.config)
    flat = merge_parts(checkpoint.config, "dflash_config")
    model_type = choose_model_type(checkpoint, name, flat)
    checkpoint.rename(NAMES)
    tensors = checkpoint.tensors
    checkpoint.config = flat
    n_layers = checkpoint.count(r"layers\.(\d+)\..*")
    layers = get_capture_layers(flat)
    if not layers:
        raise CheckpointError(
            f"{checkpoint.where}/config.json has no target_layer_ids, the target's layers to read"
        )
    if model_type == DFLASH and "block_size" not in flat:
        flat["block_size"] = DEFAULT_BLOCK
        checkpoint.notes.append(f"config.json has no block_size: {DEFAULT_BLOCK} is used")
    by_token = ("embed_tokens.weight", "markov_w1.weight", "selector.predecessor.weight")
    vocab_size = checkpoint.get_vocab_size(by_token)
    if vocab_size is None:
        if model is None:
            raise CheckpointError(
                f"expected vocab_size in {checkpoint.where}/config.json, "
                "got none: give --base-model"
            )
        vocab_size = get_model_sizes(model)[1]
    checkpoint.convert_offsets(vocab_size)
    if not DEEPSPEC.fullmatch(name):
        check_neutral(flat, NEUTRAL)
    width, n_inputs = checkpoint.shape("fc.weight")
    own_embedding = "embed_tokens.weight" in tensors
    own_head = "lm_head.weight" in tensors or DRAFT_IDS in tensors
    is_gemma = name.startswith("Gemma4DSpark")
    return {
        **read_layer(checkpoint, flat, "layers.0"),
        **parse_layer_masks(flat, name, n_layers),
        **read_parts(checkpoint, width),
        "model_type": model_type,
        "vocab_size": vocab_size,
        "hidden_size": n_inputs // len(layers) if own_embedding and own_head else width,
        "capture_layers": layers,
        "num_layers": n_layers,
        "from_anchor": guesses_from_anchor(flat, model_type),
        "own_embedding": own_embedding,
        "own_head": own_head,
        "output_multiplier": flat.get("output_multiplier", flat.get("logit_scale", 1.0)),
        "attention_bias": "layers.0.self_attn.q_proj.bias" in tensors,
        "embedding_scale": math.sqrt(width) if is_gemma else flat.get("input_embedding_scale"),
        "gemma": is_gemma,
        "own_values": is_gemma and "layers.0.self_attn.v_proj.weight" in tensors,
    }


def read_parts(checkpoint: Checkpoint, width: int) -> Config:
    """The fields of the parts that only some heads have."""
    tensors = checkpoint.tensors
    convolution = "layers.0.attention_conv"
    # A config may name parts that it does not have.
    sizes = "markov_rank conv_kernel_size conv_group_size selector_rank selector_top_k"
    fields: Config = dict.fromkeys(sizes.split())
    if "markov_w1.weight" in tensors:
        fields["markov_rank"] = checkpoint.shape("markov_w1.weight")[1]
    if f"{convolution}.base_kernel" in tensors:
        taps = checkpoint.shape(f"{convolution}.base_kernel")[1]
        n_groups = checkpoint.shape(f"{convolution}.kernel_projection.weight")[0]
        fields["conv_kernel_size"] = taps
        fields["conv_group_size"] = 2 * taps * width // n_groups
    if "selector.predecessor.weight" in tensors:
        fields["selector_rank"] = checkpoint.shape("selector.predecessor.weight")[1]
        fields["selector_top_k"] = checkpoint.config.get("selector_top_k", DEFAULT_CANDIDATES)
    return fields


def choose_model_type(checkpoint: Checkpoint, name: str, flat: Config) -> str:
    """The kind of a published head with this architecture."""
    keys = ("speculators_model_type", "projector_type")
    kinds = [str(flat[key]).lower() for key in keys if key in flat]
    head = flat.get("markov_head_type", "vanilla")
    is_known = not name or ARCHITECTURE.fullmatch(name)
    is_plain = head == "vanilla" or flat.get("markov_rank") == 0
    if not is_known or not is_plain or {*kinds} - {"dflash", "dflash2", "dspark"}:
        expected = f"{checkpoint.where}: expected DFlash, DFlash 2 or plain DSpark"
        raise CheckpointError(
            f"{expected}, got "
            f"{' '.join([*kinds, name])!s:.60} with a Markov head of type {head!r:.40}"
        )
    says_so = "DSpark" in name or "dspark" in kinds
    return DSPARK if says_so or matches_any(MARKOV, checkpoint.tensors.keys()) else DFLASH


def get_capture_layers(flat: Config) -> list[int]:
    """The target's layers whose outputs a head reads; empty if its config does not name them."""
    # A layer's input is the output of the one before.
    entering = flat.get("aux_hidden_state_layer_ids") or []
    return flat.get("target_layer_ids") or [layer - 1 for layer in entering]


def guesses_from_anchor(flat: Config, model_type: str) -> bool:
    """Whether the root's row guesses, too."""
    if "sample_from_anchor" in flat or model_type == DFLASH:
        return flat.get("sample_from_anchor") is True
    methods = get_object(flat, "speculators_config").get("proposal_methods") or [{}]
    is_speculators = "speculators_model_type" in flat
    return not is_speculators or methods[0].get("speculative_tokens", 0) == flat.get("block_size")


def parse_layer_masks(flat: Config, name: str, n_layers: int) -> Config:
    """`layer_windows` and `layer_causal`, each None if no layer has a window or is causal.

    Sliding layers are causal unless the config says otherwise. In Qwen3's configs they have a
    window only with `use_sliding_window`. If all layers have full attention, `use_swa` makes all of
    them sliding.
    """
    types = flat.get("layer_types")
    if DEEPSPEC.fullmatch(name):
        types = None
    elif types is None and flat.get("use_sliding_window"):
        raise ValueError("expected layer_types with use_sliding_window, got none")
    types = types or [FULL] * n_layers
    if len(types) != n_layers or {*types} - {FULL, SLIDING}:
        raise ValueError(
            f"expected {n_layers} layer_types, each {FULL} or {SLIDING}, got {types!r:.80}"
        )

    has_window = flat.get("model_type") != "qwen3" or flat.get("use_sliding_window") is True
    window = flat.get("sliding_window")
    is_causal = "Assistant" not in name
    if "speculators_model_type" in flat:
        sees_later = flat["speculators_model_type"] == "dflash2"
        is_causal = not flat.get("sliding_window_non_causal", sees_later)
    if flat.get("use_swa") and SLIDING not in types:
        types = [SLIDING] * n_layers
        window = flat.get("swa_window_size", window)
        is_causal = False
        has_window = True
    has_window = has_window and SLIDING in types
    if has_window and not (isinstance(window, int) and window > 0):
        raise ValueError(f"expected sliding_window to be at least 1, got {window!r:.40}")
    ropes = get_object(flat, "rope_parameters")
    if has_window and ropes.get(SLIDING) != ropes.get(FULL):
        raise ValueError(f"expected the same RoPE in all layers, got {ropes!r:.80}")

    explicit = flat.get("is_causal", flat.get("causal"))
    windows = [window if has_window and each == SLIDING else 0 for each in types]
    causal = [each == SLIDING and is_causal for each in types]
    if explicit is not None:
        causal = [explicit is True] * n_layers
    return {
        "layer_windows": windows if any(windows) else None,
        "layer_causal": causal if any(causal) else None,
    }


@dataclass(frozen=True)
class DrafterArgs(LayerArgs):
    """The config of a block drafter.

    Attributes:
        num_layers: L.
        block_size: B, the most rows of a block, the root's included.
        mask_token_id: the token whose embedding is used for unknown tokens.
        from_anchor: whether each row j, including the root's, guesses the token at p + j + 1
            instead of p + j.
        attention_bias: whether the attention projections have biases.
        own_embedding, own_head: whether it has its own embedding and output matrix; if not, it uses
            the target's.
        layer_windows: for each layer, how many positions a row sees, including its own, or 0 for
            all; None if all layers see all.
        layer_causal: for each layer, whether a row sees no later row; None if no layer is causal.
        embedding_scale: a factor for embeddings; None for the target's.
        output_multiplier: a factor for logits.
        final_logit_softcapping: the cap of the multiplied logits; None for none.
        markov_rank: the rank of W1 and W2; None without them.
        conv_kernel_size: how many rows a convolution reads; None without convolutions.
        conv_group_size: how many channels share a coefficient.
        selector_rank, selector_top_k: the rank of the selector's codebooks, and K, the number of
            candidates; None without a selector.
        gemma: whether its layers are Gemma 4's.
        own_values: whether Gemma's layers have a projection for values; if not, values are made
            from the keys.
    """

    num_layers: int
    block_size: int
    mask_token_id: int
    _: KW_ONLY
    from_anchor: bool = False
    attention_bias: bool = False
    own_embedding: bool = False
    own_head: bool = False
    layer_windows: list[int] | None = None
    layer_causal: list[bool] | None = None
    embedding_scale: float | None = None
    output_multiplier: float = 1.0
    final_logit_softcapping: float | None = None
    markov_rank: int | None = None
    conv_kernel_size: int | None = None
    conv_group_size: int | None = None
    selector_rank: int | None = None
    selector_top_k: int | None = None
    gemma: bool = False
    own_values: bool = False
    model_type: str = MODEL_TYPES[0]

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 1 <= self.max_depth <= MAX_DRAFT_DEPTH:
            raise ValueError(
                f"expected block_size to draft 1 to {MAX_DRAFT_DEPTH} tokens, got {self.block_size}"
            )
        # MLX reads beyond an embedding without an error.
        if not 0 <= self.mask_token_id < self.vocab_size:
            raise ValueError(
                f"expected mask_token_id below {self.vocab_size}, got {self.mask_token_id}"
            )

    @property
    def max_depth(self) -> int:
        """The most tokens that it can draft: the number of rows that guess."""
        return self.block_size - (not self.from_anchor)

    @property
    def layer_masks(self) -> list[tuple[int, bool]]:
        """For each layer, (the window of its mask or 0 for none, whether the mask is causal)."""
        windows = self.layer_windows or [0] * self.num_layers
        causal = self.layer_causal or [False] * self.num_layers
        return list(zip(windows, causal, strict=True))

    def describe_sizes(self) -> str:
        kind = "DFlash 2, " if self.conv_kernel_size else ""
        return (
            f"{kind}block {self.block_size}, layers {self.num_layers}, {super().describe_sizes()}"
        )


class Layer(nn.Module):
    """A layer of Qwen3."""

    def __init__(self, args: Any) -> None:
        super().__init__()
        bias = args.attention_bias
        kind = GemmaAttention if args.gemma else Attention
        self.self_attn: Attention = kind(args, args.width, bias, bias, True)
        activation = args.hidden_act or DEFAULT_ACTIVATIONS[args.gemma]
        self.mlp = MLP(args.width, args.intermediate_size, activation)
        self.input_layernorm = nn.RMSNorm(args.width, args.rms_norm_eps)
        self.post_attention_layernorm = nn.RMSNorm(args.width, args.rms_norm_eps)

    def __call__(self, rows: mx.array, attend: Attend) -> mx.array:
        """(B, H) the output for a block's rows (B, H)."""
        rows = rows + attend(self.input_layernorm(rows))
        return rows + self.mlp(self.post_attention_layernorm(rows))


class Convolution(nn.Module):
    """The two convolutions around a part of a layer, attention or MLP."""

    def __init__(self, args: Any) -> None:
        super().__init__()
        taps = args.conv_kernel_size
        self.group_size = args.conv_group_size
        self.base_kernel = mx.zeros((2, taps, args.width))
        n_outputs = 2 * taps * args.width // self.group_size
        self.kernel_projection = nn.Linear(args.width, n_outputs, bias=False)

    def __call__(self, rows: mx.array, part: Callable[[mx.array], mx.array]) -> mx.array:
        """(B, H): rows (B, H) after a convolution, `part` and another convolution."""
        taps = self.base_kernel.shape[1]
        changes = self.kernel_projection(rows).reshape(len(rows), 2, taps, -1)
        kernels = self.base_kernel + mx.repeat(changes, self.group_size, axis=-1)
        before, after = kernels.swapaxes(0, 1)
        return convolve(part(convolve(rows, before)), after)


def convolve(rows: mx.array, kernels: mx.array) -> mx.array:
    """(B, H) the sum of each row and the rows before it, weighted by kernels (B, taps, H).

    Zeros precede row 0.
    """
    taps = kernels.shape[1]
    padded = mx.pad(rows, [(taps - 1, 0), (0, 0)])
    moved = [padded[taps - 1 - tap : taps - 1 - tap + len(rows)] for tap in range(taps)]
    return (mx.stack(moved, axis=1) * kernels).sum(axis=1)


class ConvolvedLayer(Layer):
    """A layer of DFlash 2."""

    def __init__(self, args: Any) -> None:
        super().__init__(args)
        self.attention_conv = Convolution(args)
        self.mlp_conv = Convolution(args)

    def __call__(self, rows: mx.array, attend: Attend) -> mx.array:
        rows = rows + self.attention_conv(self.input_layernorm(rows), attend)
        return rows + self.mlp_conv(self.post_attention_layernorm(rows), self.mlp)


class Selector(nn.Module):
    """Low-rank scores of pairs of tokens."""

    def __init__(self, args: Any) -> None:
        super().__init__()
        self.predecessor = nn.Embedding(args.vocab_size, args.selector_rank)
        self.successor = nn.Embedding(args.vocab_size, args.selector_rank)
        self.hidden_projection = nn.Linear(args.width, args.selector_rank, bias=False)

    def __call__(self, tokens: mx.array, candidates: mx.array, state: mx.array) -> mx.array:
        """(W, K) float32 scores of candidates (K,) after each token (W,).

        Args:
            state: (H,) the row's final state.
        """
        before = self.predecessor(tokens) * self.hidden_projection(state)
        scores: mx.array = before @ self.successor(candidates).T
        return scores.astype(mx.float32)


class GemmaAttention(Attention):
    """Attention of Gemma 4's full layers."""

    def make_values(self, rows: mx.array, keys: mx.array) -> mx.array:
        values = super().make_values(rows, keys) if "v_proj" in self else keys
        return mx.fast.rms_norm(values, None, self.k_norm.eps)


class GemmaLayer(Layer):
    """A layer of Gemma 4."""

    def __init__(self, args: Any) -> None:
        super().__init__(args)
        self.self_attn.scale = 1.0
        if not args.own_values:
            del self.self_attn.v_proj
        self.pre_feedforward_layernorm = nn.RMSNorm(args.width, args.rms_norm_eps)
        self.post_feedforward_layernorm = nn.RMSNorm(args.width, args.rms_norm_eps)
        self.layer_scalar = mx.ones((1,))

    def __call__(self, rows: mx.array, attend: Attend) -> mx.array:
        rows = rows + self.post_attention_layernorm(attend(self.input_layernorm(rows)))
        out = self.mlp(self.pre_feedforward_layernorm(rows))
        return self.layer_scalar * (rows + self.post_feedforward_layernorm(out))


class Drafter(BaseDrafter):
    """A block drafter.

    It computes in its own dtype. Outputs of a target's layers may overflow float16, so heads stored
    in float16 are read as bfloat16.
    """

    takes_float16 = False
    args: DrafterArgs

    def __init__(self, args: DrafterArgs) -> None:
        super().__init__(args)
        width = args.width
        self.fc = nn.Linear(self.n_inputs, width, bias=False)
        self.hidden_norm = nn.RMSNorm(width, args.rms_norm_eps)
        kind = Layer if args.conv_kernel_size is None else ConvolvedLayer
        if args.gemma:
            kind = GemmaLayer
        self.layers: list[Layer] = [kind(args) for _ in args.layer_masks]
        self.norm = nn.RMSNorm(width, args.rms_norm_eps)
        if args.own_embedding:
            self.embed_tokens = nn.Embedding(args.vocab_size, width)
        if args.own_head:
            self.lm_head = nn.Linear(width, args.n_guesses, bias=False)
        if args.markov_rank is not None:
            self.markov_w1 = nn.Embedding(args.vocab_size, args.markov_rank)
            self.markov_w2 = nn.Linear(args.markov_rank, args.n_guesses, bias=False)
        if args.selector_rank is not None:
            self.selector = Selector(args)
        self.hold_draft_ids()

    @property
    def n_inputs(self) -> int:
        """The width of the target's concatenated states."""
        return self.args.hidden_size * len(self.args.capture_layers or [])

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
        self,
        embedded: mx.array,
        position: mx.array,
        caches: Iterable[KVCache],
        masks: Iterable[mx.array],
    ) -> mx.array:
        """(B, H) the final states of a block.

        Args:
            embedded: (B, H) the root and the mask tokens.
            position: () int32, the root's.
            caches, masks: one for each layer, see `Attention`.
        """
        rows = embedded.astype(self.dtype)
        for layer, cache, mask in zip(self.layers, caches, masks, strict=True):
            attend = partial(layer.self_attn, position=position, cache=cache, mask=mask)
            rows = layer(rows, attend)
        return self.norm(rows)

    def make_guess(self, states: mx.array, head: Head) -> Guess:
        """The guesses of rows with final states (D, H).

        With W1 and W2 or a selector they depend on the token before.

        Args:
            head: its own or the target's output matrix.
        """
        logits = head(states).astype(mx.float32) * self.args.output_multiplier
        cap = self.args.final_logit_softcapping
        if cap is not None:
            logits = cap * mx.tanh(logits / cap)
        count = min(self.args.selector_top_k or 1, self.args.n_guesses)

        def guess(tokens: mx.array, row: int) -> mx.array:
            guesses = mx.broadcast_to(logits[row], (len(tokens), logits.shape[1]))
            if "markov_w1" in self:
                guesses = guesses + self.markov_w2(self.markov_w1(tokens))
            if "selector" not in self:
                return guesses
            candidates = top_w(logits[row], count)
            scores = guesses[:, candidates] + self.selector(tokens, candidates, states[row])
            return scatter(scores, candidates, guesses.shape[1])

        return guess

    def sample_logits(self) -> mx.array:
        """Logits of at most eight rows of a fixed random block after eight positions.

        A drafter that uses the target's output matrix returns their final states instead.
        """
        args = self.args
        states, embedded = make_samples(self.n_inputs, args.width)
        count = min(N_SAMPLES, args.max_depth)
        caches = [KVCache() for _ in self.layers]
        self.append(states, 0, caches)
        masks = [mx.ones((count, N_SAMPLES + count), mx.bool_)] * len(caches)
        rows = self.run(embedded[:count], mx.array(N_SAMPLES), caches, masks)
        if "lm_head" not in self:
            return rows.astype(mx.float32)
        guess = self.make_guess(rows, self.lm_head)
        tokens = mx.arange(count) % args.vocab_size
        return mx.concatenate([guess(tokens[row : row + 1], row) for row in range(count)])

    @property
    def output_layers(self) -> list[nn.Module]:
        own = super().output_layers
        return [*own, self.markov_w2] if own and "markov_w2" in self else own

    def name_part(self, name: str) -> str:
        if name in ("markov_w1", "selector.predecessor", "selector.successor"):
            return "embedding"
        return "head" if name == "markov_w2" else super().name_part(name)


class BlockSource(CachedSource):
    """The source of a block drafter.

    Each layer's cache holds the text's keys and values, then a block's.

    Args:
        drafter: its weights.
        model: the target.
    """

    drafter: Drafter

    def __init__(self, drafter: Drafter, model: nn.Module) -> None:
        args = drafter.args
        super().__init__(drafter, model, args.capture_layers or [], args.num_layers)
        windows = [window for window, _ in args.layer_masks]
        self._window = max(windows) if all(windows) else None
        self._positions = mx.array([], mx.int32)  # of the rows; needs no evaluation
        is_gemma = get_module_name(model).startswith("gemma")
        scale = math.sqrt(args.hidden_size) if is_gemma else 1.0
        self._scale = scale if args.embedding_scale is None else args.embedding_scale
        # In its own dtype, to avoid a copy in another one.
        head = get_head(model)
        dtype = get_compute_dtype(model)
        self._head: Head = drafter.get("lm_head", lambda states: head(states.astype(dtype)))

    def append_rows(self, hidden: mx.array, tokens: mx.array, position: int) -> mx.array:
        """Appends rows; the tokens are not used."""
        own = mx.arange(position, position + len(hidden))
        self._positions = mx.concatenate([self._positions[: self._caches[0].offset], own])
        return self.drafter.append(hidden, position, self._caches)

    def _drop_oldest(self) -> None:
        before = self._n_rows
        super()._drop_oldest()
        if self._n_rows < before:
            self._positions = self._positions[before - self._n_rows : before]

    def begin(self, root: mx.array, depth: int = 1) -> Advance:
        """Runs a block. Beyond `depth`, which no plan reaches, the last row's guess is repeated."""
        _, sees, position = self.append_pending(root)
        drafter = self.drafter
        args = self.drafter.args
        first = 0 if args.from_anchor else 1
        unknown = mx.full((first + depth - 1,), args.mask_token_id)
        tokens = mx.concatenate([root.reshape(1).astype(mx.int32), unknown])
        own = position + mx.arange(len(tokens))
        near = len(self._waiting[-1].tokens) + len(tokens) - 2
        masks: dict[tuple[int, bool], mx.array] = {}
        for window, causal in set(args.layer_masks):
            mask = make_mask(sees, self._positions, own, window, causal)
            # All rows before these columns are outside the window.
            masks[window, causal] = mask[:, -(window + near) :] if window else mask

        embedded = self._scale * self._embed(tokens)
        each = (masks[kind] for kind in args.layer_masks)
        rows = drafter.run(embedded, position, self._caches, each)
        guess = drafter.make_guess(rows[first:], self._head)

        def advance(tokens: mx.array, state: State) -> tuple[mx.array, State]:
            row = state or 0
            return drafter.scatter(guess(tokens, min(row, depth - 1))), row + 1

        return advance

    @property
    def arrays(self) -> Any:
        return *super().arrays, self._positions


def make_mask(
    sees: mx.array, positions: mx.array, own: mx.array, window: int, causal: bool
) -> mx.array:
    """(B, R + B) bool: which rows of the text, then of the block, each row of the block sees.

    Args:
        sees: (R,) bool, which rows of the text a block sees.
        positions: (R,) int32, of the text's rows.
        own: (B,) int32, the positions of the block's rows.
        window: a row sees positions at a distance below this, before and after; 0 for all.
        causal: whether a row sees no later row of its block.
    """
    block = mx.ones((len(own), len(own)), mx.bool_)
    mask = mx.concatenate([mx.broadcast_to(sees, (len(own), len(sees))), block], axis=1)
    distance = own[:, None] - mx.concatenate([positions, own])
    if window:
        mask = mask & (mx.abs(distance) < window)
    return mask & (distance >= 0) if causal else mask
