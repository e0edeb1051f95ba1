"""If a drafter fails, decoding continues with the context."""

from collections.abc import Iterable

import pytest

from helpers.cost_curves import make_costs
from helpers.grids import pairs
from helpers.small import small_drafter
from helpers.toys import Broken, fail_at, make_model, make_prompt, make_tokenizer
from mlx_redrafter import GenerationResponse, Session, stream_generate
from mlx_redrafter.decoding import recipe
from mlx_redrafter.drafters.protocol import StepwiseSource
from mlx_redrafter.measuring.pair import Pair

VOCAB = 8  # few, so that the text repeats itself
PROMPT = make_prompt(7, vocab=VOCAB, seed=4)
PLANS = {
    "auto": {},
    "auto, no context": {"context": False},
    "tree": {"plan": (3, 3), "context": True},
}


def failing_drafter(calls: int):
    """A drafter that raises from call number `calls` on."""
    return fail_at(small_drafter(hidden=64, vocab=VOCAB), calls)


def stream(**options) -> list[GenerationResponse]:
    model = make_model(vocab=VOCAB)
    tokenizer = make_tokenizer(vocab=VOCAB)
    return list(stream_generate(model, tokenizer, PROMPT, max_tokens=60, seed=5, **options))


def tokens(responses: Iterable[GenerationResponse]) -> list[int]:
    return [each.token for each in responses]


@pytest.fixture
def cheap_rounds(monkeypatch):
    """Makes auto draft at once, whatever the machine's speed."""
    monkeypatch.setattr(Pair, "get_or_measure_costs", lambda pair, **how: make_costs())


@pytest.mark.parametrize(("calls", "plan", "temp"), pairs((0, 1, 9), PLANS, (0.0, 0.8)))
def test_the_context_continues_drafting(calls, plan, temp, cheap_rounds):
    options = PLANS[plan] | {"temp": temp}
    errors = []
    found = stream(drafter=failing_drafter(calls), on_drafter_failure=errors.append, **options)
    assert tokens(found) == tokens(stream(plan="off", temp=temp))
    assert [str(error) for error in errors] == [f"call {calls}"], "reported once"
    assert any(each.draft_source == "context" for each in found[-30:]) is options.get(
        "context", True
    )
    with pytest.raises(Broken):
        stream(drafter=failing_drafter(calls), **options)


def test_a_failure_while_measuring_does_not_affect_the_text():
    errors = []
    found = stream(drafter=failing_drafter(0), on_drafter_failure=errors.append)
    assert tokens(found) == tokens(stream(plan="off"))
    assert [str(error) for error in errors] == ["call 0"]
    assert found[-1].context_accepted > 0
    with pytest.raises(Broken):
        stream(drafter=failing_drafter(0))


@pytest.mark.parametrize("plan", ["auto", "tree"])
def test_a_session_continues(plan, cheap_rounds):
    """The failing turn and all later ones, and copies, without the drafter."""
    errors = []
    model = make_model(vocab=VOCAB)
    tokenizer = make_tokenizer(vocab=VOCAB)
    options = {"max_tokens": 40, "seed": 5, "temp": 0.8}
    failing = Session(
        model,
        tokenizer,
        failing_drafter(5),
        on_drafter_failure=errors.append,
        **options,
        **PLANS[plan],
    )
    plain = Session(model, tokenizer, plan="off", **options)
    for turn in ("abcabc", "cab"):
        assert failing.send(turn).tokens == plain.send(turn).tokens
    assert failing.fork().send("b").tokens == plain.send("b").tokens
    assert [str(error) for error in errors] == ["call 5"], "reported once"


@pytest.mark.parametrize("calls", [0, 1, 5])
def test_an_unreadable_state_is_a_drafter_failure(calls):
    class Failing(StepwiseSource):
        @property
        def arrays(self):
            if next(left, None) is None:
                raise Broken(f"state {calls}")
            return super().arrays

    left = iter(range(calls))
    errors = []
    source = Failing(small_drafter(hidden=64, vocab=VOCAB), make_model(vocab=VOCAB))
    found = stream(drafter=source, plan=(1, 4), on_drafter_failure=errors.append)
    assert tokens(found) == tokens(stream(plan="off"))
    assert [str(error) for error in errors] == [f"state {calls}"]


def test_exact_turns_keep_their_row_counts(monkeypatch):
    """They are those of `plan="off"` with the same drafter, before and after it has failed."""
    classes = ((1,), (2, 3, 4))
    monkeypatch.setattr(Pair, "get_row_classes", lambda *args, **how: classes)
    monkeypatch.setattr(Pair, "get_or_measure_costs", lambda *args, **how: make_costs())
    monkeypatch.setattr(recipe, "choose_fastest_class", lambda *args: classes[1])
    errors = []
    session = Session(
        make_model(vocab=VOCAB),
        make_tokenizer(vocab=VOCAB),
        failing_drafter(3),
        on_drafter_failure=errors.append,
        exact=True,
        plan=(1, 2),
        max_tokens=12,
    )
    for text in ("ab", "c", "d"):
        last = session.send(text).last
        assert last.row_counts == classes[1]
    assert [str(error) for error in errors] == ["call 3"]
    assert session.fork().send("e").last.row_counts == classes[1]
