"""`python -m mlx_redrafter.train`: a whole run as a user sees it, stopped, killed, resumed, and refused."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import fields
from importlib import import_module
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from checkpoints import same, tensors
from mlx_lm.utils import load

from mlx_redrafter import generate_step, load_drafter
from mlx_redrafter.atomic_files import lock_file
from mlx_redrafter.checkpoints import save_drafter
from mlx_redrafter.demo import DIRECTORY, demo_prompts
from mlx_redrafter.drafters.recurrent import Drafter, DrafterArgs
from mlx_redrafter.engine.supported_models import REFUSED
from mlx_redrafter.errors import RedrafterError
from mlx_redrafter.generate import encode
from mlx_redrafter.training import command, measuring, run
from mlx_redrafter.training.command import make_parser, make_settings
from mlx_redrafter.training.settings import Settings
from mlx_redrafter.training.sources import base_name

ROOT = Path(__file__).parent.parent
QUICK = (
    *("--exit-dim", "32", "--iters", "8", "--batch-size", "2", "--max-tokens", "10", "--draft-depth", "3"),
    *("--steps-per-eval", "4", "--val-prompts", "1", "--val-tokens", "8", "--save-every", "2"),
    *("--steps-per-report", "2"),
)


def prompts(directory: Path) -> Path:
    path = directory / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": text[:60]}) + "\n" for text in demo_prompts()))
    return path


def ended(*arguments: str | Path, code: Sequence[str] = ("-m", "mlx_redrafter.train")) -> tuple[int, str, str]:
    """(exit status, stdout, stderr)."""
    done = subprocess.run(
        [sys.executable, *code, *map(str, arguments)],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=600,
    )
    return done.returncode, done.stdout, done.stderr


SIGNALLED = """import os, runpy, sys
from mlx_redrafter.training import run
number, real = int(sys.argv.pop(1)), run.validated
def validated(*args):
    os.kill(os.getpid(), number)
    return real(*args)
run.validated = validated
runpy.run_module("mlx_redrafter.train", run_name="__main__")
"""
"""A run that gets the signal of its first argument when it is about to validate: after iteration 4 of 8."""


def settings(tmp_path: Path, output: str, target: str | None, **changes: Any) -> Settings:
    """`QUICK` ones, with prompts and an output in that directory; no target is the packaged demo's."""
    args = make_parser().parse_args([*QUICK, "--prompts", str(prompts(tmp_path)), "--output", str(tmp_path / output)])
    return make_settings(args).__class__(**{**vars(make_settings(args)), "model": target, **changes})


def small_target(place: Path, **config: Any) -> str:
    """A directory with a random model of that config, which says four words mostly, and the demo's tokenizer."""
    shutil.copytree(DIRECTORY / "target", place, ignore=shutil.ignore_patterns("*.safetensors"))
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "intermediate_size": 32, "num_attention_heads": 2}
    whole = json.loads((place / "config.json").read_text()) | sizes | {"num_key_value_heads": 1} | config
    (place / "config.json").write_text(json.dumps(whole))
    home = import_module(f"mlx_lm.models.{whole['model_type']}")
    mx.random.seed(0)
    model = home.Model(home.ModelArgs.from_dict(whole))
    table = model.model.embed_tokens
    table.weight = table.weight * mx.where(mx.arange(whole["vocab_size"]) % 500 == 100, 8.0, 1.0)[:, None]
    model.save_weights(str(place / "model.safetensors"))
    return str(place)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> str:
    """What the runs train for: a fraction of the demo's cost, and all that a run does."""
    return small_target(tmp_path_factory.mktemp("small") / "target")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, target: str) -> tuple[Path, str]:
    """(the directory of a run that was never stopped, what it said)."""
    place = tmp_path_factory.mktemp("whole")
    status, out, said = ended("--model", target, "--prompts", prompts(place), "--output", place / "drafter", *QUICK)
    assert (status, out) == (0, ""), said
    return place / "drafter", said


