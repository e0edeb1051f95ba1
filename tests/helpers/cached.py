"""Heads with a KV cache: published ones with parts of their targets, and small random ones."""

import json
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten

from helpers.published import Arrays, read_golden
from helpers.small import randomised, small_llama
from mlx_redrafter.drafters import block as blocks
from mlx_redrafter.drafters import eagle, mtp
from mlx_redrafter.drafters.protocol import Drafter
from mlx_redrafter.engine.source import Source
from mlx_redrafter.engine.types import Kept
from mlx_redrafter.target.target import Target


def make_target(name: str, drafter: Drafter, *, layers: int = 12) -> nn.Module:
    """A random target with the embedding and output matrix of a golden file."""
    weights, golden, _, _ = read_golden(name)
    model = small_llama(
        hidden=drafter.args.hidden_size,
        vocab=drafter.args.vocab_size,
        layers=layers,
        tie_word_embeddings=False,
    )
    given = {key.removeprefix("target."): array for key, array in golden.items()}
    given |= {key: array.astype(mx.float32) for key, array in weights.items() if key not in given}
    ends = ("embed_tokens.weight", "embeddings.weight")
    shape = model.lm_head.weight.shape
    if embedding := next(
        (name for name in given if name.endswith(ends) and given[name].shape == shape), None
    ):
        model.model.embed_tokens.weight = given[embedding]
        given.setdefault("lm_head.weight", given[embedding])
    if "lm_head.weight" in given and given["lm_head.weight"].shape == shape:
        model.lm_head.weight = given["lm_head.weight"]
    return model


def feed_states(source: Source, hidden: mx.array, tokens: mx.array, position: int):
    """Calls `source.keep` for consecutive positions;

    `hidden` (T, X) holds the captured layers side by side.
    """
    parts = mx.split(hidden, len(source.capture), axis=-1)
    states = dict(zip(source.capture, parts, strict=True))
    source.keep(Kept(tokens.astype(mx.int32), states, None, len(tokens), position))


class Reading:
    """A text with the target's hidden states, passed to a source piece by piece."""

    def __init__(self, source: Source, model: nn.Module, tokens: Sequence[int]):
        self._tokens = mx.array(tokens)
        self._hidden = Target(model, capture=source.capture).forward(self._tokens).hidden

    def feed(self, source: Source, start: int = 0, stop: int | None = None, *, known: bool = True):
        """Passes positions `start` to `stop`.

        With `known=False` the number of kept ones stays an unread array.
        """
        stop = len(self._tokens) if stop is None else stop
        part = {name: states[start:stop] for name, states in self._hidden.items()}
        count = stop - start
        source.keep(
            Kept(self._tokens[start:stop], part, None, count if known else mx.array(count), start)
        )


LAYERS = {
    "mtp qwen3_5": {
        "model_type": "qwen3_5",
        "intermediate_size": 48,
        "num_key_value_heads": 2,
        "head_dim": 8,
    },
    "mtp qwen3_next": {
        "model_type": "qwen3_next",
        "num_hidden_layers": 4,
        "intermediate_size": 48,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "linear_num_value_heads": 4,
        "linear_num_key_heads": 2,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
        "linear_conv_kernel_dim": 4,
        "num_experts": 5,
        "num_experts_per_tok": 2,
        "decoder_sparse_step": 1,
        "shared_expert_intermediate_size": 16,
        "mlp_only_layers": [],
        "moe_intermediate_size": 16,
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.5,
        "max_position_embeddings": 512,
        "norm_topk_prob": True,
    },
    "mtp deepseek_v3": {
        "model_type": "deepseek_v3",
        "moe_intermediate_size": 16,
        "n_shared_experts": 1,
        "n_routed_experts": 6,
        "num_experts_per_tok": 2,
        "n_group": 3,
        "topk_group": 2,
        "kv_lora_rank": 16,
        "q_lora_rank": 12,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 12,
        "v_head_dim": 12,
        "first_k_dense_replace": 3,
    },
}
"""Configs of small multi-token-prediction layers, without the keys they share with their targets.
"""

PLACES = {"qwen": "mtp.", "deepseek": "model.layers.3."}
"""Prefixes of published multi-token-prediction layers, for models of three layers."""


