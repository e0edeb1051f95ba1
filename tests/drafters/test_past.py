"""Drafting from past answers: which match is proposed, its estimated acceptance, and lossless decoding."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from grammars import ToyGrammar, decode_plainly, decode_rounds
from grids import pairs
from toys import VOCAB, assert_same_steps, ids, make_model, make_prompt, make_tokenizer, run, with_plain

from mlx_redrafter.answer_folder import AnswerFolder
from mlx_redrafter.drafters.context import ContextSource
from mlx_redrafter.drafters.past import PRIOR_RATES, PastIndex

PROMPT = make_prompt(9)
SAMPLED = {"temp": 0.9, "top_p": 0.95, "seed": 5}


def make_index(*texts: Sequence[int]) -> PastIndex:
    return PastIndex([np.array(text, np.int32) for text in texts])


def propose(source: ContextSource) -> list[int]:
    forecast = source.forecast(0)
    return source.find(len(forecast.cumulative_acceptance)) if forecast is not None else []


def read(index: PastIndex, text: Sequence[int], decoded: Sequence[int] = ()) -> ContextSource:
    source = ContextSource(index)
    source.read(text)
    source.confirm(decoded)
    return source


@pytest.mark.parametrize("seed", range(10))
def test_the_most_frequent_continuation_is_found(seed: int) -> None:
    """Compared with counting: the most frequent continuation wins, ties go to the latest."""
    generator = random.Random(seed)
    index = make_index(*([generator.randrange(4) for _ in range(generator.randrange(40))] for _ in range(seed)))
    tokens = list(index.tokens)
    for size in (4, 2):
        places: dict[tuple[int, ...], dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
        for end in range(size - 1, len(tokens) - 1):
            *gram, following = tokens[end - size + 1 : end + 2]
            if -1 not in (*gram, following):
                places[tuple(gram)][following].append(end)
        for number in range(4**size):
            gram = [number // 4**place % 4 for place in range(size)]
            found = [(len(ends), ends[-1]) for ends in places[tuple(gram)].values()]
            assert index.find(size, gram) == (max(found)[1] if found else -1)


@pytest.mark.parametrize(
    ("past", "text", "proposed"),
    [
        ([[1, 2, 3, 4, 5, 6, 7]], [9, 1, 2], [3, 4, 5, 6]),  # at most twice the match
        ([[1, 2, 3, 3]], [1, 7, 2, 1], [7, 2]),  # one token matches in the text if past texts match nothing
        ([[1, 2, 3, 3]], [2, 8, 1, 2], [3, 3]),  # a two-token match in a past text comes first
        ([[1, 2, 3, 4, 5]], [9, 2, 3, 4], [5]),  # ends with the past text
        ([[1, 2, 3], [4, 5, 6]], [7, 2, 3], []),  # does not cross into the next text
        ([[1, 2, 3, 3], [1, 2, 3, 3], [1, 2, 4, 4]], [9, 1, 2], [3, 3]),  # the most frequent continuation wins
        ([[1, 2, 3, 3], [1, 2, 4, 4]], [9, 1, 2], [4, 4]),  # ties go to the latest
        ([[8, 7, 1, 2, 5], [1, 2, 4, 4], [1, 2, 4, 4]], [8, 7, 1, 2], [5]),  # the longer match wins
        ([[1, 2, 3, 3]], [1, 2, 5, 5, 9, 1, 2], [5, 5, 9, 1]),  # the text's own match comes first
        ([[1, 2, 3, 3]], [1], []),
        ([], [1, 2, 1, 2], [1, 2, 1, 2]),
    ],
)
def test_proposes_what_followed_in_past_texts(past: list[list[int]], text: list[int], proposed: list[int]) -> None:
    index = make_index(*past)
    assert propose(read(index, text)) == propose(read(index, [], text)) == proposed
    before = ContextSource(index)
    assert before.forecast(0) is None and before.match == 0


def test_past_texts_have_their_own_acceptance_rate() -> None:
    past = [[100 + i, 200 + i, 7] for i in range(30)]
    index, wrong = make_index(*past), [token for i in range(29) for token in (100 + i, 200 + i, 300 + i)]

    def first_rate(source: ContextSource) -> float:
        forecast = source.forecast(0)
        assert forecast is not None and forecast.chance == 1
        return forecast.cumulative_acceptance[0]

    end = [129, 229]
    assert first_rate(read(index, wrong + end)) == pytest.approx(PRIOR_RATES[1]), "prompts do not change the rates"
    assert first_rate(read(index, [], wrong + end)) < 0.1
    own = read(index, [50, 51, 52, 50, 51], [])
    misled = read(index, [50, 51, 52], [*wrong, 50, 51])
    assert first_rate(own) == pytest.approx(first_rate(misled)), "the text's own matches were never wrong"
    forecast = read(make_index([1, 2, 3, 4, 5, 6]), [9, 1, 2]).forecast(2)
    assert (
        forecast is not None and forecast.chance < PRIOR_RATES[1] and len(forecast.cumulative_acceptance) == 2
    )  # ends with the past text


# Decoding with past answers: the correct one, and one with every tenth token wrong.


def keep(folder: Any, prompt: list[int], text: list[int], *, is_right: bool) -> AnswerFolder:
    answers = AnswerFolder(folder, make_tokenizer())
    answers.add(
        prompt, text if is_right else [token if at % 10 else (token + 1) % VOCAB for at, token in enumerate(text)]
    )
    return answers


@pytest.mark.parametrize(("plan", "is_right", "options"), pairs((None, (1, 3), (3, 3)), (True, False), ({}, SAMPLED)))
def test_text_matches_plain_decoding(plan: Any, is_right: bool, options: dict[str, Any], tmp_path: Any) -> None:
    model = make_model()
    plain, drafter = with_plain(model, PROMPT, 60, "mixed", width=3, **options)
    answers = keep(tmp_path, PROMPT, ids(plain), is_right=is_right)
    more = {"context": True, "plan": plan or (1, 1)} | options
    without = run(model, PROMPT, drafter if plan else None, max_tokens=60, **more)
    steps = run(model, PROMPT, drafter if plan else None, max_tokens=60, answers=answers, **more)
    assert_same_steps(steps, plain)
    assert steps[-1].stats.context_accepted > without[-1].stats.context_accepted
    assert steps[-1].stats.context_accepted > 20 or not is_right


@pytest.mark.parametrize("options", [{}, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("is_right", [True, False])
def test_text_with_a_grammar_matches_plain_decoding(is_right: bool, options: dict[str, Any], tmp_path: Any) -> None:
    model = make_model()
    plain = decode_plainly(model, PROMPT, max_tokens=60, **options)
    answers = keep(tmp_path, PROMPT, plain, is_right=is_right)
    counts = []
    for more in ({}, {"answers": answers}):
        rounds = decode_rounds(model, PROMPT, None, ToyGrammar(), 60, context=True, plan=(1, 1), **more, **options)
        assert [token for each in rounds for token in each.tokens][:60] == plain
        counts.append(len(rounds))
    assert counts[1] < counts[0]
