"""The interface of drafters for decoding.

A kind is a module of this package, listed in `KINDS`, with a `MODEL_TYPE`, a `DrafterArgs`, a
`Drafter`, `recognizes` (whether a checkpoint holds a published drafter of this kind), and
`sanitize` (renames its tensors to our names and returns our config). Besides the reading of
their files (`loading/`) no code outside this package depends on the kind of a drafter.

Most kinds guess from one hidden state of the target and keep nothing between drafts:
`StepwiseSource` drafts with them. Others open their own source, see `Drafter.open`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from ..engine import beam_search
from ..engine.beam_search import Adjust, Advance, State, Steps
from ..engine.plan import Plan
from ..engine.source import DraftTask, Source
from ..engine.tree import chain, grow, prune
from ..engine.types import Beams, Kept, Tree
from ..errors import CheckpointError
from ..target.model_parts import get_model_sizes, get_parts
from ..target.tree_attention import Nodes, build_with_nodes
from .config import DrafterArgs

SHARPNESS = 1.25
"""A factor for a drafter's logits in greedy decoding. Beams should hold the target's likeliest
token, and that token's distribution is sharper than the target's."""

N_SAMPLES = 8
"""How many fixed random inputs a drafter is compared with a copy on."""

Embed = Callable[[mx.array], mx.array]
"""(tokens (W,)) -> (W, D), their vectors in the target's embedding."""

Head = Callable[[mx.array], mx.array]
"""(hidden states (..., D)) -> logits (..., V), the target's output matrix."""


class Drafter(nn.Module):
    """A drafter's weights and how it drafts.

    Attributes:
        args: its config.
        draft_ids: (V',) int32, the tokens that its head's logits are for; only if its vocabulary
            is smaller than the target's.
        takes_float16: whether the range of float16 is large enough for its computation.
        drafts_jointly: whether `begin` may be called anew for each token, with the hidden states
            of several texts.
        n_cache_layers: how many layers of an mlx-lm prompt cache are its own; they follow the
            target's.
    """

    takes_float16: ClassVar[bool] = True
    drafts_jointly: ClassVar[bool] = False
    n_cache_layers: int = 0

    def __init__(self, args: DrafterArgs) -> None:
        super().__init__()
        self.args = args

    @property
    def weights(self) -> nn.Module:
        """The module that identifies the drafter; measurements are stored for it."""
        return self

    def open(self, model: nn.Module) -> Source:
        """A source that drafts for one text of a target. All sources share the weights."""
        return StepwiseSource(self, model)

    def check_fit(self, model: nn.Module, name: str = "the drafter") -> None:
        """Compares its sizes with a target's.

        Args:
            name: the drafter's, for the error.
        """
        names = "hidden size", "vocabulary size"
        own = self.args.hidden_size, self.args.vocab_size
        for what, expected, got in zip(names, own, get_model_sizes(model), strict=True):
            if expected != got:
                raise CheckpointError(f"{name} expects {what} {expected}, the target has {got}")

    def explain_chains(self) -> str | None:
        """Why it drafts chains only; None if it drafts trees."""
        return None

    @property
    def dtype(self) -> mx.Dtype:
        """The dtype of its computation, that of its last norm."""
        return self.norm.weight.dtype

    def begin(self, hidden: mx.array, embed: Embed) -> Advance:
        """Begins a draft: returns the function that reads tokens and guesses the next ones.

        Args:
            hidden: (D,) the target's hidden state from which the first token was chosen, or (W, D).
            embed: the target's embedding.
        """
        raise NotImplementedError

    def sample_logits(self) -> mx.array:
        """(8, V') logits for fixed random inputs, to compare the drafter with a copy."""
        width = self.args.hidden_size
        hidden, embedded = (array.astype(self.dtype) for array in make_samples(width, width))
        advance = self.begin(hidden, lambda tokens: embedded[tokens])
        tokens = mx.arange(N_SAMPLES) % self.args.vocab_size
        _, state = advance(tokens, None)
        logits, _ = advance(tokens[::-1], state)
        return self.gather(logits)

    @property
    def output_layers(self) -> list[nn.Module]:
        """Its output matrices, which have no bias; [] if it uses the target's."""
        return [self.lm_head] if "lm_head" in self else []

    def name_part(self, name: str) -> str:
        """The part that a layer belongs to: "head", "blocks", "rnn" or "embedding".

        Each part may be quantized to its own number of bits. A part "router" is not quantized.
        """
        return {"lm_head": "head", "embed_tokens": "embedding"}.get(name, "blocks")

    def hold_draft_ids(self) -> None:
        """Creates `draft_ids`, which are not trained, if the config has a draft vocabulary."""
        if self.args.draft_vocab_size is not None:
            self.draft_ids = mx.arange(self.args.draft_vocab_size, dtype=mx.int32)
            self.freeze(recurse=False, keys=["draft_ids"])

    def scatter(self, guesses: mx.array) -> mx.array:
        """(..., V) float32 logits from its head's (..., V').

        Tokens that it cannot guess have minus infinity.
        """
        guesses = guesses.astype(mx.float32)
        if "draft_ids" not in self:
            return guesses
        return scatter(guesses, self.draft_ids, self.args.vocab_size)

    def gather(self, logits: mx.array) -> mx.array:
        """(..., V') the logits of the tokens that it can guess, from (..., V)."""
        return logits[..., self.draft_ids] if "draft_ids" in self else logits


