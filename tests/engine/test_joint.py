"""Texts that share their forwards: each is as if it were decoded alone, errors included."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import count, cycle
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.sample_utils import make_logits_processors

from helpers.families import make_family
from helpers.grammars import Stuck, ToyGrammar, decode_plainly
from helpers.threads import workers
from helpers.toys import (
    VOCAB,
    Broken,
    CachingDrafter,
    ScriptedContext,
    assert_same_cache,
    fail_at,
    ids,
    make_model,
    make_prompt,
    run,
    with_plain,
)
from mlx_redrafter.decoding import recipe
from mlx_redrafter.decoding.generation import Generation, next_rounds, open_generation
from mlx_redrafter.decoding.options import Options
from mlx_redrafter.errors import RedrafterError
from mlx_redrafter.measuring.pair import Pair
from mlx_redrafter.target import target as target_module
from mlx_redrafter.target.model_checks import make_cache

MORE = 7
"""Tokens of a second turn."""

SAMPLED = {"temp": 0.9, "top_p": 0.9, "seed": 4}
PENALTY = {"logits_processors": make_logits_processors(repetition_penalty=1.3)}
MODELS: dict[str, tuple[Callable[[], nn.Module], dict[str, Any]]] = {
    "dense": (make_model, {}),
    "rings that keep their first rows": (partial(make_model, "qwen3"), {"max_kv_size": 12}),
    "quantized": (make_model, {"kv_bits": 8, "kv_group_size": 32, "quantized_kv_start": 15}),
    "windows": (partial(make_family, "gemma3_text"), {}),
    "experts": (partial(make_family, "gpt_oss"), {}),
    "hybrid": (partial(make_family, "qwen3_next"), {}),
    "rings and a scan": (partial(make_family, "recurrent_gemma"), {}),
}


class Kind(NamedTuple):
    """A text.

    Attributes:
        length: of its prompt.
        drafts: "tree", "rows" (a drafter with a row per position), "fails", "context", "both",
            "grammar", or "nothing".
        size: how many tokens it gets.
        joins: in which round.
    """

    length: int
    drafts: str
    size: int = 16
    joins: int = 0
    options: dict[str, Any] = {}  # noqa: RUF012


KINDS = (
    Kind(3, "tree", 21),
    Kind(300, "rows", 18, 0, SAMPLED),
    Kind(9, "nothing", 14, 1, SAMPLED),
    Kind(12, "context", 17, 1, PENALTY),
    Kind(40, "both", 12, 3, PENALTY | {"temp": 0.8, "seed": 1}),
    Kind(7, "fails", 16, 2),
    Kind(1, "rows", 9, 5),
    Kind(5, "grammar", 15),
)


class Text:
    """A text and its plain decoding.

    Attributes:
        plain: its tokens, and those of a second turn.
        generation: decodes it.
        errors: of its drafter.
    """

    def __init__(self, model: nn.Module, kind: Kind, base: dict[str, Any] | None = None) -> None:
        options = kind.options | (base or {})
        self.kind = kind
        self.prompt = (3 * make_prompt(4 + kind.length // 3))[: kind.length]
        self._cache = make_cache(model, options.get("max_kv_size"))
        plainly = {"prompt_cache": self._cache} | options
        drafter: Any = None
        if kind.drafts == "grammar":
            plainly |= {"max_tokens": kind.size, "vocab": Pair(model).vocab_size}
            self.plain = decode_plainly(model, self.prompt, **plainly)
        else:
            run(model, self.prompt, max_tokens=kind.size, **plainly)
            total = kind.size + MORE
            steps, drafter = with_plain(model, self.prompt, total, "mixed", width=2, **options)
            self.plain = ids(steps)
            if kind.drafts == "fails":
                fail_at(drafter, 12)
            elif kind.drafts == "rows":
                drafter = CachingDrafter(model, self.prompt + self.plain, 2, share=1.0)
            elif kind.drafts not in ("tree", "both"):
                drafter = None
        self.errors: list[Exception] = []
        self._options = options | {
            "plan": (2, 3) if kind.drafts != "nothing" else "off",
            "context": True if kind.drafts in ("context", "both", "grammar") else None,
            "on_drafter_failure": self.errors.append,
        }
        self._pair = Pair(model, drafter)
        self._source = self._pair.open_source()

    def open(self, grammar: ToyGrammar | None = None, **more: Any) -> Generation:
        """Opens it; `more` are options."""
        options = Options(**{"max_tokens": self.kind.size} | self._options | more)
        if self.kind.drafts == "grammar":
            grammar = grammar or ToyGrammar(self._pair.vocab_size)
        self.generation = open_generation(
            self._pair, self.prompt, options, self._source, grammar=grammar, is_joint=True
        )
        return self.generation

    def check(self, tolerance: float) -> None:
        """Asserts plain decoding's tokens and cache, and then the tokens of a second turn alone."""
        size = self.kind.size
        output = self.generation.output
        assert output.tokens == self.plain[:size], self.kind
        assert 1 + output.stats.rounds + output.stats.accepted == size
        self.generation.finish(len(self.prompt) + size, output.tokens[-1])
        self.generation.close()
        cache = self.generation.cache
        assert_same_cache(cache, self._cache, tolerance=tolerance)
        if self.kind.drafts == "grammar":
            return
        options = self._options | {"prompt_cache": cache, "max_tokens": MORE - 1}
        history = self.prompt + output.tokens
        second = Options(**options, history=history)
        source = None if self.errors else self._source
        steps = list(open_generation(self._pair, self.plain[size : size + 1], second, source))
        assert ids(steps) == self.plain[size + 1 :]
        if self.kind.drafts == "rows":
            assert steps[-1].stats.accepted, "its rows are those of the text"


