"""One round of speculative decoding: draft, verify, accept. Everything here is enqueued, only `Outcome.read` waits.

    tip --make_draft--> tree --verify--> logits --choose--> tokens --accept--> path --> next tip

Shapes follow from the plan alone, so the graph is the same each round. A plain step is a round without a draft.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, cast

import mlx.core as mx

from ..drafters.protocol import Drafter
from . import beam_search
from .accept import accept, accept_chain
from .plan import Plan
from .sampling import Draws, Sampler
from .target import Target
from .tree import add_chain, chain, grow, prune
from .types import Tip, Tree

Processor = Callable[[mx.array, mx.array], mx.array]
"""An mlx-lm logits processor: (history (T,), logits (1, V)) -> logits (1, V)."""


class Draft(NamedTuple):
    """What is verified next.

    Attributes:
        tree: N nodes.
        draws: the noise of the K + 1 positions after the root; None when choosing needs none.
    """

    tree: Tree
    draws: Draws | None


class Outcome(NamedTuple):
    """A round that is enqueued but not read.

    Attributes:
        report: (1 + 2 * (K + 1),) int32: n_accepted, the path, and the target's choice after each node on it.
            The one array of a round that the host reads. Of a plain step: (1,), the choice.
        logprobs: K + 1 arrays (V,), the log-probabilities of those choices.
        tip: where the next round starts; None when the hidden state was not asked for.
    """

    report: mx.array
    logprobs: list[mx.array]
    tip: Tip | None

    def read(self) -> tuple[list[int], list[int]]:
        """(the accepted path, the token chosen after each node on it): the host read of a round, which waits for it.

        A plain step has the path [0] of its one token.
        """
        report = cast(list[int], self.report.tolist())
        if len(report) == 1:
            return [0], report
        count, choices = report[0] + 1, 1 + len(report) // 2
        return report[1 : 1 + count], report[choices : choices + count]


class Chooser(NamedTuple):
    """How tokens are chosen from logits.

    Attributes:
        sampler: see `Sampler`.
        processors: mlx-lm logits processors; each is given the history that plain decoding would give it.
    """

    sampler: Sampler
    processors: tuple[Processor, ...] = ()


def make_draft(
    drafter: Drafter, target: Target, sampler: Sampler, tip: Tip, position: mx.array, plan: Plan, *, ordered: bool
) -> Draft:
    """Drafts from `tip`.

    When tokens are sampled, hypotheses are ranked with the target's own noise and filters: the drafter then guesses
    the draw itself rather than the likeliest token.

    Args:
        position: () int32, the absolute position after the root.
        ordered: keep every node and the nodes in level order, so that each node's depth is known beforehand.
    """
    advance = drafter.begin(tip.hidden, target.embed)
    draws = sampler.draws(position, plan.depth + 1, drafter.args.vocab_size)
    adjust = None if draws is None else lambda logits, level: sampler.adjust(logits, draws, level)
    if plan.width == 1:
        return Draft(chain(tip.token, beam_search.draft_chain(advance, tip.token, plan.depth, adjust=adjust)), draws)
    beams = beam_search.search(advance, tip.token, plan.width, plan.depth, adjust=adjust)
    tree = grow(tip.token, beams)
    return Draft(tree if ordered else prune(tree, beams, plan.size), draws)


def add_context(draft: Draft | None, root: int, tokens: list[int]) -> Draft:
    """The draft and a chain of `tokens` from the context, below the same root; without a draft that chain alone."""
    if draft is None:
        return Draft(chain(mx.array(root), mx.array(tokens, mx.int32)), None)
    return Draft(add_chain(draft.tree, tokens), draft.draws)


def verify(
    target: Target,
    draft: Draft,
    chooser: Chooser,
    history: mx.array | None,
    plan: Plan,
    limit: int,
    *,
    want_hidden: bool = True,
) -> Outcome:
    """One target forward over the tree, and which path of it is accepted.

    Args:
        history: (T,) tokens before the root, for the processors.
        plan: of the draft.
        limit: the most drafted tokens this round may accept.
        want_hidden: whether the tip's hidden state is wanted; without, there is no tip.
    """
    tree, depth = draft.tree, plan.max_depth
    logits, hidden = target.verify(tree, branched=plan.branched, want_hidden=want_hidden)
    if chooser.processors:
        logits = _process_nodes(chooser.processors, history, tree, logits, plan)
    draws = draft.draws
    if (missing := depth + 1 - (0 if draws is None else plan.depth + 1)) > 0:
        more = chooser.sampler.draws(mx.array(target.length + 2 + depth - missing), missing, logits.shape[-1])
        draws = more if draws is None or more is None else Draws(*map(_append, draws, more))
    logprobs = log_softmax(logits)
    chosen = chooser.sampler.choose(logprobs, draws, tree.depths).astype(mx.int32)
    verdict = accept(tree, chosen, depth, limit) if plan.branched else accept_chain(tree, chosen, limit)
    (n_accepted, path), on_path = verdict, chosen[verdict.path]
    report = mx.concatenate([n_accepted.reshape(1), path, on_path])
    rows = list(mx.split(logprobs[path].reshape(-1), depth + 1))
    return Outcome(report, rows, None if hidden is None else Tip(hidden[path[-1]], on_path[-1]))


def step(
    target: Target, tokens: mx.array, chooser: Chooser, history: mx.array | None, *, want_hidden: bool = False
) -> Outcome:
    """One step of plain decoding: the target on `tokens` (T,), all of whose rows are kept, and its choice at the end.

    Args:
        history: (T',) tokens before `tokens`, for the processors.
        want_hidden: whether the tip's hidden state is wanted; without, there is no tip.
    """
    logits, hidden = target.forward(tokens, want_hidden=want_hidden)
    row = logits[-1:]
    if chooser.processors:
        row = _process(chooser.processors, extend(history, tokens.astype(mx.int32)), row)
    logprobs = log_softmax(row)
    draws = chooser.sampler.draws(mx.array(target.length), 1, logprobs.shape[-1])
    chosen = chooser.sampler.choose(logprobs, draws, mx.zeros((1,), mx.int32)).astype(mx.int32)
    return Outcome(chosen, [logprobs[0]], None if hidden is None else Tip(hidden[-1], chosen[0]))


def log_softmax(logits: mx.array) -> mx.array:
    """Log-probabilities of logits (N, V)."""
    return logits - mx.logsumexp(logits, axis=-1, keepdims=True)


def extend(history: mx.array | None, tokens: mx.array) -> mx.array:
    """`history` with `tokens` appended."""
    return tokens if history is None else mx.concatenate([history, tokens])


def _append(first: mx.array, second: mx.array) -> mx.array:
    return mx.concatenate([first, second])


def _process(processors: tuple[Processor, ...], history: mx.array, row: mx.array) -> mx.array:
    for processor in processors:
        row = processor(history, row)
    return row


def _process_nodes(
    processors: tuple[Processor, ...], history: mx.array | None, tree: Tree, logits: mx.array, plan: Plan
) -> mx.array:
    """Logits (N, V) after the processors, each node with the tokens on its own path as history."""
    ancestors_first = mx.argsort(mx.where(tree.ancestors, tree.depths[None], plan.max_depth + 1), axis=1)
    rows = []
    for node in range(plan.rows):
        depth = 0 if node == 0 else (node - 1) // plan.width + 1
        path = tree.tokens[ancestors_first[node, : depth + 1]]
        rows.append(_process(processors, extend(history, path), logits[node : node + 1]))
    return mx.concatenate(rows)
