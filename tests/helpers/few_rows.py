"""Takes the place of the kernel for a few rows, which needs Metal."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import mlx.core as mx
import pytest

from mlx_redrafter.measuring import pair, verdicts
from mlx_redrafter.target import few_rows
from mlx_redrafter.target.few_rows import Matmul


class OneByOne:
    """Computes each row alone, and records the matmuls."""

    def __init__(self):
        self.matmuls = []

    def __call__(self, matmul: Matmul, x: mx.array, *weights: mx.array) -> mx.array:
        self.matmuls.append(matmul)
        rows = mx.split(x.reshape(matmul.n_rows, matmul.n_inputs), matmul.n_rows)
        options = {"bits": matmul.bits, "group_size": matmul.group_size}
        y = mx.concatenate([mx.quantized_matmul(row, *weights, **options) for row in rows])
        return y.reshape(*x.shape[:-1], matmul.n_outputs)


class FakeMetal:
    """A machine on which the kernel may be used; no time is measured.

    Attributes:
        matmuls: all that the kernel computed.
        races: the matmuls of each race, those of a whole forward together.
        ms: the time of the kernel for these, where MLX takes 1 ms.
        change: what the kernel returns for a matmul, of the right outputs.
    """

    def __init__(self):
        self._one_by_one = OneByOne()
        self.races = []
        self.ms = lambda matmuls: 0.5
        self.change = lambda matmul, y: y

    @property
    def matmuls(self) -> list[Matmul]:
        return self._one_by_one.matmuls

    def multiply(self, matmul: Matmul, x: mx.array, *weights: mx.array) -> mx.array:
        return self.change(matmul, self._one_by_one(matmul, x, *weights))

    def time_calls(
        self, calls: Mapping[str, Callable[[], Any]], seconds: float, **passes: int | None
    ) -> dict[str, Sequence[float]]:
        start = len(self.matmuls)
        calls["kernel"]()
        raced = {*self.matmuls[start:]}
        self.races.append(raced)
        return {"kernel": [self.ms(raced)], "MLX": [1.0]}


def fake_metal(patch: pytest.MonkeyPatch, compared_outputs: int = 500) -> FakeMetal:
    """Makes this machine look as if it had Metal."""
    machine = FakeMetal()
    patch.setattr(few_rows, "multiply", machine.multiply)
    patch.setattr(verdicts, "time_calls", machine.time_calls)
    patch.setattr(verdicts, "COMPARED_OUTPUTS", compared_outputs)
    patch.setattr(verdicts, "TIMED_BYTES", 1)
    patch.setattr(verdicts, "VERDICT_SECONDS", 1e6)
    patch.setattr(pair, "has_metal", lambda: True)
    return machine
