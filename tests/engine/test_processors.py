"""Logits processors see, on the accepted path, exactly the histories that plain decoding gives them."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.generate import generate_step as mlx_lm_generate_step
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.sample_utils import make_logits_processors
from toys import assert_same_steps, ids, make_model, make_prompt, run, scripted, with_plain

from mlx_redrafter.engine import round as rounds

BIAS = make_logits_processors(logit_bias={5: 8.0, 9: 8.0, 20: 8.0})
PENALTY = make_logits_processors(repetition_penalty=3.0)
PROCESSORS: dict[str, list[Any]] = {
    "repetition": make_logits_processors(repetition_penalty=1.5),
    "repetition, short": make_logits_processors(repetition_penalty=2.0, repetition_context_size=3),
    "presence": make_logits_processors(presence_penalty=2.0),
    "frequency": make_logits_processors(frequency_penalty=3.0, frequency_context_size=8),
    "logit bias": make_logits_processors(logit_bias={3: 5.0, 7: -100.0, 11: 4.0}),
    "all": make_logits_processors(
        repetition_penalty=1.2, presence_penalty=1.0, frequency_penalty=0.5, logit_bias={3: 3.0}
    ),
    "penalty, then bias": PENALTY + BIAS,
    "bias, then penalty": BIAS + PENALTY,
}
PLANS = [(1, 4), (2, 3), (3, 4)]


class Recorder:
    """A processor that records every history, and changes the logits so that a wrong one would matter."""

    def __init__(self) -> None:
        self.histories: list[tuple[int, ...]] = []

    def __call__(self, history: mx.array, logits: mx.array) -> mx.array:
        assert history.ndim == 1 and logits.shape[0] == 1 and logits.ndim == 2
        seen = tuple(history.tolist())
        self.histories.append(seen)
        return logits + 6 * mx.sin(mx.arange(logits.shape[-1]) * (1 + seen[-1] + 2 * sum(seen[-4:]) + len(seen)))


def decode_with_mlx_lm(prompt: list[int], count: int, **options: Any) -> list[int]:
    return [token for token, _ in mlx_lm_generate_step(mx.array(prompt), make_model(), max_tokens=count, **options)]


@pytest.mark.parametrize("name", PROCESSORS)
def test_mlx_lms_processors_give_the_plain_tokens(name: str) -> None:
    model, processors = make_model(), PROCESSORS[name]
    for (width, depth), options in zip(PLANS, ({}, {"temp": 0.8, "seed": 2}, {}), strict=True):
        prompt = make_prompt(7, seed=width)
        without = ids(run(model, prompt, max_tokens=24, **options))
        more: dict[str, Any] = options | {"logits_processors": processors}
        plain, drafter = with_plain(model, prompt, 24, "mixed", width=width, **more)
        steps = run(model, prompt, drafter, max_tokens=24, plan=(width, depth), **more)
        assert_same_steps(steps, plain)
        assert ids(plain) != without, "the processors matter"
        assert steps[-1].stats.accepted > 0
        if not options:
            assert decode_with_mlx_lm(prompt, 24, logits_processors=processors) == ids(plain)


@pytest.mark.parametrize(("length", "chunk"), [(1, 1), (2, 1), (7, 3), (7, 2048)])
@pytest.mark.parametrize("shape", PLANS, ids=str)
def test_each_node_gets_its_paths_history(shape: tuple[int, int], length: int, chunk: int) -> None:
    (width, depth), count = shape, 16
    model, prompt = make_model(), make_prompt(length)
    theirs, plain, drafted = (Recorder() for _ in range(3))
    expected = decode_with_mlx_lm(prompt, count, logits_processors=[theirs], prefill_step_size=chunk)
    options = {"max_tokens": count, "prefill_step_size": chunk}
    assert ids(run(model, prompt, logits_processors=[plain], **options)) == expected
    text = [*prompt, *expected]
    needed = [tuple(text[: length + n]) for n in range(count)]
    assert plain.histories[:count] == theirs.histories[:count] == needed

    drafter = scripted(model, text, "mixed", width=width, seed=1)
    steps = run(model, prompt, drafter, logits_processors=[drafted], plan=shape, **options)
    assert ids(steps) == expected and steps[-1].stats.accepted > 0
    assert set(needed) <= set(drafted.histories)
    for history in set(drafted.histories) - set(needed):
        shared = next((n for n, pair in enumerate(zip(history, text, strict=False)) if pair[0] != pair[1]), len(text))
        assert shared >= length and len(history) - shared <= depth, "plain text, and then what was drafted"
    assert len(drafted.histories) == 1 + steps[-1].stats.rounds * (1 + width * depth), "each node of each round once"


@pytest.mark.parametrize("width", [0, 1, 3])
def test_histories_begin_with_this_turns_prompt(width: int) -> None:
    model, turns = make_model(), [make_prompt(6, seed=1), make_prompt(3, seed=2)]
    theirs, ours = Recorder(), Recorder()
    cache, other = make_prompt_cache(model), make_prompt_cache(model)
    text: list[int] = []
    for prompt in turns:
        expected = decode_with_mlx_lm(prompt, 8, logits_processors=[theirs], prompt_cache=cache)
        text += [*prompt, *expected]
        drafter = scripted(model, text, "mixed", width=width) if width else None
        options = {"plan": (width, 3)} if width else {}
        steps = run(model, prompt, drafter, max_tokens=8, logits_processors=[ours], prompt_cache=other, **options)
        assert ids(steps) == expected
    needed = [tuple(text[start:end]) for start, end in ((0, 6), (0, 13), (14, 17), (14, 24))]
    assert set(needed) <= set(theirs.histories) and set(needed) <= set(ours.histories)
    assert {history[:3] for history in ours.histories} == {tuple(turn[:3]) for turn in turns}


def test_histories_without_the_drafted_path_give_other_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    # Negative control: the processors see zeros where a node's path is.
    model, prompt = make_model(), make_prompt(6)
    options: dict[str, Any] = {"logits_processors": [Recorder()]}
    plain, drafter = with_plain(model, prompt, 24, "right", width=2, **options)
    assert ids(run(model, prompt, drafter, max_tokens=24, plan=(2, 3), **options)) == ids(plain)
    extend = rounds.extend
    monkeypatch.setattr(rounds, "extend", lambda history, tokens: extend(history, mx.zeros_like(tokens)))
    assert ids(run(model, prompt, drafter, max_tokens=24, plan=(2, 3), **options)) != ids(plain)
