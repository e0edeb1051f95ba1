"""Evaluating a drafter: acceptance rates, counted rounds, and the speed against plain decoding."""

import mlx.core as mx
import numpy as np
import pytest

from helpers.small import small_drafter, small_llama
from mlx_redrafter.decoding.options import Options
from mlx_redrafter.decoding.trials import PromptRuns, decode_prompts
from mlx_redrafter.engine.stats import Stats
from mlx_redrafter.measuring.pair import Pair
from mlx_redrafter.training import evaluation
from mlx_redrafter.training.data import Example
from mlx_redrafter.training.evaluation import (
    SpeedResult,
    compare_speed,
    count_rounds,
    cut_prompt,
    format_results,
    measure_guesses,
)
from mlx_redrafter.training.hidden_states import add_hidden_states
from mlx_redrafter.training.trainer import train_drafter


def test_acceptance_is_measured_per_rank(model, examples):
    drafter = small_drafter(hidden=16, vocab=23, exit_dim=12)
    read = add_hidden_states(model, examples)
    loss, shares = measure_guesses(model.model.embed_tokens, drafter, read, 2, batch_size=4)
    hits = np.zeros((2, 8))
    tried = np.zeros(2)
    for ids, offset, *_ in examples:
        hidden = model.model(mx.array(ids[None]))[0]
        logits = model(mx.array(ids[None]))[0]
        for last in range(max(offset, 2) - 1, len(ids) - 1):
            wanted = int(mx.argmax(logits[last]).item())
            state = None
            for k in (1, 2):
                if last < k:
                    continue
                state = None
                for token in ids[last - k + 1 : last + 1]:
                    state = drafter.read_token(
                        mx.array(int(token)), model.model.embed_tokens, hidden, state, 0
                    )
                guess = drafter.logits(hidden[last - k], state)
                rank = int((guess > guess[wanted]).sum().item())
                tried[k - 1] += 1
                hits[k - 1, rank : rank + 1] += rank < 8
    assert np.allclose(shares, hits / tried[:, None])
    assert loss > 0


@pytest.mark.parametrize("depth", [1, 3])
def test_counted_rounds_match_decoding(depth):
    """Greedy texts: rounds counted on a finished text equal those of decoding it with chains."""
    model = small_llama(vocab=12)
    drafter = small_drafter(vocab=12)
    embedding = model.model.embed_tokens
    (known,) = add_hidden_states(model, [Example(np.arange(40) % 12, 1)])
    train_drafter(
        embedding,
        drafter,
        lambda iteration: [known],
        lambda done: done / 60,
        depth=5,
        learning_rate=4e-3,
    )
    accepted = 0
    for at in range(6):
        prompt = [at, 3, at + 5]
        run = decode_prompts(
            Pair(model, drafter), [prompt], Options(max_tokens=33, plan=(1, depth))
        )
        tokens = np.array([*prompt, *run.tokens[0]], np.int32)
        (example,) = add_hidden_states(model, [Example(tokens, 3)])
        stats = count_rounds(embedding, drafter, example, depth)
        assert stats.rounds == run.stats.rounds
        assert stats.accepted == 32 - stats.rounds
        accepted += run.stats.accepted
    assert 10 < accepted < 6 * 32 * depth / (depth + 1)


def test_each_kind_is_compared_with_plain_decoding():
    pair = Pair(small_llama(), small_drafter())
    options = Options(max_tokens=12, seed=0, plan=(1, 2))
    prompts = [("maths", [1, 2, 3]), ("code", [4, 5, 6]), ("maths", [7, 8, 9])]
    found = compare_speed(pair, prompts, options, set())
    expected = [("code", 1), ("maths", 2), ("all", 3)]
    assert [(result.kind, result.prompts) for result in found] == expected
    assert all(result.same_tokens and result.tokens_per_round >= 1 for result in found)
    lines = format_results(found).splitlines()[1:4]
    assert [tuple(line.split()[:2]) for line in lines] == [(f"{k},", str(n)) for k, n in expected]
    assert compare_speed(pair, prompts, options, set(), lambda done: done == 2)[-1].prompts == 2


def test_what_a_comparison_does_not_show_is_named():
    """A ratio above the tokens per round, and other tokens than plain decoding's."""
    good, busy = (SpeedResult("code", 2, 1.5, ratio, same_tokens=True) for ratio in (1.2, None))
    assert "busy" not in format_results([good])
    assert "NO" not in format_results([good])
    assert "busy: not measured" in format_results([busy, good])
    assert "NO: a token differs" in format_results([good._replace(same_tokens=False)])


def test_the_drafter_is_counted_apart_from_the_context(monkeypatch):
    stats = Stats(rounds=10, accepted=18, context_accepted=16, drafter_rounds=4)

    def decode(*args):
        return PromptRuns(stats, (tuple(range(29)),), 1.0)

    monkeypatch.setattr(evaluation, "decode_prompts", decode)
    *_, result = compare_speed(Pair(small_llama()), [("code", [1])], Options(), set())
    assert result.tokens_per_round == pytest.approx(2.8)
    assert result.drafter_tokens_per_round == pytest.approx(1.5)
    assert "2.80           1.50" in format_results([result])


@pytest.mark.parametrize(("plain", "ratio"), [(1.2, 1.2), (3.0, None)])
def test_no_speed_above_the_tokens_per_round_is_reported(plain, ratio, monkeypatch):
    def decode(pair, prompts, options, ends):
        return PromptRuns(
            Stats(rounds=10, accepted=5),
            (tuple(range(16)),),
            plain if options.plan == "off" else 1.0,
        )

    monkeypatch.setattr(evaluation, "decode_prompts", decode)
    *_, result = compare_speed(Pair(small_llama()), [("code", [1])], Options(), set())
    assert result.tokens_per_round == 1.5
    assert result.against_plain == (ratio and pytest.approx(ratio))


def test_a_prompt_is_the_masked_part_or_the_start_of_a_text():
    ids = np.arange(200)
    examples = [Example(ids, 7, kind="code"), Example(ids, 0), Example(ids[:5], 0)]
    found = [("code", ids[:7].tolist()), ("given", ids[:64].tolist()), ("given", [0, 1])]
    assert [cut_prompt(example) for example in examples] == found
