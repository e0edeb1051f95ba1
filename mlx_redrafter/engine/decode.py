"""The decode loop: pieces of a prompt, then rounds of speculative decoding with one host read each.

Work that does not depend on the read is enqueued before it: the next draft, or in plain decoding
the next forward.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, suppress
from time import perf_counter
from typing import Any, Literal, NamedTuple, TypeVar, cast

import mlx.core as mx
from mlx_lm.generate import generation_stream

from ..errors import RedrafterError
from .plan import CONTEXT_ONLY, MAX_REPLAY, Plan
from .planner import Load, ObservedRound, Planner
from .round import (
    Draft,
    Outcome,
    Round,
    TokenChooser,
    accept_draft,
    choose_token,
    extend,
    prepare_draft,
    process_rows,
)
from .sampling import Draws
from .source import DraftTask, Source
from .tree import add_branch
from .types import Forward, Kept, TargetProtocol, Tree

CLEAR_EVERY = 256
"""MLX's buffer cache is cleared after at most this many tokens plus a round, as in mlx-lm."""


T = TypeVar("T")

ReportProgress = Callable[[int, int], None]
"""Called with (prompt tokens processed, prompt tokens in all)."""


class Piece(NamedTuple):
    """A piece of a prompt whose forward is not built yet.

    Attributes:
        rows: what the target runs.
        tokens: (T,) int32.
        length: of the text before it.
    """

    rows: Any
    tokens: mx.array
    length: int


class Prepared(NamedTuple):
    """A round whose forward is not built yet.

    Attributes:
        rows: what the target runs.
        length: of the text before its root.
        replayed: how many tokens it replays.
        plan: the plan chosen for it.
        draft: the draft that it verifies; None for a plain step.
        token: (1,) of a plain step; None for a draft.
        limit: the most drafted tokens that may be accepted.
        want_hidden: whether a source reads a plain step's hidden state.
        is_prompt: whether it is a step on the prompt's last token.
    """

    rows: Any
    length: int
    replayed: int
    plan: Plan | None = None
    draft: Draft | None = None
    token: mx.array | None = None
    limit: int = 0
    want_hidden: bool = True
    is_prompt: bool = False


class Pending(NamedTuple):
    """A round that is enqueued but not read.

    Attributes:
        outcome: its arrays.
        length: of the text before its root.
        replayed: how many tokens it replays.
        plan: the plan chosen for it.
        draft: the draft that it verifies; None for a plain step.
        is_prompt: see `Prepared`.
    """

    outcome: Outcome
    length: int
    replayed: int = 0
    plan: Plan | None = None
    draft: Draft | None = None
    is_prompt: bool = False

    @property
    def next_position(self) -> mx.array:
        """() int32, the position after the last token that the round chooses."""
        last = mx.array(self.length + 2)
        return last if self.draft is None else self.outcome.packed[0] + last


