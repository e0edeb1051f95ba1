"""The suite measures what fits, into one file that says what did not."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks import run, suite
from benchmarks.contest import MLX_LM_DRAFT, Run, RunOptions, contestants
from benchmarks.prompts import Prompt
from benchmarks.record import problem
from benchmarks.subject import open_subject
from benchmarks.suite import Item, everything, items
from mlx_redrafter.errors import RedrafterError, one_line
from tests.bench_records import MACHINE, costs, flags, speed


def test_the_suite_begins_with_the_demo_and_goes_from_small_to_large() -> None:
    found = list(items(gpu=True))
    sizes = [item.gigabytes for item in found]
    assert found[0].name == "demo" and sizes[0] == 0 and sizes == sorted(sizes)
    assert found[1].name == "llama-3.2-1b, 4 bits, 16 layers" and sizes[1] == pytest.approx(0.7, rel=0.02)
    assert found[-1].name.startswith("qwen3-30b-a3b") and len(found) == 8
    assert [item.name for item in items(gpu=False)] == [
        "demo",
        "llama-3.2-1b, 32 bits, 2 layers",
        "llama-3.2-3b, 32 bits, 2 layers",
    ]


def test_the_demo_of_the_suite_is_that_of_a_quick_run_with_mlx_lms_own_speculation() -> None:
    found, quick = suite.demo(), open_subject(flags(run, "--quick"))
    assert found.described == quick.described and found.prompts == quick.prompts
    assert MLX_LM_DRAFT in {side.kind for side in contestants(found, [], RunOptions())}


class Pace:
    """A clock that the items of a suite move on."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        patch.setattr(suite, "perf_counter", lambda: self.now)
        patch.setattr(suite, "measured", self.measured)
        self.shares: list[float] = []
        self.told: list[str] = []
        self.kept: list[int] = []

    def measured(self, item: Item, share: float) -> Iterator[Any]:
        self.shares.append(share)
        yield from item.make()

    def item(self, name: str, seconds: float, error: Exception | None = None, **more: Any) -> Item:
        """One that is ready after so many seconds; it fails then, or behind its first record."""

        def make() -> Any:
            self.now += seconds
            if error is not None:
                raise error
            yield [{"name": name}]
            if more.get("late") is not None:
                raise more["late"]

        return Item(name, make, [], False, more.get("gigabytes", 0.0))

    def everything(self, found: list[Item], seconds: float) -> Any:
        return everything(found, seconds, self.told.append, lambda records, skipped: self.kept.append(len(records)))


def test_what_does_not_fit_is_skipped_and_named(monkeypatch: pytest.MonkeyPatch) -> None:
    pace = Pace(monkeypatch)
    found = [
        pace.item("one", 10),
        pace.item("two", 5, RedrafterError("it takes 50 GB,\nthis machine has 8 GB")),
        pace.item("three", 5, RuntimeError("[metal::malloc] too much")),
        pace.item("four", 100),
        pace.item("five", 10),
    ]
    records, skipped = pace.everything(found, 100.0)
    assert [each["name"] for each in records] == ["one", "four"]
    assert skipped == [
        {"name": "two", "why": "it takes 50 GB, this machine has 8 GB"},
        {"name": "three", "why": "[metal::malloc] too much"},
        {"name": "five", "why": "no time was left"},
    ]
    assert pace.shares == pytest.approx([20, 90 / 4, 85 / 3, 80 / 2]), "time that one leaves goes to the others"
    assert pace.told[1] == "two: skipped, it takes 50 GB, this machine has 8 GB"


