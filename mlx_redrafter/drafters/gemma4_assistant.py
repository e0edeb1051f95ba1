"""Gemma 4's assistants: a few layers that attend to the target's own keys and values.

t is a token, e its vector in the target's embedding of width D, f the target's state after the
final norm at the position before, the last one that the target has read::

    x = pre_projection([sqrt(D) e ; f])
    x = layer(x) ...                      mlx-lm's own for Gemma 4, but without keys and values
    y = norm(x)
    logits = output y

In a draft, post_projection(y) replaces f. An assistant has no cache. Each layer reads the rows of
the target's last layer of its own type (sliding or full attention) that has a cache. Queries are
rotated to the position of f, for all tokens of a draft, as in vLLM, SGLang and mlx-vlm; Google's
LiteRT-LM and transformers rotate them to the position after it.

Small assistants compute few logits: y chooses the best of some thousand centroids, and only the
tokens of their clusters have logits.

Source: transformers, models/gemma4_assistant; the position: vLLM, v1/spec_decode/gemma4.py.
Tensors are named as there, except `output`, `centroids` and `token_ordering`.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import KW_ONLY, dataclass, field, fields
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models.gemma4_text import DecoderLayer, ModelArgs

from ..engine import beam_search
from ..engine.beam_search import Adjust, Advance, State
from ..engine.plan import Plan
from ..engine.source import ReadRows
from ..engine.types import Kept, Tree
from ..errors import CheckpointError
from ..target.model_parts import get_module_name
from .checkpoint import Checkpoint, Config
from .config import DrafterArgs as BaseArgs
from .config import check_neutral, get_object
from .protocol import (
    N_SAMPLES,
    SHARPNESS,
    StepwiseSource,
    make_samples,
    make_tree,
    read_siblings,
    scatter,
)
from .protocol import Drafter as BaseDrafter

MODEL_TYPES = ("gemma4_assistant", "gemma4_unified_assistant")

TARGETS = ("gemma4", "gemma4_text")
"""The modules of mlx-lm whose caches an assistant can read."""

SLIDING = "sliding_attention"

NAMES = (
    (r"masked_embedding\.(.*)", r"\1"),
    (r"(?:embed_tokens|lm_head)\.weight", "output.weight"),
)

SUPPORTED = {
    "hidden_activation": "gelu_pytorch_tanh",
    "attention_bias": False,
    "enable_moe_block": False,
    "hidden_size_per_layer_input": 0,
}
"""The supported values of config keys; mlx-lm's defaults for some are those of a target."""

Rows = dict[str, tuple[mx.array, mx.array]]
"""Type of layers -> the keys and values that they read, each (1, heads, R, size)."""


def recognizes(names: Collection[str], config: Config) -> bool:
    """Whether a checkpoint holds an assistant."""
    return {"pre_projection.weight", "post_projection.weight"} <= set(names)


def sanitize(checkpoint: Checkpoint, model: nn.Module | None) -> Config:
    """Renames a published assistant's tensors to our names; returns our config.

    Dense ones name centroids in their config which their files lack.
    """
    args = read_fields(checkpoint.config)
    unused = []
    if args["num_centroids"] is None:
        unused.append((r"masked_embedding\..*", ""))
    if "lm_head.weight" in checkpoint.tensors:
        unused.append((r"embed_tokens\..*", ""))
    checkpoint.rename([*unused, *NAMES])
    ordering = checkpoint.tensors.get("token_ordering")
    if ordering is not None:
        ids = np.array(ordering)
        if sorted(ids.tolist()) != [*range(args["vocab_size"])]:
            raise ValueError("expected token_ordering to have each token once")
        checkpoint.tensors["token_ordering"] = ordering.astype(mx.int32)
    return args


def read_fields(config: Config) -> Config:
    """Our config of a published one."""
    text = get_object(config, "text_config")
    check_neutral({key: value for key, value in text.items() if value is not None}, SUPPORTED)
    names = {each.name for each in fields(ModelArgs)}
    layer_config = {key: value for key, value in text.items() if key in names}
    for own in get_object(text, "per_layer_config").values():  # of full attention, newer configs
        layer_config["global_head_dim"] = own.get("head_dim", text["head_dim"])
        layer_config["num_global_key_value_heads"] = own.get("num_key_value_heads")
    has_centroids = config.get("use_ordered_embeddings") is True
    return {
        "model_type": config.get("model_type"),
        "hidden_size": config.get("backbone_hidden_size"),
        "vocab_size": text.get("vocab_size"),
        "layer_config": layer_config,
        "num_centroids": config.get("num_centroids", 2048) if has_centroids else None,
        "centroid_top_k": config.get("centroid_intermediate_top_k", 32) if has_centroids else None,
    }


