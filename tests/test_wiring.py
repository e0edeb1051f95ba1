"""The wired limit belongs to the process: whoever decodes shares it, and the last to go sets it back."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import mlx.core as mx
import pytest
from test_threads import workers
from toys import make_model, make_tokenizer

from mlx_redrafter import stream_generate, wiring
from mlx_redrafter.wiring import wired

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


def test_a_large_model_is_warned_of_but_not_on_stdout(
    limit: list[int], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(mx, "device_info", lambda *device: {"max_recommended_working_set_size": 10})
    with pytest.warns(UserWarning, match="close to the 0 MB that this machine recommends at most"), wired(make_model()):
        pass
    assert capsys.readouterr().out == ""