class Decoder(Iterator[Round]):
    """Decodes one text: first pieces of the prompt, then rounds without end, see `decode_round`.

    It enqueues rounds, reads each once, and passes its result to the sources and the planner. No
    unevaluated array is kept between rounds, so each may come from another thread. `finish` trims
    the cache to the tokens that the caller has taken.

    Args:
        prompt: (T,) int32, T >= 1. Its last token is a step of its own.
        target: captures the hidden states that the sources read.
        planner: chooses what each round drafts.
        sources: at most one with a drafter and one without; the latter forecasts its proposals.
        history: the tokens that the target's cache holds, for processors and sources.
        report: see `ReportProgress`.
        prefill_step_size: see the attribute.
        max_kv_size: see `Source`.
        on_drafter_failure: see `Options`.
        may_run_ahead: called in each round; if it returns False, no plain step is enqueued before
            the read, and the cache then ends before the round's last token. None means always True.
        piece_ends: text lengths, ascending, at which a piece of the prompt must end.

    Attributes:
        target: its `length` is the length of the text in its cache.
        ahead: the next round, if it was enqueued before the last one was read.
        prefill_step_size: the most tokens of the next piece of the prompt.
    """

    def __init__(
        self,
        prompt: mx.array,
        target: TargetProtocol,
        chooser: TokenChooser,
        planner: Planner,
        sources: Sequence[Source] = (),
        *,
        history: Sequence[int] = (),
        report: ReportProgress = lambda done, total: None,
        prefill_step_size: int = 2048,
        max_kv_size: int | None = None,
        on_drafter_failure: Callable[[Exception], None] | None = None,
        may_run_ahead: Callable[[], bool] | None = None,
        piece_ends: Sequence[int] = (),
    ) -> None:
        self.target = target
        self.prefill_step_size = prefill_step_size
        self._prompt = prompt
        self._n_read = 0  # tokens of the prompt
        self._chooser = chooser
        self._planner = planner
        self._history = history
        self._report = report
        self._piece_ends = piece_ends
        self._drafter = next((source for source in sources if source.drafter is not None), None)
        self._context = next((source for source in sources if source.drafter is None), None)
        self._on_drafter_failure = on_drafter_failure
        self._may_run_ahead = may_run_ahead or (lambda: True)
        self._is_timed = not target.is_shared
        self._seen: mx.array | None = None  # the text before the next root, for the processors
        self._root = 0
        self._vocab_size = 0
        self._plan: Plan | None = None  # of the next round
        self._draft: Draft | None = None  # for the next round, if drafted before the read
        self._draws: Draws | None = None  # of that draft
        self.ahead: Pending | None = None
        self._n_ahead = 0  # consecutive rounds that were enqueued ahead
        self._n_since_clear = 0  # tokens
        self._is_closed = False
        if self._drafter is not None:
            self._drafter.attach(target.read_rows, prefill_step_size, max_kv_size)

    def __next__(self) -> Round:
        (decoded,) = decode_round([self])
        if isinstance(decoded, Exception):
            raise decoded
        return decoded

    def close(self) -> None:
        """Ends the planner's observation of the text; once."""
        if not self._is_closed:
            self._is_closed = True
            self._planner.finish()

    @property
    def n_unread(self) -> int:
        """How many tokens of the prompt were not in a forward yet."""
        return self._prompt.shape[0] - self._n_read

    def prepare_piece(self) -> Piece:
        """Prepares the next piece of the prompt, which ends before its last token."""
        self._begin()
        length = self.target.length
        next_end = bisect_right(self._piece_ends, length)
        sizes = [end - length for end in self._piece_ends[next_end : next_end + 1]]
        size = min(self.prefill_step_size, self.n_unread - 1, *sizes)
        tokens = self._prompt[self._n_read : self._n_read + size]
        rows = self.target.prepare(tokens, want_hidden=self._reads_all, want_logits=False)
        return Piece(rows, tokens, length)

    def _begin(self) -> None:
        if self._n_read == 0:
            self._report(0, self.n_unread)
            if self._chooser.processors and self._history:
                self._seen = mx.array(list(self._history), mx.int32)

    @property
    def _reads_all(self) -> bool:
        return self._drafter is not None and self._drafter.reads_all

    def keep_piece(self, piece: Piece, forward: Forward) -> None:
        """Passes a piece of the prompt to the drafter and the processors."""
        size = piece.tokens.shape[0]
        self._n_read += size
        if self._reads_all:
            self._call_drafter("keep", Kept(piece.tokens, forward.hidden, None, size, piece.length))
        if self._chooser.processors:
            self._seen = extend(self._seen, piece.tokens)

    def read_piece(self, piece: Piece) -> Round:
        """Waits for a piece of the prompt; an empty round."""
        self.target.evaluate()
        mx.eval(self._drafter_arrays(), self._seen)
        self._report(self._n_read, self._prompt.shape[0])
        self._clear_cache(piece.tokens.shape[0])
        return Round([], [], is_prompt=True)

    def finish(self, length: int, last_token: int) -> None:
        """Makes cache and drafter hold exactly `length` tokens of the text, see `Target.finish`."""
        drafter = self._drafter
        held = self.target.length
        if length <= held:  # also by 0 tokens, as the next one will differ
            self._call_drafter("rewind", held - length)
        elif self._reads_all:
            token = mx.array([last_token])
            hidden = self.target.forward(token).hidden
            self._call_drafter("keep", Kept(token, hidden, None, 1, held))
        self.target.finish(length, last_token)
        mx.eval(self._drafter_arrays())
        if drafter is not None:  # a fork of it would keep this cache alive
            drafter.read_rows = None

    def _prepare_step(self, token: mx.array, plan: Plan | None = None) -> Prepared:
        """Prepares a plain step on `token` (1,); `plan`: chosen for the round."""
        length = self.target.length
        replayed = self.target.replayed
        is_captured = self._reads_all or (self._drafter is not None and self._planner.may_draft)
        rows = self.target.prepare(token, want_hidden=is_captured)
        return Prepared(rows, length, replayed, plan, token=token, want_hidden=is_captured)

    def enqueue(self, prepared: Prepared, forward: Forward) -> Pending:
        """Enqueues a round: the choice of its tokens from its forward."""
        draft = prepared.draft
        if prepared.token is not None:
            token = prepared.token
            outcome = choose_token(forward, token, self._chooser, self._seen, prepared.length)
            self._vocab_size = outcome.logprobs[0].shape[-1]
            if self._chooser.processors:
                self._seen = extend(self._seen, token.astype(mx.int32))
            if prepared.want_hidden:
                self._call_drafter("keep", outcome.kept)
            self._enqueue(outcome, self._seen)
        else:
            assert draft is not None and prepared.plan is not None
            how = (self._chooser, self._seen, prepared.plan, prepared.limit, prepared.length)
            outcome = accept_draft(forward, draft, *how)
            self._call_drafter("keep", outcome.kept)
            self._enqueue(outcome, draft.tree)
        if prepared.is_prompt:  # while the step is being computed
            tokens = [*self._history, *cast(list[int], self._prompt.tolist())]
            self._call_drafter("read", tokens)
            if self._context is not None:
                self._context.read(tokens)
        _, length, replayed, plan, *_ = prepared
        return Pending(outcome, length, replayed, plan, draft, prepared.is_prompt)

    @property
    def load(self) -> Load:
        """What this text is expected to add to the next round."""
        is_joint = self._drafter is not None and self._drafter.group is not None
        return self._planner.load._replace(n_joint=int(is_joint))

    def plan_next(self, pending: Pending, others: Load) -> DraftTask | None:
        """Plans the next round.

        Returns:
            Its draft, if that does not depend on the read.

        Args:
            pending: the round that is being computed.
            others: the other texts of the next round.
        """
        self._plan = None
        self._draft = None
        self.ahead = None
        self._planner.others = others
        if self.target.has_room(2) and (self._drafter or self._context):
            forecast = None
            if self._context is not None:
                n_ahead = pending.plan.n_context if pending.draft and pending.plan else 0
                forecast = self._context.forecast(1 + n_ahead)
            self._plan = self._planner.next_plan(pending.length, pending.replayed, forecast)
            drafts_now = self._drafter and not self._drafter.proposes_after_read
            if self._plan and self._plan.depth and drafts_now:
                return self._make_task(self._plan, pending.outcome.root, pending.next_position)
        return None

    def may_step_ahead(self, pending: Pending) -> bool:
        """Whether a plain step can be enqueued before the read of the round before.

        In plain decoding that is the next round. The first token is already computed: it is
        returned without delay. A grammar's mask depends on the token.
        """
        is_plain = self._plan is None and pending.draft is None
        must_wait = pending.is_prompt or self._chooser.grammar is not None
        return is_plain and not must_wait and self._may_run_ahead()

    def prepare_ahead(self, pending: Pending) -> Prepared:
        """Prepares a plain step on the token that the round before chooses."""
        return self._prepare_step(pending.outcome.packed)

    def _make_task(self, plan: Plan, root: mx.array, position: mx.array) -> DraftTask:
        """The drafter's tree below `root`; the token after `root` is at `position`.

        A drafter that proposes after the read computes a language model's logits from the whole
        text, so logits processors apply to them as to the target's. A head's logits have a
        different offset and scale: penalties would make its guesses worse.
        """
        sampler = self._chooser.sampler
        drafter = self._drafter
        assert drafter is not None
        processors = self._chooser.processors if drafter.proposes_after_read else ()
        draws = sampler.draw(position, plan.depth + 1, self._vocab_size)

        def adjust(logits: mx.array, level: int, paths: mx.array) -> mx.array:
            if processors:
                logits = process_rows(processors, self._seen, list(paths), logits)
            return logits if draws is None else sampler.adjust(logits, draws, level)

        self._draws = draws
        given = adjust if processors or draws is not None else None
        return DraftTask(root, plan, given, in_level_order=bool(self._chooser.processors))

    @property
    def drafter(self) -> Source | None:
        """The source with a drafter, until that fails."""
        return self._drafter

    def enqueue_draft(self, task: DraftTask, tree: Tree | None = None) -> None:
        """Enqueues a draft; `tree`: if it was proposed together with others."""
        drafter = self._drafter
        assert drafter is not None
        try:
            with self.target.drafting():
                root, plan, adjust, in_level_order = task
                if tree is None:
                    tree = drafter.propose(root, plan, adjust, in_level_order=in_level_order)
            self._draft = Draft(tree, self._draws)
            mx.async_eval(self._draft, drafter.arrays)
        except Exception as error:
            self._drop_drafter(error)

    def prepare_round(self) -> Prepared:
        """Prepares the next round after the read of the one before.

        It verifies a draft, or takes a plain step; the first one on the prompt's last token.
        """
        if self.n_unread:
            self._begin()
            token = self._prompt[self._n_read :]
            self._n_read += 1
            return self._prepare_step(token)._replace(is_prompt=True)

        target = self.target
        plan = self._plan
        match = self._context.forecast(0) if self._context is not None else None
        if match is not None:
            plan = self._planner.extend_plan(
                plan, match.cumulative_acceptance, target.length, target.replayed
            )

        draft = None
        if plan and target.replayed <= MAX_REPLAY and target.has_room(plan.rows):
            draft = self._make_draft(plan)
            if plan.depth and self._drafter is None:  # the drafter has just failed
                plan = CONTEXT_ONLY._replace(n_context=plan.n_context)
        if not draft or not plan:
            return self._prepare_step(mx.array([self._root]), plan)

        length = target.length
        replayed = target.replayed
        room = target.count_until_quantized()
        limit = plan.max_depth if room is None else min(plan.max_depth, room - 1)
        rows = prepare_draft(target, draft, self._chooser, plan)
        return Prepared(rows, length, replayed, plan, draft, limit=limit)

    def _make_draft(self, plan: Plan) -> Draft | None:
        """The draft of the plan's sources, after the read of the round before."""
        root = mx.array(self._root)
        if plan.depth and self._drafter and self._drafter.proposes_after_read:
            self.enqueue_draft(self._make_task(plan, root, mx.array(self.target.length + 1)))
        draft = self._draft if plan.depth else None
        if plan.n_context and self._context:
            tree = self._context.propose(root, plan, None, in_level_order=True)
            draft = Draft(add_branch(draft.tree, tree), draft.draws) if draft else Draft(tree, None)
        return draft

    def read(self, pending: Pending, started: float | None) -> Round:
        """Reads a round, and passes its result to the cache, the sources and the planner.

        Args:
            started: when it was begun, by `perf_counter`; None if it is not timed.

        Raises:
            RedrafterError: the sampler returned something else than token ids.
        """
        path, tokens = pending.outcome.read()  # the one host read
        if min(tokens) < 0:  # see `Sampler.choose`
            last = self._vocab_size - 1
            raise RedrafterError(f"the sampler must return token ids from 0 to {last}")
        milliseconds = None if started is None else 1e3 * (perf_counter() - started)
        if pending.draft is not None:
            accepted = [self._root, *tokens[:-1]]
            self.target.keep_path(path, accepted)
            if self._seen is not None:
                self._seen = extend(self._seen, mx.array(accepted))
                mx.async_eval(self._seen)
        self._root = tokens[-1]

        if self._chooser.grammar is not None:
            for token in tokens:
                self._chooser.grammar.take(token)
        self._call_drafter("confirm", tokens)
        if self._context is not None:
            self._context.confirm(tokens)

        logprobs = pending.outcome.logprobs[: len(tokens)]
        decoded = Round(tokens, logprobs, replayed=pending.replayed, is_prompt=pending.is_prompt)
        if pending.draft is not None and pending.plan is not None:
            decoded = decoded._replace(
                plan=pending.plan,
                tree=pending.draft.tree,
                path=path,
                from_context=path[-1] >= pending.plan.size,
            )
        if pending.is_prompt:
            self._report(self._n_read, self._n_read)
        else:
            self._observe(pending, decoded, milliseconds)
        self._n_ahead = self._n_ahead + 1 if self.ahead is not None else 0
        self._clear_cache(len(tokens))
        return decoded

    def _clear_cache(self, n_tokens: int) -> None:
        """Clears MLX's buffer cache if that is due after `n_tokens` more."""
        self._n_since_clear += n_tokens
        if self._n_since_clear >= CLEAR_EVERY:
            mx.clear_cache()
            self._n_since_clear = 0

    def _observe(self, pending: Pending, decoded: Round, milliseconds: float | None) -> None:
        """Tells the planner what a round took; plain steps that overlap others are not timed."""
        verified = pending.draft is not None
        is_between_steps = self._n_ahead > 1 and self.ahead is not None
        is_alone = verified or is_between_steps or self._chooser.grammar is not None
        observed = ObservedRound(
            pending.plan,
            len(decoded.tokens),
            pending.length,
            pending.replayed,
            milliseconds if self._is_timed and is_alone else None,
            verified=verified,
            from_context=decoded.from_context,
        )
        self._planner.observe(observed)

    def _enqueue(self, outcome: Outcome, more: Any) -> None:
        pending_arrays = self.target.list_pending_arrays()
        mx.async_eval(
            outcome.packed, outcome.logprobs, more, pending_arrays, self._drafter_arrays()
        )

    def _drafter_arrays(self) -> Any:
        try:
            return None if self._drafter is None else self._drafter.arrays
        except Exception as error:
            self._drop_drafter(error)
            return None

    def _call_drafter(
        self, method: Literal["read", "keep", "confirm", "rewind"], value: Any
    ) -> None:
        try:
            if self._drafter is not None:
                getattr(self._drafter, method)(value)
        except Exception as error:
            self._drop_drafter(error)

    def _drop_drafter(self, error: Exception) -> None:
        """Continues without the failed drafter.

        Raises the error if there is no `on_drafter_failure`.
        """
        if self._on_drafter_failure is None:
            raise error
        self._drafter = None
        self._plan = None
        self._draft = None
        self._planner.drop_drafter()
        self._on_drafter_failure(error)


