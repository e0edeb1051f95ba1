"""Where a run's texts come from, and that none is made twice."""

from collections.abc import Sequence

import numpy as np
import pytest
from mlx_lm.tokenizer_utils import TokenizerWrapper

from helpers.jsonl import write_jsonl
from helpers.small import add_chat_template, make_byte_tokenizer, small_llama
from mlx_redrafter.errors import RedrafterError
from mlx_redrafter.training import example_makers, prompts
from mlx_redrafter.training.data import GIVEN, Example
from mlx_redrafter.training.example_makers import FREE, MAX_EXAMPLES, ExampleMaker, choose_maker
from mlx_redrafter.training.prompts import PROMPT_KINDS, PromptWriter
from mlx_redrafter.training.settings import TrainingArgs


@pytest.fixture(scope="module")
def model():
    """Bytes; the lower ones, of which texts of the tests consist, are likelier."""
    return small_llama(vocab=257, layers=1)


@pytest.fixture
def tokenizer():
    return TokenizerWrapper(make_byte_tokenizer())


def make(maker: ExampleMaker, model, count: int) -> list[Example]:
    """The examples that a maker makes until there are `count`."""
    found = []
    for example in maker.make(model, lambda tokens: len(found) >= count, count):
        found.append(example)
    return found


def settings(**changes) -> TrainingArgs:
    return TrainingArgs(**{"max_tokens": 8, "draft_depth": 3, "temp": 1.0} | changes)


def list_texts(examples: Sequence[Example]) -> set[str]:
    """Examples as values that can be compared."""
    return {str(example.tokens) for example in examples}


def list_prompts(examples: Sequence[Example]) -> set[str]:
    return {str(example.tokens[: example.offset]) for example in examples}


def test_given_texts_are_read_in_any_order(model, tokenizer, tmp_path, monkeypatch):
    texts = [{"text": f"text number {n}: " + "x" * n} for n in range(90)]
    write_jsonl(tmp_path / "train.jsonl", texts[:80])
    write_jsonl(tmp_path / "valid.jsonl", texts[80:])
    args = settings(data=str(tmp_path), max_seq_length=40)
    maker = choose_maker(args, tokenizer, [])
    assert maker.describe() == "the model reads 90 texts"
    assert maker.count == 90
    assert 20 < maker.length <= 41

    examples = make(maker, model, 1000)
    assert maker.has_held_out
    assert sum(example.is_held_out for example in examples) == 10
    assert max(len(example.tokens) for example in examples) == 41
    for example in examples:
        assert example.states is not None
        assert len(example.states) == len(example.tokens) - 1
    lengths = [len(example.tokens) for example in examples if not example.is_held_out]
    assert sorted(lengths) != lengths, "not in the order of the file"

    again = choose_maker(args, tokenizer, examples[:30])
    assert again.count == 60
    assert not list_texts(examples[:30]) & list_texts(again.unread)
    deeper = choose_maker(settings(data=str(tmp_path), draft_depth=20), tokenizer, [])
    assert deeper.count < 90, "some are too short"
    monkeypatch.setattr(example_makers, "MAX_HELD_OUT", 3)
    assert choose_maker(args, tokenizer, []).count == 83, "a validation takes time"
    (tmp_path / "valid.jsonl").unlink()
    assert not choose_maker(args, tokenizer, []).has_held_out


def test_given_prompts_come_first_and_once(model, tokenizer, tmp_path):
    """Then the target goes on by itself."""
    given = ["one", "two", "one", "three", "x" * 60]
    path = write_jsonl(tmp_path / "prompts.jsonl", ({"prompt": text} for text in given))
    args = settings(prompts=path, max_seq_length=40)
    maker = choose_maker(args, tokenizer, [])
    assert sorted(tokenizer.decode(prompt) for prompt in maker.prompts) == ["one", "three", "two"]
    own_words = "writes free text, as it has no chat template"
    assert maker.describe() == f"the model answers 3 prompts, then {own_words}"

    examples = make(maker, model, 9)
    own = [example for example in examples if example.kind == GIVEN]
    assert len(own) <= 3 < len(examples)
    assert {example.kind for example in examples} == {GIVEN, FREE}
    assert all(0 < len(example.tokens) - example.offset <= 8 for example in own)
    left = choose_maker(args, tokenizer, own)
    assert not {str(np.array(prompt)) for prompt in left.prompts} & list_prompts(own)
    assert maker.count == MAX_EXAMPLES
    assert maker.length > 8


def test_without_a_template_texts_are_free(model, tokenizer):
    examples = make(choose_maker(settings(), tokenizer, []), model, 5)
    assert len(examples) >= 5
    assert {(example.kind, example.offset) for example in examples} == {(FREE, 0)}
    first = {int(example.tokens[0]) for example in examples}
    assert first == {tokenizer.eos_token_id}, "there is no beginning-of-text token"
    assert len(list_texts(examples)) == len(examples)
    tokenizer._eos_token_ids = set()
    with pytest.raises(RedrafterError, match="neither a chat template nor a first token"):
        make(choose_maker(settings(), tokenizer, []), model, 1)


@pytest.mark.parametrize("is_masked", [False, True])
def test_the_target_writes_its_own_prompts(is_masked, model, demo, monkeypatch):
    """Other ones after those that are known, and no more than are wanted at a time."""
    begun = []
    begin = PromptWriter.begin

    def watch(writer, kind):
        begun.append(kind)
        return begin(writer, kind)

    monkeypatch.setattr(PromptWriter, "begin", watch)
    monkeypatch.setattr(prompts, "is_good", lambda text: True)  # a random target writes noise
    chatty = add_chat_template(demo[1].__class__(make_byte_tokenizer()))
    for kind in PROMPT_KINDS.values():
        monkeypatch.setitem(kind, "most", 6)
        monkeypatch.setitem(kind, "least", 1)
    args = settings(mask_prompt=is_masked, max_tokens=6)
    maker = choose_maker(args, chatty, [])
    assert maker.describe() == "the model answers its own prompts"
    examples = make(maker, model, 6)
    assert len(begun) % 7 == 0
    assert len(begun) % example_makers.MAX_WRITTEN
    assert len(examples) >= 6
    assert {example.kind for example in examples} <= set(PROMPT_KINDS)
    for example in examples:
        said = chatty.decode(example.tokens[: example.offset].tolist())
        assert said.startswith("<user>")
        assert said.endswith("\n<assistant>")
        assert (
            example.states is not None and bool(example.states["probs"][2].any()) is not is_masked
        )
    more = make(choose_maker(args, chatty, examples), model, 6)
    assert not list_prompts(examples) & list_prompts(more)
    assert np.isfinite(examples[0].states["hidden"]).all()
