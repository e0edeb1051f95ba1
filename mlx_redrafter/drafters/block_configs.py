"""Published block drafters: which config and tensors each project writes.

DFlash's keys are next to those of a Qwen3 model, or under `dflash_config`. DeepSpec's are next to the target's whole
config, which does not apply to the drafter. In speculators' configs, the keys of layers are under
`transformer_layer_config`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection

import mlx.nn as nn

from ..engine.model_parts import find_model_sizes
from ..errors import CheckpointError
from .checkpoint import DRAFT_IDS, Checkpoint, Config, matches_any
from .config import NEUTRAL, check_neutral, flatten, get_object, read_layer

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

MARKS = rf"hidden_norm\.weight|encoder\.(?:fc|output_norm_enc)\.weight|candidate_selector\..*|{MARKOV}"
"""Tensors of block drafters. (EAGLE's `hidden_norm` is inside its layer.)"""

ARCHITECTURE = re.compile(r".*(DFlash|DSpark|MuseGlimmerAssistant).*")

DEEPSPEC = re.compile(r"(Qwen3|Gemma4)DSpark.*")
"""Heads whose layers all see the whole text, even if the target's layers do not."""

DEFAULT_BLOCK, DEFAULT_CANDIDATES = 16, 16
"""The rows of a DFlash block and the candidates of its selector, if the config does not say."""

SLIDING, FULL = "sliding_attention", "full_attention"


def find_architecture(config: Config) -> str:
    """The architecture in a config; empty if it names no architecture."""
    names = config.get("architectures")
    return str(names[0]) if isinstance(names, list) and names else ""


def recognises(names: Collection[str], config: Config) -> bool:
    """Whether a checkpoint holds a block drafter."""
    return matches_any(MARKS, names) or ARCHITECTURE.fullmatch(find_architecture(config)) is not None


def sanitize(checkpoint: Checkpoint, model: nn.Module | None) -> Config:
    """Renames a published head's tensors to our names; returns our config."""
    name, flat = find_architecture(checkpoint.config), flatten(checkpoint.config, "dflash_config")
    model_type = find_model_type(checkpoint, name, flat)
    checkpoint.rename(NAMES)
    checkpoint.config, tensors = flat, checkpoint.tensors
    n_layers, layers = checkpoint.count(r"layers\.(\d+)\..*"), find_capture_layers(flat, checkpoint.where)
    if model_type == DFLASH and "block_size" not in flat:
        flat["block_size"] = DEFAULT_BLOCK
        checkpoint.notes.append(f"config.json has no block_size: {DEFAULT_BLOCK} is used")
    by_token = ("embed_tokens.weight", "markov_w1.weight", "selector.predecessor.weight")
    vocab_size = checkpoint.find_vocab_size(by_token)
    if vocab_size is None:
        if model is None:
            raise CheckpointError(f"expected vocab_size in {checkpoint.where}/config.json, got none: give --base-model")
        vocab_size = find_model_sizes(model)[1]
    checkpoint.add_row_numbers(vocab_size)
    if not DEEPSPEC.fullmatch(name):
        check_neutral(flat, NEUTRAL)
    width, n_inputs = checkpoint.shape("fc.weight")
    own_embedding = "embed_tokens.weight" in tensors
    own_head = "lm_head.weight" in tensors or DRAFT_IDS in tensors
    is_gemma = name.startswith("Gemma4DSpark")
    fields = read_layer(checkpoint, flat, "layers.0") | find_layer_masks(flat, name, n_layers)
    fields |= {
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
    return fields | read_parts(checkpoint, width)


def read_parts(checkpoint: Checkpoint, width: int) -> Config:
    """The fields of the parts that only some heads have."""
    tensors, convolution = checkpoint.tensors, "layers.0.attention_conv"
    fields = dict.fromkeys(("markov_rank", "conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k"))
    if "markov_w1.weight" in tensors:
        fields["markov_rank"] = checkpoint.shape("markov_w1.weight")[1]
    if f"{convolution}.base_kernel" in tensors:
        taps = fields["conv_kernel_size"] = checkpoint.shape(f"{convolution}.base_kernel")[1]
        fields["conv_group_size"] = 2 * taps * width // checkpoint.shape(f"{convolution}.kernel_projection.weight")[0]
    if "selector.predecessor.weight" in tensors:
        fields["selector_rank"] = checkpoint.shape("selector.predecessor.weight")[1]
        fields["selector_top_k"] = checkpoint.config.get("selector_top_k", DEFAULT_CANDIDATES)
    return fields


def find_model_type(checkpoint: Checkpoint, name: str, flat: Config) -> str:
    """The kind of a published head with this architecture."""
    kinds = [str(flat[key]).lower() for key in ("speculators_model_type", "projector_type") if key in flat]
    head = flat.get("markov_head_type", "vanilla")
    is_known = {*kinds} <= {"dflash", "dflash2", "dspark"} and (not name or ARCHITECTURE.fullmatch(name))
    if not is_known or (head != "vanilla" and flat.get("markov_rank") != 0):
        got = f"{' '.join([*kinds, name])!s:.60} with a Markov head of type {head!r:.40}"
        raise CheckpointError(f"{checkpoint.where}: expected DFlash, DFlash 2 or plain DSpark, got {got}")
    says_so = "DSpark" in name or "dspark" in kinds
    return DSPARK if says_so or matches_any(MARKOV, checkpoint.tensors.keys()) else DFLASH


def find_capture_layers(flat: Config, where: str) -> list[int]:
    """The target's layers whose outputs a head reads."""
    layers, entering = flat.get("target_layer_ids"), flat.get("aux_hidden_state_layer_ids")
    if layers is None and entering is not None:
        layers = [layer - 1 for layer in entering]  # a layer's input is the output of the one before
    if not layers:
        raise CheckpointError(f"{where}/config.json has no target_layer_ids, the target's layers to read")
    return list(layers)


def guesses_from_anchor(flat: Config, model_type: str) -> bool:
    """Whether the root's row guesses, too."""
    if "sample_from_anchor" in flat or model_type == DFLASH:
        return flat.get("sample_from_anchor") is True
    methods = get_object(flat, "speculators_config").get("proposal_methods") or [{}]
    is_speculators = "speculators_model_type" in flat
    return not is_speculators or methods[0].get("speculative_tokens", 0) == flat.get("block_size")


def find_layer_masks(flat: Config, name: str, n_layers: int) -> Config:
    """`layer_windows` and `layer_causal`, each None if no layer has a window or is causal.

    Sliding layers are causal unless the config says otherwise. In Qwen3's configs they have a window only with
    `use_sliding_window`. If all layers have full attention, `use_swa` makes all of them sliding.
    """
    types = flat.get("layer_types")
    if DEEPSPEC.fullmatch(name):
        types = None
    elif types is None and flat.get("use_sliding_window"):
        raise ValueError("expected layer_types with use_sliding_window, got none")
    types = types or [FULL] * n_layers
    if len(types) != n_layers or {*types} - {FULL, SLIDING}:
        raise ValueError(f"expected {n_layers} layer_types, each {FULL} or {SLIDING}, got {types!r:.80}")
    has_window = flat.get("model_type") != "qwen3" or flat.get("use_sliding_window") is True
    window, is_causal = flat.get("sliding_window"), "Assistant" not in name
    if "speculators_model_type" in flat:
        is_causal = not flat.get("sliding_window_non_causal", flat.get("speculators_model_type") == "dflash2")
    if flat.get("use_swa") and SLIDING not in types:
        types, window, is_causal = [SLIDING] * n_layers, flat.get("swa_window_size", window), False
        has_window = True
    if has_window and SLIDING in types and not (isinstance(window, int) and window > 0):
        raise ValueError(f"expected sliding_window to be at least 1, got {window!r:.40}")
    ropes = get_object(flat, "rope_parameters")
    if has_window and SLIDING in types and ropes.get(SLIDING) != ropes.get(FULL):
        raise ValueError(f"expected the same RoPE in all layers, got {ropes!r:.80}")
    explicit = flat.get("is_causal", flat.get("causal"))
    windows = [window if has_window and each == SLIDING else 0 for each in types]
    causal = [each == SLIDING and is_causal if explicit is None else explicit is True for each in types]
    return {"layer_windows": windows if any(windows) else None, "layer_causal": causal if any(causal) else None}
