"""Several prompts in one call: each text as alone, mlx-lm's response, and errors."""

from __future__ import annotations

import inspect
import re
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.generate import batch_generate as mlx_lm_batch_generate
from mlx_lm.models.cache import make_prompt_cache

from helpers.families import make_family
from helpers.grids import pairs
from helpers.refusals import refusal
from helpers.small import small_drafter
from helpers.toys import Broken, assert_same_cache, make_model, make_prompt, make_tokenizer
from mlx_redrafter import batch_generate, generate
from mlx_redrafter.decoding.generation import Generation

VOCAB = 8  # few, so that the text repeats itself
PROMPTS = [make_prompt(length, vocab=VOCAB) for length in (10, 200, 31, 10, 4)]
COUNTS = [40, 9, 1, 2, 33]
DRAFTS = {
    "nothing": {"plan": "off"},
    "auto": {},
    "context": {"plan": (1, 3), "context": True},
    "both": {"plan": (2, 3), "drafter": small_drafter(hidden=64, vocab=VOCAB), "context": True},
}
CHOICES = {
    "greedy": {},
    "sampled": {"temp": 0.8, "top_p": 0.9, "seed": 3, "stop": ["abc", "cc"]},
    "penalty": {"logits_processors": [lambda history, logits: logits - (history[-1] % 2)]},
    "ring": {"max_kv_size": 16},
}
pytestmark = [
    pytest.mark.filterwarnings("ignore:the drafter has guessed no token right"),
    pytest.mark.filterwarnings("ignore:max_kv_size, which mlx-lm ignores"),
]


def run(prompts: Any = PROMPTS, *, end: Any = (), **options: Any) -> Any:
    tokenizer = make_tokenizer(end, vocab=VOCAB)
    return batch_generate(make_model(vocab=VOCAB), tokenizer, prompts, **options)


@pytest.mark.parametrize(("drafts", "choice", "size"), pairs(DRAFTS, CHOICES, (2, 8)))
def test_each_text_is_that_of_generate(drafts: str, choice: str, size: int) -> None:
    options = DRAFTS[drafts] | CHOICES[choice]
    paths = []
    found = run(
        max_tokens=COUNTS,
        completion_batch_size=size,
        on_round=lambda tree, path, tokens: paths.append(path),
        **options,
    )
    model = make_model(vocab=VOCAB)
    tokenizer = make_tokenizer(vocab=VOCAB)
    for text, prompt, count in zip(found.texts, PROMPTS, COUNTS, strict=True):
        assert text == generate(model, tokenizer, prompt, max_tokens=count, **options)
    if drafts in ("context", "both"):
        assert max(map(len, paths)) > 2, "drafts were accepted"
    assert (found.caches, found.token_ids, found.logprobs) == (None, None, None)


RETURNED = {"return_token_ids": True, "return_logprobs": True, "return_prompt_caches": True}


@pytest.mark.parametrize("drafts", ["nothing", "both"])
def test_the_response_is_mlx_lms(drafts: str) -> None:
    found = run(max_tokens=30, end=[5], **RETURNED, **DRAFTS[drafts])
    args = (make_model(vocab=VOCAB), make_tokenizer([5], vocab=VOCAB), PROMPTS)
    theirs = mlx_lm_batch_generate(*args, max_tokens=30, **RETURNED)
    assert (found.texts, found.token_ids) == (theirs.texts, theirs.token_ids)
    lengths = {len(each) for each in found.token_ids}
    assert min(lengths) < 30 == max(lengths), "some texts end with the end token"
    for mine, their in zip(found.logprobs, theirs.logprobs, strict=True):
        assert mine == pytest.approx(their, abs=1e-3)
    for mine, their in zip(found.caches, theirs.caches, strict=True):
        assert_same_cache(mine, their, tolerance=1e-3)

    stats = found.stats
    assert stats.prompt_tokens == sum(map(len, PROMPTS))
    assert stats.generation_tokens == theirs.stats.generation_tokens
    # A round of all texts is one step.
    if drafts == "nothing":
        assert stats.generation_steps == theirs.stats.generation_steps
    else:
        assert stats.generation_steps < theirs.stats.generation_steps
    assert stats.wall_time > stats.prompt_time > 0 < stats.generation_tps


@pytest.mark.parametrize("drafts", ["nothing", "both"])
def test_returned_caches_continue_their_texts(drafts: str) -> None:
    first = run(max_tokens=12, **RETURNED, **DRAFTS[drafts])
    new = [[1], [2, 3], [4], [5, 6, 7], [0]]
    read = [tokens[0] + tokens[1] for tokens in zip(PROMPTS, first.token_ids, strict=True)]
    whole = [before + more for before, more in zip(read, new, strict=True)]
    before = [[layer.offset for layer in cache] for cache in first.caches]
    for _ in range(2):  # the caches are not changed
        again = run(new, prompt_caches=first.caches, max_tokens=12, **DRAFTS[drafts])
        assert again.texts == run(whole, max_tokens=12).texts
    assert before == [[layer.offset for layer in cache] for cache in first.caches]
    mixed = [first.caches[0], None]
    assert run(new[:2], prompt_caches=mixed, max_tokens=5).texts == [
        run(whole[:1], max_tokens=5).texts[0],
        run(new[1:2], max_tokens=5).texts[0],
    ]