Decode = Callable[[Sequence[Generation]], list[Any]]


def decode_together(
    generations: Sequence[Generation], joins: Sequence[int], decode: Decode = next_rounds
) -> list[list[Any]]:
    """Decodes texts to their ends; returns the rounds of each, the last of which may be an error.

    Args:
        joins: the round in which each joins the others. Their order changes in each round.
    """
    rounds: list[list[Any]] = [[] for _ in generations]
    for turn in count():
        running = []
        for at, each in enumerate(generations):
            while not each.output.tokens and joins[at] <= turn:
                rounds[at].append(each.next_round())
            is_open = each.output.tokens and each.output.finish_reason is None
            if is_open and not isinstance(rounds[at][-1], Exception):
                running.append(at)
        if not running and turn >= max(joins):
            return rounds
        first = turn % max(1, len(running))
        running = running[first:] + running[:first]
        for at, each in zip(running, decode([generations[at] for at in running]), strict=True):
            rounds[at].append(each)
    raise AssertionError


@pytest.mark.parametrize("name", MODELS)
def test_each_text_is_that_of_the_text_alone(name: str) -> None:
    """Tokens, cache, the drafter's state, and statistics."""
    make, base = MODELS[name]
    model = make()
    texts = [Text(model, kind, base) for kind in KINDS]
    decode_together([text.open() for text in texts], [kind.joins for kind in KINDS])
    for text in texts:
        text.check(0.05 if name == "quantized" else 2e-3)
    accepted = [text.generation.output.stats.accepted for text in texts]
    assert min(accepted[0], accepted[1], accepted[4], accepted[6]) > 2
    assert [len(text.errors) for text in texts] == [0, 0, 0, 0, 0, 1, 0, 0]


def after(calls: int, function: Callable[..., Any], wrong: Callable[..., Any]) -> Any:
    """`function`, but `wrong` from call number `calls` on."""
    numbers = count()
    return lambda *given: (function if next(numbers) < calls else wrong)(*given)


def fail(*given: Any) -> Any:
    raise Broken("on purpose")


def take_best(logprobs: mx.array) -> mx.array:
    return mx.argmax(logprobs, axis=-1)


ERRORS: dict[str, tuple[str, type[Exception], Callable[[], dict[str, Any]]]] = {
    "processor": ("tree", Broken, lambda: {
        "logits_processors": [after(30, lambda history, logits: logits, fail)]}),
    "sampler": ("nothing", RedrafterError, lambda: {
        "sampler": after(4, take_best, lambda logprobs: take_best(logprobs) + VOCAB)}),
    "on_round": ("tree", Broken, lambda: {"on_round": after(3, lambda *given: None, fail)}),
    "grammar": ("grammar", Stuck, lambda: {"grammar": ToyGrammar(stuck_at=7)}),
    "drafter": ("fails", Broken, lambda: {"on_drafter_failure": None}),
}  # fmt: skip