@dataclass(frozen=True)
class DrafterArgs(BaseArgs):
    """The config of an assistant.

    Attributes:
        layer_config: the part of its text config that mlx-lm's layer class needs.
        num_centroids: how many clusters of equal size its tokens have; None if it computes all
            logits.
        centroid_top_k: the tokens of how many clusters have logits.
    """

    layer_config: dict[str, Any]
    _: KW_ONLY
    num_centroids: int | None = None
    centroid_top_k: int | None = None
    model_type: str = field(default=MODEL_TYPES[0])

    @property
    def num_layers(self) -> int:
        """How many layers it has."""
        return int(self.layer_config["num_hidden_layers"])

    def describe_states(self) -> str:
        names = {each.partition("_")[0] for each in self.layer_config["layer_types"]}
        types = " and ".join(sorted(names))
        return f"{super().describe_states()}, and keys and values of the last {types} layer"

    def describe_sizes(self) -> str:
        own = self.layer_config
        sizes = f"{self.num_layers} layers of width {own['hidden_size']}"
        if self.num_centroids is None:
            return f"{sizes}, MLP {own['intermediate_size']}"
        return f"{sizes}, best {self.centroid_top_k} of {self.num_centroids} clusters of tokens"


class Drafter(BaseDrafter):
    """An assistant."""

    args: DrafterArgs
    takes_float16 = False

    def __init__(self, args: DrafterArgs) -> None:
        super().__init__(args)
        # Its layers have no keys and values.
        own = {"num_kv_shared_layers": args.num_layers, "use_double_wide_mlp": False}
        layer_args = ModelArgs.from_dict(args.layer_config | SUPPORTED | own)
        width = layer_args.hidden_size
        self.pre_projection = nn.Linear(2 * args.hidden_size, width, bias=False)
        self.layers = [DecoderLayer(layer_args, i) for i in range(args.num_layers)]
        self.norm = nn.RMSNorm(width, layer_args.rms_norm_eps)
        self.post_projection = nn.Linear(width, args.hidden_size, bias=False)
        self.output = nn.Embedding(args.n_guesses, width)
        self.hold_draft_ids()
        if args.num_centroids is not None:
            self.centroids = nn.Linear(width, args.num_centroids, bias=False)
            self.token_ordering = mx.arange(args.vocab_size, dtype=mx.int32)
            self.freeze(recurse=False, keys=["token_ordering"])

    def open(self, model: nn.Module) -> AssistantSource:
        return AssistantSource(self, model)

    def check_fit(self, model: nn.Module, name: str = "the drafter") -> None:
        super().check_fit(model, name)
        find_read_layers(self, model, name)

    def read_tokens(
        self, embedded: mx.array, states: mx.array, rows: Rows, position: mx.array | int
    ) -> mx.array:
        """(W, H) the output of the norm for W hypotheses.

        Args:
            embedded: (W, D) their last tokens in the target's embedding.
            states: (W, D) the target's state, or what replaces it.
            rows: see `Rows`.
            position: of the queries.
        """
        scaled = embedded * self.args.hidden_size**0.5
        both = mx.concatenate([scaled.astype(self.dtype), states.astype(self.dtype)], axis=-1)

        def read() -> mx.array:
            x: mx.array = self.pre_projection(both)[None]
            for layer in self.layers:
                x = layer(x, shared_kv=rows[layer.layer_type], offset=position)[0]
            return self.norm(x)[0]

        return read_siblings(len(embedded), read)

    def guess(self, normed: mx.array) -> mx.array:
        """(W, V) float32 logits from `read_tokens`' output; minus infinity for other clusters."""
        if "centroids" not in self:
            return self.scatter(self.output.as_linear(normed))
        logits, ids = self.guess_candidates(normed)
        return scatter(logits, ids, self.args.vocab_size)

    def guess_candidates(self, normed: mx.array) -> tuple[mx.array, mx.array]:
        """(logits, token ids), each (W, M): of the tokens in the best clusters."""
        count = self.args.centroid_top_k or 0
        scores = self.centroids(normed)
        best = mx.argpartition(-scores, count - 1, axis=-1)[:, :count]
        clusters = self.token_ordering.reshape(scores.shape[-1], -1)
        ids = clusters[best].flatten(1)
        logits = self.output(ids) @ normed[..., None]
        return logits[..., 0].astype(mx.float32), ids

    def sample_logits(self) -> mx.array:
        """Logits of all tokens and scores of centroids, for fixed random inputs."""
        width = self.args.hidden_size
        rows: Rows = {}
        for layer in self.layers:
            attention = layer.self_attn
            shape = N_SAMPLES, attention.n_kv_heads, attention.head_dim
            size = attention.n_kv_heads * attention.head_dim
            samples = make_samples(size, size)
            keys, values = (x.reshape(1, *shape).swapaxes(1, 2) for x in samples)
            rows[layer.layer_type] = keys.astype(self.dtype), values.astype(self.dtype)
        embedded, states = make_samples(width, width)
        normed = self.read_tokens(embedded, states, rows, N_SAMPLES)
        normed = self.read_tokens(embedded[::-1], self.post_projection(normed), rows, N_SAMPLES)
        logits = self.output.as_linear(normed)
        if "centroids" in self:
            logits = mx.concatenate([logits, self.centroids(normed)], axis=-1)
        return logits.astype(mx.float32)

    @property
    def output_layers(self) -> list[nn.Module]:
        """The output matrix; none if only some tokens have logits."""
        return [] if "centroids" in self else [self.output]

    def name_part(self, name: str) -> str:
        return {"output": "head", "centroids": "router"}.get(name, "blocks")


