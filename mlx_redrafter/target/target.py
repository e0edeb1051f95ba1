"""Runs any mlx-lm model as a target: forward, verify a tree, keep a path, rewind.

The model is never changed.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.generate import maybe_quantize_kv_cache
from mlx_lm.models.cache import make_prompt_cache

from ..engine.tree import chain
from ..engine.types import Forward, StateName, Tree
from ..errors import RedrafterError
from ..machine import ranks
from . import kv_cache
from .few_rows import NO_FEW_ROWS, FewRows
from .forward import HowToRun, Part, Run, run, run_jointly
from .model_checks import get_exact_length
from .model_parts import get_capture_points
from .recurrence import Recording, list_recurrences, make_paths
from .row_attention import attend_by_row
from .tree_attention import Nodes

MIN_RING_SIZE = 8
"""The fewest rows of a rotating cache: 4 that stay, a token, and a few more."""


class KVQuantization(NamedTuple):
    """When and how the KV cache is quantized, as in mlx-lm; never if `bits` is None."""

    bits: int | None = None
    group_size: int = 64
    start: int = 5000


class TextRows(NamedTuple):
    """A target's rows of the next forward."""

    target: Target
    part: Part

    def fits(self, others: Sequence[TextRows]) -> bool:
        """Whether one forward may compute these and other texts' rows."""
        row_counts = self.part.how.row_counts
        parts = [each.part for each in (*others, self)]
        if row_counts != parts[0].how.row_counts:
            return False
        # Models may compute a text's first row differently, by whether there is a state.
        if self.part.how.recurrences and any(part.start == 0 for part in parts):
            return False
        if row_counts is None:
            return True
        is_prompt = not all(part.want_logits for part in parts)
        return not is_prompt and sum(part.n_rows for part in parts) <= row_counts[-1]


