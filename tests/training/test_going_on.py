"""`train --drafter`: when a drafter is replaced, and what a run that ends early leaves."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from cached import make_cached
from checkpoints import same, tensors
from mlx_lm.utils import load
from small import small_drafter

from mlx_redrafter import generate_step, load_drafter
from mlx_redrafter.checkpoints import save_drafter
from mlx_redrafter.demo import demo_prompts
from mlx_redrafter.drafters import TRAINABLE
from mlx_redrafter.errors import RedrafterError
from mlx_redrafter.training import estimate, run
from mlx_redrafter.training.command import parse_args
from mlx_redrafter.training.targets import initialize_drafter

ROOT = Path(__file__).parents[2]
QUICK = (
    *("--iters", "40", "--batch-size", "2", "--max-tokens", "10", "--draft-depth", "3", "--learning-rate", "0.4"),
    *("--val-prompts", "1", "--val-tokens", "8", "--steps-per-report", "2", "--save-every", "4"),
)
SIZES: dict[str, dict[str, Any]] = {
    "recurrent": {"exit_dim": 32, "num_draft_layers": 1},
    "medusa": {"num_draft_layers": 1, "untied": False},
    "mlp_speculator": {"inner_dim": 32, "untied": False},
    "arctic_lstm": {"inner_dim": 32},
    "eagle": {"intermediate_size": 24},
}
KILLED = """import os, runpy, signal
from mlx_redrafter import checkpoints
from mlx_redrafter.training import run

def die(*args, **more):
    os.kill(os.getpid(), signal.SIGKILL)

real = run.make_batches

def stop_early(*args):
    batches = real(*args)
    return lambda number: batches(number) if number < 7 else die()

def write_half(file, arrays, metadata):
    file.write_bytes(bytes(1000))
    die()

{patch}
runpy.run_module("mlx_redrafter.train", run_name="__main__")
"""

Pair = tuple[nn.Module, Any]


@pytest.fixture(scope="module")
def pair(target: str) -> Pair:
    found = load(target)
    return found[0], found[1]


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of given texts."""
    place = tmp_path_factory.mktemp("texts")
    write_texts(place / "train.jsonl", "text")
    return place


def write_texts(path: Path, key: str) -> None:
    path.write_text("".join(json.dumps({key: text[:80]}) + "\n" for text in demo_prompts()))


def make_start(place: Path, model: nn.Module, kind: str = "recurrent") -> Path:
    """Saves an untrained drafter."""
    sizes = TRAINABLE[kind].for_training(32, 257, depth=3, draft_vocab_size=None, **SIZES[kind])
    mx.random.seed(3)
    save_drafter(place, initialize_drafter(model, sizes), dtype=mx.float16)
    return place


def flags_of(target: str, output: Path, *flags: str | Path) -> list[str]:
    return ["--model", target, "--output", str(output), *QUICK, *map(str, flags)]


def train(target: str, output: Path, *flags: str | Path, **options: bool) -> tuple[int, list[str]]:
    """Returns (exit status, output lines)."""
    said: list[str] = []
    return run.train(parse_args(flags_of(target, output, *flags))[0], say=said.append, **options), said


def contents(place: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in place.rglob("*") if path.is_file()}


@pytest.mark.parametrize("kind", TRAINABLE)
def test_every_kind_can_be_trained_further_in_place(
    kind: str, target: str, pair: Pair, texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "MIN_IMPROVEMENT", 1.0)  # rounding decides whether such a short run gains 1%
    place = make_start(tmp_path / "drafter", pair[0], kind)
    before = tensors(load_drafter(place))
    status, said = train(target, place, "--data", texts, "--drafter", place)
    assert status == 0, said
    numbers = re.search(
        r"the new drafter makes (\S+) tokens per round on (\d+) held-out texts, (\S+) before", "\n".join(said)
    )
    assert numbers and float(numbers[1]) >= 1.01 * float(numbers[3]) - 0.01 and int(numbers[2]) > 1
    drafter = load_drafter(place, pair[0])
    assert {array.dtype for array in tensors(drafter).values()} == {mx.float16}, "the stored dtype"
    assert not same(before, tensors(drafter)) and drafter.args.acceptance is not None
    assert {path.name for path in place.iterdir()} == {
        *("config.json", "model.safetensors", "README.md", "training.json", "training.png", "training"),
    }
    for file in ("config.json", "training.json", "README.md"):
        assert str(tmp_path) not in (place / file).read_text(), "no local paths"
    prompt = [7, 8, 9, 10]
    plain = [token for token, _, _ in generate_step(prompt, pair[0], max_tokens=12)]
    assert [token for token, _, _ in generate_step(prompt, pair[0], drafter, max_tokens=12, plan=(2, 3))] == plain


