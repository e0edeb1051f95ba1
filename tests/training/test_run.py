"""Whole runs of `python -m mlx_redrafter.train`: finished, stopped, killed, resumed and refused."""

import gc
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.utils import load

import mlx_redrafter
from helpers.checkpoints import same, tensors
from helpers.refusals import refusal
from mlx_redrafter import load_drafter
from mlx_redrafter.demo import demo_prompts
from mlx_redrafter.files import lock_file
from mlx_redrafter.measuring.pair import Findings
from mlx_redrafter.target.supported_models import REFUSED
from mlx_redrafter.text.encoding import encode
from mlx_redrafter.training import data, example_makers, run, schedule
from mlx_redrafter.training.answers import MAX_BATCH_SIZE
from mlx_redrafter.training.evaluation import SpeedResult
from mlx_redrafter.training.example_store import ExampleStore

ROOT = Path(__file__).parents[2]
SIZE = ("--exit-dim", "32")
FLAGS = (*SIZE, "--batch-size", "2", "--max-tokens", "10", "--draft-depth", "3")
ITERATIONS = 7  # of 15 texts, besides one that is held out
SIGNALLED = """
real = run.validate
def validate(*args):
    run.validate = real
    os.kill(os.getpid(), signal.{name})
    return real(*args)
run.validate = validate
"""
"""A run that signals itself before its first validation, after iteration 4 of 7."""
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
def start(target, prompts, script):
    """A run in another process: (output, patch) -> (exit status, stdout, stderr)."""
    flags = ("--model", target, "--prompts", prompts, *FLAGS)
    return lambda place, patch="": execute(
        "-c", script.replace("{patch}", patch), *flags, "--output", place
    )


@pytest.fixture(scope="module")
def whole(tmp_path_factory, start) -> tuple[Path, str]:
    """Returns (the directory of an uninterrupted run, its output)."""
    place = tmp_path_factory.mktemp("whole") / "drafter"
    status, out, said = start(place)
    assert (status, out) == (0, ""), said
    return place, said


@pytest.fixture
def learn(train, prompts):
    """A short run with the prompts."""
    return lambda place, *flags, **how: train(place, "--prompts", prompts, *SIZE, *flags, **how)


@pytest.fixture
def copied(whole, tmp_path) -> Path:
    """A copy of that run."""
    return Path(shutil.copytree(whole[0], tmp_path / "drafter"))


def read_last_validation(folder: Path) -> dict[str, Any]:
    """The last entry in a run's record."""
    return json.loads((folder / "training.json").read_text())["validations"][-1]


def test_a_run_reports_its_progress(whole):
    place, said = whole
    sizes = "drafter: recurrent_drafting_drafter, exit_dim 32, blocks 1, "
    assert re.search(sizes + r"0\.\d\d M parameters\n", said)
    texts = r"about 16 texts \(\d+ s, 0\.0 GB of disk\), training"
    assert re.search(r"in \S+ \S+( \S+ \S+)?: " + texts, said)
    shares = r"right at depth 1, 2, \.\.\.: (0\.\d\d ?){3}; \d\.\d\d tok.*texts: 1"
    assert re.search(r"iteration 4: validation loss \d\.\d+, " + shares, said)
    assert re.search(r"held-out prompts .*\ngiven, 1 .*\nall, 1 ", said)
    (line,) = re.findall("^python -m mlx_redrafter.generate .*", said, re.MULTILINE)
    command = shlex.split(line)
    assert str(place) in command
    status, _, error = execute(*command[1:], "--max-tokens", "8", "--json")
    assert status == 0, error


