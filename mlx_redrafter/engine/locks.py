"""Locks that a Ctrl-C leaves free."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, TypeVar, cast

T = TypeVar("T")


def alone(lock: threading.RLock, call: Callable[[], T]) -> T:
    """What `call` returns; one thread at a time has the lock."""
    outermost = not held(lock)
    try:
        with lock:
            return call()
    finally:
        while outermost and held(lock):  # a Ctrl-C came between the call and the release
            lock.release()


def held(lock: threading.RLock) -> bool:
    """Whether this thread has it; `threading.Condition` asks its lock in the same way."""
    return bool(cast(Any, lock)._is_owned())
