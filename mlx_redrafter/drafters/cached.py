"""Sources with their own KV cache: it has a row for every position of the text that they have read.

A draft does not wait for the pending round's host read, so the number of that round's positions
that stay is not known yet. All of them are appended, and masked by that number, which is an array.
The next round's position gives the number; the other rows, and the draft's, are then overwritten::

    rows    settled | the pending round: n_kept, then others | the draft
    seen    all     | the first n_kept                       | itself and its ancestors

Positions that a source has not read have no row.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple, Self, cast

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import KVCache

from ..engine.beam_search import Advance, State
from ..engine.types import Kept, StateName
from ..target.model_parts import get_head, get_parts
from .protocol import N_SAMPLES, Drafter, Head, StepwiseSource, make_samples, read_siblings

MAX_WAITING = 64
"""The most states that are buffered while nothing is drafted; more are read together."""

MAX_EXCESS = 256
"""A cache may exceed `max_kv_size` by this many rows before its oldest rows are dropped."""


class WaitingStates(NamedTuple):
    """States of consecutive positions whose rows in the cache are missing or not final.

    Attributes:
        tokens: (R,) int32.
        hidden: (R, X) the captured hidden states, concatenated.
        n_kept: () int32 or a number, how many of the R positions stay.
        position: of the first of them in the text.
    """

    tokens: mx.array
    hidden: mx.array
    n_kept: mx.array | int
    position: int


class LayerCache:
    """A KV cache for a layer of mlx-lm, with an offset that need not be its number of rows.

    Args:
        cache: the rows are appended to it.
        offset: the position of the first new row in the text, a number or () int32; the layer
            passes it to RoPE.
    """

    def __init__(self, cache: KVCache, offset: mx.array | int) -> None:
        self._cache = cache
        self.offset = offset

    @property
    def n_rows(self) -> int:
        """How many rows the cache has."""
        return self._cache.offset

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Appends keys and values, and returns all of them."""
        return self._cache.update_and_fetch(keys, values)


