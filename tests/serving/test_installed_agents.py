"""The real coding agents with the settings of docs/server.md: a scripted model reads, edits and runs a file.

After npm has installed them nothing leaves this machine: each has its own home and a loopback address.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from servers import Running, ScriptedRequest, ScriptedWorker

pytestmark = [
    pytest.mark.npm,
    pytest.mark.skipif(shutil.which("npm") is None, reason="npm installs the agents"),
]
BROKEN, RIGHT = "def add(a, b):\n    return a - b\n", "def add(a, b):\n    return a + b\n"
PRINT = "\n\nprint(add(2, 3))\n"


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where npm installs them; Claude Code's install script only copies its binary, so it is skipped."""
    folder = tmp_path_factory.mktemp("npm")
    names = ["@anthropic-ai/claude-code", "@openai/codex"]
    subprocess.run(
        ["npm", "install", "--no-audit", "--no-fund", "--ignore-scripts", "--prefix", folder, *names],
        check=True, capture_output=True, timeout=600,
    )  # fmt: skip
    return folder / "node_modules"


def play(engine: ScriptedWorker, calls: Sequence[tuple[str, dict[str, Any]]], monkeypatch: pytest.MonkeyPatch) -> None:
    """Scripts the engine: each call waits for the previous results; the answer comes last."""
    submit = engine.submit

    def answer(prompt: list[int], **asked: Any) -> ScriptedRequest:
        done = str(engine.tokenizer.decode(prompt)).count("<tool>")
        called = [{"name": name, "arguments": arguments} for name, arguments in calls[done : done + 1]]
        text = f"<tool_call>{json.dumps(called[0])}</tool_call>" if called else "It adds now."
        engine.texts = [[f"</think>{text}"]]
        return submit(prompt, **asked)

    monkeypatch.setattr(engine, "submit", answer)


def run_agent(command: Sequence[str | Path], home: Path, work: Path, **variables: str) -> str:
    """Runs an agent and returns its output; it must exit with 0."""
    environment = {"PATH": os.environ["PATH"], "HOME": str(home), "LANG": "C.UTF-8", **variables}
    done = subprocess.run(
        command, cwd=work, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture
def places(tmp_path: Path) -> tuple[Path, Path]:
    """Returns (an empty home, a folder with a broken program)."""
    home, work = tmp_path / "home", tmp_path / "work"
    home.mkdir()
    work.mkdir()
    (work / "add.py").write_text(BROKEN + PRINT)
    return home, work


def test_claude_code_edits_and_runs_a_file(
    scripted: tuple[Running, ScriptedWorker],
    packages: Path,
    places: tuple[Path, Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    server, engine = scripted
    home, work = places
    file = str(work / "add.py")
    run = f"{sys.executable} add.py"
    play(
        engine,
        [
            ("Read", {"file_path": file}),
            ("Edit", {"file_path": file, "old_string": "a - b", "new_string": "a + b"}),
            ("Bash", {"command": run, "description": "Run it"}),
        ],
        monkeypatch,
    )
    (binary,) = packages.glob("@anthropic-ai/claude-code-*/claude")
    models = dict.fromkeys(("MODEL", *(f"DEFAULT_{size}_MODEL" for size in ("OPUS", "SONNET", "HAIKU"))), "demo")
    out = run_agent(
        [binary, "-p", "Fix add.py", "--permission-mode", "acceptEdits", "--allowedTools", f"Bash({run})"],
        home,
        work,
        ANTHROPIC_BASE_URL=server.url,
        ANTHROPIC_AUTH_TOKEN="none",
        CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC="1",
        **{f"ANTHROPIC_{name}": value for name, value in models.items()},
    )
    assert (work / "add.py").read_text() == RIGHT + PRINT and "It adds now." in out
    assert "<tool>5" in engine.prompt, "it has read the program's output"


def test_codex_edits_and_runs_a_file(
    scripted: tuple[Running, ScriptedWorker],
    packages: Path,
    places: tuple[Path, Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    server, engine = scripted
    home, work = places
    commands = ["cat add.py", "sed -i 's/a - b/a + b/' add.py", f"{sys.executable} add.py"]
    play(engine, [("exec_command", {"cmd": command}) for command in commands], monkeypatch)
    (home / ".codex").mkdir()
    (home / ".codex" / "config.toml").write_text(f"""model = "demo"
model_provider = "mlx_redrafter"
model_context_window = 32768

[model_providers.mlx_redrafter]
name = "mlx_redrafter"
base_url = "{server.url}/v1"
wire_api = "responses"
stream_idle_timeout_ms = 3000000
""")
    flags = ["--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox"]
    out = run_agent([packages / ".bin" / "codex", "exec", *flags, "Fix add.py"], home, work)
    assert (work / "add.py").read_text() == RIGHT + PRINT and "It adds now." in out
    assert "Output:\n5" in engine.prompt, "it has read the program's output"
