"""Tiny models of every module in `mlx_lm.models`, from the configs in models.json, and drafters for them."""

from __future__ import annotations

import json
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
from toys import Scripted, ids, make_ranks, run

from mlx_redrafter.engine import kv_cache
from mlx_redrafter.engine.model_parts import Recorder, find_parts
from mlx_redrafter.generate import Step

CONFIGS: dict[str, dict[str, Any]] = json.loads(Path(__file__).with_name("models.json").read_text(encoding="utf-8"))

WIDE_STREAMS = ("deepseek_v41", "gemma3n", "iquestloopcoder")
"""Modules whose layers do not return one row of the embedding's width per token."""


def modules() -> list[str]:
    """Names of modules that define a model, read from the sources: some cannot be imported on every platform."""
    found = []
    for module in iter_modules(mlx_lm.models.__path__):
        source = (Path(mlx_lm.models.__path__[0]) / f"{module.name}.py").read_text(encoding="utf-8")
        if "\nclass Model(" in source and "class ModelArgs" in source:
            found.append(module.name)
    return sorted(found)


def make_family(name: str, **more: Any) -> nn.Module:
    """A random float32 model. Matrices are scaled by two; constant parameters become random.

    Constant routers, sinks, gates and states would hide errors.

    Args:
        more: replaces keys of the config in models.json, or of its `text_config` if it has one.
    """
    home = import_module(f"mlx_lm.models.{name}")
    mx.random.seed(0)
    config = CONFIGS[name]
    config = config | ({"text_config": config["text_config"] | more} if "text_config" in config else more)
    model: nn.Module = home.Model(home.ModelArgs.from_dict(config))

    def randomise(place: int, x: mx.array) -> mx.array:
        if not mx.issubdtype(x.dtype, mx.floating) or not x.size:
            return x
        x = x.astype(mx.float32)
        if bool((x == x.reshape(-1)[0]).all().item()):
            return x + (0.15 if x.ndim < 2 else 0.3) * mx.random.normal(x.shape, key=mx.random.key(place))
        return x * 2.0 if x.ndim > 1 else x

    flat: Any = tree_flatten(model.parameters())
    model.update(tree_unflatten([(key, randomise(i, x)) for i, (key, x) in enumerate(flat)]))
    mx.eval(model.parameters())
    return model


@contextmanager
def record_hidden_states(model: nn.Module) -> Iterator[list[mx.array]]:
    """Records the final norm's output of every forward, (1, T, D) each."""
    parent, name = find_parts(model).final_norm
    child = parent[name]
    recorder = parent[name] = Recorder(child)
    try:
        yield recorder.outputs
    finally:
        parent[name] = child


def hidden_states(model: nn.Module, text: Sequence[int], size: int, cache: kv_cache.Cache) -> list[mx.array]:
    """Hidden states of `text`, read as plain decoding reads it: a prompt of `size` tokens, then token by token."""
    with record_hidden_states(model) as recorded:
        for part in ([text[: size - 1]] if size > 1 else []) + [[token] for token in text[size - 1 :]]:
            mx.eval(model(mx.array([part]), cache=cache), recorded[-1])
    return recorded


def make_follower(
    model: nn.Module, text: Sequence[int], recorded: Sequence[mx.array], script: str, width: int, seed: int = 5
) -> Scripted:
    """A `Scripted` drafter for any model.

    Args:
        model: the target.
        text: a prompt and its plain continuation, longer than the decoded text.
        recorded: hidden states of `text` from `record_hidden_states` or `hidden_states`; a model check may have
            recorded others before them.
        script, seed: see `make_ranks`.
        width: W.
    """
    with record_hidden_states(model) as once:
        model(mx.array([[0]]))
    last = recorded[len(once) - 1 :: len(once)]  # some models apply the final norm more than once
    hidden = mx.concatenate([part[0] for part in last])[-len(text) :]
    assert hidden.shape[0] == len(text)
    return Scripted(model, text, make_ranks(script, len(text), width, seed=seed, share=0.5), width, hidden)


def follow_plain(
    model: nn.Module,
    prompt: Sequence[int],
    count: int,
    script: str,
    *,
    width: int,
    script_seed: int = 5,
    **options: Any,
) -> tuple[list[Step], Scripted]:
    """Returns (`count` plain steps, a drafter that follows `script` on that text), as `with_plain` in toys.py."""
    with record_hidden_states(model) as recorded:
        steps = run(model, prompt, max_tokens=count + 8, **options)
    return steps[:count], make_follower(model, [*prompt, *ids(steps)], recorded, script, width, script_seed)
