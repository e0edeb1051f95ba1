"""The two ways to decode rows: this package's loop, which drafts for one row, and mlx-lm's batches
of several.

A row moves between them with its cache and continues with the tokens that are not in the cache yet,
so nothing is prefilled twice. Everything here runs in one thread, on mlx-lm's generation stream.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from contextlib import closing
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.generate import BatchGenerator
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.sample_utils import greedy_sampler

from ... import ranks
from ...engine import kv_cache
from ...engine.decode import Round
from ...engine.grammar import mask_root
from ...engine.output import Generation
from ...engine.round import Processor
from ...engine.sampling import Draws, Sampler
from ...pair import Pair
from ...setup import open_generation
from ..errors import SchemaNotFollowed
from .metrics import Metrics
from .request import Request

PIECE = 512
"""Prompt tokens in one forward while other rows wait for their next token."""

DRAWS_AT_ONCE = 8
"""Positions whose sampling noise is computed at once, which takes fewer operations than one by one.
"""

NO_LIMIT = 2**31 - 1
"""Token limit of a row for mlx-lm: the scheduler ends rows itself."""

Start = tuple[kv_cache.Cache | None, int]
"""Where a row continues: its cache (None for a new one), and how many tokens of its text the cache
holds.
"""


class Loops:
    """This package's decode loop, one for each row, with drafts unless the request declines them.

    After an exception of the drafter a row continues without it for good.
    """

    def __init__(self, pair: Pair, metrics: Metrics) -> None:
        self._pair = pair
        self._metrics = metrics
        self._loops: dict[Request, Generation] = {}

    @property
    def rows(self) -> list[Request]:
        """The rows, in the order in which they take turns."""
        return list(self._loops)

    def add(self, row: Request, start: Start) -> None:
        """Starts a loop at the first token that the cache does not hold."""
        cache, held = start
        options = replace(
            row.options,
            context=row.options.context if row.draft else False,
            prompt_cache=cache,
            history=tuple(row.text[:held]),
            prefill_step_size=min(
                row.options.prefill_step_size, PIECE if self._loops else NO_LIMIT
            ),
            on_drafter_failure=partial(self._drop_drafter, row),
        )
        if row.grammar is not None:  # it has not taken a batch's last token
            for token in row.output.tokens[row.grammar.length :]:
                row.grammar.take(token)
        row.may_run_ahead = True
        self._loops[row] = open_generation(
            self._pair,
            row.text[held:],
            options,
            row.source,
            output=row.output,
            grammar=row.grammar,
            may_run_ahead=lambda: row.may_run_ahead,
            piece_ends=row.copy_lengths,
        )

    def _drop_drafter(self, row: Request, error: Exception) -> None:
        row.source = None
        self._metrics.drafter_failures.inc()
        logging.error("The drafter failed; the request continues without it", exc_info=error)

    def step(self, row: Request) -> Round:
        """Returns the row's next round, or an empty one after a piece of its prompt."""
        text = self._loops[row]
        made = text.next_round()
        assert made is not None  # the scheduler removes a row when its text ends
        row.n_prefilled = min(max(row.n_prefilled, text.length), len(row.prompt))
        return made

    def find_cache(self, row: Request) -> Start:
        """Returns the row's cache, valid until the next step."""
        return self._loops[row].cache, self._loops[row].length

    def remove(self, rows: Iterable[Request], *, keep_caches: bool = True) -> dict[Request, Start]:
        """Removes the given rows; see `Batch.remove`.

        After an exception a row's cache is undefined.
        """
        removed: dict[Request, Start] = {}
        for row in [row for row in rows if row in self._loops]:
            with closing(self._loops.pop(row)) as text:
                if keep_caches:
                    held = min(text.length, row.length)
                    if held:
                        text.finish(held, row.text[held - 1])
                    removed[row] = text.cache, held
        return removed


class RowSampler:
    """A row's sampler in a batch. As in the loop, its noise depends only on seed and position.

    Args:
        position: of the first token that it chooses.
    """

    def __init__(self, sampler: Sampler, position: int) -> None:
        self._sampler = sampler
        self._position = position
        self._draws: Draws | None = None
        self._row = 0  # in the draws

    def __call__(self, logprobs: mx.array) -> mx.array:
        """Called by mlx-lm once per step, with (1, V)."""
        if self._row == 0:
            self._draws = self._sampler.draw(
                mx.array(self._position), DRAWS_AT_ONCE, logprobs.shape[-1]
            )
        chosen = self._sampler.choose(logprobs, self._draws, mx.array([self._row])).astype(
            mx.uint32
        )
        self._position += 1
        self._row = (self._row + 1) % DRAWS_AT_ONCE
        return chosen


