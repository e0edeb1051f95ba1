"""The scheduler: the running requests (rows), and how each step decodes them.

One row alone is decoded by this package's loop, several by mlx-lm's batches. Two or three rows take
turns in the loop, one round each, if that is measured to be faster. If mlx-lm cannot batch a
model's caches, any number takes turns. Rows move between loop and batch at the end of a round, with
their cache.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Literal

import mlx.core as mx

from ... import ranks
from ...engine import kv_cache
from ...engine.decode import Round
from ...engine.model_checks import make_cache
from ...engine.output import FinishReason
from ...options import Options
from ...pair import Pair
from ...setup import open_generation
from ..errors import SchemaNotFollowed
from .batchable import count_prefill_rows
from .batches import Batch, Loops
from .metrics import Metrics
from .pace import Pace
from .prompt_cache import MIN_SHARED, PromptCache, count_common_prefix
from .request import Request

STEPS_BEFORE_LEAVING = 16
"""Tokens that the only row of a batch makes before it leaves the batch, as the next request may
come soon.
"""


class Scheduler:
    """Decodes the running rows step by step. Methods are called in the worker's thread.

    Args:
        pair: the target and its drafter.
        options, size: the worker's `options` and `decode_concurrency`.
        prompt_cache: the caches of earlier rows, and of prompts that rows share.
        metrics: updated by every step.
        on_end: called once for each row that ends, after its last tokens, with the row and the
            reason: "stop", "length", "cancelled", or an error.

    Attributes:
        rows: the running rows in the order in which they started, the same on all ranks.
        copies_prompts: whether requests should give `prefix_lengths`, as the model's caches cannot
            be trimmed. Not for ring caches that keep their first rows: their contents depend on
            where the pieces of a prompt end.
    """

    def __init__(
        self,
        pair: Pair,
        options: Options,
        size: int,
        prompt_cache: PromptCache,
        metrics: Metrics,
        on_end: Callable[[Request, str | Exception], None],
    ) -> None:
        self._pair = pair
        self._options = options
        self._size = size
        model = pair.model
        self._metrics = metrics
        self._on_end = on_end
        self.rows = dict[Request, None]()
        self.prompt_cache = prompt_cache
        fresh = make_cache(model, options.max_kv_size)
        self._can_fork = not kv_cache.list_unknown_types(
            fresh, kv_cache.UNBOUNDED
        )  # can be cut after any token
        can_copy = not (self._can_fork or kv_cache.keeps_first_rows(fresh))
        self.copies_prompts = can_copy and prompt_cache.max_bytes > 0
        self._prefill_rows = count_prefill_rows(model, options)
        self._loops = Loops(pair, metrics)
        self._batch = Batch(model, size, max(1, self._prefill_rows), options.prefill_step_size)
        self._alone_steps = 0
        self._pace = Pace()

    @property
    def mode(self) -> Literal["idle", "single", "batch", "turns"]:
        """How rows are decoded now."""
        if self._batch.rows:
            return "batch"
        return "idle" if not self.rows else "single" if len(self.rows) == 1 else "turns"

    def warm_up(self) -> None:
        """Reads saved caches, measures costs if needed, and compiles what a request needs."""
        self.prompt_cache.read_folder()
        self._host_stream = mx.new_stream(mx.cpu)  # works beside the current forward
        options = replace(self._options, max_tokens=4)
        source = self._pair.open_source()
        for _ in open_generation(self._pair, [0] * 8, options, source):
            pass

    def choose(self, waiting: Iterable[Request], ended: Container[Request]) -> list[Request]:
        """Returns the requests to start now, in order and as many as fit, except those that wait
        for a shared prefix.

        Rows in `ended` no longer take up room.
        """
        running = [row for row in self.rows if row not in ended]
        chosen = list[Request]()
        for row in waiting:
            if len(running) + len(chosen) < self._size:
                other, shared = self._find_prefix(row, [*running, *chosen])
                if other is None or other.n_prefilled >= shared:
                    chosen.append(row)
        return chosen

    def _find_prefix(self, row: Request, rows: Iterable[Request]) -> tuple[Request | None, int]:
        """Finds the row whose prefill covers the longest prefix that `row` shares.

        When that row has read the prefix, a copy of its cache is kept, and `row` starts with it. A
        cache that cannot be trimmed is copied only at `copy_lengths`.

        Returns:
            That row and the length of the prefix, or (None, 0) if waiting does not pay.
        """
        shared = 0
        other = None
        for each in rows:
            if each.n_prefilled >= each.copy_lengths[-1]:
                continue  # all its copies are kept already
            count = count_common_prefix(row.prefix, each.prefix)
            if not self._can_fork:
                count = max(
                    (n for n in each.copy_lengths if each.n_prefilled < n <= count), default=0
                )
            if count > shared:
                shared = count
                other = each
        is_kept = shared < MIN_SHARED or shared - self.prompt_cache.find(row.prefix)[1] < MIN_SHARED
        return (None, 0) if is_kept or not self.prompt_cache.max_bytes else (other, shared)

    def step(self, ended: Mapping[Request, str | Exception], started: Sequence[Request]) -> None:
        """Ends rows, also those with an `error`, starts others, decodes a round of every row and
        sends the tokens.
        """
        running = list(self.rows)
        self.rows.update(dict.fromkeys(started))
        self._end({row: row.error or ended[row] for row in running if row.error or row in ended})
        self._start(started)
        if self._batch.rows:
            self._step_batch()
        self._step_loops()

    def abort(self, error: Exception) -> None:
        """Ends all rows with an error that left their state undefined, and drops all caches."""
        self._report_ended(dict.fromkeys(self.rows, error))
        self._loops.remove(self._loops.rows, keep_caches=False)
        self._batch.clear()
        self.prompt_cache.clear()
        mx.clear_cache()

    def close(self) -> None:
        """Saves unsaved caches, then frees them and the batch."""
        self.prompt_cache.close()
        mx.synchronize()
        self._batch.close()

    def _start(self, started: Sequence[Request]) -> None:
        """Starts rows, and moves rows from loops into the batch if all should now be batched."""
        for row in started:
            other, shared = self._find_prefix(row, [each for each in self.rows if each.n_prefilled])
            if other is not None and other.n_prefilled >= shared:
                self._store_prompt(other)
        if started and self._should_batch:
            self._hand_to_batch()
        for row in started:
            self._metrics.queued.observe(time.perf_counter() - row.submitted)
            with self._catch_errors(row):
                row.source = self._pair.open_source() if row.draft else None
                row.grammar = None if row.make_grammar is None else row.make_grammar()
                start = self.prompt_cache.fetch(row.prompt)
                row.n_prefilled = row.cached_tokens = start[1]
                (self._batch if self._should_batch else self._loops).add(row, start)

    def _store_prompt(self, row: Request) -> None:
        """Keeps a copy of a row's cache at its current length."""
        with self._catch_errors(row):
            cache, held = (self._loops if row in self._loops.rows else self._batch).find_cache(row)
            self.prompt_cache.store(row.text[:held], cache or [])

    @property
    def _should_batch(self) -> bool:
        """Whether the current rows should be decoded in a batch."""
        return (
            self._prefill_rows > 0
            and len(self.rows) > 1
            and not self._pace.prefers_turns(len(self.rows))
        )

    def _hand_to_batch(self) -> None:
        """Moves rows into the batch, each once its cache ends before its last token, which the
        batch reads first.
        """
        for row in self._loops.rows:
            row.may_run_ahead = False
            while row in self._loops.rows and self._loops.find_cache(row)[1] >= row.length:
                self._step_alone(row)
            if row in self._loops.rows:
                with self._catch_errors(row):
                    self._batch.add(row, self._loops.remove([row])[row])
                    self._metrics.mode_switches.labels("batch").inc()

    def _step_loops(self) -> None:
        """Decodes a round of every row in a loop.

        Several rows move into the batch if that is faster.
        """
        rows = self._loops.rows
        started = time.perf_counter()
        before = sum(row.length for row in rows)
        is_decoding = all(row.output.tokens for row in rows)
        for row in rows:
            self._step_alone(row)
        made = sum(row.length for row in rows) - before
        may_batch = len(rows) > 1 and is_decoding and self._prefill_rows and not self._batch.rows
        if may_batch and not self._pace.observe_rounds(
            len(rows), made, time.perf_counter() - started
        ):
            self._hand_to_batch()

    def _step_alone(self, row: Request) -> None:
        with self._catch_errors(row):
            made = self._loops.step(row)
            if made.tokens:
                self._metrics.rounds.inc()
                self._end(self._send_tokens([(row, made)]))
            elif row.n_prefilled in row.copy_lengths:
                self._store_prompt(row)

    def _step_batch(self) -> None:
        began = time.perf_counter()
        to_copy, made = self._batch.step()
        seconds = time.perf_counter() - began
        stepped = [row for row, _ in made]
        for row in to_copy:
            self._store_prompt(row)
        self._metrics.batch_steps.inc(len(made) > 0)
        self._end(self._send_tokens(made))
        if not stepped or set(stepped) != set(self._batch.rows):
            self._alone_steps = 0
            return
        self._alone_steps = self._alone_steps + 1 if len(stepped) == 1 else 0
        should_leave = self._alone_steps >= STEPS_BEFORE_LEAVING
        is_timed = (
            ranks.count_ranks() == 1 and self._options.shape is not None
        )  # ranks measure different times
        if len(stepped) > 1 and is_timed:
            should_leave = self._pace.observe_step(len(stepped), seconds)
        if should_leave and all(row.draft for row in stepped):
            # Each row continues in a loop, after the token that the batch is already computing.
            for row, following, start in self._batch.remove_all():
                with self._catch_errors(row):
                    if row.error is not None:
                        raise row.error
                    ended = self._send_tokens([(row, following)])
                    self._loops.add(row, start)
                    self._metrics.mode_switches.labels(
                        "single" if len(stepped) == 1 else "turns"
                    ).inc()
                    self._end(ended)

    def _send_tokens(self, made: list[tuple[Request, Round]]) -> dict[Request, FinishReason]:
        """Sends the tokens that one forward made for each row.

        Returns the rows that end with them.
        """
        with mx.stream(self._host_stream):
            for row, each in made:
                row.send_tokens(each)
        return {row: reason for row, _ in made if (reason := row.output.finish_reason)}

    def _end(self, ended: Mapping[Request, str | Exception]) -> None:
        """Removes rows, and keeps the caches of those that ended without an error."""
        kept = (
            [row for row, reason in ended.items() if isinstance(reason, str)]
            if self.prompt_cache.max_bytes
            else []
        )
        try:
            for way in (self._batch, self._loops):
                for row, (cache, held) in way.remove(kept).items():
                    self.prompt_cache.store(
                        row.text[:held], cache or [], has_answer=bool(row.output.tokens)
                    )
                way.remove(ended, keep_caches=False)
        finally:
            self._report_ended(ended)

    def _report_ended(self, ended: Mapping[Request, str | Exception]) -> None:
        for row in ended.keys() & self.rows.keys():
            del self.rows[row]
            self._on_end(row, ended[row])

    @contextmanager
    def _catch_errors(self, row: Request) -> Iterator[None]:
        """Lets an exception end only this row."""
        try:
            yield
        except Exception as error:
            if not isinstance(error, SchemaNotFollowed):
                if ranks.count_ranks() > 1:  # others may not have failed
                    raise
                logging.exception("Request failed")
            self._end({row: error})
