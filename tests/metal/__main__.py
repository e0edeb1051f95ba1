"""Compares the kernel for a few rows with MLX's Metal kernels for one row, on x86-64 Linux."""

import argparse
import sys
from contextlib import nullcontext
from importlib.metadata import version
from pathlib import Path

import numpy as np

from . import compare, metallib
from .wrong import WRONG, replace_source


def main() -> int:
    """1 if anything differs, 2 if there is nothing to compare with."""
    parser = argparse.ArgumentParser(prog="python -m tests.metal", description=__doc__)
    parser.add_argument("--seed", type=int, default=0, help="of the inputs and of the choice")
    parser.add_argument("--full", action="store_true", help="all variants (half an hour)")
    parser.add_argument("--metallib", type=Path, help="a file in place of the wheel's")
    parser.add_argument("--wrong", choices=WRONG, help="make the kernel wrong in this way")
    options = parser.parse_args()
    try:
        path = options.metallib
        data = path.read_bytes() if path else metallib.fetch(version("mlx"))
        kernels = metallib.read_kernels(data, compare.NAMES)
    except metallib.NoKernelsError as error:
        print(f"nothing was compared: {error}", file=sys.stderr)
        return 2

    digest = metallib.compute_digest(kernels)
    known = compare.KNOWN.get(digest)
    print(f"kernels {f'known as those of {known}' if known else 'of a new version'}: {digest}")
    rng = np.random.default_rng(options.seed)
    variants = compare.list_variants() if options.full else compare.choose_variants(rng)
    wrong = nullcontext()
    if options.wrong:
        wrong = replace_source(options.wrong)
        variants = [variant for variant in variants if variant.dtype == "float"]
    totals = {}
    with wrong:
        for variant, what, difference in compare.compare_variants(kernels, variants, rng):
            if not difference.is_none:
                print(f"{variant.name}, {what}: {difference.format()} differ", flush=True)
            total = totals.get(variant.dtype, compare.Difference())
            totals[variant.dtype] = total.add(difference)
    print(f"{len(variants)} variants, {len(compare.SHAPES)} shapes, seed {options.seed}")
    for dtype, total in totals.items():
        print(f"{dtype}: {total.format()} differ")
    return 0 if all(total.is_none for total in totals.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
