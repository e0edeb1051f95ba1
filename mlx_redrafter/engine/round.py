"""One round of speculative decoding: verify a draft, accept a path.

Everything is enqueued; only `Outcome.read` waits::

    root --propose--> tree --verify--> logits --choose--> tokens --accept--> path --> next root

Shapes follow from the plan alone, so the graph is the same each round. A plain step is a round
without a draft.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import mlx.core as mx

from ..errors import RedrafterError
from .accept import accept, accept_chain
from .grammar import Grammar, mask_root, mask_tree
from .plan import Plan
from .sampling import Draws, Sampler
from .types import DraftSource, Forward, Kept, TargetProtocol, Tree

Processor = Callable[[mx.array, mx.array], mx.array]
"""An mlx-lm logits processor: (history (T,), logits (1, V)) -> logits (1, V)."""


class Draft(NamedTuple):
    """A tree to verify.

    Attributes:
        tree: N nodes.
        draws: the noise that drafting used, for the positions after the root; None if it used none.
    """

    tree: Tree
    draws: Draws | None


class Outcome(NamedTuple):
    """A round that is enqueued but not read.

    Attributes:
        packed: (1 + 2 * (K + 1),) int32: n_accepted, the path, and the target's choice after each
            node on it. For a plain step (1,), the choice. It is the only array of a round that the
            host reads.
        logprobs: K + 1 arrays (V,), the log-probabilities of those choices.
        kept: the argument of the sources' `keep`.
    """

    packed: mx.array
    logprobs: list[mx.array]
    kept: Kept

    @property
    def root(self) -> mx.array:
        """() int32, the last of those choices, the root of the next round.

        It is made by the thread that uses it, which need not be the one that enqueued the round.
        """
        return self.packed[-1]

    def read(self) -> tuple[list[int], list[int]]:
        """(the accepted path, the token chosen after each node on it).

        This is the round's one host read, and waits. The path of a plain step is [0].
        """
        packed: Any = self.packed.tolist()
        if len(packed) == 1:
            return [0], packed
        count = packed[0] + 1
        middle = 1 + len(packed) // 2
        return packed[1 : 1 + count], packed[middle : middle + count]


class Round(NamedTuple):
    """A target forward after its host read; or a piece of the prompt, which has no tokens.

    Attributes:
        tokens: the accepted drafted tokens, then one of the target's own.
        logprobs: the target's log-probabilities (V,) for each of them, evaluated.
        plan: the plan of the draft; None for a plain step.
        tree: the draft, evaluated; None for a plain step.
        path: the accepted nodes from the root down.
        replayed: how many tokens it replayed.
        is_prompt: whether its forward read tokens of the prompt.
        from_context: whether the accepted tokens were drafted from the context, not by the drafter.
    """

    tokens: list[int]
    logprobs: list[mx.array]
    plan: Plan | None = None
    tree: Tree | None = None
    path: Sequence[int] = (0,)
    replayed: int = 0
    is_prompt: bool = False
    from_context: bool = False

    @property
    def draft_sources(self) -> list[DraftSource | None]:
        """What drafted each token; None for the last one, which is the target's own."""
        if not self.tokens:
            return []
        source: DraftSource = "context" if self.from_context else "drafter"
        return [*[source] * (len(self.tokens) - 1), None]


class TokenChooser(NamedTuple):
    """How tokens are chosen from logits.

    Attributes:
        sampler: see `Sampler`.
        processors: mlx-lm logits processors, called with the history that plain decoding would
            pass.
        grammar: constrains the text, applied after the processors; None for none.
    """

    sampler: Sampler
    processors: tuple[Processor, ...] = ()
    grammar: Grammar | None = None


def prepare_draft(target: TargetProtocol, draft: Draft, chooser: TokenChooser, plan: Plan) -> Any:
    """The rows that verify a draft, see `TargetProtocol.run`."""
    tree = draft.tree
    if chooser.grammar is not None:
        # Reading these waits only for the draft, not for the forward.
        mx.async_eval(tree.tokens, tree.parents)
    return target.prepare_verify(
        tree, is_tree=plan.is_tree, n_paths=plan.n_paths, depth=plan.max_depth
    )


