"""DFlash heads: the rows of a block guess the tokens at their own positions. The root's row is not used.

    x_0 = embedding of the root, x_j = embedding of the mask token
    h   = norm(layers(x))                       see `block`
    row j guesses from h_j alone: logits = U h_j, U: the target's output matrix

DFlash 2 adds convolutions over the rows of the block before and after attention and MLP. Their coefficients depend on
the normed input rows y:

    conv(a)_j = sum_t (base_t + D_{j,t}) * a_{j-t}          D_j = projection(y_j), a number per group of channels

and a selector among the K likeliest tokens c of a row, given the token e before it:

    score(c) = logit(c) + <predecessor(e) * P h_j, successor(c)>        minus infinity for all other tokens

Source: z-lab/dflash, dflash/model.py; arXiv 2602.06036. Tensors are named as there, except the selector's codebooks.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, Self

import mlx.core as mx
import mlx.nn as nn

from ..engine.beam_search import top_w
from ..errors import CheckpointError
from .block import BLOCK_NAMES, Attend, BlockArgs, BlockDrafter, Guess, Layer, prepare, recognises_block
from .checkpoint import Checkpoint, Config
from .config import size
from .protocol import Head

MODEL_TYPE = "dflash"

NAMES = (
    (r"candidate_selector\.(predecessor|successor)_codebook(?:\.weight)?", r"selector.\1.weight"),
    (r"candidate_selector\.hidden_projection\.weight", "selector.hidden_projection.weight"),
    *BLOCK_NAMES,
)
"""The names of DFlash 2's selector, and of all block drafters."""

DEFAULT_BLOCK = 16
"""The rows of a block if the config does not say."""

DEFAULT_CANDIDATES = 16
"""The candidates of the selector if the config does not say."""


def recognises(names: Collection[str], config: Config) -> bool:
    """Whether a checkpoint holds a DFlash head."""
    return recognises_block(names, config, r"candidate_selector\..*")


@dataclass(frozen=True)
class DrafterArgs(BlockArgs):
    """The config of a DFlash head.

    Attributes:
        conv_kernel_size: how many rows a convolution reads; None without convolutions.
        conv_group_size: how many channels share a coefficient.
        selector_rank, selector_top_k: the rank of the selector's codebooks, and K, the number of candidates; None
            without a selector.
    """

    _: KW_ONLY
    conv_kernel_size: int | None = size(None)
    conv_group_size: int | None = size(None)
    selector_rank: int | None = size(None)
    selector_top_k: int | None = size(None)
    model_type: str = field(default=MODEL_TYPE)

    @classmethod
    def from_published(cls, checkpoint: Checkpoint, model: nn.Module | None) -> Self:
        prepare(checkpoint, NAMES, MODEL_TYPE)
        config, shapes = checkpoint.config, checkpoint.shapes
        if "block_size" not in config:
            config["block_size"] = DEFAULT_BLOCK
            checkpoint.notes.append(f"config.json has no block_size: {DEFAULT_BLOCK} is used")
        _, taps, width = shapes.get("layers.0.attention_conv.base_kernel", (0, None, 0))
        groups = shapes.get("layers.0.attention_conv.kernel_projection.weight", (0, 0))[0] // (2 * (taps or 1))
        rank = shapes.get("selector.predecessor.weight", (0, None))[1]
        group_size = width // groups if groups else None
        if group_size and config.get("conv_group_size", group_size) != group_size:
            got = f"{group_size}, as its tensors have, got {config['conv_group_size']!r:.40}"
            raise CheckpointError(f"{checkpoint.where}/config.json: expected conv_group_size {got}")
        own = {
            "from_anchor": config.get("sample_from_anchor") is True,
            "conv_kernel_size": taps,
            "conv_group_size": group_size,
            "selector_rank": rank,
            "selector_top_k": config.get("selector_top_k", DEFAULT_CANDIDATES) if rank else None,
        }
        return cls.from_block(checkpoint, model, own)

    def list_config_values(self) -> dict[str, Any]:
        return super().list_config_values() | {
            "conv_kernel_size": self.conv_kernel_size or 0,
            "selector_rank": self.selector_rank or 0,
        }

    def check(self, where: str) -> None:
        super().check(where)
        for first, second in (("conv_kernel_size", "conv_group_size"), ("selector_rank", "selector_top_k")):
            if (getattr(self, first) is None) != (getattr(self, second) is None):
                raise CheckpointError(f"{where}/config.json: expected both {first} and {second}, or neither")
        if self.width % (self.conv_group_size or 1):
            got = self.conv_group_size
            raise CheckpointError(f"{where}/config.json: expected conv_group_size to divide {self.width}, got {got}")
        if (self.selector_top_k or 1) > self.n_guesses:
            most, got = f"from 1 to the {self.n_guesses} tokens that it can guess", self.selector_top_k
            raise CheckpointError(f"{where}/config.json: expected selector_top_k {most}, got {got}")

    def describe(self) -> str:
        return f"{'DFlash 2, ' if self.conv_kernel_size else ''}{super().describe()}"


