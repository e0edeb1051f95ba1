"""Tiny models of every module in `mlx_lm.models`, from the configs in models.json, and a drafter with a script."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
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

from mlx_redrafter import kv
from mlx_redrafter.anatomy import anatomy
from mlx_redrafter.drafter import DrafterArgs
from mlx_redrafter.seams import tapped
from mlx_redrafter.types import Tree

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
    """A `Scripted` drafter for any model: it learns the hidden states as plain decoding meets them, token by token.

    Args:
        model: the target.
        text: a prompt and its plain continuation, longer than what will be decoded.
        size: how long the prompt is.
        ranks: for each position of `text`, which of the candidates its token is, or -1 for none of them.
        width: W.
        cache: an empty one like that which will be decoded with.
    """

    def __init__(
        self, model: nn.Module, text: Sequence[int], size: int, ranks: Sequence[int], width: int, cache: kv.Cache
    ) -> None:
        self._text, self._ranks, self._width = mx.array(text), mx.array(ranks), width
        table, place = anatomy(model)
        kept: list[mx.array] = []
        for part in ([self._text[: size - 1]] if size > 1 else []) + list(mx.split(self._text, len(text)))[size - 1 :]:
            with tapped(place) as tap:
                logits = model(part[None], cache=cache)
            mx.eval(logits, tap.kept[-1])
            kept.append(tap.kept[-1][0])
        self._hidden = mx.concatenate(kept)
        self._tokens = mx.arange(logits.shape[-1])
        self._rows = table(self._tokens)
        mx.eval(self._text, self._ranks, self._hidden, self._tokens, self._rows)
        dims = self._hidden.shape[-1]
        self.args = DrafterArgs(dims, logits.shape[-1], 2 * dims, 0)


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


def contents(cache: kv.Cache) -> list[mx.array]:
    """What a cache holds, in the order of positions; of a ring what the next token will see."""
    found: list[mx.array] = []
    for c in kv.leaves(cache):
        if getattr(c, "keys", 0) is None:
            continue
        if isinstance(c, RotatingKVCache):
            seen = min(c.offset, c.max_size - 1)
            kept = min(c.keep, seen)
            for x in (c._temporal_order(c.keys), c._temporal_order(c.values)):
                found += [x[..., :kept, :], x[..., x.shape[-2] - (seen - kept) :, :]]
        elif isinstance(c, kv.LINEAR):
            rows = c.offset - getattr(c, "start_position", 0)
            flat: Any = tree_flatten([c.keys, c.values])
            found += [x[..., :rows, :] for _, x in flat]
        else:
            flat = tree_flatten(list(vars(c).values()))
            found += [x for _, x in flat if isinstance(x, mx.array)]
    return found
