"""Whole runs of `python -m mlx_redrafter.train`: finished, stopped, killed, resumed and refused."""

from __future__ import annotations

import gc
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import weakref
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from checkpoints import same, tensors
from mlx_lm.utils import load

from mlx_redrafter import generate_step, load_drafter
from mlx_redrafter.atomic_files import lock_file
from mlx_redrafter.demo import demo_prompts
from mlx_redrafter.engine.supported_models import REFUSED
from mlx_redrafter.errors import RedrafterError
from mlx_redrafter.generate import encode
from mlx_redrafter.training import estimate, run
from mlx_redrafter.training.command import parse_args
from mlx_redrafter.training.settings import TrainingArgs

ROOT = Path(__file__).parents[2]
QUICK = (
    *("--exit-dim", "32", "--iters", "8", "--batch-size", "2", "--max-tokens", "10", "--draft-depth", "3"),
    *("--steps-per-eval", "4", "--val-prompts", "1", "--val-tokens", "8", "--save-every", "2"),
    *("--steps-per-report", "2"),
)
SIGNALLED = """import os, runpy, sys
from mlx_redrafter.training import run
number, real = int(sys.argv.pop(1)), run.validate
def validate(*args):
    os.kill(os.getpid(), number)
    return real(*args)
run.validate = validate
runpy.run_module("mlx_redrafter.train", run_name="__main__")
"""
"""A run that signals itself (first argument) before its first validation, after iteration 4 of 8."""


def prompts(directory: Path) -> Path:
    path = directory / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": text[:60]}) + "\n" for text in demo_prompts("code")))
    return path


def execute(*arguments: str | Path, code: Sequence[str] = ("-m", "mlx_redrafter.train")) -> tuple[int, str, str]:
    """Runs `train`; returns (exit status, stdout, stderr)."""
    done = subprocess.run(
        [sys.executable, *code, *map(str, arguments)],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=600,
    )
    return done.returncode, done.stdout, done.stderr


def settings(tmp_path: Path, target: str | None, **changes: Any) -> TrainingArgs:
    """`QUICK` settings with prompts and output in `tmp_path`; without a target, the demo's."""
    args = parse_args([*QUICK, "--prompts", str(prompts(tmp_path)), "--output", str(tmp_path / "drafter")])[0]
    return TrainingArgs(**{**vars(args), "model": target, **changes})


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, target: str) -> tuple[Path, str]:
    """Returns (the directory of an uninterrupted run, its output)."""
    place = tmp_path_factory.mktemp("whole")
    status, out, said = execute("--model", target, "--prompts", prompts(place), "--output", place / "drafter", *QUICK)
    assert (status, out) == (0, ""), said
    return place / "drafter", said


@pytest.fixture
def copied(whole: tuple[Path, str], target: str, tmp_path: Path) -> TrainingArgs:
    """Settings of a copy of that run."""
    shutil.copytree(whole[0], tmp_path / "drafter")
    return settings(tmp_path, target, prompts=str(whole[0].parent / "prompts.jsonl"))


def test_a_run_reports_its_progress(whole: tuple[Path, str]) -> None:
    place, said = whole
    assert re.search(
        r"drafter: recurrent_drafting_drafter, exit_dim 32, blocks 1, 0\.\d\d M parameters\n"
        r"expected: [\d:]+ \(minutes:seconds\): [\d:]+ for "
        r"answers, [\d:]+ to read them, [\d:]+ for 8 iterations of .*, [\d:]+ for validation; .* GB of memory, "
        r"\d\.\d\d while training, \d+ MB of disk",
        said,
    )
    validation = (
        r"iteration 4: validation loss \d\.\d+, right at depth 1, 2, \.\.\.: (0\.\d\d ?){3}; \d\.\d\d tok.*texts: 1"
    )
    assert re.search(validation, said)
    assert said.count("too few for reliable numbers") == 1
    assert "comparison: 100%" in said and re.search(r"\n  W   K    N  tokens/round .*\n  1   1    2 ", said)
    command = said.splitlines()[-1].split()
    assert command[:3] == ["python", "-m", "mlx_redrafter.generate"] and str(place) in command
    status, _, error = execute(*command[3:], "--max-tokens", "8", "--json", code=command[1:3])
    assert status == 0, error


