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


class Task:
    """A broken program, and a scripted model that mends it with an agent's tools.

    Attributes:
        home, work: an empty home, and the folder of the program.
    """

    def __init__(self, engine: ScriptedWorker, folder: Path) -> None:
        self._engine = engine
        self.home, self.work = folder / "home", folder / "work"
        self.home.mkdir()
        self.work.mkdir()
        self.file = self.work / "add.py"
        self.file.write_text(BROKEN + PRINT)

    def run(self, command: Sequence[str | Path], calls: Sequence[tuple[str, dict[str, Any]]], **variables: str) -> None:
        """Runs an agent. Each call waits for the previous results; the answer comes last."""
        submit = self._engine.submit

        def answer(prompt: list[int], **asked: Any) -> ScriptedRequest:
            done = str(self._engine.tokenizer.decode(prompt)).count("<tool>")
            called = [{"name": name, "arguments": arguments} for name, arguments in calls[done : done + 1]]
            text = f"<tool_call>{json.dumps(called[0])}</tool_call>" if called else "It adds now."
            self._engine.texts = [[f"</think>{text}"]]
            return submit(prompt, **asked)

        environment = {"PATH": os.environ["PATH"], "HOME": str(self.home), "LANG": "C.UTF-8", **variables}
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(self._engine, "submit", answer)
            done = subprocess.run(
                command, cwd=self.work, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True,
                timeout=300,
            )  # fmt: skip
        assert done.returncode == 0 and "It adds now." in done.stdout, done.stdout + done.stderr
        assert self.file.read_text() == RIGHT + PRINT


@pytest.fixture
def task(scripted: tuple[Running, ScriptedWorker], tmp_path: Path) -> Task:
    return Task(scripted[1], tmp_path)


def test_claude_code_edits_and_runs_a_file(
    scripted: tuple[Running, ScriptedWorker], packages: Path, task: Task
) -> None:
    (binary,) = packages.glob("@anthropic-ai/claude-code-*/claude")
    run, file = f"{sys.executable} add.py", str(task.file)
    models = dict.fromkeys(("MODEL", *(f"DEFAULT_{size}_MODEL" for size in ("OPUS", "SONNET", "HAIKU"))), "demo")
    task.run(
        [binary, "-p", "Fix add.py", "--permission-mode", "acceptEdits", "--allowedTools", f"Bash({run})"],
        [
            ("Read", {"file_path": file}),
            ("Edit", {"file_path": file, "old_string": "a - b", "new_string": "a + b"}),
            ("Bash", {"command": run, "description": "Run it"}),
        ],
        ANTHROPIC_BASE_URL=scripted[0].url,
        ANTHROPIC_AUTH_TOKEN="none",
        CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC="1",
        **{f"ANTHROPIC_{name}": value for name, value in models.items()},
    )
    assert "<tool>5" in scripted[1].prompt, "it has read the program's output"


def test_codex_edits_and_runs_a_file(scripted: tuple[Running, ScriptedWorker], packages: Path, task: Task) -> None:
    (task.home / ".codex").mkdir()
    (task.home / ".codex" / "config.toml").write_text(f"""model = "demo"
model_provider = "mlx_redrafter"
model_context_window = 32768

[model_providers.mlx_redrafter]
name = "mlx_redrafter"
base_url = "{scripted[0].url}/v1"
wire_api = "responses"
stream_idle_timeout_ms = 3000000
""")
    flags = ["--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox"]
    commands = ["cat add.py", "sed -i 's/a - b/a + b/' add.py", f"{sys.executable} add.py"]
    calls = [("exec_command", {"cmd": command}) for command in commands]
    task.run([packages / ".bin" / "codex", "exec", *flags, "Fix add.py"], calls)
    assert "Output:\n5" in scripted[1].prompt, "it has read the program's output"
