"""Finds the parts of an unmodified mlx-lm model, and captures hidden states of its forwards."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar, cast

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.base import gather_last_axis
from mlx_lm.models.cache import make_prompt_cache

from ..errors import UnsupportedModelError
from . import kv_cache
from .tree_attention import MODEL_LOCK, with_model_lock

T = TypeVar("T")

AFTER_NORM = "after_norm"
BEFORE_NORM = "before_norm"

StateName = str | int
"""A hidden state of the target: `AFTER_NORM` or `BEFORE_NORM`, the output or input of its final
norm, or a layer's number from 0 for that layer's output."""


def _names(text: str) -> tuple[str, ...]:
    return tuple(text.split())


EMBEDDINGS = _names(
    "embed_tokens wte embeddings word_embeddings tok_embeddings token_embeddings embed_in embedding embed"
)
"""Names of the token embedding in mlx-lm's models."""

NORMS = _names(
    "norm final_layernorm final_layer_norm embedding_norm final_norm output_norm norm_f norm_out ln_f"
)
"""Names of the norm before the head."""

HEADS = _names("lm_head embed_out output")
"""Names of the output matrix, if it is not the embedding."""

LENGTHS = _names(
    "max_position_embeddings max_sequence_length max_seq_len model_max_length n_positions n_ctx"
)
"""Config keys for the context length."""

OTHER_MODALITIES = ("vision", "audio", "multi_modal", "mm_")
"""Name prefixes of modules that do not read text."""


SHARDED = (nn.AllToShardedLinear, nn.QuantizedAllToShardedLinear)
"""Heads whose vocabulary is split among ranks."""


class Slot(NamedTuple):
    """The place of a child module, in its parent or in a list of layers."""

    parent: Any
    name: str | int


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
    """The parts of `model`, found without computing anything."""
    for path in _walk_modules(model):
        holder = path[-1].parent[path[-1].name]
        embedding = next(
            (holder[key] for key in EMBEDDINGS if _is_embedding(holder.get(key))), None
        )
        if embedding is None:
            continue
        # The embedding may be a level below the norm's parent, and the norm may not be a module.
        for slot in reversed(path):
            inner = slot.parent[slot.name]
            if norm := next((key for key in NORMS if isinstance(inner.get(key), nn.Module)), None):
                return ModelParts(embedding, Slot(inner, norm))
        with_layers = (slot for slot in reversed(path) if _has_layers(slot.parent[slot.name]))
        return ModelParts(embedding, next(with_layers, path[-1]))
    raise UnsupportedModelError(
        f"cannot draft for this model: expected model.embed_tokens as in mlx-lm's language models, "
        f"{type(model).__module__}.{type(model).__name__} has none"
    )


@with_model_lock
def get_output_layer(model: nn.Module) -> nn.Module:
    """The layer of a model's (V, D) output matrix: its head, or its embedding."""
    embedding: Any = get_parts(model).embedding
    for name, module in model.named_modules():
        is_matrix = name.rpartition(".")[2] in HEADS and isinstance(
            module, (nn.Linear, nn.QuantizedLinear, *SHARDED)
        )
        n_shards = module.group.size() if isinstance(module, SHARDED) else 1
        if is_matrix and n_shards * module.weight.shape[0] == embedding.weight.shape[0]:
            return module
    return embedding


def get_output_matrix(model: nn.Module) -> mx.array:
    """(V, D) the dequantized matrix of `get_output_layer`."""
    layer: Any = get_output_layer(model)
    if "scales" not in layer:
        return cast(mx.array, layer.weight)
    how = {"group_size": layer.group_size, "bits": layer.bits, "mode": layer.mode}
    return mx.dequantize(layer.weight, layer.scales, layer.get("biases"), **how)


def get_head(model: nn.Module) -> Callable[[mx.array], mx.array]:
    """The function from hidden states (..., D) after the final norm to logits (..., V).

    Later changes of the logits, such as a cap, are left out, as they do not change the ranking.
    """
    layer: Any = get_output_layer(model)
    if isinstance(layer, SHARDED):
        return lambda hidden: gather_last_axis(layer(hidden), layer.group)
    head: Callable[[mx.array], mx.array] = layer.as_linear if _is_embedding(layer) else layer
    return head


def _walk_modules(model: nn.Module) -> Iterator[list[Slot]]:
    """The path from `model` to every module below it, breadth first, except in layers and other
    modalities.
    """
    level: list[list[Slot]] = [[]]
    while level:
        below = []
        for path in level:
            parent = path[-1].parent[path[-1].name] if path else model
            items: Any = parent.items()
            names = [name for name, child in items if isinstance(child, nn.Module)]
            below += [
                [*path, Slot(parent, name)]
                for name in names
                if not name.startswith(OTHER_MODALITIES)
            ]
        yield from below
        level = below


def _has_layers(module: nn.Module) -> bool:
    items: Any = module.values()
    return any(isinstance(child, list) for child in items)


def _is_embedding(module: Any) -> bool:
    return isinstance(module, (nn.Embedding, nn.QuantizedEmbedding))


