"""Heads with a KV cache: published ones with their targets' parts, and small random ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from small import randomised, small_llama

from mlx_redrafter.drafters import dflash, dspark, eagle
from mlx_redrafter.drafters.protocol import Drafter
from mlx_redrafter.drafters.source import Source
from mlx_redrafter.engine.types import Kept

GOLDEN = Path(__file__).parent / "golden" / "cached"

Arrays = dict[str, mx.array]


def read_golden(name: str) -> tuple[Arrays, Arrays, dict[str, Any], str]:
    """(tensors by their published names, what the original computes of them, the config, the file's name)."""
    arrays, metadata = mx.load(str(GOLDEN / f"{name}.safetensors"), return_metadata=True)
    weights, golden = (
        {key.removeprefix(prefix): array for key, array in arrays.items() if key.startswith(prefix)}
        for prefix in ("weights.", "golden.")
    )
    return weights, golden, json.loads(metadata["config"]), metadata["file"]


def publish(name: str, directory: Path, *, arrays: Arrays | None = None, **config: Any) -> Path:
    """A head in its published directory.

    Args:
        arrays: other tensors than those of the golden file.
        config: other values than the published; None leaves a key out.
    """
    weights, _, said, file = read_golden(name)
    directory.mkdir(parents=True)
    mx.save_safetensors(str(directory / file), weights if arrays is None else arrays, {"format": "pt"})
    said |= config
    (directory / "config.json").write_text(json.dumps({k: v for k, v in said.items() if v is not None}))
    return directory


def make_target(name: str, drafter: Drafter, *, layers: int = 12) -> nn.Module:
    """A target with the embedding and the output matrix of a golden file, and otherwise random."""
    weights, golden, _, _ = read_golden(name)
    model = small_llama(
        hidden=drafter.args.hidden_size, vocab=drafter.args.vocab_size, layers=layers, tie_word_embeddings=False
    )
    given = weights | {key.removeprefix("target."): array for key, array in golden.items()}
    if "embed_tokens.weight" in given:
        model.model.embed_tokens.weight = given["embed_tokens.weight"]
    if "lm_head.weight" in given and given["lm_head.weight"].shape == model.lm_head.weight.shape:
        model.lm_head.weight = given["lm_head.weight"]
    return model


def tell(source: Source, hidden: mx.array, tokens: mx.array, position: int) -> None:
    """Tells a source of positions with these states (T, X), which stand side by side."""
    parts = mx.split(hidden, len(source.capture), axis=-1)
    states = dict(zip(source.capture, parts, strict=True))
    source.keep(Kept(tokens.astype(mx.int32), states, None, len(tokens), position))


BLOCK_KINDS = ("dflash", "sliding dflash", "dflash 2", "dspark", "dspark with its own head", "dspark gemma")

CACHED_KINDS = ("eagle 1", "eagle 3", *BLOCK_KINDS)


def make_cached(kind: str, hidden: int = 64, vocab: int = 40, *, layers: int = 2) -> Drafter:
    """A head of random weights for a target of these sizes."""
    sizes: dict[str, Any] = {"intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
    block: dict[str, Any] = {
        "num_layers": 2,
        "block_size": 6,
        "mask_token_id": vocab - 1,
        "capture_layers": [layers - 1, 0],
    }

    def make_dflash(**options: Any) -> Drafter:
        return dflash.Drafter(dflash.DrafterArgs(hidden, vocab, hidden, **sizes, **block, **options))

    def make_dspark(**options: Any) -> Drafter:
        args = dspark.DrafterArgs(hidden, vocab, hidden, **sizes, **block, from_anchor=True, **options)
        return dspark.Drafter(args)

    made: dict[str, Any] = {
        "dflash": make_dflash,
        "sliding dflash": lambda: make_dflash(layer_windows=[5, 0], layer_causal=[True, False]),
        "dflash 2": lambda: make_dflash(
            layer_windows=[7, 5], conv_kernel_size=2, conv_group_size=8, selector_rank=32, selector_top_k=5
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
                hidden, vocab, width=24, version=3, own_embedding=True, capture_layers=[0, layers - 1, 0], **sizes
            )
        ),
    }
    drafter: Drafter = randomised(made[kind](), 0)
    if "draft_ids" in drafter:
        drafter.draft_ids = 2 * mx.arange(len(drafter.draft_ids), dtype=mx.int32)
    return drafter
