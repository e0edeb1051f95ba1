"""What results are made of: the form of a record, prompts by name, the machine's stamp, and the BLAS."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks import blas, prompts, record, stamp
from benchmarks.prompts import Prompt, categories, category_of, chosen, one_of_each, texts
from benchmarks.record import problem, read, write
from mlx_redrafter.demo import load_demo
from mlx_redrafter.errors import RedrafterError
from tests.bench_records import MACHINE, costs, line, speed

ROOT = Path(__file__).parents[1]


def kept(tmp_path: Path, *records: Any) -> Path:
    path = tmp_path / "results.jsonl"
    path.write_text("".join(json.dumps(each) + "\n" for each in records))
    return path


def test_what_is_written_is_read_again(tmp_path: Path) -> None:
    path, records = tmp_path / "new" / "results.jsonl", [line(costs()), line(speed())]
    write(path, records)
    assert read(path) == records
    assert [each.name for each in path.parent.iterdir()] == ["results.jsonl"]


def edited(change: Callable[[dict[str, Any]], Any]) -> dict[str, Any]:
    made = copy.deepcopy(line(speed()))
    change(made)
    return made


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda each: each.pop("ratio"), "'ratio' is a required property"),
        (lambda each: each.pop("machine"), "'machine' is a required property"),
        (lambda each: each.update(ratio="1.5"), r"\$.ratio: '1.5' is not of type 'number'"),
        (lambda each: each.update(ratio=0), r"\$.ratio"),
        (lambda each: each.update(ratio=float("nan")), "NaN is no number"),
        (lambda each: each.update(seconds=[float("inf")]), "Infinity is no number"),
        (lambda each: each.update(kind="speech"), "its kind must be one of speed, costs, suite, got 'speech'"),
        (lambda each: each.update(plan=[1, 3]), r"\$.plan"),
        (lambda each: each.update(contestant="me"), r"\$.contestant"),
        (lambda each: each.update(mood="good"), "mood"),
        (lambda each: each.update(schema=2), r"\$.schema"),
        (lambda each: each["machine"].pop("mlx"), "'mlx' is a required property"),
        (lambda each: each["machine"].update(cores=0), r"\$.machine.cores"),
        (lambda each: each.update(tokens=1), r"\$.tokens"),
    ],
)
def test_a_damaged_record_is_refused_with_its_line(tmp_path: Path, change: Any, message: str) -> None:
    path = kept(tmp_path, line(speed()), edited(change))
    with pytest.raises(RedrafterError, match=f"results.jsonl, line 2: .*{message}"):
        read(path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "expected results in .*, a JSON object a line, got an empty file"),
        ("[1]\n", "line 1: its kind must be one of speed, costs, suite, got None"),
        ("{\n", "line 1: expected a JSON object"),
        ("[" * 100_000 + "\n", "line 1: expected a JSON object"),
        ("\n", "line 1: expected a JSON object"),
    ],
)
def test_what_is_no_record_is_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "results.jsonl"
    path.write_text(text)
    with pytest.raises(RedrafterError, match=message):
        read(path)


def test_a_suite_is_no_line_of_a_file(tmp_path: Path) -> None:
    suite = {
        "schema": 1,
        "kind": "suite",
        "machine": MACHINE,
        "contributor": None,
        "skipped": [],
        "records": [speed(), costs()],
    }
    assert problem(suite) is None
    with pytest.raises(RedrafterError, match="line 1: a suite is a file of its own"):
        read(kept(tmp_path, suite))
    del suite["records"][0]["ratio"]  # type: ignore[index, attr-defined]
    assert problem(suite) is not None


def test_a_file_that_cannot_be_read_or_written_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(RedrafterError, match="cannot read results from"):
        read(tmp_path / "none.jsonl")
    (tmp_path / "file").touch()
    with pytest.raises(RedrafterError, match="cannot write results to"):
        write(tmp_path / "file" / "results.jsonl", [line(speed())])
    with pytest.raises(ValueError, match="not JSON compliant"):
        write(tmp_path / "nan.jsonl", [line(speed(ratio=float("nan")))])
    assert [each.name for each in tmp_path.iterdir()] == ["file"]


def test_without_jsonschema_one_line_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "jsonschema", None)
    with pytest.raises(RedrafterError, match="pip install"):
        record.problem(speed())


# Prompts


def test_prompts_are_of_six_categories_and_none_is_like_another() -> None:
    assert len(categories()) >= 6
    assert {category_of(name) for name in texts()} == set(categories())
    assert len(set(texts().values())) == len(texts()) and all(len(text) > 100 for text in texts().values())


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return load_demo()[1]


def test_prompts_are_chosen_by_name_by_category_and_all_at_once(tokenizer: Any) -> None:
    everything = chosen(["all"], tokenizer)
    assert [each.name for each in everything] == list(texts())
    name = everything[0].name
    assert [each.name for each in chosen([name], tokenizer)] == [name]
    kind = [each.name for each in everything if each.category == "code"]
    assert [each.name for each in chosen(["code", kind[0]], tokenizer)] == kind, "each once"
    own = chosen(["demo"], tokenizer)
    assert {each.category for each in own} == {"demo"} and own[0].name == "demo/01" and len(own) > 8


def test_prompts_of_ones_own_are_named_by_their_file(tmp_path: Path, tokenizer: Any) -> None:
    for folder, text in (("a", "one\n\ntwo\n"), ("b", "three\n")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "mine.txt").write_text(text)
    found = chosen([str(tmp_path / "a" / "mine.txt"), str(tmp_path / "b" / "mine.txt")], tokenizer)
    assert [(each.name, each.category) for each in found] == [
        ("mine.txt:1", "own"),
        ("mine.txt:2", "own"),
        ("mine.txt:1", "own"),
    ]
    assert [tokenizer.decode(each.ids) for each in found] == ["one", "two", "three"]
    assert [each.name for each in one_of_each(found)] == ["mine.txt:1"]


def test_one_of_each_category_is_its_first() -> None:
    made = [Prompt(name, category_of(name), [1]) for name in ("a/x", "a/y", "b/x", "a/z", "b/y")]
    assert [each.name for each in one_of_each(made)] == ["a/x", "b/x"]


@pytest.mark.parametrize("name", ["poetry", "code/none", "/nowhere/prompts.txt", ""])
def test_an_unknown_prompt_is_refused_with_those_there_are(name: str, tokenizer: Any, tmp_path: Path) -> None:
    with pytest.raises(RedrafterError, match=r"no prompt, category or file|cannot read the prompts"):
        chosen([name], tokenizer)
    with pytest.raises(RedrafterError, match=", ".join(prompts.categories())):
        chosen(["poetry"], tokenizer)


# The stamp


def test_a_stamp_says_the_machine_the_versions_and_the_day() -> None:
    found = stamp.stamp()
    assert {"device", "chip", "mlx", "mlx-lm", "mlx_redrafter", "when", "memory_gb"} <= set(found)
    assert problem(speed() | {"machine": found}) is None


@pytest.mark.parametrize(
    ("text", "cores"),
    [
        ('{"SPDisplaysDataType": [{"_name": "Apple M2", "sppci_cores": "10"}]}', 10),
        ('{"SPDisplaysDataType": [{"_name": "screen"}, {"sppci_cores": "38"}]}', 38),
        ('{"SPDisplaysDataType": []}', None),
        ('{"SPDisplaysDataType": [{"sppci_cores": "many"}]}', None),
        ('{"SPDisplaysDataType": 7}', None),
        ('{"Other": []}', None),
        ("[]", None),
        ("", None),
        ("not json", None),
    ],
)
def test_the_gpus_cores_are_read_or_not_told(text: str, cores: int | None) -> None:
    assert stamp.gpu_cores(text) == cores


@pytest.mark.parametrize(
    ("text", "source"),
    [
        ("Now drawing from 'AC Power'\n", "AC Power"),
        ("Now drawing from 'Battery Power'\n -InternalBattery-0 (id=1)\t81%; discharging;\n", "Battery Power"),
        ("Now drawing from ''\n", None),
        ("nothing to say", None),
        ("", None),
    ],
)
def test_the_source_of_power_is_read_or_not_told(text: str, source: str | None) -> None:
    assert stamp.power(text) == source


def test_on_a_mac_both_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = {"system_profiler": '{"SPDisplaysDataType": [{"sppci_cores": "10"}]}', "pmset": "from 'AC Power'"}
    monkeypatch.setattr(stamp.sys, "platform", "darwin")
    monkeypatch.setattr(stamp, "said", lambda *command: answers[command[0]])
    found = stamp.stamp()
    assert found["gpu_cores"] == 10 and found["power"] == "AC Power"


def test_a_command_that_is_not_there_or_fails_says_nothing() -> None:
    assert stamp.said("no-such-command-anywhere") == "" and stamp.said("false") == ""
    assert stamp.said("echo", "a") == "a\n"


# BLAS


def python(code: str) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, "-c", code]
    return subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False, timeout=120)


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere nothing is loaded")
def test_openblas_is_loaded_before_mlx_and_named_by_the_stamp() -> None:
    if blas.ctypes.util.find_library(blas.NAME) is None:
        pytest.skip("there is no OpenBLAS here")
    done = python(
        "from benchmarks.blas import load_openblas\nprint(load_openblas())\n"
        "from mlx_redrafter.planning.machine import describe_machine\n"
        "print(describe_machine().get('blas', 'openblas: a GPU'))"
    )
    loaded, told = done.stdout.splitlines()
    assert "openblas" in loaded and "openblas" in told and done.returncode == 0


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere nothing is loaded")
def test_openblas_is_refused_behind_mlx() -> None:
    done = python("import mlx.core\nfrom benchmarks.blas import load_openblas\nload_openblas()")
    assert done.returncode == 1 and "OpenBLAS must be loaded before MLX" in done.stderr


def test_without_an_openblas_that_loads_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blas.sys, "platform", "linux")
    monkeypatch.delitem(sys.modules, "mlx.core")
    for found in (None, "libno-such-library.so.0"):
        monkeypatch.setattr(blas.ctypes.util, "find_library", lambda name, found=found: found)
        assert blas.load_openblas() is None
    monkeypatch.setattr(blas.sys, "platform", "darwin")
    assert blas.load_openblas() is None