def test_the_finished_directory(whole, target):
    place, _ = whole
    names = {"config.json", "model.safetensors", "README.md", "training.json", "training"}
    assert {path.name for path in place.iterdir()} == names
    config = json.loads((place / "config.json").read_text())
    summary = json.loads((place / "training.json").read_text())
    assert config["base_model"] == Path(target).name
    shares = np.array(config["acceptance"])
    assert shares.shape == (3, 8)
    assert shares.max() > 0
    assert (shares >= 0).all()
    assert (shares.sum(axis=1) <= 1).all()
    assert [entry["iteration"] for entry in summary["validations"]] == [4, ITERATIONS]
    assert [result["kind"] for result in summary["measured"]] == ["given", "all"]
    assert all(result["same_tokens"] for result in summary["measured"])
    assert summary["settings"]["batch_size"] == 2
    card = (place / "README.md").read_text()
    assert card.startswith("---\nlibrary_name: mlx\n")
    assert "base_model:" not in card
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
def test_a_stopped_run_resumes_to_the_same_drafter(patch, status, whole, start, learn, tmp_path):
    """It makes no text again. The number of iterations does not depend on the time here."""
    place = tmp_path / "drafter"
    found, _, said = start(place, patch)
    assert found == status, said
    assert (place / "training" / "checkpoint.safetensors").exists()
    if status == run.INTERRUPTED:
        assert "stopped; the drafter so far is in " in said
        assert "; the same command with --resume continues, for --minutes more" in said
        assert load_drafter(place).args.acceptance is not None, "a usable drafter"
    with refusal("exists already: give another --output, or --resume to continue its run"):
        learn(place)
    status, messages = learn(place, resume=True)
    assert status == 0
    assert any("about 0 texts besides 16" in line for line in messages)
    assert same(tensors(load_drafter(whole[0])), tensors(load_drafter(place)))
    one, other = (read_last_validation(folder) for folder in (whole[0], place))
    assert one == other


def test_a_run_killed_while_it_makes_texts_keeps_them(start, learn, tmp_path):
    patch = """
from mlx_redrafter.training.example_store import ExampleStore
real = ExampleStore.add
def add(store, example):
    real(store, example)
    if len(store.examples) == 6:
        os.kill(os.getpid(), signal.SIGKILL)
ExampleStore.add = add
"""
    place = tmp_path / "drafter"
    status, _, said = start(place, patch)
    assert status == -signal.SIGKILL, said
    files = {path: path.stat().st_mtime_ns for path in (place / "training").glob("texts-*/*")}
    assert len(files) == 6
    status, messages = learn(place, resume=True)
    assert status == 0
    assert any("about 10 texts besides 6" in line for line in messages)
    assert all(path.stat().st_mtime_ns == changed for path, changed in files.items())
    assert len(list((place / "training").glob("texts-*/*"))) == 16


@pytest.mark.usefixtures("train")
def test_training_from_python(target, prompts, tmp_path):
    """Also in a thread, which cannot handle signals."""
    said = []
    settings = {"model": target, "prompts": prompts, "exit_dim": 32, "batch_size": 2}
    settings |= {"max_tokens": 10, "draft_depth": 3, "output": str(tmp_path / "drafter")}
    with ThreadPoolExecutor(1) as threads:
        place = threads.submit(mlx_redrafter.train, say=said.append, **settings).result()
    assert place == tmp_path / "drafter"
    assert any("iteration 4: " in line for line in said)
    assert load_drafter(place, load(target)[0]).args.acceptance is not None
    with pytest.raises(TypeError, match="minuts"):
        mlx_redrafter.train(minuts=3)
    with refusal("exists already"):
        mlx_redrafter.train(**settings)


def test_more_minutes_make_more_texts(learn, copied, monkeypatch):
    """A finished run goes on with further texts, its own at last, and trains on."""
    monkeypatch.setattr(example_makers, "MAX_EXAMPLES", 30)
    before = read_last_validation(copied)
    status, said = learn(copied, "--minutes", "30", resume=True)
    assert status == 0
    assert any("about 14 texts besides 16" in line for line in said)
    assert f"so far the drafter makes {before['tokens_per_round']:.2f} tokens per round" in said
    assert read_last_validation(copied)["iteration"] > before["iteration"]


def test_a_dry_run_writes_nothing(learn, tmp_path):
    status, said = learn(tmp_path / "drafter", dry_run=True)
    assert status == 0
    assert re.search(r"^in .*: about 16 texts \(.*, training .*, a comparison", said[-1])
    assert said[0].startswith("loading "), "before it does anything that takes time"
    assert not list(tmp_path.iterdir())


