"""Which of mlx-lm's models draft, in trees or chains, and where a model has its parts.

A module that is in none of the lists drafts chains, if its cache is one of mlx-lm's own. tests/engine covers each.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypeVar

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import RotatingKVCache, make_prompt_cache

from ..errors import UnsupportedModelError, one_line
from . import kv_cache
from .tree_attention import MODEL_LOCK, Nodes, build_with_nodes

T = TypeVar("T")


def _names(text: str) -> tuple[str, ...]:
    return tuple(text.split())


TREES = _names(
    """
    Klear afm7 afmoe apertus bailing_moe cohere cohere2 dbrx deepseek deepseek_v2 deepseek_v3 deepseek_v32 dots1
    ernie4_5 ernie4_5_moe exaone exaone4 exaone_moe gemma gemma2 gemma3 gemma3_text gemma3n gemma4 gemma4_text glm
    glm4 glm4_moe glm4_moe_lite glm_moe_dsa gpt_neox gpt_oss gptj granite granitemoe helium hunyuan hunyuan_v1_dense
    iquestloopcoder kimi_k25 kimi_vl laguna lille-130m llama llama4 llama4_text longcat_flash mellum mimo
    mimo_v2_flash minicpm minicpm3 minimax ministral3 mistral3 mistral4 mixtral muse_glimmer nanbeige nanochat
    nemotron nemotron-nas olmo2 olmo3 olmoe openelm phi phi3 phimoe phixtral pixtral plamo plamo3 qwen qwen2 qwen2_moe
    qwen2_vl qwen3 qwen3_moe qwen3_vl qwen3_vl_moe seed_oss smollm3 spark2_5 stablelm starcoder2 step3p5 talkie
    telechat3 youtu_llm
    """
)
"""Modules that verify several continuations at once."""

LENGTH_BOUND = "its rope turns with the length of the text"

CHAINS = {
    "gpt2": "its learned positions are counted on from the first one",
    "gpt_bigcode": "its learned positions are counted on from the first one",
    "internlm2": LENGTH_BOUND,
    "internlm3": LENGTH_BOUND,
    "minimax_m3_vl": "it cuts its blocks over the rows of the cache, where nodes stand beside each other",
}
"""Modules whose cache can be trimmed but that verify a chain only, and why."""

REPLAYED = _names(
    """
    baichuan_m1 bailing_hybrid bailing_moe_linear bailing_moe_v3 deepseek_v41 falcon_h1 gear granitemoehybrid
    jamba kimi_k3 kimi_linear lfm2 lfm2-vl lfm2_moe longcat_flash_ngram mamba mamba2 nemotron_h olmo_hybrid
    plamo2 prism_hadamard_qwen35 qwen3_5 qwen3_5_moe qwen3_next recurrent_gemma rwkv7
    """
)
"""Modules with states that cannot be trimmed: chains, and accepted tokens are replayed."""

REFUSED = {
    "olmo": "it cannot read several tokens at once: it adds the name of the mask to the scores",
    "phi3small": "its block-sparse layers let a token see those after it in the same forward",
}
"""Modules whose rounds would not decode what plain decoding does, and why."""

METAL_ONLY = ("bitnet", "muse_spark")
"""Modules that run on Metal kernels alone, where they were never tested: chains, untested."""

EMBEDDINGS = _names(
    "embed_tokens wte embeddings word_embeddings tok_embeddings token_embeddings embed_in embedding embed"
)
"""The names under which mlx-lm's models keep their token embedding."""

NORMS = _names("norm final_layernorm final_layer_norm embedding_norm final_norm output_norm norm_f norm_out ln_f")
"""The names of the norm in front of the head."""

OTHER_MODALITIES = ("vision", "audio", "multi_modal", "mm_")
"""How the names of modules begin that do not read text."""

ROPE_MARGIN = 256
"""Some dynamic ropes count a little more than the length of a text: its heads, too."""


class Slot(NamedTuple):
    """The place of a child module."""

    parent: nn.Module
    name: str


