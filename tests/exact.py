"""Counts the rows that differ in a bit between plain and drafted decoding with `exact`.

The models are random ones of mlx-lm.

python tests/exact.py                 all families, weights and vocabularies; 1 if a row differs
python tests/exact.py llama qwen3     some families
"""

import sys
from functools import partial
from itertools import product
from typing import NamedTuple
from unittest import mock

import mlx.core as mx
import mlx.nn as nn

from helpers.families import CONFIGS, make_family, quantize_linears
from helpers.toys import ScriptedContext, ids, make_prompt, run
from mlx_redrafter.decoding import recipe
from mlx_redrafter.decoding.options import Options
from mlx_redrafter.engine.types import RowCounts
from mlx_redrafter.measuring.pair import Pair
from mlx_redrafter.target.supported_models import CHAINS, REPLAYED, TREES

DTYPES = {"float32": mx.float32, "bfloat16": mx.bfloat16, "float16": mx.float16}
ODD_VOCABULARIES = (257, 101)
"""Kernels may compute their last logits in another order than the others."""

N_DECODED = {9: 40, 1010: 30}
"""Tokens after a prompt of so many tokens: the second text crosses 1,024."""


class Compared(NamedTuple):
    """Rows of log-probabilities that were compared in a class of row counts."""

    row_counts: RowCounts
    rows: int
    differ: int
    accepted: int


def make_long_family(name: str, vocab_size: int | None = None) -> nn.Module:
    """A random model of a family, whose windows and context are longer than the texts.

    Args:
        vocab_size: None for that of its config.
    """
    config = CONFIGS[name].get("text_config", CONFIGS[name])
    windows = ("sliding_window", "window_size", "chunk_size")
    limits = (*windows, "positions", "position_embeddings", "n_ctx")
    long = {} if vocab_size is None else {"vocab_size": vocab_size}
    for key, value in config.items():
        if isinstance(value, int) and key.endswith(limits):
            long[key] = 4096
    return make_family(name, **long)


def compare_rows(model: nn.Module, *, seed: int = 0) -> list[Compared]:
    """Compares texts drafted by a scripted context with plain ones, in each class of row counts."""
    found = []
    for counts in recipe.get_cache_row_classes(Pair(model), Options()):
        if counts == (1,):
            continue  # nothing drafts
        rows = 0
        n_differ = 0
        accepted = 0
        for size, count in N_DECODED.items():
            options = {"temp": 0.9 if size > 1000 else 0.0, "seed": seed, "exact": True}
            prompt = make_prompt(size, vocab=48, seed=seed)
            with mock.patch.object(
                recipe, "choose_row_counts", lambda *args, counts=counts: counts
            ):
                plain = run(model, prompt, max_tokens=count + 8, **options)
                scripted = partial(ScriptedContext, prompt + ids(plain), seed=seed)
                with mock.patch.object(recipe, "ContextSource", scripted):
                    steps = run(model, prompt, max_tokens=count, context=True, **options)
            assert ids(steps) == ids(plain[:count]), (counts, size)
            rows += count
            for one, other in zip(steps, plain[:count], strict=True):
                n_differ += not mx.array_equal(one.logprobs, other.logprobs)
            accepted += steps[-1].stats.accepted
        found.append(Compared(counts, rows, n_differ, accepted))
    return found


def sweep(names: list[str]) -> int:
    """Prints a line for each family and kind of weights; returns the exit status."""
    total = differ = 0
    families = names or sorted({*TREES, *CHAINS, *REPLAYED})
    kinds = (*DTYPES, "4 bits")
    for name, weights, vocab_size in product(families, kinds, (None, *ODD_VOCABULARIES)):
        label = f"{name} {weights} {vocab_size or ''}"
        try:
            model = make_long_family(name, vocab_size)
            if weights in DTYPES:
                model.set_dtype(DTYPES[weights])
            else:
                quantize_linears(model)
            found = compare_rows(model)
        except Exception as error:
            print(label, f"{type(error).__name__}: {error}", flush=True)
            continue
        total += sum(each.rows for each in found)
        differ += sum(each.differ for each in found)
        print(label, *map(tuple, found), flush=True)
    print(f"{differ} of {total:,} rows differ in a bit")
    return int(differ > 0 or not total)


if __name__ == "__main__":
    sys.exit(sweep(sys.argv[1:]))
