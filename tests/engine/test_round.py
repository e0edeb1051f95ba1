"""What a round costs the host: how often it reads from the device, and how many operations it enqueues. No clocks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from small import small_drafter, small_llama

from mlx_redrafter.engine import decode as loop
from mlx_redrafter.engine.plan import make_plan
from mlx_redrafter.engine.round import Chooser, make_draft, step, verify
from mlx_redrafter.engine.sampling import make_sampler
from mlx_redrafter.engine.target import Target
from mlx_redrafter.engine.types import Tip
from mlx_redrafter.generate import Step, decode_tokens
from mlx_redrafter.options import Options

PROMPT = [1, 2, 3, 4, 5]
READS = ("item", "tolist", "__bool__", "__int__", "__float__", "__index__", "__array__", "__dlpack__", "__repr__",
         "__format__")  # fmt: skip
"""The methods of an array that make the host wait for its value."""

CHAIN, TREE, PRUNED = (1, 4), (4, 5), (4, 5, 9)
SAMPLED = {"temp": 0.8, "top_p": 0.9, "top_k": 20, "min_p": 0.01, "seed": 3}
CHOICES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": SAMPLED,
    "with XTC": {"temp": 1.0, "xtc_probability": 0.5, "seed": 3},
    "with a processor": {"logits_processors": [lambda history, logits: logits + history[-1] * 0.01]},
    "with a caller's sampler": {"sampler": lambda logprobs: mx.argmax(logprobs, axis=-1)},
    "over a quantized cache": {"kv_bits": 8, "kv_group_size": 32, "quantized_kv_start": 8},
}


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The reads from the device so far, in order; `mx.eval` and `mx.synchronize` count as such."""
    found: list[str] = []

    def counted(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            found.append(name)
            return original(*args, **kwargs)

        return call

    for name in READS:
        monkeypatch.setattr(mx.array, name, counted(name, getattr(mx.array, name)))
    for name in ("eval", "synchronize"):
        monkeypatch.setattr(mx, name, counted(name, getattr(mx, name)))
    return found


def run_rounds(steps: Iterator[Step], count: int, events: list[str]) -> None:
    """Runs up to the first token of round `count` after the first token; what rounds 1 to `count` do is recorded."""
    assert next(steps).stats.rounds == 0
    events.clear()
    assert next(each for each in steps if each.stats.rounds == count)
    steps.close()


def start(plan: Any = "off", **options: Any) -> Iterator[Step]:
    """Endless decoding by small models with heads wide enough for a quantized cache."""
    return decode_tokens(
        PROMPT, small_llama(head_dim=32), small_drafter(), Options(max_tokens=-1, plan=plan, **options)
    )


@pytest.mark.parametrize("choice", CHOICES)
@pytest.mark.parametrize("plan", ["off", CHAIN, TREE, (4, 5, 2), (4, 5, 7), (4, 5, 20)], ids=str)
def test_a_round_reads_once(plan: Any, choice: str, reads: list[str]) -> None:
    run_rounds(start(plan, **CHOICES[choice]), 12, reads)
    assert len(reads) == 12, reads


@pytest.mark.parametrize("plan", [CHAIN, TREE], ids=str)
def test_a_reported_tree_is_evaluated_without_more_reads(plan: Any, reads: list[str], tmp_path: Path) -> None:
    left: list[int] = []
    steps = start(plan, on_round=lambda tree, *_: left.append(count_nodes(list(tree), tmp_path / "graph")))
    run_rounds(steps, 8, reads)
    assert len(reads) == 8, reads
    assert left == [0] * 8


def test_reads_within_a_round_are_counted(reads: list[str]) -> None:
    # Negative control: a sampler that looks at its choice, once for each of the 5 nodes of each of 4 rounds.
    run_rounds(start(CHAIN, sampler=lambda logprobs: mx.array([int(mx.argmax(logprobs, axis=-1))])), 4, reads)
    assert reads.count("__int__") == 20 and len(reads) == 24


@pytest.fixture
def events(reads: list[str], monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Reads, and between them what is built and what is enqueued."""
    for owner, attribute in ((loop, "make_draft"), (loop, "verify"), (mx, "async_eval")):
        original = getattr(owner, attribute)
        call = lambda *a, name=attribute, original=original, **k: (reads.append(name), original(*a, **k))[1]  # noqa: E731
        monkeypatch.setattr(owner, attribute, call)
    return reads


@pytest.mark.parametrize("plan", [CHAIN, TREE], ids=str)
def test_next_draft_is_enqueued_before_the_read(plan: Any, events: list[str]) -> None:
    run_rounds(start(plan), 5, events)
    assert events[-1] in READS
    assert events == ["verify", "async_eval", "make_draft", "async_eval", events[-1]] * 5


def test_next_plain_step_is_enqueued_before_the_read(events: list[str]) -> None:
    run_rounds(start(), 5, events)
    assert events[-1] in READS and events == ["async_eval", events[-1]] * 5


class Stage:
    """A target after a prompt, a drafter and a plan: all that one round needs."""

    def __init__(self, plan: tuple[int, ...], **options: Any) -> None:
        self.drafter = small_drafter()
        self.chooser = Chooser(make_sampler(**{"seed": 0, **options}))
        self.plan = make_plan(*plan[:2], plan[2] if len(plan) > 2 else None, 64)
        self.target = Target(small_llama())
        outcome = step(self.target, mx.array(PROMPT), self.chooser, None, want_hidden=True)
        mx.eval(outcome)
        self.target.evaluate()
        assert outcome.tip is not None
        self.tip = outcome.tip
        self.position = mx.array(len(PROMPT) + 1)

    def round(self, hidden: mx.array, token: mx.array, position: mx.array) -> list[mx.array]:
        """Everything that one round enqueues."""
        tip, sampler = Tip(hidden, token), self.chooser.sampler
        draft = make_draft(self.drafter, self.target, sampler, tip, position, self.plan, ordered=False)
        outcome = verify(self.target, draft, self.chooser, None, self.plan, self.plan.depth)
        assert outcome.tip is not None
        return [outcome.report, *outcome.logprobs, *outcome.tip]

    def forward(self) -> list[mx.array]:
        """The target's own forward over as many tokens."""
        return [self.target.forward(mx.zeros((self.plan.size,), mx.int32), want_hidden=False).logits]


def count_nodes(arrays: list[mx.array], path: Path) -> int:
    """How many operations stand between evaluated arrays and these."""
    mx.export_to_dot(str(path), *arrays)
    return path.read_text().count("shape=rectangle")


def test_operations_are_counted_once_each(tmp_path: Path) -> None:
    x = mx.array([1.0, 2.0])
    mx.eval(x)
    shared = mx.exp(x)
    assert count_nodes([shared], tmp_path / "graph") == 1
    assert count_nodes([shared, mx.sin(shared) + mx.cos(shared)], tmp_path / "graph") == 4


# What a round enqueues beside the target's own forward over its N nodes. Each bound is the count of the day it was
# written and about a twentieth: a change that costs more should say so here.
@pytest.mark.parametrize(
    ("plan", "options", "bound"),
    [
        (CHAIN, {}, 118),  # 112
        (TREE, {}, 359),  # 342
        (PRUNED, {}, 366),  # 349
        (CHAIN, {"temp": 0.8}, 185),  # 176
        (TREE, {"temp": 0.8}, 432),  # 412
    ],
)
def test_a_round_enqueues_no_more_operations_than_recorded(
    plan: tuple[int, ...], options: dict[str, Any], bound: int, tmp_path: Path
) -> None:
    # On the CPU wherever the tests run: elsewhere MLX has other operations for rope, norms and attention.
    with mx.stream(mx.cpu):
        stage, other = Stage(plan, **options), Stage(plan, **options)
        whole = count_nodes(stage.round(*stage.tip, stage.position), tmp_path / "graph")
        own = count_nodes(other.forward(), tmp_path / "graph")
    print(f"{plan} {options}: {whole} operations a round, {own} of them the target's, {whole - own} beside")
    assert 0.8 * bound < whole - own <= bound
