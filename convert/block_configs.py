"""What the configs of block drafters say, in our names. They are published in several packagings:

DFlash, DFlash 2   keys of a Qwen3 model, and their own under `dflash_config` or beside them
DeepSpec           all keys beside each other, of the target's config too, which say nothing about the drafter
SpecForge, LFM2.5  DSpark's keys under `dflash_config`, as far as they are not beside it
speculators        the layers' under `transformer_layer_config`
"""

from __future__ import annotations

import re
from typing import Any

from mlx_redrafter.drafters import dflash, dspark
from mlx_redrafter.drafters.config import is_count, is_positive
from mlx_redrafter.errors import CheckpointError

DEFAULT_BLOCK = 16
"""Rows of a DFlash block where the config does not say."""

DEFAULT_CANDIDATES = 16
"""Of DFlash 2's selector, where the config does not say."""

ARCHITECTURE = re.compile(r".*(DFlash|DSpark|MuseGlimmerAssistant).*")

DEEPSPEC = re.compile(r"(Qwen3|Gemma4)DSpark.*")
"""Heads that see the whole text in every layer, whatever their target does."""

SLIDING, FULL = "sliding_attention", "full_attention"

ROPES: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor",),
    "yarn": ("factor", "original_max_position_embeddings"),
    "proportional": (),
}
"""Types of rotation -> the numbers that each must say."""

Config = dict[str, Any]


def get_object(config: Config, key: str, where: str) -> Config:
    """The object under a key; empty without one.

    Raises:
        CheckpointError: there is something else.
    """
    value = config.get(key)
    if value is not None and not isinstance(value, dict):
        raise CheckpointError(f"{where}/config.json: expected {key} to be an object, got {value!r:.40}")
    return value or {}


def flatten(config: Config, where: str) -> Config:
    """A config with what its packaging nests; what it says of the drafter comes before what it says of its layers."""
    found: Config = {}
    layers, own = (get_object(config, key, where) for key in ("transformer_layer_config", "dflash_config"))
    for part in (layers, config, own):
        found |= {key: value for key, value in part.items() if value is not None}
    rope = get_object(found, "rope_parameters", where)
    if full := get_object(rope, "full_attention", where):
        found["rope_parameters"] = full
    return found


def read_rope(config: Config, where: str) -> Config:
    """What a config says of the rotation, under both names that it has there."""
    return get_object(config, "rope_scaling", where) | get_object(config, "rope_parameters", where)


def name_architecture(config: Config) -> str:
    """What a config says that the model is; empty where it does not."""
    names = config.get("architectures")
    return str(names[0]) if isinstance(names, list) and names else ""


def find_block_kind(config: Config, where: str, *, has_markov_head: bool) -> str:
    """The `model_type` of a block drafter.

    Raises:
        CheckpointError: it is one of another kind, or has parts that are not supported.
    """
    said, name = flatten(config, where), name_architecture(config)
    kinds = [str(said[key]) for key in ("speculators_model_type", "projector_type") if key in said]
    unknown = [kind for kind in kinds if kind.lower() not in ("dflash", "dflash2", "dspark")]
    if name and not ARCHITECTURE.fullmatch(name):
        unknown.append(name)
    head = said.get("markov_head_type", "vanilla")
    for is_other, what in (
        (bool(unknown), f"is a {' '.join(unknown)!s:.60}"),
        (head != "vanilla" and said.get("markov_rank") != 0, f"has a Markov head of type {head!r:.40}"),
        (bool(said.get("attention_sink_bias")), "has attention sinks"),
    ):
        if is_other:
            raise CheckpointError(f"{where} {what}: of block drafters DFlash, DFlash 2 and plain DSpark are supported")
    is_dspark = has_markov_head or "DSpark" in name or any(kind.lower() == "dspark" for kind in kinds)
    return dspark.MODEL_TYPE if is_dspark else dflash.MODEL_TYPE


