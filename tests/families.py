"""Tiny models of every module in `mlx_lm.models`, from the configs in models.json, and a drafter with a script."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx_lm.models
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.models.cache import RotatingKVCache
from toys import Scripted

from mlx_redrafter.drafters.recurrent import DrafterArgs
from mlx_redrafter.engine import kv_cache
from mlx_redrafter.engine.supported_models import OutputRecorder, find_parts
from mlx_redrafter.engine.types import Tree

CONFIGS: dict[str, dict[str, Any]] = json.loads(Path(__file__).with_name("models.json").read_text(encoding="utf-8"))


def modules() -> list[str]:
    """The names of the modules that define a model, read from their sources: some cannot be imported everywhere."""
    found = []
    for module in iter_modules(mlx_lm.models.__path__):
        source = (Path(mlx_lm.models.__path__[0]) / f"{module.name}.py").read_text(encoding="utf-8")
        if "\nclass Model(" in source and "class ModelArgs" in source:
            found.append(module.name)
    return sorted(found)


def make_family(name: str) -> nn.Module:
    """A random model of a module, in float32: matrices as they are made, twice as large; what is made constant, random.

    Routers, sinks, gates and states that begin as zeros would otherwise hide what is wrong with them.
    """
    home = import_module(f"mlx_lm.models.{name}")
    mx.random.seed(0)
    model: nn.Module = home.Model(home.ModelArgs.from_dict(CONFIGS[name]))

    def lively(place: int, x: mx.array) -> mx.array:
        if not mx.issubdtype(x.dtype, mx.floating) or not x.size:
            return x
        x = x.astype(mx.float32)
        if bool((x == x.reshape(-1)[0]).all().item()):
            return x + (0.15 if x.ndim < 2 else 0.3) * mx.random.normal(x.shape, key=mx.random.key(place))
        return x * 2.0 if x.ndim > 1 else x

    flat: Any = tree_flatten(model.parameters())
    model.update(tree_unflatten([(key, lively(i, x)) for i, (key, x) in enumerate(flat)]))
    mx.eval(model.parameters())
    return model


class Follower(Scripted):
    """A `Scripted` drafter for any model, told the hidden states that plain decoding meets, token by token.

    Args:
        model: the target.
        text: a prompt and its plain continuation, longer than what will be decoded.
        heard: the hidden states of `text`, `overheard` in plain decoding or `read_again`; a check of the model may have
            read something before.
        ranks: for each position of `text`, which of the candidates its token is, or -1 for none of them.
        width: W.
    """

    def __init__(
        self, model: nn.Module, text: Sequence[int], heard: Sequence[mx.array], ranks: Sequence[int], width: int
    ) -> None:
        self._text, self._ranks, self._width = mx.array(text), mx.array(ranks), width
        table, _ = find_parts(model)
        with overheard(model) as once:
            vocab = model(mx.array([[0]])).shape[-1]
        last = heard[len(once) - 1 :: len(once)]  # some models go through their final norm more than once
        self._hidden = mx.concatenate([part[0] for part in last])[-len(text) :]
        assert self._hidden.shape[0] == len(text)
        self._tokens = mx.arange(vocab)
        self._rows = table(self._tokens)
        mx.eval(self._text, self._ranks, self._hidden, self._tokens, self._rows)
        dims = self._hidden.shape[-1]
        self.args = DrafterArgs(dims, vocab, 2 * dims, 0)


@contextmanager
def overheard(model: nn.Module) -> Iterator[list[mx.array]]:
    """What the final norm of every forward meanwhile gives, (1, T, D) each."""
    parent, name = find_parts(model).final_norm
    child = parent[name]
    tap = parent[name] = OutputRecorder(child)
    try:
        yield tap.outputs
    finally:
        parent[name] = child


def read_again(model: nn.Module, text: Sequence[int], size: int, cache: kv_cache.Cache) -> list[mx.array]:
    """The hidden states of a text whose first `size` tokens are the prompt, read into an empty cache as plainly."""
    with overheard(model) as heard:
        for part in ([text[: size - 1]] if size > 1 else []) + [[token] for token in text[size - 1 :]]:
            mx.eval(model(mx.array([part]), cache=cache), heard[-1])
    return heard


def script(kind: str, size: int, width: int) -> list[int]:
    """Ranks for `Follower`: always right, never, or half the time, then in a random rank."""
    generator = random.Random(5)
    half = [generator.randrange(width) if generator.random() < 0.5 else -1 for _ in range(size)]
    return {"right": [0] * size, "wrong": [-1] * size, "half": half}[kind]


def planted(tokens: Sequence[int], parents: Sequence[int]) -> Tree:
    """The tree of these nodes; node 0 is the root, every other stands behind its parent."""
    size = len(tokens)
    depths, ancestors = [0] * size, [[False] * size for _ in range(size)]
    for node, parent in enumerate(parents):
        if node:
            depths[node], ancestors[node] = depths[parent] + 1, list(ancestors[parent])
        ancestors[node][node] = True
    return Tree(mx.array(tokens), mx.array(parents), mx.array(depths), mx.array(ancestors))


def contents(cache: kv_cache.Cache) -> list[mx.array]:
    """What a cache holds, in the order of positions; of a ring what the next token will see."""
    found: list[mx.array] = []
    for c in kv_cache.leaves(cache):
        if getattr(c, "keys", 0) is None:
            continue
        if isinstance(c, RotatingKVCache):
            seen = min(c.offset, c.max_size - 1)
            kept = min(c.keep, seen)
            for x in (c._temporal_order(c.keys), c._temporal_order(c.values)):
                found += [x[..., :kept, :], x[..., x.shape[-2] - (seen - kept) :, :]]
        elif isinstance(c, kv_cache.TRIMMABLE):
            rows = c.offset - getattr(c, "start_position", 0)
            flat: Any = tree_flatten([c.keys, c.values])
            found += [x[..., :rows, :] for _, x in flat]
        else:
            flat = tree_flatten(list(vars(c).values()))
            found += [x for _, x in flat if isinstance(x, mx.array)]
    return found
