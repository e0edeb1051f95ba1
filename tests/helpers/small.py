"""Helpers for tests of single stages: the running example of `types.py` and tiny models."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten, tree_map
from mlx_lm.models import llama
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from helpers.toys import make_tokenizer
from mlx_redrafter.drafters.recurrent import Drafter, DrafterArgs
from mlx_redrafter.engine.beam_search import Advance
from mlx_redrafter.engine.types import Beams, Tree

THE = 7
CAT = 11
DOG = 12
SAT = 13
RAN = 14


def example_beams() -> Beams:
    """Beams of the running example: (cat, dog), then (cat sat, cat ran); likelier first."""
    return Beams(
        mx.array([[CAT, DOG], [SAT, RAN]], mx.int32),
        mx.array([[0, 0], [0, 0]], mx.int32),
        mx.log(mx.array([[0.7, 0.3], [0.4, 0.28]])),
    )


def make_tree(tokens: Sequence[int], parents: Sequence[int]) -> Tree:
    """A tree from tokens and parents. Node 0 is the root; each node follows its parent."""
    size = len(tokens)
    depths = [0] * size
    ancestors = [[False] * size for _ in range(size)]
    for node, parent in enumerate(parents):
        if node:
            depths[node] = depths[parent] + 1
            ancestors[node] = list(ancestors[parent])
        ancestors[node][node] = True
    return Tree(mx.array(tokens), mx.array(parents), mx.array(depths), mx.array(ancestors))


def random_advance(seed: int, vocab: int, scale: float = 1.0) -> Advance:
    """A drafter for `beam_search.search` whose logits depend on all tokens so far.

    Its state is a hash of them.
    """
    rng = np.random.default_rng(seed)
    table = mx.array((scale * rng.normal(size=(997, vocab))).astype(np.float32))

    def advance(tokens, state):
        before = mx.zeros_like(tokens) if state is None else state
        state = (before * 31 + tokens + 1) % 997
        return table[state], state

    return advance


def hypotheses(beams: Beams) -> list[list[int]]:
    """Tokens of each hypothesis on the last level, best first, read along the back-pointers."""
    tokens = np.array(beams.tokens)
    parents = np.array(beams.parents)
    found = []
    for rank in range(tokens.shape[1]):
        hypothesis = []
        for level in reversed(range(tokens.shape[0])):
            hypothesis.insert(0, int(tokens[level, rank]))
            rank = parents[level, rank]
        found.append(hypothesis)
    return found


def randomised(module: nn.Module, seed: int, scale: float = 0.3):
    """Draws every parameter at random, so that tests do not depend on initial values."""
    rng = np.random.default_rng(seed)

    def draw(x):
        return mx.array(rng.normal(0, scale, x.shape).astype(np.float32))

    module.update(tree_map(draw, module.parameters()))
    mx.eval(module.parameters())
    return module


def small_drafter(
    *,
    hidden: int = 32,
    vocab: int = 64,
    exit_dim: int = 64,
    layers: int = 1,
    rnn: bool = True,
    seed: int = 0,
) -> Drafter:
    return randomised(Drafter(DrafterArgs(hidden, vocab, exit_dim, layers, rnn)), seed)


def partial_drafter(whole: Drafter, guessed: np.ndarray) -> Drafter:
    """Removes the head's vectors of all tokens that are not in `guessed`."""
    args = replace(whole.args, draft_vocab_size=len(guessed))
    drafter = Drafter(args)
    arrays = dict(tree_flatten(whole.parameters()))
    head = f"lm_head.{args.num_draft_layers}.weight"
    arrays |= {
        head: arrays[head][mx.array(guessed)],
        "draft_ids": mx.array(guessed.astype(np.int32)),
    }
    drafter.load_weights(list(arrays.items()))
    return drafter


def small_llama(
    *, hidden: int = 32, vocab: int = 64, layers: int = 2, kv_heads: int = 1, seed: int = 0, **more
) -> llama.Model:
    args = llama.ModelArgs(
        model_type="llama",
        hidden_size=hidden,
        num_hidden_layers=layers,
        intermediate_size=2 * hidden,
        num_attention_heads=2,
        num_key_value_heads=kv_heads,
        rms_norm_eps=1e-5,
        vocab_size=vocab,
        **more,
    )
    return randomised(llama.Model(args), seed)


def make_byte_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer of an end token and 256 bytes that `AutoTokenizer` can load."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {"<end>": 0, **{c: i for i, c in enumerate(alphabet, 1)}}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>")


CHAT = (
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
"""A chat template."""


def add_chat_template(tokenizer):
    """mlx-lm's wrapper of a tokenizer, with `CHAT`."""
    tokenizer._tokenizer.chat_template = CHAT
    return type(tokenizer)(tokenizer._tokenizer)


def save_target(directory: Path, model=None, tokenizer=None, **config):
    """Saves a target for `mlx_lm.load`.

    Args:
        model: an mlx-lm model; by default a small Llama.
        tokenizer: a transformers tokenizer; by default of single characters.
        config: more keys for config.json.
    """
    model = model or small_llama()
    (tokenizer or make_tokenizer()._tokenizer).save_pretrained(directory)
    arrays = dict(tree_flatten(model.parameters()))
    mx.save_safetensors(str(directory / "model.safetensors"), arrays)
    known = {name: value for name, value in vars(model.args).items() if value is not None}
    (directory / "config.json").write_text(json.dumps(known | config), encoding="utf-8")
