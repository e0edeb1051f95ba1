"""A command whose standard streams are closed says what it can, and ends without a traceback."""

from __future__ import annotations

import shlex
import subprocess
import sys

import pytest


@pytest.mark.parametrize("closed", [">&-", "<&- 2>&-"])
@pytest.mark.parametrize("command", ["chat", "generate", "stdio"])
def test_closed_streams_end_without_a_traceback(command: str, closed: str) -> None:
    more = " --prompt abc" if command == "generate" else ""
    ran = subprocess.run(
        f"{shlex.quote(sys.executable)} -m mlx_redrafter.{command} --plan off -m 3{more} {closed}",
        shell=True, input="abc\n" if command == "chat" else "", capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert ran.returncode == 0 and "Traceback" not in ran.stderr
    assert bool(ran.stdout) == (closed != ">&-")