class Convolution(nn.Module):
    """The two convolutions around a part of a layer, attention or MLP."""

    def __init__(self, args: Any) -> None:
        super().__init__()
        taps, self.group_size = args.conv_kernel_size, args.conv_group_size
        self.base_kernel = mx.zeros((2, taps, args.width))
        self.kernel_projection = nn.Linear(args.width, 2 * taps * args.width // self.group_size, bias=False)

    def __call__(self, rows: mx.array, part: Callable[[mx.array], mx.array]) -> mx.array:
        """(B, H): rows (B, H) after a convolution, `part` and another convolution."""
        taps = self.base_kernel.shape[1]
        changes = self.kernel_projection(rows).reshape(len(rows), 2, taps, -1)
        before, after = (self.base_kernel + mx.repeat(changes, self.group_size, axis=-1)).swapaxes(0, 1)
        return convolve(part(convolve(rows, before)), after)


def convolve(rows: mx.array, kernels: mx.array) -> mx.array:
    """(B, H) the sum of each row and the rows before it, weighted by kernels (B, taps, H); zeros precede row 0."""
    taps = kernels.shape[1]
    padded = mx.pad(rows, [(taps - 1, 0), (0, 0)])
    moved = [padded[taps - 1 - tap : taps - 1 - tap + len(rows)] for tap in range(taps)]
    return (mx.stack(moved, axis=1) * kernels).sum(axis=1)


class ConvolvedLayer(Layer):
    """A layer of DFlash 2."""

    def __init__(self, args: Any) -> None:
        super().__init__(args)
        self.attention_conv, self.mlp_conv = Convolution(args), Convolution(args)

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
        """(W, K) float32 scores of each candidate (K,) after each token (W,), for a row's final state (H,)."""
        scores: mx.array = (self.predecessor(tokens) * self.hidden_projection(state)) @ self.successor(candidates).T
        return scores.astype(mx.float32)


class Drafter(BlockDrafter):
    """A DFlash head; with convolutions and a selector, DFlash 2."""

    args: DrafterArgs

    def __init__(self, args: DrafterArgs) -> None:
        super().__init__(args)
        if args.selector_rank is not None:
            self.selector = Selector(args)

    def make_layer(self) -> Layer:
        return Layer(self.args) if self.args.conv_kernel_size is None else ConvolvedLayer(self.args)

    def make_guess(self, states: mx.array, head: Head) -> Guess:
        """The guesses of a block; with a selector, they depend on the token before."""
        if "selector" not in self:
            return super().make_guess(states, head)
        logits, count = self.make_logits(states, head), min(self.args.selector_top_k or 1, self.args.vocab_size)

        def guess(tokens: mx.array, row: int) -> mx.array:
            candidates = top_w(logits[row], count)
            scores = logits[row, candidates] + self.selector(tokens, candidates, states[row])
            everything = mx.full((len(tokens), logits.shape[1]), -mx.inf)
            return mx.put_along_axis(everything, mx.broadcast_to(candidates, scores.shape), scores, axis=-1)

        return guess

    def find_part(self, name: str) -> str:
        return "embedding" if name in ("selector.predecessor", "selector.successor") else super().find_part(name)
