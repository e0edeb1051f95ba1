"""Whether a client is still there."""

from __future__ import annotations

import select
import socket

FLOOD = 1 << 20
"""Bytes behind a request that are thrown away at once, while an answer waits."""


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
