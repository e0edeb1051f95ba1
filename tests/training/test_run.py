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
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from checkpoints import same, tensors
from mlx_lm.utils import load

from mlx_redrafter import load_drafter
from mlx_redrafter.atomic_files import lock_file
from mlx_redrafter.demo import demo_prompts
from mlx_redrafter.engine.supported_models import REFUSED
from mlx_redrafter.errors import RedrafterError
from mlx_redrafter.generate import encode
from mlx_redrafter.training import estimate, run

ROOT = Path(__file__).parents[2]
SIZE = ("--exit-dim", "32")
FLAGS = (*SIZE, "--iters", "8", "--batch-size", "2", "--max-tokens", "10", "--draft-depth", "3")
SIGNALLED = """
real = run.validate
def validate(*args):
    os.kill(os.getpid(), signal.{name})
    return real(*args)
run.validate = validate
"""
"""A run that signals itself before its first validation, after iteration 4 of 8."""
HALF_WRITTEN = """
real, count = trainer.save_checkpoint, []
def write_half(file, *args):
    file.write_bytes(bytes(1000))
    os.kill(os.getpid(), signal.SIGKILL)
def save(*args):
    count.append(1)
    if len(count) == 3:
        trainer.save_arrays = write_half
    real(*args)
trainer.save_checkpoint = save
"""
"""A run that is killed while it writes its third checkpoint."""


def execute(*arguments: str | Path) -> tuple[int, str, str]:
    """Runs Python; returns (exit status, stdout, stderr)."""
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, *map(str, arguments)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    return done.returncode, done.stdout, done.stderr


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, target: str, prompts: str, script: str) -> tuple[Path, str]:
    """Returns (the directory of an uninterrupted run, its output)."""
    place = tmp_path_factory.mktemp("whole") / "drafter"
    code = script.replace("{patch}", "")
    status, out, said = execute("-c", code, "--model", target, "--prompts", prompts, "--output", place, *FLAGS)
    assert (status, out) == (0, ""), said
    return place, said


@pytest.fixture
def copied(whole: tuple[Path, str], tmp_path: Path) -> Path:
    """A copy of that run."""
    return Path(shutil.copytree(whole[0], tmp_path / "drafter"))


def test_a_run_reports_its_progress(whole: tuple[Path, str]) -> None:
    place, said = whole
    assert re.search(
        r"drafter: recurrent_drafting_drafter, exit_dim 32, blocks 1, 0\.\d\d M parameters\nexpected", said
    )
    assert re.search(
        r"iteration 4: validation loss \d\.\d+, right at depth 1, 2, \.\.\.: (0\.\d\d ?){3}; \d\.\d\d tok.*texts: 1",
        said,
    )
    assert "comparison: 100%" in said and re.search(r"\n  W   K    N  tokens/round .*\n  1   1    2 ", said)
    command = said.splitlines()[-1].split()
    assert command[:3] == ["python", "-m", "mlx_redrafter.generate"] and str(place) in command
    status, _, error = execute(*command[1:], "--max-tokens", "8", "--json")
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


@pytest.mark.parametrize(
    ("patch", "status"),
    [
        (SIGNALLED.replace("{name}", "SIGKILL"), -signal.SIGKILL),
        (HALF_WRITTEN, -signal.SIGKILL),
        ("trainer.SAVE_EVERY = 1000" + SIGNALLED.replace("{name}", "SIGINT"), run.INTERRUPTED),
    ],
    ids=["killed", "killed while it writes a checkpoint", "Ctrl-C"],
)
def test_a_stopped_run_resumes_to_the_same_drafter(
    patch: str, status: int, whole: tuple[Path, str], target: str, prompts: str, script: str, train: Any, tmp_path: Path
) -> None:
    place = tmp_path / "drafter"
    code, flags = script.replace("{patch}", patch), ("--prompts", prompts)
    found, _, said = execute("-c", code, "--model", target, *flags, "--output", place, *FLAGS)
    assert found == status, said
    assert (place / "training" / "checkpoint.safetensors").exists() and not (place / "config.json").exists()
    if status == run.INTERRUPTED:
        assert re.search(r"stopped at iteration [45] of 8; the same command with --resume continues\n", said)
    with pytest.raises(RedrafterError, match="exists already: give another --output, or --resume to continue its run"):
        train(place, *flags, *SIZE)
    assert train(place, *flags, *SIZE, resume=True)[0] == 0
    assert same(tensors(load_drafter(whole[0])), tensors(load_drafter(place)))
    one, other = (json.loads((folder / "training.json").read_text()) for folder in (whole[0], place))
    assert one["validations"] == other["validations"] and one["reports"] == other["reports"]


def test_a_dry_run_writes_nothing(train: Any, prompts: str, tmp_path: Path) -> None:
    status, said = train(tmp_path / "drafter", "--prompts", prompts, *SIZE, dry_run=True)
    assert status == 0 and re.search(r"[\d:]+ for answers, [\d:]+ to read them, .*; \d+ MB of hidden states", said[-1])
    assert not list(tmp_path.iterdir())


