"""Trains the demo's target, a llama from scratch, with torch: in bfloat16, on a GPU or on the CPU's
matrix units.

Muon moves the matrices and AdamW the rest; the learning rate warms up, stays, then falls to zero,
on other text than before. Contexts are 512 tokens long at first and 1024 in the last quarter. A
checkpoint every few minutes makes it resumable.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from mlx_redrafter.files import replace_file

BATCH_TOKENS = 2048
SHORT = 512
LONG = 1024
LONG_FROM = 0.75
WARM_UP = 40
DECAY_FROM = 0.5
ADAM_RATE = 3e-3
MUON_RATE = 1e-2
EDIT_LENGTHS = {"exercises": 256, "short": 256, "edits": 512}
EDIT_PHASES: tuple[tuple[float, dict[str, int]], ...] = (
    (0.2, {"exercises": 8, "short": 3, "text": 1}),
    (0.5, {"exercises": 2, "short": 8, "text": 2}),
    (1.0, {"edits": 5, "text": 1}),
)
TEXT_WEIGHT = 0.5
CHECKPOINT_SECONDS = 240

# step -> (B, T + 1) ids and the (B, T) weights of the last T
Batches = Callable[[int], tuple[np.ndarray, np.ndarray]]


def make_config(vocab_size: int, eos_token_id: int) -> dict[str, Any]:
    """The target's `config.json`: 25 million parameters."""
    return {
        "model_type": "llama",
        "hidden_size": 512,
        "num_hidden_layers": 8,
        "intermediate_size": 1408,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "max_position_embeddings": 2048,
        "vocab_size": vocab_size,
        "tie_word_embeddings": True,
        "eos_token_id": eos_token_id,
    }


def make_draft_config(vocab_size: int, eos_token_id: int) -> dict[str, Any]:
    """The `config.json` of a model of 1.2 million parameters, for mlx-lm's own speculation."""
    return make_config(vocab_size, eos_token_id) | {
        "hidden_size": 160,
        "num_hidden_layers": 2,
        "intermediate_size": 448,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
    }


