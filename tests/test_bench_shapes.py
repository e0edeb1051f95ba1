"""Acceptance, ties and the parts of a round: rows, or one line that says why not."""

from __future__ import annotations

import json
from typing import Any

import mlx.core as mx
import pytest

from benchmarks import acceptance, round_time, shapes, ties
from benchmarks.acceptance import Ranked
from benchmarks.prompts import Prompt
from benchmarks.subject import Subject, open_subject
from mlx_redrafter.cli.generate import Difference
from mlx_redrafter.errors import RedrafterError
from mlx_redrafter.generate import PromptRuns, decode_prompts
from mlx_redrafter.options import Options
from tests.bench_records import MACHINE, flags
from tests.small import small_drafter, small_llama

PROMPTS = [[1, 2, 3], [4, 5]]


@pytest.fixture
def pair(monkeypatch: pytest.MonkeyPatch) -> Subject:
    """A small pair, in the place of what the commands would load."""
    prompts = [Prompt(f"code/{number}", "code", ids) for number, ids in enumerate(PROMPTS)]
    found = Subject("small", small_llama(layers=1), small_drafter(), "random", None, None, prompts)
    for module in (acceptance, ties, round_time):
        monkeypatch.setattr(module, "open_subject", lambda args: found)
    monkeypatch.setattr(shapes, "stamp", lambda: MACHINE)
    return found


def rows(capsys: pytest.CaptureFixture[str], module: Any, *words: str) -> list[dict[str, Any]]:
    assert module.run(flags(module, *words, "--json")) == 0
    return [json.loads(text) for text in capsys.readouterr().out.splitlines()]


def test_a_row_a_shape_with_the_flags_and_the_machine(pair: Subject, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--shapes", "1,2", "2,2,4", "--max-tokens", "6", "--seed", "3")
    found = rows(capsys, acceptance, *words)
    assert [(row["W"], row["K"], row["N"]) for row in found] == [(1, 2, 3), (2, 2, 4)]
    assert all(row["machine"] == MACHINE and row["settings"]["seed"] == 3 for row in found)
    assert all(1 <= row["tokens/round"] <= 3 for row in found)
    acceptance.run(flags(acceptance, *words))
    table = capsys.readouterr().out.splitlines()
    assert len(table) == 4 and "tokens/round" in table[0] and json.loads(table[-1]) == MACHINE


def test_another_ranking_keeps_the_text(pair: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    texts, samplers = [], []

    def kept(model: Any, drafter: Any, prompts: Any, options: Options) -> PromptRuns:
        runs = decode_prompts(model, drafter, prompts, options)
        texts.append(runs.texts)
        samplers.append(type(options.sampler))
        return runs

    monkeypatch.setattr(acceptance, "decode_prompts", kept)
    for more in ({}, {"without_noise": True}, {"count": 3}):
        options: dict[str, Any] = {"max_tokens": 12, "temp": 0.8, "seed": 1, **more}
        acceptance.measure(pair.model, small_drafter(), PROMPTS, (2, 2), **options)
    assert texts[0] == texts[1] == texts[2] and len(set(texts[0])) == 2
    assert samplers[0] is not Ranked and samplers[1:] == [Ranked, Ranked]


def test_texts_that_agree_have_no_ties(pair: Subject, capsys: pytest.CaptureFixture[str]) -> None:
    (row,) = rows(capsys, ties, "--shapes", "1,2", "--max-tokens", "6", "--kinds", "as it is")
    assert (row["weights"], row["shape"], row["texts"], row["tokens"]) == ("as it is", "1x2", 2, 12)
    assert (row["parted"], row["errors"], row["largest gap"]) == (0, 0, 0.0)


@pytest.mark.parametrize("kind", ["float32", "float16", "8 bits", "4 bits"])
def test_a_target_is_turned_into_what_the_row_names_and_a_quantized_one_only_left_alone(kind: str) -> None:
    model = small_llama(hidden=64, layers=1)
    ties.turned(model, kind)
    bits = [each.bits for _, each in model.named_modules() if hasattr(each, "bits")]
    assert set(bits) == ({int(kind[0])} if "bits" in kind else set())
    assert model.model.norm.weight.dtype == (mx.float32 if kind == "float32" else mx.float16)
    if bits:
        ties.turned(model, "as it is")
        with pytest.raises(RedrafterError, match=r"turned into float32, got quantized ones: give --kinds 'as it is'"):
            ties.turned(model, "float32")
        with pytest.raises(RedrafterError, match="turned into 8 bits, got quantized ones"):
            ties.turned(model, "8 bits")


def test_a_text_that_parts_without_a_tie_is_an_error(pair: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ties, "first_difference", lambda one, other: 2)
    found = Difference(2, 1.0, 0.001, rounding=False)
    monkeypatch.setattr(ties, "judge_difference", lambda *args: found)
    row = ties.measure(pair.model, small_drafter(), PROMPTS, (1, 2), max_tokens=4, temp=0.0, seed=0)
    assert (row["parted"], row["errors"], row["largest gap"]) == (2, 2, 1.0)


@pytest.mark.parametrize("repeats", ["1", "5"])
def test_every_part_of_a_round_takes_its_time(repeats: str, pair: Subject, capsys: pytest.CaptureFixture[str]) -> None:
    (row,) = rows(capsys, round_time, "--shapes", "2,2", "--repeats", repeats)
    assert (row["W"], row["K"], row["N"]) == (2, 2, 5)
    assert all(row[f"{name} ms"] > 0 for name in ("plain", "verify", "draft", "round"))
    assert row["lower"] <= row["x sum"] <= row["upper"]


def test_a_synthetic_target_has_the_size_that_is_asked_for() -> None:
    found = round_time.synthetic(128, 2)
    assert len(found.model.layers) == 2 and "lm_head" not in found.model
    weight = found.model.model.embed_tokens.weight
    assert weight.shape == (round_time.VOCAB_SIZE, 128) and weight.dtype == mx.float32
    assert found.drafter.args.exit_dim == 32
    assert round_time.measure(found, (1, 2), repeats=4)["N"] == 3


@pytest.mark.parametrize("module", [acceptance, ties, round_time])
def test_shapes_need_a_drafter(module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    bare = Subject("small", small_llama(), None, None, None, None, [Prompt("code/one", "code", [1])])
    monkeypatch.setattr(module, "open_subject", lambda args: bare)
    with pytest.raises(RedrafterError, match="needs the --drafter that was trained for the model"):
        module.run(flags(module))


def test_the_demo_comes_with_its_own_prompts_and_no_draft_model() -> None:
    found = open_subject(flags(acceptance))
    assert found.draft_model is None and found.draft_model_name is None
    assert {prompt.category for prompt in found.prompts} == {"demo"}
