"""Where a model of mlx-lm has its embedding, its final norm and the hidden states between that and its head."""

from __future__ import annotations

from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn

from ..errors import UnsupportedModelError
from .tree_attention import Slot

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
"""The names under which mlx-lm's models keep the table of their tokens."""

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
"""The names of the norm in front of the head."""

OTHER_SENSES = ("vision", "audio", "multi_modal", "mm_")
"""How the names of modules begin that read no text."""


class Anatomy(NamedTuple):
    """The parts of a model that a drafter needs.

    Attributes:
        embedding: the table of its tokens.
        tap: the place whose output is what a drafter is told: the final norm, or the model without its head where the
            norm is no module.
    """

    embedding: nn.Module
    tap: Slot


def anatomy(model: nn.Module) -> Anatomy:
    """Where `model` has them: read off its modules, nothing is computed.

    Raises:
        UnsupportedModelError: it has no table of tokens where mlx-lm's language models have one.
    """
    for path in inside(model):
        holder = path[-1].parent[path[-1].name]
        table = next((holder[key] for key in EMBEDDINGS if is_table(holder.get(key))), None)
        if table is None:
            continue
        # The table may be a level below the module that has the norm, and the norm may be no module.
        for slot in reversed(path):
            inner = slot.parent[slot.name]
            if norm := next((key for key in NORMS if isinstance(inner.get(key), nn.Module)), None):
                return Anatomy(table, Slot(inner, norm))
        layered = (slot for slot in reversed(path) if has_layers(slot.parent[slot.name]))
        return Anatomy(table, next(layered, path[-1]))
    raise UnsupportedModelError(
        f"cannot draft for this model: expected model.embed_tokens as in mlx-lm's language models, "
        f"{type(model).__module__}.{type(model).__name__} has none"
    )


def dtype_of(model: nn.Module) -> mx.Dtype:
    """What a model computes in: its embedding's rows.

    Raises:
        UnsupportedModelError: see `anatomy`.
    """
    dtype: mx.Dtype = anatomy(model).embedding(mx.zeros((1,), mx.int32)).dtype
    return dtype


def inside(model: nn.Module) -> list[list[Slot]]:
    """The way from `model` to every module under it, outer ones first; layers, pictures and sounds are left out."""
    found: list[list[Slot]] = []
    level: list[list[Slot]] = [[]]
    while level:
        below = []
        for path in level:
            parent = path[-1].parent[path[-1].name] if path else model
            below += [[*path, Slot(parent, name)] for name in names_of(parent) if not name.startswith(OTHER_SENSES)]
        found += below
        level = below
    return found


def has_layers(module: nn.Module) -> bool:
    """Whether it is more than a table: it has a list of modules."""
    items: Any = module.values()
    return any(isinstance(child, list) for child in items)


def names_of(parent: nn.Module) -> list[str]:
    """The names of its children that are modules themselves; those in lists, as layers are, are none."""
    items: Any = parent.items()
    return [name for name, child in items if isinstance(child, nn.Module)]


def is_table(module: Any) -> bool:
    """Whether it gives a row for each token id."""
    return isinstance(module, (nn.Embedding, nn.QuantizedEmbedding))
