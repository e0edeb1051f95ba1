"""The wired limit belongs to the process: whoever decodes shares it, and the last to go sets it back."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import mlx.core as mx
import pytest
from test_ctrl_c import interrupted
from test_threads import workers
from toys import make_model, make_tokenizer

from mlx_redrafter import stream_generate
from mlx_redrafter.engine import locks
from mlx_redrafter.engine import wired_limit as wiring
from mlx_redrafter.engine.locks import alone
from mlx_redrafter.engine.wired_limit import User, raise_limit, wired

RECOMMENDED = 1000


@pytest.fixture
def limit(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """A wired limit as Metal has it, 7 at first."""
    now = [7]

    def change(value: int) -> int:
        before, now[0] = now[0], value
        return before

    monkeypatch.setattr(wiring, "maybe_set_recommended_wired_limit", lambda: change(RECOMMENDED))
    monkeypatch.setattr(mx, "set_wired_limit", change)
    monkeypatch.setattr(mx, "device_info", lambda *device: {"max_recommended_working_set_size": 10**9})
    yield now
    assert not wiring._users


@pytest.mark.parametrize("first", [0, 1])
def test_threads_that_come_and_go_in_any_order_leave_the_limit_as_it_was(limit: list[int], first: int) -> None:
    model, users = make_model(), [wired(make_model()) for _ in range(2)]
    with workers(2) as pools:
        for pool, user in zip(pools, users, strict=True):
            pool.submit(user.__enter__).result()
            assert limit == [RECOMMENDED]
        for one in (first, 1 - first):
            assert limit == [RECOMMENDED], "the other one needs it"
            pools[one].submit(users[one].__exit__, None, None, None).result()
    assert limit == [7]
    with wired(model):
        assert limit == [RECOMMENDED]
    assert limit == [7]


def test_generations_that_take_turns_share_the_limit_and_stdout_is_nobodys(limit: list[int]) -> None:
    out = sys.stdout

    def begun() -> Any:
        return stream_generate(make_model(), make_tokenizer(), [1, 2, 3], max_tokens=4)

    with closing(begun()) as one, closing(begun()) as other:
        next(one)
        next(other)
        one.close()
        assert limit == [RECOMMENDED] and sys.stdout is out
        next(other)
    assert limit == [7] and sys.stdout is out


def test_a_ctrl_c_while_the_limit_is_raised_sets_it_back(limit: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*of: object) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(wiring, "tree_flatten", interrupted)
    with pytest.raises(KeyboardInterrupt), wired(make_model()):
        pass
    assert limit == [7]


def test_wherever_ctrl_c_comes_the_limit_is_set_back_and_the_lock_is_free(limit: list[int]) -> None:
    model, count = make_model(), 0

    def use() -> None:
        with wired(model):
            pass

    with workers(1) as (other,):
        for place in itertools.count():
            if (came := interrupted(use, place, (wiring.__file__, locks.__file__), instructions=False)) is None:
                break
            count += 1
            assert limit == [7], place
            assert other.submit(lambda: alone(wiring._lock, lambda: True)).result(5), place
            del came
    assert count > 20


def test_a_user_that_is_gone_without_a_word_does_not_hold_the_limit(limit: list[int]) -> None:
    raise_limit(User(), make_model())
    assert limit == [RECOMMENDED]
    with wired(make_model()):
        assert limit == [RECOMMENDED]
    assert limit == [7]


def test_a_large_model_is_warned_of_but_not_on_stdout(
    limit: list[int], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(mx, "device_info", lambda *device: {"max_recommended_working_set_size": 10})
    with pytest.warns(UserWarning, match="close to the 0 MB that this machine recommends at most"), wired(make_model()):
        pass
    assert capsys.readouterr().out == ""
