"""Which models mlx-lm batches correctly."""

import copy
import logging
from itertools import cycle

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_flatten, tree_map
from mlx_lm.models.cache import make_prompt_cache

from helpers.families import make_family
from helpers.grids import pairs
from helpers.threads import workers
from helpers.toys import decode_steps, ids, make_model
from mlx_redrafter.decoding.options import Options
from mlx_redrafter.loading.checkpoints import evaluate
from mlx_redrafter.measuring.pair import Pair
from mlx_redrafter.serving.scheduling.batchable import can_batch
from mlx_redrafter.serving.scheduling.batches import Batch
from mlx_redrafter.serving.scheduling.request import Request
from mlx_redrafter.target.kv_cache import leaves

PRECISIONS = [
    (mx.float32, 0),
    *((dtype, bits) for dtype in (mx.float16, mx.bfloat16) for bits in (0, 4, 8)),
]
IN_EVERY_PRECISION = pytest.mark.parametrize(
    "precision",
    PRECISIONS,
    ids=lambda p: str(p[0]).removeprefix("mlx.core.") + (f", {p[1]} bits" if p[1] else ""),
)


def in_precision(model: nn.Module, precision: tuple[mx.Dtype, int]):
    """A copy of the model in a dtype.

    Unless `bits` is 0, matrices whose rows allow it are quantized.
    """
    model = copy.deepcopy(model)
    dtype, bits = precision
    parameters = model.parameters()
    model.update(
        tree_map(
            lambda x: x.astype(dtype) if mx.issubdtype(x.dtype, mx.floating) else x, parameters
        )
    )
    if bits:

        def takes_bits(_, layer):
            return hasattr(layer, "to_quantized") and layer.weight.shape[-1] % 32 == 0

        nn.quantize(model, 32, bits, class_predicate=takes_bits)
    mx.eval(model)
    return model


@pytest.mark.parametrize("name", ["llama", "qwen3_next", "gemma3_text"])
def test_most_models_decode_in_batches(name):
    assert can_batch(Pair(make_family(name)), Options())


@pytest.mark.parametrize(
    ("kind", "precision", "spread"),
    pairs(
        ["llama", "llama-yarn", "mistral", "qwen2", "qwen3", "phi3"], PRECISIONS, [2.0, 6.0, 12.0]
    ),
    ids=str,
)
def test_rounding_does_not_prevent_batches(kind, precision, spread):
    model = in_precision(make_model(kind, seed=int(spread), spread=spread), precision)
    before = tree_flatten(model.parameters())
    assert can_batch(Pair(model), Options())
    after = tree_flatten(model.parameters())
    assert all(
        name == other and x is y for (name, x), (other, y) in zip(before, after, strict=True)
    )


@IN_EVERY_PRECISION
@pytest.mark.parametrize("name", ["mamba", "rwkv7", "baichuan_m1"])
def test_states_that_padded_prompts_would_change_are_batched(name, precision):
    assert can_batch(Pair(in_precision(make_family(name), precision)), Options())


@IN_EVERY_PRECISION
@pytest.mark.parametrize("name", ["gemma2", "internlm2", "minimax_m3_vl", "llama4", "gpt_bigcode"])
def test_models_that_batch_incorrectly_alternate(name, precision, caplog):
    with caplog.at_level(logging.WARNING):
        assert not can_batch(Pair(in_precision(make_family(name), precision)), Options())
    assert name in caplog.text
    assert "take turns" in caplog.text


@pytest.mark.parametrize("fails", [True, False], ids=["an error", "not a number"])
def test_failures_only_in_the_models_dtype_are_found(fails):
    """Such as a mask whose dtype or values only work in float32."""
    model = in_precision(make_model(), (mx.bfloat16, 0))

    class Fussy(type(model)):
        def __call__(self, inputs: mx.array, cache=None) -> mx.array:
            logits = super().__call__(inputs, cache)
            if inputs.shape[0] == 1 or logits.dtype == mx.float32:
                return logits
            if fails:
                raise ValueError("the mask's dtype must be that of the scores")
            return logits * mx.nan

    model.__class__ = Fussy
    assert not can_batch(Pair(model), Options())


@pytest.mark.parametrize("name", ["llama", "gemma3_text", "qwen3_5"])
def test_each_step_of_a_batch_may_come_from_another_thread(name):
    model = make_family(name)
    evaluate(model)
    batch = Batch(Pair(model), 4)
    prompts = ([1, 2, 3, 4, 5, 6, 7, 8], [4, 5, 6])
    choices = {"temp": 0.8, "xtc_probability": 0.5, "xtc_special_tokens": (), "seed": 3}
    choices |= {"repetition_penalty": 1.3}
    options = Options(max_tokens=10, context=False)
    requests = [Request(None, options, (), None, each, **choices) for each in prompts]
    with workers(2) as pools:
        turn = cycle(pools)
        for request in requests:
            cache = make_prompt_cache(model)
            model(mx.array([request.prompt[:-1]]), cache=cache)
            mx.eval([vars(layer) for layer in leaves(cache)])
            batch.add(request, (cache, len(request.prompt) - 1))
            for _ in range(4):  # the second one joins while the first one decodes
                next(turn).submit(batch.step).result()
        while not all(each.output.finish_reason for each in requests):
            ended = [each for each in batch.requests if each.output.finish_reason]
            next(turn).submit(batch.remove, ended).result()
            next(turn).submit(batch.step).result()
        batch.close()
    for request in requests:
        plain = decode_steps(request.prompt, model, None, request.options)
        assert request.output.tokens == ids(list(plain))
