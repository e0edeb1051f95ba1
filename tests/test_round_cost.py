"""What a round costs the host: how often it reads from the device, and how many operations it enqueues. No clocks."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
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

PLANS = {"a chain of 4": {"beam_width": 1, "draft_depth": 4}, "a tree of 4 by 5": {"beam_width": 4, "draft_depth": 5}}
CHOICES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": {"temp": 0.8, "top_p": 0.9, "top_k": 20, "min_p": 0.01, "seed": 3},
    "with XTC": {"temp": 1.0, "xtc_probability": 0.5, "seed": 3},
    "with a processor": {"logits_processors": [lambda history, logits: logits + history[-1] * 0.01]},
    "with a sampler of the caller's": {"sampler": lambda logprobs: mx.argmax(logprobs, axis=-1)},
    "over a quantised cache": {"kv_bits": 8, "kv_group_size": 32, "quantized_kv_start": 8},
}


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The reads from the device so far, in order; `mx.eval` and `mx.synchronize` are such as well."""
    seen: list[str] = []

    def counted(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            seen.append(name)
            return original(*args, **kwargs)

        return call

    for name in READS:
        monkeypatch.setattr(mx.array, name, counted(name, getattr(mx.array, name)))
    for name in ("eval", "synchronize"):
        monkeypatch.setattr(mx, name, counted(name, getattr(mx, name)))
    return seen


def decoding(drafted: bool, **options: Any) -> Iterator[Step]:
    """Endless decoding by small models with heads wide enough for a quantised cache."""
    model = small_llama(head_dim=32)
    drafter = small_drafter() if drafted else None
    return decode_tokens(PROMPT, model, drafter, Options(max_tokens=-1, **options))


@pytest.mark.parametrize("choice", CHOICES)
@pytest.mark.parametrize("plan", PLANS)
def test_a_round_reads_once_from_the_device(plan: str, choice: str, reads: list[str]) -> None:
    steps = decoding(True, **PLANS[plan], **CHOICES[choice])
    before = next(steps).stats.rounds
    reads.clear()
    # Up to the first token of round 12: everything that rounds 1 to 12 read is then read.
    last = next(item for item in steps if item.stats.rounds == 12)
    assert before == 0 and last.stats.rounds == 12
    assert len(reads) == 12, reads
    steps.close()


@pytest.mark.parametrize("size", [2, 7, 20])
def test_a_pruned_round_reads_once_as_well(size: int, reads: list[str]) -> None:
    steps = decoding(True, beam_width=4, draft_depth=5, tree_size=size)
    next(steps)
    reads.clear()
    next(item for item in steps if item.stats.rounds == 8)
    assert len(reads) == 8, reads
    steps.close()


@pytest.mark.parametrize("plan", PLANS)
def test_a_round_that_is_told_of_reads_no_more_and_nothing_of_its_tree_is_left_to_compute(
    plan: str, reads: list[str], tmp_path: Path
) -> None:
    left: list[int] = []
    steps = decoding(True, on_round=lambda tree, *_: left.append(nodes(list(tree), tmp_path / "graph")), **PLANS[plan])
    next(steps)
    reads.clear()
    next(item for item in steps if item.stats.rounds == 8)
    assert len(reads) == 8, reads
    assert left == [0] * 8
    steps.close()


@pytest.mark.parametrize("choice", CHOICES)
def test_plain_decoding_reads_once_a_token(choice: str, reads: list[str]) -> None:
    steps = decoding(False, **CHOICES[choice])
    next(steps)
    reads.clear()
    assert len(list(itertools.islice(steps, 20))) == 20
    assert len(reads) == 20, reads
    steps.close()


def test_reads_within_a_round_would_be_seen(reads: list[str]) -> None:
    # Negative control: a sampler that looks at what it chose, once for each of the 5 nodes of each of 4 rounds.
    def looking(logprobs: mx.array) -> mx.array:
        return mx.array([int(mx.argmax(logprobs, axis=-1))])

    steps = decoding(True, beam_width=1, draft_depth=4, sampler=looking)
    next(steps)
    reads.clear()
    next(item for item in steps if item.stats.rounds == 4)
    assert reads.count("__int__") == 20 and len(reads) == 24
    steps.close()


@pytest.fixture
def happenings(reads: list[str], monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Reads, and between them what is built and what is enqueued."""

    def recorded(module: Any, attribute: str, name: str) -> None:
        original = getattr(module, attribute)
        monkeypatch.setattr(module, attribute, lambda *a, **k: (reads.append(name), original(*a, **k))[1])

    recorded(loop, "make_draft", "draft")
    recorded(loop, "verify", "verify")
    recorded(mx, "async_eval", "enqueue")
    return reads


@pytest.mark.parametrize("plan", PLANS)
def test_the_next_draft_is_enqueued_before_the_round_is_read(plan: str, happenings: list[str]) -> None:
    steps = decoding(True, **PLANS[plan])
    next(steps)
    happenings.clear()
    next(item for item in steps if item.stats.rounds == 5)
    read = happenings[-1]
    assert read in READS and happenings == ["verify", "enqueue", "draft", "enqueue", read] * 5
    steps.close()


def test_the_next_plain_forward_is_enqueued_before_the_token_is_read(happenings: list[str]) -> None:
    steps = decoding(False)
    next(steps)
    happenings.clear()
    assert len(list(itertools.islice(steps, 5))) == 5
    read = happenings[-1]
    assert read in READS and happenings == ["enqueue", read] * 5
    steps.close()


class Stage:
    """A target behind a prompt, a drafter and a plan: all that one round needs."""

    def __init__(self, plan: dict[str, int], **options: Any) -> None:
        self.drafter = small_drafter()
        self.chooser = Chooser(make_sampler(**{"seed": 0, **options}), ())
        self.plan = make_plan(plan["beam_width"], plan["draft_depth"], plan.get("tree_size"), 64)
        self.target = Target(small_llama())
        outcome = step(self.target, mx.array(PROMPT), self.chooser, None, want_hidden=True)
        mx.eval(outcome)
        self.target.evaluate()
        assert outcome.tip is not None
        self.tip = outcome.tip

    def round(self, hidden: mx.array, token: mx.array, position: mx.array) -> list[mx.array]:
        """Everything that one round enqueues."""
        draft = make_draft(
            self.drafter, self.target, self.chooser.sampler, Tip(hidden, token), position, self.plan, ordered=False
        )
        outcome = verify(self.target, draft, self.chooser, None, self.plan, self.plan.depth)
        assert outcome.tip is not None
        return [outcome.report, *outcome.logprobs, *outcome.tip]

    def forward(self) -> list[mx.array]:
        """The target's own forward over as many tokens."""
        return [self.target.forward(mx.zeros((self.plan.size,), mx.int32), want_hidden=False).logits]


@pytest.mark.parametrize("options", [{}, CHOICES["sampled"]], ids=["greedy", "sampled"])
@pytest.mark.parametrize("plan", [*PLANS.values(), {"beam_width": 4, "draft_depth": 5, "tree_size": 9}])
def test_the_stages_of_a_round_can_be_traced_so_they_read_nothing(plan: dict[str, int], options: dict) -> None:
    stage = Stage(plan, **options)
    # While `mx.compile` traces, any read raises, NumPy's included. Nothing is computed.
    traced = mx.compile(stage.round)(*stage.tip, mx.array(len(PROMPT) + 1))
    assert traced[0].shape == (1 + 2 * (stage.plan.depth + 1),)
    # Negative controls.
    for read in (lambda x: mx.array(x.argmax().item()), lambda x: mx.array(np.array(x + 1))):
        with pytest.raises(ValueError, match="eval"):
            mx.compile(read)(stage.tip.hidden)


def nodes(arrays: list[mx.array], path: Path) -> int:
    """How many operations stand between evaluated arrays and these."""
    mx.export_to_dot(str(path), *arrays)
    return path.read_text().count("shape=rectangle")


def test_operations_are_counted_each_once(tmp_path: Path) -> None:
    x = mx.array([1.0, 2.0])
    mx.eval(x)
    shared = mx.exp(x)
    assert nodes([shared], tmp_path / "graph") == 1
    assert nodes([shared, mx.sin(shared) + mx.cos(shared)], tmp_path / "graph") == 4


# What a round enqueues beside the target's own forward over its N nodes. Each bound is the count of the day it was
# written and about a twentieth: a change that costs more should say so here.
@pytest.mark.parametrize(
    ("plan", "options", "bound"),
    [
        ({"beam_width": 1, "draft_depth": 4}, {}, 118),  # 112
        ({"beam_width": 4, "draft_depth": 5}, {}, 370),  # 352
        ({"beam_width": 4, "draft_depth": 5, "tree_size": 9}, {}, 377),  # 359
        ({"beam_width": 1, "draft_depth": 4}, {"temp": 0.8}, 185),  # 176
        ({"beam_width": 4, "draft_depth": 5}, {"temp": 0.8}, 432),  # 412
    ],
)
def test_a_round_enqueues_no_more_operations_than_recorded(
    plan: dict[str, int], options: dict[str, Any], bound: int, tmp_path: Path
) -> None:
    # On the CPU wherever the tests run: elsewhere MLX has other operations for rope, norms and attention.
    with mx.stream(mx.cpu):
        stage, other = Stage(plan, **options), Stage(plan, **options)
        whole = nodes(stage.round(*stage.tip, mx.array(len(PROMPT) + 1)), tmp_path / "graph")
        own = nodes(other.forward(), tmp_path / "graph")
    print(f"{plan} {options}: {whole} operations a round, {own} of them the target's, {whole - own} beside")
    assert 0.8 * bound < whole - own <= bound
