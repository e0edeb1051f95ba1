"""Measures real model sizes without a download: random weights, and a chosen acceptance.

    python -m benchmarks synthetic --quick
    python -m benchmarks synthetic --shape llama-3.1-8b --bits 4 --plans auto 1,3 2,3

The text is fixed (`Oracle`), so that drafts are right with a given probability. Target and drafter
compute everything as usual. `--layers` uses only the first layers of a shape, if it is too large or
slow; records state this, and nothing is extrapolated. `--drafter-type` uses a head of published
sizes.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib import import_module
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.utils import quantize_model
from tqdm import tqdm

from mlx_redrafter.drafters import block, eagle, make_drafter, medusa, mtp
from mlx_redrafter.drafters.checkpoint import count_bytes
from mlx_redrafter.drafters.config import DrafterArgs
from mlx_redrafter.engine.sampling import Draws, Sampler
from mlx_redrafter.errors import RedrafterError
from mlx_redrafter.loading.checkpoints import set_blas_threads
from mlx_redrafter.machine.memory import get_usable_bytes
from mlx_redrafter.measuring.sizing import MAX_DRAFT_COST, count_weights, list_candidates
from mlx_redrafter.planning.acceptance import UNKNOWN_ACCEPTANCE, AcceptanceTable

from .command import parse_plan, parse_positive
from .contest import PLANS, add_run_flags, measure_workload
from .models import NamedPrompt, Workload

FEWEST_PLANS = ["auto", (1, 3)]
QUICK_LAYERS = 2
GROUP_SIZE = 64  # of quantized weights
PROMPT_TOKENS = 64


def make_config(
    model_type: str, sizes: Sequence[int], *, tied: bool = True, **more: Any
) -> dict[str, Any]:
    """A transformer's config for mlx-lm's model class.

    Args:
        sizes: hidden size, layers, MLP size, heads, key-value heads, head size, and vocabulary
            size.
        tied: whether the embedding is also the output matrix.
    """
    names = (
        "hidden_size",
        "num_hidden_layers",
        "intermediate_size",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "vocab_size",
    )
    common = {"rms_norm_eps": 1e-6, "rope_theta": 500000.0, "max_position_embeddings": 32768}
    common |= {"attention_bias": False, "mlp_bias": False, "tie_word_embeddings": tied}
    return {"model_type": model_type} | dict(zip(names, sizes, strict=True)) | common | more


EXPERT_SIZES = {
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "norm_topk_prob": True,
}
RECURRENT_SIZES = {
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
}
SHARED_EXPERT_SIZES = {
    "num_experts": 256,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
}
SHAPES = {
    "llama-2-7b": make_config("llama", (4096, 32, 11008, 32, 32, 128, 32000), tied=False),
    "llama-3.2-1b": make_config("llama", (2048, 16, 8192, 32, 8, 64, 128256)),
    "llama-3.2-3b": make_config("llama", (3072, 28, 8192, 24, 8, 128, 128256)),
    "llama-3.1-8b": make_config("llama", (4096, 32, 14336, 32, 8, 128, 128256), tied=False),
    "gemma-3-27b": make_config("gemma3_text", (5376, 62, 21504, 32, 16, 128, 262208)),
    "qwen3-30b-a3b": make_config(
        "qwen3_moe", (2048, 48, 6144, 32, 4, 128, 151936), tied=False, **EXPERT_SIZES
    ),
    "qwen3.5-9b": make_config(
        "qwen3_5", (4096, 32, 12288, 16, 4, 256, 248320), tied=False, **RECURRENT_SIZES
    ),
    "qwen3.5-35b-a3b": make_config(
        "qwen3_5_moe",
        (2048, 40, 512, 16, 2, 256, 248320),
        tied=False,
        **RECURRENT_SIZES,
        **SHARED_EXPERT_SIZES,
    ),
}
"""Published shapes, from their configs on the Hugging Face hub."""


def make_layer_sizes(shape: dict[str, Any], **more: Any) -> dict[str, Any]:
    """The sizes of a drafter with layers like the target's."""
    names = ("intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim")
    return {name: shape[name] for name in names} | {"width": shape["hidden_size"], **more}


