"""The suite measures what fits, into one file that says what did not."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import pytest
from bench_records import MACHINE, make_costs, make_speed, parse_flags

from benchmarks import run
from benchmarks.contestants import Run, Settings
from benchmarks.models import Prompt
from benchmarks.records import find_problem
from benchmarks.run import Item, list_items, measure_item, run_suite
from mlx_redrafter.errors import RedrafterError


class Suite:
    """Items that move a clock on, in the place of what is measured."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        self.shares: list[float] = []
        patch.setattr(run, "perf_counter", lambda: self.now)
        patch.setattr(run, "measure_item", self.measure_item)
        patch.setattr(run, "stamp", lambda: MACHINE)

    def measure_item(self, item: Item, seconds: float) -> Iterator[Any]:
        self.shares.append(seconds)
        made: Any = item.make()
        yield from made

    def make_item(self, name: str, seconds: float, error: BaseException | None = None, *, early: bool = True) -> Item:
        """One that takes so many seconds; an error comes before its record, or after it."""

        def make() -> Any:
            self.now += seconds
            if error and early:
                raise error
            yield [make_costs(model=name)]
            if error:
                raise error

        return Item(name, make, [])


@pytest.fixture
def suite(monkeypatch: pytest.MonkeyPatch) -> Suite:
    return Suite(monkeypatch)


def read_names(path: Path) -> list[str]:
    found = json.loads(path.read_text())
    assert find_problem(found) is None and found["contributor"] is None
    return [each["model"] for each in found["records"]]


def test_items_share_the_time_that_is_left(suite: Suite, tmp_path: Path) -> None:
    items = [
        suite.make_item("one", 10),
        suite.make_item("two", 5, RedrafterError("it takes 50 GB,\nthis machine has 8 GB")),
        suite.make_item("three", 5, RuntimeError("[metal::malloc] too much")),
        suite.make_item("four", 20, MemoryError(), early=False),
        suite.make_item("five", 10),
    ]
    path = tmp_path / "new" / "mine.json"
    assert run_suite(items, path, 100 / 60) == 0
    assert suite.shares == pytest.approx([20, 90 / 4, 85 / 3, 80 / 2, 60]), "time that one leaves goes to the others"
    assert read_names(path) == ["one", "four", "five"]
    assert json.loads(path.read_text())["skipped"] == [
        {"name": "two", "why": "it takes 50 GB, this machine has 8 GB"},
        {"name": "three", "why": "[metal::malloc] too much"},
        {"name": "four", "why": "MemoryError"},
    ]
    before = path.read_bytes()
    with pytest.raises(RedrafterError, match=r"mine.json exists already: give another --output"):
        run_suite(items, path, 1.0)
    assert path.read_bytes() == before and [each.name for each in path.parent.iterdir()] == ["mine.json"]


def test_ctrl_c_leaves_the_finished_items(suite: Suite, tmp_path: Path) -> None:
    items = [suite.make_item("one", 1), suite.make_item("two", 1, KeyboardInterrupt())]
    with pytest.raises(KeyboardInterrupt):
        run_suite(items, tmp_path / "mine.json", 1.0)
    assert read_names(tmp_path / "mine.json") == ["one"]


def test_a_suite_of_nothing_leaves_no_file(suite: Suite, tmp_path: Path) -> None:
    with pytest.raises(RedrafterError, match=r"nothing fitted into 0.5 minutes, demo: it takes 49 s"):
        run_suite([suite.make_item("demo", 1, RedrafterError("it takes 49 s"))], tmp_path / "mine.json", 0.5)
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match="file"):
        run_suite([suite.make_item("one", 1), suite.make_item("two", 1)], tmp_path / "file" / "mine.json", 1.0)
    assert [each.name for each in tmp_path.iterdir()] == ["file"] and len(suite.shares) == 2


@pytest.mark.parametrize(
    ("seconds", "settings", "why"),
    [
        (1000.0, Settings(max_tokens=64, repeats=3), ""),
        (300.0, Settings(max_tokens=64, repeats=2), ""),
        (100.0, Settings(max_tokens=47, repeats=1), ""),
        (30.0, None, "16 tokens of everybody would take 35 s, 27 s are left"),
        (1.0, None, "its 1 s were over before everybody had decoded 16 tokens"),
        (0.0, None, "no time was left"),
    ],
)
def test_an_item_has_as_much_as_fits(
    seconds: float, settings: Settings | None, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, asked = 0.0, list[Settings]()

    def pass_time(*rest: Any) -> Run:
        nonlocal now
        now += 1.5
        return Run([0] * 16, 0.5, 7.5, None, 1)  # half a second to read two tokens, half a second for each one made

    def hold_contest(workload: Any, sides: Any, settings: Settings) -> Iterator[Any]:
        asked.append(settings)
        yield [make_speed()]

    prompts = [Prompt("a/b", "a", [1, 2]), Prompt("b/b", "b", [1, 2, 3, 4])]
    for name, value in {
        "perf_counter": lambda: now,
        "measure_costs": lambda workload: make_costs(),
        "make_contestants": lambda *rest, **more: [None] * 2,
        "warm_up": pass_time,
        "hold_contest": hold_contest,
    }.items():
        monkeypatch.setattr(run, name, value)
    made: Any = SimpleNamespace(prompts=prompts)
    item, kinds = Item("small", lambda: made, []), []
    try:
        kinds += [record["kind"] for records in measure_item(item, seconds) for record in records]
    except RedrafterError as error:
        assert str(error) == why and settings is None
    else:
        assert kinds == ["costs", "speed"] and asked == [settings]


def test_the_suite_goes_from_small_to_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run.mx, "default_device", lambda: mx.Device(mx.gpu))
    names = [item.name for item in list_items()]
    assert names[:2] == ["demo", "llama-3.2-1b, 4 bits, 16 layers"] and len(names) == 8
    monkeypatch.setattr(run.mx, "default_device", lambda: mx.Device(mx.cpu))
    assert [item.name for item in list_items()][1:] == [
        "llama-3.2-1b, 32 bits, 2 layers",
        "llama-3.2-3b, 32 bits, 2 layers",
    ]


@pytest.mark.parametrize("word", ["--quick", "--model=x", "--max-tokens=9", "--prompts=code", "--json", "--temp=1"])
def test_a_suite_takes_no_other_flags(word: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "run_suite", lambda *rest: pytest.fail("it went on"))
    with pytest.raises(RedrafterError, match=f"it takes no {word.partition('=')[0]}$"):
        run.run(parse_flags(run, "--suite", "mac", word))


def test_a_suite_takes_a_file_and_minutes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(run, "run_suite", lambda items, output, minutes: (output.name, minutes))
    assert run.run(parse_flags(run, "--suite", "mac")) == ("results.json", 10.0)
    words = ("--suite", "mac", "--minutes", "2.5", "--output", str(tmp_path / "mine.json"))
    assert run.run(parse_flags(run, *words)) == ("mine.json", 2.5)
