"""Trains the demo's target: a llama of six million parameters, from scratch, in float32, on two cores.

Muon moves the matrices and AdamW the rest; the learning rate warms up, stays, then falls to zero. Contexts
are 256 tokens long at first and 512 in the last quarter. A checkpoint every few minutes makes it resumable.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
from mlx.utils import tree_flatten
from mlx_lm.models.llama import Model, ModelArgs

from mlx_redrafter.training.trainer import fit

BATCH_TOKENS = 2048
SHORT, LONG = 256, 512
LONG_FROM = 0.75
DECAY_FROM = 0.52


def config(vocab_size: int, eos_token_id: int) -> dict[str, Any]:
    """The target's `config.json`."""
    return {
        "model_type": "llama",
        "hidden_size": 384,
        "num_hidden_layers": 4,
        "intermediate_size": 768,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "max_position_embeddings": 2048,
        "vocab_size": vocab_size,
        "tie_word_embeddings": True,
        "eos_token_id": eos_token_id,
    }


def draft_config(vocab_size: int, eos_token_id: int) -> dict[str, Any]:
    """The `config.json` of a model a tenth as large, which mlx-lm's own speculation drafts with in the benchmarks."""
    return config(vocab_size, eos_token_id) | {
        "hidden_size": 128,
        "num_hidden_layers": 2,
        "intermediate_size": 384,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
    }


def new_model(settings: dict[str, Any], seed: int) -> Model:
    """A llama whose residual branches start at zero."""
    mx.random.seed(seed)
    model = Model(ModelArgs.from_dict(settings))
    model.model.embed_tokens.weight = mx.random.normal((settings["vocab_size"], settings["hidden_size"])) * 0.02
    for layer in model.layers:
        for last in (layer.self_attn.o_proj, layer.mlp.down_proj):
            last.weight = mx.zeros_like(last.weight)
    mx.eval(model.parameters())
    return model


def next_token_loss(model: Model, batch: mx.array) -> mx.array:
    """Mean cross-entropy in nats of `batch` (B, T + 1) given what stands before each token."""
    return nn.losses.cross_entropy(model(batch[:, :-1]), batch[:, 1:]).mean()


def batches(tokens: np.ndarray, steps: int, seed: int) -> Callable[[int], mx.array]:
    """step -> (B, T + 1) token ids; every window is seen once before any is seen again."""
    rng = np.random.default_rng(seed)
    orders = {t: rng.permutation(len(tokens) // t - 1) * t for t in (SHORT, LONG)}

    def batch(step: int) -> mx.array:
        length = LONG if step >= LONG_FROM * steps else SHORT
        rows, order = BATCH_TOKENS // length, orders[length]
        at = (step * rows + np.arange(rows)) % len(order)
        return mx.array(np.stack([tokens[i : i + length + 1] for i in order[at]]).astype(np.int32))

    return batch


def rate(peak: float, steps: int) -> Callable[[mx.array], mx.array]:
    """step -> learning rate: warm-up over 40 steps, constant, then linear to zero."""
    return lambda step: peak * mx.minimum(mx.minimum(1.0, (step + 1) / 40), (1 - step / steps) / (1 - DECAY_FROM))


def bits_per_byte(model: Model, tokens: np.ndarray, n_bytes: int) -> float:
    """Bits the model needs for each byte of `tokens`, in windows of LONG tokens without overlap."""
    nats = 0.0
    for i in range(0, len(tokens) - 1, LONG):
        window = mx.array(tokens[i : i + LONG + 1].astype(np.int32))[None]
        nats += next_token_loss(model, window).item() * (window.shape[1] - 1)
    return nats / math.log(2) / n_bytes


def train(tokens: np.ndarray, settings: dict[str, Any], steps: int, directory: Path, seed: int = 0) -> Model:
    """The trained model, also saved to `directory` in float16 in the layout that mlx-lm loads."""
    model = new_model(settings, seed)
    adam = optim.AdamW(rate(3e-3, steps), betas=[0.9, 0.95], weight_decay=0.0)
    muon = optim.Muon(rate(1e-2, steps), weight_decay=0.0, ns_steps=4)
    optimizer = optim.MultiOptimizer([muon, adam], [lambda name, w: w.ndim == 2 and "embed" not in name])
    batch = batches(tokens, steps, seed)

    def loss(ids: mx.array) -> tuple[mx.array, dict[str, mx.array]]:
        nats = next_token_loss(model, ids)
        return nats, {"loss": nats}

    checkpoint = directory / "training.safetensors"
    fit(model, optimizer, loss, lambda step: [batch(step)], steps, name="target", checkpoint=checkpoint)
    half = {k: v.astype(mx.float16) for k, v in tree_flatten(model.parameters())}
    mx.save_safetensors(str(directory / "model.safetensors"), half, {"format": "mlx"})
    (directory / "config.json").write_text(json.dumps(settings, indent=2) + "\n")
    return model