def name_as_published(drafter: mtp.Drafter, *, fused: bool = False) -> Arrays:
    """A multi-token-prediction layer under its published names and layout.

    Args:
        fused: whether one tensor holds all experts.
    """
    model_type = drafter.args.layer_config["model_type"]
    arrays = dict(tree_flatten(drafter.parameters()))
    is_qwen = model_type.startswith("qwen")
    made = Arrays()
    names = {
        "fc": "fc",
        "norm_embedding": "pre_fc_norm_embedding",
        "norm_hidden": "pre_fc_norm_hidden",
    }
    if not is_qwen:
        names = {
            "fc": "eh_proj",
            "norm_embedding": "enorm",
            "norm_hidden": "hnorm",
            "norm": "shared_head.norm",
        }
        keys, values = (
            arrays.pop(f"layer.self_attn.{name}.weight") for name in ("embed_q", "unembed_out")
        )
        latent = mx.concatenate([keys.swapaxes(1, 2), values], axis=1)
        made["self_attn.kv_b_proj.weight"] = latent.reshape(-1, latent.shape[-1])
    if fused:
        gate, up, down = (
            arrays.pop(f"layer.mlp.switch_mlp.{name}_proj.weight")
            for name in ("gate", "up", "down")
        )
        made |= {"layers.0.mlp.experts.gate_up_proj": mx.concatenate([gate, up], axis=1)}
        made |= {"layers.0.mlp.experts.down_proj": down}
    for name, array in arrays.items():
        if is_qwen and array.ndim == 1:
            array = array - 1
        head, _, tail = name.partition(".")
        ours = (
            f"{names.get(head, head)}.{tail}"
            if head != "layer"
            else f"layers.0.{tail}"
            if is_qwen
            else tail
        )
        for number, each in enumerate(array) if "switch_mlp" in ours else [(None, array)]:
            made[ours.replace("switch_mlp", f"experts.{number}")] = each
    return {PLACES["qwen" if is_qwen else "deepseek"] + name: array for name, array in made.items()}


def save_base(directory: Path, config: dict[str, Any], arrays: Arrays) -> Path:
    """A model directory: two shards hold the multi-token-prediction layer, a third the model.

    The third is not valid safetensors, so reading it fails.
    """
    directory.mkdir(parents=True)
    files = [f"model-{number:05}-of-00003.safetensors" for number in (1, 2, 3)]
    (directory / files[0]).write_bytes(b"the model itself")
    placed = dict.fromkeys(
        ("model.embed_tokens.weight", "model.layers.0.mlp.up_proj.weight"), files[0]
    )
    for at, file in enumerate(files[1:]):
        part = {
            name: array
            for number, (name, array) in enumerate(sorted(arrays.items()))
            if number % 2 == at
        }
        save_tensors(directory / file, part)
        placed |= dict.fromkeys(part, file)
    (directory / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": placed})
    )
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def save_tensors(file: Path, arrays: Arrays):
    """Writes safetensors with uint8 arrays declared as FP8 (e4m3), which MLX cannot write."""
    types = {mx.uint8: "F8_E4M3", mx.float32: "F32"}
    header = {}
    data = b""
    for name, array in arrays.items():
        raw = np.array(array).tobytes()
        place = [len(data), len(data) + len(raw)]
        header[name] = {
            "dtype": types[array.dtype],
            "shape": list(array.shape),
            "data_offsets": place,
        }
        data += raw
    text = json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(text)) + text + data)


BLOCK_KINDS = (
    "dflash",
    "sliding dflash",
    "dflash 2",
    "dspark",
    "dspark with its own head",
    "dspark gemma",
)

CACHED_KINDS = ("eagle 1", "eagle 3", *LAYERS, *BLOCK_KINDS)


def make_cached(kind: str, hidden: int = 64, vocab: int = 40, *, layers: int = 2) -> Drafter:
    """A random head for a target of these sizes."""
    if kind in LAYERS:
        own = {
            "hidden_size": hidden,
            "vocab_size": vocab,
            "num_attention_heads": 4,
            "rms_norm_eps": 1e-6,
        }
        return randomised(mtp.Drafter(mtp.DrafterArgs(hidden, vocab, LAYERS[kind] | own)), 0)
    sizes = {
        "intermediate_size": 48,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
    }
    block = {
        "num_layers": 2,
        "block_size": 6,
        "mask_token_id": vocab - 1,
        "capture_layers": [layers - 1, 0],
    }

    def make_dflash(**options):
        return blocks.Drafter(
            blocks.DrafterArgs(hidden, vocab, hidden, **sizes, **block, **options)
        )

    def make_dspark(**options):
        args = blocks.DrafterArgs(
            hidden,
            vocab,
            hidden,
            model_type="dspark",
            **sizes,
            **block,
            from_anchor=True,
            **options,
        )
        return blocks.Drafter(args)

    made = {
        "dflash": make_dflash,
        "sliding dflash": lambda: make_dflash(layer_windows=[5, 0], layer_causal=[True, False]),
        "dflash 2": lambda: make_dflash(
            layer_windows=[7, 5],
            conv_kernel_size=2,
            conv_group_size=8,
            selector_rank=32,
            selector_top_k=5,
        ),
        "dspark": lambda: make_dspark(markov_rank=32),
        "dspark with its own head": lambda: make_dspark(
            markov_rank=4, own_embedding=True, own_head=True, draft_vocab_size=(vocab + 1) // 2
        ),
        "dspark gemma": lambda: make_dspark(markov_rank=4, gemma=True, embedding_scale=8.0),
        "eagle 1": lambda: eagle.Drafter(
            eagle.DrafterArgs(hidden, vocab, width=hidden, version=1, fc_bias=True, **sizes)
        ),
        "eagle 3": lambda: eagle.Drafter(
            eagle.DrafterArgs(
                hidden,
                vocab,
                width=24,
                version=3,
                own_embedding=True,
                capture_layers=[0, layers - 1, 0],
                **sizes,
            )
        ),
    }
    drafter = randomised(made[kind](), 0)
    if "draft_ids" in drafter:
        drafter.draft_ids = 2 * mx.arange(len(drafter.draft_ids), dtype=mx.int32)
    return drafter