def make_block_sizes(shape: dict[str, Any], **more: Any) -> dict[str, Any]:
    """The sizes of a block drafter with five layers that reads five of the target's."""
    return make_layer_sizes(
        shape, num_layers=5, mask_token_id=0, capture_layers=spread(shape, 5), **more
    )


def make_mtp_config(shape: dict[str, Any]) -> dict[str, Any]:
    """The config of Qwen3.5's dense multi-token-prediction layer, with the target's sizes."""
    names = (
        "hidden_size",
        "vocab_size",
        "intermediate_size",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "rms_norm_eps",
    )
    return {name: shape[name] for name in names} | {"model_type": "qwen3_5"}


def spread(shape: dict[str, Any], count: int) -> list[int]:
    """The indices of `count` evenly spaced layers of a target."""
    last = shape["num_hidden_layers"] - 1
    return [round(at * last / (count - 1)) for at in range(count)]


def make_eagle3(shape: dict[str, Any]) -> dict[str, Any]:
    """The sizes of an EAGLE-3 head that reads three of the target's layers."""
    draft_vocab_size = min(32000, shape["vocab_size"])
    layers = spread(shape, 3)
    return make_layer_sizes(
        shape, version=3, draft_vocab_size=draft_vocab_size, capture_layers=layers
    )


def make_dspark(shape: dict[str, Any]) -> dict[str, Any]:
    """The sizes of a DSpark drafter."""
    return make_block_sizes(
        shape, model_type="dspark", block_size=7, from_anchor=True, markov_rank=256
    )


MakeSizes = Callable[[dict[str, Any]], dict[str, Any]]
"""A function from a target's shape to the arguments of a drafter's config."""

PUBLISHED_HEADS: dict[str, tuple[type[DrafterArgs], MakeSizes]] = {
    "medusa": (medusa.DrafterArgs, lambda shape: {"num_heads": 4, "num_layers": 1}),
    "eagle": (eagle.DrafterArgs, lambda shape: make_layer_sizes(shape, version=1, fc_bias=True)),
    "eagle3": (eagle.DrafterArgs, make_eagle3),
    "mtp": (mtp.DrafterArgs, lambda shape: {"layer_config": make_mtp_config(shape)}),
    "dflash": (block.DrafterArgs, lambda shape: make_block_sizes(shape, block_size=16)),
    "dspark": (block.DrafterArgs, make_dspark),
}
"""Kind -> (config class, sizes of a published head)."""


class Oracle(Sampler):
    """A sampler with a fixed text, in which the drafter's guesses are right at given rates.

    The token at each position depends on the position, not on the logits: random weights produce
    meaningless text that no drafter could learn. A random draw per position decides the rank of the
    right token among the drafter's guesses, or that it is not among them; all other guesses are
    wrong. A beam search then keeps the same nodes as for a drafter with that acceptance.

    Args:
        acceptance: (K, R) probabilities by depth and rank; the last depth also applies to deeper
            ones.
        seed: of the draws.
    """

    def __init__(self, acceptance: AcceptanceTable, seed: int = 0) -> None:
        self.acceptance = [list(rates) for rates in acceptance]
        self._key = mx.random.key(seed)
        mx.eval(self._key)

    def make_text(self, positions: mx.array, vocab_size: int) -> mx.array:
        """The tokens at these positions, int32.

        They vary widely, so that different experts are selected.
        """
        return ((positions.astype(mx.int32) * 7919 + 104729) % vocab_size).astype(mx.int32)

    def draw(self, position: mx.array, count: int, vocab_size: int) -> Draws:
        """Returns positions (P, 1), from `position` on, in place of noise."""
        places = (position.astype(mx.int32) + mx.arange(count))[:, None]
        return Draws(places, places)

    def choose(self, logprobs: mx.array, draws: Draws | None, indices: mx.array) -> mx.array:
        """(N,) the tokens of the text.

        The argmax of logprobs (N, V) is computed as in a sampler, but not used.
        """
        assert draws is not None
        likeliest = mx.argmax(logprobs, axis=-1).astype(mx.int32)
        text = self.make_text(draws.gumbel[indices, 0], logprobs.shape[-1])
        return text + mx.minimum(likeliest, 0)

    def adjust(self, logits: mx.array, draws: Draws, index: int) -> mx.array:
        """(W, V) log-probabilities with the chosen guesses.

        All other tokens share the remaining probability.
        """
        vocab_size = logits.shape[-1]
        least = 1e-12
        chances = self.acceptance[min(index, len(self.acceptance) - 1)]
        position = draws.gumbel[index, 0]
        ranks = mx.arange(len(chances))
        drawn = mx.random.uniform(key=self._key + position.astype(mx.uint32))
        rank = (drawn >= mx.cumsum(mx.array(chances))).sum()
        right = self.make_text(position, vocab_size)
        guesses = mx.where(ranks == rank, right, (right + 1 + ranks) % vocab_size)
        left = math.log(max(1.0 - sum(chances), least) / vocab_size)
        rest = mx.clip(logits, left - 1e-3, left)
        shape = (logits.shape[0], len(chances))
        logprobs = mx.log(mx.maximum(mx.array(chances), least))
        guesses = mx.broadcast_to(guesses, shape)
        named = mx.broadcast_to(logprobs, shape)
        return mx.put_along_axis(rest, guesses, named, axis=-1)