def test_a_run_says_what_it_takes_what_it_did_and_how_to_use_it(whole: tuple[Path, str]) -> None:
    place, said = whole
    assert re.search(
        r"drafter: exit_dim 32, blocks 1, 0\.\d\d M parameters\nexpected: about \d+ s, \d+ s of them for", said
    )
    assert re.search(
        r"iteration 4: validation loss \d\.\d+, right at depth 1, 2, \.\.\.: (0\.\d\d ?){3}; \d\.\d\d tok", said
    )
    assert re.search(r"\n  W   K    N  tokens/round .*\n  1   1    2 ", said)
    command = said.splitlines()[-1].split()
    assert command[:3] == ["python", "-m", "mlx_redrafter.generate"] and str(place) in command
    done = subprocess.run(
        [sys.executable, *command[1:], "--max-tokens", "8", "--json"],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr


def test_the_finished_directory(whole: tuple[Path, str], target: str) -> None:
    place, _ = whole
    assert {path.name for path in place.iterdir()} == {
        *("config.json", "model.safetensors", "README.md", "training.json", "training.png", "training"),
    }
    config = json.loads((place / "config.json").read_text())
    assert 1 <= config["draft_depth"] <= 3 and config["base_model"] == str(Path(target).resolve())
    shares = np.array(config["acceptance"])
    assert shares.shape == (3, 8) and (shares >= 0).all() and (shares.sum(axis=1) <= 1).all() and shares.max() > 0
    summary = json.loads((place / "training.json").read_text())
    assert [entry["iteration"] for entry in summary["reports"]] == [2, 4, 6, 8]
    assert [entry["iteration"] for entry in summary["validations"]] == [4, 8]
    assert all(row["same_tokens"] for row in summary["measured"])
    assert summary["settings"]["iters"] == 8
    assert (place / "training.png").read_bytes().startswith(b"\x89PNG")
    assert (place / "README.md").read_text().startswith("---\nlibrary_name: mlx\n")
    model, tokenizer = load(target)
    drafter = load_drafter(place, model)
    ids = encode(tokenizer, demo_prompts()[1])
    plain = [token for token, _, _ in generate_step(ids, model, max_tokens=12)]
    assert [token for token, _, _ in generate_step(ids, model, drafter, max_tokens=12, beam_width=2)] == plain


def test_a_killed_run_goes_on_to_the_same_drafter(whole: tuple[Path, str], target: str, tmp_path: Path) -> None:
    chosen = settings(tmp_path, "drafter", target)
    arguments = ("--model", target, "--prompts", str(chosen.prompts), "--output", str(chosen.output), *QUICK)
    status, _, said = ended(signal.SIGKILL, *arguments, code=["-c", SIGNALLED])
    assert status == -signal.SIGKILL, said
    assert chosen.checkpoint.exists() and not (tmp_path / "drafter" / "config.json").exists()
    status, _, said = ended(*arguments)
    refusal = "exists already: give another --output, or --resume to go on with the run in it"
    assert status == 1 and said == f"error: {tmp_path / 'drafter'} {refusal}\n"
    status, _, said = ended(*arguments, "--resume")
    assert status == 0, said
    one, other = tensors(load_drafter(whole[0])), tensors(load_drafter(tmp_path / "drafter"))
    assert one.keys() == other.keys() and all(mx.array_equal(one[name], other[name]) for name in one)
    entries = [json.loads((place / "training.json").read_text()) for place in (whole[0], tmp_path / "drafter")]
    assert entries[0]["validations"] == entries[1]["validations"]
    assert [e["loss"] for e in entries[0]["reports"]] == [e["loss"] for e in entries[1]["reports"]]


def test_ctrl_c_saves_and_says_how_to_go_on(whole: tuple[Path, str], target: str, tmp_path: Path) -> None:
    chosen = settings(tmp_path, "drafter", target, save_every=1000)
    arguments = ("--model", target, "--prompts", str(chosen.prompts), "--output", str(chosen.output), *QUICK)
    status, _, said = ended(signal.SIGINT, *arguments, "--save-every", "1000", code=["-c", SIGNALLED])
    assert status == 130, said
    assert re.search(r"stopped at iteration [45] of 8; the same command with --resume goes on\n", said)
    assert chosen.checkpoint.exists() and not (tmp_path / "drafter" / "config.json").exists()
    assert run.train(chosen, resume=True) == 0
    one, other = tensors(load_drafter(whole[0])), tensors(load_drafter(tmp_path / "drafter"))
    assert all(mx.array_equal(one[name], other[name]) for name in one)


def test_a_dry_run_says_what_it_would_take_and_writes_nothing(tmp_path: Path) -> None:
    """For the packaged demo, which has no name."""
    said: list[str] = []
    chosen = settings(tmp_path, "drafter", None)
    assert base_name(chosen) is None
    assert run.train(chosen, dry_run=True, say=said.append) == 0
    assert re.search(r"of them for answers.*of 8 iterations; .* GB of memory, \d+ MB of disk", "\n".join(said))
    assert {path.name for path in tmp_path.iterdir()} == {"prompts.jsonl"}


def test_what_is_done_already_is_not_expected_again(whole: tuple[Path, str], target: str, tmp_path: Path) -> None:
    said: list[str] = []
    place = shutil.copytree(whole[0], tmp_path / "drafter")
    chosen = settings(tmp_path, "drafter", target, prompts=str(whole[0].parent / "prompts.jsonl"))
    before = {path: path.read_bytes() for path in place.rglob("*") if path.is_file()}
    assert run.train(chosen, resume=True, dry_run=True, say=said.append) == 0
    assert "of 0 iterations" in said[-1] and "for answers" not in said[-1]
    assert {path: path.read_bytes() for path in place.rglob("*") if path.is_file()} == before


def test_a_draft_vocabulary_and_texts_instead_of_prompts(target: str, tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    rows = [json.dumps({"text": text[:100]}) + "\n" for text in demo_prompts()]
    (tmp_path / "data" / "train.jsonl").write_text("".join(rows[4:]))
    (tmp_path / "data" / "valid.jsonl").write_text("".join(rows[:4]))
    said: list[str] = []
    chosen = settings(
        tmp_path, "drafter", target, prompts=None, data=str(tmp_path / "data"), draft_vocab_size=300, dtype="float16"
    )
    assert run.train(chosen, say=said.append) == 0
    assert "draft vocabulary 300" in said[0]
    model, tokenizer = load(target)
    drafter = load_drafter(tmp_path / "drafter", model)
    assert drafter.args.draft_vocab_size == 300 and drafter.draft_ids.dtype == mx.int32
    assert drafter.lm_head[-1].weight.dtype == mx.float16
    frequent = encode(tokenizer, "".join(text[:100] for text in demo_prompts()[4:]))
    common = max(set(frequent), key=frequent.count)
    assert common in np.array(drafter.draft_ids)
    ids = encode(tokenizer, demo_prompts()[1])
    plain = [token for token, _, _ in generate_step(ids, model, max_tokens=12, temp=0.8, seed=1)]
    drafted = generate_step(ids, model, drafter, max_tokens=12, temp=0.8, seed=1, beam_width=2)
    assert [token for token, _, _ in drafted] == plain


def test_a_run_that_gets_no_better_stops_early_with_its_best(
    target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first of equals is the best; going on with a run that has stopped for good only finishes it again."""
    scores = iter([1.5, 1.7, 1.7, 1.6])
    real = run.validated

    def scored(*args: Any) -> dict[str, Any]:
        return {**real(*args), "tokens_per_round": next(scores)}

    monkeypatch.setattr(run, "validated", scored)
    said: list[str] = []
    chosen = settings(tmp_path, "drafter", target, steps_per_eval=2, patience=2, iters=20)
    assert run.train(chosen, say=said.append) == 0
    assert said.count("stopping early: no more tokens per round for 2 validations") == 1
    assert "the drafter of iteration 4 is the result" in said
    best = tensors(load_drafter(tmp_path / "drafter" / "training" / "best"))
    result = tensors(load_drafter(tmp_path / "drafter"))
    assert same(best, result)
    assert json.loads((tmp_path / "drafter" / "training" / "run.json").read_text())["ended"] == 8
    (tmp_path / "drafter" / "model.safetensors").unlink()
    assert run.train(chosen, resume=True) == 0, "no validation is left to be scored"
    assert same(tensors(load_drafter(tmp_path / "drafter")), result)


def test_early_stopping_waits_for_the_end_of_an_update_only(
    target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = run.validated
    monkeypatch.setattr(run, "validated", lambda *args: {**real(*args), "tokens_per_round": 1.0})
    chosen = settings(tmp_path, "drafter", target, steps_per_eval=3, patience=1, iters=40, grad_accumulation_steps=4)
    said: list[str] = []
    assert run.train(chosen, say=said.append) == 0
    assert said.count("stopping early: no more tokens per round for 1 validations") == 1
    record = json.loads((tmp_path / "drafter" / "training" / "run.json").read_text())
    assert record["ended"] == 6 and [entry["iteration"] for entry in record["validations"]] == [3, 6]
    checkpoint: Any = mx.load(str(chosen.checkpoint), return_metadata=True)
    assert checkpoint[1]["step"] == "8"


def test_answers_serve_other_settings_and_the_finished_dtype_may_change(target: str, tmp_path: Path) -> None:
    first = settings(tmp_path, "first", target, iters=2, steps_per_eval=2)
    assert run.train(first) == 0
    (tmp_path / "second" / "training").mkdir(parents=True)
    answers = (first.work / "answers.jsonl").read_text()
    (tmp_path / "second" / "training" / "answers.jsonl").write_text(answers)
    other = settings(tmp_path, "second", target, iters=2, steps_per_eval=2, learning_rate=1e-3)
    assert run.train(other) == 0
    assert (other.work / "answers.jsonl").read_text() == answers
    halved = settings(tmp_path, "first", target, iters=2, steps_per_eval=2, dtype="float16")
    assert run.train(halved, resume=True) == 0
    assert load_drafter(tmp_path / "first").lm_head[-1].weight.dtype == mx.float16


def test_changed_texts_are_not_gone_on_with(target: str, tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    train = tmp_path / "data" / "train.jsonl"
    train.write_text("".join(json.dumps({"text": text[:60]}) + "\n" for text in demo_prompts()))
    chosen = settings(tmp_path, "drafter", target, prompts=None, data=str(tmp_path / "data"), iters=2, steps_per_eval=2)
    assert run.train(chosen) == 0
    train.write_text(train.read_text().replace("def", "fed"))
    with pytest.raises(RedrafterError, match=r"cannot go on: the texts of .* have changed"):
        run.train(chosen, resume=True)


def test_eval_only_measures_a_drafter(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = prompts(tmp_path)
    path.write_text("\n".join(path.read_text().splitlines()[:4]))
    flags = ("--shapes", "1,3", "2,3,5", "--max-tokens", "10", "--temp", "0.8", "--prompts", str(path))
    monkeypatch.setattr(sys, "argv", ["train", "--eval-only", *flags])
    assert command.run() == 0
    out = capsys.readouterr().out.splitlines()
    assert out[0] == "temperature 0.8, 4 prompts, 10 tokens each at most"
    assert [line.split()[:3] for line in out[2:]] == [["1", "3", "4"], ["2", "3", "5"]]
    assert all(line.split()[6] == "yes" and float(line.split()[3]) > 1.1 for line in out[2:])


def test_eval_only_warns_of_a_drafter_for_another_target(
    target: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = json.loads((Path(target) / "config.json").read_text())
    save_drafter(tmp_path / "drafter", Drafter(DrafterArgs(32, config["vocab_size"], 16, 0, base_model="some/other")))
    flags = ("--model", target, "--drafter", str(tmp_path / "drafter"), "--prompts", str(prompts(tmp_path)))
    monkeypatch.setattr(measuring, "compared", lambda *parts: [])
    monkeypatch.setattr(sys, "argv", ["train", "--eval-only", *flags])
    assert command.run() == 0
    assert f"was trained for some/other, not for {target}" in capsys.readouterr().err


def test_the_file_and_the_flags_say_the_same_and_flags_win(tmp_path: Path) -> None:
    path = tmp_path / "train.yaml"
    path.write_text("iters: 7\nlearning_rate: 1e-3\ntemp: [0.0, 0.5]\nmask_prompt: true\nmodel: some/model\ndata: x\n")
    made = make_settings(make_parser().parse_args(["-c", str(path), "--iters", "9"]))
    assert (made.iters, made.learning_rate, made.temp, made.mask_prompt) == (9, 1e-3, (0.0, 0.5), True)
    assert made.batch_size == Settings().batch_size
    flags = {action.dest for action in make_parser()._actions}
    assert {each.name for each in fields(Settings)} <= flags


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("iterations: 3\n", "there is no setting 'iterations'; there are adapter_path, batch_size"),
        ("iters: many\n", "iters must be int, got 'many'"),
        ("iters: true\n", "iters must be int, got True"),
        ("labels: truth\n", "labels must be one of data, target, sampled, distribution, got 'truth'"),
        ("- 3\n", "expected settings in .*, a name and a value a line, got list"),
        ("a: [\n", "cannot read the settings in"),
        ("", "expected settings in .*, got NoneType"),
    ],
)
def test_a_file_that_is_wrong_is_refused(text: str, reason: str, tmp_path: Path) -> None:
    (tmp_path / "train.yaml").write_text(text)
    with pytest.raises(RedrafterError, match=reason):
        make_settings(make_parser().parse_args(["-c", str(tmp_path / "train.yaml")]))
    with pytest.raises(RedrafterError, match="cannot read the settings in"):
        make_settings(make_parser().parse_args(["-c", str(tmp_path / "none.yaml")]))


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (("--model", "x"), "expected --data or --prompts"),
        (("--data", "x", "--prompts", "y"), "give either --data or --prompts, got both"),
        (("--adapter-path", "x"), "--adapter-path needs --model"),
        (("--size", "auto", "--exit-dim", "64"), "--size auto chooses"),
        (("--draft-vocab-size", "64"), "give --exit-dim with"),
        (
            ("--exit-dim", "64", "--draft-vocab-size", "4096"),
            "draft_vocab_size must be at most the target's vocabulary",
        ),
        (("--exit-dim", "0"), "exit_dim must be at least 1, got 0"),
        (("--iters", "0"), "iters must be at least 1, got 0"),
        (("--draft-depth", "300"), "draft_depth must be from 1 to 256, got 300"),
        (("--exit-dim", "100000000"), "exit_dim must be from 1 to 65536, got 100000000"),
        (("--exit-dim", "9" * 30), "exit_dim must be from 1 to 65536"),
        (("--max-tokens", "5"), "max_tokens must be above draft_depth 5"),
        (("--weight-decay", "nan"), "weight_decay must be finite, got nan"),
        (("--depth-weights", "nan", "1", "1", "1", "1"), "depth_weights must be"),
        (("--temp", "nan"), "temp must be"),
        (("--temp", "inf"), "temp must be"),
        (("--batch-size", "2048"), "expected at least 2099 prompts, 51 of them to hold out, for a batch size of 2048"),
        (("--eval-only", "--max-tokens", "0"), "max_tokens must be at least 1"),
        (("--eval-only", "--dry-run"), "--dry-run does not go with --eval-only"),
        (("--eval-only", "--data", "x", "--prompts", "y"), "give either --data or --prompts, got both"),
        (("--eval-only", "--adapter-path", "x"), "--adapter-path needs --model"),
        (("--output", __file__), "--output cannot be .*: .*test_train_command.py is not a directory"),
        (("--output", f"{__file__}/below"), "--output cannot be .*: .*test_train_command.py is not a directory"),
        (("--temp", "-1"), "temp must be"),
        (("--depth-weights", "1"), "depth_weights must be 5 numbers"),
        (("--seed", "-1"), "seed must be from 0"),
        (("--prompts", "/no/such"), "cannot read the prompts in /no/such"),
        (("--resume",), "there is no run to go on with in"),
        (("--report-to", "nothing"), "cannot report to nothing"),
        (("--drafter", "x"), "--drafter goes with --eval-only"),
        (("--model", "/no/such", "--data", "x"), "no such directory: '/no/such'"),
        (("--model", "x", "--eval-only"), "--eval-only needs the --drafter"),
    ],
)
def test_what_means_nothing_is_refused_before_anything_is_written(
    flags: tuple[str, ...], reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["train", "--output", str(tmp_path / "drafter"), *flags])
    with pytest.raises(RedrafterError, match=reason):
        command.run()
    assert not list(tmp_path.iterdir())


def test_a_run_goes_on_with_its_own_settings_only(whole: tuple[Path, str], target: str) -> None:
    arguments = (
        "--model",
        target,
        "--prompts",
        whole[0].parent / "prompts.jsonl",
        "--output",
        whole[0],
        *QUICK,
        "--resume",
    )
    status, _, said = ended(*arguments, "--learning-rate", "0.5")
    assert status == 1 and "cannot go on with other settings: learning_rate was 0.004, got 0.5" in said


def test_a_run_that_another_process_has_moved_on_meanwhile_is_left_to_it(
    whole: tuple[Path, str], target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was read before the model was loaded, which takes time."""
    place = tmp_path / "drafter"
    shutil.copytree(whole[0], place)
    record = place / "training" / "run.json"
    load_target = run.load_target

    def slowly(*arguments: Any) -> Any:
        record.write_text(record.read_text() + "\n")
        return load_target(*arguments)

    monkeypatch.setattr(run, "load_target", slowly)
    flags = ("--model", target, "--prompts", whole[0].parent / "prompts.jsonl", "--output", place, *QUICK, "--resume")
    monkeypatch.setattr(sys, "argv", ["train", *map(str, flags)])
    before = {path: path.stat().st_mtime_ns for path in place.iterdir() if path.is_file()}
    with pytest.raises(RedrafterError, match="another process has gone on with the run"):
        command.run()
    assert {path: path.stat().st_mtime_ns for path in place.iterdir() if path.is_file()} == before


def test_a_run_goes_on_with_its_own_prompts_only(whole: tuple[Path, str], target: str, tmp_path: Path) -> None:
    place = shutil.copytree(whole[0], tmp_path / "drafter")
    (place / "training" / "answers.jsonl").unlink()
    chosen = settings(tmp_path, "drafter", target)
    changed = tmp_path / "prompts.jsonl"
    changed.write_text("".join(reversed(changed.read_text().splitlines(keepends=True))))
    record = json.loads((place / "training" / "run.json").read_text())
    record["settings"]["prompts"] = str(changed)
    (place / "training" / "run.json").write_text(json.dumps(record))
    with pytest.raises(RedrafterError, match=r"cannot go on: the texts of .*prompts\.jsonl have changed"):
        run.train(chosen, resume=True)


def test_one_directory_is_for_one_run_at_a_time(target: str, tmp_path: Path) -> None:
    chosen = settings(tmp_path, "drafter", target, iters=2)
    with lock_file(chosen.work / "lock"), pytest.raises(RedrafterError, match="another process is at work in"):
        run.train(chosen)
    assert not list(chosen.work.iterdir())


@pytest.mark.parametrize(
    ("key", "value"),
    [("settings", []), ("args", [1]), ("args", {}), ("validations", [3]), ("reports", None), ("ended", "x")],
)
def test_a_record_that_no_run_has_written_is_refused(
    whole: tuple[Path, str], target: str, tmp_path: Path, key: str, value: Any
) -> None:
    place = shutil.copytree(whole[0], tmp_path / "drafter")
    record = json.loads((place / "training" / "run.json").read_text())
    (place / "training" / "run.json").write_text(json.dumps(record | {key: value}))
    with pytest.raises(RedrafterError, match=r"run\.json is no record of a run"):
        run.train(settings(tmp_path, "drafter", target), resume=True)


def test_a_checkpoint_with_a_number_that_is_none_is_refused(
    whole: tuple[Path, str], target: str, tmp_path: Path
) -> None:
    place = shutil.copytree(whole[0], tmp_path / "drafter")
    path = place / "training" / "checkpoint.safetensors"
    arrays: Any = mx.load(str(path), return_metadata=True)
    name = next(name for name in arrays[0] if name.endswith("lm_head.1.weight"))
    arrays[0][name] = arrays[0][name] * mx.nan
    mx.save_safetensors(str(path), arrays[0], arrays[1])
    chosen = settings(tmp_path, "drafter", target, prompts=str(whole[0].parent / "prompts.jsonl"))
    with pytest.raises(RedrafterError, match=r"is damaged: .* holds numbers that are not finite"):
        run.train(chosen, resume=True)


def test_a_target_that_takes_chains_only_gets_its_drafter(tmp_path: Path) -> None:
    model = small_target(tmp_path / "target", model_type="starcoder2", norm_epsilon=1e-5)
    said: list[str] = []
    chosen = settings(tmp_path, "drafter", model, iters=2, steps_per_eval=2)
    assert run.train(chosen, say=said.append) == 0
    assert load_drafter(tmp_path / "drafter").args.draft_depth in (1, 2, 3)


def test_a_target_that_cannot_be_drafted_for_is_refused_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = small_target(tmp_path / "target")
    monkeypatch.setitem(REFUSED, "llama", "it is only a test")
    with pytest.raises(RedrafterError, match="cannot draft for llama: it is only a test"):
        run.train(settings(tmp_path, "drafter", model), dry_run=True)
    assert {path.name for path in tmp_path.iterdir()} == {"prompts.jsonl", "target"}
