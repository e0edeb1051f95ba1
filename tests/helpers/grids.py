"""Pairwise test cases instead of full products of parameters."""

from collections.abc import Iterable
from itertools import combinations, product
from typing import Any


def pairs(*axes: Iterable[Any]) -> list[tuple[Any, ...]]:
    """A small subset of the product of three or more axes that contains every pair of values."""
    values = [list(axis) for axis in axes]

    def meetings(case):
        return set(combinations(enumerate(case), 2))

    cases = list(product(*(range(len(axis)) for axis in values)))
    missing = set().union(*map(meetings, cases))
    chosen = []
    while missing:
        chosen.append(max(cases, key=lambda case: len(meetings(case) & missing)))
        missing -= meetings(chosen[-1])
    return [tuple(axis[at] for axis, at in zip(values, case, strict=True)) for case in chosen]