@pytest.mark.parametrize("source", ["prompts", "data"])
def test_every_source_has_texts_for_new_and_known_drafters(
    source: str, target: str, pair: Pair, texts: Path, tmp_path: Path
) -> None:
    given = texts
    if source == "prompts":
        given = tmp_path / "prompts.jsonl"
        write_texts(given, "prompt")
    flags = (f"--{source}", given)
    status, said = train(target, tmp_path / "new", *flags, "--exit-dim", "32", "--iters", "4")
    assert status == 0 and not any("before" in line for line in said), said
    with pytest.raises(RedrafterError, match=r"exists already: give another --output, or --drafter .*new to train it"):
        train(target, tmp_path / "new", *flags, "--exit-dim", "32")
    start = make_start(tmp_path / "start", pair[0])
    status, said = train(target, tmp_path / "better", *flags, "--drafter", start)
    assert any(re.search(r"the new drafter makes .* held-out texts, .* before", line) for line in said), said
    assert (tmp_path / "better" / "model.safetensors").exists() is (status == 0)


def test_a_drafter_that_is_no_better_is_not_written(target: str, pair: Pair, texts: Path, tmp_path: Path) -> None:
    place = make_start(tmp_path / "drafter", pair[0])
    before = contents(tmp_path)
    for output in (place, tmp_path / "other"):
        status, said = train(target, output, "--data", texts, "--drafter", place, "--learning-rate", "1e-9")
        assert status == run.REFUSED == 3
        assert re.fullmatch(
            r"not written: the new drafter makes (1\.\d+) tokens per .* before, \d\.\d+ required", said[-1]
        )
    assert before.items() <= contents(tmp_path).items()
    assert [path.name for path in (tmp_path / "other").iterdir()] == ["training"]


