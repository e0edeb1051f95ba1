"""Any mlx-lm model as a target: embed, forward, verify a tree, keep a path. The model itself is never changed."""

from __future__ import annotations

from functools import cached_property
from typing import Any, NamedTuple, cast

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.generate import maybe_quantize_kv_cache
from mlx_lm.models.cache import RotatingKVCache, make_prompt_cache

from ..errors import RedrafterError, UnsupportedModelError, one_line
from . import kv_cache
from .anatomy import Anatomy, anatomy
from .positions import Nodes
from .supported_models import CHAINS, REFUSED, REPLAYED, TREES, TURNING
from .tree_attention import reading, tapped
from .types import Tree

SMALLEST_RING = 8
"""Rows: 4 that stay, a token, and some behind it."""

MARGIN = 256
"""Some dynamic ropes count a little more than the length of a text: its heads, too."""

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


class Before(NamedTuple):
    """What a plain forward would go back to.

    Attributes:
        length: of the text that was committed.
        layers: of the cache; quantising replaces them.
        marks: of those.
        replayed: what was to be read again.
    """

    length: int
    layers: kv_cache.Cache
    marks: list[dict[str, Any]]
    replayed: list[int]


class Target:
    """A model, its cache, and the rows of the cache that are not yet decided upon.

    Where every layer's cache can forget rows, a round's rejected ones are dropped. Otherwise the cache goes back to its
    mark, and what was accepted since stands in front of the next forward's input: it is replayed. A round of which all
    is accepted moves the mark on.

    Args:
        model: a model object as `mlx_lm.load` returns it.
        cache: its prompt cache; None makes a new one.
        quantization: of the KV cache.
        max_kv_size: rows of a new cache at most, where the model does not make its own.
    """

    def __init__(
        self,
        model: nn.Module,
        cache: kv_cache.Cache | None = None,
        quantization: KVQuantization | None = None,
        max_kv_size: int | None = None,
    ) -> None:
        self._model = model
        self.cache: kv_cache.Cache = make_prompt_cache(model, max_kv_size) if cache is None else cache
        self._quantization = quantization or KVQuantization()
        self.length = kv_cache.length(self.cache)
        self._longest = exact_until(model)
        self._forgets = not kv_cache.unknown_types(self.cache, kv_cache.TRIMMABLE)
        self._ringed = kv_cache.has_ring(self.cache)
        self._sinks = any(isinstance(c, RotatingKVCache) and c.keep for c in kv_cache.leaves(self.cache))
        self._rows = 0  # of the last forward that verified
        self._torn = False  # whether keeping some of them has begun
        self._feeds = self._forgets and not any(hasattr(c, "caches") for c in self.cache)
        self._marks: list[dict[str, Any]] | None = None  # what the cache goes back to if nothing of a round is kept
        self._replayed: list[int] = []  # committed, but behind the marks
        self._before: Before | None = None

    @cached_property
    def _anatomy(self) -> Anatomy:
        return anatomy(self._model)

    @property
    def replayed(self) -> int:
        """How many committed tokens the next forward reads again."""
        return len(self._replayed)

    def room(self, count: int) -> bool:
        """Whether `count` rows at once give what they give one by one: some ropes turn with the length of a text."""
        return self._longest is None or self.length + count <= self._longest

    def embed(self, tokens: mx.array) -> mx.array:
        """(..., D) raw embedding rows of `tokens` (...)."""
        embedded: mx.array = self._anatomy.embedding(tokens)
        return embedded

    def forward(self, tokens: mx.array, *, want_hidden: bool) -> Forward:
        """The model on `tokens` (T,) behind what is committed, for good, or not at all. `tapped` asks for the hidden
        states."""
        count = tokens.shape[0]
        if self._sinks:
            self.catch_up_()
        if self._replayed:
            tokens = mx.concatenate([mx.array(self._replayed, mx.int32), tokens.astype(mx.int32)])
        self._before = None  # what was before the forward before is of no use any more
        if not self._forgets or self._replayed or self._ringed:  # a ring has dropped rows, or not in all its arrays
            self._before = Before(self.length, list(self.cache), kv_cache.snapshot(self.cache), self._replayed)
        self._replayed, self._marks = [], None
        try:
            if not want_hidden:
                return Forward(self._model(tokens[None], cache=self.cache)[0, -count:], None)
            return self._tapped(tokens, self.cache, count)
        except BaseException:
            self.forget_()  # broken off between two layers, some hold more than others
            raise

    def verify(self, tree: Tree, *, branched: bool) -> Forward:
        """The model on every node of `tree`, each seeing what is committed and its ancestors; nothing is decided yet.

        Args:
            tree: N >= 2 nodes.
            branched: whether it is more than a line.
        """
        count = tree.tokens.shape[0]
        self._before = None
        if self._marks is None:
            self._marks = kv_cache.snapshot(self.cache)
        self._rows = count
        tree = behind(self._replayed, tree)
        if not branched and not self._ringed:
            return self._tapped(tree.tokens, self.cache, count)
        nodes = Nodes(self.length - self.replayed, tree.depths, tree.ancestors, branched)
        return reading(self.cache, nodes, lambda views: self._tapped(tree.tokens, views, count))[0]

    def _tapped(self, tokens: mx.array, cache: list[Any], count: int) -> Forward:
        logits, kept = tapped(self._anatomy.tap, lambda: self._model(tokens[None], cache=cache))
        return Forward(logits[0, -count:], kept[-1][0, -count:])

    def keep_path(self, path: list[int], tokens: list[int]) -> None:
        """Commits these node rows of the last `verify` and drops its others; then quantises if it is time.

        Args:
            path: nodes from the root down.
            tokens: those nodes' tokens.
        """
        if not self._rows:
            return
        assert self._marks is not None
        if self._forgets and path and not self._torn:
            self._torn = True  # if this is broken off, some layers have other rows: the next try goes back to the mark
            kv_cache.keep_rows(self.cache, self._rows, path)
            replayed, marks = [], None
        elif self._torn or len(path) < self._rows:
            kv_cache.restore(self.cache, self._marks)
            replayed, marks = self._replayed + tokens, self._marks
        else:
            replayed, marks = [], None
        if self._forgets and not replayed:
            marks = None
        length = self.length + len(path)
        self._replayed, self._marks, self._rows, self._torn, self.length = replayed, marks, 0, False, length
        self._quantize_()

    def advance_(self, count: int) -> None:
        """Commits all `count` rows of a forward that drafted nothing; then quantises if it is time."""
        self.length += count
        self._quantize_()

    def _quantize_(self) -> None:
        """Quantises the cache if it is time."""
        bits, group_size, start = self._quantization
        if bits is None:
            return
        if self._replayed and self.length >= start:
            self.catch_up_()
        before = list(self.cache)
        maybe_quantize_kv_cache(self.cache, start, group_size, bits)
        if any(old is not new for old, new in zip(before, self.cache, strict=True)):
            # The next forward, which reads it, may be asked for by another thread.
            self.enqueue()

    def catch_up_(self) -> None:
        """Reads again what is committed and behind the mark, so that the cache holds it: one by one where rings keep
        their first rows, since in a forward of several mlx-lm's mask is not what each alone would see."""
        if self._replayed:
            tokens, before = self._replayed, kv_cache.snapshot_rows(self.cache)
            self._replayed, self._marks = [], None
            try:
                for piece in [[token] for token in tokens] if self._sinks else [tokens]:
                    self._model(mx.array(piece)[None], cache=self.cache)
            except BaseException:
                kv_cache.restore(self.cache, before)
                self._replayed = tokens
                raise

    def forget_(self) -> None:
        """Drops what a forward has read and nobody has committed, in the layers that it has reached."""
        if self._before is not None and self._before.length == self.length:
            _, self.cache[:], marks, self._replayed = self._before
            kv_cache.restore(self.cache, marks)
        elif self._forgets and (count := kv_cache.length(self.cache) - self.length):
            kv_cache.keep_rows([c for c in kv_cache.leaves(self.cache) if c.offset == self.length + count], count, [])

    def take_back_(self, length: int) -> None:
        """Drops what the last forward has read, committed or not: `length` tokens were committed before it."""
        self.length = length
        self.forget_()

    def until_quantized(self) -> int | None:
        """How many rows may still be committed in one piece before the cache is quantised; None for any number."""
        if self._quantization.bits is None or self.length >= self._quantization.start:
            return None
        return self._quantization.start - self.length

    def pending(self) -> list[Any]:
        """What a forward may leave unevaluated beside its logits: states that only the next one reads."""
        return [] if self._feeds else [c.state for c in self.cache]

    def enqueue(self) -> None:
        """Has the cache computed, without waiting for it."""
        mx.async_eval([c.state for c in self.cache])

    def evaluate(self) -> None:
        """Evaluates the cache."""
        mx.eval([c.state for c in self.cache])


