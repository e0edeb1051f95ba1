"""Any mlx-lm model as a target: embed, forward, verify a tree, keep a path. The model itself is never changed."""

from __future__ import annotations

from typing import Any, NamedTuple, cast

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.generate import maybe_quantize_kv_cache
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.models.rope_utils import DynamicNTKScalingRoPE

from . import kv
from .errors import RedrafterError, UnsupportedModelError, one_line
from .seams import PerNodeRope, Tap, TreeView, building, slots, tree_mask, wrapped
from .types import Tree

TREE_TESTED = ("gemma", "llama", "mistral", "mixtral", "phi3", "qwen2", "qwen3", "qwen3_moe")
"""The model types whose trees this package's tests hold against plain forwards."""


KV_BITS = (2, 3, 4, 5, 6, 8)
KV_GROUP_SIZES = (32, 64, 128)


class KVQuantization(NamedTuple):
    """When and how the KV cache is quantised, in mlx-lm's names; never when `bits` is None."""

    bits: int | None = None
    group_size: int = 64
    start: int = 5000

    def check(self) -> KVQuantization:
        """Itself.

        Raises:
            RedrafterError: MLX has no such quantisation.
        """
        if self.bits is not None:
            for name, value, known in (
                ("kv_bits", self.bits, KV_BITS),
                ("kv_group_size", self.group_size, KV_GROUP_SIZES),
            ):
                if value not in known:
                    raise RedrafterError(f"{name} must be one of {', '.join(map(str, known))}, got {value}")
        if self.start < 0:
            raise RedrafterError(f"quantized_kv_start must be at least 0, got {self.start}")
        return self


class Forward(NamedTuple):
    """One target forward.

    Attributes:
        logits: (T, V) as the model computes them.
        hidden: (T, D) after the final norm; None when it was not asked for.
    """

    logits: mx.array
    hidden: mx.array | None


class Target:
    """A model, its cache, and the rows of the cache that are not yet decided upon.

    Args:
        model: a model object as `mlx_lm.load` returns it.
        cache: its prompt cache; None makes a new one.
        quantization: of the KV cache.
    """

    def __init__(
        self, model: nn.Module, cache: kv.Cache | None = None, quantization: KVQuantization | None = None
    ) -> None:
        self._model = model
        self.cache: kv.Cache = make_prompt_cache(model) if cache is None else cache
        self._quantization = quantization or KVQuantization()
        self.length = kv.length(self.cache)
        with building():
            self._ropes = slots(model, "rope")

    def embed(self, tokens: mx.array) -> mx.array:
        """(..., D) raw embedding rows of `tokens` (...)."""
        embedded: mx.array = backbone(self._model).embed_tokens(tokens)
        return embedded

    def forward(self, tokens: mx.array, *, tapped: bool) -> Forward:
        """The model on `tokens` (T,) behind the cache, which takes their rows. `tapped` asks for the hidden states."""
        if not tapped:
            logits = self._model(tokens[None], cache=self.cache)
            return Forward(logits[0], None)
        return self._tapped(tokens, self.cache)

    def verify(self, tree: Tree) -> Forward:
        """The model on every node of `tree`, each seeing the prefix and its ancestors; the cache takes N rows."""
        positions = tree.depths + self.length
        mask = tree_mask(self.length, tree.ancestors)
        views = [TreeView(c, positions, mask) for c in self.cache]
        with building(), wrapped(self._ropes, PerNodeRope):
            return self._tapped(tree.tokens, views)

    def _tapped(self, tokens: mx.array, cache: list[Any]) -> Forward:
        with building(), wrapped([(backbone(self._model), "norm")], Tap) as (tap,):
            logits = self._model(tokens[None], cache=cache)
        return Forward(logits[0], tap.kept[-1][0])

    def keep_(self, path: list[int]) -> None:
        """Commits these node rows of the last forward and drops its others; then quantises if it is time."""
        if path:
            kv.compact_(self.cache, self.length, path)
        else:
            kv.rewind_(self.cache, self.length)
        self.advance_(len(path))

    def advance_(self, count: int) -> None:
        """Commits all `count` rows of a forward that drafted nothing; then quantises if it is time."""
        self.length += count
        bits, group_size, start = self._quantization
        if bits is None:
            return
        before = list(self.cache)
        maybe_quantize_kv_cache(self.cache, start, group_size, bits)
        if any(old is not new for old, new in zip(before, self.cache, strict=True)):
            # The next forward, which reads it, may be asked for by another thread.
            mx.async_eval([c.state for c in self.cache])

    def forget_(self) -> None:
        """Drops the rows that are not committed, where the cache can drop rows."""
        if not kv.foreign(self.cache):
            kv.rewind_(self.cache, self.length)

    def until_quantized(self) -> int | None:
        """How many rows may still be committed in one piece before the cache is quantised; None for any number."""
        if self._quantization.bits is None or self.length >= self._quantization.start:
            return None
        return self._quantization.start - self.length

    def evaluate(self) -> None:
        """Evaluates the cache."""
        mx.eval([c.state for c in self.cache])


