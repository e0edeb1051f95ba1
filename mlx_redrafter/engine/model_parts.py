"""Where a model has the parts that a drafter needs, and how what they give is captured."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypeVar

import mlx.core as mx
import mlx.nn as nn

from ..errors import UnsupportedModelError
from .tree_attention import MODEL_LOCK

T = TypeVar("T")

EMBEDDINGS = (
    *("embed_tokens", "wte", "embeddings", "word_embeddings", "tok_embeddings", "token_embeddings"),
    *("embed_in", "embedding", "embed"),
)
"""The names under which mlx-lm's models keep their token embedding."""

NORMS = (
    *("norm", "final_layernorm", "final_layer_norm", "embedding_norm", "final_norm", "output_norm"),
    *("norm_f", "norm_out", "ln_f"),
)
"""The names of the norm in front of the head."""

OTHER_MODALITIES = ("vision", "audio", "multi_modal", "mm_")
"""How the names of modules begin that do not read text."""

ROPE_MARGIN = 256
"""Some dynamic ropes count a little more than the length of a text: its heads, too."""


class Slot(NamedTuple):
    """The place of a child module."""

    parent: nn.Module
    name: str


class ModelParts(NamedTuple):
    """The parts of a model that a drafter needs.

    Attributes:
        embedding: the token embedding.
        final_norm: the place whose output is the drafter's input: the final norm, or the model without its head where
            the norm is not a module.
    """

    embedding: nn.Module
    final_norm: Slot


def find_parts(model: nn.Module) -> ModelParts:
    """Where `model` has them: read off its modules, nothing is computed.

    Raises:
        UnsupportedModelError: it has no token embedding where mlx-lm's language models have one.
    """
    for path in _walk_modules(model):
        holder = path[-1].parent[path[-1].name]
        embedding = next((holder[key] for key in EMBEDDINGS if _is_embedding(holder.get(key))), None)
        if embedding is None:
            continue
        # The embedding may be a level below the module that has the norm, and the norm may not be a module.
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


def has_final_norm(model: nn.Module) -> bool:
    """Whether a model's final norm is a module, so that the hidden state before it can be read."""
    return find_parts(model).final_norm.name in NORMS


def _walk_modules(model: nn.Module) -> Iterator[list[Slot]]:
    """The path from `model` to every module below it, breadth first; not into layers, nor into images or audio."""
    level: list[list[Slot]] = [[]]
    while level:
        below = []
        for path in level:
            parent = path[-1].parent[path[-1].name] if path else model
            items: Any = parent.items()
            names = [name for name, child in items if isinstance(child, nn.Module)]
            below += [[*path, Slot(parent, name)] for name in names if not name.startswith(OTHER_MODALITIES)]
        yield from below
        level = below


def _has_layers(module: nn.Module) -> bool:
    items: Any = module.values()
    return any(isinstance(child, list) for child in items)


def _is_embedding(module: Any) -> bool:
    return isinstance(module, (nn.Embedding, nn.QuantizedEmbedding))


def compute_dtype(model: nn.Module) -> mx.Dtype:
    """What a model computes in: the dtype of its embedding's rows."""
    dtype: mx.Dtype = find_parts(model).embedding(mx.zeros((1,), mx.int32)).dtype
    return dtype


def model_sizes(model: nn.Module) -> tuple[int, int]:
    """(hidden size D, vocabulary size V) of a model; nothing is computed.

    Raises:
        UnsupportedModelError: see `find_parts`.
    """
    token = mx.zeros((1, 1), mx.int32)
    return find_parts(model).embedding(token).shape[-1], model(token).shape[-1]


def model_name(model: nn.Module) -> str:
    """The name of its module in `mlx_lm.models`."""
    return type(model).__module__.rpartition(".")[2]


class OutputRecorder(nn.Module):
    """Passes its module's output on, and keeps it, or its input, when the thread that made the recorder calls."""

    def __init__(self, module: nn.Module, *, want_input: bool = False) -> None:
        super().__init__()
        self.module = module
        self._want_input = want_input
        self.outputs: list[mx.array] = []
        self._thread = threading.get_ident()

    def __call__(self, *args: Any, **kwargs: Any) -> mx.array:
        out = self.module(*args, **kwargs)
        if threading.get_ident() == self._thread:
            self.outputs.append(args[0] if self._want_input else out)
        return out

    def __getattr__(self, name: str) -> Any:
        if name in self:
            return self[name]
        return getattr(self["module"], name) if "module" in self else super().__getattr__(name)


def capture_output(slot: Slot, call: Callable[[], T], *, want_input: bool = False) -> tuple[T, list[mx.array]]:
    """(what `call` returns, what the child in `slot` returned meanwhile, or with `want_input` was given).

    The dictionary entry is replaced, not the attribute set: a module's order of parameters stays as it was.
    """
    with MODEL_LOCK:
        parent, name = slot
        child = parent[name]
        recorder = OutputRecorder(child, want_input=want_input)
        try:
            parent[name] = recorder
            return call(), recorder.outputs
        finally:
            parent[name] = child


def exact_until(model: nn.Module) -> int | None:
    """The text length up to which several rows in one forward give what they give one by one; None for any.

    Dynamic ropes turn all tokens of a forward alike, by the length at its end, once that is beyond a bound.
    """
    ropes = (module for _, module in model.named_modules() if type(module).__name__ == "DynamicNTKScalingRoPE")
    return min((rope.max_position_embeddings - ROPE_MARGIN for rope in ropes), default=None)