def exact_until(model: nn.Module) -> int | None:
    """The length of a text up to which several tokens at once are read as they would be one by one; None for any.

    Dynamic ropes turn all tokens of a forward alike, by the length at its end, once that is beyond a bound.
    """
    ropes = (module for _, module in model.named_modules() if type(module).__name__ == "DynamicNTKScalingRoPE")
    bounds = (rope.max_position_embeddings - MARGIN for rope in ropes)
    return min(bounds, default=None)


def behind(tokens: list[int], tree: Tree) -> Tree:
    """A line of tokens, and the tree behind its last one."""
    if not tokens:
        return tree
    count = len(tokens)
    size = count + tree.tokens.shape[0]
    line = mx.arange(count, dtype=mx.int32)
    before = mx.ones((size - count, count), mx.bool_)
    corner = mx.concatenate([mx.tri(count, dtype=mx.bool_), mx.zeros((count, size - count), mx.bool_)], axis=1)
    return Tree(
        mx.concatenate([mx.array(tokens, mx.int32), tree.tokens]),
        mx.concatenate([mx.maximum(line - 1, 0), mx.array([count - 1]), tree.parents[1:] + count]).astype(mx.int32),
        mx.concatenate([line, tree.depths + count]),
        mx.concatenate([corner, mx.concatenate([before, tree.ancestors], axis=1)]),
    )