class Batch:
    """mlx-lm's batch of rows, decoded plainly.

    Args:
        size: maximum number of rows.
        prefill_rows: maximum number of prompts in one forward.
        prefill_step_size: maximum prompt tokens of a row in one forward; fewer while other rows
            wait, see `PIECE`.
    """

    def __init__(
        self, model: nn.Module, size: int, prefill_rows: int, prefill_step_size: int
    ) -> None:
        self._model = model
        self._prefill_rows = prefill_rows
        self._prefill_step_size = prefill_step_size
        self._sizes: dict[str, Any] = {
            "completion_batch_size": size,
            "prefill_batch_size": min(prefill_rows, size),
        }
        self._begin()

    def _begin(self) -> None:
        self._rows: dict[int, Request] = {}
        self._generator = BatchGenerator(self._model, **self._sizes)

    @property
    def rows(self) -> list[Request]:
        """The rows, in the order in which they were added. Other threads may read it."""
        return list(self._rows.values())

    def add(self, row: Request, start: Start) -> None:
        """Adds a row, which continues at the first token that its cache does not hold."""
        cache, held = start
        text = row.text
        ends = [*(n for n in row.copy_lengths if n > held), row.length]
        sampler = greedy_sampler  # one call for all rows that share it
        if row.options.temp:
            sampler = RowSampler(
                row.options.make_sampler(0), row.length
            )  # 0 is not used: its options have a seed
        (uid,) = self._generator.insert_segments(
            [[text[start:end] for start, end in pairwise([held, *ends])]],
            [NO_LIMIT],
            caches=[cache or make_prompt_cache(self._model)],
            all_tokens=[text[:held]],
            samplers=[sampler],
            logits_processors=[[*(row.options.logits_processors or ()), *make_masks(row)]],
        )
        self._rows[uid] = row

    def step(self) -> tuple[list[Request], list[tuple[Request, Round]]]:
        """Returns (rows whose cache should be copied now, one token of each row that is past its
        prompt).
        """
        reading = sum(row.n_prefilled < len(row.prefix) for row in self.rows)
        size = self._prefill_step_size
        if 0 < reading < len(self._rows):
            size = min(size, PIECE // min(reading, self._prefill_rows))
        self._generator.prefill_step_size = size
        prompts, tokens = self._generator.next()
        to_copy = []
        for each in prompts:
            row = self._rows[each.uid]
            done, total = each.progress
            row.n_prefilled = max(row.n_prefilled, min(row.length - total + done, len(row.prompt)))
            if row.n_prefilled in row.copy_lengths and not each.end_of_prompt:
                to_copy.append(row)
        return to_copy, [
            self._add_token(self._rows[each.uid], each.token, each.logprobs) for each in tokens
        ]

    def find_cache(self, row: Request) -> Start:
        """Returns the row's cache during its prefill, valid until the next step."""
        uid = next(uid for uid, other in self._rows.items() if other is row)
        cache, tokens = self._generator.extract_cache([uid])[uid]
        return cache, len(tokens)

    def remove(self, rows: Iterable[Request], *, keep_caches: bool = True) -> dict[Request, Start]:
        """Removes those of the given rows that are in the batch. Returns their caches if
        `keep_caches`.

        The caches hold all tokens that `step` has returned.
        """
        wanted = set(rows)
        uids = [uid for uid, row in self._rows.items() if row in wanted]
        caches = self._generator.remove(uids, return_prompt_caches=keep_caches)
        removed = {uid: self._rows.pop(uid) for uid in uids}
        if removed and not self._rows:  # the generator holds the last log-probabilities of all rows
            self.clear()
        return {removed[uid]: (cache, len(tokens)) for uid, (cache, tokens) in caches.items()}

    def remove_all(self) -> list[tuple[Request, Round, Start]]:
        """Removes all rows. Call it right after `step` has returned a token of each.

        Returns:
            For each row its next token, which the batch was already computing, and where it
            continues.
        """
        batch = (
            self._generator._generation_batch
        )  # mlx-lm has no public name for what it computes ahead
        rows = [self._rows[uid] for uid in batch.uids]
        tokens = batch._next_tokens.tolist()
        logprobs = list(batch._next_logprobs)
        starts = self.remove(rows)
        mx.eval(logprobs)
        following = zip(rows, tokens, logprobs, strict=True)
        return [(*self._add_token(row, token, own), starts[row]) for row, token, own in following]

    def _add_token(self, row: Request, token: int, logprobs: mx.array) -> tuple[Request, Round]:
        return row, row.output.add(Round([token], [logprobs]))

    def clear(self) -> None:
        """Removes all rows without their caches."""
        self.close()
        self._begin()

    def close(self) -> None:
        """Frees mlx-lm's batch."""
        self._generator.close()


def make_masks(row: Request) -> list[Processor]:
    """Returns the logits processor of a row's grammar; none without one.

    Its errors end the row, not the batch.
    """
    grammar = row.grammar
    n_prompt = len(row.prompt)
    if grammar is None:
        return []

    def mask(tokens: mx.array, logits: mx.array) -> mx.array:
        if row.error is None:
            try:
                for token in cast(list[int], tokens[n_prompt + grammar.length :].tolist()):
                    grammar.take(token)
                return mask_root(grammar, logits)
            except Exception as error:
                if ranks.count_ranks() > 1 and not isinstance(
                    error, SchemaNotFollowed
                ):  # others may not have failed
                    raise
                row.error = error
        return logits

    return [mask]