def accept_draft(
    forward: Forward,
    draft: Draft,
    chooser: TokenChooser,
    history: mx.array | None,
    plan: Plan,
    limit: int,
    position: int,
) -> Outcome:
    """Chooses a token after each node of a draft, and accepts a path.

    Args:
        forward: of the draft's nodes.
        history: (T,) tokens before the root, for the processors.
        plan: of the draft.
        limit: the most drafted tokens that may be accepted.
        position: of the root.
    """
    tree = draft.tree
    depth = plan.max_depth
    allowed = tree
    logits, hidden = forward
    if chooser.processors:
        logits = _process_nodes(chooser.processors, history, tree, logits, plan)
    if chooser.grammar is not None:
        logits, allowed = mask_tree(chooser.grammar, logits, tree)

    draws = draft.draws
    missing = depth + 1 if draws is None else depth - plan.depth
    if missing > 0:
        first = mx.array(position + 2 + depth - missing)
        draws = _append(draws, chooser.sampler.draw(first, missing, logits.shape[-1]))
    logprobs = log_softmax(logits)
    chosen = chooser.sampler.choose(logprobs, draws, tree.depths).astype(mx.int32)

    if plan.is_tree:
        n_accepted, path = accept(allowed, chosen, depth, limit)
    else:
        n_accepted, path = accept_chain(allowed, chosen, limit)
    on_path = chosen[path]
    packed = mx.concatenate([n_accepted.reshape(1), path, on_path])
    path_logprobs = mx.split(logprobs[path].reshape(-1), depth + 1)
    kept = Kept(tree.tokens, hidden, path, n_accepted + 1, position)
    return Outcome(packed, list(path_logprobs), kept)


def choose_token(
    forward: Forward,
    token: mx.array,
    chooser: TokenChooser,
    history: mx.array | None,
    position: int,
) -> Outcome:
    """Chooses the token after a plain step.

    Args:
        forward: of `token` (1,).
        history: (T,) tokens before it, for the processors.
        position: of `token`.
    """
    logits, hidden = forward
    if chooser.processors:
        logits = _process(chooser.processors, extend(history, token.astype(mx.int32)), logits)
    if chooser.grammar is not None:
        logits = mask_root(chooser.grammar, logits)
    logprobs = log_softmax(logits)
    draws = chooser.sampler.draw(mx.array(position + 1), 1, logprobs.shape[-1])
    chosen = chooser.sampler.choose(logprobs, draws, mx.zeros((1,), mx.int32)).astype(mx.int32)
    kept = Kept(token, hidden, None, 1, position)
    return Outcome(chosen, [logprobs[0]], kept)


def log_softmax(logits: mx.array) -> mx.array:
    """Log-probabilities of logits (N, V)."""
    return logits - mx.logsumexp(logits, axis=-1, keepdims=True)


def extend(history: mx.array | None, tokens: mx.array) -> mx.array:
    """(H + T,) ids: `history` (H,) with `tokens` (T,) appended."""
    return tokens if history is None else mx.concatenate([history, tokens])


def _append(draws: Draws | None, more: Draws | None) -> Draws | None:
    if draws is None or more is None:
        return more
    return Draws(*(mx.concatenate(list(each)) for each in zip(draws, more, strict=True)))


def process_rows(
    processors: tuple[Processor, ...],
    history: mx.array | None,
    paths: list[mx.array],
    logits: mx.array,
) -> mx.array:
    """Logits (N, V) after the processors, each row with its own history.

    Args:
        history: (T,) tokens that all rows share; None for none.
        paths: for each row, the tokens after `history`.
    """
    processed = [
        _process(processors, extend(history, path), logits[row : row + 1])
        for row, path in enumerate(paths)
    ]
    return mx.concatenate(processed)


def _process(processors: tuple[Processor, ...], history: mx.array, logits: mx.array) -> mx.array:
    shape = logits.shape
    for processor in processors:
        logits = processor(history, logits)
        if not isinstance(logits, mx.array) or logits.shape != shape:
            is_array = isinstance(logits, mx.array)
            got = f"shape {logits.shape}" if is_array else type(logits).__name__
            expected = f"logits of shape {shape}, as it was given"
            raise RedrafterError(f"a logits processor must return {expected}, got {got}")
    return logits


def _process_nodes(
    processors: tuple[Processor, ...],
    history: mx.array | None,
    tree: Tree,
    logits: mx.array,
    plan: Plan,
) -> mx.array:
    """Logits (N, V) after the processors; a node's history ends with the tokens on its path."""
    order = mx.where(tree.ancestors, tree.depths[None], plan.max_depth + 1)
    ancestors_first = mx.argsort(order, axis=1)
    paths = []
    for node in range(plan.rows):
        depth = 0 if node == 0 else (node - 1) // plan.width + 1
        paths.append(tree.tokens[ancestors_first[node, : depth + 1]])
    return process_rows(processors, history, paths, logits)