def test_the_finished_directory(whole: tuple[Path, str], target: str) -> None:
    place, _ = whole
    assert {path.name for path in place.iterdir()} == {
        *("config.json", "model.safetensors", "README.md", "training.json", "training.png", "training"),
    }
    config, summary = (json.loads((place / name).read_text()) for name in ("config.json", "training.json"))
    assert 1 <= config["draft_depth"] <= 3 and config["base_model"] == Path(target).name
    shares = np.array(config["acceptance"])
    assert shares.shape == (3, 8) and (shares >= 0).all() and (shares.sum(axis=1) <= 1).all() and shares.max() > 0
    assert [entry["iteration"] for entry in summary["reports"]] == [2, 4, 6, 8]
    assert [entry["iteration"] for entry in summary["validations"]] == [4, 8]
    assert all(row["same_tokens"] for row in summary["measured"]) and summary["settings"]["iters"] == 8
    assert (place / "training.png").read_bytes().startswith(b"\x89PNG")
    card = (place / "README.md").read_text()
    assert card.startswith("---\nlibrary_name: mlx\n") and "base_model:" not in card
    for file in ("config.json", "training.json", "README.md"):
        assert str(place.parent) not in (place / file).read_text(), "no local paths"
    model, tokenizer = load(target)
    ids = encode(tokenizer, demo_prompts()[1])
    plain = [token for token, _, _ in generate_step(ids, model, max_tokens=12)]
    drafted = generate_step(ids, model, load_drafter(place, model), max_tokens=12, beam_width=2)
    assert [token for token, _, _ in drafted] == plain


def test_a_killed_run_resumes_to_the_same_drafter(whole: tuple[Path, str], target: str, tmp_path: Path) -> None:
    place = tmp_path / "drafter"
    arguments = ("--model", target, "--prompts", str(prompts(tmp_path)), "--output", str(place), *QUICK)
    status, _, said = execute(signal.SIGKILL, *arguments, code=["-c", SIGNALLED])
    assert status == -signal.SIGKILL, said
    assert (place / "training" / "checkpoint.safetensors").exists() and not (place / "config.json").exists()
    chosen = settings(tmp_path, target)
    with pytest.raises(RedrafterError, match="exists already: give another --output, or --resume to continue its run"):
        run.train(chosen)
    assert run.train(chosen, resume=True) == 0
    assert same(tensors(load_drafter(whole[0])), tensors(load_drafter(place)))
    one, other = (json.loads((folder / "training.json").read_text()) for folder in (whole[0], place))
    assert one["validations"] == other["validations"]
    assert [entry["loss"] for entry in one["reports"]] == [entry["loss"] for entry in other["reports"]]


def test_ctrl_c_saves_and_says_how_to_resume(whole: tuple[Path, str], target: str, tmp_path: Path) -> None:
    chosen = settings(tmp_path, target, save_every=1000)
    arguments = ("--model", target, "--prompts", str(chosen.prompts), "--output", str(chosen.output), *QUICK)
    status, _, said = execute(signal.SIGINT, *arguments, "--save-every", "1000", code=["-c", SIGNALLED])
    assert status == 130, said
    assert re.search(r"stopped at iteration [45] of 8; the same command with --resume continues\n", said)
    assert not (tmp_path / "drafter" / "config.json").exists()
    assert run.train(chosen, resume=True) == 0
    assert same(tensors(load_drafter(whole[0])), tensors(load_drafter(tmp_path / "drafter")))


def test_a_dry_run_writes_nothing(tmp_path: Path) -> None:
    said: list[str] = []
    assert run.train(settings(tmp_path, None), dry_run=True, say=said.append) == 0
    assert re.search(r"for 8 iterations .* GB of memory, .* while training, \d+ MB of disk", said[-1])
    assert {path.name for path in tmp_path.iterdir()} == {"prompts.jsonl"}


