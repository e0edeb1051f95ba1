"""Selecting models and prompts with flags."""

import mlx.nn as nn
import pytest

from benchmarks import run
from benchmarks.models import count_bytes_read, load_prompts, open_workload
from helpers.bench_records import parse_flags
from helpers.small import small_llama
from mlx_redrafter import load_demo
from mlx_redrafter.drafters.checkpoint import count_bytes


@pytest.fixture(scope="module")
def tokenizer():
    return load_demo()[1]


def test_prompts_are_found_by_name_and_category(tokenizer):
    everything = load_prompts(["all"], tokenizer)
    assert len({each.category for each in everything}) == 7
    assert len({tuple(each.ids) for each in everything}) == 16
    name = everything[0].name
    assert [each.name for each in load_prompts([name], tokenizer)] == [name]
    code = [each.name for each in everything if each.category == "code"]
    again = load_prompts(["code", code[0]], tokenizer)
    assert [each.name for each in again] == code, "no duplicates"
    own = load_prompts(["demo"], tokenizer)
    assert {each.category for each in own} == {"demo-edits", "demo-code"}
    assert own[0].name == "demo-edits/01"
    assert own[0].eos_token_ids == {tokenizer.eos_token_id}
    assert len(own) > 16


def test_user_prompts_are_named_after_their_file(tmp_path, tokenizer):
    (tmp_path / "mine.txt").write_text("one\n\ntwo\n")
    found = load_prompts([str(tmp_path / "mine.txt")], tokenizer)
    assert [each.name for each in found] == ["mine.txt:1", "mine.txt:2"]
    assert {each.category for each in found} == {"own"}
    assert [tokenizer.decode(each.ids) for each in found] == ["one", "two"]


def test_quick_takes_a_prompt_of_each_category():
    found = open_workload(parse_flags(run, "--quick"))
    assert len(found.prompts) == len({each.category for each in found.prompts}) == 7
    assert found.draft_model_name == "demo"
    assert found.describe()["model_gb"] == count_bytes(found.model) / 1e9


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("bits", [None, 4])
def test_embeddings_are_read_only_as_heads(tied, bits):
    model = small_llama(hidden=64, vocab=96, tie_word_embeddings=tied)
    if bits:
        nn.quantize(model, 32, bits)
    embedding = 96 * 64 * 4 if bits is None else 96 * (64 * bits // 8 + 2 * 4 * 64 // 32)
    assert count_bytes_read(model) == count_bytes(model) - (0 if tied else embedding)