def backbone(model: nn.Module) -> nn.Module:
    """The part of the model that ends in the final norm and holds the embedding.

    Raises:
        UnsupportedModelError: it is not where mlx-lm's language models have it.
    """
    inner: Any = model.get("model")
    missing = [name for name in ("embed_tokens", "norm") if not isinstance(getattr(inner, name, None), nn.Module)]
    if missing:
        raise UnsupportedModelError(
            f"cannot draft for this model: expected model.{missing[0]} as in mlx-lm's language models, "
            f"{type(model).__module__}.{type(model).__name__} has none"
        )
    found: nn.Module = inner
    return found


def sizes(model: nn.Module) -> tuple[int, int]:
    """(hidden size D, vocabulary size V) of a model; nothing is computed.

    Raises:
        UnsupportedModelError: see `backbone`.
    """
    token = mx.zeros((1, 1), mx.int32)
    return backbone(model).embed_tokens(token).shape[-1], model(token).shape[-1]


def check_request(model: nn.Module, tokens: mx.array, cache: kv.Cache | None, quantization: KVQuantization) -> int:
    """Refuses what would fail, or make nonsense, only while the prompt is read; the size of the vocabulary.

    What the model's outputs and its cache look like is read off a forward that is built but never computed.

    Args:
        tokens: (T,) the prompt.
        cache: a prompt cache of the caller's.

    Raises:
        RedrafterError: token ids outside the vocabulary, a cache of another model, or a KV group size that does not
            divide the head size.
    """
    probe = make_prompt_cache(model)
    if cache is not None and len(cache) != len(probe):
        raise RedrafterError(f"the prompt cache must have {len(probe)} layers as the model has, got {len(cache)}")
    if cache is not None and (
        odd := [c for c in cache if not hasattr(c, "update_and_fetch") and not hasattr(c, "state")]
    ):
        raise RedrafterError(f"the prompt cache must hold one of mlx-lm's caches a layer, got {type(odd[0]).__name__}")
    vocab_size: int = model(mx.zeros((1, 1), mx.int32), cache=probe).shape[-1]
    ids = cast(list[int], tokens.tolist())
    if wrong := [i for i in (min(ids), max(ids)) if not 0 <= i < vocab_size]:
        raise RedrafterError(f"token ids must be from 0 to {vocab_size - 1}, got {wrong[0]}")
    if quantization.bits is not None:
        for c in probe:
            arrays = (getattr(c, "keys", None), getattr(c, "values", None))
            sizes = [x.shape[-1] for x in arrays if isinstance(x, mx.array)]
            if hasattr(c, "to_quantized") and (odd := [size for size in sizes if size % quantization.group_size]):
                raise RedrafterError(f"kv_group_size must divide the head size {odd[0]}, got {quantization.group_size}")
    return vocab_size


def check_draftable(model: nn.Module, *, tree: bool) -> None:
    """Refuses a model whose rounds could not be exact, before any prompt is read.

    A chain needs a cache that can drop rows. A tree needs more: the mask must come from the cache, and the
    positions from rope modules that take the cache's offset. Both are looked at on a forward that is built but
    never computed.

    Args:
        tree: whether rounds will branch.

    Raises:
        UnsupportedModelError: with the reason.
    """
    backbone(model)
    kind = getattr(model, "model_type", type(model).__name__)
    cache = make_prompt_cache(model)
    if others := kv.foreign(cache):
        raise UnsupportedModelError(
            f"cannot draft for model type {kind!r}: its cache ({', '.join(others)}) cannot be rewound"
        )
    if any(isinstance(module, DynamicNTKScalingRoPE) for _, module in model.named_modules()):
        raise UnsupportedModelError(
            f"cannot draft for model type {kind!r} with dynamic rope scaling: it turns with the length of a forward"
        )
    if not tree:
        return
    if kind not in TREE_TESTED:
        raise UnsupportedModelError(
            f"beam_width > 1 is tested for {', '.join(TREE_TESTED)}; model type {kind!r} takes beam_width 1 only"
        )
    positions, mask = mx.array([0, 1, 1]), mx.ones((3, 3), mx.bool_)
    views = [TreeView(c, positions, mask) for c in cache]
    try:
        with building(), wrapped(slots(model, "rope"), PerNodeRope) as ropes:
            model(mx.zeros((1, 3), mx.int32), cache=views)
    except Exception as error:
        raise UnsupportedModelError(f"cannot verify trees with model type {kind!r}: {one_line(error)}") from error
    if not any(view.masks_made for view in views) or sum(rope.calls for rope in ropes) != 2 * len(cache):
        raise UnsupportedModelError(
            f"cannot verify trees with model type {kind!r}: its mask or positions do not come from its cache"
        )
