"""A drafter that was found, as a module: whole in memory, or reading its matrices whenever they are used."""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_unflatten

from ..checkpoints import expected_shapes, split_rows
from ..drafters.recurrent import Drafter
from .finding import Found


def whole(found: Found) -> Drafter:
    """The drafter as it is stored, in memory; no tensor is there twice."""
    drafter = Drafter(found.args)
    for name, shape in expected_shapes(found.args).items():
        array = mx.zeros(shape, found.read(name, 0, 1).dtype)
        for start, stop in split_rows(shape):
            array[start:stop] = found.read(name, start, stop)
            mx.eval(array)
        drafter.load_weights([(name, array)], strict=False)
        del array
    return drafter


class Streamed(nn.Module):
    """A linear layer that reads its matrix whenever it is called, a few rows at a time."""

    def __init__(self, found: Found, name: str) -> None:
        super().__init__()
        shapes = expected_shapes(found.args)
        shape = shapes[f"{name}.weight"]
        self._read = lambda start, stop: found.read(f"{name}.weight", start, stop)
        self._chunks = tuple(split_rows(shape))
        self.weight = self._read(0, 1)[:0]  # no rows, but the dtype
        if bias := shapes.get(f"{name}.bias"):
            self.bias = found.read(f"{name}.bias", 0, bias[0])

    def __call__(self, x: mx.array) -> mx.array:
        """(..., out) of an x of (..., in)."""
        parts = []
        for start, stop in self._chunks:
            rows = self._read(start, stop).T
            parts.append(mx.addmm(self.bias[start:stop], x, rows) if "bias" in self else x @ rows)
            mx.eval(parts[-1])
            del rows
        return mx.concatenate(parts, axis=-1)


def streamed(found: Found) -> Drafter:
    """The drafter as it is stored, without its matrices in memory: for a few outputs."""
    return restreamed(Drafter(found.args), found)


def restreamed(drafter: Drafter, found: Found) -> Drafter:
    """The same drafter, whose matrices that are not quantized are read from `found` when they are used."""
    linear = [name for name, module in drafter.named_modules() if isinstance(module, nn.Linear)]
    drafter.update_modules(tree_unflatten([(name, Streamed(found, name)) for name in linear]))
    return drafter