class CachedSource(StepwiseSource):
    """The source of a drafter with a KV cache.

    Subclasses define how rows are made and how a draft begins.

    Args:
        drafter: its weights.
        model: the target.
        capture: the target's hidden states that the drafter reads, concatenated.
        n_layers: how many caches it has.
    """

    reads_all = True

    def __init__(
        self, drafter: Any, model: nn.Module, capture: Sequence[StateName], n_layers: int = 1
    ) -> None:
        self.drafter = drafter
        self.capture = tuple(capture)
        self._embed = drafter.get("embed_tokens", get_parts(model).embedding)
        self._window: int | None = None  # the last positions that the drafter sees; None for all
        self._caches = [KVCache() for _ in range(n_layers)]
        self._n_rows = 0  # settled in the caches
        self._waiting: list[WaitingStates] = []  # not settled; some of the last may be dropped
        self._is_appended = False  # whether the last ones are in the caches

    def append_rows(self, hidden: mx.array, tokens: mx.array, position: int) -> mx.array:
        """Appends the rows of consecutive positions to the caches.

        Args:
            hidden: (R, X) the captured hidden states.
            tokens: (R,) int32, the token after each position.
            position: of the first.

        Returns:
            (R, ...) the drafter's output.
        """
        raise NotImplementedError

    def keep(self, kept: Kept) -> None:
        """Buffers the states that stay. If there are many, reads those with a known next token."""
        self._settle(kept.position)
        tokens = kept.rows(kept.tokens).astype(mx.int32)
        hidden = mx.concatenate([kept.rows(kept.hidden[name]) for name in self.capture], axis=-1)
        self._waiting.append(WaitingStates(tokens, hidden, kept.n_kept, kept.position))
        if sum(len(states.tokens) for states in self._waiting) > MAX_WAITING:
            self._append_known()
        self._drop_oldest()

    def _append_known(self) -> None:
        """Reads the buffered states that certainly stay and whose next token is known."""
        last = self._waiting[-1]
        tokens, hidden, position = self._join()
        is_known = isinstance(last.n_kept, int)
        n_known = len(tokens) - (1 if is_known else len(last.tokens))
        if n_known:
            self._append_after_settled(hidden[:n_known], tokens[1 : n_known + 1], position)
            self._n_rows += n_known
        if is_known:
            end = mx.array([n_known])  # a copy, so that the other states can be freed
            last = WaitingStates(tokens[end], hidden[end], 1, position + n_known)
        self._waiting = [last]

    def _drop_oldest(self) -> None:
        most = min(filter(None, (self.max_kv_size, self._window)), default=None)
        if most is None or self._n_rows <= most + MAX_EXCESS:
            return
        newest = slice(self._n_rows - most, self._n_rows)
        for cache in self._caches:
            cache.keys = cast(mx.array, cache.keys)[..., newest, :]
            cache.values = cast(mx.array, cache.values)[..., newest, :]
        self._n_rows = most

    def _settle(self, position: int) -> None:
        """Notes how many of the last states stayed, as the next ones begin at `position`."""
        if not self._waiting:
            return
        last = self._waiting.pop()
        n_kept = position - last.position
        is_appended = self._is_appended
        self._is_appended = False
        if n_kept == 0 and not is_appended:  # a plain step that did not stay
            return
        if not 0 < n_kept <= len(last.tokens):
            self._waiting = []  # positions are missing, so the last state's next token is not known
        elif is_appended:
            self._n_rows += n_kept
        else:
            settled = WaitingStates(
                last.tokens[:n_kept], last.hidden[:n_kept], n_kept, last.position
            )
            self._waiting.append(settled)

    def _join(self) -> tuple[mx.array, mx.array, int]:
        """(tokens, hidden states, the first position) of all that is buffered."""
        tokens, hidden, _, positions = zip(*self._waiting, strict=True)
        return mx.concatenate(list(tokens)), mx.concatenate(list(hidden)), positions[0]

    def _append_after_settled(self, hidden: mx.array, tokens: mx.array, position: int) -> mx.array:
        for cache in self._caches:
            cache.offset = self._n_rows
        return self.append_rows(hidden, tokens, position)

    def append_pending(self, root: mx.array) -> tuple[mx.array, mx.array, mx.array]:
        """Reads all buffered states, including the pending round's. A draft's rows follow theirs.

        Args:
            root: () int32, the token after the last position that stays.

        Returns:
            (...) the drafter's output for that position; (C,) bool, which cache rows a draft sees;
            () int32, the root's position.
        """
        last = self._waiting[-1]
        tokens, hidden, position = self._join()
        n_before = len(tokens) - len(last.tokens)
        tip = n_before + last.n_kept - 1
        following = mx.concatenate([tokens[1:], tokens[-1:]])
        following = mx.where(mx.arange(len(tokens)) < tip, following, root.astype(mx.int32))
        outputs = self._append_after_settled(hidden, following, position)

        self._n_rows += n_before
        self._waiting = [last]
        self._is_appended = True
        sees = mx.arange(self._n_rows + len(last.tokens)) < self._n_rows + last.n_kept
        return outputs[tip], sees, mx.array(last.position + last.n_kept)

    def rewind(self, count: int) -> None:
        """Drops positions. The last one left is read again, as the token after it will differ."""
        if self._waiting:
            last = self._waiting.pop()
            self._waiting.append(last._replace(n_kept=last.n_kept - count))
            self._is_appended = False

    def fork(self) -> Self:
        other = copy.copy(self)
        other._waiting = list(self._waiting)
        other._caches = copy.deepcopy(self._caches)
        mx.eval(other.arrays)  # the copy may be used by another thread
        return other

    @property
    def arrays(self) -> Any:
        """The caches and the buffered states."""
        caches = [(cache.keys, cache.values) for cache in self._caches if cache.keys is not None]
        return caches, self._waiting


