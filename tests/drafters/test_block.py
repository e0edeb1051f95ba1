"""Block drafters: what a block sees of the text, how long it is, and what a guess depends on."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from cached import BLOCK_KINDS, make_cached
from families import make_family
from toys import ids, make_model, make_prompt, run

from mlx_redrafter.drafters.cached import MAX_EXCESS
from mlx_redrafter.drafters.protocol import Drafter
from mlx_redrafter.engine.model_parts import AFTER_NORM, model_sizes
from mlx_redrafter.engine.target import Target
from mlx_redrafter.engine.types import Kept
from mlx_redrafter.errors import RedrafterError

pytestmark = pytest.mark.filterwarnings("ignore:the drafter has guessed no token right")


def guess_after(
    drafter: Drafter, told: list[tuple[int, int]], *, size: int = 400, depth: int = 3, model: Any = None
) -> mx.array:
    """(D, V) logits of a draft's chain of zeros, of a source that was told these spans of one text."""
    model = model or make_model()
    source: Any = drafter.open(model)
    tokens = mx.array(make_prompt(size))
    hidden = Target(model, capture=source.capture).forward(tokens).hidden
    for start, stop in told:
        part = {name: states[start:stop] for name, states in hidden.items()}
        source.keep(Kept(tokens[start:stop], part, None, stop - start, start))
    advance, state, found = source.begin(mx.array(5), depth), None, []
    for token in [5, *[0] * (depth - 1)]:
        logits, state = advance(mx.array([token]), state)
        found.append(logits)
    return mx.concatenate(found)


def differ(one: mx.array, other: mx.array) -> bool:
    """Whether logits are not the same, but for rounding."""
    return not np.allclose(one, other, atol=1e-4)


def test_windows_count_positions_and_rows_out_of_reach_are_dropped() -> None:
    """The widest window of `dflash 2` is 7: six positions before the root count, however many rows there are."""
    drafter, size = make_cached("dflash 2"), MAX_EXCESS + 100
    whole = guess_after(drafter, [(0, 300), (300, size)], size=size)
    assert not differ(whole, guess_after(drafter, [(size - 6, size)], size=size))
    assert differ(whole, guess_after(drafter, [(size - 5, size)], size=size))
    # After a hole the rows before it are near, their positions are not.
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
def test_a_window_bounds_the_cache(kind: str) -> None:
    drafter, model = make_cached(kind), make_model()
    source: Any = drafter.open(model)
    steps = run(model, make_prompt(2 * MAX_EXCESS), source, max_tokens=6, plan=(2, 3), prefill_step_size=100)
    assert ids(steps) == ids(run(model, make_prompt(2 * MAX_EXCESS), max_tokens=6))
    n_rows = source.state[0][0][0].shape[2]
    assert (n_rows < 2 * MAX_EXCESS) == (kind == "dflash 2")


@pytest.mark.parametrize("kind", BLOCK_KINDS)
def test_rows_of_a_block_see_each_other(kind: str) -> None:
    """So a shorter draft has other guesses, unless all layers are causal."""
    drafter: Any = make_cached(kind)
    short, long = guess_after(drafter, [(0, 9)], depth=2), guess_after(drafter, [(0, 9)], depth=5)
    assert differ(short, long[:2])
    drafter.args = replace(drafter.args, layer_causal=[True, True])
    short, long = guess_after(drafter, [(0, 9)], depth=2), guess_after(drafter, [(0, 9)], depth=5)
    assert not differ(short, long[:2])


@pytest.mark.parametrize("kind", BLOCK_KINDS)
def test_a_guess_depends_on_the_token_before_it_with_a_selector_or_a_markov_head(kind: str) -> None:
    model = make_model()
    source: Any = make_cached(kind).open(model)
    tokens = mx.array(make_prompt(20))
    hidden = Target(model, capture=source.capture).forward(tokens).hidden
    source.keep(Kept(tokens, hidden, None, len(tokens), 0))
    advance = source.begin(mx.array(5), 2)
    _, state = advance(mx.array([5]), None)
    logits, _ = advance(mx.array([1, 2]), state)
    assert differ(*logits) == (kind not in ("dflash", "sliding dflash"))


def test_a_draft_is_no_deeper_than_a_block() -> None:
    model, prompt = make_model(), make_prompt(9)
    for kind, most in (("dflash", 5), ("dspark", 6)):
        drafter = make_cached(kind)
        assert drafter.args.max_depth == most
        run(model, prompt, drafter, max_tokens=8, plan=(1, most))
        with pytest.raises(RedrafterError, match=f"draft_depth must be from 1 to {most} with this drafter, got 7"):
            run(model, prompt, drafter, plan=(1, 7))


@pytest.mark.parametrize("name", ["gemma3_text", "qwen3"])
def test_embeddings_are_scaled_as_the_target_does(name: str) -> None:
    """Gemma's models multiply them by the root of their width; a config may say something else."""
    model = make_family(name)
    hidden, vocab = model_sizes(model)
    drafter: Any = make_cached("dflash", hidden, vocab, layers=len(model.layers))
    found = []
    for scale in (None, 1.0, hidden**0.5):
        drafter.args = replace(drafter.args, embedding_scale=scale)
        found.append(guess_after(drafter, [(0, 9)], size=9, model=model))
    assert (differ(found[0], found[1]), differ(found[0], found[2])) == (name != "qwen3", name == "qwen3")


def test_it_reads_layers_and_says_which() -> None:
    drafter = make_cached("dspark", layers=5)
    assert drafter.args.describe_states() == "the outputs of layers 4, 0"
    assert AFTER_NORM not in drafter.open(make_model(layers=5)).capture
