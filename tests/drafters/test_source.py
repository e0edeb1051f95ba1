"""Stateful drafters: their rows follow the text across rounds, turns and forks."""

import pytest
from mlx_lm.models.cache import make_prompt_cache

from helpers.sessions import FAMILIES, chat_tokenizer, make_model
from helpers.toys import CachingDrafter, CachingSource, ids, make_prompt, run
from helpers.toys import make_model as make_llama
from mlx_redrafter import Session

TURNS = ("abc", "de", "fghij")


def make_pair(family: str, **options) -> tuple[Session, Session, int]:
    """Returns (a plain session after all turns, a session whose drafter knows its text, the beam
    width).
    """
    model = make_model(family)
    width = 2 if family in ("qwen3", "gemma3_text") else 1
    plain = Session(model, chat_tokenizer(), plan="off", **options)
    for turn in TURNS:
        plain.send(turn)
    drafter = CachingDrafter(model, plain.tokens, width, share=1.0)
    return plain, Session(model, chat_tokenizer(), drafter, plan=(width, 3), **options), width


@pytest.mark.parametrize("count", [7, 9])
@pytest.mark.parametrize("family", FAMILIES)
def test_rows_follow_the_text_across_turns(family, count):
    """Turns may end inside a round; forks have their own state."""
    plain, session, _ = make_pair(family, max_tokens=count, prefill_step_size=3)
    for turn in TURNS:
        fork = session.fork()
        answer = session.send(turn)
        # An end token that was drafted counts as the round's own.
        accepted = answer.last.accepted + (answer.finish_reason == "stop")
        # It has a row for every token so far.
        assert accepted >= (answer.last.generation_tokens - 1) / 2
        other = fork.send(turn)
        assert other.tokens == answer.tokens
        assert other.last.accepted == answer.last.accepted
    assert session.tokens == plain.tokens
    assert session.messages == plain.messages


def test_a_turn_that_fails_or_is_cancelled_leaves_no_rows():
    plain, session, _ = make_pair("qwen3", max_tokens=9, prefill_step_size=2)
    session.send(TURNS[0])

    def cancel(done, total):
        if done:
            session.cancel()

    def fail(done, total):
        if done:
            raise ValueError("from the callback")

    assert session.send(TURNS[2], prompt_progress_callback=cancel).finish_reason == "cancelled"
    second = session.send(TURNS[1])
    assert second.last.accepted > 0
    with pytest.raises(ValueError, match="from the callback"):
        session.send("xyz", prompt_progress_callback=fail)
    third = session.send(TURNS[2])
    assert third.last is not None and third.last.accepted > 0, "all tokens are read again"
    assert session.tokens == plain.tokens


def test_positions_never_seen_lower_only_acceptance():
    """As after a batch, or after a prompt prefix that another request prefilled."""
    model = make_llama()
    prompt = make_prompt(9)
    text = [*prompt, *ids(run(model, prompt, max_tokens=60))]
    for holes in (True, False):
        source = CachingDrafter(model, text, 2, holes=holes).open(model)
        own = make_prompt_cache(model)
        run(model, text[:20], max_tokens=0, prompt_cache=own)
        steps = run(
            model,
            text[20:22],
            source,
            max_tokens=20,
            prompt_cache=own,
            history=text[:20],
            plan=(2, 3),
        )
        assert ids(steps) == text[22:42]
        assert (steps[-1].stats.accepted > 3) is holes, "only acceptance suffers"


def test_rejected_rows_are_dropped_in_every_round():
    # Negative control: a source that keeps rejected rows.
    class Forgetful(CachingSource):
        def keep(self, kept):
            super().keep(kept._replace(n_kept=kept.rows(kept.tokens).shape[0]))

    model = make_llama()
    prompt = make_prompt(9)
    plain = run(model, prompt, max_tokens=40)
    drafter = CachingDrafter(model, [*prompt, *ids(plain)], 2)
    good = drafter.open(model)
    bad = Forgetful(drafter)
    counts = []
    for source in (good, bad):
        steps = run(model, prompt, source, max_tokens=32, plan=(2, 3))
        assert ids(steps) == ids(plain[:32])
        counts.append(steps[-1].stats.accepted)
    assert counts[0] > 8 > counts[1]