class Target:
    """A model with its KV cache, which keeps the accepted path of the last verify forward.

    Rejected rows are dropped from caches that can be trimmed, and the states of recurrent layers
    are computed again from what their recurrences got (`recurrence.py`). If one of the layers
    supports neither, the cache is rolled back to a snapshot from before the round, and the accepted
    tokens are replayed at the start of the next forward's input. A fully accepted chain needs
    nothing. All of this, and the quantization of the cache, happens when the next forward begins.

    Args:
        model: as `mlx_lm.load` returns it.
        cache: its prompt cache; None makes a new one.
        quantization: of the KV cache.
        capture: the hidden states that forwards return, see `StateName`.
        row_counts: the numbers of rows that a step or a verify forward may have, ascending; rows
            are padded to the next of them, and attend one at a time. None for any number. Padding
            needs caches that keep every row.
        few_rows: which matmuls of steps and verify forwards of 2 to 8 rows do not go to MLX. Those
            of a prompt do.
        rolls_back: whether states of recurrent layers are rolled back, see `explain_replay`.

    Attributes:
        cache: the prompt cache.
        length: how many tokens of the text the cache holds, including those to replay.
        limit: the length up to which several rows in one forward equal the same rows one by one;
            None for no limit.
    """

    def __init__(
        self,
        model: nn.Module,
        cache: kv_cache.Cache | None = None,
        quantization: KVQuantization | None = None,
        capture: Sequence[StateName] = (),
        row_counts: Sequence[int] | None = None,
        few_rows: FewRows = NO_FEW_ROWS,
        *,
        rolls_back: bool = False,
    ) -> None:
        self._model = model
        self.cache: kv_cache.Cache = make_prompt_cache(model) if cache is None else cache
        self._quantization = quantization or KVQuantization()
        self.length = kv_cache.length(self.cache)
        self.limit = get_exact_length(model)
        if row_counts is not None:
            # A ring that is full has its rows in another order after several at once.
            limits = (self.limit, kv_cache.get_ring_size(self.cache))
            self.limit = min(filter(None, limits), default=None)
        is_trimmable = not kv_cache.list_unknown_types(self.cache, kv_cache.TRIMMABLE)
        self._replays = not is_trimmable and not rolls_back
        recurrences = list_recurrences(model) if rolls_back else []
        points = get_capture_points(model, capture)
        self._how = HowToRun(row_counts, few_rows, recurrences, points)
        self._recording: Recording | None = None  # of the last verify forward, until it is settled
        self._has_ring = kv_cache.has_ring(self.cache)
        self._keeps_first = kv_cache.keeps_first_rows(self.cache)
        self._feeds_logits = is_trimmable and not any(hasattr(c, "caches") for c in self.cache)
        self._rows = 0  # of the last verify forward, until its path is settled
        self._path: list[int] = []
        self._path_tokens: list[int] = []
        self._snapshot: list[dict[str, Any]] | None = None
        self._replay: list[int] = []  # accepted after the snapshot
        self._has_run = False  # as in mlx-lm, the cache is not quantized before the first forward

    @property
    def is_shared(self) -> bool:
        """Whether several ranks share the model, each of which would measure other times."""
        return ranks.count_ranks() > 1

    @property
    def replayed(self) -> int:
        """How many accepted tokens the next forward replays."""
        if not self._rows or not self._replays:
            return len(self._replay)
        return 0 if len(self._path) == self._rows else len(self._replay) + len(self._path)

    def has_room(self, count: int) -> bool:
        """Whether `count` rows in one forward equal the same rows one by one."""
        row_counts = self._how.row_counts
        if row_counts is not None and count > row_counts[-1]:
            return False
        end = self.length + count + self._how.count_padding(count)
        return self.limit is None or end <= self.limit

    def forward(self, tokens: mx.array, *, want_hidden: bool = True) -> Forward:
        """Runs the model on `tokens` (T,) after the text, and keeps all rows.

        Args:
            want_hidden: whether to capture hidden states.
        """
        return self.run([self.prepare(tokens, want_hidden=want_hidden)])[0]

    def verify(
        self, tree: Tree, *, is_tree: bool, n_paths: int | None = None, depth: int | None = None
    ) -> Forward:
        """Runs the model on all nodes of `tree`, each seeing the text and its ancestors.

        Call `keep_path` next.

        Args: see `prepare_verify`.
        """
        part = self.prepare_verify(tree, is_tree=is_tree, n_paths=n_paths, depth=depth)
        return self.run([part])[0]

    def prepare(
        self, tokens: mx.array, *, want_hidden: bool = True, want_logits: bool = True
    ) -> TextRows:
        """The rows that `forward` runs, see there; nothing else may be asked before they run.

        Args:
            want_logits: whether the logits are used, which a piece of a prompt may decline.
        """
        self._settle()
        count = tokens.shape[0]
        if self._keeps_first:
            self._flush_replay()
        start = self.length - len(self._replay)
        if self._replay:
            tokens = mx.concatenate([mx.array(self._replay, mx.int32), tokens.astype(mx.int32)])
        self._replay = []
        self._snapshot = None
        self._has_run = True
        self.length += count
        is_padded = count == 1 and self._how.count_padding(1) > 0
        part = Part(
            self.cache,
            tokens,
            start,
            count,
            self._how,
            want_hidden=want_hidden,
            want_logits=want_logits,
            is_chain=is_padded,
        )
        return TextRows(self, part)

    def prepare_verify(
        self, tree: Tree, *, is_tree: bool, n_paths: int | None = None, depth: int | None = None
    ) -> TextRows:
        """The rows that `verify` runs; nothing else may be asked before they run.

        Args:
            tree: N >= 2 nodes.
            is_tree: whether it is more than a chain.
            n_paths, depth: at least the number of its leaves, and the depth of the deepest; None if
                not known.
        """
        assert not (is_tree and self._replays), "its states cannot follow several paths"
        self._settle()
        if self._replays and self._snapshot is None:
            self._snapshot = kv_cache.snapshot(self.cache)
        count = tree.tokens.shape[0]
        self._path = []
        self._path_tokens = []
        self._has_run = True
        start = self.length - len(self._replay)
        if self._replay:  # every tree is then a chain
            replay = mx.array(self._replay, mx.int32)
            tree = chain(replay[0], mx.concatenate([replay[1:], tree.tokens]))
        part = Part(
            self.cache, tree.tokens, start, count, self._how, is_draft=True, is_chain=not is_tree
        )
        if is_tree or (self._how.row_counts is None and self._has_ring):
            nodes = Nodes(start, tree.depths, tree.ancestors, is_tree)
            paths = make_paths(nodes, n_paths, depth) if is_tree and self._how.recurrences else None
            part = part._replace(nodes=nodes, paths=paths)
        return TextRows(self, part)

    def run(self, prepared: Sequence[TextRows]) -> list[Forward]:
        """Runs the model on prepared rows of this and of other targets of the same model.

        That is one forward, or with `row_counts` as few as have room for all rows.

        Returns:
            For each text the forward of its rows.
        """
        if ranks.CHECK_VARIABLE in os.environ:
            for each in prepared:
                each.target.compare_ranks(each.part)
        groups: list[list[TextRows]] = []
        for each in sorted(prepared, key=lambda each: each.part.n_rows, reverse=True):
            group = next((group for group in groups if each.fits(group)), None)
            if group is None:
                groups.append([each])
            else:
                group.append(each)
        forwards = {}
        for group in groups:
            parts = [each.part for each in group]
            is_joint = len(group) > 1
            runs = run_jointly(self._model, parts) if is_joint else [run(self._model, *parts)]
            for each, own in zip(group, runs, strict=True):
                forwards[each.target] = each.target.keep(each.part, own)
        return [forwards[each.target] for each in prepared]

    def keep(self, part: Part, own: Run) -> Forward:
        """Keeps what the next forward needs to know of this one, and returns the forward."""
        if part.is_draft or own.n_padding:
            self._rows = part.n_returned + own.n_padding
            self._recording = own.recording
        if own.n_padding and not part.is_draft:
            self._path = [0]
            self._path_tokens = []
        return own.forward

    def compare_ranks(self, part: Part) -> None:
        """Raises a RedrafterError if ranks read different tokens, or texts of different lengths."""
        read = ranks.gather(f"{part.tokens.tolist()} at length {self.length}")
        for rank, own in enumerate(read):
            if own != read[0]:
                both = f"rank 0 reads {read[0]}, rank {rank} reads {own}"
                raise RedrafterError(f"the ranks decode different texts: {both}")

    def keep_path(self, path: list[int], tokens: list[int]) -> None:
        """Accepts these nodes of the last `verify`, from the root down, with their tokens.

        Rejects the others.
        """
        self.length += len(path) - len(self._path)
        self._path = path
        self._path_tokens = tokens

    def rewind(self, count: int) -> None:
        """Rejects the last `count` tokens of the last kept path.

        Call it before the next forward.
        """
        stop = len(self._path) - count
        self.keep_path(self._path[:stop], self._path_tokens[:stop])

    def read_rows(self, layer: int) -> tuple[mx.array, mx.array]:
        """The keys and values that a layer's cache keeps, each (1, heads, R, size).

        Call it after `keep_path`, as it drops rejected rows. The rows are in the order of positions
        and dequantized; of a ring, no more than it is to hold.
        """
        self._settle()
        return kv_cache.read_rows(self.cache[layer])

    def finish(self, length: int, last_token: int) -> None:
        """Makes the cache hold exactly `length` tokens of the text, and evaluates it.

        Args:
            length: at least the length before the last round.
            last_token: the last of those tokens, which may not have been in a forward yet.
        """
        if length < self.length:
            self.rewind(self.length - length)
        elif length > self.length:
            self.forward(mx.array([last_token]), want_hidden=False)
        self._settle()
        self._flush_replay()
        self.evaluate()

    def _settle(self) -> None:
        """Moves the accepted rows into place or rolls the cache back.

        Then quantizes it if it is long enough.
        """
        if self._rows and not self._replays:
            kv_cache.keep_rows(self.cache, self._rows, self._path)
            if self._recording is not None:
                self._recording.roll_back(self._path)
                self._recording = None
        elif self._rows and len(self._path) < self._rows:
            assert self._snapshot is not None
            kv_cache.restore(self.cache, self._snapshot)
            self._replay += self._path_tokens
        elif self._rows:
            self._replay = []
            self._snapshot = None
        self._rows = 0
        bits, group_size, start = self._quantization
        if bits is not None and self._has_run and self.length >= start:
            self._flush_replay()
            maybe_quantize_kv_cache(self.cache, start, group_size, bits)

    def _flush_replay(self) -> None:
        """Replays accepted tokens now.

        If rotating caches keep their first rows, replays one token at a time, as mlx-lm's mask for
        several tokens differs from what each token would see alone.
        """
        tokens = self._replay
        self._replay = []
        self._snapshot = None
        if not tokens:
            return
        for piece in [[token] for token in tokens] if self._keeps_first else [tokens]:
            self._model(mx.array(piece)[None], cache=self.cache)

    def count_until_quantized(self) -> int | None:
        """How many more rows may be kept before the cache is quantized; None for no limit."""
        if self._quantization.bits is None or self.length >= self._quantization.start:
            return None
        return self._quantization.start - self.length

    def list_pending_arrays(self) -> list[Any]:
        """What a forward may leave unevaluated: only the next forward reads it."""
        recorded = None if self._recording is None else self._recording.arrays
        return [] if self._feeds_logits else [c.state for c in self.cache] + [recorded]

    def drafting(self) -> AbstractContextManager[None]:
        """A context in which drafts are built: on CUDA their attention avoids cuDNN."""
        return attend_by_row()

    def evaluate(self) -> None:
        """Evaluates the cache."""
        mx.eval([c.state for c in self.cache])
