"""A lock for tqdm's progress bars that starts no extra process on macOS."""

from __future__ import annotations

import threading
from functools import cached_property
from typing import Any

from tqdm import tqdm


class BarLock:
    """A thread lock. Its process lock, `mp_lock`, is created on first use.

    tqdm's own lock creates both with the first bar. If processes are spawned, as on macOS, a process lock starts a
    resource-tracker process.
    """

    def __init__(self) -> None:
        self.th_lock = threading.RLock()
        self.acquire, self.release = self.th_lock.acquire, self.th_lock.release

    @cached_property
    def mp_lock(self) -> Any:
        """The lock that `tqdm.contrib.concurrent.process_map` passes to its workers."""
        from multiprocessing import RLock

        return RLock()

    def __enter__(self) -> None:
        self.acquire()

    def __exit__(self, *error: object) -> None:
        self.release()


def set_bar_lock() -> None:
    """Gives tqdm's bars a `BarLock`, unless they already have a lock."""
    if not hasattr(tqdm, "_lock"):
        tqdm.set_lock(BarLock())
