"""Tiny models of every module in `mlx_lm.models`, from the configs in models.json."""

import json
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules

import mlx.core as mx
import mlx.nn as nn
import mlx_lm.models
from mlx.utils import tree_flatten, tree_unflatten

CONFIGS = json.loads(Path(__file__).with_name("models.json").read_text(encoding="utf-8"))

WIDE_STREAMS = ("deepseek_v41", "gemma3n", "iquestloopcoder")
"""Modules whose layers do not return one state of the embedding's width per token."""


def modules() -> list[str]:
    """Names of modules that define a model.

    They are read from the sources, as some cannot be imported on every platform.
    """
    found = []
    for module in iter_modules(mlx_lm.models.__path__):
        source = (Path(mlx_lm.models.__path__[0]) / f"{module.name}.py").read_text(encoding="utf-8")
        if "\nclass Model(" in source and "class ModelArgs" in source:
            found.append(module.name)
    return sorted(found)


def make_family(name: str, **more) -> nn.Module:
    """A random float32 model. Matrices are scaled by two; constant parameters become random.

    Constant routers, sinks, gates and states would hide errors.

    Args:
        more: replaces keys of the config in models.json, or of its `text_config` if it has one.
    """
    home = import_module(f"mlx_lm.models.{name}")
    config = CONFIGS[name]
    if "text_config" in config:
        more = {"text_config": config["text_config"] | more}
    config = config | more
    return randomise_model(lambda: home.Model(home.ModelArgs.from_dict(config)))


def randomise_model(make: Callable[[], nn.Module]) -> nn.Module:
    """The model that `make` returns, with random parameters, see `make_family`."""
    mx.random.seed(0)
    model = make()

    def randomise(place: int, x: mx.array) -> mx.array:
        if not mx.issubdtype(x.dtype, mx.floating) or not x.size:
            return x
        x = x.astype(mx.float32)
        if bool((x == x.reshape(-1)[0]).all().item()):
            scale = 0.15 if x.ndim < 2 else 0.3
            return x + scale * mx.random.normal(x.shape, key=mx.random.key(place))
        return x * 2.0 if x.ndim > 1 else x

    flat = tree_flatten(model.parameters())
    model.update(tree_unflatten([(key, randomise(i, x)) for i, (key, x) in enumerate(flat)]))
    mx.eval(model.parameters())
    return model


def quantize_linears(model: nn.Module) -> None:
    """Quantizes linear layers to 4 bits, where their size allows it."""

    def is_wide(path: str, layer: nn.Module) -> bool:
        return isinstance(layer, nn.Linear) and layer.weight.shape[1] % 32 == 0

    nn.quantize(model, group_size=32, bits=4, class_predicate=is_wide)
