"""The console script and what all commands share: help, exit statuses, one line for every error."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from mlx_redrafter.cli import chat, generate
from mlx_redrafter.cli import main as cli

Run = Any


@pytest.mark.parametrize(
    ("arguments", "status", "text"),
    [
        (["--help"], 0, "generate  generate text from a prompt"),
        (["--version"], 0, "0."),
        (["nonsense"], 2, "mlx_redrafter: error: expected a command, got 'nonsense'; see --help\n"),
        ([], 2, "mlx_redrafter: error: expected a command; see --help\n"),
        (["generate", "--help"], 0, "--draft-depth"),
    ],
)
def test_the_console_script_runs_commands_and_lists_them(
    arguments: list[str], status: int, text: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["mlx_redrafter", *arguments])
    try:
        cli.main()
    except SystemExit as ended:
        assert (ended.code or 0) == status
    captured = capsys.readouterr()
    assert text in (captured.err if status else captured.out)


def test_every_command_has_a_module_with_run() -> None:
    script = "import importlib, sys; assert callable(importlib.import_module(sys.argv[1]).run)"
    for module, _ in cli.COMMANDS.values():
        subprocess.run([sys.executable, "-c", script, module], check=True)


@pytest.mark.parametrize(
    ("error", "status", "message"),
    [
        (OSError(28, "No space left on device"), 1, "error: [Errno 28] No space left on device\n"),
        (ValueError("two\nlines"), 1, "error: two lines\n"),
        (BrokenPipeError(), 1, ""),
        (KeyboardInterrupt(), 130, ""),
    ],
)
def test_errors_are_one_line_and_an_exit_status(
    error: BaseException, status: int, message: str, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> int:
        raise error

    monkeypatch.setattr(generate, "run", fail)
    assert run("generate") == (status, "", message)


def test_ctrl_c_while_generating_exits_with_130(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*args: Any, **options: Any) -> Any:
        for count, response in enumerate(real(*args, **options)):
            if count == 3:
                raise KeyboardInterrupt
            yield response

    real = generate.stream_generate
    monkeypatch.setattr(generate, "stream_generate", interrupt)
    status, out, err = run("generate", "--draft-depth", "2")
    assert status == 130 and out and "Traceback" not in err


def test_warnings_and_logs_are_one_line_each() -> None:
    script = (
        "import logging, sys, types, warnings; from mlx_redrafter.cli.main import run_module\n"
        "def run():\n"
        "    warnings.warn('chains, not trees'); logging.getLogger('mlx_redrafter.x').info('measuring')\n"
        "    logging.getLogger('other').info('not shown')\n"
        "sys.modules['example'] = types.SimpleNamespace(run=run); run_module('example')"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stderr == "warning: chains, not trees\nmeasuring\n"


def test_a_closed_pipe_prints_no_traceback() -> None:
    script = f"{sys.executable} -m mlx_redrafter.generate -m -1 --draft-depth 2 | head -c 20"
    done = subprocess.run(["sh", "-c", script], capture_output=True, text=True, check=True, timeout=60)
    assert len(done.stdout) == 20 and "Traceback" not in done.stderr


def test_help_of_commands_shows_defaults(run: Run) -> None:
    for command, tokens in ((generate, 100), (chat, 256)):
        assert f"-1 for no limit (default: {tokens})" in " ".join(command.make_parser().format_help().split())
