"""Where a run's texts come from, and that none is made twice."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from helpers.small import add_chat_template, make_byte_tokenizer, small_llama
from mlx_redrafter.errors import RedrafterError
from mlx_redrafter.training import prompts, sources
from mlx_redrafter.training.data import GIVEN, Text
from mlx_redrafter.training.prompts import KINDS, PromptWriter
from mlx_redrafter.training.settings import TrainingArgs
from mlx_redrafter.training.sources import FREE, MAX_TEXTS, TextSource


@pytest.fixture(scope="module")
def model() -> Any:
    """Bytes; the lower ones, of which texts of the tests consist, are likelier."""
    model = small_llama(vocab=257, layers=1)
    mx.random.seed(0)
    return model


@pytest.fixture
def tokenizer() -> Any:
    from mlx_lm.tokenizer_utils import TokenizerWrapper

    return TokenizerWrapper(make_byte_tokenizer())


def make(source: TextSource, model: Any, count: int) -> list[Text]:
    """The texts that a source makes until there are `count`."""
    found: list[Text] = []
    for text in source.make(model, lambda tokens: len(found) >= count, count):
        found.append(text)
    return found


def settings(**changes: Any) -> TrainingArgs:
    return TrainingArgs(**{"max_tokens": 8, "draft_depth": 3, "temp": 1.0} | changes)


def write_prompts(path: Path, texts: Sequence[str]) -> str:
    path.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))
    return str(path)


def test_given_texts_are_read_in_any_order(
    model: Any, tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [f"text number {n}: " + "x" * n for n in range(90)]
    for name, part in (("train", rows[:80]), ("valid", rows[80:])):
        (tmp_path / f"{name}.jsonl").write_text(
            "".join(json.dumps({"text": row}) + "\n" for row in part)
        )
    args = settings(data=str(tmp_path), max_seq_length=40)
    source = TextSource(args, tokenizer, [])
    assert (
        source.describe() == "the model reads 90 texts"
        and source.count == 90
        and 20 < source.length <= 41
    )
    texts = make(source, model, 1000)
    assert (
        source.has_held_out
        and sum(text.is_held_out for text in texts) == 10
        and max(len(text.ids) for text in texts) == 41
    )
    assert all(text.states is not None and len(text.states) == len(text.ids) - 1 for text in texts)
    lengths = [len(text.ids) for text in texts if not text.is_held_out]
    assert sorted(lengths) != lengths, "not in the order of the file"
    again = TextSource(args, tokenizer, texts[:30])
    assert again.count == 60 and not {str(text.ids) for text in texts[:30]} & {
        str(text.ids) for text in again.texts
    }
    assert TextSource(settings(data=str(tmp_path), draft_depth=20), tokenizer, []).count < 90, (
        "some are too short"
    )
    monkeypatch.setattr(sources, "MAX_HELD_OUT", 3)
    assert TextSource(args, tokenizer, []).count == 83, "a validation takes time"
    (tmp_path / "valid.jsonl").unlink()
    assert not TextSource(args, tokenizer, []).has_held_out


def test_given_prompts_come_first_and_once(model: Any, tokenizer: Any, tmp_path: Path) -> None:
    """Then the target goes on by itself."""
    given = ["one", "two", "one", "three", "x" * 60]
    args = settings(prompts=write_prompts(tmp_path / "prompts.jsonl", given), max_seq_length=40)
    source = TextSource(args, tokenizer, [])
    assert sorted(tokenizer.decode(prompt) for prompt in source.prompts) == ["one", "three", "two"]
    assert (
        source.describe()
        == "the model answers 3 prompts, then writes free text, as it has no chat template"
    )
    texts = make(source, model, 9)
    own = [text for text in texts if text.kind == GIVEN]
    assert len(own) <= 3 < len(texts) and {text.kind for text in texts} == {GIVEN, FREE}
    assert all(0 < len(text.ids) - text.offset <= 8 for text in own)
    left = TextSource(args, tokenizer, own).prompts
    assert not {tuple(prompt) for prompt in left} & {
        tuple(text.ids[: text.offset].tolist()) for text in own
    }
    assert source.count == MAX_TEXTS and source.length > 8


def test_without_a_template_texts_are_free(model: Any, tokenizer: Any) -> None:
    texts = make(TextSource(settings(), tokenizer, []), model, 5)
    assert (
        len(texts) >= 5
        and {text.kind for text in texts} == {FREE}
        and {text.offset for text in texts} == {0}
    )
    assert {int(text.ids[0]) for text in texts} == {tokenizer.eos_token_id}, (
        "there is no beginning-of-text token"
    )
    assert len({str(text.ids) for text in texts}) == len(texts)
    tokenizer._eos_token_ids = set()
    with pytest.raises(RedrafterError, match="neither a chat template nor a first token"):
        make(TextSource(settings(), tokenizer, []), model, 1)


@pytest.mark.parametrize("is_masked", [False, True])
def test_the_target_writes_its_own_prompts(
    is_masked: bool, model: Any, demo: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other ones after those that are known, and no more than are wanted at a time."""
    begun = list[str]()
    begin = PromptWriter.begin

    def watch(writer: PromptWriter, kind: str) -> Any:
        begun.append(kind)
        return begin(writer, kind)

    monkeypatch.setattr(PromptWriter, "begin", watch)
    monkeypatch.setattr(prompts, "is_good", lambda text: True)  # a random target writes noise
    chatty = add_chat_template(demo[1].__class__(make_byte_tokenizer()))
    for kind in KINDS.values():
        monkeypatch.setitem(kind, "most", 6)
        monkeypatch.setitem(kind, "least", 1)
    args = settings(mask_prompt=is_masked, max_tokens=6)
    source = TextSource(args, chatty, [])
    assert source.describe() == "the model answers its own prompts"
    texts = make(source, model, 6)
    assert len(begun) % 7 == 0 and len(begun) % sources.MAX_DRAFTS
    assert len(texts) >= 6 and {text.kind for text in texts} <= set(KINDS)
    for text in texts:
        said = chatty.decode(text.ids[: text.offset].tolist())
        assert said.startswith("<user>") and said.endswith("\n<assistant>")
        assert text.states is not None and bool(text.states["probs"][2].any()) is not is_masked
    more = make(TextSource(args, chatty, texts), model, 6)
    assert not {str(text.ids[: text.offset]) for text in texts} & {
        str(text.ids[: text.offset]) for text in more
    }
    assert np.isfinite(texts[0].states["hidden"]).all()  # type: ignore[index]
