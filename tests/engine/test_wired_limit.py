"""The wired memory limit while several threads decode."""

from __future__ import annotations

import threading

import mlx.core as mx
import pytest
from small import small_llama

from mlx_redrafter.engine.wired_limit import wired_limit

RECOMMENDED = 1 << 40


@pytest.fixture
def limits(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """What the limit was set to, in order, on a machine that looks as if it had a GPU; at first it is 7."""
    found = [7]

    def set_wired_limit(limit: int) -> int:
        found.append(limit)
        return found[-2]

    monkeypatch.setattr(mx, "set_wired_limit", set_wired_limit)
    monkeypatch.setattr(mx.metal, "is_available", lambda: True)
    monkeypatch.setattr(mx, "device_info", lambda *args: {"max_recommended_working_set_size": RECOMMENDED})
    return found


def test_last_of_two_threads_restores_the_limit(limits: list[int]) -> None:
    inside, leave = threading.Event(), threading.Event()

    def decode() -> None:
        with wired_limit(small_llama()):
            inside.set()
            leave.wait(timeout=30)

    with wired_limit(small_llama()):
        other = threading.Thread(target=decode)
        other.start()
        assert inside.wait(timeout=30)
        assert limits == [7, RECOMMENDED], "raised once"
    assert limits == [7, RECOMMENDED], "the other thread still decodes"
    leave.set()
    other.join()
    assert limits == [7, RECOMMENDED, 7]


def test_limit_is_restored_after_an_error(limits: list[int]) -> None:
    for _ in range(2):
        with pytest.raises(KeyError), wired_limit(small_llama()):
            raise KeyError
    assert limits == [7, RECOMMENDED, 7, RECOMMENDED, 7]
