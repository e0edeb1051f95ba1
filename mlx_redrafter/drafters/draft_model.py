"""Any smaller mlx-lm model as a drafter, as in mlx-lm's own speculative decoding.

The model is unmodified. It reads the text with its own prompt cache, and no hidden state of the
target. A draft of K tokens takes K forwards. The first reads the accepted tokens; after the last,
the cache is rolled back to the end of the text. In a chain, the other forwards have one row. In a
tree, each reads the W hypotheses so far as separate paths that see the text and themselves, so no
cache row is ever moved.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models.cache import can_trim_prompt_cache, make_prompt_cache, trim_prompt_cache
from mlx_lm.utils import common_prefix_len

from ..engine.beam_search import Adjust, State, run_alone
from ..engine.plan import Plan, chain_plan
from ..engine.source import DraftTask, Source
from ..engine.types import Tree
from ..errors import CheckpointError, UnsupportedModelError
from ..target import kv_cache
from ..target.model_checks import explain_chains, make_cache
from ..target.model_parts import (
    get_compute_dtype,
    get_model_sizes,
    get_module_name,
    get_parts,
    get_vocab_size,
)
from ..target.recurrence import Recording, list_recurrences, make_paths
from ..target.supported_models import REFUSED
from ..target.tree_attention import Nodes, build_with_nodes
from .config import DrafterArgs
from .protocol import Drafter, draft

MAX_PADDING = 1024
"""The vocabularies of two models with the same tokenizer may differ by this much, by padding."""

MAX_LAST_PIECE = 32
"""The most tokens in the forward that returns the logits; those before are read in pieces."""


@dataclass(frozen=True)
class DraftModelArgs(DrafterArgs):
    """The sizes of a draft model: its own hidden size and vocabulary.

    Attributes:
        name: the name of its module in `mlx_lm.models`.
    """

    model_type: str = field(default="draft_model", kw_only=True)
    name: str = field(default="", kw_only=True)

    def describe_sizes(self) -> str:
        return f"draft model, {self.name}"

    def describe_states(self) -> str:
        return "only the text, no hidden state"

    def explain_useless(self) -> str:
        question = "Do the draft model and the target have the same tokenizer"
        return f"{question}, and do its weights fit this dtype?"


class DraftModel(Drafter):
    """A language model that drafts for another one.

    Args:
        model: from `load` or `mlx_lm.load`.
    """

    def __init__(self, model: nn.Module) -> None:
        name = get_module_name(model)
        if reason := REFUSED.get(name):
            raise UnsupportedModelError(f"{name} cannot be a draft model: {reason}")
        super().__init__(DraftModelArgs(*get_model_sizes(model), name=name))
        self.model = model
        self._chains = explain_chains(model)
        self.n_cache_layers = len(make_prompt_cache(model))

    @property
    def weights(self) -> nn.Module:
        return self.model

    @property
    def dtype(self) -> mx.Dtype:
        return get_compute_dtype(self.model)

    def open(self, model: nn.Module) -> DraftModelSource:
        return DraftModelSource(self, get_vocab_size(model))

    def check_fit(self, model: nn.Module, name: str = "the draft model") -> None:
        """Compares the vocabulary sizes, except for padding of at most `MAX_PADDING`."""
        own = self.args.vocab_size
        other = get_model_sizes(model)[1]
        if abs(own - other) > MAX_PADDING:
            raise CheckpointError(
                f"{name} cannot draft: it has a vocabulary of {own} tokens, the target of {other}"
            )

    def explain_chains(self) -> str | None:
        return self._chains and f"the draft model takes chains only, {self._chains}"


@lru_cache(maxsize=64)
def path_constants(width: int, length: int) -> tuple[mx.array, mx.array]:
    """(depths (N,) int32, ancestors (N, N) bool) of N = W * L nodes.

    They are W paths of length L, one after the other.
    """
    nodes = np.arange(width * length, dtype=np.int32)
    path = nodes // length
    ancestors = (path[:, None] == path) & (nodes[:, None] >= nodes)
    return mx.array(nodes % length), mx.array(ancestors)


class DraftModelSource(Source):
    """The source of a draft model.

    Its cache holds a prefix of the text; `read` trims it to what a new text shares. Nothing is
    computed before the first draft. If the draft model drafts chains only, wider plans become
    chains of the same depth.

    Args:
        vocab_size: V, the target's.
    """

    proposes_after_read = True

    def __init__(self, drafter: DraftModel, vocab_size: int) -> None:
        self.drafter = drafter
        self._model = drafter.model
        self._vocab_size = vocab_size
        self._takes_trees = drafter.explain_chains() is None
        self._recurrences = list_recurrences(drafter.model)
        self._n_embedded: int = get_parts(drafter.model).embedding.weight.shape[0]
        self._tokens: list[int] = []  # of the text
        self._cache: kv_cache.Cache = []  # none yet
        self._held = 0  # how many of the tokens are in it

    def read(self, tokens: Sequence[int]) -> None:
        """Keeps the part of the cache that the new text shares."""
        self._trim(common_prefix_len(self._tokens[: self._held], tokens))
        self._tokens = list(tokens)

    def confirm(self, tokens: Sequence[int]) -> None:
        """Appends tokens, which the next draft will read."""
        self._tokens += tokens

    def propose(
        self, root: mx.array, plan: Plan, adjust: Adjust | None, *, in_level_order: bool
    ) -> Tree:
        """See `Source.propose`. The root must be the last token of the text."""
        self._trim(len(self._tokens) - 1)
        # After an error, no partly written cache must remain.
        cache = self._cache or make_cache(self._model, self.max_kv_size)
        self._cache = []
        logits = self._read_new_tokens(cache)
        plan = plan if self._takes_trees else chain_plan(plan.depth)
        saved = kv_cache.snapshot_rows(cache)

        def advance(tokens: mx.array, paths: State) -> tuple[mx.array, State]:
            """The state of a hypothesis is its path (L,), including the root."""
            # Computed while the next level is built.
            mx.async_eval(logits if paths is None else tokens)
            if paths is None:
                return logits, tokens[:, None]
            paths = mx.concatenate([paths, tokens[:, None]], axis=1)
            is_chain = plan.width == 1
            read = self._run(tokens, cache) if is_chain else self._read_paths(paths, cache)
            return self._fit(read), paths

        steps = draft(DraftTask(root, plan, adjust, in_level_order))
        tree = run_alone(steps, advance)
        kv_cache.restore(cache, saved)
        self._cache = cache
        self._held = len(self._tokens)
        return tree

    def fork(self) -> DraftModelSource:
        other = copy.copy(self)
        other._tokens = list(self._tokens)
        other._cache = copy.deepcopy(self._cache)
        return other

    @property
    def arrays(self) -> Any:
        """The arrays of its cache."""
        return [vars(c) for c in kv_cache.leaves(self._cache)]

    def _trim(self, count: int) -> None:
        """Trims the cache to the first `count` tokens; drops it if it cannot be trimmed."""
        beyond = self._held - count
        if beyond > 0 and can_trim_prompt_cache(self._cache):
            trim_prompt_cache(self._cache, beyond)
        elif beyond > 0:
            self._cache = []
        self._held = min(self._held, count) if self._cache else 0

    def _read_new_tokens(self, cache: kv_cache.Cache) -> mx.array:
        """(1, V) the logits after the text.

        Reads the tokens that are not in the cache, in pieces if there are many.
        """
        tokens = mx.array(self._tokens[self._held :], mx.int32)
        while tokens.shape[0] > MAX_LAST_PIECE:
            size = min(self.prefill_step_size, tokens.shape[0] - 1)
            self._run(tokens[:size], cache)
            mx.eval([vars(c) for c in kv_cache.leaves(cache)])
            mx.clear_cache()
            tokens = tokens[size:]
        return self._fit(self._run(tokens, cache)[-1:])

    def _read_paths(self, paths: mx.array, cache: kv_cache.Cache) -> mx.array:
        """(W, V') the model's own logits after each of `paths` (W, 1 + L).

        Their first token is in the cache.
        """
        width = paths.shape[0]
        length = paths.shape[1] - 1
        saved = kv_cache.snapshot(cache)
        nodes = Nodes(len(self._tokens), *path_constants(width, length), is_tree=True)
        tokens = paths[:, 1:].reshape(-1)
        recording = Recording(cache, width * length, make_paths(nodes, width, length - 1))
        with recording.replace(self._recurrences):
            logits = build_with_nodes(cache, nodes, lambda views: self._run(tokens, views)).result
        kv_cache.restore(cache, saved)
        return logits.reshape(width, length, -1)[:, -1]

    def _run(self, tokens: mx.array, cache: kv_cache.Cache) -> mx.array:
        """(T, V') the model's own logits after each of `tokens` (T,).

        Ids beyond its embedding use the last vector.
        """
        if self._n_embedded < self._vocab_size:
            tokens = mx.minimum(tokens, self._n_embedded - 1)
        logits: mx.array = self._model(tokens[None], cache=cache)
        return logits[0]

    def _fit(self, logits: mx.array) -> mx.array:
        """(W, V) float32 logits from (W, V'), cut or padded with minus infinity."""
        logits = logits[:, : self._vocab_size].astype(mx.float32)
        missing = self._vocab_size - logits.shape[1]
        return mx.pad(logits, [(0, 0), (0, missing)], constant_values=-mx.inf)
