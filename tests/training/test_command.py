"""Flags and YAML file of `train`: errors come before anything is loaded or written."""

from __future__ import annotations

import sys
from dataclasses import fields
from pathlib import Path

import pytest

from mlx_redrafter.errors import RedrafterError
from mlx_redrafter.training import command, evaluation, run
from mlx_redrafter.training.command import make_parser, parse_args
from mlx_redrafter.training.settings import TrainingArgs


def test_flags_override_the_file(tmp_path: Path) -> None:
    path = tmp_path / "train.yaml"
    path.write_text("iters: 7\nlearning_rate: 1e-3\ntemp: [0.0, 0.5]\nmask_prompt: true\nmodel: some/model\ndata: x\n")
    args, flags = parse_args(["-c", str(path), "--iters", "9"])
    assert (args.iters, args.learning_rate, args.temp, args.mask_prompt) == (9, 1e-3, (0.0, 0.5), True)
    assert args.batch_size == TrainingArgs().batch_size and not flags.resume
    assert parse_args([])[0] == TrainingArgs()
    shown = make_parser().format_help()
    assert all(f"--{each.name.replace('_', '-')}" in shown for each in fields(TrainingArgs))


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("iterations: 3\n", "train.yaml: unrecognized arguments: --iterations=3"),
        ("iters: many\n", "train.yaml: argument --iters: invalid int value: 'many'"),
        ("iters: true\n", "train.yaml: argument --iters: expected one argument"),
        ("labels: truth\n", "train.yaml: argument --labels: invalid choice: 'truth'"),
        ("- 3\n", "expected a YAML mapping of settings in .*, got list"),
        ("a: [\n", "cannot read the settings in"),
        ("", "expected a YAML mapping of settings in .*, got NoneType"),
        (None, "cannot read the settings in"),
    ],
)
def test_an_invalid_file_is_refused(text: str | None, reason: str, tmp_path: Path) -> None:
    if text is not None:
        (tmp_path / "train.yaml").write_text(text)
    with pytest.raises(RedrafterError, match=reason):
        parse_args(["-c", str(tmp_path / "train.yaml")])


@pytest.mark.parametrize("name", ["drafter_type", "dtype", "compute_dtype", "labels"])
def test_an_invalid_choice_is_refused_in_python(name: str) -> None:
    with pytest.raises(RedrafterError, match=f"{name} must be one of .*, got 'float65'"):
        TrainingArgs(**{name: "float65"})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (("--model", "x"), "expected --data or --prompts"),
        (("--data", "x", "--prompts", "y"), "give either --data or --prompts, got both"),
        (("--adapter-path", "x"), "--adapter-path needs --model"),
        (("--mask-prompt",), "--mask-prompt needs --data"),
        (("--data", "x", "--learn-prompts"), "--learn-prompts cannot be used with --data"),
        (("--data", "x", "--max-prompts", "9"), "--max-prompts cannot be used with --data"),
        (("--draft-vocab-size", "64"), "--num-draft-layers and --draft-vocab-size need --exit-dim"),
        (("--inner-dim", "64"), "--inner-dim cannot be used with --drafter-type recurrent, which takes --exit-dim and"),
        (("--drafter-type", "medusa", "--exit-dim", "64"), "--exit-dim cannot be used with --drafter-type medusa"),
        (("--drafter-type", "hydra"), "argument --drafter-type: invalid choice: 'hydra'"),
        (("--exit-dim", "0"), "exit_dim must be at least 1, got 0"),
        (("--draft-depth", "300"), "draft_depth must be from 1 to 256, got 300"),
        (("--exit-dim", "9" * 30), "exit_dim must be from 1 to 65536"),
        (("--iters", "many"), "argument --iters: invalid int value: 'many'"),
        (("--max-tokens", "5"), "max_tokens must be above draft_depth 5"),
        (("--weight-decay", "nan"), "weight_decay must be .*, got nan"),
        (("--labels", "sampled", "--teacher-top-k", "8"), "teacher_top_k needs labels distribution"),
        (("--temp", "inf"), "temp must be"),
        (("--val-batches", "0"), "val_batches must be at least 1, or -1 for all"),
        (("--temp", "-1"), "temp must be"),
        (("--output", __file__), "--output cannot be .*: .*test_command.py is not a directory"),
        (("--resume",), "there is no run to resume in"),
        (("--prompts", "/no/such"), "cannot read the prompts in /no/such"),
        (("--model", "x", "--data", "/no/such"), "got '/no/such': no such folder"),
        (("--minutes", "nan"), "minutes must be .*, got nan"),
        (("--drafter", "y", "--exit-dim", "8"), "--exit-dim cannot be used with --drafter"),
        (("--drafter", "y", "--drafter-type", "eagle"), "--drafter-type and .* cannot be used with"),
        (("--shapes", "3"), "argument --shapes: expected W,K or W,K,N, got '3'"),
        (("--eval-only", "--max-tokens", "0"), "max_tokens must be at least 1"),
        (("--eval-only", "--dry-run"), "--dry-run cannot be used with --eval-only"),
        (("--eval-only", "--data", "x", "--prompts", "y"), "give either --data or --prompts, got both"),
        (("--eval-only", "--prompts", "/no/such"), "cannot read the prompts in /no/such"),
        (("--eval-only", "--model", "x"), "--eval-only needs the --drafter"),
    ],
)
def test_wrong_flags_are_refused_before_loading(
    flags: tuple[str, ...], reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module, name in ((run, "load_target"), (evaluation, "load_pair")):
        monkeypatch.setattr(module, name, lambda *args: pytest.fail("a model was loaded"))
    monkeypatch.setattr(sys, "argv", ["train", "--output", str(tmp_path / "drafter"), *flags])
    with pytest.raises(RedrafterError, match=reason):
        command.run()
    assert not list(tmp_path.iterdir())