class Attention(nn.Module):
    def __init__(self, args: dict[str, Any]) -> None:
        super().__init__()
        self.heads = args["num_attention_heads"]
        self.kv_heads = args["num_key_value_heads"]
        dims = args["hidden_size"]
        self.head_dim = dims // self.heads
        self.q_proj = nn.Linear(dims, dims, bias=False)
        self.k_proj = nn.Linear(dims, self.kv_heads * self.head_dim, bias=False)
        self.v_proj = nn.Linear(dims, self.kv_heads * self.head_dim, bias=False)
        self.o_proj = nn.Linear(dims, dims, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, length, dims = x.shape
        q = rotate(self.q_proj(x).view(batch, length, self.heads, self.head_dim), cos, sin)
        k = rotate(self.k_proj(x).view(batch, length, self.kv_heads, self.head_dim), cos, sin)
        v = self.v_proj(x).view(batch, length, self.kv_heads, self.head_dim)
        groups = self.heads // self.kv_heads
        q, k, v = (
            q.transpose(1, 2),
            *(t.transpose(1, 2).repeat_interleave(groups, 1) for t in (k, v)),
        )
        # Written out, as torch's fused attention is slower on a CPU's matrix units than two
        # products and a softmax.
        future = torch.ones(length, length, dtype=torch.bool, device=x.device).triu(1)
        scores = (q @ k.transpose(-1, -2) * self.head_dim**-0.5).masked_fill(future, float("-inf"))
        out = torch.softmax(scores, -1, dtype=torch.float32).to(v.dtype) @ v
        return self.o_proj(out.transpose(1, 2).reshape(batch, length, dims))


class MLP(nn.Module):
    def __init__(self, args: dict[str, Any]) -> None:
        super().__init__()
        dims = args["hidden_size"]
        inner = args["intermediate_size"]
        self.gate_proj = nn.Linear(dims, inner, bias=False)
        self.up_proj = nn.Linear(dims, inner, bias=False)
        self.down_proj = nn.Linear(inner, dims, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    def __init__(self, args: dict[str, Any]) -> None:
        super().__init__()
        self.self_attn = Attention(args)
        self.mlp = MLP(args)
        self.input_layernorm = nn.RMSNorm(args["hidden_size"], args["rms_norm_eps"])
        self.post_attention_layernorm = nn.RMSNorm(args["hidden_size"], args["rms_norm_eps"])

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        return x + self.mlp(self.post_attention_layernorm(x))


class Llama(nn.Module):
    """mlx-lm's llama, parameter names included; the residual branches start at zero."""

    def __init__(self, args: dict[str, Any]) -> None:
        super().__init__()
        self.model = nn.Module()
        self.model.embed_tokens = nn.Embedding(args["vocab_size"], args["hidden_size"])
        self.model.layers = nn.ModuleList(Block(args) for _ in range(args["num_hidden_layers"]))
        self.model.norm = nn.RMSNorm(args["hidden_size"], args["rms_norm_eps"])
        half = args["hidden_size"] // args["num_attention_heads"] // 2
        frequencies = args["rope_theta"] ** (-torch.arange(half) / half)
        angles = torch.arange(LONG)[:, None] * frequencies
        self.register_buffer("cos", angles.cos()[:, None], persistent=False)
        self.register_buffer("sin", angles.sin()[:, None], persistent=False)
        nn.init.normal_(self.model.embed_tokens.weight, std=0.02)
        for block in self.model.layers:
            nn.init.zeros_(block.self_attn.o_proj.weight)
            nn.init.zeros_(block.mlp.down_proj.weight)

    def forward(self, ids: Tensor) -> Tensor:
        """(B, T) ids -> (B, T, V) logits."""
        x = self.model.embed_tokens(ids)
        cos = self.cos[: ids.shape[1]]
        sin = self.sin[: ids.shape[1]]
        for block in self.model.layers:
            x = block(x, cos, sin)
        return F.linear(self.model.norm(x), self.model.embed_tokens.weight)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x (B, T, H, D) with rotary positions, the halves of D as pairs."""
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(x.dtype)


def compute_loss(model: Callable[[Tensor], Tensor], ids: Tensor, weights: Tensor) -> Tensor:
    """Mean cross-entropy in nats of `ids` (B, T + 1) given what stands before each token.

    Args:
        weights: (B, T) of the tokens.
    """
    logits = model(ids[:, :-1])
    losses = F.cross_entropy(logits.flatten(0, 1).float(), ids[:, 1:].flatten(), reduction="none")
    return (losses * weights.flatten()).sum() / weights.sum()


def make_windows(
    tokens: np.ndarray, lengths: tuple[int, ...], seed: int
) -> Callable[[int, int, int], np.ndarray]:
    """(i, count, length) -> (count, length + 1) ids: the i-th batch, in a random order."""
    rng = np.random.default_rng(seed)
    orders = {length: rng.permutation(len(tokens) // length - 1) * length for length in lengths}

    def window(i: int, count: int, length: int) -> np.ndarray:
        order = orders[length]
        at = order[(i * count + np.arange(count)) % len(order)]
        return np.stack([tokens[start : start + length + 1] for start in at])

    return window


def make_text_batches(wide: np.ndarray, last: np.ndarray, steps: int, seed: int = 0) -> Batches:
    """Windows of `wide`, and of `last` once the learning rate falls; all tokens weigh the same."""
    sources = [make_windows(tokens, (SHORT, LONG), seed) for tokens in (wide, last)]

    def batch(step: int) -> tuple[np.ndarray, np.ndarray]:
        length = LONG if step >= LONG_FROM * steps else SHORT
        ids = sources[step >= DECAY_FROM * steps](step, BATCH_TOKENS // length, length)
        return ids, np.ones((len(ids), length), np.float32)

    return batch


def make_edit_batches(
    packed: dict[str, np.ndarray], text: np.ndarray, steps: int, seed: int = 0
) -> Batches:
    """Exercises at first, then short edits, in the last half edits of all lengths.

    There is always some of `text` beside them.

    Args:
        packed: "exercises", "short" and "edits", as of `edits.pack_edits`, the weights under
            NAME_weights; those of short edits and of exercises are equally long.
        text: a stream of ids.
    """
    lengths = {name: packed[name].shape[1] - 1 for name in ("short", "edits")}
    window = make_windows(text, tuple(lengths.values()), seed)

    def batch(step: int) -> tuple[np.ndarray, np.ndarray]:
        counts = next(counts for last, counts in EDIT_PHASES if step < last * steps)
        length = lengths["edits" if "edits" in counts else "short"]
        plain = window(step, counts["text"], length)
        ids = [plain]
        weights = [np.full((len(plain), length), TEXT_WEIGHT, np.float32)]
        for name in counts.keys() & packed.keys():
            at = (step * counts[name] + np.arange(counts[name])) % len(packed[name])
            ids.append(packed[name][at])
            weights.append(packed[f"{name}_weights"][at])
        return np.concatenate(ids), np.concatenate(weights)

    return batch


def compute_relative_rate(step: int, steps: int, decay_from: float) -> float:
    """The learning rate at a step over its peak: warm-up, constant, then linear to zero."""
    return min(1.0, (step + 1) / WARM_UP, (1 - step / steps) / (1 - decay_from))


def train(
    batch: Batches,
    settings: dict[str, Any],
    steps: int,
    directory: Path,
    start: Path | None = None,
    rate: float = 1.0,
    decay_from: float = DECAY_FROM,
    seed: int = 0,
) -> None:
    """Trains and saves to `directory`, in float32 and in the layout that mlx-lm loads; resumes from
    its checkpoint.

    Args:
        batch: what each step learns.
        settings: the model's config.
        start: weights to begin with, a safetensors file; None for random ones.
        rate: of the learning rates.
        decay_from: part of the steps after which the learning rate falls.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(seed)
    model = Llama(settings)
    if start is not None:
        model.load_state_dict(load_file(start))
    model.to(device)
    run = torch.compile(model, dynamic=False)
    inner = [p for n, p in model.named_parameters() if p.ndim == 2 and "embed" not in n]
    rest = [p for n, p in model.named_parameters() if p.ndim != 2 or "embed" in n]
    optimizers = [
        torch.optim.Muon(
            inner, lr=MUON_RATE, weight_decay=0.0, ns_steps=4, adjust_lr_fn="original"
        ),
        torch.optim.AdamW(rest, lr=ADAM_RATE, betas=(0.9, 0.95), weight_decay=0.0),
    ]
    first = 0
    checkpoint = directory / "training.pt"
    if checkpoint.exists():
        state = torch.load(checkpoint, map_location=device)
        first = state["step"]
        model.load_state_dict(state["model"])
        for optimizer, saved in zip(optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
    began = saved_at = time.monotonic()
    losses: list[float] = []
    for step in range(first, steps):
        for optimizer, peak in zip(optimizers, (MUON_RATE, ADAM_RATE), strict=True):
            for group in optimizer.param_groups:
                group["lr"] = rate * peak * compute_relative_rate(step, steps, decay_from)
        ids, weights = (torch.from_numpy(array).to(device) for array in batch(step))
        ids = ids.long()
        with torch.autocast(device, torch.bfloat16):
            loss = compute_loss(run, ids, weights)
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        losses.append(loss.item())
        if (step + 1) % 20 == 0 or step + 1 == steps:
            speed = weights.numel() * (step + 1 - first) / (time.monotonic() - began)
            recent = losses[-20:]
            mean = sum(recent) / len(recent)
            print(f"step {step + 1} of {steps}: loss {mean:.3f}, {speed:.0f} tokens/s", flush=True)
        if time.monotonic() - saved_at > CHECKPOINT_SECONDS:
            saved_at = time.monotonic()
            state = {
                "step": step + 1,
                "model": model.state_dict(),
                "optimizers": [o.state_dict() for o in optimizers],
            }
            with replace_file(checkpoint) as partly:
                torch.save(state, partly)
    weights = {
        name: p.detach().float().cpu().contiguous() for name, p in model.state_dict().items()
    }
    (directory / "config.json").write_text(json.dumps(settings, indent=2) + "\n")
    # Last: where this file is, training is over.
    with replace_file(directory / "model.safetensors") as partly:
        save_file(weights, partly, {"format": "pt"})
