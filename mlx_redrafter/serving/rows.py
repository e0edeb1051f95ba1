"""The two ways of decoding: this package's loop for one row, which drafts, and mlx-lm's batches of several.

A row is a request that runs. It goes from one way to the other with the cache of its text, and goes on with the tokens
that are not in it yet, so that nothing is read twice. All this runs in one thread, on mlx-lm's generation stream.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Container, Iterable
from contextlib import closing
from dataclasses import dataclass, replace
from typing import NamedTuple, cast

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.generate import BatchGenerator
from mlx_lm.models.cache import make_prompt_cache

from ..decoding import open_decoder
from ..drafters.protocol import Drafter
from ..drafters.source import Source
from ..engine import kv_cache
from ..engine.decode import Decoder, Round, Rounds
from ..engine.round import Processor
from ..engine.sampling import Draws, Sampler
from ..options import Options
from .generation import Generation

MAX_PAUSE = 0.5
"""Seconds that reading prompts should keep others from their next token: above it the pieces get smaller."""

MIN_PIECE, FIRST_PIECE = 128, 256
"""Prompt tokens in one forward while others wait: of a row at least, of all rows at first."""

DRAWS = 8
"""Positions whose noise a row's sampler computes at once: fewer operations than one by one."""

NO_LIMIT = 2**31 - 1
"""Tokens that a batch may make for a row: the engine ends rows itself."""


@dataclass(eq=False)
class Row:
    """A request that runs.

    Attributes:
        options: its sampling, and how caches are made.
        text: prompt and generated tokens.
        processors: its logits processors.
        may_draft: whether its tokens may be drafted.
        read: how many of the prompt's tokens are in its cache.
        source: what the drafter keeps of its text; what a batch decodes is a hole in it.
        error: what a processor has raised in a batch.
    """

    generation: Generation
    options: Options
    text: list[int]
    processors: list[Processor]
    may_draft: bool
    read: int = 0
    source: Source | None = None
    error: Exception | None = None

    @property
    def generated(self) -> int:
        """How many tokens were generated."""
        return len(self.text) - self.generation.stats.prompt_tokens

    def take(self, tokens: list[int], end_tokens: Container[int]) -> list[int]:
        """Those of a round's tokens that belong to the text, which they are appended to: up to its end."""
        limit = self.options.max_tokens
        tokens = tokens if limit == -1 else tokens[: limit - self.generated]
        ends = (i + 1 for i, token in enumerate(tokens) if token in end_tokens)
        tokens = tokens[: next(ends, len(tokens))]
        self.text += tokens
        return tokens


class CacheHandoff(NamedTuple):
    """Where a row goes on: its cache, None for a new one, and how many tokens of its text that holds."""

    cache: kv_cache.Cache | None
    held: int


@dataclass
class _Loop:
    """A row's own decode loop."""

    decoder: Decoder
    rounds: Rounds
    may_run_ahead: bool = True


class Loops:
    """This package's decode loop for every row: drafts where the row may, and takes turns where there are several.

    Args:
        drafter: None for none.
        on_drafter_failure: called with what a drafter raises; the row goes on without.
    """

    def __init__(
        self, model: nn.Module, drafter: Drafter | None, on_drafter_failure: Callable[[Exception], None]
    ) -> None:
        self._model, self._drafter, self._on_drafter_failure = model, drafter, on_drafter_failure
        self._loops: dict[Row, _Loop] = {}

    @property
    def rows(self) -> list[Row]:
        """In the order of their turns."""
        return list(self._loops)

    def add(self, row: Row, start: CacheHandoff) -> None:
        """Starts a loop on what the cache does not hold.

        Raises:
            RedrafterError: see `generate_step`.
        """
        options = replace(
            row.options,
            max_tokens=-1,
            context=row.options.context if row.may_draft else False,
            logits_processors=row.processors or None,
            prompt_cache=start.cache,
            history=tuple(row.text[: start.held]),
            on_drafter_failure=self._on_drafter_failure,
        )
        if row.may_draft and row.source is None and self._drafter is not None:
            row.source = self._drafter.open(self._model)
        decoder, rounds = open_decoder(
            row.text[start.held :], self._model, row.source, options, may_run_ahead=lambda: loop.may_run_ahead
        )
        loop = self._loops[row] = _Loop(decoder, rounds)

    def step(self, row: Row) -> Round:
        """The row's next round, or an empty one after a piece of its prompt."""
        loop = self._loops[row]
        made = next(loop.rounds)
        row.read = min(max(row.read, loop.decoder.target.length), row.generation.stats.prompt_tokens)
        return made

    def stop_running_ahead(self, row: Row) -> bool:
        """Whether the row can be handed over now; if not, after its next round."""
        loop = self._loops[row]
        loop.may_run_ahead = False
        return loop.decoder.target.length < len(row.text)

    def remove(self, row: Row) -> CacheHandoff:
        """Ends the row's loop."""
        loop = self._loops.pop(row)
        with closing(loop.rounds):
            held = min(loop.decoder.target.length, len(row.text))
            if held:
                loop.decoder.finish(held, row.text[held - 1])
        return CacheHandoff(loop.decoder.target.cache, held)

    def discard(self, row: Row) -> None:
        """Ends the row's loop after an exception: its cache is undefined."""
        if (loop := self._loops.pop(row, None)) is not None:
            loop.rounds.close()