def test_the_target_is_not_in_memory_while_it_trains(
    train: Any, prompts: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded, seen = list[weakref.ref[Any]](), list[bool]()
    load_target, train_drafter = run.load_target, run.train_drafter

    def load(*given: Any) -> Any:
        model, tokenizer = load_target(*given)
        loaded.append(weakref.ref(model))
        return model, tokenizer

    def watch(*given: Any, **options: Any) -> int:
        gc.collect()
        seen.append(loaded[0]() is not None)
        return train_drafter(*given, **options)

    monkeypatch.setattr(run, "load_target", load)
    monkeypatch.setattr(run, "train_drafter", watch)
    assert train(tmp_path / "drafter", "--prompts", prompts, *SIZE)[0] == 0
    assert seen == [False] and len(loaded) == 2, "loaded again for the comparison"


def test_a_draft_vocabulary_and_given_texts(train: Any, data: str, target: str, tmp_path: Path) -> None:
    given = Path(shutil.copytree(data, tmp_path / "data"))
    flags = ("--data", given, *SIZE, "--draft-vocab-size", "100", "--dtype", "float16")
    status, said = train(tmp_path / "drafter", *flags)
    assert status == 0 and any("draft vocabulary: 100 tokens" in line for line in said)
    model, tokenizer = load(target)
    drafter: Any = load_drafter(tmp_path / "drafter", model)
    assert drafter.args.draft_vocab_size == 100 and drafter.dtype == mx.float16
    frequent = encode(tokenizer, "".join(text[:80] for text in demo_prompts()))
    assert max(set(frequent), key=frequent.count) in np.array(drafter.draft_ids)
    (given / "train.jsonl").write_text((given / "train.jsonl").read_text().replace("def", "fed"))
    with pytest.raises(RedrafterError, match=r"cannot resume .*: the texts of .* have changed"):
        train(tmp_path / "drafter", *flags, resume=True)


@pytest.mark.parametrize("masked", [False, True])
def test_prompts_are_learned_unless_masked(train: Any, prompts: str, target: str, tmp_path: Path, masked: bool) -> None:
    """The random target never answers with the tokens of `def`."""
    flags = ("--prompts", prompts, *SIZE, "--draft-vocab-size", "64", *(["--mask-prompt"] if masked else []))
    assert train(tmp_path / "drafter", *flags)[0] == 0
    model, tokenizer = load(target)
    ids = np.array(load_drafter(tmp_path / "drafter", model).draft_ids)
    assert bool(np.isin(encode(tokenizer, "def"), ids).all()) is not masked


def test_answers_are_reused_with_other_settings(train: Any, prompts: str, copied: Path, tmp_path: Path) -> None:
    (tmp_path / "other" / "training").mkdir(parents=True)
    answers = [tmp_path / place / "training" / "answers.jsonl" for place in ("drafter", "other")]
    shutil.copy(*answers)
    flags = ("--prompts", prompts, *SIZE, "--iters", "2", "--learning-rate", "1e-3")
    assert train(tmp_path / "other", *flags)[0] == 0
    assert answers[0].read_text() == answers[1].read_text()


def test_a_run_resumes_with_its_own_settings_only(train: Any, prompts: str, copied: Path) -> None:
    flags = ("--prompts", prompts, *SIZE)
    with pytest.raises(RedrafterError, match=r"cannot resume with other settings: learning_rate was 0.004, got 0.5"):
        train(copied, *flags, "--learning-rate", "0.5", resume=True)
    assert train(copied, *flags, "--dtype", "float16", resume=True)[0] == 0
    drafter: Any = load_drafter(copied)
    assert drafter.dtype == mx.float16
    (copied / "training" / "run.json").write_text('{"steps": 3}')
    with pytest.raises(RedrafterError, match=r"run\.json is not the record of a run"):
        train(copied, *flags, resume=True)


def test_one_directory_is_for_one_run(train: Any, prompts: str, tmp_path: Path) -> None:
    work = tmp_path / "drafter" / "training"
    with lock_file(work / "lock"), pytest.raises(RedrafterError, match="another process is using"):
        train(tmp_path / "drafter", "--prompts", prompts, *SIZE)
    assert [path.name for path in work.iterdir()] == ["lock"]


LONG = ("--iters", str(2**31 - 1))


def test_minutes_limit_a_run(train: Any, data: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It fails if the time is too short for anything."""
    status, said = train(tmp_path / "new", "--data", data, *SIZE, *LONG, "--minutes", "0.2")
    assert status == 0 and any(re.fullmatch(r"\d+ iterations of \S+ s fit into 0\.2 minutes", line) for line in said)
    monkeypatch.setattr(estimate, "COMPARED_TOKENS", 10**6)
    with pytest.raises(RedrafterError, match=r"expected more --minutes: of 0\.2 no time is left to train"):
        train(tmp_path / "other", "--data", data, *SIZE, *LONG, "--minutes", "0.2")
    assert not (tmp_path / "other").exists()


def test_a_run_out_of_time_resumes_to_the_same_drafter(
    train: Any, data: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Training ends in time if the estimate was too low."""

    def stop(*args: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(run, "plan_iters", lambda *args: 2**30)
    flags = ("--data", data, *SIZE, *LONG, "--minutes", "0.05")
    with monkeypatch.context() as patch:
        patch.setattr(run, "compare_shapes", stop)
        assert train(tmp_path / "new", *flags)[0] == run.INTERRUPTED
    written = tensors(load_drafter(tmp_path / "new"))
    assert train(tmp_path / "new", *flags, resume=True)[0] == 0
    assert same(written, tensors(load_drafter(tmp_path / "new")))


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (("--draft-vocab-size", "5000"), "draft_vocab_size must be at most the target's vocabulary 257, got 5000"),
        (("--prompts", "/no/such"), "cannot read the prompts in /no/such"),
        (("--seed", "1"), "cannot draft for llama: it is only a test"),
    ],
)
def test_a_run_is_refused_before_it_writes(
    flags: tuple[str, ...], reason: str, train: Any, prompts: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if "--seed" in flags:
        monkeypatch.setitem(REFUSED, "llama", "it is only a test")
    with pytest.raises(RedrafterError, match=reason):
        train(tmp_path / "drafter", "--prompts", prompts, *SIZE, *flags)
    assert not list(tmp_path.iterdir())