def decode_round(decoders: Sequence[Decoder]) -> list[Round | Exception]:
    """Decodes a round, or reads a piece of the prompt, of several texts of one model.

    They are in one forward, with one wait.

    Returns:
        For each its round, without tokens for a piece of the prompt; or the error that ended it:
        its cache is then undefined. An error of the forward itself is raised.
    """
    errors: dict[Decoder, Exception] = {}

    def call_each(call: Callable[[Decoder], T], texts: Iterable[Decoder]) -> dict[Decoder, T]:
        """The results of the texts that do not fail."""
        done = {}
        for text in texts:
            try:
                if text not in errors:
                    done[text] = call(text)
            except Exception as error:
                errors[text] = error
        return done

    def enqueue(
        prepared: dict[Decoder, Prepared], pieces: dict[Decoder, Piece]
    ) -> dict[Decoder, Pending]:
        texts = [*prepared, *pieces]
        if not texts:
            return {}
        rows = [each.rows for each in prepared.values()] + [each.rows for each in pieces.values()]
        forwards = dict(zip(texts, texts[0].target.run(rows), strict=True))
        call_each(lambda text: text.keep_piece(pieces[text], forwards[text]), pieces)
        return call_each(lambda text: text.enqueue(prepared[text], forwards[text]), prepared)

    started = perf_counter() if len(decoders) == 1 else None
    with on_stream():
        pending = {text: text.ahead for text in decoders if text.ahead is not None}
        waiting = [text for text in decoders if text not in pending]
        reading = [text for text in waiting if text.n_unread > 1]
        pieces = call_each(Decoder.prepare_piece, reading)
        ready = [text for text in waiting if text not in reading]
        pending |= enqueue(call_each(Decoder.prepare_round, ready), pieces)

        def plan_next(text: Decoder) -> DraftTask | None:
            others = [each.load for each in pending if each is not text]
            return text.plan_next(pending[text], Load.add(others))

        texts = call_each(plan_next, pending)
        tasks = {text: task for text, task in texts.items() if task is not None}
        trees = _propose_together(tasks)
        call_each(lambda text: text.enqueue_draft(tasks[text], trees.get(text)), tasks)
        # A step ahead of some texts would not be in one forward with the others' rows.
        if not reading and all(text.may_step_ahead(pending[text]) for text in texts):
            steps = call_each(lambda text: text.prepare_ahead(pending[text]), texts)
            for text, step in enqueue(steps, {}).items():
                text.ahead = step
        results = call_each(lambda text: text.read(pending[text], started), pending)
        results |= call_each(lambda text: text.read_piece(pieces[text]), pieces)
    return [errors[text] if text in errors else results[text] for text in decoders]


def _propose_together(tasks: dict[Decoder, DraftTask]) -> dict[Decoder, Tree]:
    """The trees of the texts whose drafters can propose with others'; not those that fail."""
    groups: dict[int, dict[Decoder, Source]] = {}
    for text in tasks:
        source = text.drafter
        if source is not None and source.group is not None:
            groups.setdefault(id(source.group), {})[text] = source
    trees: dict[Decoder, Tree] = {}
    for texts in groups.values():
        if len(texts) == 1:
            continue
        text, source = next(iter(texts.items()))
        with suppress(Exception), text.target.drafting():  # each then fails alone
            own = type(source).propose_together([*texts.values()], [tasks[each] for each in texts])
            trees.update(zip(texts, own, strict=True))
    return trees


def on_stream() -> AbstractContextManager[Any]:
    """A context on mlx-lm's generation stream; exit it before yielding to the caller."""
    return mx.stream(generation_stream)
