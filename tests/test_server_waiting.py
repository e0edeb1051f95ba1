"""How a client that has gone is noticed."""

from __future__ import annotations

import socket
import threading
import time
from typing import Any

import pytest
from service import until

from mlx_redrafter.serving.waiting import left


def test_a_client_is_gone_when_its_side_is_closed_and_not_before() -> None:
    here, there = socket.socketpair()
    with here, there:
        here.settimeout(60)
        started = time.perf_counter()
        assert not left(here)
        there.send(b"more")
        assert not left(here)
        assert not left(here)
        there.close()
        assert left(here)
        assert time.perf_counter() - started < 10
    assert left(here)  # closed on this side
    assert not left(None)


@pytest.mark.parametrize("much", [2, 3 << 16])
def test_a_client_that_sends_more_and_goes_is_gone(much: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mlx_redrafter.serving.waiting.FLOOD", 1 << 16)
    here, there = socket.socketpair()
    with here, there:
        there.settimeout(20)
        sender = threading.Thread(target=there.sendall, args=(b"\n" * much,))
        sender.start()
        while sender.is_alive():  # what is sent fits into no buffer: looking makes room for it
            assert not left(here)
        there.close()
        until(lambda: left(here))


def test_a_client_that_never_stops_sending_keeps_nobody_from_looking_away() -> None:
    class Endless:
        taken = 0

        def recv(self, size: int) -> bytes:
            self.taken += size
            return b"x" * size

        def fileno(self) -> int:
            return here.fileno()

    here, there = socket.socketpair()
    with here, there:
        there.send(b"x")  # so that there is always something to read
        endless: Any = Endless()
        assert not left(endless) and 0 < endless.taken <= 2 << 20
