"""A source that reads the target's cache sees the rows of the tokens before the root."""

from collections.abc import Sequence

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.models.cache import QuantizedKVCache, RotatingKVCache

from helpers.families import make_family
from helpers.toys import Scripted, assert_same_steps, ids, make_prompt, run, with_plain
from mlx_redrafter.drafters.protocol import StepwiseSource
from mlx_redrafter.engine.beam_search import Adjust
from mlx_redrafter.engine.plan import Plan
from mlx_redrafter.engine.types import Tree
from mlx_redrafter.target.model_checks import make_cache

pytestmark = pytest.mark.filterwarnings(
    "ignore:drafting chains, not trees", "ignore:max_kv_size, which mlx-lm ignores"
)

BITS = {"kv_bits": 8, "kv_group_size": 32, "quantized_kv_start": 14}

CASES = {
    "every row": ("qwen2", None, {}),
    "every row, 8 bits": ("qwen2", None, BITS),
    "rings that keep their first rows": ("qwen2", 12, {}),
    "windows": ("gemma4", None, {}),
    "windows and rings": ("gemma4_text", 20, {}),
    "chunks": ("llama4", None, {}),
}
"""Name -> (family, max_kv_size, options)."""

Seen = list[tuple[list[int], list[tuple[mx.array, mx.array]]]]
"""For each draft, the tokens before its root, and the rows of each layer."""


class Reader(StepwiseSource):
    """Drafts as a `Scripted`, and notes the rows that it sees."""

    proposes_after_read = True

    def __init__(self, drafter: Scripted, model: nn.Module, n_layers: int, seen: Seen):
        super().__init__(drafter, model)
        self._n_layers = n_layers
        self._seen = seen
        self._text = []

    def read(self, tokens: Sequence[int]):
        self._text = list(tokens)

    def confirm(self, tokens: Sequence[int]):
        self._text += tokens

    def propose(
        self, root: mx.array, plan: Plan, adjust: Adjust | None, *, in_level_order: bool
    ) -> Tree:
        assert self.read_rows is not None
        rows = [self.read_rows(layer) for layer in range(self._n_layers)]
        self._seen.append((self._text[:-1], rows))
        return super().propose(root, plan, adjust, in_level_order=in_level_order)


def list_rows(
    model: nn.Module, tokens: Sequence[int], size: int | None
) -> list[list[tuple[mx.array, mx.array]]]:
    """For each layer and position, the (key, value) that one-row forwards write."""
    cache = make_cache(model, size)
    rows = [[] for _ in cache]
    for token in tokens:
        model(mx.array([[token]]), cache=cache)
        for c, found in zip(cache, rows, strict=True):
            end = c._idx if isinstance(c, RotatingKVCache) else c.offset
            end -= getattr(c, "start_position", 0)
            found.append((c.keys[0, :, end - 1], c.values[0, :, end - 1]))
        mx.eval(rows)
    return rows


@pytest.mark.parametrize("plan", [(1, 4), (3, 3)], ids=str)
@pytest.mark.parametrize("case", CASES)
def test_a_source_reads_the_kept_rows(case, plan):
    name, size, options = CASES[case]
    model = make_family(name)
    prompt = make_prompt(7)
    cache = make_cache(model, size)
    plain, drafter = with_plain(
        model, prompt, 30, "mixed", width=plan[0], max_kv_size=size, **options
    )
    seen = []
    steps = run(
        model, prompt, Reader(drafter, model, len(cache), seen), max_tokens=30, plan=plan,
        prompt_cache=cache, context=False, **options,
    )  # fmt: skip
    assert_same_steps(steps, plain, tolerance=2e-3)
    assert 5 < steps[-1].stats.accepted < 25

    expected = list_rows(model, [*prompt, *ids(plain)], size)
    tolerance = 0.1 if options else 2e-3
    for tokens, layers in seen:
        n = len(tokens)
        for c, (keys, values), written in zip(cache, layers, expected, strict=True):
            count = keys.shape[2]
            n_first = min(getattr(c, "keep", 0), n)
            most = getattr(c, "max_size", n)
            assert count == min(n, most) or (case == "chunks" and count >= min(n, 8))
            positions = [*range(n_first), *range(n - count + n_first, n)]
            for got, which in ((keys, 0), (values, 1)):
                wanted = mx.stack([written[at][which] for at in positions], axis=1)
                assert mx.abs(got[0] - wanted).max().item() < tolerance, (n, type(c))
    assert not options or isinstance(cache[0], QuantizedKVCache)