def sizes(model: nn.Module) -> tuple[int, int]:
    """(hidden size D, vocabulary size V) of a model; nothing is computed.

    Raises:
        UnsupportedModelError: see `anatomy`.
    """
    token = mx.zeros((1, 1), mx.int32)
    return anatomy(model).embedding(token).shape[-1], model(token).shape[-1]


def check_request(
    model: nn.Module,
    tokens: mx.array,
    cache: kv_cache.Cache | None,
    quantization: KVQuantization,
    max_kv_size: int | None = None,
) -> int:
    """Refuses what would fail, or make nonsense, only while the prompt is read; the size of the vocabulary.

    What the model's outputs and its cache look like is read off a forward that is built but never computed.

    Args:
        tokens: (T,) the prompt.
        cache: a prompt cache of the caller's.
        max_kv_size: see `Target`.

    Raises:
        RedrafterError: rings to be quantised or too small, token ids outside the vocabulary, a cache of another model,
            or a KV group size that does not divide the head size.
    """
    check_ring(max_kv_size)
    probe = make_prompt_cache(model, max_kv_size)
    if quantization.bits is not None and kv_cache.has_ring(probe if cache is None else cache):
        raise RedrafterError("kv_bits needs caches that keep every row: mlx-lm cannot quantise a RotatingKVCache")
    if cache is not None and len(cache) != len(probe):
        raise RedrafterError(f"the prompt cache must have {len(probe)} layers as the model has, got {len(cache)}")
    if cache is not None and (
        odd := [c for c in cache if not hasattr(c, "update_and_fetch") and not hasattr(c, "state")]
    ):
        raise RedrafterError(f"the prompt cache must hold one of mlx-lm's caches a layer, got {type(odd[0]).__name__}")
    own = tuple({type(c) for c in kv_cache.leaves(probe)})
    if cache is not None and (others := kv_cache.unknown_types(cache, (*kv_cache.KNOWN, *own))):
        raise RedrafterError(f"the prompt cache must be of mlx-lm's own caches, got {', '.join(others)}")
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


