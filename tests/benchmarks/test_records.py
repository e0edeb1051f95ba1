"""Records survive a round trip; damaged ones are rejected with their line number."""

import copy
import json
import subprocess
from pathlib import Path

import pytest

from benchmarks import records
from benchmarks.records import (
    CONTRIBUTED,
    explain_invalid,
    read_records,
    read_results,
    stamp,
    write_records,
)
from helpers.bench_records import MACHINE, make_costs, make_line, make_speed
from helpers.jsonl import write_jsonl
from helpers.refusals import refusal


def test_records_survive_a_round_trip(tmp_path):
    path = tmp_path / "new" / "results.jsonl"
    lines = [make_line(make_costs()), make_line(make_speed())]
    write_records(path, lines)
    assert read_records(path) == lines
    with pytest.raises(ValueError, match="not JSON compliant"):
        write_records(path, [make_line(make_speed(ratio=float("nan")))])
    assert read_records(path) == lines
    assert list(path.parent.iterdir()) == [path]


def test_committed_results_are_valid():
    found = read_results(records.RESULTS)
    assert {"specbench", "demo-edits", "demo-code", "smollm2-recurrent", "synthetic-8b"} <= set(
        found.files
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda each: each.pop("ratio"), "'ratio' is a required property"),
        (lambda each: each.pop("machine"), "expected a field 'machine'"),
        (lambda each: each.update(ratio="1.5"), r"\$.ratio: '1.5' is not of type 'number'"),
        (
            lambda each: each.update(kind="speech"),
            "kind must be one of speed, costs, suite, got 'speech'",
        ),
        (lambda each: each.update(schema=2), r"\$.schema"),
        (lambda each: each["machine"].pop("mlx"), "'mlx' is a required property"),
    ],
)
def test_damaged_records_are_refused_with_their_line(tmp_path, change, message):
    damaged = copy.deepcopy(make_line(make_speed()))
    change(damaged)
    path = write_jsonl(tmp_path / "results.jsonl", (make_line(make_speed()), damaged))
    with refusal(f"results.jsonl, line 2: .*{message}"):
        read_records(Path(path))


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"contributor": None}, "ada.json has no contributor: fill in its 'contributor' field"),
        ({"records": [{**make_speed(), "ratio": "fast"}]}, "ada.json: "),
    ],
)
def test_damaged_or_unsigned_contributions_are_refused(tmp_path, more, message):
    suite = {
        "schema": 1,
        "kind": "suite",
        "machine": MACHINE,
        "contributor": "Ada",
        "skipped": [],
    }
    suite["records"] = [make_speed(), make_costs()]
    path = tmp_path / CONTRIBUTED / "ada.json"
    path.parent.mkdir()
    path.write_text(json.dumps(suite))
    assert explain_invalid(suite) is None
    assert read_results(tmp_path).contributed == [suite]
    path.write_text(json.dumps(suite | more))
    with refusal(message):
        read_results(tmp_path)


@pytest.mark.parametrize("platform", ["linux", "darwin"])
def test_stamps_satisfy_the_schema(platform, monkeypatch):
    said = {
        "ioreg": '+-o AGXAcceleratorG14X\n    {\n      "gpu-core-count" = 38\n    }\n',
        "pmset": "Now drawing from 'AC Power'\n -Internal 81%",
    }

    def answer(command, **options):
        return subprocess.CompletedProcess(command, 0, stdout=said.get(command[0], ""))

    monkeypatch.setattr(records.sys, "platform", platform)
    monkeypatch.setattr(subprocess, "run", answer)
    found = stamp()
    assert explain_invalid(make_speed() | {"machine": found}) is None
    mac = {"gpu_cores": 38, "power": "AC Power"} if platform == "darwin" else {}
    assert {name: found[name] for name in ("gpu_cores", "power") if name in found} == mac
