"""Tiny targets of mlx-lm's own classes, a scripted drafter, and a tokenizer of single characters.

Models are float32 with widely spread logits. One forward over N nodes and N forwards over one token
agree to about 1e-5, so tests can compare tokens, not just distributions.
"""

from __future__ import annotations

import copy
import functools
import random
import string
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.models.cache import ChunkedKVCache, QuantizedKVCache, RotatingKVCache
from mlx_lm.tokenizer_utils import TokenizerWrapper
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from mlx_redrafter.decoding.generation import Generation, open_generation
from mlx_redrafter.decoding.options import Options
from mlx_redrafter.drafters.protocol import Drafter, Embed, StepwiseSource
from mlx_redrafter.drafters.recurrent import DrafterArgs
from mlx_redrafter.engine.beam_search import Adjust, Advance
from mlx_redrafter.engine.output import DecodedToken
from mlx_redrafter.engine.plan import Plan
from mlx_redrafter.engine.source import Forecast, Source
from mlx_redrafter.engine.tree import chain, grow, prune
from mlx_redrafter.engine.types import Beams, Kept, Tree
from mlx_redrafter.measuring.pair import get_pair
from mlx_redrafter.target import kv_cache
from mlx_redrafter.target.model_parts import get_parts
from mlx_redrafter.target.patches import replace_functions

VOCAB = 40
HEADS_OF_32 = {"head_dim": 32, "num_attention_heads": 4, "num_key_value_heads": 2}
SU = {"long_factor": [1.0 + 0.2 * i for i in range(16)], "short_factor": [1.0] * 16}
LONG = {"max_position_embeddings": 64, "original_max_position_embeddings": 16}