def check_ring(max_kv_size: int | None) -> None:
    """Refuses a ring of too few rows.

    Raises:
        RedrafterError: `max_kv_size` is less than `SMALLEST_RING`.
    """
    if max_kv_size is not None and max_kv_size < SMALLEST_RING:
        raise RedrafterError(f"max_kv_size must be at least {SMALLEST_RING}, got {max_kv_size}")


def check_draftable(model: nn.Module, *, tree: bool, cache: kv_cache.Cache | None = None) -> str | None:
    """Refuses a model whose rounds could not be exact, before any prompt is read; why it takes no trees, if so.

    What it asks of its cache is looked at on a forward that is built but never computed.

    Args:
        tree: whether rounds are to branch.
        cache: a prompt cache of the caller's, whose rings may be others than the model's own.

    Raises:
        UnsupportedModelError: with the reason.
    """
    kind = model_name(model)
    if reason := REFUSED.get(kind):
        raise UnsupportedModelError(f"cannot draft for {kind}: {reason}")
    table, place = anatomy(model)
    probe = make_prompt_cache(model)
    if (unknown := kv_cache.unknown_types(probe, kv_cache.KNOWN)) and kind not in REPLAYED:
        raise UnsupportedModelError(f"cannot draft for {kind}: its cache ({', '.join(unknown)}) is not known")
    if cache is not None and kv_cache.has_ring(cache):
        like = [
            RotatingKVCache(c.max_size, c.keep) if isinstance(c, RotatingKVCache) else own
            for c, own in zip(cache, make_prompt_cache(model), strict=True)
        ]
        line = Nodes(0, mx.arange(2), mx.tri(2, dtype=mx.bool_), branched=False)
        reading(like, line, lambda views: model(mx.zeros((1, 2), mx.int32), cache=views))
    _, kept = tapped(place, lambda: model(mx.zeros((1, 1), mx.int32), cache=probe))
    hidden = kept[-1].shape[-1] if kept else None
    width = table(mx.zeros((1,), mx.int32)).shape[-1]
    if hidden != width:
        raise UnsupportedModelError(
            f"cannot draft for {kind}: a row of its embedding has {width} numbers, its last hidden state {hidden}"
        )
    return why_no_trees(model, kind) if tree else None


def why_no_trees(model: nn.Module, kind: str) -> str | None:
    """Why this model takes chains only; None when it takes trees."""
    if reason := CHAINS.get(kind):
        return reason
    if exact_until(model) is not None:
        return TURNING
    if kind not in TREES:
        return "trees are not tested for it"
    cache = make_prompt_cache(model)
    if states := kv_cache.unknown_types(cache, kv_cache.TRIMMABLE):
        return f"its cache ({', '.join(states)}) takes tokens one behind the other"
    nodes = Nodes(0, mx.array([0, 1, 1]), mx.array([[1, 0, 0], [1, 1, 0], [1, 0, 1]]) > 0, branched=True)
    try:
        _, views, made, calls = reading(cache, nodes, lambda views: model(mx.zeros((1, 3), mx.int32), cache=views))
    except Exception as error:
        return f"it does not take one position for each node: {one_line(error)}"
    if not made and "mask" not in calls:
        return "its mask does not come from its cache"
    if any(view.offsets_read for view in kv_cache.leaves(views)) and not {"rope", "arange"} & set(calls):
        return "its positions do not come from its cache"
    return None


def model_name(model: nn.Module) -> str:
    """The name of its module in `mlx_lm.models`."""
    return type(model).__module__.rpartition(".")[2]