def find_read_layers(drafter: Drafter, model: nn.Module, name: str) -> dict[str, int]:
    """Type of an assistant's layers -> the number of the target's layer whose cache they read.

    Refuses a target whose layers have other sizes.

    Args:
        name: the assistant's, for the error.
    """
    module = get_module_name(model)
    if module not in TARGETS:
        raise CheckpointError(
            f"{name} reads keys and values: expected a target of Gemma 4 ({', '.join(TARGETS)}), "
            f"got {module}"
        )
    text: Any = model.get("language_model", model)
    window = drafter.layers[0].config.sliding_window
    if SLIDING in drafter.args.layer_config["layer_types"] and window != text.args.sliding_window:
        other = text.args.sliding_window
        raise CheckpointError(f"{name} expects sliding_window {window}, the target has {other}")

    found: dict[str, int] = {}
    for layer in drafter.layers:
        kind = layer.layer_type
        for number, other in enumerate(text.layers):
            if other.layer_type == kind and other.self_attn.has_kv:
                found[kind] = number
        if kind not in found:
            raise CheckpointError(f"{name} reads a {kind} layer with a cache, the target has none")
        read = text.layers[found[kind]].self_attn
        for what in ("n_kv_heads", "head_dim"):
            expected = getattr(layer.self_attn, what)
            got = getattr(read, what)
            if expected != got:
                raise CheckpointError(
                    f"{name} expects {what} {expected} in {kind}, "
                    f"the target has {got} in layer {found[kind]}"
                )
    return found


class AssistantSource(StepwiseSource):
    """The source of an assistant. It keeps the target's last state, and reads its cache."""

    drafter: Drafter
    proposes_after_read = True

    def __init__(self, drafter: Drafter, model: nn.Module) -> None:
        super().__init__(drafter, model)
        self._layers = find_read_layers(drafter, model, "the drafter")
        self._window = drafter.layers[0].config.sliding_window
        self._position: mx.array | int = 0

    def keep(self, kept: Kept) -> None:
        super().keep(kept)
        # Queries stand at the last row that layers see, the end of their window.
        self._position = kept.position + kept.n_kept - 1

    def begin(self, root: mx.array, depth: int = 1) -> Advance:
        rows = self._read_cache()

        def advance(tokens: mx.array, state: State) -> tuple[mx.array, State]:
            normed = self._read_tokens(tokens, state, rows)
            return self.drafter.guess(normed), self.drafter.post_projection(normed)

        return advance

    def propose(
        self, root: mx.array, plan: Plan, adjust: Adjust | None, *, in_level_order: bool
    ) -> Tree:
        """See `Source.propose`. Without `adjust`, only the best clusters have logits."""
        if adjust is not None or "centroids" not in self.drafter:
            return super().propose(root, plan, adjust, in_level_order=in_level_order)
        rows = self._read_cache()
        candidates: list[mx.array] = []

        def advance(places: mx.array, state: State) -> tuple[mx.array, State]:
            """Tokens are given as places among the candidates that are in the state."""
            tokens = places
            if state is not None:
                state, ids = state
                tokens = mx.take_along_axis(ids, places[:, None], axis=1)[:, 0]
            normed = self._read_tokens(tokens, state, rows)
            logits, ids = self.drafter.guess_candidates(normed)
            candidates.append(ids)
            return SHARPNESS * logits, (self.drafter.post_projection(normed), ids)

        beams = beam_search.run_alone(beam_search.search(root, plan.width, plan.depth), advance)
        levels = zip(candidates, beams.parents, beams.tokens, strict=True)
        tokens = mx.stack([ids[parents, places] for ids, parents, places in levels])
        return make_tree(root, beams._replace(tokens=tokens), plan, in_level_order)

    def _read_tokens(self, tokens: mx.array, state: State, rows: Rows) -> mx.array:
        assert self._hidden is not None
        states = self._hidden[None] if state is None else state
        return self.drafter.read_tokens(self._embed(tokens), states, rows, self._position)

    def _read_cache(self) -> Rows:
        read: ReadRows | None = self.read_rows
        assert read is not None
        rows: Rows = {}
        for kind, number in self._layers.items():
            keys, values = (x.astype(self.drafter.dtype) for x in read(number))
            if kind == SLIDING:
                keys = keys[..., -self._window :, :]
                values = values[..., -self._window :, :]
            rows[kind] = keys, values
        return rows

    @property
    def arrays(self) -> Any:
        """The last hidden state and its position."""
        return self._hidden, self._position