TREE_MODELS = {
    "llama": ("llama", HEADS_OF_32),
    "llama-llama3": ("llama", HEADS_OF_32 | {"rope_scaling": {
        "rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32}}),
    "llama-yarn": ("llama", HEADS_OF_32 | {"rope_scaling": {
        "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}}),
    "llama-linear": ("llama", HEADS_OF_32 | {
        "rope_scaling": {"rope_type": "linear", "factor": 2.0}}),
    "mistral": ("llama", HEADS_OF_32 | {"tie_word_embeddings": False, "rope_traditional": True}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", HEADS_OF_32),
    "phi3": ("phi3", {"partial_rotary_factor": 0.5}),
    "phi3-su": ("phi3", LONG | {"rope_scaling": {"type": "su"} | SU}),
    "phi3-longrope": ("phi3", LONG | {"rope_scaling": {"type": "longrope"} | SU}),
}  # fmt: skip
"""Llama-like modules that take trees, with every rope module: (mlx-lm module, its arguments)."""

LENGTH_BOUND_MODELS = {
    "llama-dynamic": ("llama", HEADS_OF_32 | {
        "max_position_embeddings": 16, "rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}),
}  # fmt: skip
"""A rope whose frequencies depend on the forward's length beyond `max_position_embeddings`."""


@functools.cache
def make_model(
    kind: str = "llama", *, vocab: int = VOCAB, layers: int = 2, spread: float = 6.0, seed: int = 0
) -> nn.Module:
    """A random target with logits spread by `spread`. Tests share it, and must not change it."""
    module, arguments = (TREE_MODELS | LENGTH_BOUND_MODELS)[kind]
    home = import_module(f"mlx_lm.models.{module}")
    config = {
        "model_type": kind.partition("-")[0],
        "hidden_size": 64,
        "num_hidden_layers": layers,
        "vocab_size": vocab,
        "intermediate_size": 96,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "max_position_embeddings": 512,
        "tie_word_embeddings": True,
    }
    model = home.Model(home.ModelArgs.from_dict(config | arguments))
    keys = iter(mx.random.split(mx.random.key(seed), 200))

    def weight(name: str, old: mx.array) -> mx.array:
        if name.endswith("norm.weight"):
            return old * spread / 2 if name == "model.norm.weight" else old
        return mx.random.normal(old.shape, key=next(keys)) * (2.0 * old.shape[-1] ** -0.5)

    old_weights = tree_flatten(model.parameters())
    model.update(tree_unflatten([(name, weight(name, old)) for name, old in old_weights]))
    mx.eval(model.parameters())
    return model


def make_prompt(length: int, *, vocab: int = VOCAB, seed: int = 0) -> list[int]:
    generator = random.Random(1000 * length + seed)
    return [generator.randrange(vocab) for _ in range(length)]


def run(
    model: nn.Module, prompt: Sequence[int] | mx.array, drafter=None, **options
) -> list[DecodedToken]:
    """All steps of one generation. Without a drafter it is plain, unless `context` is set."""
    if drafter is None:
        options = {"context": False} | options
    return list(decode_steps(prompt, model, drafter, Options(**options)))


def decode_steps(
    prompt: Sequence[int] | mx.array, model: nn.Module, drafter, options: Options
) -> Generation:
    """Starts a generation."""
    pair, source = get_pair(model, drafter)
    return open_generation(pair, prompt, options, source)


def ids(steps: Sequence[DecodedToken]) -> list[int]:
    return [step.token for step in steps]


def assert_same_steps(
    steps: Sequence[DecodedToken], plain: Sequence[DecodedToken], *, tolerance: float = 1e-3
):
    """Asserts the same tokens and log-probabilities."""
    assert ids(steps) == ids(plain)
    for mine, theirs in zip(steps, plain, strict=True):
        assert mx.abs(mine.logprobs - theirs.logprobs).max().item() < tolerance


class Scripted(Drafter):
    """A drafter that knows the target's text and is right exactly where its script says so.

    Its state is the path so far: it recognizes tokens by their embeddings, and the start of a draft
    by the hidden state. On the text `width` candidates score high; elsewhere all scores are equal.

    Args:
        model: the target.
        tokens: the prompt and its plain continuation, longer than the decoded text.
        ranks: for each of `tokens`, its rank among the candidates, or -1 if missing.
        width: W.
        hidden: (T, D) hidden states of `tokens`; None runs the model on all of them.
    """

    dtype = mx.float32

    def __init__(
        self,
        model: nn.Module,
        tokens: Sequence[int],
        ranks: Sequence[int],
        width: int,
        hidden: mx.array | None = None,
    ):
        vocab = model(mx.array([[0]])).shape[-1]
        hidden = model.model(mx.array(tokens)[None])[0] if hidden is None else hidden
        size = hidden.shape[-1]
        super().__init__(DrafterArgs(size, vocab, 2 * size, 0))
        self._text = mx.array(tokens)
        self.ranks = list(ranks)
        self._ranks = mx.array(ranks)
        self._hidden = hidden
        self._width = width
        self._tokens = mx.arange(vocab)
        self._embeddings = get_parts(model).embedding(self._tokens)
        mx.eval(self._hidden, self._tokens, self._embeddings, self._text, self._ranks)

    def open(self, model: nn.Module) -> Source:
        return StepwiseSource(self, model)

    def begin(self, hidden: mx.array, embed: Embed) -> Advance:
        def advance(tokens: mx.array, state: mx.array | None) -> tuple[mx.array, mx.array]:
            state = self.advance(embed(tokens), state)
            return self.logits(hidden, state), state

        return advance

    def advance(self, embedding: mx.array, state: mx.array | None) -> mx.array:
        """(W, L) tokens so far."""
        distances = mx.square(embedding[:, None] - self._embeddings[None]).sum(-1)
        token = mx.argmin(distances, axis=1)[:, None]
        return token if state is None else mx.concatenate([state, token], axis=1)

    def logits(self, hidden: mx.array, state: mx.array) -> mx.array:
        """(W, V) scores."""
        length = state.shape[1]
        last = self._text.shape[0] - 1
        place = mx.argmin(mx.square(self._hidden - hidden).sum(-1)) + 1
        so_far = self._text[mx.minimum(place + mx.arange(length), last)]
        on_text = mx.all(state == so_far, axis=1, keepdims=True)
        here = mx.minimum(place + length, last)
        right = self._text[here]
        rank = self._ranks[here]
        others = (self._tokens - right) % self._tokens.shape[0] - 1
        own = mx.where(rank < 0, 99, rank)
        order = mx.where(others < 0, own, others + ((rank >= 0) & (others >= rank)))
        scores = mx.where(order < self._width, 30 - 0.1 * order, 0.0)
        return mx.where(on_text, scores[None], 0.0).astype(mx.float32)


class ScriptedContext(Source):
    """A context source that proposes continuations of random length, sometimes wrong or none.

    Args:
        tokens: the prompt and its plain continuation, longer than the decoded text.
        right: share of correct tokens.
    """

    proposes_after_read = True

    def __init__(self, tokens: Sequence[int], right: float = 0.8, seed: int = 0):
        self._text = list(tokens)
        self._right = right
        self._random = random.Random(seed)
        self._at = 0
        self._tokens = []

    def read(self, tokens: Sequence[int]):
        """Advances past the tokens."""
        self._at += len(tokens)

    confirm = read

    def forecast(self, ahead: int) -> Forecast | None:
        """Mostly optimistic before the previous round is read; then up to six tokens, or none."""
        if ahead:
            return Forecast(0.9, [0.9]) if self._random.random() < 0.8 else None
        count = min(self._random.randrange(7), len(self._text) - self._at)
        self._tokens = self._text[self._at : self._at + count]
        for i, token in enumerate(self._tokens):
            if self._random.random() >= self._right:
                self._tokens[i] = (token + 1) % len(set(self._text))
        return Forecast(1.0, [0.9] * count) if count else None

    def propose(
        self, root: mx.array, plan: Plan, adjust: Adjust | None, *, in_level_order: bool
    ) -> Tree:
        """Proposes the tokens of the last forecast."""
        return chain(root, mx.array(self._tokens[: plan.n_context], mx.int32))


class CachingDrafter(Drafter):
    """A drafter whose sources keep one row per position of the text, like a head's KV cache.

    All guesses are wrong once a row is missing or a rejected row was kept.

    Args:
        model: the target.
        tokens: the prompt and its plain continuation, longer than the decoded text.
        width: W.
        share: share of positions at which a guess is right.
        holes: whether missing rows count as right.
        layers: captured layers, besides the last hidden state.
    """

    dtype = mx.float32

    def __init__(
        self,
        model: nn.Module,
        tokens: Sequence[int],
        width: int,
        *,
        share: float = 0.5,
        holes: bool = False,
        layers: Sequence[int] = (0,),
    ):
        embedding = get_parts(model).embedding
        vocab = model(mx.array([[0]])).shape[-1]
        super().__init__(DrafterArgs(embedding(mx.array(0)).shape[-1], vocab, 8, 0))
        self.tokens = list(tokens)
        self.width = width
        self.holes = holes
        self.ranks = mx.array([*make_ranks("mixed", len(tokens), width, share=share), *[-1] * 64])
        self.capture = *layers, "after_norm"

    def open(self, model: nn.Module) -> CachingSource:
        return CachingSource(self)


class CachingSource(Source):
    """State of a `CachingDrafter`: a row per position, checked against tokens and states."""

    reads_all = True

    def __init__(self, drafter):
        self.drafter = drafter
        self._script = drafter
        self.capture = drafter.capture
        self._rows = mx.array([-1] * (len(drafter.tokens) + 64))
        self._length = 0

    def keep(self, kept: Kept):
        """Writes the kept rows without reading their number."""
        for name in self.capture:
            assert kept.hidden[name].shape == (kept.tokens.shape[0], self._script.args.hidden_size)
        tokens = kept.rows(kept.tokens)
        steps = mx.arange(tokens.shape[0])
        places = kept.position + steps
        self._rows[places] = mx.where(steps < kept.n_kept, tokens, self._rows[places])
        self._length = kept.position + kept.n_kept

    def rewind(self, count: int):
        """Drops the last rows."""
        self._length = mx.array(self._length) - count
        self._rows = mx.where(mx.arange(self._rows.shape[0]) < self._length, self._rows, -1)

    def fork(self) -> CachingSource:
        other = copy.copy(self)
        other._rows = mx.array(self._rows)
        return other

    def propose(
        self, root: mx.array, plan: Plan, adjust: Adjust | None, *, in_level_order: bool
    ) -> Tree:
        """A beam of `width` that holds the right token at some depths."""
        script = self._script
        places = mx.arange(self._rows.shape[0])
        text = mx.array([*script.tokens, *[0] * 64])
        same = (self._rows == text) | (places >= self._length)
        if script.holes:
            same |= self._rows == -1
        is_whole = mx.all(same) & (root == text[self._length])
        depths = mx.arange(1, plan.depth + 1)
        right = text[self._length + depths]
        ranks = script.ranks[self._length + depths]
        ranks = mx.where(ranks < plan.width, ranks, -1)
        columns = mx.arange(plan.width)
        tokens = (right[:, None] + 1 + columns) % script.args.vocab_size
        tokens = mx.where((columns == ranks[:, None]) & is_whole, right[:, None], tokens)
        above = mx.concatenate([mx.zeros((1,), mx.int32), mx.maximum(ranks[:-1], 0)])
        parents = mx.broadcast_to(above[:, None], tokens.shape)
        scores = -1.0 * mx.arange(tokens.size).reshape(tokens.shape)
        beams = Beams(tokens.astype(mx.int32), parents.astype(mx.int32), scores)
        tree = grow(root, beams)
        return tree if in_level_order else prune(tree, beams, plan.size)

    @property
    def arrays(self):
        """The rows and their number."""
        return self._rows, self._length


class Broken(Exception):
    """The error of a failing drafter."""


def fail_at(drafter, calls: int):
    """Makes the drafter raise from call number `calls` on."""
    left = iter(range(calls))
    real = type(drafter).logits

    def logits(*given) -> mx.array:
        if next(left, None) is None:
            raise Broken(f"call {calls}")
        return real(drafter, *given)

    drafter.logits = logits
    return drafter


SCRIPTS = ("right", "wrong", "mixed")


def make_ranks(
    script: str, size: int, width: int, *, seed: int = 0, share: float = 0.6
) -> list[int]:
    """Ranks for `Scripted`: always right, never, or a random rank at a `share` of the positions."""
    generator = random.Random(seed)
    mixed = [generator.randrange(width) if generator.random() < share else -1 for _ in range(size)]
    return {"right": [0] * size, "wrong": [-1] * size, "mixed": mixed}[script]


def scripted(
    model: nn.Module, tokens: Sequence[int], script: str, *, width: int, seed: int = 0
) -> Scripted:
    return Scripted(model, tokens, make_ranks(script, len(tokens), width, seed=seed), width)


@contextmanager
def record_hidden_states(model: nn.Module) -> Iterator[list[mx.array]]:
    """Records the final norm's output of every forward, (1, T, D) each."""
    recorded = []

    def record(norm: nn.Module, *args, **kwargs):
        out = norm(*args, **kwargs)
        recorded.append(out[0] if isinstance(out, tuple) else out)
        return out

    with replace_functions([(get_parts(model).final_norm, record)]):
        yield recorded


def make_follower(
    model: nn.Module,
    tokens: Sequence[int],
    recorded: Sequence[mx.array],
    script: str,
    width: int,
    seed: int = 5,
) -> Scripted:
    """A `Scripted` drafter for any model.

    Args:
        model: the target.
        tokens: a prompt and its plain continuation, longer than the decoded text.
        recorded: hidden states of `tokens` from `record_hidden_states`; a model check may have
            recorded others before.
        script, seed: see `make_ranks`.
        width: W.
    """
    with record_hidden_states(model) as once:
        model(mx.array([[0]]))
    last = recorded[len(once) - 1 :: len(once)]  # some models apply the final norm more than once
    hidden = mx.concatenate([part[0] for part in last])[-len(tokens) :]
    assert hidden.shape[0] == len(tokens)
    ranks = make_ranks(script, len(tokens), width, seed=seed, share=0.5)
    return Scripted(model, tokens, ranks, width, hidden)


def with_plain(
    model: nn.Module,
    prompt: Sequence[int],
    count: int,
    script: str,
    *,
    width: int,
    script_seed: int = 5,
    **options,
) -> tuple[list[DecodedToken], Scripted]:
    """Returns (`count` plain steps, a drafter that follows `script` on that text)."""
    with record_hidden_states(model) as recorded:
        steps = run(model, prompt, max_tokens=count + 8, **options)
    tokens = [*prompt, *ids(steps)]
    return steps[:count], make_follower(model, tokens, recorded, script, width, script_seed)


BEAMS = {
    "chain": {"beam_width": 1, "draft_depth": 4},
    "tree": {"beam_width": 3, "draft_depth": 3},
    "pruned tree": {"beam_width": 3, "draft_depth": 4, "tree_size": 9},
}
"""Plans that most tests run."""


def contents(cache: Sequence[Any]) -> list[mx.array]:
    """Rows and states by position, dequantized.

    For ring buffers and chunks, those that the next token attends to.
    """
    found = []
    for c in kv_cache.leaves(list(cache)):
        if not isinstance(c, kv_cache.TRIMMABLE):
            flat = tree_flatten(list(vars(c).values()))
            found += [x for _, x in flat if isinstance(x, mx.array)]
            continue
        for x in (c.keys, c.values):
            if x is None:
                continue
            if isinstance(c, RotatingKVCache):
                x = c._temporal_order(x)
                seen = min(c.offset, c.max_size - 1)
                kept = min(c.keep, seen)
                found += [x[..., :kept, :], x[..., x.shape[-2] - (seen - kept) :, :]]
                continue
            if isinstance(c, QuantizedKVCache):
                x = mx.dequantize(*x, group_size=c.group_size, bits=c.bits)
            first = 0
            if isinstance(c, ChunkedKVCache):
                first = max(0, c.offset - c.chunk_size - c.start_position)
            found.append(x[..., first : c.offset - getattr(c, "start_position", 0), :])
    return found


def assert_same_cache(cache: Sequence[Any], other: Sequence[Any], *, tolerance: float = 1e-4):
    """Asserts the same rows and states, in caches of the same types."""
    kinds = [
        [(type(c), getattr(c, "offset", None)) for c in kv_cache.leaves(list(each))]
        for each in (cache, other)
    ]
    assert kinds[0] == kinds[1]
    for mine, theirs in zip(contents(cache), contents(other), strict=True):
        assert mine.shape == theirs.shape
        far = mx.abs(mine - theirs)
        assert mx.allclose(mine, theirs, rtol=tolerance, atol=tolerance), far


def snapshot(model: nn.Module) -> tuple[Any, ...]:
    """What a generation must not change: modules, parameter order and logits."""
    modules = [(name, id(module)) for name, module in model.named_modules()]
    parameters = [name for name, _ in tree_flatten(model.parameters())]
    keys = [list(module) for _, module in model.named_modules()]
    return modules, parameters, keys, model(mx.array([[1, 2, 3, 4, 5]])).tolist()


ALPHABET = "\n" + string.ascii_letters + "".join(map(chr, range(0x400, 0x500)))
"""Latin and Cyrillic letters, one for each token."""


def make_tokenizer(eos: Sequence[int] = (), vocab: int = VOCAB) -> TokenizerWrapper:
    """A tokenizer whose token i is the i-th letter of `ALPHABET`."""
    letters = {ALPHABET[i]: i for i in range(vocab)}
    inner = Tokenizer(models.WordLevel(letters, unk_token="a"))
    inner.pre_tokenizer = pre_tokenizers.Split(Regex("[\\s\\S]"), "isolated")
    inner.decoder = decoders.Fuse()
    outer = PreTrainedTokenizerFast(tokenizer_object=inner)
    return TokenizerWrapper(outer, eos_token_ids=list(eos))
