"""Pairs of models of published shapes with random weights, and the oracle that lets their drafts be right."""

from __future__ import annotations

from importlib import import_module
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn

from mlx_redrafter.drafters.recurrent import Drafter, DrafterArgs
from mlx_redrafter.errors import RedrafterError
from mlx_redrafter.planning.machine import describe_machine
from mlx_redrafter.planning.sizing import CHEAP, candidates, n_weights

from .oracle import Oracle, acceptance_of
from .prompts import Prompt
from .subject import Subject
from .targets import TargetShape

DTYPES = {"float32": mx.float32, "float16": mx.float16, "bfloat16": mx.bfloat16}

GROUP_SIZE = 64

PROMPT_TOKENS = 64


def build(
    shape: TargetShape,
    bits: int,
    dtype: str,
    *,
    layers: int,
    acceptance: str = "0.7",
    drafter_bits: int | None = None,
    seed: int = 0,
) -> Subject:
    """A target of random weights, a drafter of the size that suits it, and an oracle that lets it be right.

    Args:
        bits: 16 or 32 for weights that are not quantized.
        dtype: of what is not quantized.
        layers: how many of the shape's.
        acceptance: see `acceptance_of`.

    Raises:
        RedrafterError: it does not fit into this machine's memory.
    """
    oracle = Oracle(acceptance_of(acceptance), seed)
    check_memory(shape, bits, layers)
    mx.random.seed(seed)
    model = make_target(shape._replace(num_hidden_layers=layers), bits, DTYPES[dtype])
    drafter = make_drafter(shape, bits, layers, DTYPES[dtype], drafter_bits, oracle)
    few = "" if layers == shape.num_hidden_layers else f", {layers} of {shape.num_hidden_layers} layers"
    ids = cast(list[int], oracle.text(mx.arange(PROMPT_TOKENS), shape.vocab_size).tolist())
    return Subject(
        name=f"{shape.name}, random weights{few}",
        model=model,
        drafter=drafter,
        drafter_name=f"oracle, acceptance {','.join(f'{chance:.3g}' for chance in oracle.acceptance[0])}",
        draft_model=None,
        draft_model_name=None,
        prompts=[Prompt(f"synthetic/{PROMPT_TOKENS}", "synthetic", ids)],
        sampler=oracle,
    )


def weight_bytes(shape: TargetShape, bits: int, layers: int) -> float:
    """What its weights take; a group of 64 quantized ones has a scale and a bias of 16 bits."""
    numbers = shape._replace(num_hidden_layers=layers).n_weights
    return numbers * (bits + (0 if bits >= 16 else 32 / GROUP_SIZE)) / 8


def check_memory(shape: TargetShape, bits: int, layers: int) -> None:
    """Refuses what would not fit.

    Raises:
        RedrafterError: how much it takes, and how much there is.
    """
    needed, memory = 1.25 * weight_bytes(shape, bits, layers) / 1e9, describe_machine()["memory_gb"]
    if memory is not None and needed > memory:
        raise RedrafterError(
            f"{shape.name} of {layers} layers at {bits} bits takes about {needed:.1f} GB, "
            f"this machine has {memory} GB: give fewer --layers or --bits"
        )


def make_target(shape: TargetShape, bits: int, dtype: mx.Dtype) -> nn.Module:
    """A model of mlx-lm's own class, layer by layer, so that no more than one is there before it is quantized."""
    home = import_module(f"mlx_lm.models.{shape.model_type}")
    model: nn.Module = home.Model(home.ModelArgs.from_dict(shape.config))
    if shape.tie_word_embeddings and "lm_head" in model:
        model.sanitize({})  # some drop the head only when they are shown weights without one
    model.set_dtype(dtype)
    if bits < 16:
        quantize(model, bits)
    for _, module in model.named_modules():
        own = [array for array in module.values() if isinstance(array, mx.array)]
        mx.eval(own)
    mx.clear_cache()
    model.eval()
    return model


def quantize(model: nn.Module, bits: int) -> None:
    """Quantizes what groups divide, as mlx-lm does: where a model says itself how, as it says."""
    own = getattr(model, "quant_predicate", None) or (lambda path, module: True)

    def how(path: str, module: nn.Module) -> Any:
        fits = hasattr(module, "to_quantized") and module.weight.shape[-1] % GROUP_SIZE == 0
        return fits and own(path, module)

    nn.quantize(model, GROUP_SIZE, bits, class_predicate=how)


def drafter_size(shape: TargetShape, target_bytes: float, width: float) -> DrafterArgs:
    """The best size whose bytes are less than `CHEAP` of the target's; the last resort where none is so small.

    Args:
        width: bytes of a drafter's number.
    """
    sizes = candidates(shape.hidden_size, shape.vocab_size)
    return next((each for each in sizes if n_weights(each) * width < CHEAP * target_bytes), sizes[-1])


def make_drafter(
    shape: TargetShape, bits: int, layers: int, dtype: mx.Dtype, drafter_bits: int | None, oracle: Oracle
) -> Drafter:
    """A drafter of random weights, of the size that suits the target."""
    width = dtype.size if drafter_bits is None else (drafter_bits + 32 / GROUP_SIZE) / 8
    size = drafter_size(shape, weight_bytes(shape, bits, layers), width)
    named: dict[str, Any] = {**vars(size), "acceptance": oracle.acceptance}
    drafter = Drafter(DrafterArgs(**named))
    drafter.set_dtype(dtype)
    if drafter_bits is not None:
        quantize(drafter, drafter_bits)
    mx.eval(drafter.parameters())
    return drafter
