"""Evaluating a drafter: acceptance rates, and draft shapes compared with plain decoding."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from small import small_drafter, small_llama

from mlx_redrafter.drafters.recurrent import DrafterArgs
from mlx_redrafter.options import Options
from mlx_redrafter.pair import Pair
from mlx_redrafter.training import evaluation
from mlx_redrafter.training.data import Text, collate
from mlx_redrafter.training.evaluation import (
    COMPARISONS,
    ShapeResult,
    add_results,
    compare_shapes,
    count_rounds,
    count_texts,
    find_accepted,
    format_table,
    make_prompts,
    measure_guesses,
)
from mlx_redrafter.training.hidden_states import add_hidden_states
from mlx_redrafter.training.settings import TrainingArgs
from mlx_redrafter.training.trainer import train_drafter
from mlx_redrafter.trials import PromptRuns, decode_prompts


def test_acceptance_is_measured_per_rank(model: Any, texts: list[Text]) -> None:
    drafter = small_drafter(hidden=16, vocab=23, exit_dim=12)
    read = add_hidden_states(model, texts)
    settings = TrainingArgs(draft_depth=2, batch_size=4)
    loss, shares = measure_guesses(model.model.embed_tokens, drafter, read, settings)
    hits, tried = np.zeros((2, 8)), np.zeros(2)
    for ids, offset, *_ in texts:
        hidden, logits = model.model(mx.array(ids[None]))[0], model(mx.array(ids[None]))[0]
        for last in range(max(offset, 2) - 1, len(ids) - 1):
            wanted, state = int(mx.argmax(logits[last]).item()), None
            for k in (1, 2):
                if last < k:
                    continue
                state = None
                for token in ids[last - k + 1 : last + 1]:
                    state = drafter.advance(model.model.embed_tokens(mx.array(int(token))), state)
                guess = drafter.logits(hidden[last - k], state)
                rank = int((guess > guess[wanted]).sum().item())
                tried[k - 1] += 1
                hits[k - 1, rank : rank + 1] += rank < 8
    assert np.allclose(shares, hits / tried[:, None]) and loss > 0


@pytest.mark.parametrize("depth", [1, 3])
def test_counted_rounds_match_decoding(depth: int) -> None:
    """Greedy texts: rounds counted on a finished text equal those of decoding it with chains."""
    model, drafter = small_llama(vocab=12), small_drafter(vocab=12)
    embedding, (known,) = model.model.embed_tokens, add_hidden_states(model, [Text(np.arange(40) % 12, 1)])
    train_drafter(embedding, drafter, lambda at: collate([known]), TrainingArgs(iters=60))
    args, accepted = TrainingArgs(draft_depth=depth), 0
    for at in range(6):
        prompt = [at, 3, at + 5]
        run = decode_prompts(Pair(model, drafter), [prompt], Options(max_tokens=33, plan=(1, depth)))
        (text,) = add_hidden_states(model, [Text(np.array([*prompt, *run.texts[0]], np.int32), 3)])
        found = find_accepted(embedding, drafter, text, args)
        assert count_rounds(text, found) == run.stats.rounds
        assert count_rounds(text, 0 * found) == 32, "a round for each token"
        accepted += run.stats.accepted
        (stats,) = count_texts(embedding, drafter, [text], args)
        assert stats.tokens_per_round == pytest.approx(32 / run.stats.rounds)
    assert accepted > 10


def test_shapes_are_compared_with_plain_decoding(monkeypatch: pytest.MonkeyPatch) -> None:
    model, drafter, options = small_llama(), small_drafter(), Options(max_tokens=12, seed=0)
    prompts, shapes = [[1, 2, 3], [4, 5, 6]], [(1, 2), (2, 3)]
    found = compare_shapes(model, drafter, prompts, shapes, options, set())
    assert [row[:3] for row in found] == [(1, 2, 3), (2, 3, 7)]
    assert all(row.same_tokens and row.against_plain > 0 and row.tokens_per_round >= 1 for row in found)
    *lines, noise = format_table(found).splitlines()
    assert [line.split()[:3] for line in lines[1:]] == [["1", "2", "3"], ["2", "3", "7"]] and "prompts, 2: too" in noise
    one, two = (compare_shapes(model, drafter, [each], shapes[:1], options, set())[0] for each in prompts)
    assert one.tokens_per_round_error is None
    error = abs(one.tokens_per_round - two.tokens_per_round) / 2
    assert found[0].tokens_per_round_error == pytest.approx(error) and f"±{error:.2f}" in lines[1]
    monkeypatch.setattr(evaluation, "check_draftable", lambda model, tree: "no trees" if tree else None)
    assert [row[:3] for row in compare_shapes(model, drafter, prompts, shapes, options, set())] == [(1, 2, 3)]


@pytest.mark.parametrize("disturbed", [0, 1, 9])
def test_disturbed_comparisons_are_repeated(disturbed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A round takes 1.5 s and a plain step 1 s, or 9 s in the first comparisons."""
    model, drafter, options, compared = small_llama(), small_drafter(), Options(max_tokens=12, seed=0), list[int]()

    def decode(pair: Pair, prompts: list[list[int]], options: Options, ends: set[int]) -> PromptRuns:
        run = decode_prompts(pair, prompts, options, ends)
        if options.plan != "off":
            return run._replace(seconds=1.5 * run.stats.rounds)
        compared.append(1)
        return run._replace(seconds=(9.0 if len(compared) <= disturbed else 1.0) * run.stats.rounds)

    monkeypatch.setattr(evaluation, "decode_prompts", decode)
    (row,) = compare_shapes(model, drafter, [[1, 2, 3]], [(1, 2)], options, set())
    assert len(compared) == min(disturbed + 1, COMPARISONS)
    if disturbed < COMPARISONS:
        assert row.against_plain == pytest.approx(row.tokens_per_round / 1.5) and "busy" not in format_table([row])
    else:
        assert row.against_plain is None and " busy " in format_table([row]) and "not measured" in format_table([row])


def test_the_fastest_chain_is_the_default() -> None:
    sizes = DrafterArgs(8, 10, 4, 1)
    ratios = {(1, 1): 0.8, (1, 2): 0.9, (1, 3): 0.9, (1, 4): None, (4, 3): 1.5}
    rows = [ShapeResult(*shape, 0, 1.5, (0.5,), 100.0, ratio, True, 8, None, None) for shape, ratio in ratios.items()]
    found = add_results(sizes, "target", [[0.123456]], rows)
    assert (found.draft_depth, found.base_model, found.acceptance) == (2, "target", [[0.1235]])


def test_prompts_are_the_masked_part_or_the_start_of_a_text() -> None:
    ids = np.arange(200)
    texts = [Text(ids, 3), Text(ids, 3), Text(ids, 0), Text(ids[:5], 0), Text(ids, 9)]
    assert [len(prompt) for prompt in make_prompts(texts, 3)] == [3, 64, 2]