def test_the_target_is_not_in_memory_while_it_trains(learn, tmp_path, monkeypatch):
    loaded = []
    seen = []
    load_target = run.load_target
    train_drafter = run.train_drafter

    def load(*given):
        model, tokenizer = load_target(*given)
        loaded.append(weakref.ref(model))
        return model, tokenizer

    def watch(*given, **options):
        gc.collect()
        seen.append(loaded[0]() is not None)
        train_drafter(*given, **options)

    monkeypatch.setattr(run, "load_target", load)
    monkeypatch.setattr(run, "train_drafter", watch)
    assert learn(tmp_path / "drafter")[0] == 0
    assert seen == [False] and len(loaded) == 2, "loaded again for the comparison"


def test_a_draft_vocabulary_and_given_texts(train, data, target, tmp_path):
    given = Path(shutil.copytree(data, tmp_path / "data"))
    flags = ("--data", given, *SIZE, "--draft-vocab-size", "100", "--dtype", "float16")
    status, said = train(tmp_path / "drafter", *flags)
    assert status == 0
    assert any("draft vocabulary: 100 tokens" in line for line in said)
    model, tokenizer = load(target)
    drafter = load_drafter(tmp_path / "drafter", model)
    assert drafter.args.draft_vocab_size == 100
    assert drafter.dtype == mx.float16
    frequent = encode(tokenizer, "".join(text[:80] for text in demo_prompts()))
    assert max(set(frequent), key=frequent.count) in np.array(drafter.draft_ids)
    (given / "train.jsonl").write_text((given / "train.jsonl").read_text().replace("def", "fed"))
    known = len(list((tmp_path / "drafter" / "training").glob("texts-*/*")))
    status, said = train(tmp_path / "drafter", *flags, resume=True)
    assert status == 0 and any(f"texts besides {known} " in line for line in said), "the new ones"


@pytest.mark.parametrize("masked", [False, True])
def test_prompts_are_learned_unless_masked(learn, target, tmp_path, masked):
    """The random target never answers with the tokens of `def`."""
    flags = ("--draft-vocab-size", "64", *["--mask-prompt"] * masked)
    assert learn(tmp_path / "drafter", *flags)[0] == 0
    model, tokenizer = load(target)
    ids = np.array(load_drafter(tmp_path / "drafter", model).draft_ids)
    assert bool(np.isin(encode(tokenizer, "def"), ids).all()) is not masked


def test_texts_are_reused_with_other_settings(learn, copied, tmp_path):
    for folder in (copied / "training").glob("texts-*"):
        shutil.copytree(folder, tmp_path / "other" / "training" / folder.name)
    status, said = learn(tmp_path / "other", "--learning-rate", "1e-3")
    assert status == 0
    assert any("about 0 texts besides 16" in line for line in said)


def test_a_run_resumes_with_its_own_settings_only(learn, copied):
    with refusal(r"cannot resume with other settings: learning_rate was 0.004, got 0.5"):
        learn(copied, "--learning-rate", "0.5", resume=True)
    assert learn(copied, "--dtype", "float16", resume=True)[0] == 0
    assert load_drafter(copied).dtype == mx.float16
    (copied / "training.json").write_text('{"steps": 3}')
    with refusal(r"training\.json is not the record of a run"):
        learn(copied, resume=True)


def test_one_directory_is_for_one_run(learn, tmp_path):
    work = tmp_path / "drafter" / "training"
    with lock_file(work / "lock"), refusal("another process is using"):
        learn(tmp_path / "drafter")
    assert [path.name for path in work.iterdir()] == ["lock"]


def set_times(monkeypatch: pytest.MonkeyPatch, make: float, learn: float):
    """Seconds to make an example, and to learn it once, instead of measured ones."""
    monkeypatch.setattr(run, "measure_making", lambda *args, **options: make)
    monkeypatch.setattr(run, "measure_learning", lambda *args: learn)


def test_a_run_that_could_learn_nothing_does_not_begin(train, tmp_path, monkeypatch):
    set_times(monkeypatch, 100.0, 1.0)
    with refusal(r"expected --minutes 8 or more for 3 texts here, got 0\.3"):
        train(tmp_path / "other", *SIZE, "--minutes", "0.3")
    assert not (tmp_path / "other").exists()


