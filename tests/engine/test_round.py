"""One round: host reads, what is enqueued before them, and the input of logits processors.

Nothing is timed.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.generate import generate_step as mlx_lm_generate_step
from mlx_lm.models.cache import make_prompt_cache

from helpers.cached import CACHED_KINDS, make_cached
from helpers.refusals import refusal
from helpers.small import small_drafter, small_llama
from helpers.toys import decode_steps, ids, make_model, make_prompt, run, scripted, with_plain
from mlx_redrafter.decoding.options import Options
from mlx_redrafter.drafters.protocol import StepwiseSource
from mlx_redrafter.engine import decode as loop
from mlx_redrafter.engine import round as rounds
from mlx_redrafter.engine.output import DecodedToken

CONVERSIONS = ("bool", "int", "float", "index", "array", "dlpack", "repr", "format")
READS = ("item", "tolist", *(f"__{name}__" for name in CONVERSIONS))
"""Array methods that make the host wait for a value."""

CHAIN = (1, 4)
TREE = (4, 5)
CHOICES = {
    "greedy": {},
    "sampled": {"temp": 0.8, "top_p": 0.9, "top_k": 20, "min_p": 0.01, "seed": 3},
    "with XTC": {"temp": 1.0, "xtc_probability": 0.5, "seed": 3},
    "with a processor": {
        "logits_processors": [lambda history, logits: logits + history[-1] * 0.01]
    },
    "with a caller's sampler": {"sampler": lambda logprobs: mx.argmax(logprobs, axis=-1)},
    "over a quantized cache": {"kv_bits": 8, "kv_group_size": 32, "quantized_kv_start": 8},
    "reported": {"on_round": lambda tree, path, chosen: None},
}


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Records host reads (`mx.eval` included) and, between them, what is built and enqueued."""
    found = []

    def record(owner, name):
        original = getattr(owner, name)

        def call(*args, **kwargs):
            found.append(name)
            return original(*args, **kwargs)

        monkeypatch.setattr(owner, name, call)

    for name in READS:
        record(mx.array, name)
    for name in ("eval", "synchronize", "async_eval"):
        record(mx, name)
    record(StepwiseSource, "propose")
    record(loop, "accept_draft")
    return found


def reads(events: list[str]) -> list[str]:
    return [name for name in events if name not in ("async_eval", "propose", "accept_draft")]


def start(plan: Any = "off", **options: Any) -> Iterator[DecodedToken]:
    """Decodes without end; small models with heads wide enough for a quantized cache."""
    given = Options(**{"max_tokens": -1, "plan": plan} | options)
    return decode_steps([1, 2, 3, 4, 5], small_llama(head_dim=32), small_drafter(), given)


def run_rounds(steps: Iterator[DecodedToken], count: int, events: list[Any]) -> None:
    """Records rounds 1 to `count` in `events`."""
    assert next(steps).stats.rounds == 0
    events.clear()
    assert next(each for each in steps if each.stats.rounds == count)
    steps.close()


@pytest.mark.parametrize(
    ("plan", "choice"),
    [*product(("off", CHAIN, TREE), CHOICES), ((4, 5, 7), "greedy"), ((4, 5, 9), "sampled")],
    ids=str,
)
def test_a_round_reads_once(plan: Any, choice: str, events: list[str]):
    run_rounds(start(plan, **CHOICES[choice]), 12, events)
    assert len(reads(events)) == 12, events


@pytest.mark.parametrize("kind", CACHED_KINDS)
@pytest.mark.parametrize("plan", [CHAIN, TREE], ids=str)
def test_a_round_of_a_head_with_a_cache_reads_once(plan: Any, kind: str, events: list[str]):
    model = small_llama(head_dim=32)
    options = Options(max_tokens=-1, plan=plan)
    steps = decode_steps([1, 2, 3, 4, 5], model, make_cached(kind, 32, 64), options)
    run_rounds(steps, 12, events)
    assert len(reads(events)) == 12, events


def test_reads_within_a_round_are_counted(events: list[str]):
    # Negative control: a sampler that reads its choice, for each of 5 nodes in 4 rounds.
    def choose(logprobs):
        return mx.array([int(mx.argmax(logprobs, axis=-1))])

    run_rounds(start(CHAIN, sampler=choose), 4, events)
    assert events.count("__int__") == 20
    assert len(reads(events)) == 24


