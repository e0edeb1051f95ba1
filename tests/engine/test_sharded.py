"""A model whose layers are shared by two processes decodes what one process decodes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).parent.parent


def test_two_ranks_decode_what_one_decodes() -> None:
    launch = Path(sys.executable).with_name("mlx.launch")
    ranks = [str(launch), "-n", "2", "--backend", "ring", "--python", sys.executable, str(TESTS / "ranks.py")]
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(TESTS.parent), str(TESTS)])}
    done = subprocess.run(ranks, env=env, capture_output=True, text=True, timeout=300, check=False)
    lines = [line.partition("RANK ")[2] for line in done.stdout.splitlines() if "RANK " in line]
    decoded = sorted(map(json.loads, lines), key=lambda each: each["rank"])
    assert [(each["rank"], each["size"]) for each in decoded] == [(0, 2), (1, 2)], done.stdout + done.stderr
    for each in decoded:
        assert each["together"] == each["alone"] and each["accepted"] > 3
        assert each["demo sharded"] == each["demo"] and len(each["demo"]) == 12
    assert decoded[0]["unseeded"] == decoded[1]["unseeded"] != decoded[0]["together"]
