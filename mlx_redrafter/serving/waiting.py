"""Requests that wait: a queue that is fair to its clients, and whether a client is still there."""

from __future__ import annotations

import select
import socket
from collections import OrderedDict, deque
from collections.abc import Callable
from queue import Queue
from typing import Any

FLOOD = 1 << 20
"""Bytes behind a request that are thrown away at once, while an answer waits."""


class FairQueue(Queue[Any]):
    """One line for each client, served in turn: who asks for much waits for himself only.

    An item is a tuple whose second member has a `client`. Putting never blocks: a full queue raises `queue.Full`.
    """

    def _init(self, maxsize: int) -> None:
        self._lines: OrderedDict[str, deque[Any]] = OrderedDict()

    def _qsize(self) -> int:
        return sum(map(len, self._lines.values()))

    def _put(self, item: Any) -> None:
        self._lines.setdefault(item[1].client, deque()).append(item)

    def _get(self) -> Any:
        client, line = self._lines.popitem(last=False)
        item = line.popleft()
        if line:
            self._lines[client] = line  # behind all others
        return item

    def put(self, item: Any, block: bool = True, timeout: float | None = None) -> None:
        """Adds to the line of the item's client.

        Raises:
            queue.Full: at once, whatever `block` says: mlx-lm's own call would wait.
        """
        super().put(item, block=False)

    def take(self, wanted: Callable[[Any], bool]) -> Any:
        """What is next, if it is wanted; else None: nothing overtakes it."""
        with self.mutex:
            if not self._lines or not wanted(next(iter(self._lines.values()))[0]):
                return None
            item = self._get()
            self.not_full.notify()
            return item

    def remove(self, unwanted: Callable[[Any], bool]) -> list[Any]:
        """Takes out what is unwanted; the rest keeps its order."""
        with self.mutex:
            found = [item for line in self._lines.values() for item in line if unwanted(item)]
            for item in found:
                line = self._lines[item[1].client]
                line.remove(item)
                if not line:
                    del self._lines[item[1].client]
            return found


def left(sock: socket.socket | None) -> bool:
    """Whether the client at the other end has closed its side, or its sending half of it; asked without waiting.

    What it has sent behind its request is thrown away: its end stands behind that, and a connection carries one
    request. Of more than `FLOOD` the rest waits for the next time.

    Not `select`, which knows no file descriptors above 1023, and not MSG_DONTWAIT alone, before which Python waits
    where the socket has a timeout.
    """
    if sock is None:
        return False
    try:
        poll = select.poll()
        poll.register(sock, select.POLLIN | select.POLLHUP | select.POLLERR)
        thrown = 0
        while thrown < FLOOD and poll.poll(0):
            if not (more := sock.recv(1 << 16)):
                return True
            thrown += len(more)
        return False
    except (OSError, ValueError):  # reset, or closed on this side
        return True
