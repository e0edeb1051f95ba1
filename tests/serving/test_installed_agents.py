"""The real coding agents with the settings of docs/server.md: a scripted model reads, edits and
runs a file.

After npm has installed them nothing leaves this machine: each has its own home and a loopback
address.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from helpers.servers import Scripted, ScriptedRequest, ScriptedWorker

pytestmark = [
    pytest.mark.npm,
    pytest.mark.skipif(shutil.which("npm") is None, reason="npm installs the agents"),
]
SERVER_GUIDE = Path(__file__).parents[2] / "docs" / "server.md"
BROKEN = "def add(a, b):\n    return a - b\n"
RIGHT = "def add(a, b):\n    return a + b\n"
PRINT = "\n\nprint(add(2, 3))\n"


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where npm installs them;

    Claude Code's install script only copies its binary, so it is skipped.
    """
    folder = tmp_path_factory.mktemp("npm")
    names = [
        "@anthropic-ai/claude-code@latest",
        "@openai/codex@latest",
    ]  # untagged, npm takes one for its own node
    subprocess.run(
        [
            "npm",
            "install",
            "--no-audit",
            "--no-fund",
            "--ignore-scripts",
            "--prefix",
            folder,
            *names,
        ],
        check=True,
        capture_output=True,
        timeout=600,
    )
    return folder / "node_modules"


class Task:
    """A broken program, and a scripted model that mends it with an agent's tools.

    Attributes:
        home, work: an empty home, and the folder of the program.
    """

    def __init__(self, engine: ScriptedWorker, folder: Path) -> None:
        self._engine = engine
        self.home = folder / "home"
        self.work = folder / "work"
        self.home.mkdir()
        self.work.mkdir()
        self.file = self.work / "add.py"
        self.file.write_text(BROKEN + PRINT)

    def run(
        self,
        command: Sequence[str | Path],
        calls: Sequence[tuple[str, dict[str, Any]]],
        **variables: str,
    ) -> str:
        """Runs an agent and returns its output.

        Each call waits for the previous results; the answer comes last.
        """
        submit = self._engine.submit

        def answer(prompt: list[int], **asked: Any) -> ScriptedRequest:
            done = str(self._engine.tokenizer.decode(prompt)).count("<tool>")
            called = [
                {"name": name, "arguments": arguments} for name, arguments in calls[done : done + 1]
            ]
            text = f"<tool_call>{json.dumps(called[0])}</tool_call>" if called else "It adds now."
            self._engine.texts = [[f"</think>{text}"]]
            return submit(prompt, **asked)

        environment = {
            "PATH": os.environ["PATH"],
            "HOME": str(self.home),
            "LANG": "C.UTF-8",
            **variables,
        }
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(self._engine, "submit", answer)
            done = subprocess.run(
                command,
                cwd=self.work,
                env=environment,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=300,
            )
        assert done.returncode == 0 and "It adds now." in done.stdout, done.stdout + done.stderr
        assert self.file.read_text() == RIGHT + PRINT
        return done.stdout + done.stderr


@pytest.fixture
def task(scripted: Scripted, tmp_path: Path) -> Task:
    return Task(scripted[1], tmp_path)


def read_settings(language: str, url: str) -> str:
    """Returns the first block of this language in docs/server.md about agents, with the name and
    address here.
    """
    text = SERVER_GUIDE.read_text().split("## Agents")[1]
    block = text.split(f"```{language}\n")[1].split("```")[0]
    return block.replace("NAME", "demo").replace("http://127.0.0.1:8080", url)


def test_claude_code_edits_and_runs_a_file(scripted: Scripted, packages: Path, task: Task) -> None:
    (binary,) = packages.glob("@anthropic-ai/claude-code-*/claude")
    run = f"{sys.executable} add.py"
    file = str(task.file)
    settings = shlex.split(read_settings("bash", scripted[0].url))
    printed = task.run(
        [
            binary,
            "-p",
            "Fix add.py",
            "--permission-mode",
            "acceptEdits",
            "--allowedTools",
            f"Bash({run})",
        ],
        [
            ("ToolSearch", {"query": "select:WebFetch", "max_results": 1}),
            ("Read", {"file_path": file}),
            ("Edit", {"file_path": file, "old_string": "a - b", "new_string": "a + b"}),
            ("Bash", {"command": run, "description": "Run it"}),
        ],
        **dict(each.split("=", 1) for each in settings if "=" in each),
    )
    assert "<tool>5" in scripted[1].prompt, "it has read the program's output"
    assert (
        '<tool><tools>\n{"type": "function", "function": {"name": "WebFetch"' in scripted[1].prompt
    )
    assert "context window" not in printed, "it knows how long the context is"


def test_codex_edits_and_runs_a_file(scripted: Scripted, packages: Path, task: Task) -> None:
    folder = task.home / ".codex"
    folder.mkdir()
    catalog = 'model_catalog_json = "models.json"\n'
    (folder / "config.toml").write_text(catalog + read_settings("toml", scripted[0].url))
    (folder / "models.json").write_text(read_settings("json", scripted[0].url))
    flags = ["--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox"]
    commands = ["cat add.py", "sed -i 's/a - b/a + b/' add.py", f"{sys.executable} add.py"]
    calls = [("exec_command", {"cmd": command}) for command in commands]
    printed = task.run([packages / ".bin" / "codex", "exec", *flags, "Fix add.py"], calls)
    assert "Output:\n5" in scripted[1].prompt, "it has read the program's output"
    assert "Model metadata" not in printed
    assert "You are a coding agent." in scripted[1].prompt
