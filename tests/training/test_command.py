"""Flags and YAML file of `train`: errors come before anything is loaded or written."""

from __future__ import annotations

import sys
from dataclasses import fields
from pathlib import Path

import pytest

from mlx_redrafter.errors import RedrafterError
from mlx_redrafter.training import command, run
from mlx_redrafter.training.command import make_parser, parse_args
from mlx_redrafter.training.settings import TrainingArgs


def test_flags_override_the_file(tmp_path: Path) -> None:
    path = tmp_path / "train.yaml"
    path.write_text("iters: 7\nlearning_rate: 1e-3\ntemp: 0\nmask_prompt: true\nmodel: some/model\ndata: x\ndtype:\n")
    args, flags = parse_args(["-c", str(path), "--iters", "9"])
    assert (args.iters, args.learning_rate, args.temp, args.mask_prompt) == (9, 1e-3, 0.0, True)
    assert args.batch_size == TrainingArgs().batch_size and not flags.resume
    assert parse_args([])[0] == TrainingArgs()
    shown = make_parser().format_help()
    assert all(f"--{each.name.replace('_', '-')}" in shown for each in fields(TrainingArgs))


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("iterations: 3\n", "train.yaml: unknown settings: iterations"),
        ("iters: many\n", "argument --iters: invalid int value: 'many'"),
        ("iters: 2.5\n", "argument --iters: invalid int value: '2.5'"),
        ("dtype: float65\n", "dtype must be one of .*, got 'float65'"),
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


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (("--model", "x"), "expected --data or --prompts"),
        (("--data", "x", "--prompts", "y"), "give either --data or --prompts, got both"),
        (("--adapter-path", "x"), "--adapter-path needs --model"),
        (("--draft-vocab-size", "64"), "--draft-vocab-size needs --exit-dim"),
        (("--drafter-type", "medusa", "--exit-dim", "64"), "--exit-dim cannot be used with --drafter-type medusa"),
        (("--drafter", "y", "--exit-dim", "8"), "--drafter has its own kind and sizes"),
        (("--drafter-type", "hydra"), "argument --drafter-type: invalid choice: 'hydra'"),
        (("--iters", "many"), "argument --iters: invalid int value: 'many'"),
        (("--exit-dim", "0"), "exit_dim must be at least 1, got 0"),
        (("--temp", "nan"), "temp must be at least 0, got nan"),
        (("--output", __file__), "--output cannot be .*: .*test_command.py is not a directory"),
        (("--resume",), "there is no run to resume in"),
    ],
)
def test_wrong_flags_are_refused_before_loading(
    flags: tuple[str, ...], reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "load_target", lambda *args: pytest.fail("a model was loaded"))
    monkeypatch.setattr(sys, "argv", ["train", "--output", str(tmp_path / "drafter"), *flags])
    with pytest.raises(RedrafterError, match=reason):
        command.run()
    assert not list(tmp_path.iterdir())
