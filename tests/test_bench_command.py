"""`python -m benchmarks` as somebody types it: a table and records, or one line that says why not."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks import measuring, predict, round_time, run, shapes, suite, sweep, synthetic
from benchmarks.command import COMMANDS, make_parser
from benchmarks.contest import RunOptions
from benchmarks.prompts import Prompt
from benchmarks.record import print_lines, problem, read
from benchmarks.subject import Subject, open_subject
from benchmarks.targets import TargetShape
from mlx_redrafter import demo
from mlx_redrafter.checkpoints import save_drafter
from mlx_redrafter.errors import RedrafterError
from tests.bench_records import MACHINE, costs, flags
from tests.small import small_drafter, small_llama

ROOT = Path(__file__).parents[1]


def command(*words: str) -> subprocess.CompletedProcess[str]:
    every = [sys.executable, "-m", "benchmarks", *words]
    return subprocess.run(every, cwd=ROOT, capture_output=True, text=True, check=False, timeout=300)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("run --plans 0,3", "--plans: expected W,K or W,K,N, whole numbers above 0, got '0,3'"),
        ("run --plans a,b", "got 'a,b'"),
        ("run --plans 1,2,3,4", "got '1,2,3,4'"),
        ("run --plans 1,", "got '1,'"),
        ("run --repeats 0", "--repeats: expected a whole number above 0, got '0'"),
        ("run --max-tokens -1", "--max-tokens: expected"),
        ("run --seed -1", "--seed: expected a whole number from 0 to 2^64 - 1, got '-1'"),
        ("run --seed 18446744073709551616", "--seed: expected"),
        ("run --minutes nan", "--minutes: expected a number of minutes above 0, got 'nan'"),
        ("run --minutes 0", "--minutes: expected"),
        ("run --minutes inf", "--minutes: expected"),
        ("run --suite pc", "invalid choice: 'pc'"),
        ("sweep --sizes half", "--sizes: expected a whole number above 0, got 'half'"),
        ("sweep --draft-model x", "unrecognized arguments: --draft-model x"),
        ("sweep --num-draft-tokens 2", "unrecognized arguments: --num-draft-tokens 2"),
        ("synthetic --temp 1", "unrecognized arguments: --temp 1"),
        ("synthetic --bits 7", "invalid choice: 7"),
        ("acceptance --max-tokens -1", "--max-tokens: expected a whole number above 0, got '-1'"),
        ("acceptance --draft-model x", "unrecognized arguments: --draft-model x"),
        ("ties --max-tokens 0", "--max-tokens: expected a whole number above 0"),
        ("ties --kinds 5", "--kinds: invalid choice: '5'"),
        ("round --repeats 0", "--repeats: expected a whole number above 0"),
        ("round --synthetic 100,1", "expected D a multiple of 64 and LAYERS at least 1, got '100,1'"),
        ("measure", "invalid choice: 'measure'"),
        ("", "arguments are required"),
    ],
)
def test_a_flag_that_cannot_be_is_refused_by_the_parser(
    words: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        make_parser().parse_args(words.split())
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err.strip().splitlines()[-1]


@pytest.mark.parametrize("name", COMMANDS)
def test_help_says_what_a_command_does(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        make_parser().parse_args([name, "--help"])
    assert stopped.value.code == 0 and "python -m benchmarks " + name in capsys.readouterr().out


def test_a_bad_name_is_one_line_and_a_status() -> None:
    done = command("synthetic", "--shape", "nope")
    assert done.returncode == 1 and done.stdout == ""
    assert done.stderr.startswith("error: no shape is called 'nope'") and done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("chip", "most"), [("m2-ultra", "398777 plain steps of 25.0767 ms"), ("m5-max", "131752 plain steps of 75.9 ms")]
)
def test_a_draft_whose_time_is_no_number_is_not_predicted(
    chip: str, most: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("--chip", chip, "--draft-depth", "4", "--tokens-per-round", "2", "--output", str(tmp_path / "out.json"))
    with pytest.raises(RedrafterError, match=f"^draft_step must be at most {most} on {chip}, got 1e.308$"):
        predict.run(flags(predict, *words, "--json", "--draft-step", "1e308"))
    assert capsys.readouterr().out == "" and not list(tmp_path.iterdir())
    assert predict.run(flags(predict, *words, "--json", "--draft-step", "1e5")) == 0
    assert json.loads(capsys.readouterr().out)["predicted_x_plain"] < 1e-5


def test_what_is_no_number_is_never_printed_as_json(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    row = {"ms": float("inf")}
    monkeypatch.setattr(predict, "predict_plan", lambda args: row)
    asked = flags(predict, "--chip", "m2", "--draft-depth", "2", "--json")
    for show in (
        lambda: print_lines([row]),
        lambda: shapes.show(flags(round_time, "--json"), [row]),
        lambda: predict.run(asked),
    ):
        with pytest.raises(ValueError, match="not JSON compliant"):
            show()
    assert capsys.readouterr().out == ""


@pytest.fixture
def two(monkeypatch: pytest.MonkeyPatch) -> Subject:
    """A small pair, in the place of what `run` would load; no costs are measured."""
    prompts = [Prompt("code/one", "code", [1, 2, 3]), Prompt("chat/two", "chat", [4, 5])]
    found = Subject("small", small_llama(layers=1), small_drafter(), "random", None, None, prompts)
    monkeypatch.setattr(run, "open_subject", lambda args: found)
    monkeypatch.setattr(measuring, "stamp", lambda: MACHINE)
    monkeypatch.setattr(measuring, "costs_record", lambda subject: costs())
    return found


QUICKLY = ("--plans", "1,2", "--max-tokens", "4", "--repeats", "1")


def test_run_prints_a_table_and_keeps_records(two: Subject, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "new" / "records.jsonl"
    assert run.run(flags(run, *QUICKLY, "--output", str(path))) == 0
    said = capsys.readouterr()
    assert "contestant" in said.out and "mlx-lm" in said.out and "1 x 2" in said.out and '"mlx": "0.32.4"' in said.out
    assert [text.split(",")[0] for text in said.err.splitlines()] == [
        "small: measuring the parts of a round",
        "1 of 2: code/one",
        "2 of 2: chat/two",
    ]
    assert [(each["kind"], each.get("contestant")) for each in read(path)] == [
        ("costs", None),
        *[("speed", name) for name in ("plain", "mlx-lm", "drafted")] * 2,
    ]
    assert [each.name for each in path.parent.iterdir()] == ["records.jsonl"]


def test_a_sweep_measures_plain_decoding_and_its_plans_alone(
    two: Subject, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sweep, "open_subject", lambda args: two)
    words = ("--widths", "1", "2", "--depths", "1", "--sizes", "whole", "--max-tokens", "4", "--repeats", "1")
    assert sweep.run(flags(sweep, *words, "--json")) == 0
    found = [json.loads(text) for text in capsys.readouterr().out.splitlines()]
    sides = [(each.get("contestant"), each.get("plan")) for each in found]
    assert sides == [(None, None), *[("plain", "off"), ("drafted", [1, 1, 2]), ("drafted", [2, 1, 3])] * 2]
    assert open_subject(flags(sweep)).draft_model is None


def test_json_prints_the_very_records_that_are_kept(
    two: Subject, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "records.jsonl"
    assert run.run(flags(run, *QUICKLY, "--json", "--output", str(path))) == 0
    assert [json.loads(text) for text in capsys.readouterr().out.splitlines()] == read(path)


@pytest.mark.parametrize("busy", [True, False])
def test_times_that_contradict_each_other_are_told_in_one_line_on_stderr(
    busy: bool, two: Subject, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    table = costs()["costs"] | ({"level": [1.0, 0.5]} if busy else {})
    monkeypatch.setattr(measuring, "costs_record", lambda subject: costs(costs=table))
    monkeypatch.setattr(suite, "costs_record", lambda subject: costs(costs=table))
    assert run.run(flags(run, *QUICKLY, "--json")) == 0
    item = suite.Item("small", lambda: two, [(1, 2)], False)
    assert next(suite.measured(item, 100.0))[0]["costs"] == table
    said = capsys.readouterr()
    assert {json.loads(text)["kind"] for text in said.out.splitlines()} == {"costs", "speed"}
    why = "demo: the measured times contradict each other: the machine was busy with something else. "
    told = [text for text in said.err.splitlines() if "busy" in text]
    assert told == ([why + "Run this again when it is not"] * 2 if busy else [])


@pytest.mark.parametrize(("liar", "status"), [("drafted", 1), ("mlx-lm", 1), ("mlx-lm draft model", 0)])
def test_a_token_that_differs_makes_the_status_1_and_one_of_mlx_lms_speculation_stands_in_the_table(
    liar: str, status: int, two: Subject, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = replace(two, draft_model=two.model, draft_model_name="itself")
    monkeypatch.setattr(run, "open_subject", lambda args: found)
    held = measuring.hold

    def lying(*rest: Any) -> Any:
        lie = {"same_tokens": False, "first_difference": 2}
        for records in held(*rest):
            yield [each | lie if each["contestant"] == liar else each for each in records]

    monkeypatch.setattr(measuring, "hold", lying)
    assert run.run(flags(run, *QUICKLY)) == status
    assert "0 of 2" in capsys.readouterr().out


def test_ctrl_c_leaves_the_prompts_that_are_done_and_nothing_by_halves(
    two: Subject, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    held = measuring.hold

    def broken_off(*rest: Any) -> Any:
        yield next(held(*rest))
        raise KeyboardInterrupt

    monkeypatch.setattr(measuring, "hold", broken_off)
    path = tmp_path / "records.jsonl"
    with pytest.raises(KeyboardInterrupt):
        run.run(flags(run, *QUICKLY, "--output", str(path)))
    assert {each.get("prompt") for each in read(path)} == {None, "code/one"}
    assert [each.name for each in tmp_path.iterdir()] == ["records.jsonl"]
    monkeypatch.setattr(suite, "everything", lambda *rest: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        suite.run(tmp_path / "suite.json", 1.0)
    assert [each.name for each in tmp_path.iterdir()] == ["records.jsonl"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--max-tokens 1", "--max-tokens must be at least 2"),
        ("--temp -1", "temp must be at least 0, got -1.0"),
        ("--temp nan", "temp must be at least 0, got nan"),
        ("--plans 65,1", "beam_width must be from 1 to the vocabulary's 64, got 65"),
        ("--plans 2,2,9", "tree_size counts the root"),
        ("--minutes 3", "--minutes belongs to --suite"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_measured(
    words: str, message: str, two: Subject, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(measuring, "costs_record", lambda subject: pytest.fail("it went on"))
    with pytest.raises(RedrafterError, match=message):
        run.run(flags(run, *words.split(), "--output", str(tmp_path / "x.jsonl")))
    assert not list(tmp_path.iterdir())


def test_a_place_that_cannot_be_written_to_is_refused_beforehand(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(run, "open_subject", lambda args: pytest.fail("it went on"))
    (tmp_path / "file").touch()
    for place in (tmp_path, tmp_path / "file" / "x.jsonl", tmp_path / "file" / "deeper" / "x.jsonl"):
        with pytest.raises(RedrafterError, match=r"expected a file to write to, got .* is (a|not a) directory"):
            run.run(flags(run, "--output", str(place)))
    monkeypatch.setattr(os, "access", lambda *rest: False)
    with pytest.raises(RedrafterError, match="no permission to write to"):
        run.run(flags(run, "--output", str(tmp_path / "x.jsonl")))
    monkeypatch.undo()
    monkeypatch.setenv("HOME", str(tmp_path))
    assert measuring.checked(Path("~/new/x.jsonl")) == tmp_path / "new" / "x.jsonl"


@pytest.mark.parametrize("words", [("--plans", "1,2"), ("--random-drafter",)])
def test_plans_need_a_drafter(words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    bare = Subject("small", small_llama(), None, None, None, None, [])
    monkeypatch.setattr(run, "open_subject", lambda args: bare)
    with pytest.raises(RedrafterError, match=f"{words[0]} needs the --drafter"):
        run.run(flags(run, *words))


def test_a_drafter_or_draft_model_of_another_model_is_refused(tmp_path: Path) -> None:
    save_drafter(tmp_path / "other", small_drafter())
    with pytest.raises(RedrafterError, match="expects hidden size 32, the target has"):
        open_subject(flags(run, "--drafter", str(tmp_path / "other")))
    shutil.copytree(Path(demo.__file__).parent / "target", tmp_path / "fewer")
    tokenizer = json.loads((tmp_path / "fewer" / "tokenizer.json").read_text())
    tokenizer["model"]["vocab"].popitem()
    tokenizer["model"]["merges"] = []
    (tmp_path / "fewer" / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(RedrafterError, match=r"the draft model must have the target's vocabulary of .* tokens, .* has"):
        open_subject(flags(run, "--draft-model", str(tmp_path / "fewer")))


def test_quick_takes_a_prompt_of_each_category_and_fewer_tokens() -> None:
    args = flags(run, "--quick")
    found = open_subject(args)
    assert len(found.prompts) == len({each.category for each in found.prompts}) >= 6
    asked = measuring.options(args)
    assert asked == RunOptions(max_tokens=64, repeats=1) and RunOptions().max_tokens == 128
    assert measuring.options(flags(run, "--quick", "--max-tokens", "9", "--repeats", "2")) == RunOptions(9, repeats=2)


def test_synthetic_measures_without_any_download_and_all_say_the_same(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    tiny = TargetShape("tiny", "llama", 64, 2, 128, 4, 2, 16, 512, True)
    monkeypatch.setattr(synthetic, "target_of", lambda name: tiny)
    monkeypatch.setattr(measuring, "costs_record", lambda subject: costs())
    path = tmp_path / "tiny.jsonl"
    words = ("--plans", "1,3", "--dtype", "float32", "--bits", "8", "--max-tokens", "12", "--repeats", "2")
    assert synthetic.run(flags(synthetic, *words, "--acceptance", "0.8", "--output", str(path))) == 0
    records = read(path)
    assert [each["same_tokens"] for each in records[1:]] == [None, True, True]
    assert {problem(each) for each in records} == {None}
    assert records[1]["model"] == "tiny, random weights" and records[3]["tokens_per_round"] > 1
    assert 0 < records[1]["peak_memory_gb"] < 4