@pytest.mark.parametrize("family", ["deepseek_v3", "phi3small"])
def test_texts_that_cannot_share_a_forward_are_decoded_in_turn(
    family: str, capsys: pytest.CaptureFixture[str]
) -> None:
    model = make_family(family)
    tokenizer = make_tokenizer(vocab=64)
    options = {"max_tokens": 8, "temp": 0.8, "seed": 2}
    found = batch_generate(model, tokenizer, PROMPTS[:3], verbose=True, **options)
    assert found.texts == [generate(model, tokenizer, each, **options) for each in PROMPTS[:3]]
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("[batch_generate] One text after another: ")
    assert lines[2].startswith(f"[batch_generate] Generation: {3 * 8} tokens, ")


def test_equal_prompts_differ_without_a_seed() -> None:
    prompts = [PROMPTS[0]] * 4
    assert len(set(run(prompts, temp=1.0).texts)) == 4
    assert len(set(run(prompts, temp=1.0, seed=1).texts)) == 1


@pytest.fixture
def closed(monkeypatch: pytest.MonkeyPatch) -> set[Generation]:
    """The closed texts."""
    found = set[Generation]()
    close = Generation.close
    monkeypatch.setattr(Generation, "close", lambda self: (found.add(self), close(self)))
    return found


@pytest.mark.parametrize("drafts", ["nothing", "both"])
@pytest.mark.parametrize("length", [200, 203])
def test_an_error_of_one_text_ends_all(drafts: str, length: int, closed: set[Generation]) -> None:
    """In the prompt's last token, or later."""

    def fail(history: mx.array, logits: mx.array) -> mx.array:
        if history.size == length:
            raise Broken(f"at {length} tokens")
        return logits

    options = {"max_tokens": 12, "return_prompt_caches": True, **DRAFTS[drafts]}
    with pytest.raises(Broken, match=f"^at {length} tokens$"):
        run(logits_processors=[fail], completion_batch_size=3, **options)
    assert len(closed) == 3
    assert run(**options).texts == run(max_tokens=12, plan="off").texts


def test_after_an_error_of_the_model_nothing_is_computed(
    closed: set[Generation], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error would otherwise be hidden by those of other texts, whose caches it has damaged."""
    n_failed = 0
    model = type(make_model(vocab=VOCAB))
    call = model.__call__

    def fail(self: Any, tokens: mx.array, **more: Any) -> mx.array:
        nonlocal n_failed
        if 2 < tokens.shape[1] < 9 or n_failed:  # a round of all texts
            n_failed += 1
            raise Broken(f"failure {n_failed}")
        return call(self, tokens, **more)

    prompts = PROMPTS[:3]
    run(prompts, max_tokens=2)  # the model is checked
    monkeypatch.setattr(model, "__call__", fail)
    with pytest.raises(Broken, match=r"^failure 1$"):
        run(prompts, max_tokens=12, return_prompt_caches=True, **DRAFTS["context"])
    assert len(closed) == 6


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prompts": "abc"}, "prompts must be a list of prompts, got 'abc'"),
        ({"prompts": 5}, "prompts must be a list of prompts, got 5"),
        ({"prompts": [1, 2]}, "the prompt must be one sequence of token ids, got int 1"),
        ({"prompts": [[1], []]}, "the prompt is empty"),
        ({"prompts": [[1], [VOCAB]]}, "token ids must be from 0 to 7, got 8"),
        ({"prompt_caches": [None]}, "prompt_caches must be one for each of 5 prompts, got 1"),
        ({"prompt_caches": [[]] * 5}, "the prompt cache must have 2 layers"),
        ({"max_tokens": [3] * 6}, "max_tokens must be one for each of 5 prompts, got 6"),
        ({"max_tokens": [3, 3, 3, 3, 0]}, "max_tokens must be -1 "),
        ({"max_tokens": "5"}, "max_tokens must be an integer, got '5'"),
        ({"completion_batch_size": 0}, "completion_batch_size must be at least 1, got 0"),
        ({"completion_batch_size": 2.5}, "completion_batch_size must be an integer, got 2.5"),
        ({"stop": ""}, "stop must be non-empty strings"),
        ({"temp": -1}, "temp must be at least 0, got -1"),
        ({"drafter": 5}, "drafter must be what load_drafter returns, got int"),
    ],
)
def test_wrong_arguments_are_refused(options: dict[str, Any], message: str) -> None:
    with refusal(f"^{re.escape(message)}"):
        run(**options)


def test_calls_of_mlx_lm_work() -> None:
    """By position; also those with the keywords of its `BatchGenerator`, and without prompts."""
    args = (make_model(vocab=VOCAB), make_tokenizer(vocab=VOCAB), PROMPTS)
    theirs = inspect.signature(mlx_lm_batch_generate).parameters.values()
    placed = [each for each in theirs if each.kind == each.POSITIONAL_OR_KEYWORD]
    ours = list(inspect.signature(batch_generate).parameters.values())[: len(placed)]
    assert [(each.name, each.default) for each in ours] == [
        (each.name, each.default) for each in placed
    ]
    keywords = {"prefill_batch_size": 2, "prefill_step_size": 16, "max_kv_size": 512}
    keywords |= {"stream": None, "sampler": lambda logprobs: mx.argmax(logprobs, axis=-1)}
    assert batch_generate(*args, None, 9, **keywords).texts == run(max_tokens=9).texts
    assert run([]).texts == []
    with pytest.raises(
        TypeError, match=r"^batch_generate\(\) got an unexpected keyword .*prompt_c"
    ):
        run(prompt_cache=make_prompt_cache(args[0]))