def make_acceptance(rate: float) -> AcceptanceTable:
    """A table whose first guess is right at this rate at every depth.

    Its other guesses are right at most as often.
    """
    first, *others = UNKNOWN_ACCEPTANCE[0]
    rates = [rate]
    for other in others:
        share = other / (1 - first)
        rates.append(min(rate, (1 - rate) * share))
    return (tuple(rates),)


def parse_rate(text: str) -> AcceptanceTable:
    """Parses the rate of first guesses as an acceptance table.

    The other guesses have the assumed default rates.
    """
    rate = float(text)
    if not 0 <= rate <= 1:
        raise argparse.ArgumentTypeError(f"expected a number from 0 to 1, got {text!r}")
    return make_acceptance(rate)


def build_workload(
    name: str,
    bits: int,
    *,
    layers: int,
    acceptance: AcceptanceTable,
    drafter_type: str | None = None,
    seed: int = 0,
) -> Workload:
    """Makes a target with random weights, a drafter of suitable size, and an oracle for it.

    Args:
        name: one of `SHAPES`.
        bits: 32 for float32, 16 for bfloat16; fewer for quantized layers, with float32 on a CPU and
            else bfloat16.
        layers: the number of layers, at most the shape's.
        drafter_type: one of `PUBLISHED_HEADS`; None for a recurrent drafter of suitable size.
    """
    oracle = Oracle(acceptance, seed)
    shape = SHAPES[name]
    every = shape["num_hidden_layers"]
    if layers > every:
        raise RedrafterError(f"{name} has {every} layers, got --layers {layers}")
    is_cpu = mx.default_device().type == mx.cpu
    is_float32 = bits == 32 or (is_cpu and bits < 16)
    dtype = mx.float32 if is_float32 else mx.bfloat16
    mx.random.seed(seed)
    model = make_target(shape | {"num_hidden_layers": layers}, bits, dtype)
    needed = 1.25 * count_bytes(model)  # nothing is computed yet
    memory = get_usable_bytes()
    if needed > memory:
        raise RedrafterError(
            f"{name} of {layers} layers at {bits} bits takes about {needed / 1e9:.1f} GB, "
            f"more than the {memory / 1e9:.1f} GB that MLX should use on this machine: "
            "give fewer --layers or --bits"
        )
    # One by one, so that at most one is in memory unquantized.
    modules = model.named_modules()
    for _, module in tqdm(modules, f"{name}: random weights", leave=False, delay=2.0):
        arrays = [value for value in module.values() if isinstance(value, mx.array)]
        mx.eval(arrays)
    mx.clear_cache()
    set_blas_threads(model)
    hidden_size = shape["hidden_size"]
    vocab_size = shape["vocab_size"]
    if drafter_type is None:
        sizes = list_candidates(hidden_size, vocab_size)
        max_bytes = MAX_DRAFT_COST * count_bytes(model)
        size = sizes[-1]
        for each in sizes:
            if count_weights(each) * dtype.size < max_bytes:
                size = each
                break
    else:
        kind, make_arguments = PUBLISHED_HEADS[drafter_type]
        arguments = make_arguments(shape | {"num_hidden_layers": layers})
        size = kind(hidden_size, vocab_size, **arguments)
    drafter = make_drafter(replace(size, acceptance=oracle.acceptance))
    drafter.set_dtype(dtype)
    mx.eval(drafter.parameters())
    text = oracle.make_text(mx.arange(PROMPT_TOKENS), vocab_size)
    ids = cast(list[int], text.tolist())
    rates = ",".join(f"{chance:.3g}" for chance in oracle.acceptance[0])
    part = "" if layers == every else f", {layers} of {every} layers"
    return Workload(
        name=f"{name}, random weights{part}",
        model=model,
        drafter=drafter,
        drafter_name=f"{drafter_type or 'oracle'}, acceptance {rates}",
        draft_model=None,
        draft_model_name=None,
        prompts=[NamedPrompt(f"synthetic/{PROMPT_TOKENS}", "synthetic", ids)],
        sampler=oracle,
    )


