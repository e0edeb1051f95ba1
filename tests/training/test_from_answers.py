"""`train --answers`: what is learned and held back, when a drafter is written, and what becomes of the old one."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from cached import make_cached
from checkpoints import same, tensors
from mlx_lm.utils import load
from small import small_drafter

from mlx_redrafter import generate_step, load_drafter
from mlx_redrafter.answer_folder import AnswerFolder, read_texts
from mlx_redrafter.checkpoints import save_drafter
from mlx_redrafter.drafters import TRAINABLE
from mlx_redrafter.errors import RedrafterError
from mlx_redrafter.training import from_answers
from mlx_redrafter.training.command import parse_args
from mlx_redrafter.training.data import Text, generate_answers
from mlx_redrafter.training.evaluation import count_tokens_per_round
from mlx_redrafter.training.from_answers import is_held_back, train_from_answers
from mlx_redrafter.training.settings import TrainingArgs
from mlx_redrafter.training.targets import new_drafter

ROOT = Path(__file__).parents[2]
QUICK = (
    *("--iters", "40", "--batch-size", "2", "--max-tokens", "10", "--draft-depth", "3", "--learning-rate", "0.2"),
    *("--val-prompts", "1", "--val-tokens", "8", "--steps-per-report", "2"),
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
from mlx_redrafter.training import from_answers

def die(*args, **more):
    os.kill(os.getpid(), signal.SIGKILL)

real = from_answers.make_batches

def stop_early(*args):
    batches = real(*args)
    return lambda number: batches(number) if number < 5 else die()

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
def requests(pair: Pair) -> list[tuple[list[int], list[int]]]:
    """Prompts and the target's answers."""
    rng = np.random.default_rng(1)
    prompts = [rng.integers(10, 4000, 8).tolist() for _ in range(60)]
    found = zip(prompts, generate_answers(*pair, prompts, 0.8, 24), strict=True)
    return [(prompt, answer) for prompt, answer in found if len(answer) >= 12]