def test_the_target_is_not_in_memory_while_it_trains(
    target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded, seen = list[weakref.ref[Any]](), list[bool]()
    load_target, train_drafter = run.load_target, run.train_drafter

    def load(*given: Any) -> Any:
        model, tokenizer = load_target(*given)
        loaded.append(weakref.ref(model))
        return model, tokenizer

    def train(*given: Any, **options: Any) -> int:
        gc.collect()
        seen.append(loaded[0]() is not None)
        return train_drafter(*given, **options)

    monkeypatch.setattr(run, "load_target", load)
    monkeypatch.setattr(run, "train_drafter", train)
    assert run.train(settings(tmp_path, target)) == 0
    assert seen == [False] and len(loaded) == 2, "loaded again for the comparison"


def test_a_full_disk_is_refused_first(target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(estimate.shutil, "disk_usage", lambda path: SimpleNamespace(free=10**6))
    with pytest.raises(RedrafterError, match=r"expected \d+ MB of free disk for .*drafter, got 1 MB"):
        run.train(settings(tmp_path, target, exit_dim=256))
    assert {path.name for path in tmp_path.iterdir()} == {"prompts.jsonl"}


def test_finished_work_is_not_estimated_again(copied: TrainingArgs, tmp_path: Path) -> None:
    said: list[str] = []
    before = {path: path.read_bytes() for path in (tmp_path / "drafter").rglob("*") if path.is_file()}
    assert run.train(copied, resume=True, dry_run=True, say=said.append) == 0
    assert "00:00 for answers, 00:00 to read them, 00:00 for 0 iterations" in said[-1]
    assert {path: path.read_bytes() for path in before} == before


def test_a_draft_vocabulary_and_given_texts(target: str, tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    rows = [json.dumps({"text": text[:100]}) + "\n" for text in demo_prompts()]
    (tmp_path / "data" / "train.jsonl").write_text("".join(rows[4:]))
    (tmp_path / "data" / "valid.jsonl").write_text("".join(rows[:4]))
    said: list[str] = []
    more: dict[str, Any] = {"prompts": None, "data": str(tmp_path / "data"), "draft_vocab_size": 100}
    chosen = settings(tmp_path, target, dtype="float16", teacher_top_k=8, **more)
    assert run.train(chosen, say=said.append) == 0
    assert "draft vocabulary 100" in said[0]
    states = tmp_path / "drafter" / "training" / "hidden_states.f16"
    assert json.loads(states.with_suffix(".json").read_text())["top_k"] == 8
    model, tokenizer = load(target)
    drafter = load_drafter(tmp_path / "drafter", model)
    assert drafter.args.draft_vocab_size == 100 and drafter.lm_head[-1].weight.dtype == mx.float16
    frequent = encode(tokenizer, "".join(text[:100] for text in demo_prompts()[4:]))
    assert max(set(frequent), key=frequent.count) in np.array(drafter.draft_ids)
    ids = encode(tokenizer, demo_prompts()[1])
    plain = [token for token, _, _ in generate_step(ids, model, max_tokens=12, temp=0.8, seed=1)]
    drafted = generate_step(ids, model, drafter, max_tokens=12, temp=0.8, seed=1, beam_width=2)
    assert [token for token, _, _ in drafted] == plain
    train = tmp_path / "data" / "train.jsonl"
    train.write_text(train.read_text().replace("def", "fed"))
    with pytest.raises(RedrafterError, match=r"cannot resume .*: the texts of .* have changed"):
        run.train(chosen, resume=True)


@pytest.mark.parametrize("learned", [False, True])
def test_prompts_are_learned_on_request(target: str, tmp_path: Path, learned: bool) -> None:
    """The random target never answers with the tokens of `def`."""
    chosen = settings(tmp_path, target, learn_prompts=learned, draft_vocab_size=64, num_draft_layers=1)
    said: list[str] = []
    assert run.train(chosen, say=said.append) == 0
    model, tokenizer = load(target)
    ids = np.array(load_drafter(tmp_path / "drafter", model).draft_ids)
    assert bool(np.isin(encode(tokenizer, "def"), ids).all()) is learned


def test_early_stopping_keeps_the_best(target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ties go to the earlier validation. Resuming a stopped run only rewrites its result."""
    scores, real = iter([1.5, 1.7, 1.7, 1.6]), run.validate
    monkeypatch.setattr(run, "validate", lambda *args: {**real(*args), "tokens_per_round": next(scores)})
    said: list[str] = []
    chosen = settings(tmp_path, target, steps_per_eval=2, patience=2, iters=20)
    assert run.train(chosen, say=said.append) == 0
    assert said.count("stopping early: tokens per round have not improved for 2 validations") == 1
    assert "using the drafter of iteration 4" in said
    result = tensors(load_drafter(tmp_path / "drafter"))
    assert same(tensors(load_drafter(tmp_path / "drafter" / "training" / "best")), result)
    assert json.loads((tmp_path / "drafter" / "training" / "run.json").read_text())["ended"] == 8
    (tmp_path / "drafter" / "model.safetensors").unlink()
    assert run.train(chosen, resume=True) == 0, "no further validation"
    assert same(tensors(load_drafter(tmp_path / "drafter")), result)


def test_early_stopping_completes_an_update(target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = run.validate
    monkeypatch.setattr(run, "validate", lambda *args: {**real(*args), "tokens_per_round": 1.0})
    chosen = settings(tmp_path, target, steps_per_eval=3, patience=1, iters=40, grad_accumulation_steps=4)
    assert run.train(chosen) == 0
    record = json.loads((tmp_path / "drafter" / "training" / "run.json").read_text())
    assert record["ended"] == 6 and [entry["iteration"] for entry in record["validations"]] == [3, 6]
    checkpoint: Any = mx.load(str(tmp_path / "drafter" / "training" / "checkpoint.safetensors"), return_metadata=True)
    assert checkpoint[1]["step"] == "8"


def test_answers_are_reused_with_other_settings(copied: TrainingArgs, tmp_path: Path) -> None:
    (tmp_path / "other" / "training").mkdir(parents=True)
    answers = [tmp_path / place / "training" / "answers.jsonl" for place in ("drafter", "other")]
    shutil.copy(*answers)
    changes: dict[str, Any] = {"iters": 2, "steps_per_eval": 2, "learning_rate": 1e-3}
    assert run.train(TrainingArgs(**{**vars(copied), **changes, "output": str(tmp_path / "other")})) == 0
    assert answers[0].read_text() == answers[1].read_text()


def test_a_run_resumes_with_its_own_settings_only(copied: TrainingArgs, tmp_path: Path) -> None:
    with pytest.raises(RedrafterError, match=r"cannot resume with other settings: learning_rate was 0.004, got 0.5"):
        run.train(TrainingArgs(**{**vars(copied), "learning_rate": 0.5}), resume=True)
    assert run.train(TrainingArgs(**{**vars(copied), "dtype": "float16"}), resume=True) == 0
    assert load_drafter(tmp_path / "drafter").lm_head[-1].weight.dtype == mx.float16
    (tmp_path / "drafter" / "training" / "run.json").write_text('{"steps": 3}')
    with pytest.raises(RedrafterError, match=r"run\.json is not the record of a run"):
        run.train(copied, resume=True)


def test_one_directory_is_for_one_run(target: str, tmp_path: Path) -> None:
    work = tmp_path / "drafter" / "training"
    with lock_file(work / "lock"), pytest.raises(RedrafterError, match="another process is using"):
        run.train(settings(tmp_path, target))
    assert [path.name for path in work.iterdir()] == ["lock"]


def test_a_missing_gain_is_reported(copied: TrainingArgs, monkeypatch: pytest.MonkeyPatch) -> None:
    real = run.compare_shapes
    monkeypatch.setattr(run, "compare_shapes", lambda *a: [row._replace(against_plain=0.9) for row in real(*a)])
    said: list[str] = []
    assert run.train(copied, resume=True, say=said.append) == 0
    assert any(line.startswith("note: no shape is faster than plain decoding here, the best") for line in said)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"draft_vocab_size": 5000}, "draft_vocab_size must be at most the target's vocabulary 257, got 5000"),
        ({"batch_size": 20}, "expected at least 21 prompts for a batch size of 20 and 1 held out, got 16"),
        ({"model": "/no/such"}, "no such directory: '/no/such'"),
        ({"seed": 1}, "cannot draft for llama: it is only a test"),
    ],
)
def test_a_run_is_refused_before_it_writes(
    changes: dict[str, Any], reason: str, target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if "seed" in changes:
        monkeypatch.setitem(REFUSED, "llama", "it is only a test")
    with pytest.raises(RedrafterError, match=reason):
        run.train(settings(tmp_path, target, **changes))
    assert {path.name for path in tmp_path.iterdir()} == {"prompts.jsonl"}
