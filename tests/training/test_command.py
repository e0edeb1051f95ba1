"""Flags of `train`: errors come before anything is loaded or written."""

from __future__ import annotations

import sys
from dataclasses import fields
from pathlib import Path

import pytest

from mlx_redrafter.errors import RedrafterError
from mlx_redrafter.training import command, run
from mlx_redrafter.training.command import make_parser, parse_args
from mlx_redrafter.training.settings import TrainingArgs


def test_every_setting_is_a_flag() -> None:
    args, flags = parse_args(
        ["--minutes", "9", "--learning-rate", "1e-3", "--mask-prompt", "--resume"]
    )
    assert (args.minutes, args.learning_rate) == (9.0, 1e-3)
    assert args.mask_prompt and flags.resume
    assert parse_args([])[0] == TrainingArgs()
    shown = make_parser().format_help()
    assert all(f"--{each.name.replace('_', '-')}" in shown for each in fields(TrainingArgs))


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (("--data", "x", "--prompts", "y"), "give either --data or --prompts, got both"),
        (("--draft-vocab-size", "64"), "--draft-vocab-size needs --exit-dim"),
        (
            ("--drafter-type", "medusa", "--exit-dim", "64"),
            "--exit-dim cannot be used with --drafter-type medusa",
        ),
        (("--num-draft-layers", "2"), "--num-draft-layers needs --exit-dim"),
        (("--minutes", "0"), "minutes must be at least 0.01, got 0.0"),
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
