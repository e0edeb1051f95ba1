"""Texts that share their forwards: each is as if it were decoded alone, errors included."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain, count, cycle, repeat
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.sample_utils import make_logits_processors

from helpers.families import make_family
from helpers.grammars import Stuck, ToyGrammar, mask_history
from helpers.sessions import make_drafter
from helpers.threads import workers
from helpers.toys import (
    VOCAB,
    Broken,
    CachingDrafter,
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
from mlx_redrafter.drafters.protocol import StepwiseSource
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
    """A text: tokens of its prompt, what drafts, its tokens, and the round in which it joins.

    "rows" is a drafter with a row per position.
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
    Kind(40, "tree, context", 12, 3, PENALTY | {"temp": 0.8, "seed": 1}),
    Kind(7, "tree fails", 16, 2),
    Kind(1, "rows", 9, 5),
    Kind(5, "grammar, context", 15),
)


EXACT = ((3, "rows"), (40, "rows", 12, 1, SAMPLED), (9, "nothing"))


class Text:
    """A text, with plain decoding's tokens and cache. `more` replaces options, or the grammar."""

    def __init__(self, model: nn.Module, kind: Kind, base: Any = None, **more: Any) -> None:
        options = {"prefill_step_size": 70} | kind.options | (base or {})
        prompt = (3 * make_prompt(4 + kind.length // 3))[: kind.length]
        pair = Pair(model)
        grammar = None
        self._cache = make_cache(model, options.get("max_kv_size"))
        plainly = dict(options)
        if "grammar" in kind.drafts:
            grammar = more.pop("grammar", ToyGrammar(pair.vocab_size))
            plainly["logits_processors"] = [mask_history(len(prompt), pair.vocab_size)]
        run(model, prompt, max_tokens=kind.size, prompt_cache=self._cache, **plainly)
        steps, drafter = with_plain(model, prompt, kind.size + MORE, "mixed", width=2, **plainly)
        self.kind = kind
        self.prompt = prompt
        self.plain = ids(steps)
        self.logprobs = [step.logprobs for step in steps]
        self.errors: list[Exception] = []
        if "rows" in kind.drafts:
            self._pair = Pair(model, CachingDrafter(model, prompt + self.plain, 2, share=1.0))
        elif "tree" in kind.drafts:
            self._pair = Pair(model, fail_at(drafter, 12) if "fails" in kind.drafts else drafter)
        else:
            self._pair = pair
        options |= {"on_drafter_failure": self.errors.append, "max_tokens": kind.size} | more
        plan = "off" if kind.drafts == "nothing" else (2, 3)
        self._options = Options(plan=plan, context="context" in kind.drafts or None, **options)
        self._source = self._pair.open_source()
        given = (self._pair, prompt, self._options, self._source)
        self.generation = open_generation(*given, grammar=grammar, is_joint=True)

    def check(self, tolerance: float = 2e-3) -> None:
        """Asserts plain decoding's tokens and cache, and then the tokens of a second turn alone."""
        size = self.kind.size
        output = self.generation.output
        assert output.tokens == self.plain[:size], self.kind
        assert 1 + output.stats.rounds + output.stats.accepted == size
        self.generation.finish(len(self.prompt) + size, output.tokens[-1])
        self.generation.close()
        cache = self.generation.cache
        assert_same_cache(cache, self._cache, tolerance=tolerance)
        if "grammar" in self.kind.drafts:
            return
        history = tuple(self.prompt + output.tokens)
        second = replace(self._options, prompt_cache=cache, history=history, max_tokens=MORE - 1)
        source = None if self.errors else self._source
        steps = list(open_generation(self._pair, self.plain[size : size + 1], second, source))
        assert ids(steps) == self.plain[size + 1 :]
        if "rows" in self.kind.drafts:
            assert steps[-1].stats.accepted, "its rows are those of the text"


def decode_together(
    texts: Sequence[Text], decode: Callable[[Sequence[Generation]], list[Any]] = next_rounds
) -> list[list[Any]]:
    """Decodes texts to their ends; returns the rounds of each, the last of which may be an error.

    Their order changes in each round.
    """
    rounds: list[list[Any]] = [[] for _ in texts]
    for turn in count():
        running = []
        for at, text in enumerate(texts):
            has_failed = any(isinstance(each, Exception) for each in rounds[at])
            is_open = text.generation.output.finish_reason is None and not has_failed
            if is_open and text.kind.joins <= turn:
                running.insert(turn % (1 + len(running)), at)
        if not running:
            break
        decoded = decode([texts[at].generation for at in running])
        for at, each in zip(running, decoded, strict=True):
            rounds[at].append(each)
    return rounds


@pytest.mark.parametrize("name", MODELS)
def test_each_text_is_that_of_the_text_alone(name: str) -> None:
    """Tokens, cache, the drafter's state and statistics, with each round from another thread."""
    make, base = MODELS[name]
    model = make()
    texts = [Text(model, kind, base) for kind in KINDS]
    with workers(2) as pools:
        turn = cycle(pools)
        decode_together(texts, lambda running: next(turn).submit(next_rounds, running).result())
        for text in texts:
            text.check(0.05 if name == "quantized" else 2e-3)
    accepted = [text.generation.output.stats.accepted for text in texts]
    assert min(accepted[at] for at in (0, 1, 4, 6)) > 2
    assert [len(text.errors) for text in texts] == [0, 0, 0, 0, 0, 1, 0, 0]


def fail_after(calls: int) -> Callable[..., Any]:
    """A function that returns its last argument, and raises from call number `calls` on."""
    left = iter(range(calls))

    def call(*given: Any) -> Any:
        if next(left, None) is None:
            raise Broken("on purpose")
        return given[-1]

    return call


@pytest.mark.parametrize("sampling", [{}, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("fails", [False, True])
def test_drafts_of_one_drafter_are_made_together(fails, sampling, monkeypatch) -> None:
    """Drafts of other shapes, too: they are those of each text alone, as after a failure."""
    model = make_model()
    pair = Pair(model, make_drafter(model))
    plans = [(1, 3), (3, 2), (2, 4, 6), (1, 5)]
    propose_together = StepwiseSource.propose_together
    sizes = []

    def count_texts(sources: Sequence[Any], tasks: Sequence[Any]) -> Any:
        sizes.append(len(sources))
        if fails:
            raise Broken
        return propose_together(sources, tasks)

    monkeypatch.setattr(StepwiseSource, "propose_together", count_texts)
    found = []
    for is_joint in (False, True):
        texts = []
        for at, plan in enumerate(plans):
            options = Options(plan=plan, max_tokens=12 + 3 * at, **sampling)
            prompt = make_prompt(5 + 4 * at)
            texts.append(open_generation(pair, prompt, options, pair.open_source(), is_joint=True))
        for text in texts:
            text.next_round()
        while running := [text for text in texts if text.output.finish_reason is None]:
            for group in [running] if is_joint else [[text] for text in running]:
                next_rounds(group)
        found.append([(text.output.tokens, text.output.stats) for text in texts])
    assert found[0] == found[1]
    assert max(sizes) == len(plans)


def test_an_error_ends_only_its_text() -> None:
    model = make_model()
    added = chain([0] * 4, repeat(VOCAB))
    cases: list[tuple[str, type[Exception], dict[str, Any]]] = [
        ("tree", Broken, {"logits_processors": [fail_after(30)]}),
        ("nothing", RedrafterError, {"sampler": lambda x: mx.argmax(x, axis=-1) + next(added)}),
        ("tree", Broken, {"on_round": fail_after(3)}),
        ("grammar", Stuck, {"grammar": ToyGrammar(stuck_at=7)}),
        ("tree fails", Broken, {"on_drafter_failure": None}),
    ]
    wrong = [Text(model, Kind(9, drafts), **more) for drafts, _, more in cases]
    right = [Text(model, kind) for kind in KINDS[:3]]
    rounds = decode_together([*wrong, *right])
    for text, (_, error, _), own in zip(wrong, cases, rounds, strict=False):
        assert isinstance(own[-1], error)
        tokens = text.generation.output.tokens
        assert tokens == text.plain[: len(tokens)]
    for text in right:
        text.check()


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
            patch.setattr(target_module, "run", fail_after(0))
            patch.setattr(target_module, "run_jointly", run_jointly)
            return next_rounds(running)

    decode_together(texts, decode)
    n_prompt_rounds = 2  # a piece, and a step on the last token
    assert sizes.count(3) == n_prompt_rounds + texts[1].generation.output.stats.rounds
    assert set(sizes) == {2, 3}


@pytest.mark.parametrize("name", ["float32", "bfloat16", "4 bits", "hybrid"])
def test_exact_texts_have_the_bits_of_texts_alone(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the first class of row counts and in the last, whose forwards are padded."""
    model = make_family("qwen3_next" if name == "hybrid" else "qwen3")
    if name == "bfloat16":
        model.set_dtype(mx.bfloat16)
    if name == "4 bits":
        is_linear = lambda path, layer: isinstance(layer, nn.Linear)  # noqa: E731
        nn.quantize(model, group_size=32, bits=4, class_predicate=is_linear)
    classes = recipe.get_cache_row_classes(Pair(model), Options())
    for row_counts in {classes[0], classes[-1]}:
        monkeypatch.setattr(recipe, "choose_row_counts", lambda *given, own=row_counts: own)
        texts = [Text(model, Kind(*each), {"exact": True}) for each in EXACT]
        for text, rounds in zip(texts, decode_together(texts), strict=True):
            logprobs = [row for each in rounds for row in each.logprobs]
            assert all(map(mx.array_equal, logprobs, text.logprobs)), (row_counts, text.kind)
        assert row_counts == (1,) or texts[0].generation.output.stats.accepted
