"""The real coding agents with the settings of examples/agents: a model that thinks reads, edits and
runs a file, and answers again in a second turn.

Its texts are given; everything else is the server's, prompt cache included. After npm has installed
the agents nothing leaves this machine: each has its own home and a loopback address.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from helpers.servers import Running, parse_flags, read_settings, save_tokenizer, start_server
from helpers.small import small_llama
from mlx_redrafter.decoding.options import Options
from mlx_redrafter.serving.formats.completion import Service
from mlx_redrafter.serving.scheduling.worker import Worker

pytestmark = [
    pytest.mark.npm,
    pytest.mark.skipif(shutil.which("npm") is None, reason="npm installs the agents"),
]
BROKEN = "def add(a, b):\n    return a - b\n"
RIGHT = "def add(a, b):\n    return a + b\n"
PRINT = "\n\nprint(add(2, 3))\n"
ANSWERS = ["It adds now.", "Nothing is left."]
"""The answer of each turn."""

TEMPLATE = """{%- for tool in tools or [] %}{{ tool | tojson }}
{% endfor %}
{%- for m in messages %}<{{ m.role }}>
{%- if m.role == 'assistant' %}<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}
{%- for call in m.tool_calls or [] %}<tool_call>{"name": {{ call.function.name | tojson -}}
, "arguments": {{ call.function.arguments | tojson }}}</tool_call>{% endfor %}
{%- endfor %}{% if add_generation_prompt %}<assistant><think>{% endif %}{# tool_call.name #}"""
"""Shows an answer as it was written, with its reasoning."""

MAX_LOST = 2
"""Tokens of an answer that the next prompt may lack: its end, and one that merges with the text
after it."""


class Script:
    """A `Grammar` that allows one text only."""

    fallback = None

    def __init__(self, tokens: Sequence[int], vocab: int, length: int = 0):
        self._tokens = tokens
        self._vocab = vocab
        self.length = length

    def fork(self) -> Script:
        return Script(self._tokens, self._vocab, self.length)

    def take(self, token: int) -> bool:
        self.length += 1
        return self.length > len(self._tokens) or token == self._tokens[self.length - 1]

    def compute_mask(self) -> NDArray[np.bool_] | None:
        if self.length >= len(self._tokens):
            return None
        return np.arange(self._vocab) == self._tokens[self.length]

    def compute_forced(self) -> list[int]:
        return list(self._tokens[self.length :])


@pytest.fixture(scope="module")
def packages(tmp_path_factory) -> Path:
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


@pytest.fixture
def server(tmp_path) -> Iterator[Running]:
    """A server over a model of one layer, which reads long prompts quickly."""
    tokenizer = save_tokenizer(tmp_path, TEMPLATE)
    model = small_llama(hidden=16, vocab=len(tokenizer.get_vocab()), layers=1)
    options = Options(plan="off", context=False)
    worker = Worker(model, tokenizer, options=options, context_length=1 << 20)
    worker.start()
    try:
        with start_server(Service(worker, tokenizer, parse_flags(), "demo", None)) as running:
            yield running
    finally:
        worker.close(0.0)


class Task:
    """A broken program, and a model that mends it with an agent's tools.

    Attributes:
        home, work: an empty home, and the folder of the program.
        requests: all requests so far.
    """

    def __init__(self, server: Running, folder: Path):
        self._server = server
        self.home = folder / "home"
        self.work = folder / "work"
        self.home.mkdir()
        self.work.mkdir()
        self.file = self.work / "add.py"
        self.file.write_text(BROKEN + PRINT)
        self.requests = []

    def run(
        self,
        command: Sequence[str | Path],
        calls: Sequence[tuple[str, dict[str, Any]]],
        **variables: str,
    ) -> str:
        """Runs an agent for one turn and returns its output.

        Each call waits for the previous results; the answer comes last.
        """
        worker = self._server.service.worker
        tokenizer = self._server.service.tokenizer
        submit = worker.submit
        final = ANSWERS[self.prompt.count(ANSWERS[0])]

        def answer(prompt, **asked):
            done = str(tokenizer.decode(prompt)).count("<tool>")
            text = f"I have seen {done} results.</think>"
            for name, arguments in calls[done : done + 1]:
                called = json.dumps({"name": name, "arguments": arguments})
                text += f"<tool_call>{called}</tool_call>"
            if done >= len(calls):
                text += final
            tokens = [*tokenizer.encode(text, add_special_tokens=False), tokenizer.eos_token_id]
            script = partial(Script, tokens, worker.vocab_size)
            self.requests.append(submit(prompt, **asked | {"grammar": script}))
            return self.requests[-1]

        environment = {
            "PATH": os.environ["PATH"],
            "HOME": str(self.home),
            "LANG": "C.UTF-8",
            **variables,
        }
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(worker, "submit", answer)
            done = subprocess.run(
                command,
                cwd=self.work,
                env=environment,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=300,
            )
        assert done.returncode == 0 and final in done.stdout, done.stdout + done.stderr
        assert self.file.read_text() == RIGHT + PRINT
        return done.stdout + done.stderr

    @property
    def prompt(self) -> str:
        """Text of the last request's prompt; empty before the first."""
        if not self.requests:
            return ""
        return str(self._server.service.tokenizer.decode(self.requests[-1].prompt))

    def check_cached(self, n_first: int):
        """Asserts that what a request has read was in the cache for the next one, and for the
        second turn also what was written; prints the shares.

        Args:
            n_first: how many requests the first turn had.
        """
        for at, request in enumerate(self.requests):
            turn = 1 + (at >= n_first)
            share = request.cached_tokens / len(request.prompt)
            print(f"turn {turn}: {share:.1%} of {len(request.prompt)} tokens were cached")
        for before, request in pairwise(self.requests):
            assert request.cached_tokens >= len(before.prompt)
        last = self.requests[n_first - 1]
        assert self.requests[n_first].cached_tokens >= last.length - MAX_LOST


@pytest.fixture
def task(server, tmp_path) -> Task:
    return Task(server, tmp_path)


def test_claude_code_edits_and_runs_a_file(server, packages, task):
    (binary,) = packages.glob("@anthropic-ai/claude-code-*/claude")
    run = f"{sys.executable} add.py"
    file = str(task.file)
    settings = shlex.split(read_settings("claude_code.sh", server))
    variables = dict(each.split("=", 1) for each in settings if "=" in each)
    flags = ["--permission-mode", "acceptEdits", "--allowedTools", f"Bash({run})"]
    calls = [
        ("ToolSearch", {"query": "select:WebFetch", "max_results": 1}),
        ("Read", {"file_path": file}),
        ("Edit", {"file_path": file, "old_string": "a - b", "new_string": "a + b"}),
        ("Bash", {"command": run, "description": "Run it"}),
    ]
    printed = task.run([binary, "-p", "Fix add.py", *flags], calls, **variables)
    assert "<tool>5" in task.prompt, "it has read the program's output"
    assert '<tool><tools>\n{"type": "function", "function": {"name": "WebFetch"' in task.prompt
    assert "context window" not in printed, "it knows how long the context is"

    n_first = len(task.requests)
    task.run([binary, "-p", "--continue", "What is left?", *flags], calls, **variables)
    task.check_cached(n_first)


def test_codex_edits_and_runs_a_file(server, packages, task):
    folder = task.home / ".codex"
    folder.mkdir()
    settings = read_settings("codex.toml", server).replace("# model_catalog", "model_catalog")
    (folder / "config.toml").write_text(settings)
    (folder / "models.json").write_text(read_settings("codex_models.json", server))
    codex = [packages / ".bin" / "codex", "exec"]
    flags = ["--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox"]
    commands = ["cat add.py", "sed -i 's/a - b/a + b/' add.py", f"{sys.executable} add.py"]
    calls = [("exec_command", {"cmd": command}) for command in commands]
    printed = task.run([*codex, *flags, "Fix add.py"], calls)
    assert "Output:\n5" in task.prompt, "it has read the program's output"
    assert "Model metadata" not in printed
    assert "You are a coding agent." in task.prompt

    n_first = len(task.requests)
    task.run([*codex, "resume", "--last", *flags, "What is left?"], calls)
    task.check_cached(n_first)
