"""Finds the parts of an unmodified mlx-lm model, and captures hidden states of its forwards."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeVar

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.base import gather_last_axis
from mlx_lm.models.cache import make_prompt_cache

from ..engine.types import StateName
from ..errors import UnsupportedModelError
from . import kv_cache
from .patches import Slot, replace_functions, with_model_lock

T = TypeVar("T")

AFTER_NORM = "after_norm"
BEFORE_NORM = "before_norm"


EMBEDDINGS = (
    "embed_tokens",
    "wte",
    "embeddings",
    "word_embeddings",
    "tok_embeddings",
    "token_embeddings",
    "embed_in",
    "embedding",
    "embed",
)
"""Names of the token embedding in mlx-lm's models."""

NORMS = (
    "norm",
    "final_layernorm",
    "final_layer_norm",
    "embedding_norm",
    "final_norm",
    "output_norm",
    "norm_f",
    "norm_out",
    "ln_f",
)
"""Names of the norm before the head."""

HEADS = ("lm_head", "embed_out", "output")
"""Names of the output matrix, if it is not the embedding."""

CONTEXT_LENGTH_KEYS = (
    "max_position_embeddings",
    "max_sequence_length",
    "max_seq_len",
    "model_max_length",
    "n_positions",
    "n_ctx",
)
"""Config keys for the context length."""

OTHER_MODALITIES = ("vision", "audio", "multi_modal", "mm_")
"""Name prefixes of modules that do not read text."""

SHARDED = (nn.AllToShardedLinear, nn.QuantizedAllToShardedLinear)
"""Heads whose vocabulary is split among ranks."""


class ModelParts(NamedTuple):
    """The parts of a model that a drafter needs.

    Attributes:
        embedding: the token embedding.
        final_norm: the place whose output the drafter reads: the final norm, or the model without
            its head if the norm is not a module.
    """

    embedding: nn.Module
    final_norm: Slot


@with_model_lock
def get_parts(model: nn.Module) -> ModelParts:
    """The parts of `model`; nothing is computed.

    Raises:
        UnsupportedModelError: it has no embedding where mlx-lm's language models have theirs.
    """
    for path in _walk_modules(model):
        holder = path[-1].value
        embeddings = (holder[name] for name in EMBEDDINGS if _is_embedding(holder.get(name)))
        embedding = next(embeddings, None)
        if embedding is None:
            continue

        # The embedding may be a level below the norm's parent, and the norm may not be a module.
        for slot in reversed(path):
            parent = slot.value
            for name in NORMS:
                if isinstance(parent.get(name), nn.Module):
                    return ModelParts(embedding, Slot(parent, name))
        for slot in reversed(path):
            if any(isinstance(child, list) for child in slot.value.values()):  # its layers
                return ModelParts(embedding, slot)
        return ModelParts(embedding, path[-1])
    raise UnsupportedModelError(
        "cannot draft for this model: expected model.embed_tokens as in mlx-lm's language models, "
        f"{type(model).__module__}.{type(model).__name__} has none"
    )


@with_model_lock
def get_output_layer(model: nn.Module) -> nn.Module:
    """The layer of a model's (V, D) output matrix: its head, or its embedding."""
    embedding: Any = get_parts(model).embedding
    matrices = (nn.Linear, nn.QuantizedLinear, *SHARDED)
    for path, module in model.named_modules():
        if path.rpartition(".")[2] not in HEADS or not isinstance(module, matrices):
            continue
        n_shards = module.group.size() if isinstance(module, SHARDED) else 1
        if n_shards * module.weight.shape[0] == embedding.weight.shape[0]:
            return module
    return embedding


def get_output_matrix(model: nn.Module) -> mx.array:
    """(V, D) the dequantized matrix of `get_output_layer`."""
    layer: Any = get_output_layer(model)
    if "scales" not in layer:
        return layer.weight
    how = {"group_size": layer.group_size, "bits": layer.bits, "mode": layer.mode}
    return mx.dequantize(layer.weight, layer.scales, layer.get("biases"), **how)


def get_head(model: nn.Module) -> Callable[[mx.array], mx.array]:
    """The function from hidden states (..., D) after the final norm to logits (..., V).

    Later changes of the logits, such as a cap, are left out, as they do not change the ranking.
    """
    layer: Any = get_output_layer(model)
    if isinstance(layer, SHARDED):
        return lambda hidden: gather_last_axis(layer(hidden), layer.group)
    return layer.as_linear if _is_embedding(layer) else layer


def _walk_modules(model: nn.Module) -> Iterator[list[Slot]]:
    """The path from `model` to every module below it, breadth first.

    Layers and other modalities are left out.
    """
    level: list[list[Slot]] = [[]]
    while level:
        below = []
        for path in level:
            parent = path[-1].value if path else model
            for name, child in parent.items():
                if isinstance(child, nn.Module) and not name.startswith(OTHER_MODALITIES):
                    below.append([*path, Slot(parent, name)])
        yield from below
        level = below


def _is_embedding(module: Any) -> bool:
    return isinstance(module, (nn.Embedding, nn.QuantizedEmbedding))