def read_block_config(config: Config, kind: str, n_layers: int, where: str) -> Config:
    """The config of a block drafter, flat, with what `BlockArgs` asks for but the sizes of tensors and `block_size`.

    Args:
        kind: as `find_block_kind` says.
        n_layers: how many layers it has.

    Raises:
        CheckpointError: it does not say which layers of the target it reads, or says something that is not known.
    """
    said, name = flatten(config, where), name_architecture(config)
    is_speculators = "speculators_model_type" in config
    layers, entering = said.get("target_layer_ids"), said.get("aux_hidden_state_layer_ids")
    if layers is None and isinstance(entering, list) and all(type(layer) is int for layer in entering):
        layers = [layer - 1 for layer in entering]  # what enters a layer is the output of the one before
    if not isinstance(layers, list) or not layers:
        what = "target_layer_ids, the layers whose outputs it reads"
        raise CheckpointError(f"{where} has no config.json that says {what}")
    rope = read_rope(said, where)
    needed = ROPES.get(str(rope.get("rope_type", rope.get("type", "default"))))
    if needed is None or not all(is_positive(rope.get(key)) for key in needed):
        raise CheckpointError(f"{where}/config.json: expected a rotation of {', '.join(ROPES)}, got {rope!r:.80}")
    base = get_object(get_object(config, "speculators_config", where), "verifier", where).get("name_or_path")
    return said | {
        "base_model": base or config.get("base_model_name_or_path"),
        "capture_layers": layers,
        "num_layers": n_layers,
        "from_anchor": _is_from_anchor(said, config, is_speculators, kind, where),
        "embedding_scale": said.get("input_embedding_scale"),
        "gemma": name.startswith("Gemma4DSpark"),
        # Gemma's keys of full layers, which its drafters have
        "head_dim": said.get("global_head_dim", said.get("head_dim")),
        "num_key_value_heads": said.get("num_global_key_value_heads", said.get("num_key_value_heads")),
        "selector_top_k": said.get("selector_top_k", DEFAULT_CANDIDATES),
        **_find_sights(said, name, n_layers, is_speculators, where),
    }


def _is_from_anchor(said: Config, config: Config, is_speculators: bool, kind: str, where: str) -> bool:
    """Whether the root's row is a guess, too; of speculators' heads that do not say, as many guesses tell."""
    if "sample_from_anchor" in said:
        return said["sample_from_anchor"] is True
    if kind == dflash.MODEL_TYPE:
        return False
    methods = get_object(config, "speculators_config", where).get("proposal_methods")
    method = methods[0] if isinstance(methods, list) and methods and isinstance(methods[0], dict) else {}
    return not is_speculators or method.get("speculative_tokens", 0) == said.get("block_size")


def _find_sights(said: Config, name: str, n_layers: int, is_speculators: bool, where: str) -> Config:
    """`layer_windows` and `layer_causal`, None where no layer has one or is so.

    A row of a sliding layer sees no later row, unless the config says so; Qwen3's configs have a window only with
    `use_sliding_window`. Where all layers are full, `use_swa` makes all of them sliding.
    """
    types = said.get("layer_types")
    if DEEPSPEC.fullmatch(name):
        types = None
    elif types is None and said.get("use_sliding_window"):
        raise CheckpointError(f"{where}/config.json says use_sliding_window, but no layer_types")
    types = types or [FULL] * n_layers
    if not isinstance(types, list) or len(types) != n_layers or any(each not in (FULL, SLIDING) for each in types):
        known = f"{n_layers} layer_types, each {FULL} or {SLIDING}"
        raise CheckpointError(f"{where}/config.json: expected {known}, got {types!r:.80}")
    has_window = said.get("model_type") != "qwen3" or said.get("use_sliding_window") is True
    window, is_causal = said.get("sliding_window"), "Assistant" not in name
    if is_speculators:
        is_causal = not said.get("sliding_window_non_causal", said.get("speculators_model_type") == "dflash2")
    if said.get("use_swa") and SLIDING not in types:
        types, window, is_causal = [SLIDING] * n_layers, said.get("swa_window_size", window), False
        has_window = True
    if has_window and SLIDING in types and not is_count(window):
        raise CheckpointError(f"{where}/config.json: expected sliding_window to be a number from 1, got {window!r:.40}")
    explicit = said.get("is_causal", said.get("causal"))
    windows = [window if has_window and each == SLIDING else 0 for each in types]
    causal = [each == SLIDING and is_causal if explicit is None else explicit is True for each in types]
    return {"layer_windows": windows if any(windows) else None, "layer_causal": causal if any(causal) else None}
