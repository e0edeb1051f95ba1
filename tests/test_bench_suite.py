"""The suite measures what fits, into one file that says what did not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import run, suite
from benchmarks.contest import MLX_LM_DRAFT, Options, contestants
from benchmarks.subject import open_subject
from benchmarks.suite import Item, everything, items
from mlx_redrafter.errors import RedrafterError
from tests.bench_records import MACHINE, costs, flags, speed


def test_the_suite_begins_with_the_demo_and_goes_from_small_to_large() -> None:
    names = [item.name for item in items(gpu=True)]
    assert names[:2] == ["demo", "llama-3.2-1b, 16 bits, 16 layers"] and names[-1].startswith("gemma-3-27b")
    assert [item.name for item in items(gpu=False)] == [
        "demo",
        "llama-3.2-1b, 32 bits, 2 layers",
        "llama-3.2-3b, 32 bits, 2 layers",
    ]


def test_the_demo_of_the_suite_is_that_of_a_quick_run_with_mlx_lms_own_speculation() -> None:
    found, quick = suite.demo(), open_subject(flags(run, "--quick"))
    assert found.described == quick.described and found.prompts == quick.prompts
    assert MLX_LM_DRAFT in {side.kind for side in contestants(found, [], Options())}


class Pace:
    """A clock that the items of a suite move on."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        patch.setattr(suite, "perf_counter", lambda: self.now)
        patch.setattr(suite, "measured", self.measured)
        self.shares: list[float] = []

    def measured(self, item: Item, share: float) -> Any:
        self.shares.append(share)
        return item.make()

    def item(self, name: str, seconds: float, error: Exception | None = None) -> Item:
        def make() -> Any:
            self.now += seconds
            if error is not None:
                raise error
            return [{"name": name}]

        return Item(name, make, [], False)


def test_what_does_not_fit_is_skipped_and_named(monkeypatch: pytest.MonkeyPatch) -> None:
    pace = Pace(monkeypatch)
    told: list[str] = []
    found = [
        pace.item("one", 10),
        pace.item("two", 5, RedrafterError("it takes 50 GB,\nthis machine has 8 GB")),
        pace.item("three", 5, RuntimeError("[metal::malloc] too much")),
        pace.item("four", 100),
        pace.item("five", 10),
    ]
    records, skipped = everything(found, 100.0, told.append)
    assert [each["name"] for each in records] == ["one", "four"]
    assert skipped == [
        {"name": "two", "why": "it takes 50 GB, this machine has 8 GB"},
        {"name": "three", "why": "[metal::malloc] too much"},
        {"name": "five", "why": "no time was left"},
    ]
    assert pace.shares == pytest.approx([20, 90 / 4, 85 / 3, 80 / 2]), "time that one leaves goes to the others"
    assert told[1] == "two: skipped, it takes 50 GB, this machine has 8 GB"


def test_a_pair_that_is_too_slow_for_its_share_is_refused_and_a_quick_one_has_all_its_tokens(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[Any] = []
    subject = type("Two", (), {"prompts": [0, 1]})()
    monkeypatch.setattr(suite, "costs_record", lambda subject: costs())  # a plain step takes 10 ms
    monkeypatch.setattr(suite, "contestants", lambda *rest, **more: [None] * 5)
    monkeypatch.setattr(suite, "hold", lambda subject, sides, options: asked.append(options) or [])
    monkeypatch.setattr(suite, "perf_counter", lambda: 0.0)
    item = Item("two", lambda: subject, [], False)
    for seconds in (100.0, 10.0, 2.0):
        suite.measured(item, seconds)
    assert [(each.max_tokens, each.repeats) for each in asked] == [(128, 3), (33, 3), (20, 1)]
    with pytest.raises(RedrafterError, match="16 tokens of 5 contestants would take 2 s"):
        suite.measured(item, 1.5)


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