def get_context_length(model: nn.Module) -> int | None:
    """The context length in a model's config, in tokens, with RoPE scaling; None if it has none.

    Models that keep only states have no limit, even if mlx-lm's default config has one.
    """
    if not kv_cache.counts_tokens(make_prompt_cache(model)):
        return None
    args = getattr(model, "args", None)
    for config in (args, getattr(args, "text_config", None)):
        values = config if isinstance(config, dict) else getattr(config, "__dict__", {})
        lengths = (
            values[name] for name in CONTEXT_LENGTH_KEYS if isinstance(values.get(name), int)
        )
        length: int | None = next(lengths, None)
        if length is None:
            continue

        rope = values.get("rope_scaling") or {}
        if rope.get("rope_type", rope.get("type")) in ("linear", "dynamic", "yarn"):
            original = rope.get("original_max_position_embeddings", length)
            length = max(length, int(original * rope.get("factor", 1)))
        return length
    return None


def get_compute_dtype(model: nn.Module) -> mx.Dtype:
    """The dtype of a model's computation, which is the dtype of its embedding's vectors."""
    return get_parts(model).embedding(mx.zeros((1,), mx.int32)).dtype


def get_model_sizes(model: nn.Module) -> tuple[int, int]:
    """(hidden size D, vocabulary size V) of a model; nothing is computed."""
    hidden_size = get_parts(model).embedding(mx.zeros((1,), mx.int32)).shape[-1]
    return hidden_size, get_vocab_size(model)


def get_vocab_size(model: nn.Module) -> int:
    """The number of a model's logits, from a forward that is built but never computed."""
    return model(mx.zeros((1, 1), mx.int32)).shape[-1]


def get_module_name(model: nn.Module) -> str:
    """The name of a model's module in `mlx_lm.models`."""
    return type(model).__module__.rpartition(".")[2]


class CapturePoint(NamedTuple):
    """A place where a hidden state is read: a module's output or input."""

    slot: Slot
    is_input: bool = False


@with_model_lock
def get_capture_points(
    model: nn.Module, names: Sequence[StateName]
) -> dict[StateName, CapturePoint]:
    """The places where a model's hidden states are read."""
    points: dict[StateName, CapturePoint] = {}
    for name in names:
        if isinstance(name, int):
            points[name] = CapturePoint(_get_layer_slot(model, name))
            continue
        slot = get_parts(model).final_norm
        if name == BEFORE_NORM and slot.name not in NORMS:
            where = "before the final norm, which is not a module in this model"
            raise _make_error(model, f"the drafter reads the hidden state {where}")
        points[name] = CapturePoint(slot, is_input=name == BEFORE_NORM)
    return points


def _get_layer_slot(model: nn.Module, number: int) -> Slot:
    reads = f"the drafter reads the output of layer {number}"
    if getattr(getattr(model, "model", None), "pipeline_size", 1) > 1:
        raise _make_error(model, f"{reads}, which only one rank of the pipeline has")
    layers = list(getattr(model, "layers", []))
    slot = _search_slot(model, layers[number]) if 0 <= number < len(layers) else None
    if slot is None:
        raise _make_error(model, f"{reads}, but the model has {len(layers)} layers")
    return slot


def _search_slot(parent: Any, child: nn.Module) -> Slot | None:
    """The place of a module below another, or in a list below it."""
    items = parent.items() if isinstance(parent, dict) else enumerate(parent)
    below = []
    for name, value in items:
        if value is child:
            return Slot(parent, name)
        if isinstance(value, (dict, list)):
            below.append(value)
    return next(filter(None, (_search_slot(value, child) for value in below)), None)


def _make_error(model: nn.Module, reason: str) -> UnsupportedModelError:
    return UnsupportedModelError(f"cannot draft for {get_module_name(model)}: {reason}")


def capture(points: Sequence[CapturePoint], call: Callable[[], T]) -> tuple[T, list[Any]]:
    """(the result of `call`, the state that each point had last during `call`, or None).

    Only calls from this thread are recorded.
    """
    states: list[Any] = [None] * len(points)

    def record(index: int, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        out: Any = module(*args, **kwargs)
        if points[index].is_input:
            states[index] = args[0]
        else:
            states[index] = out[0] if isinstance(out, tuple) else out
        return out

    with replace_functions([(point.slot, partial(record, i)) for i, point in enumerate(points)]):
        return call(), states


def check_states(model: nn.Module, names: Sequence[StateName]) -> None:
    """Refuses a model that lacks one of these hidden states, or has none for each token."""
    if not names:
        return
    points = get_capture_points(model, names)
    token = mx.zeros((1, 1), mx.int32)
    cache = make_prompt_cache(model)
    # Built, never computed.
    _, captured = capture(list(points.values()), lambda: model(token, cache=cache))
    width = get_parts(model).embedding(token).shape[-1]
    for name, state in zip(points, captured, strict=True):
        shape = state.shape if isinstance(state, mx.array) else None
        if shape == (1, 1, width):
            continue
        which = f"the output of layer {name}" if isinstance(name, int) else "its last hidden state"
        got = shape[-1] if shape and shape[:-1] == (1, 1) else shape
        raise _make_error(model, f"expected {which} as wide as its embedding, {width}, got {got}")
