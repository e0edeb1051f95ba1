"""The queue in front of the engine, and how a client that has gone is noticed."""

from __future__ import annotations

import socket
import threading
import time
from queue import Empty, Full
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from service import until

from mlx_redrafter.serving.waiting import FairQueue, left


def item(client: str, number: int = 0) -> tuple[None, SimpleNamespace, int]:
    return None, SimpleNamespace(client=client), number


@given(st.lists(st.sampled_from("abc"), max_size=30))
def test_clients_take_turns_and_each_ones_requests_keep_their_order(clients: str) -> None:
    queue = FairQueue()
    for number, client in enumerate(clients):
        queue.put(item(client, number))
    served = [queue.get_nowait() for _ in clients]
    assert sorted(number for _, _, number in served) == list(range(len(clients)))
    for at, (_, job, number) in enumerate(served):
        # Nobody is served a second time while another one who waits was not served since.
        behind = served[at + 1 :]
        assert all(later > number for _, other, later in behind if other.client == job.client)
        again = next((i for i, (_, other, _) in enumerate(behind) if other.client == job.client), None)
        if again is not None:
            assert {other.client for _, other, _ in behind} == {other.client for _, other, _ in behind[: again + 1]}


def test_fifty_requests_of_one_client_do_not_delay_the_one_of_another() -> None:
    queue = FairQueue()
    for number in range(50):
        queue.put(item("many", number))
    queue.put(item("one"))
    assert [queue.get()[1].client for _ in range(3)] == ["many", "one", "many"]


def test_a_full_queue_refuses_at_once_though_it_is_asked_to_wait() -> None:
    queue = FairQueue(2)
    queue.put(item("a"))
    queue.put(item("b"))
    with pytest.raises(Full):
        queue.put(item("a"), block=True)
    queue.get()
    queue.put(item("a"))
    assert queue.qsize() == 2


def test_only_what_is_next_can_be_taken_and_only_if_it_is_wanted() -> None:
    queue = FairQueue()
    assert queue.take(lambda each: True) is None
    queue.put(item("a", 1))
    queue.put(item("b", 2))
    assert queue.take(lambda each: each[2] == 2) is None and queue.qsize() == 2
    assert queue.take(lambda each: each[2] == 1)[2] == 1
    assert queue.get()[2] == 2
    with pytest.raises(Empty):
        queue.get_nowait()


def test_what_is_unwanted_can_be_taken_out_and_the_rest_keeps_its_order() -> None:
    queue = FairQueue(6)
    for number, client in enumerate("aabbca"):
        queue.put(item(client, number))
    assert sorted(number for _, _, number in queue.remove(lambda each: each[2] in (0, 4))) == [0, 4]
    assert [queue.get()[2] for _ in range(queue.qsize())] == [1, 2, 5, 3]
    assert queue.remove(lambda each: True) == [] and not queue.full()


def test_a_waiting_thread_gets_what_is_put() -> None:
    queue = FairQueue()
    timer = threading.Timer(0.05, lambda: queue.put(item("a", 7)))
    timer.start()
    assert queue.get(timeout=5)[2] == 7
    timer.join()


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
