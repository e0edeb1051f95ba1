"""Where two decodings of one prompt part, and whether rounding explains it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, cast

import mlx.core as mx

OUT_OF_REACH = -20.0
"""Log-probabilities below this decide nothing."""


def first_difference(one: Sequence[int], other: Sequence[int]) -> int | None:
    """The place of the first token that two texts do not share; None when they are equal."""
    differs = next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), None)
    if differs is None and len(one) != len(other):
        return min(len(one), len(other))
    return differs


class Difference(NamedTuple):
    """The first token at which plain and drafted decoding part.

    Attributes:
        token: its place in the text.
        distance: the largest difference of the two sides' log-probabilities there, of tokens that are not out of reach.
        margin: how much of that rounding may explain.
    """

    token: int
    distance: float
    margin: float

    @property
    def rounding(self) -> bool:
        """Whether kernels that round differently for one row and for several explain it; equal rows choose alike."""
        return 0 < self.distance <= self.margin

    @property
    def told(self) -> str:
        """In words."""
        kind = "a tie that rounding decides" if self.rounding else "more than rounding explains: please report it"
        return (
            f"token {self.token} differs: the log-probabilities there are {self.distance:.2g} apart, rounding explains "
            f"{self.margin:.2g}: {kind}"
        )


def distance(one: mx.array, other: mx.array) -> tuple[float, float]:
    """(how far two rows (V,) of log-probabilities are apart, how far rounding in their dtype may bring them).

    Rounding: four steps of the dtype at the size that the logits have, and never less than 0.001.
    """
    near = mx.maximum(one, other) > OUT_OF_REACH
    apart = mx.where(near, mx.abs(one.astype(mx.float32) - other.astype(mx.float32)), 0).max().item()
    spread = (one.max() - mx.where(near, one, one.max()).min()).item()
    return float(cast(float, apart)), max(1e-3, 4 * mx.finfo(one.dtype).eps * float(cast(float, spread)))
