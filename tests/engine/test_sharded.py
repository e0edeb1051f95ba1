"""A model whose layers are shared by two processes says what one process says."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent


def test_two_ranks_take_the_same_decisions_and_say_what_one_says() -> None:
    launch = Path(sys.executable).with_name("mlx.launch")
    ranks = [str(launch), "-n", "2", "--backend", "ring", "--python", sys.executable, str(HERE / "ranks.py")]
    paths = os.pathsep.join([str(HERE.parent), str(HERE)])
    done = subprocess.run(
        ranks, env=os.environ | {"PYTHONPATH": paths}, capture_output=True, text=True, timeout=300, check=False
    )
    said = [json.loads(line.partition("RANK ")[2]) for line in done.stdout.splitlines() if "RANK " in line]
    assert sorted(each["rank"] for each in said) == [0, 1], done.stdout + done.stderr
    for each in said:
        assert each["size"] == 2 and each["together"] == each["alone"] and each["accepted"] > 3
        assert each["demo sharded"] == each["demo"] and len(each["demo"]) == 12
    assert said[0]["unseeded"] == said[1]["unseeded"] != said[0]["together"]