@pytest.mark.parametrize(
    ("least", "ratio", "note"),
    [
        (
            9.0,
            None,
            r"learned little: alone it makes \d\.\d\d .* and 1\.01 in the comparison, where",
        ),
        (9.0, 1.7, "learned little"),
        (0.0, 0.9, r"0\.90 times the speed of plain decoding here: --resume with --minutes"),
        (0.0, None, None),
        (0.0, 1.7, None),
    ],
)
def test_a_drafter_that_learned_little_is_named(least, ratio, note, learn, tmp_path, monkeypatch):
    """Also where the comparison was disturbed, or the context alone is fast."""
    result = SpeedResult("all", 2, 2.5, ratio, True, 1.01)
    monkeypatch.setattr(run, "compare_speed", lambda *args: [result])
    monkeypatch.setattr(run, "MIN_LEARNED", least)
    status, said = learn(tmp_path / "new")
    notes = [line for line in said if line.startswith("note: ")]
    assert status == 0
    assert len(notes) == (note is not None)
    if note is not None:
        assert re.search(note, notes[0])
        assert re.search(r"--resume with --minutes \d+ learns the 16 texts again", notes[0])


def test_a_run_ends_in_time(train, tmp_path, monkeypatch):
    """Texts, iterations, validations and compared prompts take the seconds given here.

    Each ends as planned.
    """
    seconds = {"now": 0.0}
    real = run.validate
    add = ExampleStore.add

    def add_example(store, example):
        spend("making", 10.0)
        add(store, example)

    def spend(name, count):
        seconds["now"] += count
        seconds[name] = seconds["now"]

    def validate(*args):
        spend("validation", 50.0)
        return real(*args)

    def make_batches(*args):
        def batches(iteration):
            spend("iteration", 20.0)
            return real_batches(iteration)

        real_batches = data.make_batches(*args)
        return batches

    def compare_speed(*args):
        for done in range(1, 100):
            spend("prompt", 12.0)
            if args[-1](done):
                break
        return [SpeedResult("all", done, 1.5, 1.2, True)]

    for changed in (validate, make_batches, compare_speed):
        monkeypatch.setattr(run, changed.__name__, changed)
    clock = SimpleNamespace(perf_counter=lambda: seconds["now"])
    for module in (run, schedule):
        monkeypatch.setattr(module, "time", clock)
    set_times(monkeypatch, 10.0, 5.0)
    monkeypatch.setattr(run, "measure_decoding", lambda *args: (Findings(), 10.0))
    monkeypatch.setattr(ExampleStore, "add", add_example)
    monkeypatch.setattr(run, "MAX_VISITS", 10**6)
    monkeypatch.setattr(example_makers, "MAX_EXAMPLES", 10**6)
    assert train(tmp_path / "new", *SIZE, "--minutes", "20")[0] == 0
    planned = 1200 * (1 - schedule.COMPARISON_SHARE)
    count = planned / (10 + 5 * schedule.VISITS)  # and those that are then being written
    assert 10 * (count - 1) <= seconds["making"] <= 10 * (count + MAX_BATCH_SIZE)
    assert planned <= seconds["validation"] <= planned + 20
    assert 1188 < seconds["prompt"] <= 1200


def test_a_drafter_is_saved_at_each_validation(learn, target, tmp_path, monkeypatch):
    found = []
    real = run.validate

    def validate(*args):
        entry = real(*args)
        found.append(load_drafter(tmp_path / "new", load(target)[0]).args.acceptance)
        return entry

    monkeypatch.setattr(run, "validate", validate)
    assert learn(tmp_path / "new")[0] == 0
    assert len(found) == 2
    assert all(np.array(shares).shape == (3, 8) for shares in found)


def test_an_unsupported_target_is_refused_before_it_writes(learn, tmp_path, monkeypatch):
    monkeypatch.setitem(REFUSED, "llama", "it is only a test")
    with refusal("cannot draft for llama: it is only a test"):
        learn(tmp_path / "drafter")
    assert not list(tmp_path.iterdir())
