"""A command whose standard streams are closed says what it can, and ends without a traceback."""

from __future__ import annotations

import shlex
import subprocess
import sys

import pytest


@pytest.mark.parametrize("closed", [">&-", "<&- 2>&-"])
@pytest.mark.parametrize("door", ["chat", "generate", "stdio"])
def test_streams_that_the_parent_has_closed_end_nothing_in_a_traceback(door: str, closed: str) -> None:
    more = " --prompt abc" if door == "generate" else ""
    ran = subprocess.run(
        f"{shlex.quote(sys.executable)} -m mlx_redrafter.{door} --plan off -m 3{more} {closed}",
        shell=True, input="abc\n" if door == "chat" else "", capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert ran.returncode == 0 and "Traceback" not in ran.stderr
    wrote = closed != ">&-"
    assert bool(ran.stdout) == wrote
