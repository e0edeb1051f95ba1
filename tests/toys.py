"""Tiny targets of mlx-lm's own classes, drafters that follow a script, a tokenizer of single characters.

Everything is float32, and the logits are spread wide: the rows of one forward over N nodes and of N forwards over
one token agree to about 1e-5, so that tokens can be compared, not only distributions.
"""

from __future__ import annotations

import functools
import random
import string
from collections.abc import Sequence
from importlib import import_module
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.models.cache import QuantizedKVCache
from mlx_lm.tokenizer_utils import TokenizerWrapper
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from mlx_redrafter.drafters.recurrent import DrafterArgs
from mlx_redrafter.engine.types import Beams
from mlx_redrafter.generate import Step, decode_tokens
from mlx_redrafter.options import Options

VOCAB = 40
HEADS_OF_32 = {"head_dim": 32, "num_attention_heads": 4, "num_key_value_heads": 2}
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "decoder_sparse_step": 1, "mlp_only_layers": [],
       "moe_intermediate_size": 48, "norm_topk_prob": True}  # fmt: skip
SU = {"long_factor": [1.0 + 0.2 * i for i in range(16)], "short_factor": [1.0] * 16}
LONG = {"max_position_embeddings": 64, "original_max_position_embeddings": 16}

KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", HEADS_OF_32),
    "llama-llama3": ("llama", HEADS_OF_32 | {"rope_scaling": {
        "rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32}}),
    "llama-yarn": ("llama", HEADS_OF_32 | {"rope_scaling": {
        "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}}),
    "llama-linear": ("llama", HEADS_OF_32 | {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}),
    "mistral": ("llama", HEADS_OF_32 | {"tie_word_embeddings": False, "rope_traditional": True}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", HEADS_OF_32),
    "phi3": ("phi3", {"partial_rotary_factor": 0.5}),
    "phi3-su": ("phi3", LONG | {"rope_scaling": {"type": "su"} | SU}),
    "phi3-longrope": ("phi3", LONG | {"rope_scaling": {"type": "longrope"} | SU}),
    "gemma": ("gemma", HEADS_OF_32),
    "mixtral": ("mixtral", {"num_local_experts": 4}),
    "qwen3_moe": ("qwen3_moe", HEADS_OF_32 | MOE),
}  # fmt: skip
"""Every model type whose trees are served, and every rope module they can have: (module of mlx-lm, its arguments)."""

LENGTH_BOUND: dict[str, tuple[str, dict[str, Any]]] = {
    "llama-dynamic": ("llama", HEADS_OF_32 | {
        "max_position_embeddings": 16, "rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}),
}  # fmt: skip
"""A rope whose frequencies depend on how long a forward is, beyond `max_position_embeddings`."""


@functools.cache
def make_model(
    kind: str = "llama", *, vocab: int = VOCAB, layers: int = 2, spread: float = 6.0, seed: int = 0
) -> nn.Module:
    """A random target whose logits spread by `spread`, shared between tests; none of them may change it."""
    module, arguments = (KINDS | LENGTH_BOUND)[kind]
    home = import_module(f"mlx_lm.models.{module}")
    config = {
        "model_type": kind.partition("-")[0], "hidden_size": 64, "num_hidden_layers": layers, "vocab_size": vocab,
        "intermediate_size": 96, "num_attention_heads": 2, "num_key_value_heads": 1, "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0, "max_position_embeddings": 512, "tie_word_embeddings": True,
    }  # fmt: skip
    model: nn.Module = home.Model(home.ModelArgs.from_dict(config | arguments))
    keys = iter(mx.random.split(mx.random.key(seed), 200))

    def weight(name: str, old: mx.array) -> mx.array:
        if name.endswith("norm.weight"):
            return old * spread / 2 - (module == "gemma") if name == "model.norm.weight" else old
        return mx.random.normal(old.shape, key=next(keys)) * (2.0 * old.shape[-1] ** -0.5)

    model.update(tree_unflatten([(name, weight(name, old)) for name, old in tree_flatten(model.parameters())]))
    mx.eval(model.parameters())
    return model


def make_prompt(length: int, *, vocab: int = VOCAB, seed: int = 0) -> list[int]:
    """Random tokens."""
    generator = random.Random(1000 * length + seed)
    return [generator.randrange(vocab) for _ in range(length)]


def run(model: nn.Module, prompt: Sequence[int] | mx.array, drafter: Any = None, **options: Any) -> list[Step]:
    """Every step of one generation."""
    return list(decode_tokens(prompt, model, drafter, Options(**options)))


def plainly(model: nn.Module, prompt: tuple[int, ...], count: int, **options: Any) -> list[Step]:
    """Plain decoding of a shared model, once for all that ask for the same; not with processors or a cache."""
    if "logits_processors" in options or "prompt_cache" in options:
        return run(model, prompt, max_tokens=count, **options)
    key = id(model), prompt, count, repr(sorted(options.items()))
    if key not in _said:
        _said[key] = model, run(model, prompt, max_tokens=count, **options)
    return list(_said[key][1])


_said: dict[Any, tuple[nn.Module, list[Step]]] = {}
"""What `plainly` has decoded, and the model, so that no other one gets its id."""


def ids(steps: Sequence[Step]) -> list[int]:
    """The tokens of some steps."""
    return [step.token for step in steps]


class Scripted:
    """A drafter that knows what the target will say, and is right exactly where its script says so.

    Its state is the path it has been led along: each token is found again by its embedding. Where in the text a
    draft begins it sees from the hidden state that the engine hands it: only the right one leads anywhere.
    A path that has left the text gets flat scores, the right one `width` good candidates.

    Args:
        model: the target.
        text: the prompt and its plain continuation, longer than what will be decoded.
        ranks: for each position of `text`, which of the candidates its token is, or -1 for none of them.
        width: W.
    """

    dtype = mx.float32

    def __init__(self, model: nn.Module, text: Sequence[int], ranks: Sequence[int], width: int) -> None:
        self._embedding = model.model.embed_tokens
        self._text = mx.array(text)
        self.ranks, self._ranks = list(ranks), mx.array(ranks)
        self._hidden = model.model(self._text[None])[0]
        self._width = width
        vocab = model(mx.array([[0]])).shape[-1]
        self._tokens = mx.arange(vocab)
        self._rows = self._embedding(self._tokens)
        self.args = DrafterArgs(self._hidden.shape[-1], vocab, 2 * self._hidden.shape[-1], 0)
        mx.eval(self._hidden, self._tokens, self._rows, self._text, self._ranks)

    def advance(self, embedding: mx.array, state: mx.array | None) -> mx.array:
        """(W, L) tokens so far."""
        token = mx.argmin(mx.square(embedding[:, None] - self._rows[None]).sum(-1), axis=1)[:, None]
        return token if state is None else mx.concatenate([state, token], axis=1)

    def logits(self, hidden: mx.array, state: mx.array) -> mx.array:
        """(W, V) scores."""
        length, last = state.shape[1], self._text.shape[0] - 1
        place = mx.argmin(mx.square(self._hidden - hidden).sum(-1)) + 1
        so_far = self._text[mx.minimum(place + mx.arange(length), last)]
        on_text = mx.all(state == so_far, axis=1, keepdims=True)
        here = mx.minimum(place + length, last)
        right, rank = self._text[here], self._ranks[here]
        others = (self._tokens - right) % self._tokens.shape[0] - 1
        order = mx.where(others < 0, mx.where(rank < 0, 99, rank), others + ((rank >= 0) & (others >= rank)))
        scores = mx.where(order < self._width, 30 - 0.1 * order, 0.0)
        return mx.where(on_text, scores[None], 0.0).astype(mx.float32)


class Echo(Scripted):
    """A drafter that is sure of itself, and at every depth of the next token: it says that one again and again."""

    def logits(self, hidden: mx.array, state: mx.array) -> mx.array:
        """(W, V) scores."""
        place = mx.argmin(mx.square(self._hidden - hidden).sum(-1)) + 2
        count = self.args.vocab_size
        noise = mx.random.normal((count, count), key=mx.random.key(7)) * 8
        return noise[state[:, -1]] + 25 * (self._tokens == self._text[mx.minimum(place, self._text.shape[0] - 1)])


class Unsound:
    """A drafter that knows nothing, and some of whose scores are no numbers.

    Args:
        model: the target.
        score: stands in the place of every score above `threshold`; the others are random.
    """

    dtype = mx.float32

    def __init__(self, model: nn.Module, score: float, threshold: float) -> None:
        hidden_size, vocab = 64, model(mx.array([[0]])).shape[-1]
        self.args = DrafterArgs(hidden_size, vocab, 2 * hidden_size, 0)
        self._weight = mx.random.normal((hidden_size, vocab), key=mx.random.key(0))
        self._score, self._threshold = score, threshold

    def advance(self, embedding: mx.array, state: mx.array | None) -> mx.array:
        """(W, D) the last embedding."""
        return embedding

    def logits(self, hidden: mx.array, state: mx.array) -> mx.array:
        """(W, V) scores."""
        logits = state @ self._weight
        return mx.where(logits > self._threshold, self._score, logits)


SCRIPTS = ("right", "wrong", "mixed")


def scripted(
    model: nn.Module, text: Sequence[int], script: str, *, width: int, luck: int = 0, share: float = 0.6
) -> Scripted:
    """A drafter that is always right, never, or at a `share` of the positions, and then in a random rank."""
    generator = random.Random(luck)
    mixed = [generator.randrange(width) if generator.random() < share else -1 for _ in text]
    ranks = {"right": [0] * len(text), "wrong": [-1] * len(text), "mixed": mixed}[script]
    return Scripted(model, text, ranks, width)


def with_plain(
    model: nn.Module, prompt: Sequence[int], count: int, script: str, *, width: int, luck: int = 0, **options: Any
) -> tuple[list[Step], Scripted]:
    """(what plain decoding says, `count` steps of it; a drafter that follows `script` beside it)."""
    steps = plainly(model, tuple(prompt), count + 8, **options)
    return steps[:count], scripted(model, [*prompt, *ids(steps)], script, width=width, luck=luck)


def random_beams(width: int, depth: int, *, vocab: int = VOCAB, seed: int = 0) -> Beams:
    """What a beam search may find: distinct (parent, token) pairs on each level, scores that fall."""
    generator = random.Random(seed)
    tokens, parents, scores = [], [], []
    above = [0.0]
    for _ in range(depth):
        pairs = generator.sample([(p, t) for p in range(len(above)) for t in range(vocab)], width)
        level = sorted(((above[p] - generator.random() * 3, p, t) for p, t in pairs), reverse=True)
        above = [score for score, _, _ in level]
        scores.append(above)
        parents.append([p for _, p, _ in level])
        tokens.append([t for _, _, t in level])
    return Beams(mx.array(tokens), mx.array(parents), mx.array(scores))


def rows(cache: Sequence[Any]) -> list[mx.array]:
    """Every layer's keys and values up to the offset, dequantised."""
    found = []
    for c in cache:
        for array in c.keys_and_values():
            if isinstance(c, QuantizedKVCache):
                array = mx.dequantize(*array, group_size=c.group_size, bits=c.bits)
            found.append(array[..., : c.offset, :])
    return found


def assert_same_cache(cache: Sequence[Any], other: Sequence[Any], *, tolerance: float = 1e-4) -> None:
    """Both hold the same rows, in caches of the same types."""
    assert [type(c) for c in cache] == [type(c) for c in other]
    assert [c.offset for c in cache] == [c.offset for c in other]
    for mine, theirs in zip(rows(cache), rows(other), strict=True):
        assert mx.allclose(mine, theirs, rtol=0, atol=tolerance), mx.abs(mine - theirs).max()


def snapshot(model: nn.Module) -> tuple[Any, ...]:
    """What a generation must leave as it was: the modules themselves, the parameters in order, the logits."""
    modules = [(name, id(module)) for name, module in model.named_modules()]
    parameters = [name for name, _ in tree_flatten(model.parameters())]
    keys = [list(module) for _, module in model.named_modules()]
    return modules, parameters, keys, model(mx.array([[1, 2, 3, 4, 5]])).tolist()


ALPHABET = "\n" + string.ascii_letters


def make_tokenizer(eos: Sequence[int] = (), vocab: int = VOCAB) -> TokenizerWrapper:
    """Token i is the i-th letter of `ALPHABET`."""
    inner = Tokenizer(models.WordLevel({ALPHABET[i]: i for i in range(vocab)}, unk_token="a"))
    inner.pre_tokenizer = pre_tokenizers.Split(Regex("[\\s\\S]"), "isolated")
    inner.decoder = decoders.Fuse()
    return TokenizerWrapper(PreTrainedTokenizerFast(tokenizer_object=inner), eos_token_ids=list(eos))
