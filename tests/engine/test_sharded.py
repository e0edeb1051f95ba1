"""A model that several processes share decodes what one process decodes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from launch import TESTS, start_ranks, wait_for_ranks

from mlx_redrafter import ranks

MODELS = {f"{kind}, {how}" for kind in ("qwen2", "qwen3_moe", "qwen3_5") for how in ("tensor", "pipeline")}


LOSE_A_RANK = """
import os, sys
import mlx.core as mx
if sys.argv[1] == "metal":
    stream, gather = mx.new_thread_local_stream(mx.cpu), mx.distributed.all_gather
    mx.distributed.all_gather = lambda row: gather(row, stream=stream)
    mx.default_stream = lambda device: stream
from mlx_redrafter import ranks
assert ranks.gather(ranks.index()) == [0, 1]
if ranks.index() == 1:
    os._exit(3)
try:
    ranks.gather("x" * 100_000)
except RuntimeError as error:
    print(error)
"""


@pytest.mark.parametrize("messages", ["here", "metal"])
def test_a_lost_rank_is_an_error(messages: str) -> None:
    """On Metal messages run on the CPU's stream, the forward on the GPU's."""
    first, _ = wait_for_ranks(start_ranks(2, "-c", LOSE_A_RANK, messages))
    assert (first.status, first.out) == (0, "[ring] connection to a peer was lost\n"), first


@pytest.mark.parametrize("count", [2, 4])
def test_ranks_decode_what_one_process_decodes(count: int, tmp_path: Path) -> None:
    """Each rank compares what it reads with the others: one that decides otherwise raises."""
    ended = wait_for_ranks(start_ranks(count, str(TESTS / "ranks.py"), str(tmp_path), **{ranks.CHECK: "1"}))
    assert [each.status for each in ended] == [0] * count, ended
    decoded = [json.loads(each.out.partition("RANK ")[2]) for each in ended]
    assert [each.pop("rank") for each in decoded] == list(range(count))
    measured = [each.pop("measured", None) for each in decoded]
    files = ["acceptance", "costs"] if count == 2 else ["acceptance"]
    assert [each.pop("files") for each in decoded] == [files] + [[]] * (count - 1)
    assert decoded == [decoded[0]] * count
    assert decoded[0]["error"].startswith("the ranks decode different texts: rank 0 reads [")
    assert f"rank {count - 1} reads [" in decoded[0]["error"]
    assert set(decoded[0]["texts"]) == MODELS
    for found in decoded[0]["texts"].values():
        for each in found.values():
            assert each["together"] == each["alone"] and each["accepted"] > 0, decoded[0]
    assert sum(found["greedy"]["of the context"] for found in decoded[0]["texts"].values()) > 0
    if count == 2:
        assert measured[0] == measured[1] and measured[0]["texts"] == [measured[0]["alone"]] * 2
