"""The queue in front of the engine, which is fair to its clients."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from queue import Full, Queue
from typing import Any

Users = OrderedDict[str, deque[Any]]
"""Who waits at one address, the next one first."""


class FairQueue(Queue[Any]):
    """One line for each address, and in it one for each user there, served in turn: who asks for much waits for himself
    only, under however many names.

    An item is a tuple whose second member has a `client`: (address, user). Putting never blocks. Where the queue is
    full, the last item of the longest line gives way to one of a shorter line.

    Args:
        maxsize: how many may wait; 0 for no limit.
        crowded_out: called with each item that gave way.
    """

    def __init__(self, maxsize: int = 0, crowded_out: Callable[[Any], None] = lambda item: None) -> None:
        super().__init__(maxsize)
        self._crowded_out = crowded_out

    def _init(self, maxsize: int) -> None:
        """`Queue`'s, with lines by address in the order of their turns."""
        self._lines: OrderedDict[str, Users] = OrderedDict()

    def _qsize(self) -> int:
        """How many items wait in all."""
        return sum(map(waiting, self._lines.values()))

    def _put(self, item: Any) -> None:
        """Puts an item at the end of its user's line."""
        address, user = item[1].client
        self._lines.setdefault(address, OrderedDict()).setdefault(user, deque()).append(item)

    def _get(self) -> Any:
        """Takes the next item; its address and its user then stand behind all others."""
        address, users = self._lines.popitem(last=False)
        user, line = users.popitem(last=False)
        item = line.popleft()
        # Behind all others.
        if line:
            users[user] = line
        if users:
            self._lines[address] = users
        return item

    def _items(self) -> Iterator[Any]:
        """All that wait."""
        return (item for users in self._lines.values() for line in users.values() for item in line)

    def _drop(self, item: Any) -> None:
        """Takes an item out."""
        address, user = item[1].client
        users = self._lines[address]
        users[user].remove(item)
        if not users[user]:
            del users[user]
        if not users:
            del self._lines[address]

    def _victim(self, item: Any) -> Any:
        """What gives way to an item: the last of the longest line, and of equals of the one whose turn is last; None
        where the item's own would be as long."""
        address, user = item[1].client
        own = self._lines.get(address, OrderedDict())
        longest = max(reversed(self._lines.values()), key=waiting)
        if waiting(own) + 1 < waiting(longest):
            return max(reversed(longest.values()), key=len)[-1]
        if own and len(own.get(user, ())) + 1 < len(line := max(reversed(own.values()), key=len)):
            return line[-1]
        return None

    def put(self, item: Any, block: bool = True, timeout: float | None = None) -> None:
        """Adds to the line of the item's client.

        Raises:
            queue.Full: at once, whatever `block` says: mlx-lm's own call would wait.
        """
        victim = None
        with self.mutex:
            if 0 < self.maxsize <= self._qsize():
                if (victim := self._victim(item)) is None:
                    raise Full
                self._drop(victim)
            self._put(item)
            self.unfinished_tasks += 1
            self.not_empty.notify()
        if victim is not None:
            self._crowded_out(victim)

    def take(self, wanted: Callable[[Any], bool]) -> Any:
        """What is next, if it is wanted; else None: nothing overtakes it."""
        with self.mutex:
            if not self._lines or not wanted(self._next()):
                return None
            item = self._get()
            self.not_full.notify()
            return item

    def _next(self) -> Any:
        """What `_get` would give."""
        users = next(iter(self._lines.values()))
        return next(iter(users.values()))[0]

    def remove(self, unwanted: Callable[[Any], bool]) -> list[Any]:
        """Takes out what is unwanted; the rest keeps its order."""
        with self.mutex:
            found = [item for item in self._items() if unwanted(item)]
            for item in found:
                self._drop(item)
            return found


def waiting(users: Users) -> int:
    """How many items wait at one address."""
    return sum(map(len, users.values()))
