"""Gemma 4 targets and assistants: small random ones, and the pair of a golden file."""

import copy
import json
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten
from mlx_lm.utils import _get_classes

from helpers.families import CONFIGS, randomise_model
from helpers.published import GOLDEN
from helpers.small import randomised
from mlx_redrafter.drafters.gemma4_assistant import Drafter, DrafterArgs

ASSISTANT_KINDS = ("assistant", "assistant with centroids")

TARGETS = ("gemma4", "gemma4_text", "gemma4_unified")
"""The `model_type` of mlx-lm's Gemma 4 targets; layers of the first two share caches."""

LAYER_TYPES = ["sliding_attention"] * 3 + ["full_attention"]


def make_gemma4(name: str, vocab: int | None = None, **more) -> nn.Module:
    """A random target.

    Args:
        vocab: None for that of its config.
        more: replaces keys of its text config.
    """
    config = copy.deepcopy(CONFIGS["gemma4" if name == "gemma4_unified" else name])
    if name == "gemma4_unified":
        config["model_type"] = name
        more = {"num_kv_shared_layers": 0, "hidden_size_per_layer_input": 0} | more
    config["vocab_size"] = vocab or config["vocab_size"]
    config.get("text_config", config).update(more)
    model_class, args_class = _get_classes(config)
    return randomise_model(lambda: model_class(args_class.from_dict(config)))


def make_assistant(
    kind: str, model: nn.Module, *, layer_types: list[str] | None = None, **sizes
) -> Drafter:
    """A random assistant that fits a target.

    Args:
        layer_types: of its layers; None for those of published ones.
        sizes: more keys for its text config.
    """
    text = vars(model.get("language_model", model).args)
    same = ("head_dim", "global_head_dim", "num_key_value_heads", "num_global_key_value_heads")
    same += ("attention_k_eq_v", "sliding_window", "rope_parameters", "vocab_size")
    own = {key: text[key] for key in same}
    own |= {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4}
    own |= {"layer_types": layer_types or LAYER_TYPES, **sizes}
    own["num_hidden_layers"] = len(own["layer_types"])
    centroids = {"num_centroids": 4, "centroid_top_k": 2} if "centroids" in kind else {}
    args = DrafterArgs(text["hidden_size"], text["vocab_size"], own, **centroids)
    drafter = randomised(Drafter(args), 0)
    if "token_ordering" in drafter:
        ordering = np.random.default_rng(0).permutation(args.vocab_size)
        drafter.token_ordering = mx.array(ordering.astype(np.int32))
    return drafter


def publish_assistant(drafter: Drafter, directory: Path, **config) -> Path:
    """Writes an assistant as its authors do.

    Args:
        config: more keys for the config.
    """
    directory.mkdir(parents=True)
    own = drafter.args
    has_centroids = own.num_centroids is not None
    said = {
        "architectures": ["Gemma4AssistantForCausalLM"],
        "model_type": "gemma4_assistant",
        "backbone_hidden_size": own.hidden_size,
        "use_ordered_embeddings": has_centroids,
        "num_centroids": own.num_centroids or 2048,
        "centroid_intermediate_top_k": own.centroid_top_k or 32,
        "text_config": {"model_type": "gemma4_text", **own.layer_config},
    }
    arrays = {}
    for name, array in tree_flatten(drafter.parameters()):
        head, _, tail = name.partition(".")
        if head in ("centroids", "token_ordering"):
            name = f"masked_embedding.{name}"
        elif head == "output":
            name = f"model.embed_tokens.{tail}"
        elif head in ("layers", "norm"):
            name = f"model.{name}"
        arrays[name] = array.astype(mx.int64) if head == "token_ordering" else array
    mx.save_safetensors(str(directory / "model.safetensors"), arrays)
    (directory / "config.json").write_text(json.dumps(said | config), encoding="utf-8")
    return directory


def load_golden_target(name: str) -> nn.Module:
    """The target of a golden file."""
    arrays, metadata = mx.load(str(GOLDEN[name]), return_metadata=True)
    config = json.loads(metadata["target_config"])
    model_class, args_class = _get_classes(config)
    model = model_class(args_class.from_dict(config))
    prefix = "golden.target."
    given = {key.removeprefix(prefix): x for key, x in arrays.items() if key.startswith(prefix)}
    model.load_weights([*model.sanitize(given).items()])
    mx.eval(model.parameters())
    return model
