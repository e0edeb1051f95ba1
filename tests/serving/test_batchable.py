"""Which models mlx-lm batches as it decodes them alone."""

from __future__ import annotations

import logging

import pytest
from families import make_family
from toys import make_model

from mlx_redrafter.options import Options
from mlx_redrafter.serving.batchable import PREFILL_ROWS, count_prefill_rows


@pytest.mark.parametrize("name", ["llama", "qwen3_next", "gemma3_text"])
def test_most_models_read_prompts_together(name: str) -> None:
    assert count_prefill_rows(make_family(name), Options()) == PREFILL_ROWS


@pytest.mark.parametrize("name", ["mamba", "rwkv7", "jamba"])
def test_states_that_see_padding_are_read_alone(name: str) -> None:
    assert count_prefill_rows(make_family(name), Options()) == 1


@pytest.mark.parametrize("name", ["gemma2", "internlm2", "minimax_m3_vl", "llama4"])
def test_what_a_batch_computes_wrong_takes_turns(name: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert count_prefill_rows(make_family(name), Options()) == 0
    assert name in caplog.text and "take turns" in caplog.text


def test_caches_that_batches_lack_take_turns() -> None:
    assert count_prefill_rows(make_model(), Options(kv_bits=8)) == 0
    assert count_prefill_rows(make_model("qwen2"), Options(max_kv_size=64)) == 0