def make_target(config: dict[str, Any], bits: int, dtype: mx.Dtype) -> nn.Module:
    """A model of mlx-lm's class with random weights that are not evaluated yet."""
    module = import_module(f"mlx_lm.models.{config['model_type']}")
    # Every sixth layer of Gemma has full attention, every fourth of Qwen3.5, and mlx-lm indexes the
    # first of them: there must be one.
    n_layers = config["num_hidden_layers"]
    patterns = {"sliding_window_pattern": 6, "full_attention_interval": 4}
    config = config | {name: min(every, n_layers) for name, every in patterns.items()}
    model: nn.Module = module.Model(module.ModelArgs.from_dict(config))
    if config["tie_word_embeddings"] and "lm_head" in model:
        model.sanitize({})  # some models drop the head only here, if the weights have none
    model.set_dtype(dtype)
    if bits < 16:
        quantize_model(model, {}, GROUP_SIZE, bits)
    model.eval()
    return model


def add_shape(parser: argparse.ArgumentParser, default: str | None) -> None:
    """Adds the flags of a synthetic target and drafter.

    Args:
        default: the default of `--shape`.
    """
    add = parser.add_argument
    add(
        "--shape",
        choices=SHAPES,
        default=default,
        help="use a target with random weights (default: %(default)s)",
    )
    add(
        "--bits",
        type=int,
        choices=(2, 3, 4, 5, 6, 8, 16, 32),
        help="target's bits (default: 32 on a CPU, else 4)",
    )
    add("--layers", type=parse_positive, help="use only the first layers")
    add(
        "--acceptance",
        type=parse_rate,
        default="0.7",
        help="rate of right first guesses (default: %(default)s)",
    )
    add(
        "--drafter-type",
        choices=PUBLISHED_HEADS,
        help="a head with published sizes (default: recurrent, small)",
    )
    parser.set_defaults(seed=0)


def open_shape(args: argparse.Namespace) -> Workload:
    """Makes the workload given by the flags of `add_shape`; with `--quick` it has few layers."""
    quick = getattr(args, "quick", False)
    layers = args.layers or (QUICK_LAYERS if quick else SHAPES[args.shape]["num_hidden_layers"])
    bits = args.bits or (32 if mx.default_device().type == mx.cpu else 4)
    print(f"{args.shape}: making random weights of {layers} layers", file=sys.stderr)
    return build_workload(
        args.shape,
        bits,
        layers=layers,
        acceptance=args.acceptance,
        drafter_type=args.drafter_type,
        seed=args.seed,
    )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags."""
    add_shape(parser, "llama-3.2-1b")
    plans = "auto, W,K or W,K,N (default: several)"
    parser.add_argument("--plans", type=parse_plan, nargs="+", metavar="PLAN", help=plans)
    replay = "also run each W,K with a replay after rejections, for shapes with recurrent layers"
    parser.add_argument("--replay", action="store_true", help=replay)
    add_run_flags(parser, f"{QUICK_LAYERS} layers, plans auto and 1,3", sampling=False)


def run(args: argparse.Namespace) -> int:
    """Makes a workload and measures it; returns the exit status."""
    plans = args.plans or (FEWEST_PLANS if args.quick else PLANS)
    return measure_workload(open_shape(args), plans, args)