class RowSampler:
    """A row's sampler in a batch, with the noise that the row's position has in any way of decoding.

    Args:
        position: of the first token that it chooses.

    Attributes:
        last: what it chose last, (1,) uint32, and from which log-probabilities (1, V); neither is evaluated.
    """

    def __init__(self, sampler: Sampler, position: int) -> None:
        self._sampler, self._position = sampler, position
        self._draws: Draws | None = None
        self._row = 0  # of the draws
        self.last: tuple[mx.array, mx.array] | None = None

    def __call__(self, logprobs: mx.array) -> mx.array:
        """Called by mlx-lm once a step, with (1, V); one that is shared by greedy rows with (B, V)."""
        if self._row == 0:
            self._draws = self._sampler.draws(mx.array(self._position), DRAWS, logprobs.shape[-1])
        chosen = self._sampler.choose(logprobs, self._draws, mx.array([self._row])).astype(mx.uint32)
        self._position, self._row = self._position + 1, (self._row + 1) % DRAWS
        self.last = chosen, logprobs
        return chosen


class Batch:
    """mlx-lm's batch of rows, which are decoded plainly.

    Args:
        size: most rows.
        prefill_rows: most prompts in one forward.
        prefill_step_size: most prompt tokens of a row in one forward; fewer while others wait, see `MAX_PAUSE`.
    """

    def __init__(self, model: nn.Module, size: int, prefill_rows: int, prefill_step_size: int) -> None:
        self._model = model
        self._generator = BatchGenerator(
            model,
            completion_batch_size=size,
            prefill_batch_size=min(prefill_rows, size),
            prefill_step_size=prefill_step_size,
        )
        self._prefill_rows, self._prefill_step_size, self._piece = prefill_rows, prefill_step_size, FIRST_PIECE
        self._greedy = RowSampler(Sampler(), 0)  # one object: mlx-lm then calls it once for all rows
        self._rows: dict[int, Row] = {}
        self._samplers: dict[Row, RowSampler] = {}
        self._held: dict[Row, int] = {}  # when they were added

    @property
    def rows(self) -> list[Row]:
        """In the order in which they came."""
        return list(self._rows.values())

    def add(self, row: Row, start: CacheHandoff) -> None:
        """Adds a row, whose text goes on after what its cache holds."""
        if row.options.temp:
            sampler = RowSampler(row.options.make_sampler(row.generation.stats.seed), len(row.text))
        else:
            sampler = self._greedy
        (uid,) = self._generator.insert(
            [row.text[start.held :]],
            [NO_LIMIT],
            caches=[start.cache or make_prompt_cache(self._model)],
            all_tokens=[row.text[: start.held]],
            samplers=[sampler],
            logits_processors=[[guard(row, processor) for processor in row.processors]],
        )
        self._rows[uid], self._samplers[row], self._held[row] = row, sampler, start.held

    def step(self) -> list[tuple[Row, Round]]:
        """One token for each row whose prompt is read, and a piece of the prompts of others."""
        started, reading = time.perf_counter(), [row for row in self._rows.values() if not row.generated]
        others_wait, size = len(reading) < len(self._rows), self._prefill_step_size
        if reading and others_wait:
            size = min(size, max(MIN_PIECE, self._piece // min(len(reading), self._prefill_rows)))
        self._generator.prefill_step_size = size
        prompts, tokens = self._generator.next()
        if others_wait and any(not each.end_of_prompt for each in prompts):
            seconds = time.perf_counter() - started
            if seconds > MAX_PAUSE:
                self._piece = max(MIN_PIECE, self._piece // 2)
            elif seconds < MAX_PAUSE / 2:
                self._piece = min(self._prefill_step_size, self._piece * 2)
        for each in prompts:
            row = self._rows[each.uid]
            row.read = max(row.read, min(self._held[row] + each.progress[0], row.generation.stats.prompt_tokens))
        return [(self._rows[each.uid], Round([each.token], [each.logprobs])) for each in tokens]

    def remove(self, rows: Iterable[Row], *, keep_caches: bool) -> dict[Row, CacheHandoff]:
        """Takes rows out; their caches hold all tokens that `step` returned.

        Args:
            keep_caches: whether they are wanted.
        """
        wanted = set(rows)
        uids = [uid for uid, row in self._rows.items() if row in wanted]
        caches = self._generator.remove(uids, return_prompt_caches=keep_caches)
        removed = {uid: self._rows.pop(uid) for uid in uids}
        for row in removed.values():
            del self._samplers[row], self._held[row]
        return {removed[uid]: CacheHandoff(cache, len(tokens)) for uid, (cache, tokens) in caches.items()}

    def remove_only(self) -> tuple[Row, Round, CacheHandoff]:
        """Takes the only row out just after `step` returned a token of it; with the next one, being computed."""
        (row,) = self.rows
        last = self._samplers[row].last
        assert last is not None
        start = self.remove([row], keep_caches=True)[row]
        tokens, logprobs = cast(list[int], last[0].tolist()), last[1][0]
        mx.eval(logprobs)
        return row, Round(tokens, [logprobs]), start

    def close(self) -> None:
        """Frees what mlx-lm holds."""
        self._generator.close()


def guard(row: Row, processor: Processor) -> Processor:
    """A processor whose errors end its own row, not the batch."""

    def call(tokens: mx.array, logits: mx.array) -> mx.array:
        if row.error is None:
            try:
                return processor(tokens, logits)
            except Exception as error:
                row.error = error
        return logits

    return call