@pytest.fixture(scope="module")
def answers(pair: Pair, requests: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of them."""
    return keep(tmp_path_factory.mktemp("kept") / "answers", pair, requests)


def keep(place: Path, pair: Pair, requests: Sequence[tuple[list[int], list[int]]]) -> Path:
    folder = AnswerFolder(place, pair[1])
    for prompt, answer in requests:
        folder.add(prompt, answer)
    return place


def make_start(place: Path, model: nn.Module, kind: str = "recurrent") -> Path:
    """An untrained drafter on disk."""
    sizes = TRAINABLE[kind].for_training(32, 4096, depth=3, draft_vocab_size=None, **SIZES[kind])
    mx.random.seed(3)
    save_drafter(place, new_drafter(model, sizes), dtype=mx.float16)
    return place


def train(target: str, answers: Path, output: Path, *flags: str | Path) -> tuple[int, list[str]]:
    """(the exit status, what it said)."""
    said: list[str] = []
    given = ("--model", target, "--answers", str(answers), "--output", str(output), *QUICK, *map(str, flags))
    args, _ = parse_args(given)
    return train_from_answers(args, say=said.append), said


def contents(place: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in place.rglob("*") if path.is_file()}


@pytest.mark.parametrize("kind", TRAINABLE)
def test_it_goes_on_from_every_kind_in_its_place(
    kind: str, target: str, pair: Pair, answers: Path, tmp_path: Path
) -> None:
    place = make_start(tmp_path / "drafter", pair[0], kind)
    before = tensors(load_drafter(place))
    status, said = train(target, answers, place, "--drafter", place)
    assert status == 0, said
    numbers = re.search(
        r"the new drafter makes (\S+) tokens per round on (\d+) recent held-back answers, (\S+) before, \S+ needed; "
        r"(\S+) tokens per round on (\d+) older held-back answers, (\S+) before",
        "\n".join(said),
    )
    assert numbers and float(numbers[1]) >= 1.01 * float(numbers[3]) - 0.01 and int(numbers[2]) >= int(numbers[5]) > 0
    drafter = load_drafter(place, pair[0])
    assert {array.dtype for array in tensors(drafter).values()} == {mx.float16}, "as it was stored"
    assert not same(before, tensors(drafter)) and drafter.args.acceptance is not None
    assert {path.name for path in place.iterdir()} == {
        *("config.json", "model.safetensors", "README.md", "training.json", "training.png"),
    }
    for file in ("config.json", "training.json", "README.md"):
        assert str(tmp_path) not in (place / file).read_text(), "no folders of this machine"
    prompt = [7, 8, 9, 10]
    plain = [token for token, _, _ in generate_step(prompt, pair[0], max_tokens=12)]
    assert [token for token, _, _ in generate_step(prompt, pair[0], drafter, max_tokens=12, plan=(2, 3))] == plain


def test_one_from_scratch_is_compared_with_the_context(target: str, pair: Pair, answers: Path, tmp_path: Path) -> None:
    status, said = train(target, answers, tmp_path / "drafter", "--exit-dim", "32", "--learning-rate", "0.01")
    assert status == 0, said
    held_back = [text for text in read_texts(answers, pair[1]) if is_held_back(text)]
    recent, older = held_back[len(held_back) // 2 :], held_back[: len(held_back) // 2]
    found = [count_tokens_per_round(pair[0], None, part, TrainingArgs(), context=True) for part in (recent, older)]
    assert re.findall(r"(\S+) before", "\n".join(said)) == [f"{value:.3f}" for value in found]
    assert load_drafter(tmp_path / "drafter").args.draft_depth in (1, 2, 3)
    with pytest.raises(RedrafterError, match="exists already: give another --output"):
        train(target, answers, tmp_path / "drafter", "--exit-dim", "32")


def test_one_that_is_not_better_is_not_written(target: str, pair: Pair, answers: Path, tmp_path: Path) -> None:
    place = make_start(tmp_path / "drafter", pair[0])
    before = contents(tmp_path)
    for output, flags in (
        (place, ("--drafter", place)),
        (tmp_path / "other", ("--drafter", place)),
    ):
        status, said = train(target, answers, output, *flags, "--learning-rate", "1e-9")
        assert status == from_answers.REFUSED == 3
        assert re.fullmatch(
            r"not written: the new drafter makes (1\.\d+) tokens per .* before, \d\.\d+ needed", said[-1]
        )
    assert contents(tmp_path) == before and [path.name for path in tmp_path.iterdir()] == ["drafter"]


@pytest.mark.parametrize(
    ("new", "is_written"), [((1.52, 1.96), True), ((1.51, 2.0), False), ((1.6, 1.95), False), ((1.4, 2.1), False)]
)
def test_the_gate(
    new: tuple[float, float],
    is_written: bool,
    target: str,
    pair: Pair,
    answers: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """1% better on recent answers, which come first, and at most 2% worse on older ones."""
    counted = iter([1.5, 2.0, *new])
    monkeypatch.setattr(from_answers, "count_tokens_per_round", lambda *args, **more: next(counted))
    place = make_start(tmp_path / "drafter", pair[0])
    status, said = train(target, answers, tmp_path / "new", "--drafter", place, "--iters", "2")
    assert (status == 0, (tmp_path / "new" / "model.safetensors").exists()) == (is_written, is_written), said


def test_held_back_requests_are_never_learned(
    target: str,
    pair: Pair,
    requests: list[tuple[list[int], list[int]]],
    answers: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    learned, asked = [], []
    real_batches, real_answers = from_answers.make_batches, from_answers.generate_answers

    def make_batches(texts: Sequence[Text], *args: Any) -> Any:
        learned.extend(texts)
        return real_batches(texts, *args)

    def write(model: Any, tokenizer: Any, prompts: Any, *args: Any, **more: Any) -> Any:
        asked.extend(map(list, prompts))
        return real_answers(model, tokenizer, prompts, *args, **more)

    monkeypatch.setattr(from_answers, "make_batches", make_batches)
    monkeypatch.setattr(from_answers, "generate_answers", write)
    train(target, answers, tmp_path / "new", "--drafter", make_start(tmp_path / "old", pair[0]), "--iters", "2")
    held = [prompt for prompt, answer in requests if is_held_back(Text(np.array([*prompt, *answer]), len(prompt)))]
    others = [prompt for prompt, _ in requests if prompt not in held]
    assert 0 < len(held) < 15
    seen = [text.ids[: text.offset].tolist() for text in learned]
    assert all(prompt in others for prompt in [*seen, *asked]) and all(prompt in seen for prompt in others)
    assert len(asked) == from_answers.ENOUGH - len(others)
    learned_ids = [text.ids.tolist() for text in learned]
    often = [learned_ids.count([*prompt, *answer]) for prompt, answer in requests if prompt in others]
    assert often[0] == min(often) >= 1 and often[-1] == max(often) == 3, "recent ones weigh more, the old ones stay"


def test_a_tenth_is_held_back_and_stays_so() -> None:
    rng = np.random.default_rng(0)
    texts = [Text(rng.integers(0, 4000, 20).astype(np.int32), 12) for _ in range(2000)]
    assert 150 < sum(map(is_held_back, texts)) < 250
    for text in texts[:200]:
        other = np.concatenate([text.ids[:12], text.ids[:8]]).astype(np.int64)
        assert is_held_back(text) == is_held_back(Text(other, 12)), "another answer to the same request"


def test_few_prompts_are_answered_more_often(
    target: str, pair: Pair, answers: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[list[int]] = []
    real = from_answers.generate_answers

    def write(model: Any, tokenizer: Any, prompts: Any, *args: Any, **more: Any) -> Any:
        asked.extend(prompts)
        return real(model, tokenizer, prompts, *args, **more)

    monkeypatch.setattr(from_answers, "generate_answers", write)
    start = make_start(tmp_path / "old", pair[0])
    train(target, answers, tmp_path / "new", "--drafter", start, "--iters", "2", "--max-prompts", "2")
    assert len({tuple(prompt) for prompt in asked}) == 2 and len(asked) > 60
    assert not {path.name for path in tmp_path.rglob("*")} & {"answers.jsonl", "training"}, "none is left outside"


def test_minutes_are_the_limit(target: str, pair: Pair, answers: Path, tmp_path: Path) -> None:
    """It ends, however many iterations are asked for; where nothing fits, it says so."""
    start = make_start(tmp_path / "old", pair[0])
    flags = ("--drafter", start, "--iters", str(2**31 - 1))
    status, said = train(target, answers, tmp_path / "new", *flags, "--minutes", "0.1")
    assert status in (0, 3) and any(re.fullmatch(r"\d+ iterations fit into 0\.1 minutes", line) for line in said)
    with pytest.raises(RedrafterError, match=r"expected more --minutes: nothing is left of 0\.01 to train in"):
        train(target, answers, tmp_path / "other", *flags, "--minutes", "0.01", "--val-tokens", "4000")
    assert not (tmp_path / "other").exists()


@pytest.mark.parametrize(
    "patch",
    ["from_answers.make_batches = stop_early", "checkpoints.save_arrays = write_half"],
    ids=["while it trains", "while it writes"],
)
def test_a_killed_run_leaves_the_old_drafter(
    patch: str, target: str, pair: Pair, answers: Path, tmp_path: Path
) -> None:
    place = make_start(tmp_path / "drafter", pair[0])
    before = contents(place)
    flags = ("--model", target, "--answers", str(answers), "--drafter", str(place), "--output", str(place), *QUICK)
    done = subprocess.run(
        [sys.executable, "-c", KILLED.replace("{patch}", patch), *flags],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    after = contents(place)
    assert {path: after.get(path) for path in before} == before
    assert all(path.name.startswith(".partial") for path in after.keys() - before.keys())
    assert train(target, answers, place, "--drafter", place)[0] == 0, "what is left is no obstacle"


def test_a_full_disk_leaves_the_old_drafter(
    target: str, pair: Pair, answers: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place, real = make_start(tmp_path / "drafter", pair[0]), mx.save_safetensors

    def cut_short(file: str, *args: Any) -> None:
        real(file, *args)
        os.truncate(file, 1000)

    before = contents(place)
    monkeypatch.setattr(mx, "save_safetensors", cut_short)
    with pytest.raises(RedrafterError, match=r"cannot write the drafter to .*: .*No space left"):
        train(target, answers, place, "--drafter", place)
    assert contents(place) == before


def test_a_dry_run_says_what_it_takes(target: str, pair: Pair, answers: Path, tmp_path: Path) -> None:
    place, said = make_start(tmp_path / "drafter", pair[0]), list[str]()
    before = contents(tmp_path)
    given = ("--model", target, "--answers", str(answers), "--output", str(place), "--drafter", str(place), *QUICK)
    assert train_from_answers(parse_args(given)[0], dry_run=True, say=said.append) == 0
    assert re.search(r"for answers, .* for 40 iterations .* GB of memory", said[-1]) and contents(tmp_path) == before


def test_answers_that_cannot_be_learned_are_one_line(target: str, pair: Pair, requests: Any, tmp_path: Path) -> None:
    start = make_start(tmp_path / "old", pair[0])
    (tmp_path / "empty").mkdir()
    keep(tmp_path / "foreign", (pair[0], SimpleNamespace(get_vocab=lambda: {str(n): n for n in range(4096)})), requests)
    for name, said in (
        ("none", "expected a folder that --answers has made, got .*none"),
        ("empty", "expected answers of this model's tokenizer in .*empty, got an empty folder"),
        ("foreign", "expected answers of this model's tokenizer in .*foreign, got those of other tokenizers alone"),
    ):
        with pytest.raises(RedrafterError, match=said):
            train(target, tmp_path / name, tmp_path / "new", "--drafter", start)
    assert not (tmp_path / "none").exists() and not (tmp_path / "new").exists()
    others = [(prompt, answer) for prompt, answer in requests if not is_held_back(Text(np.array(prompt), len(prompt)))]
    keep(tmp_path / "few", pair, others[:3])
    said = "not written: expected 2 answers that are held back and one to learn, got 0 and 3: every 10th request is "
    said += "held back"
    assert train(target, tmp_path / "few", tmp_path / "new", "--drafter", start) == (3, [said])


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: make_cached("eagle 3", 32, 4096, layers=1), "expected an EAGLE-1 head that reads .*, got EAGLE-3"),
        (lambda: make_cached("dflash", 32, 4096, layers=1), "expected one of recurrent, .*, got dflash"),
        (lambda: quantized(small_drafter(vocab=4096)), "expected weights that are not quantized"),
        (lambda: before_norm(small_drafter(vocab=4096)), "the hidden state before the final norm, expected that after"),
    ],
    ids=["eagle 3", "dflash", "quantized", "before norm"],
)
def test_drafters_that_cannot_be_trained_are_refused(
    make: Any, reason: str, target: str, answers: Path, tmp_path: Path
) -> None:
    drafter = make()
    bits = {"quantization": {"group_size": 32, "bits": 4}} if "scales" in str(tensors(drafter).keys()) else {}
    save_drafter(tmp_path / "old", drafter, extra=bits)
    with pytest.raises(RedrafterError, match=rf"cannot go on training .*old: .*{reason}") as caught:
        train(target, answers, tmp_path / "new", "--drafter", tmp_path / "old")
    assert "\n" not in str(caught.value)


def quantized(drafter: Any) -> Any:
    nn.quantize(drafter, 32, 4)
    return drafter


def before_norm(drafter: Any) -> Any:
    drafter.args = replace(drafter.args, hidden_state="before_norm")
    return drafter


def test_a_head_in_another_layout_is_not_written_over(target: str, pair: Pair, answers: Path, tmp_path: Path) -> None:
    place = make_start(tmp_path / "old", pair[0])
    (place / "model.safetensors").rename(place / "model-00001.safetensors")
    before = contents(place)
    with pytest.raises(RedrafterError, match="expected --output to be a drafter as train and convert write it"):
        train(target, answers, place, "--drafter", place)
    assert contents(place) == before


def test_the_record_has_what_was_done(target: str, pair: Pair, answers: Path, tmp_path: Path) -> None:
    start = make_start(tmp_path / "old", pair[0])
    status, said = train(target, answers, tmp_path / "new", "--drafter", start)
    assert status == 0, said
    summary = json.loads((tmp_path / "new" / "training.json").read_text())
    assert [entry["iteration"] for entry in summary["reports"]] == list(range(2, 41, 2))
    assert summary["settings"]["drafter"] == "old" and summary["settings"]["answers"] == "answers"
    assert summary["settings"]["learning_rate"] == pytest.approx(0.02), "a tenth of what was given"
