"""Block drafters: what a block attends to, its length, and what a guess depends on."""

from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest

from helpers.cached import BLOCK_KINDS, Reading, make_cached
from helpers.families import make_family
from helpers.small import small_llama
from helpers.toys import ids, make_model, make_prompt, run
from mlx_redrafter.drafters.cached import MAX_EXCESS
from mlx_redrafter.drafters.protocol import Drafter
from mlx_redrafter.engine.types import Kept
from mlx_redrafter.target.model_parts import get_model_sizes

pytestmark = pytest.mark.filterwarnings("ignore:the drafter has guessed no token right")


def guess_after(
    drafter: Drafter, told: list[tuple[int, int]], *, size: int = 400, depth: int = 3, model=None
) -> mx.array:
    """(D, V) logits of a chain of zeros, after the source has seen these spans of a text."""
    model = model or make_model()
    source = drafter.open(model)
    reading = Reading(source, model, make_prompt(size))
    for start, stop in told:
        reading.feed(source, start, stop)
    advance = source.begin(mx.array(5), depth)
    state = None
    found = []
    for token in [5, *[0] * (depth - 1)]:
        logits, state = advance(mx.array([token]), state)
        found.append(logits)
    return mx.concatenate(found)


def differ(one: mx.array, other: mx.array) -> bool:
    """Whether logits differ by more than rounding."""
    return not np.allclose(one, other, atol=1e-4)


def test_windows_count_positions_and_drop_older_rows():
    """The widest window of `dflash 2` is 7: six positions before the root, however many rows there
    are.
    """
    drafter = make_cached("dflash 2")
    size = MAX_EXCESS + 100
    whole = guess_after(drafter, [(0, 300), (300, size)], size=size)
    assert not differ(whole, guess_after(drafter, [(size - 6, size)], size=size))
    assert differ(whole, guess_after(drafter, [(size - 5, size)], size=size))
    # Rows before a gap are near the end of the cache, but not in position.
    assert not differ(
        guess_after(drafter, [(0, 90), (size - 2, size)], size=size),
        guess_after(drafter, [(size - 2, size)], size=size),
    )
    everything = make_cached("dflash")
    assert differ(
        guess_after(everything, [(0, 90), (size - 2, size)], size=size),
        guess_after(everything, [(size - 2, size)], size=size),
    )


@pytest.mark.parametrize("kind", BLOCK_KINDS)
def test_a_window_bounds_the_cache(kind):
    drafter = make_cached(kind)
    model = make_model()
    source = drafter.open(model)
    steps = run(
        model, make_prompt(2 * MAX_EXCESS), source, max_tokens=6, plan=(2, 3), prefill_step_size=100
    )
    assert ids(steps) == ids(run(model, make_prompt(2 * MAX_EXCESS), max_tokens=6))
    n_rows = source.arrays[0][0][0].shape[2]
    assert (n_rows < 2 * MAX_EXCESS) == (kind == "dflash 2")


@pytest.mark.parametrize("kind", BLOCK_KINDS)
def test_rows_of_a_block_attend_to_each_other(kind):
    """So a shorter draft has different guesses, unless all layers are causal."""
    drafter = make_cached(kind)
    short = guess_after(drafter, [(0, 9)], depth=2)
    long = guess_after(drafter, [(0, 9)], depth=5)
    assert differ(short, long[:2])
    drafter.args = replace(drafter.args, layer_causal=[True, True])
    short = guess_after(drafter, [(0, 9)], depth=2)
    long = guess_after(drafter, [(0, 9)], depth=5)
    assert not differ(short, long[:2])


@pytest.mark.parametrize("kind", BLOCK_KINDS)
def test_selector_and_markov_heads_depend_on_the_previous_token(kind):
    model = make_model()
    source = make_cached(kind).open(model)
    Reading(source, model, make_prompt(20)).feed(source)
    advance = source.begin(mx.array(5), 2)
    _, state = advance(mx.array([5]), None)
    logits, _ = advance(mx.array([1, 2]), state)
    assert differ(*logits) == (kind not in ("dflash", "sliding dflash"))


@pytest.mark.parametrize("name", ["gemma3_text", "qwen3"])
def test_embeddings_are_scaled_as_the_target_does(name):
    """Gemma multiplies them by the square root of the width; a config may override the factor."""
    model = make_family(name)
    hidden, vocab = get_model_sizes(model)
    drafter = make_cached("dflash", hidden, vocab, layers=len(model.layers))
    found = []
    for scale in (None, 1.0, hidden**0.5):
        drafter.args = replace(drafter.args, embedding_scale=scale)
        found.append(guess_after(drafter, [(0, 9)], size=9, model=model))
    assert (differ(found[0], found[1]), differ(found[0], found[2])) == (
        name != "qwen3",
        name == "qwen3",
    )


@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16], ids=str)
def test_states_of_a_target_in_float16_do_not_overflow_in_bfloat16(dtype):
    """They overflow in float16."""
    model = small_llama(hidden=64, vocab=40)
    drafter = make_cached("dspark")
    model.set_dtype(mx.float16)
    drafter.set_dtype(dtype)
    source = drafter.open(model)
    large = mx.full((9, 64), 6e4, mx.float16)
    source.keep(Kept(mx.zeros((9,), mx.int32), dict.fromkeys(source.capture, large), None, 9, 0))
    logits, _ = source.begin(mx.array(5), 4)(mx.array([5]), None)
    assert logits.dtype == mx.float32
    assert mx.isfinite(logits).all().item() == (dtype == mx.bfloat16)