def get_context_length(model: nn.Module) -> int | None:
    """The context length in a model's config, in tokens, with RoPE scaling; None if the config has
    none.

    Models that keep only states have no limit, even if mlx-lm's default config has one.
    """
    args = (
        getattr(model, "args", None) if kv_cache.counts_tokens(make_prompt_cache(model)) else None
    )
    for config in (args, getattr(args, "text_config", None)):
        values: dict[str, Any] = (
            config if isinstance(config, dict) else getattr(config, "__dict__", {})
        )
        length = next((values[name] for name in LENGTHS if isinstance(values.get(name), int)), None)
        if length is not None:
            rope = values.get("rope_scaling") or {}
            if rope.get("rope_type", rope.get("type")) in ("linear", "dynamic", "yarn"):
                scaled = rope.get("original_max_position_embeddings", length) * rope.get(
                    "factor", 1
                )
                length = max(length, int(scaled))
            return length
    return None


def get_compute_dtype(model: nn.Module) -> mx.Dtype:
    """The dtype of a model's computation, which is the dtype of its embedding's rows."""
    dtype: mx.Dtype = get_parts(model).embedding(mx.zeros((1,), mx.int32)).dtype
    return dtype


def get_model_sizes(model: nn.Module) -> tuple[int, int]:
    """(hidden size D, vocabulary size V) of a model; nothing is computed."""
    return get_parts(model).embedding(mx.zeros((1,), mx.int32)).shape[-1], get_vocab_size(model)


def get_vocab_size(model: nn.Module) -> int:
    """The number of a model's logits, from a forward that is built but never computed."""
    size: int = model(mx.zeros((1, 1), mx.int32)).shape[-1]
    return size


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
    if not names:
        return points
    parts = get_parts(model)
    layers = (
        list(getattr(model, "layers", [])) if any(isinstance(name, int) for name in names) else []
    )
    is_pipeline = getattr(getattr(model, "model", None), "pipeline_size", 1) > 1
    for name in names:
        reason = None
        if isinstance(name, int):
            slot = (
                _find_slot(model, layers[name])
                if 0 <= name < len(layers) and not is_pipeline
                else None
            )
            if is_pipeline:
                reason = f"the drafter reads the output of layer {name}, which only one rank of the pipeline has"
            elif slot is None:
                reason = f"the drafter reads the output of layer {name}, but the model has {len(layers)} layers"
            else:
                points[name] = CapturePoint(slot)
        elif name == BEFORE_NORM and parts.final_norm.name not in NORMS:
            reason = "the drafter reads the hidden state before the final norm, which is not a module in this model"
        else:
            points[name] = CapturePoint(parts.final_norm, is_input=name == BEFORE_NORM)
        if reason:
            raise UnsupportedModelError(f"cannot draft for {get_module_name(model)}: {reason}")
    return points


def _find_slot(parent: Any, child: nn.Module) -> Slot | None:
    """The place of a module below another, or in a list below it."""
    items = parent.items() if isinstance(parent, dict) else enumerate(parent)
    below = []
    for name, value in items:
        if value is child:
            return Slot(parent, name)
        if isinstance(value, (dict, list)):
            below.append(value)
    return next(filter(None, (_find_slot(value, child) for value in below)), None)


class Recorder(nn.Module):
    """Wraps a module, and records input and output of the calls from the thread that created it."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        self.inputs: list[mx.array] = []
        self.outputs: list[mx.array] = []
        self._thread = threading.get_ident()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        out = self.module(*args, **kwargs)
        if threading.get_ident() == self._thread:
            self.inputs += args[:1]
            self.outputs.append(out[0] if isinstance(out, tuple) else out)
        return out

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        """Its module's class, as some models check the class of a layer."""
        return type(self["module"]) if "module" in self else Recorder

    def __getattr__(self, name: str) -> Any:
        if name in self:
            return self[name]
        return getattr(self["module"], name) if "module" in self else super().__getattr__(name)


def capture(
    points: Sequence[CapturePoint], call: Callable[[], T]
) -> tuple[T, list[list[mx.array]]]:
    """(the result of `call`, the arrays that each point recorded during `call`).

    Modules are replaced as entries of dictionaries and lists, as setting attributes would reorder
    parameters.
    """
    with MODEL_LOCK:
        slots = {(id(point.slot.parent), point.slot.name): point.slot for point in points}
        recorders = {key: Recorder(slot.parent[slot.name]) for key, slot in slots.items()}
        try:
            for key, slot in slots.items():
                slot.parent[slot.name] = recorders[key]
            result = call()
        finally:
            for key, slot in slots.items():
                slot.parent[slot.name] = recorders[key].module
    found = [
        (recorders[id(point.slot.parent), point.slot.name], point.is_input) for point in points
    ]
    return result, [
        recorder.inputs if is_input else recorder.outputs for recorder, is_input in found
    ]


def check_states(model: nn.Module, names: Sequence[StateName]) -> None:
    """Refuses a model that lacks one of these hidden states, or whose state has no row for each
    token.
    """
    if not names:
        return
    points = get_capture_points(model, names)
    token = mx.zeros((1, 1), mx.int32)
    cache = make_prompt_cache(model)
    _, captured = capture(
        list(points.values()), lambda: model(token, cache=cache)
    )  # built, never computed
    width = get_parts(model).embedding(token).shape[-1]
    for name, found in zip(points, captured, strict=True):
        shape = found[-1].shape if found and isinstance(found[-1], mx.array) else None
        if shape != (1, 1, width):
            which = (
                f"the output of layer {name}" if isinstance(name, int) else "its last hidden state"
            )
            got = shape[-1] if shape and shape[:-1] == (1, 1) else shape
            raise UnsupportedModelError(
                f"cannot draft for {get_module_name(model)}: expected {which} as wide as its embedding, {width}, "
                f"got {got}"
            )