@pytest.mark.parametrize(("after", "is_written"), [(1.52, True), (1.51, False)])
def test_a_drafter_must_improve_by_one_percent(
    after: float,
    is_written: bool,
    target: str,
    pair: Pair,
    texts: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """At least 1% more tokens per round on held-out texts."""
    counted = iter([1.5, after])
    monkeypatch.setattr(run, "count_all", lambda *args: next(counted))
    place = make_start(tmp_path / "drafter", pair[0])
    status, said = train(target, tmp_path / "new", "--data", texts, "--drafter", place, "--iters", "2")
    assert (status == 0, (tmp_path / "new" / "model.safetensors").exists()) == (is_written, is_written), said


def test_minutes_limit_a_run(target: str, pair: Pair, texts: Path, tmp_path: Path) -> None:
    """It stops in time whatever `--iters` is, and fails if the time is too short for anything."""
    flags = ("--data", texts, "--drafter", make_start(tmp_path / "old", pair[0]), "--iters", str(2**31 - 1))
    status, said = train(target, tmp_path / "new", *flags, "--minutes", "0.1")
    assert status in (0, 3) and any(re.fullmatch(r"\d+ iterations fit into 0\.1 minutes", line) for line in said)
    with pytest.raises(RedrafterError, match=r"expected more --minutes: of 0\.01 no time is left to train"):
        train(target, tmp_path / "other", *flags, "--minutes", "0.01", "--val-tokens", "4000")
    assert not (tmp_path / "other").exists()


def test_training_ends_on_time_if_the_estimate_was_too_low(
    target: str, pair: Pair, texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(estimate.Estimate, "count_fitting", lambda *args: 2**30)
    start = make_start(tmp_path / "old", pair[0])
    flags = ("--data", texts, "--drafter", start, "--iters", str(2**31 - 1), "--minutes", "0.03")
    status, said = train(target, tmp_path / "new", *flags)
    assert status in (0, 3) and f"{2**30} iterations fit into 0.03 minutes" in said


@pytest.mark.parametrize("accumulation", ["1", "3"])
def test_a_run_out_of_time_resumes_to_the_same_drafter(
    accumulation: str, target: str, texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(*args: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(estimate.Estimate, "count_fitting", lambda *args: 2**30)
    flags = ["--data", texts, "--exit-dim", "32", "--iters", str(2**31 - 1), "--minutes", "0.03"]
    flags += ["--grad-accumulation-steps", accumulation]
    with monkeypatch.context() as patch:
        patch.setattr(run, "compare_shapes", stop)
        assert train(target, tmp_path / "new", *flags)[0] == run.INTERRUPTED
    written: Any = mx.load(str(tmp_path / "new" / "model.safetensors"))
    assert train(target, tmp_path / "new", *flags, resume=True)[0] == 0
    resumed: Any = mx.load(str(tmp_path / "new" / "model.safetensors"))
    assert all(mx.array_equal(written[name], resumed[name]).item() for name in written.keys() | resumed.keys())


@pytest.mark.parametrize(
    "patch",
    ["run.make_batches = stop_early", "checkpoints.save_arrays = write_half"],
    ids=["while training", "while it writes"],
)
def test_a_killed_run_leaves_the_old_drafter(patch: str, target: str, pair: Pair, texts: Path, tmp_path: Path) -> None:
    """It resumes to the same drafter as an uninterrupted run."""
    places = [tmp_path / "whole", tmp_path / "drafter"]
    for place in places:
        make_start(place, pair[0])
    flags = ("--data", texts, "--drafter", place)
    assert train(target, places[0], *flags[:3], places[0])[0] == 0
    before = contents(place)
    done = subprocess.run(
        [sys.executable, "-c", KILLED.replace("{patch}", patch), *flags_of(target, place, *flags)],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    after = contents(place)
    assert {path: after.get(path) for path in before} == before
    new = after.keys() - before.keys()
    assert all(path.name.startswith(".partial") or path.parent.name == "training" for path in new)
    shutil.copytree(place, tmp_path / "copy")
    assert train(target, place, *flags, resume=True)[0] == 0
    assert same(*(tensors(load_drafter(each)) for each in places))
    assert train(target, tmp_path / "copy", "--data", texts, "--drafter", tmp_path / "copy")[0] == 0, (
        "it can start over"
    )


def test_a_full_disk_leaves_the_old_drafter(
    target: str, pair: Pair, texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place, real = make_start(tmp_path / "drafter", pair[0]), mx.save_safetensors

    def cut_short(file: str, *args: Any) -> None:
        real(file, *args)
        os.truncate(file, 1000)

    before = contents(place)
    monkeypatch.setattr(mx, "save_safetensors", cut_short)
    with pytest.raises(RedrafterError, match=r"cannot (write the drafter to|save) .*: .*No space left"):
        train(target, place, "--data", texts, "--drafter", place)
    assert before.items() <= contents(place).items()


def test_a_dry_run_shows_the_estimate(target: str, pair: Pair, texts: Path, tmp_path: Path) -> None:
    place = make_start(tmp_path / "drafter", pair[0])
    before = contents(tmp_path)
    status, said = train(target, place, "--data", texts, "--drafter", place, dry_run=True)
    assert status == 0 and re.search(r"for answers, .* for 40 iterations .* GB of memory", said[-1])
    assert contents(tmp_path) == before


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: make_cached("eagle 3", 32, 257, layers=1), "expected an EAGLE-1 head that reads .*, got EAGLE-3"),
        (lambda: make_cached("dflash", 32, 257, layers=1), "expected one of recurrent, .*, got dflash"),
        (lambda: quantized(small_drafter(vocab=257)), "expected weights that are not quantized"),
        (lambda: before_norm(small_drafter(vocab=257)), "the hidden state before the final norm, expected that after"),
    ],
    ids=["eagle 3", "dflash", "quantized", "before norm"],
)
def test_untrainable_drafters_are_refused(make: Any, reason: str, target: str, texts: Path, tmp_path: Path) -> None:
    drafter = make()
    bits = {"quantization": {"group_size": 32, "bits": 4}} if "scales" in str(tensors(drafter).keys()) else {}
    save_drafter(tmp_path / "old", drafter, extra=bits)
    with pytest.raises(RedrafterError, match=rf"cannot continue training .*old: .*{reason}") as caught:
        train(target, tmp_path / "new", "--data", texts, "--drafter", tmp_path / "old")
    assert "\n" not in str(caught.value)


def quantized(drafter: Any) -> Any:
    nn.quantize(drafter, 32, 4)
    return drafter


def before_norm(drafter: Any) -> Any:
    drafter.args = replace(drafter.args, hidden_state="before_norm")
    return drafter


def test_a_head_in_another_layout_is_not_overwritten(target: str, pair: Pair, texts: Path, tmp_path: Path) -> None:
    place = make_start(tmp_path / "old", pair[0])
    (place / "model.safetensors").rename(place / "model-00001.safetensors")
    before = contents(place)
    with pytest.raises(RedrafterError, match="expected --output to be a drafter written by train or convert"):
        train(target, place, "--data", texts, "--drafter", place)
    assert contents(place) == before


def test_the_record_describes_the_run(target: str, pair: Pair, texts: Path, tmp_path: Path) -> None:
    start = make_start(tmp_path / "old", pair[0])
    status, said = train(target, tmp_path / "new", "--data", texts, "--drafter", start)
    assert status == 0, said
    summary = json.loads((tmp_path / "new" / "training.json").read_text())
    assert [entry["iteration"] for entry in summary["reports"]] == list(range(2, 41, 2))
    assert summary["settings"]["drafter"] == "old" and summary["settings"]["data"] == texts.name
    assert summary["settings"]["learning_rate"] == pytest.approx(0.02), "a twentieth of the configured rate"