@pytest.mark.parametrize("name", ERRORS)
def test_an_error_ends_only_its_text(name: str) -> None:
    model = make_model()
    drafts, error, make_options = ERRORS[name]
    kinds = [Kind(5, "rows"), Kind(9, drafts), Kind(60, "nothing"), Kind(2, "tree")]
    texts = [Text(model, kind) for kind in kinds]
    generations = [text.open(**(make_options() if text is texts[1] else {})) for text in texts]
    rounds = decode_together(generations, [0] * 4)
    assert isinstance(rounds[1][-1], error)
    tokens = generations[1].output.tokens
    assert 1 <= len(tokens) < 16
    assert tokens == texts[1].plain[: len(tokens)]
    for text in (texts[0], *texts[2:]):
        text.check(2e-3)


@pytest.mark.parametrize("name", ["dense", "hybrid"])
def test_each_round_may_come_from_another_thread(name: str) -> None:
    model = MODELS[name][0]()
    texts = [Text(model, kind) for kind in KINDS[:3]]
    with workers(3) as pools:
        turn = cycle(pools)
        generations = [text.open() for text in texts]
        decode_together(
            generations,
            [0, 0, 1],
            lambda running: next(turn).submit(next_rounds, running).result(),
        )
        for text in texts:
            assert text.generation.output.tokens == text.plain[: text.kind.size]


def test_texts_with_and_without_drafts_share_each_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model()
    texts = [Text(model, Kind(9, drafts)) for drafts in ("nothing", "tree", "nothing")]
    joint = target_module.run_jointly
    sizes: list[int] = []

    def run_jointly(model: nn.Module, parts: Sequence[Any]) -> Any:
        sizes.append(len(parts))
        return joint(model, parts)

    def decode(running: Sequence[Generation]) -> list[Any]:
        with monkeypatch.context() as patch:
            patch.setattr(target_module, "run", fail)
            patch.setattr(target_module, "run_jointly", run_jointly)
            return next_rounds(running)

    decode_together([text.open() for text in texts], [0, 0, 0], decode)
    assert sizes.count(3) == texts[1].generation.output.stats.rounds
    assert set(sizes) == {2, 3}


@pytest.mark.parametrize("name", ["dense", "dense, bfloat16", "dense, 4 bits", "hybrid"])
def test_exact_texts_have_the_bits_of_texts_alone(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the first class of row counts and in the last, whose forwards are padded."""
    model = make_family("qwen3_next" if name == "hybrid" else "qwen3")
    if "bfloat16" in name:
        model.set_dtype(mx.bfloat16)
    if "4 bits" in name:
        nn.quantize(model, group_size=32, bits=4)
    pair = Pair(model)
    classes = recipe.get_cache_row_classes(pair, Options())
    for row_counts in {classes[0], classes[-1]}:
        monkeypatch.setattr(recipe, "choose_row_counts", lambda *given, own=row_counts: own)
        generations = []
        expected = []
        for number, length in enumerate((1, 9, 70)):
            prompt = make_prompt(length)
            options = {"temp": 0.4 * number, "seed": number, "exact": True}
            plain = run(model, prompt, max_tokens=24, **options)
            scripted = partial(ScriptedContext, prompt + ids(plain))
            monkeypatch.setattr(recipe, "ContextSource", scripted)
            options |= {"max_tokens": 16, "plan": (1, 1), "context": number > 0}
            generations.append(open_generation(pair, prompt, Options(**options), is_joint=True))
            expected.append([step.logprobs for step in plain[:16]])
        rounds = decode_together(generations, [0, 1, 1])
        for own, alone in zip(rounds, expected, strict=True):
            logprobs = [row for each in own for row in each.logprobs][:16]
            assert all(map(mx.array_equal, logprobs, alone)), row_counts
        assert row_counts == (1,) or generations[2].output.stats.accepted
