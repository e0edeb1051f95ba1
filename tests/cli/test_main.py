"""The console script, and what all commands share: help, exit status, one-line errors."""

import re
import signal
import subprocess
import sys
import tomllib
from pathlib import Path
from unittest.mock import Mock

import mlx.core as mx
import pytest

import mlx_redrafter
from benchmarks.records import stamp
from helpers.toys import make_model, make_tokenizer
from mlx_redrafter.cli import generate
from mlx_redrafter.cli import main as cli

ROOT = Path(__file__).parents[2]
VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]


@pytest.mark.parametrize(
    ("arguments", "status", "text"),
    [
        (["--help"], 0, "generate  generate text from a prompt"),
        (["--version"], 0, f"{VERSION}\n"),
        (["nonsense"], 2, "mlx_redrafter: error: argument COMMAND: invalid choice: 'nonsense'"),
        (
            [],
            2,
            "mlx_redrafter: error: the following arguments are required: COMMAND; see --help\n",
        ),
        (["chat", "--help"], 0, "usage: mlx_redrafter.chat"),
        (
            ["convert"],
            2,
            "mlx_redrafter.convert: error: one of the arguments --hf-path/--model --from-base is "
            "required",
        ),
        (
            ["generate", "--chat-template-config", "[1]"],
            2,
            "the value must be a JSON object, got list; see --help",
        ),
        (
            ["chat", "--draft-model", "x", "--drafter", "y"],
            2,
            "--drafter: not allowed with argument --draft-model",
        ),
    ],
)
def test_the_console_script_runs_commands(arguments, status, text, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr(sys, "argv", ["mlx_redrafter", *arguments])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    captured = capsys.readouterr()
    assert (ended.value.code or 0) == status
    assert text in (captured.err if status else captured.out)
    assert not status or captured.err.count("\n") == 1


def test_all_versions_agree():
    released = re.findall(
        r"^## \[(.+)\] - \d{4}-\d\d-\d\d$", (ROOT / "CHANGELOG.md").read_text("utf-8"), re.MULTILINE
    )
    assert released[0] == VERSION == stamp()["mlx_redrafter"]


@pytest.mark.parametrize(
    ("error", "status", "message"),
    [(ValueError("two\nlines"), 1, "error: two lines\n"), (KeyboardInterrupt(), 130, "")],
)
def test_errors_are_one_line_and_a_status(error, status, message, run, monkeypatch):
    monkeypatch.setattr(generate, "stream_generate", Mock(side_effect=error))
    assert run("generate", "--verbose", "F") == (status, "", message)


def test_warnings_and_logs_are_one_line_each():
    script = (
        "import logging, sys, types, warnings; from mlx_redrafter.cli.main import run_module\n"
        "def run():\n"
        "    warnings.warn('chains, not trees')\n"
        "    logging.getLogger('mlx_redrafter.x').info('measuring')\n"
        "    logging.getLogger('other').info('not shown')\n"
        "sys.modules['example'] = types.SimpleNamespace(run=run); run_module('example')"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert done.stderr == "warning: chains, not trees\nmeasuring\n"


def test_ctrl_c_while_modules_are_imported_prints_no_traceback():
    script = (
        "import signal, time; from mlx_redrafter.cli import main\n"
        "# What runs in the background may ignore it.\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "main.import_module = lambda name: print(name, flush=True) or time.sleep(300)\n"
        "main.main('generate')"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout.readline() == b"mlx.core\n"
        process.send_signal(signal.SIGINT)
        assert process.communicate(timeout=60) == (b"", b"")
        assert process.returncode == -signal.SIGINT


def test_a_closed_pipe_prints_no_traceback():
    script = f"{sys.executable} -m mlx_redrafter.generate -m -1 --draft-depth 2 | head -c 20"
    done = subprocess.run(
        ["sh", "-c", script], capture_output=True, text=True, check=True, timeout=60
    )
    assert len(done.stdout) == 20
    assert "Traceback" not in done.stderr
    assert "Exception" not in done.stderr


@pytest.fixture
def slow_blas(monkeypatch) -> str:
    """Fakes a machine whose OpenBLAS is damaged; returns the expected warning."""
    if mx.default_device().type != mx.cpu:
        pytest.skip("a GPU computes here")
    monkeypatch.setattr("mlx_redrafter.machine.blas._problem", ("it is damaged", "mend it"))
    return r"^MLX uses a slow BLAS instead of OpenBLAS \(it is damaged\); to fix it: mend it$"


def test_a_slow_blas_warns_for_models_that_mlx_lm_loaded(slow_blas):
    model = make_model()
    tokenizer = make_tokenizer()
    with pytest.warns(UserWarning, match=slow_blas):
        text = mlx_redrafter.generate(model, tokenizer, "abc", max_tokens=4)
    assert mlx_redrafter.generate(model, tokenizer, "abc", max_tokens=4) == text, "only one warning"


@pytest.mark.parametrize(
    ("command", "status"), [("generate -m 2 --plan off >&-", 1), ("stdio --plan off <&-", 0)]
)
def test_closed_standard_streams_print_no_traceback(command, status):
    """A text that cannot be printed is an error."""
    script = f"{sys.executable} -m mlx_redrafter.{command}"
    done = subprocess.run(["sh", "-c", script], capture_output=True, text=True, timeout=300)
    assert done.returncode == status
    assert bool(done.stdout) is ("stdio" in command)
    assert "Traceback" not in done.stderr
    assert ("error: stdout is closed\n" in done.stderr) is (status == 1)