@pytest.mark.parametrize("error", [ValueError("Speculative decoding\nrequires"), RuntimeError("a"), MemoryError()])
def test_an_item_that_fails_in_the_middle_leaves_what_it_has_and_the_suite_goes_on(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    pace = Pace(monkeypatch)
    records, skipped = pace.everything([pace.item("one", 1, late=error), pace.item("two", 1)], 100.0)
    assert [each["name"] for each in records] == ["one", "two"] and pace.kept == [1, 2]
    assert skipped == [{"name": "one", "why": one_line(error)}]
    assert pace.told[0] == f"one: in part, {one_line(error)}"


def test_a_file_that_cannot_be_written_is_no_items_fault(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pace = Pace(monkeypatch)
    monkeypatch.setattr(suite, "items", lambda gpu: [pace.item("one", 1), pace.item("two", 1)])
    (tmp_path / "file").touch()
    with pytest.raises(RedrafterError, match="cannot write results to"):
        suite.run(tmp_path / "file" / "mine.json", 1.0)
    assert len(pace.shares) == 1


def test_an_item_whose_weights_would_take_longer_than_its_share_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    pace = Pace(monkeypatch)
    found = [
        pace.item("demo", 30),  # has no weights to make: it predicts nothing
        pace.item("small", 10, gigabytes=1.0),
        pace.item("large", 999, gigabytes=5.0),
        pace.item("middle", 20, gigabytes=2.0),
    ]
    records, skipped = pace.everything(found, 120.0)
    assert [each["name"] for each in records] == ["demo", "small", "middle"]
    why = "to be ready alone it would take about 50 s: 80 s are left, its share 40 s"
    assert skipped == [{"name": "large", "why": why}] and pace.told[2] == f"large: skipped, {why}"


def test_an_item_that_never_became_ready_warns_of_larger_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    pace = Pace(monkeypatch)
    late = RedrafterError("its 30 s were over behind its weights")
    found = [pace.item("small", 40, late, gigabytes=1.0), pace.item("large", 999, gigabytes=2.0)]
    _, skipped = pace.everything(found, 60.0)
    assert skipped[1]["why"] == "to be ready alone it would take about 80 s: 20 s are left, its share 20 s"


# One item


class Slow:
    """An item of two prompts and two contestants, whose parts move a clock on."""

    def __init__(self, patch: pytest.MonkeyPatch, weights: float, parts: float, first: float, prompt: float) -> None:
        self.now = 0.0
        self.asked: list[RunOptions] = []
        self.weights, self.prompt = weights, prompt
        patch.setattr(suite, "perf_counter", lambda: self.now)
        patch.setattr(suite, "costs_record", lambda subject: self.after(parts, costs()))
        patch.setattr(suite, "contestants", lambda *rest, **more: [None] * 2)
        patch.setattr(suite, "warmed", lambda *rest: self.after(first, Run([0] * 16, first - 1.5, 1.5, None, 1)))
        patch.setattr(suite, "hold", self.hold)

    def after(self, seconds: float, value: Any) -> Any:
        self.now += seconds
        return value

    def make(self) -> Any:
        prompts = [Prompt("a/b", "a", [1, 2]), Prompt("b/b", "b", [1, 2, 3, 4])]
        return self.after(self.weights, SimpleNamespace(prompts=prompts))

    def hold(self, subject: Any, sides: Any, options: RunOptions, *, warm: bool) -> Iterator[Any]:
        assert warm, "nobody is warmed up twice"
        self.asked.append(options)
        for prompt in subject.prompts:
            yield self.after(self.prompt, [speed(prompt=prompt.name)])

    def names(self, seconds: float) -> tuple[list[str | None], str]:
        """(the prompts of the records, why there are no more)."""
        found: list[str | None] = []
        try:
            for records in suite.measured(Item("slow", self.make, [], False), seconds):
                found += [each.get("prompt") for each in records]
        except RedrafterError as error:
            return found, str(error)
        return found, ""


@pytest.mark.parametrize(
    ("times", "names", "why"),
    [
        ((1, 1, 2, 10), [None, "a/b", "b/b"], ""),
        ((101, 1, 2, 10), [], "its 100 s were over behind its weights"),
        (
            (1, 100, 2, 10),
            [None],
            "its 100 s were over behind 0 of 2 contestants' first tokens",
        ),
        ((1, 1, 99, 10), [None], "its 100 s were over behind 1 of 2 contestants' first tokens"),
        ((1, 1, 49, 10), [None], "its 100 s were over behind all first tokens"),
        ((1, 1, 2, 100), [None, "a/b"], "its 100 s were over behind 1 of 2 prompts"),
    ],
)
def test_where_the_time_is_over_what_was_measured_is_kept(
    times: tuple[float, ...], names: list[str | None], why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert Slow(monkeypatch, *times).names(100.0) == (names, why)


def test_a_pair_that_is_too_slow_for_its_share_is_refused_and_a_quick_one_has_all_its_tokens(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    slow = Slow(monkeypatch, 1, 1, 2, 0)
    # Behind 6 s for the rest: two sides, two prompts, 0.1 s a token, and 0.5 s to read each two tokens of a prompt.
    for seconds in (400.0, 60.0, 16.0):
        assert slow.names(6.0 + seconds)[1] == ""
    assert [(each.max_tokens, each.repeats) for each in slow.asked] == [(128, 3), (43, 3), (33, 1)]
    assert slow.names(6.0 + 8.0) == (
        [None],
        "16 tokens of 2 contestants on 2 prompts would take 9 s, 8 s of its share are left",
    )


@pytest.fixture
def quick_suite(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suite, "stamp", lambda: MACHINE)
    monkeypatch.setattr(suite, "everything", lambda *rest: ([costs(), speed()], [{"name": "large", "why": "large"}]))


def test_the_suite_writes_one_file_and_never_over_another(quick_suite: None, tmp_path: Path) -> None:
    path = tmp_path / "results" / "mine.json"
    assert suite.run(path, 1.0) == 0
    found = json.loads(path.read_text())
    assert found["kind"] == "suite" and found["contributor"] is None and len(found["records"]) == 2
    before = path.read_bytes()
    with pytest.raises(RedrafterError, match=r"mine.json exists already: give another --output"):
        suite.run(path, 1.0)
    assert path.read_bytes() == before and [each.name for each in path.parent.iterdir()] == ["mine.json"]


def test_a_suite_of_nothing_is_no_file(quick_suite: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(suite, "everything", lambda *rest: ([], [{"name": "demo", "why": "it takes 49 s"}]))
    with pytest.raises(RedrafterError, match=r"nothing fitted into 0.5 minutes, demo: it takes 49 s"):
        suite.run(tmp_path / "mine.json", 0.5)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("liar", "status"), [("drafted", 1), ("mlx-lm draft model", 0)])
def test_a_suite_with_a_token_that_differs_says_so_by_its_status(
    liar: str, status: int, quick_suite: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    lie = speed(liar, same_tokens=False, first_difference=3)
    monkeypatch.setattr(suite, "everything", lambda *rest: ([costs(), lie], []))
    assert suite.run(tmp_path / "mine.json", 1.0) == status


def test_ctrl_c_leaves_the_items_that_are_done(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def measured(item: Item, share: float) -> Iterator[Any]:
        if item.name == "llama-3.2-3b, 32 bits, 2 layers":
            raise KeyboardInterrupt
        yield [costs(model=item.name)]

    monkeypatch.setattr(suite, "stamp", lambda: MACHINE)
    monkeypatch.setattr(suite, "measured", measured)
    monkeypatch.setattr(suite, "items", lambda gpu: items(gpu=False))
    with pytest.raises(KeyboardInterrupt):
        suite.run(tmp_path / "mine.json", 9.0)
    found = json.loads((tmp_path / "mine.json").read_text())
    assert problem(found) is None and len(found["records"]) == 2
    assert [each.name for each in tmp_path.iterdir()] == ["mine.json"]


@pytest.mark.parametrize("word", ["--quick", "--model=x", "--max-tokens=9", "--prompts=code", "--json", "--temp=1"])
def test_a_suite_takes_no_flag_that_would_change_what_it_measures(word: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suite, "run", lambda *rest: pytest.fail("it went on"))
    with pytest.raises(RedrafterError, match=f"it takes no {word.partition('=')[0]}$"):
        run.run(flags(run, "--suite", "mac", word))


def test_a_suite_takes_a_file_and_a_time(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(suite, "run", lambda output, minutes: (output.name, minutes))
    assert run.run(flags(run, "--suite", "mac")) == ("results.json", 10.0)
    words = ("--suite", "mac", "--minutes", "2.5", "--output", str(tmp_path / "mine.json"))
    assert run.run(flags(run, *words)) == ("mine.json", 2.5)
