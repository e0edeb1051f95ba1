"""How many prompt tokens are read between two tokens of an answer, and before a first token."""

import asyncio
from collections.abc import Callable
from itertools import groupby
from typing import NamedTuple

import pytest

from helpers.toys import make_model, make_prompt
from helpers.workers import (
    SHARING,
    Asked,
    ask,
    assert_plain,
    collect,
    count,
    count_tokens,
    make_named,
    plain,
    running,
)
from mlx_redrafter.serving.scheduling.request import Request
from mlx_redrafter.serving.scheduling.worker import Worker

PIECE = 16
LONG = [ask(make_prompt(6 * PIECE + 1, seed=seed), 4) for seed in (1, 2)]
SHORT = [ask(make_prompt(6, seed=seed), 3) for seed in (3, 4, 5)]
KINDS = {
    **SHARING,
    "exact": ("llama", {"exact": True}),
    "drafted": ("llama", {"context": True, "draft_depth": 2}),
}


class Forward(NamedTuple):
    """A forward, and how many tokens each request had made before it."""

    size: int
    rows: int
    made: list[int]


Submit = Callable[[Asked], Request]


async def watch(
    worker: Worker,
    model,
    asked: list[Asked],
    act: Callable[[int, Submit], None],
    patch: pytest.MonkeyPatch,
) -> tuple[list[Request], list[Forward]]:
    """Answers requests; the first one without limit is cancelled when the others have ended.

    Args:
        act: called in each forward, with the number of forwards of a whole piece so far, and a
            function that submits another request.
    """
    loop = asyncio.get_running_loop()
    forward = type(model).__call__
    requests = []
    forwards = []

    def submit(more):
        async def enter():
            requests.append(worker.submit(**more))

        asyncio.run_coroutine_threadsafe(enter(), loop).result()
        return requests[-1]

    def watched(self, tokens, *args, **keywords):
        forwards.append(Forward(*tokens.shape, [len(each.output.tokens) for each in requests]))
        act(sum(each.rows == PIECE for each in forwards), submit)
        return forward(self, tokens, *args, **keywords)

    patch.setattr(type(model), "__call__", watched)
    patch.setattr(worker.scheduler, "_max_joint", 1)  # no forward of an answer has 5 rows
    for each in asked:
        requests.append(worker.submit(**each))
        if each["max_tokens"] == -1:
            await anext(requests[0].read_events())
    for request in requests:  # grows
        if request.options.max_tokens < 100:
            await asyncio.wait_for(collect(request), 60)
    requests[0].cancel()
    return requests, forwards


@pytest.mark.parametrize(("kind", "options"), KINDS.values(), ids=KINDS)
def test_short_prompts_are_read_before_long_ones(kind, options, monkeypatch):
    """In no forward with others, and several of them between two tokens of a running answer."""
    model = make_named(kind)
    endless = ask(make_prompt(9), -1)

    def act(n_pieces, submit):
        if n_pieces == 3 and not arrived:
            arrived.extend(submit(each) for each in SHORT)

    arrived = []
    asked = [endless, *LONG]
    with running(model, options=options | {"prefill_step_size": PIECE}) as worker:
        main = watch(worker, model, asked, act, monkeypatch)
        requests, forwards = asyncio.run(main)
        monkeypatch.undo()
        for each, request in zip([*LONG, *SHORT], requests[1:], strict=True):
            assert request.output.tokens == plain(each, model, **options)
        text = requests[0].output.tokens
        assert text == plain(endless | {"max_tokens": len(text)}, model, **options)

    assert all(each.rows <= PIECE and 1 in (each.size, each.rows) for each in forwards)
    waiting = [each for each in forwards if len(each.made) == 6 and 0 in each.made[3:]]
    assert not [each for each in waiting if each.rows == PIECE]
    shorts = [each for each in waiting if each.rows == 5]
    assert [each.made[0] for each in shorts] == [shorts[0].made[0]] * 3
    for _, pause in groupby(forwards, lambda each: each.made[0]):
        assert sum(each.rows for each in pause if each.rows > 4) <= PIECE


@pytest.mark.parametrize("together", [False, True], ids=["alone", "beside others"])
@pytest.mark.parametrize("kind", ["llama", "mamba2", "quantized", "exact"])
def test_a_cancelled_prompt_ends_with_its_piece(kind, together, monkeypatch):
    name, options = KINDS[kind]
    model = make_named(name)
    others = [ask(make_prompt(9), -1), *SHORT] if together else []
    asked = [*others, LONG[0]]
    with running(model, options=options | {"prefill_step_size": PIECE}) as worker:

        def act(n_pieces, submit):
            for each in worker.scheduler.running:
                if n_pieces == 3 and each.n_unread > PIECE:
                    each.cancel()

        requests, forwards = asyncio.run(watch(worker, model, asked, act, monkeypatch))
        assert sum(each.rows == PIECE for each in forwards) == 3
        assert requests[-1].n_prefilled == 3 * PIECE
        assert not requests[-1].output.tokens
        monkeypatch.undo()
        assert_plain(worker, model, LONG[0], **options)
        # What was read before is not read again.
        assert count_tokens(worker, "read") == sum(len(each["prompt"]) for each in asked)
        assert count(worker, "generations", end="cancelled") == 1 + together


def test_short_prompts_do_not_delay_a_long_one_forever(monkeypatch):
    """There is always another short one, and half of the rows that are read are the long one's."""
    model = make_model()

    def act(n_pieces, submit):
        unread = [each for each in worker.scheduler.running if not each.is_read]
        if 0 < n_pieces < 6 and len(unread) + worker.n_queued < 3:
            submit(ask(make_prompt(PIECE, seed=next(seeds)), 1))

    seeds = iter(range(100, 200))
    with running(model, options={"prefill_step_size": PIECE}) as worker:
        requests, forwards = asyncio.run(watch(worker, model, LONG[:1], act, monkeypatch))
        assert len(requests) > 6
        runs = [
            len(list(run))
            for rows, run in groupby(each.rows for each in forwards if each.rows > 1)
            if rows < PIECE
        ]
        assert max(runs[:-1]) == 2
