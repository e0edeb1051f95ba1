"""Builds one forward of the model over the rows of one text, or of several."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import accumulate
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn

from ..engine.types import Forward, StateName
from . import kv_cache
from .few_rows import NO_FEW_ROWS, FewRows
from .joint_views import list_joint_replacements, view_jointly
from .model_parts import CapturePoint, capture, get_parts
from .patches import Replacement, Slot, replace_functions
from .recurrence import JointRecording, Paths, Recording
from .row_attention import attend_by_row
from .tree_attention import Nodes, Offsets, build_with_nodes, view_cache


class HowToRun(NamedTuple):
    """How a text's forwards are computed, see `Target`.

    Attributes:
        recurrences: from `list_recurrences`; empty if the model has none, or its states cannot be
            rolled back.
        capture_points: by name of the hidden state.
    """

    row_counts: Sequence[int] | None
    few_rows: FewRows
    recurrences: Sequence[Slot]
    capture_points: dict[StateName, CapturePoint]

    def count_padding(self, count: int) -> int:
        """How many rows are added to a chain of `count` rows."""
        if self.row_counts is None:
            return 0
        return next(each for each in self.row_counts if each >= count) - count


class Part(NamedTuple):
    """A text's rows of a forward.

    Attributes:
        cache: the text's prompt cache.
        tokens: (R,) int32; the first may be replayed.
        start: the position of the first.
        n_returned: how many of the last rows are returned.
        how: see `HowToRun`.
        is_draft: whether they are a draft to verify, of which some may be rejected.
        want_hidden: whether to capture hidden states.
        want_logits: whether the logits are used.
        is_chain: whether the rows are padded and attend one at a time, if `row_counts` or CUDA
            wants that. Not for a step that needs no padding.
        nodes: what each row sees; None for rows of a chain that the cache itself serves.
        paths: of a tree, if there are recurrent layers.
    """

    cache: kv_cache.Cache
    tokens: mx.array
    start: int
    n_returned: int
    how: HowToRun
    is_draft: bool = False
    want_hidden: bool = True
    want_logits: bool = True
    is_chain: bool = False
    nodes: Nodes | None = None
    paths: Paths | None = None

    @property
    def n_rows(self) -> int:
        """R."""
        return self.tokens.shape[0]

    @property
    def is_tree(self) -> bool:
        """Whether the rows are more than a chain."""
        return self.nodes is not None and self.nodes.is_tree


class Run(NamedTuple):
    """A part whose forward is built.

    Attributes:
        forward: of the part's last `n_returned` rows.
        n_padding: how many rows the cache holds behind the part's.
        recording: of its recurrent layers; None if nothing can be rolled back.
    """

    forward: Forward
    n_padding: int
    recording: Recording | None


def run(model: nn.Module, part: Part) -> Run:
    """Builds a forward of one part."""
    how = part.how
    n_padding = how.count_padding(part.n_returned) if part.is_chain else 0
    n_rows = part.n_rows + n_padding
    tokens = _pad(part.tokens, n_padding)
    is_exact = part.is_chain and how.row_counts is not None
    attends_by_row = is_exact or (part.is_chain and mx.cuda.is_available())
    recording = None
    recorded: AbstractContextManager[None] = nullcontext()
    if how.recurrences and (part.is_chain or part.paths is not None):
        recording = Recording(part.cache, n_rows, part.paths, by_row=is_exact, n_padding=n_padding)
        recorded = recording.replace(how.recurrences)
    is_prompt = part.n_returned > 1 and not part.is_draft
    few_rows = NO_FEW_ROWS if is_prompt else how.few_rows
    points = how.capture_points if part.want_hidden else {}

    def call(cache: list[Any]) -> Forward:
        by_row = attend_by_row(n_rows if attends_by_row else 0, n_padding)
        with by_row, recorded, few_rows.replace_matmul(n_rows):
            return _call_model(model, tokens, cache, points)

    if part.nodes is None:
        forward = call(part.cache)
    else:
        forward = build_with_nodes(part.cache, part.nodes, call).result
    return Run(forward.take(part.n_rows - part.n_returned, part.n_rows), n_padding, recording)


def run_jointly(model: nn.Module, parts: Sequence[Part]) -> list[Run]:
    """Builds one forward of several texts' parts.

    Each text's rows are served by its own cache. With `row_counts` rows without a cache are added.
    The head gets only the rows whose logits are used.
    """
    how = parts[0].how
    sizes = [part.n_rows for part in parts]
    n_padding = how.count_padding(sum(sizes))
    is_exact = how.row_counts is not None
    tokens = _pad(mx.concatenate([part.tokens.astype(mx.int32) for part in parts]), n_padding)

    positions = []
    views = []
    by_row = []
    recordings = []
    points: dict[StateName, CapturePoint] = {}
    for part in parts:
        depths = mx.arange(part.n_rows) if part.nodes is None else part.nodes.depths
        positions.append(depths + part.start)
        views.append(part.cache if part.nodes is None else view_cache(part.cache, part.nodes, []))
        is_chain = part.is_draft and not part.is_tree
        by_row.append(is_chain and (is_exact or mx.cuda.is_available()))
        recordings.append(Recording(part.cache, part.n_rows, part.paths, by_row=is_exact))
        if part.want_hidden:
            points |= part.how.capture_points

    joined = _pad(mx.concatenate(positions), n_padding)
    offsets = Offsets(Nodes(0, joined, joined, is_tree=True))
    cache = [view_jointly(layer, sizes, offsets) for layer in zip(*views, strict=True)]
    replacements = list_joint_replacements(joined, sizes, by_row)
    recorded = JointRecording(recordings, n_padding).replace(how.recurrences)
    few_rows = how.few_rows.replace_matmul(tokens.shape[0])
    ends = [*accumulate(sizes)]
    used: list[int] | None = None
    if len({part.want_logits for part in parts}) == 2:
        used = []
        for part, end in zip(parts, ends, strict=True):
            used += range(end - part.n_rows, end) if part.want_logits else ()
    with replace_functions(replacements), recorded, few_rows:
        logits, hidden = _call_model(model, tokens, cache, points, used)

    runs = []
    for part, recording, end in zip(parts, recordings, ends, strict=True):
        if how.recurrences:
            recording.store_states()
        rows = slice(end - part.n_returned, end)
        last = end if used is None else bisect_left(used, end)
        own = logits[last - part.n_returned : last] if part.want_logits else logits[:0]
        forward = Forward(own, {name: state[rows] for name, state in hidden.items()})
        runs.append(Run(forward, 0, recording if how.recurrences else None))
    return runs


def _pad(tokens: mx.array, count: int) -> mx.array:
    """`tokens` with `count` copies of the last one, as equal rows select the same experts.

    Positions, too.
    """
    if not count:
        return tokens
    return mx.concatenate([tokens, mx.repeat(tokens[-1:], count)])


def _call_model(
    model: nn.Module,
    tokens: mx.array,
    cache: list[Any],
    points: dict[StateName, CapturePoint],
    used: list[int] | None = None,
) -> Forward:
    """The forward of all rows, with the hidden states of `points`.

    Args:
        used: the rows whose logits are returned; None for all.
    """
    cut: list[Replacement] = []
    if used is not None:
        rows = mx.array(used)

        def call_norm(norm: Callable[..., mx.array], *args: Any, **kwargs: Any) -> mx.array:
            return norm(*args, **kwargs)[:, rows]

        cut.append((get_parts(model).final_norm, call_norm))

    def call() -> mx.array:
        with replace_functions(cut):
            logits: mx.array = model(tokens[None], cache=cache)
        return logits

    if not points:
        return Forward(call()[0], {})
    logits, captured = capture(list(points.values()), call)
    named = zip(points, captured, strict=True)
    return Forward(logits[0], {name: state[0] for name, state in named})