class PairDrafter(Drafter):
    """A head with a KV cache that reads pairs of a position's state and the token after it.

    Attributes:
        needs_head: whether it uses the target's output matrix.
    """

    needs_head: bool = False

    def project(self, states: mx.array) -> mx.array:
        """(T, H) features from the target's states (T, X); by default the states."""
        return states.astype(self.dtype)

    def read_pairs(
        self,
        features: mx.array,
        embedded: mx.array,
        cache: LayerCache,
        mask: mx.array | str,
    ) -> mx.array:
        """(T, H) the head's output for pairs. In a draft, it replaces the next position's feature.

        Args:
            features: (T, H) from `project`; in a draft, this method's output for the token before.
            embedded: (T, D) the embedding of the token after each position.
            cache: the rows are appended to it.
            mask: "causal", or (1, 1, T, C) bool, which cache rows each pair sees.
        """
        raise NotImplementedError

    def guess(self, features: mx.array, head: Head | None) -> mx.array:
        """(T, V) float32 logits of the next token, from `read_pairs`' output.

        Args:
            head: the target's output matrix; None if `needs_head` is False.
        """
        assert head is not None
        return head(features).astype(mx.float32)

    def sample_logits(self) -> mx.array:
        """Logits for fixed random pairs, or their features if it uses the target's matrix."""
        samples = make_samples(self.args.hidden_size, self.n_inputs)
        embedded, states = (array.astype(self.dtype) for array in samples)
        if "embed_tokens" in self:
            tokens = mx.arange(N_SAMPLES) % self.args.vocab_size
            embedded = self.embed_tokens(tokens).astype(self.dtype)
        cache = LayerCache(KVCache(), 0)
        features = self.read_pairs(self.project(states), embedded, cache, "causal")
        if self.needs_head:
            return features.astype(mx.float32)
        return self.gather(self.guess(features, None))

    @property
    def n_inputs(self) -> int:
        """X, the width of its input states."""
        return self.args.hidden_size


class PairSource(CachedSource):
    """The source of a head that reads pairs of a position's state and the next token.

    It guesses the token after that. In a draft, the head's output replaces states that do not exist
    yet. The rows of all hypotheses follow each other in the cache, and each row sees its ancestors.
    """

    drafter: PairDrafter

    def __init__(
        self, drafter: PairDrafter, model: nn.Module, capture: Sequence[StateName]
    ) -> None:
        super().__init__(drafter, model, capture)
        self._head = get_head(model) if drafter.needs_head else None

    def append_rows(self, hidden: mx.array, tokens: mx.array, position: int) -> mx.array:
        """Appends rows; returns (R, H), the head's output."""
        return self._read(self.drafter.project(hidden), tokens, position, "causal")

    def _read(
        self,
        features: mx.array,
        tokens: mx.array,
        position: mx.array | int,
        mask: mx.array | str,
    ) -> mx.array:
        embedded = self._embed(tokens).astype(self.drafter.dtype)
        cache = LayerCache(self._caches[0], position)
        return self.drafter.read_pairs(features, embedded, cache, mask)

    def begin(self, root: mx.array, depth: int = 1) -> Advance:
        feature, sees, position = self.append_pending(root)

        def advance(tokens: mx.array, state: State) -> tuple[mx.array, State]:
            if state is None:  # the root, which is the token of the last pair
                return self.drafter.guess(feature[None], self._head), (feature[None], None, 0)
            features, ancestors, level = state
            at = position + level
            features, ancestors = self._read_level(features, tokens, ancestors, sees, at)
            return self.drafter.guess(features, self._head), (features, ancestors, level + 1)

        return advance

    def _read_level(
        self,
        features: mx.array,
        tokens: mx.array,
        ancestors: mx.array | None,
        sees: mx.array,
        position: mx.array,
    ) -> tuple[mx.array, mx.array]:
        """(the head's output for a level's tokens, which of the draft's rows are their ancestors).

        The latter is (W, M) bool.

        Args:
            features: (W, H) the head's output for their parents.
            ancestors: (W, M - W) bool, for the rows before this level; None for none.
            position: () int32, of the pairs.
        """
        width = len(tokens)
        own = mx.eye(width, dtype=mx.bool_)
        ancestors = own if ancestors is None else mx.concatenate([ancestors, own], axis=1)
        mask = mx.concatenate([mx.broadcast_to(sees, (width, len(sees))), ancestors], axis=1)
        read = partial(self._read, features, tokens, position, mask[None, None])
        return read_siblings(width, read), ancestors