class ModelParts(NamedTuple):
    """The parts of a model that a drafter needs.

    Attributes:
        embedding: the token embedding.
        final_norm: the place whose output is the drafter's input: the final norm, or the model without its head where
            the norm is not a module.
    """

    embedding: nn.Module
    final_norm: Slot


def find_parts(model: nn.Module) -> ModelParts:
    """Where `model` has them: read off its modules, nothing is computed.

    Raises:
        UnsupportedModelError: it has no token embedding where mlx-lm's language models have one.
    """
    for path in _walk_modules(model):
        holder = path[-1].parent[path[-1].name]
        embedding = next((holder[key] for key in EMBEDDINGS if _is_embedding(holder.get(key))), None)
        if embedding is None:
            continue
        # The embedding may be a level below the module that has the norm, and the norm may not be a module.
        for slot in reversed(path):
            inner = slot.parent[slot.name]
            if norm := next((key for key in NORMS if isinstance(inner.get(key), nn.Module)), None):
                return ModelParts(embedding, Slot(inner, norm))
        with_layers = (slot for slot in reversed(path) if _has_layers(slot.parent[slot.name]))
        return ModelParts(embedding, next(with_layers, path[-1]))
    raise UnsupportedModelError(
        f"cannot draft for this model: expected model.embed_tokens as in mlx-lm's language models, "
        f"{type(model).__module__}.{type(model).__name__} has none"
    )


def has_final_norm(model: nn.Module) -> bool:
    """Whether a model's final norm is a module, so that the hidden state before it can be read."""
    return find_parts(model).final_norm.name in NORMS


def _walk_modules(model: nn.Module) -> Iterator[list[Slot]]:
    """The path from `model` to every module below it, breadth first; not into layers, nor into images or audio."""
    level: list[list[Slot]] = [[]]
    while level:
        below = []
        for path in level:
            parent = path[-1].parent[path[-1].name] if path else model
            items: Any = parent.items()
            names = [name for name, child in items if isinstance(child, nn.Module)]
            below += [[*path, Slot(parent, name)] for name in names if not name.startswith(OTHER_MODALITIES)]
        yield from below
        level = below


def _has_layers(module: nn.Module) -> bool:
    items: Any = module.values()
    return any(isinstance(child, list) for child in items)


def _is_embedding(module: Any) -> bool:
    return isinstance(module, (nn.Embedding, nn.QuantizedEmbedding))


def compute_dtype(model: nn.Module) -> mx.Dtype:
    """What a model computes in: the dtype of its embedding's rows."""
    dtype: mx.Dtype = find_parts(model).embedding(mx.zeros((1,), mx.int32)).dtype
    return dtype


def model_sizes(model: nn.Module) -> tuple[int, int]:
    """(hidden size D, vocabulary size V) of a model; nothing is computed.

    Raises:
        UnsupportedModelError: see `find_parts`.
    """
    token = mx.zeros((1, 1), mx.int32)
    return find_parts(model).embedding(token).shape[-1], model(token).shape[-1]


def model_name(model: nn.Module) -> str:
    """The name of its module in `mlx_lm.models`."""
    return type(model).__module__.rpartition(".")[2]


class OutputRecorder(nn.Module):
    """Passes its module's output on, and keeps it, or its input, when the thread that made the recorder calls."""

    def __init__(self, module: nn.Module, *, want_input: bool = False) -> None:
        super().__init__()
        self.module = module
        self._want_input = want_input
        self.outputs: list[mx.array] = []
        self._thread = threading.get_ident()

    def __call__(self, *args: Any, **kwargs: Any) -> mx.array:
        out = self.module(*args, **kwargs)
        if threading.get_ident() == self._thread:
            self.outputs.append(args[0] if self._want_input else out)
        return out

    def __getattr__(self, name: str) -> Any:
        if name in self:
            return self[name]
        return getattr(self["module"], name) if "module" in self else super().__getattr__(name)


def capture_output(slot: Slot, call: Callable[[], T], *, want_input: bool = False) -> tuple[T, list[mx.array]]:
    """(what `call` returns, what the child in `slot` returned meanwhile, or with `want_input` was given).

    The dictionary entry is replaced, not the attribute set: a module's order of parameters stays as it was.
    """
    with MODEL_LOCK:
        parent, name = slot
        child = parent[name]
        recorder = OutputRecorder(child, want_input=want_input)
        try:
            parent[name] = recorder
            return call(), recorder.outputs
        finally:
            parent[name] = child


