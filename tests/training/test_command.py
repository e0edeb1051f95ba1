"""Flags of `train`: errors come before anything is loaded or written."""

import sys
from dataclasses import fields
from pathlib import Path

import pytest

from helpers.refusals import refusal
from mlx_redrafter.cli import train as command
from mlx_redrafter.cli.train import make_parser, parse_args
from mlx_redrafter.errors import RedrafterError
from mlx_redrafter.training import example_makers, run
from mlx_redrafter.training.settings import TrainingArgs


def test_every_setting_is_a_flag():
    args, flags = parse_args(
        ["--minutes", "9", "--learning-rate", "1e-3", "--mask-prompt", "--resume"]
    )
    assert (args.minutes, args.learning_rate) == (9.0, 1e-3)
    assert args.mask_prompt
    assert flags.resume
    assert parse_args([])[0] == TrainingArgs()
    shown = make_parser().format_help()
    assert all(f"--{each.name.replace('_', '-')}" in shown for each in fields(TrainingArgs))


FOLDER = str(Path(__file__).parent)


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
        (("--data", "./nowhere"), "no such file or directory: './nowhere'"),
        (("--data", __file__), "must be a folder with train.jsonl, got a file: .*command.py"),
        (("--data", FOLDER), "must be a folder with train.jsonl, got a folder without it: "),
        (("--data", "nobody/texts"), r"there is no folder nobody/texts, and .* needs pip install"),
        (("--prompts", "no/such"), "cannot read the prompts in no/such"),
        (("--prompts", FOLDER), "cannot read the prompts in .*training: "),
    ],
)
def test_wrong_flags_are_refused_before_loading(flags, reason, tmp_path, monkeypatch):
    monkeypatch.setattr(run, "load_target", lambda *args: pytest.fail("a model was loaded"))
    monkeypatch.setattr(example_makers, "find_spec", lambda name: None)
    monkeypatch.setattr(sys, "argv", ["train", "--output", str(tmp_path / "drafter"), *flags])
    with refusal(reason):
        command.run()
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="needs Linux's /proc")
def test_an_output_that_cannot_be_is_refused_before_loading():
    """Also for root, whom the permissions of /proc do not stop."""
    with refusal("--output cannot be /proc/x: no file can be made"):
        run.run_training(TrainingArgs(output="/proc/x"))


@pytest.mark.parametrize(
    ("count", "held_out", "batch_size", "needed"), [(4, 0, 4, 5), (19, 0, 19, 20), (4, 1, 5, 6)]
)
def test_too_few_texts_are_refused(count, held_out, batch_size, needed, tmp_path):
    """One of 20 is held out, unless there is a validation set."""
    write_texts(tmp_path / "train.jsonl", count)
    if held_out:
        write_texts(tmp_path / "valid.jsonl", held_out)
    reason = f"expected at least {needed} texts in --data for --batch-size {batch_size}"
    with refusal(f"{reason}, got {count + held_out} that"):
        run.run_training(
            TrainingArgs(data=str(tmp_path), batch_size=batch_size, output=str(tmp_path / "d"))
        )


@pytest.mark.parametrize("line", ["", "{", "3"])
def test_data_with_a_broken_line_are_refused_before_loading(line, tmp_path):
    write_texts(tmp_path / "train.jsonl", 9)
    with (tmp_path / "train.jsonl").open("a", encoding="utf-8") as file:
        file.write(f"{line}\n")
    with pytest.raises(RedrafterError, match=r"train\.jsonl, line 10 "):
        example_makers.check_data(str(tmp_path))


def write_texts(path: Path, count: int) -> None:
    path.write_text('{"text": "one two three four five six seven eight nine ten"}\n' * count)
