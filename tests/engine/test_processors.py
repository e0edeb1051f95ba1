"""Logits processors see, on the path that is kept, exactly the histories that plain decoding gives them."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.generate import generate_step as mlx_lm_generate_step
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.sample_utils import make_logits_processors
from toys import ids, make_model, make_prompt, run, scripted, with_plain

from mlx_redrafter.engine import round as rounds

PENALTIES: dict[str, dict[str, Any]] = {
    "repetition": {"repetition_penalty": 1.5},
    "repetition, short": {"repetition_penalty": 2.0, "repetition_context_size": 3},
    "presence": {"presence_penalty": 2.0},
    "frequency": {"frequency_penalty": 3.0, "frequency_context_size": 8},
    "logit bias": {"logit_bias": {3: 5.0, 7: -100.0, 11: 4.0}},
    "all": {"repetition_penalty": 1.2, "presence_penalty": 1.0, "frequency_penalty": 0.5, "logit_bias": {3: 3.0}},
}
BEAMS = [(1, 4), (2, 3), (3, 4)]
History = tuple[int, ...]


class Recorder:
    """A processor that writes down every history, and changes the logits so that a wrong one would matter."""

    def __init__(self) -> None:
        self.histories: list[History] = []

    def __call__(self, history: mx.array, logits: mx.array) -> mx.array:
        assert history.ndim == 1 and logits.shape[0] == 1 and logits.ndim == 2
        seen = tuple(history.tolist())
        self.histories.append(seen)
        return logits + 6 * mx.sin(mx.arange(logits.shape[-1]) * (1 + seen[-1] + 2 * sum(seen[-4:]) + len(seen)))


@pytest.mark.parametrize("sampled", [False, True])
@pytest.mark.parametrize("penalty", PENALTIES)
def test_drafted_tokens_equal_plain_tokens_under_mlx_lms_processors(penalty: str, sampled: bool) -> None:
    model = make_model()
    processors = make_logits_processors(**PENALTIES[penalty])
    options: dict[str, Any] = {"temp": 0.8, "seed": 2} if sampled else {}
    for width, depth in BEAMS:
        prompt = make_prompt(7, seed=width)
        bare = ids(run(model, prompt, max_tokens=24, **options))
        plain, drafter = with_plain(model, prompt, 24, "mixed", width=width, logits_processors=processors, **options)
        beam = {"beam_width": width, "draft_depth": depth, "logits_processors": processors}
        steps = run(model, prompt, drafter, max_tokens=24, **beam, **options)
        assert ids(steps) == ids(plain) != bare, "the processors matter"
        assert steps[-1].stats.accepted > 0
        for mine, theirs in zip(steps, plain, strict=True):
            assert mx.allclose(mine.logprobs, theirs.logprobs, rtol=0, atol=1e-3)
        if not sampled:
            theirs_ = mlx_lm_generate_step(mx.array(prompt), model, max_tokens=24, logits_processors=processors)
            assert [token for token, _ in theirs_] == ids(plain)


@pytest.mark.parametrize("chunk", [1, 3, 2048])
@pytest.mark.parametrize("length", [1, 2, 7])
@pytest.mark.parametrize("shape", BEAMS)
def test_every_history_of_plain_decoding_is_given_and_every_other_one_begins_with_one(
    shape: tuple[int, int], length: int, chunk: int
) -> None:
    (width, depth), count = shape, 16
    model, prompt = make_model(), make_prompt(length)
    theirs, plainly, drafted = (Recorder() for _ in range(3))
    expected = [
        token
        for token, _ in mlx_lm_generate_step(
            mx.array(prompt), model, max_tokens=count, logits_processors=[theirs], prefill_step_size=chunk
        )
    ]
    options = {"max_tokens": count, "prefill_step_size": chunk}
    assert ids(run(model, prompt, logits_processors=[plainly], **options)) == expected
    text = [*prompt, *expected]
    needed = [tuple(text[: length + n]) for n in range(count)]
    assert plainly.histories[:count] == theirs.histories[:count] == needed

    drafter = scripted(model, text, "mixed", width=width, luck=1)
    beam = {"beam_width": width, "draft_depth": depth}
    steps = run(model, prompt, drafter, logits_processors=[drafted], **beam, **options)
    assert ids(steps) == expected and steps[-1].stats.accepted > 0
    assert set(needed) <= set(drafted.histories)
    for history in set(drafted.histories) - set(needed):
        shared = next((n for n, pair in enumerate(zip(history, text, strict=False)) if pair[0] != pair[1]), len(text))
        assert shared >= length and len(history) - shared <= depth, "plain text, and then what was drafted"
    rounds_ = steps[-1].stats.rounds
    assert len(drafted.histories) == 1 + rounds_ * (1 + width * depth), "each node of each round once"


def test_processors_run_in_order_and_each_on_what_the_one_before_gave() -> None:
    model, prompt = make_model(), make_prompt(5)
    halved = make_logits_processors(repetition_penalty=3.0)
    raised = make_logits_processors(logit_bias={5: 8.0, 9: 8.0, 20: 8.0})
    texts = set()
    for processors in (halved + raised, raised + halved):
        plain, drafter = with_plain(model, prompt, 20, "mixed", width=2, logits_processors=processors)
        options = {"beam_width": 2, "draft_depth": 3, "logits_processors": processors}
        assert ids(run(model, prompt, drafter, max_tokens=20, **options)) == ids(plain)
        texts.add(tuple(ids(plain)))
    assert len(texts) == 2


@pytest.mark.parametrize("width", [0, 1, 3])
def test_behind_a_prompt_cache_histories_begin_with_this_prompt_as_in_mlx_lm(width: int) -> None:
    model, turns = make_model(), [make_prompt(6, seed=1), make_prompt(3, seed=2)]
    theirs, ours = Recorder(), Recorder()
    cache, other = make_prompt_cache(model), make_prompt_cache(model)
    text: list[int] = []
    for prompt in turns:
        expected = [
            token
            for token, _ in mlx_lm_generate_step(
                mx.array(prompt), model, max_tokens=8, logits_processors=[theirs], prompt_cache=cache
            )
        ]
        text += [*prompt, *expected]
        drafter = scripted(model, text, "mixed", width=width) if width else None
        options = {"beam_width": width, "draft_depth": 3} if width else {}
        steps = run(model, prompt, drafter, max_tokens=8, logits_processors=[ours], prompt_cache=other, **options)
        assert ids(steps) == expected
    needed = [tuple(text[start:end]) for start, end in ((0, 6), (0, 13), (14, 17), (14, 24))]
    assert set(needed) <= set(theirs.histories) and set(needed) <= set(ours.histories)
    assert {history[:3] for history in ours.histories} == {tuple(turn[:3]) for turn in turns}


def test_histories_without_the_nodes_own_path_give_other_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    model, prompt, count = make_model(), make_prompt(6), 24
    processors = [Recorder()]
    plain, drafter = with_plain(model, prompt, count, "right", width=2, logits_processors=processors)
    options = {"max_tokens": count, "beam_width": 2, "draft_depth": 3, "logits_processors": processors}
    assert ids(run(model, prompt, drafter, **options)) == ids(plain)
    real = rounds.processed

    def processed(processors: Any, history: Any, tree: Any, logits: mx.array, plan: Any) -> mx.array:
        return real(processors, history, tree._replace(tokens=mx.zeros_like(tree.tokens)), logits, plan)

    monkeypatch.setattr(rounds, "processed", processed)
    assert ids(run(model, prompt, drafter, **options)) != ids(plain)