@pytest.mark.parametrize("plan", ["off", CHAIN, TREE], ids=str)
def test_the_next_forward_is_enqueued_before_reading(plan: Any, events: list[str]):
    run_rounds(start(plan), 5, events)
    first = []
    enqueued = ["accept_draft", "async_eval", "propose", "async_eval"]
    if plan == "off":
        first = ["async_eval"]  # the second token, enqueued during prefill
        enqueued = ["async_eval"]
    assert events[-1] in READS
    assert events == first + [*enqueued, events[-1]] * 5


# On the accepted path, logits processors see exactly the histories of plain decoding.

SHAPES = [(1, 4), (2, 3), (3, 4)]


class Recorder:
    """A processor that records every history and changes the logits depending on it."""

    def __init__(self) -> None:
        self.histories = []

    def __call__(self, history: mx.array, logits: mx.array) -> mx.array:
        assert history.ndim == 1
        assert logits.shape[0] == 1
        assert logits.ndim == 2
        seen = tuple(history.tolist())
        self.histories.append(seen)
        frequency = 1 + seen[-1] + 2 * sum(seen[-4:]) + len(seen)
        return logits + 6 * mx.sin(mx.arange(logits.shape[-1]) * frequency)


@pytest.mark.parametrize(("length", "chunk"), [(1, 1), (2, 1), (7, 3), (7, 2048)])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_each_node_sees_the_history_of_its_path(shape: tuple[int, int], length: int, chunk: int):
    """Two turns on one cache: each turn's histories begin with its own prompt, as in mlx-lm."""
    model = make_model()
    count = 16
    tokens = []
    cache = make_prompt_cache(model)
    other = make_prompt_cache(model)
    for prompt in (make_prompt(length), make_prompt(3, seed=2)):
        theirs = Recorder()
        ours = Recorder()
        before = len(tokens)
        options = {"prefill_step_size": chunk, "max_tokens": count}
        own = {"logits_processors": [theirs], "prompt_cache": cache} | options
        expected = [token for token, _ in mlx_lm_generate_step(mx.array(prompt), model, **own)]
        tokens += [*prompt, *expected]
        drafter = scripted(model, tokens, "mixed", width=shape[0], seed=1)
        options |= {"logits_processors": [ours], "prompt_cache": other, "plan": shape}
        steps = run(model, prompt, drafter, **options)
        assert ids(steps) == expected
        assert steps[-1].stats.accepted > 0
        turn = tokens[before:]
        needed = [tuple(turn[: len(prompt) + n]) for n in range(count)]
        assert theirs.histories[:count] == needed
        assert set(needed) <= set(ours.histories)
        for history in set(ours.histories) - set(needed):
            # The text so far, then drafted tokens.
            pairs = enumerate(zip(history, turn, strict=False))
            same = next((n for n, (one, other_one) in pairs if one != other_one), len(turn))
            assert same >= len(prompt)
            assert len(history) - same <= shape[1]
        nodes = 1 + shape[0] * shape[1]
        # Each node of each round once.
        assert len(ours.histories) == 1 + steps[-1].stats.rounds * nodes


def test_a_processor_that_returns_another_shape_is_named():
    for wrong, got in (
        (lambda _, logits: logits[0], r"shape \(64,\)"),
        (lambda *_: None, "NoneType"),
    ):
        expected = rf"must return logits of shape \(1, 64\), as it was given, got {got}"
        options = {"max_tokens": 4, "plan": (1, 3), "logits_processors": [wrong]}
        with refusal(f"a logits processor {expected}"):
            run(small_llama(), [1, 2, 3], small_drafter(), **options)


def test_wrong_histories_change_the_tokens(monkeypatch: pytest.MonkeyPatch):
    # Negative control: processors see zeros instead of the node's path.
    model = make_model()
    prompt = make_prompt(6)
    options = {"logits_processors": [Recorder()]}
    plain, drafter = with_plain(model, prompt, 24, "right", width=2, **options)
    assert ids(run(model, prompt, drafter, max_tokens=24, plan=(2, 3), **options)) == ids(plain)
    extend = rounds.extend

    def extend_by_zeros(history, tokens):
        return extend(history, mx.zeros_like(tokens))

    monkeypatch.setattr(rounds, "extend", extend_by_zeros)
    assert ids(run(model, prompt, drafter, max_tokens=24, plan=(2, 3), **options)) != ids(plain)