def make_samples(*widths: int) -> list[mx.array]:
    """(8, width) float32 fixed random numbers, for each width."""
    generator = np.random.default_rng(0)
    draws = [generator.normal(size=(N_SAMPLES, width)) for width in widths]
    return [mx.array(each.astype(np.float32)) for each in draws]


def scatter(logits: mx.array, ids: mx.array, size: int) -> mx.array:
    """(..., size) the logits (..., M) at `ids` (M,), and minus infinity elsewhere."""
    everything = mx.full((*logits.shape[:-1], size), -mx.inf)
    return mx.put_along_axis(everything, mx.broadcast_to(ids, logits.shape), logits, axis=-1)


def draft(task: DraftTask) -> Steps[Tree]:
    """The tree of a beam search."""
    root, plan, adjust, in_level_order = task
    if plan.width == 1:
        tokens = yield from beam_search.draft_chain(root, plan.depth, adjust=adjust)
        return chain(root, tokens)
    adjust = adjust or (lambda logits, level, paths: SHARPNESS * logits)
    beams = yield from beam_search.search(root, plan.width, plan.depth, adjust=adjust)
    return make_tree(root, beams, plan, in_level_order)


def make_tree(root: mx.array, beams: Beams, plan: Plan, in_level_order: bool) -> Tree:
    """The tree of a beam search; arguments as for `Source.propose`."""
    tree = grow(root, beams)
    return tree if in_level_order else prune(tree, beams, plan.size)


def read_siblings(width: int, read: Callable[[], mx.array]) -> mx.array:
    """The result of a forward over `width` tokens at one position, none of which sees another."""
    if width == 1:
        return read()
    nodes = Nodes(0, mx.zeros((width,), mx.int32), mx.eye(width, dtype=mx.bool_), is_tree=True)
    return build_with_nodes([], nodes, lambda views: read()).result


class StepwiseSource(Source):
    """Beam search over a drafter that reads tokens one by one.

    This class starts from the last hidden state only.

    Args:
        drafter: its weights.
        model: the target.
    """

    drafter: Drafter

    def __init__(self, drafter: Drafter, model: nn.Module) -> None:
        self.drafter = drafter
        self._embed = get_parts(model).embedding
        self.capture = (drafter.args.state_name,)
        self._hidden: mx.array | None = None

    def keep(self, kept: Kept) -> None:
        """Keeps the last hidden state."""
        self._hidden = kept.last_hidden(self.capture[0])

    def begin(self, root: mx.array, depth: int = 1) -> Advance:
        """Begins a draft: returns the function that reads its tokens, `root` first, and guesses.

        Args:
            depth: how many tokens are drafted; some drafters guess all of them at once.
        """
        assert self._hidden is not None
        return self.drafter.begin(self._hidden, self._embed)

    def propose(
        self, root: mx.array, plan: Plan, adjust: Adjust | None, *, in_level_order: bool
    ) -> Tree:
        steps = draft(DraftTask(root, plan, adjust, in_level_order))
        return beam_search.run_alone(steps, self.begin(root, plan.depth))

    @property
    def group(self) -> Any:
        is_joint = type(self) is StepwiseSource and self.drafter.drafts_jointly
        return self.drafter if is_joint else None

    @classmethod
    def propose_together(cls, sources: Sequence[Any], tasks: Sequence[DraftTask]) -> list[Tree]:
        first = sources[0]

        def advance(
            rows: list[tuple[int, int]], tokens: mx.array, state: State
        ) -> tuple[mx.array, State]:
            hidden = []
            for number, size in rows:
                own = sources[number]._hidden
                hidden.append(mx.broadcast_to(own, (size, *own.shape)))
            begun: Advance = first.drafter.begin(mx.concatenate(hidden), first._embed)
            return begun(tokens, state)

        return beam_search.run_together([draft(task) for task in tasks], advance)

    @property
    def arrays(self) -> Any:
        """The last hidden state."""
        return self._hidden
