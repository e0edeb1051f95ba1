"""The suite measures what fits in the time limit and records what it skipped."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.nn as nn
import pytest

from benchmarks import run
from benchmarks.models import NamedPrompt, Workload
from benchmarks.records import explain_invalid
from benchmarks.run import run_suite
from helpers.bench_records import MACHINE, make_costs
from helpers.few_rows import fake_metal
from helpers.refusals import refusal
from helpers.small import small_drafter, small_llama
from mlx_redrafter.errors import RedrafterError
from mlx_redrafter.files import write_text


class Suite:
    """Fake benchmark items that advance a fake clock."""

    def __init__(self, patch: pytest.MonkeyPatch):
        self.now = 0.0
        patch.setattr(run, "perf_counter", lambda: self.now)
        patch.setattr(run, "measure_item", lambda item, records, *_, **__: item(records))
        patch.setattr(run, "stamp", lambda: MACHINE)

    def make_item(
        self, name: str, error: BaseException | None = None, *, early: bool = True
    ) -> Callable[[], Any]:
        """An item of ten seconds; `error` is raised before or after its record."""

        def make():
            self.now += 10
            if error and early:
                raise error

            def measure(records):
                records.append(make_costs(model=name))
                if error:
                    raise error

            return measure

        return make


@pytest.fixture
def suite(monkeypatch) -> Suite:
    return Suite(monkeypatch)


def read_names(path: Path) -> list[str]:
    found = json.loads(path.read_text())
    assert explain_invalid(found) is None
    assert found["contributor"] is None
    return [each["model"] for each in found["records"]]


def test_failed_and_skipped_items_are_named(suite, tmp_path, capsys):
    items = {
        "one": suite.make_item("one"),
        "two": suite.make_item("two", RedrafterError("it takes 50 GB,\nthis machine has 8 GB")),
        "three": suite.make_item("three", RuntimeError("[metal::malloc] too much")),
        "four": suite.make_item("four", MemoryError(), early=False),
        "five": suite.make_item("five"),
        "six": suite.make_item("six"),
    }
    path = tmp_path / "new" / "mine.json"
    assert run_suite(items, path, 45 / 60) == 0
    assert read_names(path) == ["one", "four", "five"]
    assert json.loads(path.read_text())["skipped"] == [
        {"name": "two", "why": "it takes 50 GB, this machine has 8 GB"},
        {"name": "three", "why": "[metal::malloc] too much"},
        {"name": "four", "why": "MemoryError"},
        {"name": "six", "why": "no time was left"},
    ]
    text = capsys.readouterr().out
    assert text.startswith("Some Chip, 16 GB\nSome Chip, 4 cores, Some-OS-1.0, mlx 0.32.4, ")
    assert "| one, 32 bits | 10.00 | 1: 1.10, 2: 1.20, " in text
    assert "- skipped: six: no time was left\n" in text
    before = path.read_bytes()
    with refusal(r"mine.json exists already: give another --output"):
        run_suite(items, path, 1.0)
    assert path.read_bytes() == before
    assert list(path.parent.iterdir()) == [path]


def test_the_suite_shows_progress_and_writes_after_each_prompt(tmp_path, monkeypatch, capsys):
    sizes = []

    def note_size(path, text):
        sizes.append(len(json.loads(text)["records"]))
        write_text(path, text)

    monkeypatch.setattr(run, "stamp", lambda: MACHINE)
    monkeypatch.setattr(run, "measure_costs_record", lambda workload: make_costs())
    monkeypatch.setattr(run, "write_text", note_size)
    monkeypatch.setattr(run, "QUICK_TOKENS", 4)
    monkeypatch.setattr(run, "QUICK_PLANS", [(1, 1)])
    prompts = [NamedPrompt(f"code/{n}", "code", [n, 2, 3]) for n in range(3)]
    workload = Workload("tiny", small_llama(), small_drafter(), "random", None, None, prompts)
    assert run_suite({"tiny": lambda: workload}, tmp_path / "mine.json", 1.0) == 0
    sides = 3  # plain, mlx-lm, 1 x 1
    assert sizes[:4] == [1, 1 + sides, 1 + 2 * sides, 1 + 3 * sides]
    said = capsys.readouterr().err
    assert "tiny: measuring the parts of a round" in said
    assert "tiny: warming up" in said
    n_runs = 3 * 3 * sides
    assert f"{n_runs}/{n_runs}" in said


def test_the_suite_has_the_verdicts_on_the_kernel_for_a_few_rows(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(run, "stamp", lambda: MACHINE)
    monkeypatch.setattr(run, "QUICK_TOKENS", 4)
    monkeypatch.setattr(run, "QUICK_PLANS", [(1, 1)])
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "caches"))
    metal = fake_metal(monkeypatch)
    metal.ms = lambda matmuls: 2.0 if min(matmuls)[:2] == (3, 192) else 0.25
    model = small_llama(hidden=96, vocab=64)
    nn.quantize(model, group_size=32, bits=4)
    drafter = small_drafter(hidden=96, vocab=64)
    prompts = [NamedPrompt("code/1", "code", [1, 2, 3])]
    workload = Workload("tiny", model, drafter, "random", None, None, prompts)
    path = tmp_path / "mine.json"
    assert run_suite({"tiny": lambda: workload}, path, 1.0) == 0
    text = capsys.readouterr().out
    name = "192 x 96, 4 bits in 32s, float32"
    speedups = "4.00 | 0.50 (too slow) | 4.00 | 4.00 | 4.00 | 4.00 | 4.00"
    assert f"| tiny | {name} | {speedups} |\n" in text
    assert "| tiny | whole forward | 4.00 |  |  |" in text
    assert read_names(path) == ["tiny"] * 4
    costs, *speeds = json.loads(path.read_text())["records"]
    assert {each["verdict"] for each in costs["few_rows"]} == {"used", "too slow", "faster"}
    assert [each["few_rows"] for each in speeds] == [[], [], [2, 3, 4, 5, 6, 7, 8]]
