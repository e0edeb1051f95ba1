"""A model sharded over several processes decodes what one process decodes."""

import json
from itertools import product

import pytest

from helpers.launch import TESTS, start_ranks, wait_for_ranks
from mlx_redrafter.machine import ranks

OF_TWO = product(("qwen2", "qwen3_moe", "qwen3_5"), ("tensor", "pipeline"))
TEXTS = {2: set(map(", ".join, OF_TWO)), 4: {"qwen2, tensor", "qwen3_moe, pipeline"}}


@pytest.mark.parametrize(("count", "texts"), TEXTS.items(), ids=["2", "4"])
def test_ranks_decode_what_one_process_decodes(count, texts, tmp_path):
    """Each rank compares its reads with the others and raises if they differ."""
    command = (str(TESTS / "helpers" / "ranks.py"), str(tmp_path))
    started = start_ranks(count, *command, **{ranks.CHECK_VARIABLE: "1"})
    ended = wait_for_ranks(started)
    assert [each.status for each in ended] == [0] * count, ended
    decoded = [json.loads(each.out.partition("RANK ")[2]) for each in ended]
    assert [each.pop("rank") for each in decoded] == list(range(count))
    measured = [each.pop("measured", None) for each in decoded]
    written, *others = [each.pop("files") for each in decoded]
    assert written == (["costs"] if count == 2 else [])
    assert not any(others)
    assert decoded == [decoded[0]] * count
    assert decoded[0]["error"].startswith("the ranks decode different texts: rank 0 reads [")
    assert f"rank {count - 1} reads [" in decoded[0]["error"]
    assert set(decoded[0]["texts"]) == texts
    for found in decoded[0]["texts"].values():
        for each in found.values():
            assert each["together"] == each["alone"] and each["accepted"] > 0, decoded[0]
    assert sum(found["greedy"]["of the context"] for found in decoded[0]["texts"].values()) > 0
    if count == 2:
        assert measured[0] == measured[1]
        assert measured[0]["texts"] == [measured[0]["alone"]] * 2
