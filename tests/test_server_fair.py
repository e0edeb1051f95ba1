"""The queue in front of the engine, and whose requests it takes."""

from __future__ import annotations

import threading
from queue import Empty, Full
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlx_redrafter.serving.fair import FairQueue


def item(client: str, number: int = 0) -> tuple[None, SimpleNamespace, int]:
    """Of a client by the letters of its address and its user."""
    return None, SimpleNamespace(client=(client[:1], client[1:])), number


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
    assert [queue.get()[1].client[0] for _ in range(3)] == ["m", "o", "m"]


def test_one_address_has_one_turn_under_however_many_names() -> None:
    queue = FairQueue()
    for number, client in enumerate(["g1", "g2", "g3", "g1", "m", "g4"]):
        queue.put(item(client, number))
    assert [queue.get()[2] for _ in range(6)] == [0, 4, 1, 2, 5, 3]


def crowded(maxsize: int, *clients: str) -> tuple[FairQueue, list[Any]]:
    """(a queue in which these wait, what has given way since)."""
    gone: list[Any] = []
    queue = FairQueue(maxsize, lambda each: gone.append(each[2]))
    for number, client in enumerate(clients):
        queue.put(item(client, number))
    return queue, gone


@pytest.mark.parametrize(
    ("waiting", "client", "victim"),
    [
        (["g", "g", "g", "g"], "m", 3),
        (["g1", "g2", "g1", "g1"], "m", 3),
        (["g1", "g2", "h", "g2"], "h", 3),
        (["g1", "g2", "h", "h"], "h", None),
        (["h", "h", "g1", "g2"], "m", 3),
        (["g", "g", "m", "m"], "m", None),
        (["g", "m", "n", "o"], "p", None),
        (["g1", "g1", "g1", "g1"], "g2", 3),
        (["g1", "g1", "g2", "g2"], "g2", None),
        (["g1", "g1", "g1", "m"], "g2", 2),
        (["g", "m", "g", "m"], "n", 3),
    ],
)
def test_when_it_is_full_the_longest_line_gives_way_to_a_shorter_one(
    waiting: list[str], client: str, victim: int | None
) -> None:
    queue, gone = crowded(4, *waiting)
    if victim is None:
        with pytest.raises(Full):
            queue.put(item(client, 9))
        assert gone == [] and sorted(queue.get()[2] for _ in range(4)) == [0, 1, 2, 3]
    else:
        queue.put(item(client, 9))
        assert gone == [victim]
        assert sorted(queue.get()[2] for _ in range(4)) == sorted({0, 1, 2, 3, 9} - {victim})
    assert queue.empty()


def test_what_gives_way_may_ask_the_queue_how_long_it_is() -> None:
    lengths: list[int] = []
    queue = FairQueue(2, lambda each: lengths.append(queue.qsize()))
    for client in ("g", "g", "m"):
        queue.put(item(client))
    assert lengths == [2]


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