def exact_until(model: nn.Module) -> int | None:
    """The text length up to which several rows in one forward give what they give one by one; None for any.

    Dynamic ropes turn all tokens of a forward alike, by the length at its end, once that is beyond a bound.
    """
    ropes = (module for _, module in model.named_modules() if type(module).__name__ == "DynamicNTKScalingRoPE")
    return min((rope.max_position_embeddings - ROPE_MARGIN for rope in ropes), default=None)


def check_verifiable(model: nn.Module, cache: kv_cache.Cache | None = None) -> None:
    """Refuses a model whose rounds could not be exact, whatever drafts.

    What it asks of a caller's rings is looked at on a forward that is built but never computed.

    Args:
        cache: a prompt cache of the caller's, whose rings may differ from the model's own.

    Raises:
        UnsupportedModelError: with the reason.
    """
    name = model_name(model)
    if reason := REFUSED.get(name):
        raise UnsupportedModelError(f"cannot draft for {name}: {reason}")
    unknown = kv_cache.unknown_types(make_prompt_cache(model), kv_cache.KNOWN)
    if unknown and name not in REPLAYED:
        raise UnsupportedModelError(f"cannot draft for {name}: its cache ({', '.join(unknown)}) is not known")
    if cache is not None and kv_cache.has_ring(cache):
        like = [
            RotatingKVCache(c.max_size, c.keep) if isinstance(c, RotatingKVCache) else own
            for c, own in zip(cache, make_prompt_cache(model), strict=True)
        ]
        chain = Nodes(0, mx.arange(2), mx.tri(2, dtype=mx.bool_), branched=False)
        build_with_nodes(like, chain, lambda views: model(mx.zeros((1, 2), mx.int32), cache=views))


def check_draftable(model: nn.Module, *, tree: bool, cache: kv_cache.Cache | None = None) -> str | None:
    """Refuses a model for which no drafter could draft; returns why it takes chains only, None where it takes trees.

    Args:
        tree: whether rounds are to branch; without, None is returned.
        cache: see `check_verifiable`.

    Raises:
        UnsupportedModelError: with the reason.
    """
    check_verifiable(model, cache)
    name = model_name(model)
    embedding, final_norm = find_parts(model)
    token, probe = mx.zeros((1, 1), mx.int32), make_prompt_cache(model)
    _, outputs = capture_output(final_norm, lambda: model(token, cache=probe))
    hidden = outputs[-1].shape[-1] if outputs else None
    width = embedding(token).shape[-1]
    if hidden != width:
        raise UnsupportedModelError(
            f"cannot draft for {name}: a row of its embedding has {width} numbers, its last hidden state {hidden}"
        )
    return explain_chains(model) if tree else None


def explain_chains(model: nn.Module) -> str | None:
    """Why a model takes chains only; None where it takes trees. See `check_verifiable` for what it takes at all."""
    name = model_name(model)
    if reason := CHAINS.get(name):
        return reason
    if exact_until(model) is not None:
        return LENGTH_BOUND
    cache = make_prompt_cache(model)
    if states := kv_cache.unknown_types(cache, kv_cache.TRIMMABLE):
        return f"its cache ({', '.join(states)}) takes tokens one after the other"
    if name not in TREES:
        return "trees are not tested for it"
    nodes = Nodes(0, mx.array([0, 1, 1]), mx.array([[1, 0, 0], [1, 1, 0], [1, 0, 1]]) > 0, branched=True)
    try:
        built = build_with_nodes(cache, nodes, lambda views: model(mx.zeros((1, 3), mx.int32), cache=views))
    except Exception as error:
        return f"it does not take one position for each node: {one_line(error)}"
    if not built.masks and "mask" not in built.calls:
        return "its mask does not come from its cache"
    if any(view.offsets_read for view in kv_cache.leaves(built.views)) and not {"rope", "arange"} & set(built.calls):
        return "its positions do not come from its cache"
    return None
